"""Tests of models of pixels: iGPT. Oracles are transformers' ImageGPT, and the definition of a likelihood."""

import json
import math

import numpy as np
import pytest
import torch
from budget import telling
from interpreter import interpreting
from torch import Tensor, nn
from transformers import ImageGPTConfig, ImageGPTForCausalImageModeling

from fastvit_triton import create_model, load_model, load_weights, save_weights
from fastvit_triton.checkpoints import WeightsError
from fastvit_triton.checkpoints.reading import read
from fastvit_triton.kernels.plan import forcing
from fastvit_triton.models.igpt import colour_clusters, nearest
from fastvit_triton.models.weights import publish
from fastvit_triton.train.fewshot import extract_features

pytestmark = pytest.mark.fast

ROUNDINGS = 84  # sums in another order, as in test_models.py
EPS64 = torch.finfo(torch.float64).eps
SMALL = dict(img_size=(4, 6), n_colors=27, embed_dim=24, depth=3, num_heads=3)


def distance(a: Tensor, b: Tensor) -> float:
    """‖a − b‖ / ‖b‖."""
    return float((a - b).detach().norm() / telling(b).detach().norm())


def randomized(model: nn.Module) -> nn.Module:
    """The model in float64 and evaluation mode, with random parameters."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.4)
    return model.double().eval()


def igpt(**options: object) -> nn.Module:
    """A small iGPT with random weights."""
    return randomized(create_model("igpt_small", **SMALL | options))


def oracle() -> nn.Module:
    """transformers' model of the same sizes."""
    config = ImageGPTConfig(
        vocab_size=28, n_positions=24, n_embd=24, n_layer=3, n_head=3, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return randomized(ImageGPTForCausalImageModeling(config))


def drawn(model: nn.Module, count: int = 2) -> Tensor:
    """Random codes [count, N]."""
    return torch.randint(model.config.n_colors, (count, model.num_positions))


def test_igpt_equals_transformers():
    """Oracle: transformers' logits, of the start and all colours but the last, and all gradients, in float64."""
    theirs, ours = oracle(), igpt()
    report = load_weights(ours, theirs.state_dict())
    assert report.family == "transformers ImageGPT" and not report.dropped
    codes = drawn(ours)
    y = ours(codes)
    want = theirs(torch.cat((torch.full((2, 1), 27), codes[:, :-1]), 1)).logits
    assert distance(y, want) <= ROUNDINGS * EPS64
    weights = torch.randn_like(y)
    (y * weights).sum().backward()
    (want * weights).sum().backward()
    found = {key: p.grad for key, p in ours.named_parameters()}
    theirs_by_name = {key.removeprefix("transformer."): p.grad for key, p in theirs.named_parameters()}
    assert found.keys() == theirs_by_name.keys()
    for key, gradient in found.items():
        wanted = theirs_by_name[key].mT if key.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) else None
        wanted = theirs_by_name[key] if wanted is None else wanted
        assert distance(gradient, wanted) <= ROUNDINGS * EPS64, key


def test_layouts_of_igpt_are_written_and_read(tmp_path):
    """Oracle: transformers' class takes the file strictly; OpenAI's variables, computed by its code's einsums."""
    model = igpt()
    save_weights(model, tmp_path / "hf.safetensors", layout="transformers")
    theirs = oracle()
    theirs.load_state_dict(read(tmp_path / "hf.safetensors", True)[0])
    codes = drawn(model)
    tokens = torch.cat((torch.full((2, 1), 27), codes[:, :-1]), 1)
    assert distance(model(codes), theirs(tokens).logits) <= ROUNDINGS * EPS64
    with pytest.raises(WeightsError, match="bias is not zero"):
        save_weights(model, tmp_path / "openai.safetensors", layout="openai")
    plain = igpt(bias=False)
    save_weights(plain, tmp_path / "openai.safetensors", layout="openai")
    state = read(tmp_path / "openai.safetensors", True)[0]
    assert {key for key in state if "/h" not in key} == {
        f"model/{key}" for key in ("wte", "wpe", "wtet", "sos", "ln_f/g")
    }
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    q = torch.einsum("bsf,hef->bhse", x, state["model/h1/attn/q_proj"])
    attn = plain.h[1].attn
    assert distance(attn.c_attn(x)[..., :24], q.transpose(1, 2).flatten(2)) <= ROUNDINGS * EPS64
    o = torch.einsum("bhse,hef->bsf", q, state["model/h1/attn/c_proj"])
    assert distance(attn.c_proj(q.transpose(1, 2).flatten(2)), o) <= ROUNDINGS * EPS64
    assert distance(plain.h[1].mlp.c_fc(x), x @ state["model/h1/mlp/c_fc/w"]) <= ROUNDINGS * EPS64
    again = igpt()  # with biases, which become zero
    extra = {"model/h0/attn/q_proj/adam_v": torch.zeros(3), "global_step": torch.zeros(())}
    report = load_weights(again, {**state, **extra})
    assert report.family == "OpenAI" and set(report.dropped) == extra.keys()
    assert torch.equal(again(codes), plain(codes))
    by_class = igpt(bias=False, num_classes=4)
    with pytest.raises(WeightsError, match="start for each class"):
        save_weights(by_class, tmp_path / "classes.safetensors", layout="openai")


def test_files_of_older_transformers_have_masks():
    """Oracle: releases before 4.31 stored the causal mask of each block."""
    masks = {
        f"transformer.h.{i}.attn.{key}": torch.ones(1, 1, 24, 24) for i in range(3) for key in ("bias", "masked_bias")
    }
    assert set(load_weights(igpt(), oracle().state_dict() | masks).dropped) == masks.keys()


def test_no_pixel_sees_a_later_one(monkeypatch):
    """Oracle: the gradient of the logits of step n by the embedding of the code of step m is 0 for m ≥ n, else not."""
    model = igpt()
    codes = drawn(model, 1)
    embedded: list[Tensor] = []

    def embed(tokens: Tensor) -> Tensor:
        embedded.append(nn.functional.embedding(tokens, model.wte.weight).detach().requires_grad_())
        return embedded[-1]

    monkeypatch.setattr(model.wte, "forward", embed)
    logits = model(codes)
    for n in range(model.num_positions):
        (gradient,) = torch.autograd.grad(logits[0, n].sum(), embedded[0], retain_graph=True)
        seen = gradient[0].abs().sum(1)  # of the start and the codes of steps 0 … N − 2
        assert bool((seen[: n + 1] > 0).all()) and not bool(seen[n + 1 :].any()), n
    assert distance(logits[:, 0], model((codes + 1) % 27)[:, 0]) == 0  # the first has seen no code at all


@pytest.mark.parametrize("prefix", [0, 1, 9, 24])
def test_cache_equals_full_pass(prefix):
    """Oracle: the logits of one pass over the drawn image; draws are those of these logits."""
    model = igpt(num_classes=3)
    classes = torch.tensor([2, 0])
    given = drawn(model, 1)[:, :prefix] if prefix else None
    seen: list[Tensor] = []
    draw = model.draw
    model.draw = lambda logits, *rest: (seen.append(logits), draw(logits, *rest))[1]
    codes = model.generate(
        2, prefix=given, classes=classes, temperature=0.7, generator=torch.Generator().manual_seed(1)
    )
    assert prefix == 0 or torch.equal(codes[:, :prefix], given.expand(2, -1))
    full = model(codes, classes)
    assert len(seen) == model.num_positions - prefix
    for n, logits in enumerate(seen, prefix):
        assert distance(logits, full[:, n]) <= ROUNDINGS * EPS64
    assert distance(full, model(codes, classes.flip(0))) > 0.01


def test_draws_follow_the_logits():
    """Oracle: probabilities within five standard errors; top_k=1 is the most likely code; temperature sharpens."""
    model = igpt()
    logits = torch.randn(1, 5).expand(20_000, 5)
    for temperature in (1.0, 0.5):
        p = (logits[0] / temperature).softmax(0)
        drawn = model.draw(logits, temperature, None, torch.Generator().manual_seed(0))
        found = drawn.bincount(minlength=5) / len(drawn)
        assert bool(((found - p).abs() <= 5 * (p * (1 - p) / len(drawn)).sqrt()).all())
    assert torch.equal(model.draw(logits[:9], 1.0, 1, None), logits[:9].argmax(1))
    assert set(model.draw(logits, 1.0, 2, None).tolist()) == set(logits[0].topk(2).indices.tolist())


def test_likelihoods_of_all_images_sum_to_one():
    """Oracle: the definition; 3 colours on 1 × 4 pixels are 81 images."""
    model = randomized(create_model("igpt_small", img_size=(1, 4), n_colors=3, embed_dim=8, depth=1, num_heads=2))
    images = torch.cartesian_prod(*[torch.arange(3)] * 4)
    probabilities = (-4 * model.nats(images).detach()).exp()
    assert abs(float(probabilities.sum()) - 1) <= 81 * EPS64
    assert torch.equal(model.bits_per_dim(images), model.nats(images) / math.log(2))


def test_clusters(tmp_path):
    """Oracle: three well separated colours are found; every pixel has the nearest colour; files of both libraries."""
    colours = torch.tensor([[-0.9, 0.5, 0.0], [0.8, 0.8, 0.8], [0.0, -0.7, 0.3]])
    numbers = torch.randint(3, (4, 8, 8))
    images = (colours[numbers] + 0.02 * torch.randn(4, 8, 8, 3)).movedim(-1, 1)
    found = colour_clusters(images, 3, seed=5)
    at = torch.cdist(colours, found).argmin(1)
    assert sorted(at.tolist()) == [0, 1, 2] and float((found[at] - colours).abs().max()) < 0.02
    means = torch.stack([images.movedim(1, -1)[numbers == i].mean(0) for i in range(3)])
    assert distance(found[at], means) <= ROUNDINGS * torch.finfo(torch.float32).eps
    pixels = torch.randn(50, 3)
    assert torch.equal(nearest(pixels, found), torch.cdist(pixels, found).argmin(1))
    model = create_model("igpt_small", **SMALL | dict(n_colors=3))
    np.save(tmp_path / "kmeans_centers.npy", found.numpy())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"clusters": found.tolist()}))
    for name in ("kmeans_centers.npy", "preprocessor_config.json"):
        model.set_clusters(torch.zeros(3, 3))
        model.set_clusters(tmp_path / name)
        assert torch.equal(model.clusters, found)
    codes = drawn(model)
    assert torch.equal(model.encode(model.decode(codes)), codes)
    with pytest.raises(ValueError, match="count is 3, and the images have 1 different pixels; use 1 to that many"):
        colour_clusters(torch.zeros(1, 3, 4, 4), 3)


def test_probe_features_are_those_of_the_middle_block():
    """Oracle: the normalised input of block 1 of 3 of transformers' model, averaged over its tokens (section 2.3)."""
    theirs, ours = oracle(), igpt()
    load_weights(ours, theirs.state_dict())
    codes = drawn(ours)
    tokens = torch.cat((torch.full((2, 1), 27), codes[:, :-1]), 1)
    hidden = theirs(tokens, output_hidden_states=True).hidden_states
    wanted = theirs.transformer.h[1].ln_1(hidden[1]).mean(1)
    assert distance(ours.probe_features(codes), wanted) <= ROUNDINGS * EPS64
    features, targets = extract_features(ours, [(ours.decode(codes), torch.arange(2))], ours.probe_features)
    assert distance(features, wanted) <= ROUNDINGS * EPS64 and targets.tolist() == [0, 1]
    maps = ours.forward_intermediates(codes, [0], intermediates_only=True)
    assert distance(maps[0].flatten(2).mT, hidden[1]) <= ROUNDINGS * EPS64
    backbone = create_model("igpt_small", **SMALL, features_only=True, out_indices=(0, 1))
    assert [y.shape for y in backbone(ours.decode(codes).float())] == [(2, 24, 4, 6)] * 2


def test_folders_of_transformers(tmp_path):
    """Oracle: transformers' model, and the colours of its image processor; its own classes read what we write."""
    from transformers import ImageGPTImageProcessor

    torch.manual_seed(0)
    config = ImageGPTConfig(vocab_size=28, n_positions=16, n_embd=24, n_layer=2, n_head=3)
    theirs = ImageGPTForCausalImageModeling(config).eval()
    colours = torch.rand(27, 3) * 2 - 1
    theirs.save_pretrained(tmp_path / "theirs")
    ImageGPTImageProcessor(clusters=colours.tolist(), size=dict(height=4, width=4)).save_pretrained(tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs")[0].eval()
    assert ours.variant == "igpt_small" and torch.equal(ours.clusters, colours)
    again = create_model(f"local-dir:{tmp_path / 'theirs'}", pretrained=True)
    assert torch.equal(again.clusters, colours) and "clusters" not in again.pretrained_cfg
    save_weights(again, tmp_path / "file.safetensors")
    assert torch.equal(load_model(tmp_path / "file.safetensors")[0].clusters, colours)
    publish.save_pretrained(ours, tmp_path / "ours", layout="transformers")
    found = ImageGPTForCausalImageModeling.from_pretrained(tmp_path / "ours").eval()
    codes = torch.randint(27, (2, 16))
    want = theirs(torch.cat((torch.full((2, 1), 27), codes[:, :-1]), 1)).logits
    assert distance(ours(codes), want) <= ROUNDINGS * torch.finfo(torch.float32).eps
    assert torch.equal(found(torch.cat((torch.full((2, 1), 27), codes[:, :-1]), 1)).logits, want)
    processor = ImageGPTImageProcessor.from_pretrained(tmp_path / "ours")
    image = (ours.decode(codes)[0].movedim(0, -1) + 1) * 127.5
    pixels = image.round().byte().numpy()
    assert (
        processor(pixels, return_tensors="pt", input_data_format="channels_last")["input_ids"][0].tolist()
        == codes[0].tolist()
    )
    (tmp_path / "theirs" / "config.json").write_text(json.dumps({"model_type": "imagegpt", "n_inner": 5}))
    with pytest.raises(WeightsError, match="n_inner is 5; our iGPT has no such models"):
        load_model(tmp_path / "theirs")


def test_kernels_give_the_same():
    """Oracle: the model in float64; kernels in the interpreter, logits and gradients, and without a cache."""
    model = igpt(depth=1)
    codes = drawn(model)
    fused = create_model("igpt_small", **SMALL | dict(depth=1))
    fused.load_state_dict(model.state_dict())
    weights = torch.randn(2, 24, 27)
    (model(codes) * weights).sum().backward()
    with interpreting(), forcing("fused"):
        y = fused(codes)
        (y * weights).sum().backward()
    eps = torch.finfo(torch.float32).eps
    assert distance(y.double(), model(codes)) <= ROUNDINGS * eps
    for (name, ours), theirs in zip(fused.named_parameters(), model.parameters(), strict=True):
        assert distance(ours.grad.double(), theirs.grad) <= ROUNDINGS * eps, name


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda m: m.generate(prefix=torch.zeros(1, 25, dtype=torch.long)), "prefix has 25 positions; .* has 24$"),
        (lambda m: m.generate(0), "count is 0"),
        (lambda m: m.generate(temperature=0.0), "temperature 0.0"),
        (lambda m: m.generate(top_k=0), "top_k 0"),
        (lambda m: m.generate(2, classes=torch.zeros(2, dtype=torch.long)), "create it with num_classes"),
        (lambda m: m(torch.zeros(1, 9, dtype=torch.long)), r"codes have shape \[1, 9\]; this model takes \[B, 24\]"),
        (lambda m: m(torch.zeros(1, 3, 8, 8)), r"shape \[1, 3, 8, 8\]; this model takes \[B, 3, 4, 6\]"),
        (lambda m: m.set_clusters(torch.zeros(2, 3)), r"shape \[2, 3\]; this model takes \[27, 3\]"),
        (lambda m: m.set_clusters(torch.full((27, 3), math.nan)), "not finite"),
        (lambda m: m.set_clusters("no.npy"), "no.npy holds no colours"),
        (lambda m: m.set_clusters("no.json"), "no.json holds no colours"),
        (lambda m: m.reset_classifier(3), "has no classifier"),
        (lambda m: m.probe_features(drawn(m), 3), "block is 3; the model has 3 blocks, so use 0 to 2"),
        (lambda m: create_model("igpt_small", num_heads=7), "embed_dim 512 is not a multiple of num_heads 7"),
        (lambda m: igpt(num_classes=2).nats(drawn(m)), r"give classes, \[B\] integers below 2"),
        (lambda m: igpt(num_classes=2).generate(2, classes=torch.zeros(3)), "one for each of the 2 images"),
    ],
)
def test_wrong_calls_raise_one_sentence(call, words):
    """Oracle: what was given and what would do, on one line."""
    with pytest.raises(ValueError, match=words) as raised:
        call(igpt())
    assert "\n" not in str(raised.value)
