"""Tests of masked pre-training: the autoencoder against transformers, corruption and colours by counting; training."""

import math

import pytest
import torch
from torch import nn
from transformers import ViTMAEConfig, ViTMAEForPreTraining

from fastvit_triton.models import create_model
from fastvit_triton.models.weights import load_weights, save_weights
from fastvit_triton.train import masked
from fastvit_triton.train.data import DIGITS_MEAN, DIGITS_STD, digits
from fastvit_triton.train.data.transform import Transform

CLOSE = torch.testing.assert_close
SHAPE = dict(img_size=32, patch_size=8, num_heads=2, num_classes=0)
SIMPLE = dict(pos_embed="sincos2d", class_token=False, global_pool="avg", fc_norm=False)


def copy_blocks(theirs: nn.Module, ours: nn.Module) -> None:
    """Copies transformers' layers into our blocks, name by name; q, k and v become the packed projection."""
    names = {"layernorm_before": "norm1", "layernorm_after": "norm2", "attention.o_proj": "attn.proj"}
    names |= {"mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}
    for block, layer in zip(ours, theirs, strict=True):
        for old, new in names.items():
            block.get_submodule(new).load_state_dict(layer.get_submodule(old).state_dict())
        parts = [layer.get_submodule(f"attention.{name}_proj") for name in "qkv"]
        with torch.no_grad():
            block.attn.qkv.weight.copy_(torch.cat([part.weight for part in parts]))
            block.attn.qkv.bias.copy_(torch.cat([part.bias for part in parts]))


@pytest.mark.fast
@pytest.mark.parametrize("norm", [True, False])
def test_autoencoder_equals_transformers(norm: bool):
    """Oracle: transformers' ViTMAEForPreTraining with the same weights and noise, in float64: pixels, mask and loss."""
    config = ViTMAEConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8,
        decoder_hidden_size=8, decoder_num_hidden_layers=1, decoder_num_attention_heads=2, decoder_intermediate_size=32,
        layer_norm_eps=1e-6, norm_pix_loss=norm,
    )  # fmt: skip
    theirs = ViTMAEForPreTraining(config).double().eval()
    encoder = create_model("vit_tiny_patch16_224", **SHAPE, embed_dim=16, depth=2)
    decoder = create_model("vit_tiny_patch16_224", **SHAPE, embed_dim=8, depth=1).blocks
    ours = masked.MaskedAutoencoder(encoder, decoder, 8).double()
    for parameter in theirs.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)
    embeddings = theirs.vit.embeddings
    nn.init.normal_(embeddings.position_embeddings)
    with torch.no_grad():
        encoder.cls_token.copy_(embeddings.cls_token)
        encoder.pos_embed.copy_(embeddings.position_embeddings)
        theirs.decoder.decoder_pos_embed[:, 1:] = ours.decoder_pos_embed  # else left empty
        ours.mask_token.copy_(theirs.decoder.mask_token)
    encoder.patch_embed.proj.load_state_dict(embeddings.patch_embeddings.projection.state_dict())
    encoder.norm.load_state_dict(theirs.vit.layernorm.state_dict())
    copy_blocks(theirs.vit.layers, encoder.blocks)
    copy_blocks(theirs.decoder.decoder_layers, decoder)
    for name in ("decoder_embed", "decoder_norm", "decoder_pred"):
        ours.get_submodule(name).load_state_dict(theirs.decoder.get_submodule(name).state_dict())
    images, noise = torch.randn(3, 3, 32, 32).double(), torch.rand(3, 16)
    expected = theirs(images, noise=noise)
    predicted, hidden = ours(images, noise)
    CLOSE(predicted, expected.logits)
    assert torch.equal(hidden, expected.mask.bool()) and hidden.sum(1).tolist() == [12] * 3
    CLOSE(masked.pixel_loss(predicted, images, hidden, (8, 8), norm), expected.loss)


@pytest.mark.fast
def test_decoder_positions():
    """Oracle: the formula at row 2, column 3 of a grid of 3 x 5, D = 8: frequencies 1 and 1/100, columns first."""
    angles = [3, 3 / 100, 2, 2 / 100]
    want = [math.sin(a) for a in angles[:2]] + [math.cos(a) for a in angles[:2]]
    want += [math.sin(a) for a in angles[2:]] + [math.cos(a) for a in angles[2:]]
    CLOSE(masked.sincos_positions((3, 5), 8)[0, 2 * 5 + 3], torch.tensor(want))


@pytest.mark.fast
def test_hidden_patches_do_not_reach_the_encoder():
    """Oracle: the prediction does not change with hidden pixels, but does with visible ones."""
    encoder = create_model("vit_tiny_patch16_224", **SHAPE, embed_dim=16, depth=1, class_token=False, global_pool="avg")
    model = masked.MaskedAutoencoder(encoder, nn.Identity(), 8, ratio=0.5)
    images, noise = torch.randn(1, 3, 32, 32), torch.arange(16.0)[None]  # the upper half stays visible
    first, hidden = model(images, noise)
    assert hidden[0].tolist() == [False] * 8 + [True] * 8
    images[:, :, 16:] = 0
    assert torch.equal(model(images, noise)[0], first)
    images[:, :, :16] = 0
    assert not torch.equal(model(images, noise)[0], first)
    with pytest.raises(ValueError, match=r"ratio is 1\.0; use a number in \(0, 1\)"):
        masked.MaskedAutoencoder(encoder, nn.Identity(), 8, ratio=1.0)
    with pytest.raises(ValueError, match="dim is 6; it must be divisible by 4"):
        masked.MaskedAutoencoder(encoder, nn.Identity(), 6)


@pytest.mark.fast
def test_corruption():
    """Oracle: numbered patches show their treatment: exactly half chosen, 80/10/10 within four standard deviations."""
    B, N = 400, 50
    patches = torch.arange(1.0, N + 1).expand(B, N)[..., None]
    result, chosen = masked.corrupt(patches, torch.zeros(1, 1, 1))
    assert chosen.sum(1).tolist() == [25] * B
    assert torch.equal(result[~chosen], patches[~chosen])
    hidden, same = (result == 0)[..., 0], (result == patches)[..., 0]
    for count, share in ((hidden, 0.8), (chosen & same, 0.1), (chosen & ~same & ~hidden, 0.1)):
        assert abs(count.sum().item() - share * B * 25) < 4 * (B * 25 * share * (1 - share)) ** 0.5
    moved, _ = masked.corrupt(patches[:, :2], torch.zeros(1, 1, 1), ratio=1.0, masked=0.0, swapped=1.0)
    assert torch.equal(moved, patches[:, :2].flip(1)), "with two patches, the replacement is the other patch"
    assert chosen.sum(0).min() > 150, "every position is chosen"


@pytest.mark.fast
def test_mean_colours():
    """Oracle: by hand: levels of 1/8, first channel in the highest bits; white is the last class; the loss of corrupted
    patches alone."""
    pixels = torch.zeros(1, 3, 2, 6)
    pixels[0, :, :, 2:4] = 1.0
    pixels[0, :, 0, 4:] = torch.tensor([0.5, 0.25, 1.0])[:, None]  # averaged with the black row below
    assert masked.mean_colours(pixels, (2, 2)).tolist() == [[0, 511, 2 * 64 + 1 * 8 + 4]]
    assert masked.mean_colours(torch.full((1, 1, 2, 2), 0.3), (2, 2), bits=1).tolist() == [[0]]
    logits, colours, chosen = torch.randn(2, 3, 4), torch.randint(4, (2, 3)), torch.tensor([[True, False, True]] * 2)
    terms = [-logits[b, n].log_softmax(-1)[colours[b, n]] for b in range(2) for n in (0, 2)]
    torch.testing.assert_close(masked.colour_loss(logits, colours, chosen), torch.stack(terms).mean())


@pytest.mark.full
@pytest.mark.parametrize("kind", ["colours", "pixels"])
@pytest.mark.parametrize("options", [{}, SIMPLE], ids=["token", "mean"])
def test_pre_training_learns(kind: str, options: dict, tmp_path):
    """Oracle: the loss of a prediction that ignores the image (the entropy of colours; the variance of pixels); the
    encoder's weights load as an ordinary checkpoint."""
    images = digits("train")[0]
    transform = Transform((8, 8), (DIGITS_MEAN,), (DIGITS_STD,))
    encoder = create_model("vit_digits_patch2_8", embed_dim=32, depth=2, num_heads=2, **options)
    if kind == "colours":
        model = masked.MaskedPatchPrediction(encoder, classes=8)
        shares = masked.mean_colours(images, (2, 2)).flatten().bincount(minlength=8) / (16 * images.shape[0])
        guess = torch.distributions.Categorical(shares).entropy().item()
    else:
        decoder = create_model("vit_digits_patch2_8", embed_dim=16, depth=1, num_heads=2).blocks
        model = masked.MaskedAutoencoder(encoder, decoder, 16, ratio=0.5)
        guess = transform.normalise(images).var().item()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for step in range(150):
        batch = images[torch.randint(images.shape[0], (64,))]
        result, hidden = model(transform.normalise(batch))
        if kind == "colours":
            loss = masked.colour_loss(result, masked.mean_colours(batch, (2, 2)), hidden)
        else:
            loss = masked.pixel_loss(result, transform.normalise(batch), hidden, (2, 2), norm=False)
        optimizer.zero_grad()
        loss.backward()
        if step == 1:
            silent = {n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()}
            assert silent <= {"encoder.head.weight", "encoder.head.bias"}
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-20:]) / 20 < 0.8 * guess
    save_weights(encoder, tmp_path / "encoder.safetensors")
    tuned = create_model("vit_digits_patch2_8", embed_dim=32, depth=2, num_heads=2, num_classes=5, **options)
    load_weights(tuned, tmp_path / "encoder.safetensors")
    assert torch.equal(tuned.blocks[1].mlp.fc1.weight, encoder.blocks[1].mlp.fc1.weight)
