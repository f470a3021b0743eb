"""Tests of checkpoint reading and writing. Oracle: the libraries that write them; all parameters are random."""

import argparse
import re
from collections.abc import Callable

import numpy as np
import pytest
import timm
import torch
import torchvision
import transformers
from agreement import distance
from checkpoints import (
    EPS,
    MODELS,
    OURS,
    SMALL,
    TOLERANCE,
    TRANSFORMERS,
    T,
    assert_agree,
    assert_equal,
    build,
    foreign,
    images,
    jax_arrays,
    randomize,
)
from safetensors.torch import load_file
from timm.models.vision_transformer import _load_weights, checkpoint_filter_fn
from torch import Tensor, nn

from fastvit_triton import create_model, load_model, load_weights, save_weights
from fastvit_triton.checkpoints import WeightsError
from fastvit_triton.models.weights.load import CHECKPOINT_FORMATS

pytestmark = pytest.mark.fast

# Ours


@pytest.mark.parametrize("name", [*MODELS, *OURS])
def test_our_files_rebuild_the_model(name, tmp_path):
    """Oracle: the model itself: names, options and every bit, loaded from the file or from its folder."""
    model = build(name)
    save_weights(model, tmp_path / "model.safetensors", metadata={"classes": "a,b"})
    for path in (tmp_path, tmp_path / "model.safetensors"):
        again, metadata = load_model(path)
        assert_equal(again, model)
        assert (again.variant, again.config, metadata["classes"]) == (name, model.config, "a,b")
    x = images(model)
    with torch.no_grad():
        assert torch.equal(again.eval()(x), model(x))


# timm, and files in its layout


@pytest.mark.parametrize("name", MODELS)
def test_timm(name, tmp_path):
    """Oracle: timm's model of that name: its weights give its logits here, and ours give ours there and load again."""
    options = {**SMALL, **MODELS[name]}
    if "_r_" in name:
        options.pop("patch_size")
    theirs = randomize(timm.create_model(name, **options))
    ours = build(name)
    torch.save({"state_dict": theirs.state_dict(), "epoch": 3}, tmp_path / "timm.pth")
    assert load_weights(ours, tmp_path / "timm.pth").family == "timm (state_dict)"
    x = images(ours)
    with torch.no_grad():
        assert distance(ours(x), theirs(x)) <= TOLERANCE

        randomize(ours)
        save_weights(ours, tmp_path / "ours.safetensors", layout="timm")
        theirs.load_state_dict(load_file(tmp_path / "ours.safetensors"), strict=True)
        assert distance(theirs(x), ours(x)) <= TOLERANCE
    again = build(name)
    load_weights(again, theirs.state_dict())
    assert_equal(again, ours)


def test_timm_files_store_a_fixed_position_table(tmp_path):
    """Oracle: timm's ViT with our sine-cosine table as its learned positions; reading the file drops the table."""
    ours = build("simplevit_tiny_patch16_224", pre_logits=False, patch_embed="linear")
    save_weights(ours, tmp_path / "a.safetensors", layout="timm")
    theirs = timm.models.VisionTransformer(**SMALL, num_classes=7, class_token=False, global_pool="avg", fc_norm=False)
    theirs.load_state_dict(load_file(tmp_path / "a.safetensors"), strict=True)
    assert_agree(ours, theirs.eval())
    again = build("simplevit_tiny_patch16_224", pre_logits=False, patch_embed="linear")
    load_weights(again, tmp_path / "a.safetensors")
    assert_equal(again, ours)
    load_weights(again, {key: tensor.bfloat16() for key, tensor in load_file(tmp_path / "a.safetensors").items()})
    with pytest.raises(WeightsError, match="pos_embed"):
        load_weights(again, load_file(tmp_path / "a.safetensors") | {"pos_embed": torch.randn(1, 16, 48)})


@pytest.mark.parametrize("wrap", ["model", "model_ema", "module", "compiled"])
def test_wrappers(wrap, tmp_path):
    """Oracle: the bare state dict. DeiT's files also hold an argparse.Namespace; averaged weights take precedence."""
    state = build("vit_tiny_patch16_224").state_dict()
    if wrap == "module":
        file = {f"module.{key}": tensor for key, tensor in state.items()}
    elif wrap == "compiled":
        file = {"model": {f"module._orig_mod.{key}": tensor for key, tensor in state.items()}}
    else:
        file = {"args": argparse.Namespace(lr=0.1), "model": {k: t + 1 for k, t in state.items()}, wrap: state}
    torch.save(file, tmp_path / "a.pt")
    model = build("vit_tiny_patch16_224")
    load_weights(model, tmp_path / "a.pt")
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[key])


def test_official_deit3():
    """Oracle: timm's converter for the `gamma_1` names of facebookresearch/deit."""
    theirs = randomize(timm.create_model("deit3_small_patch16_224", **SMALL, num_classes=7))
    official = {re.sub(r"ls(\d)\.gamma", r"gamma_\1", key): t for key, t in theirs.state_dict().items()}
    ours = build("deit3_small_patch16_224")
    load_weights(ours, {"model": official})
    converted = checkpoint_filter_fn({"model": official}, theirs, adapt_layer_scale=True)
    for key, tensor in ours.state_dict().items():
        assert torch.equal(tensor, converted[key])


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("name", ["vit_small_patch14_dinov2", "vit_giant_patch14_reg4_dinov2"])
def test_official_dinov2(name, chunked, tmp_path):
    """Oracle: timm's converter for facebookresearch/dinov2 keys, in timm's model; also chunks, and a teacher's file."""
    theirs = randomize(timm.create_model(name, **SMALL))
    rename = {"fc1": "w12", "fc2": "w3"} if "giant" in name else {}
    official = {}
    for key, tensor in theirs.state_dict().items():
        for ours, their in rename.items():
            key = key.replace(f"mlp.{ours}.", f"mlp.{their}.")
        official[key.replace("reg_token", "register_tokens")] = tensor.clone()
    official["pos_embed"] = torch.randn(1, 17, 48)
    official["mask_token"] = torch.randn(1, 48)
    theirs.load_state_dict(checkpoint_filter_fn(dict(official), theirs))

    if chunked:  # two blocks in two chunks, like the teacher in a training run
        official = {re.sub(r"^blocks\.(\d)\.", r"blocks.\1.\1.", key): tensor for key, tensor in official.items()}
        student = {f"student.backbone.{key}": torch.randn_like(tensor) for key, tensor in official.items()}
        official = student | {f"teacher.backbone.{key}": tensor for key, tensor in official.items()}
        official["teacher.dino_head.mlp.0.weight"] = torch.randn(3)
    torch.save(official, tmp_path / "a.pth")
    ours = build(name)
    report = load_weights(ours, tmp_path / "a.pth")
    assert report.family.startswith("DINOv2") and any("mask_token" in key for key in report.dropped)
    assert_agree(ours, theirs)


def test_what_is_irrelevant_depends_on_the_architecture(monkeypatch):
    """Oracle: a model with a decoder misses no key of it: under a pattern that matches nothing, the key is unknown."""
    model = build(next(iter(MODELS)))
    state = model.state_dict() | {"transformer.decoder.norm.weight": torch.randn(3)}
    assert load_weights(model, state).dropped == ("transformer.decoder.norm.weight",)
    spelling = CHECKPOINT_FORMATS[model.layout]._replace(irrelevant=re.compile(r"(?!)"))
    monkeypatch.setitem(CHECKPOINT_FORMATS, model.layout, spelling)
    with pytest.raises(WeightsError, match=r"it has transformer\.decoder\.norm\.weight, which the model does not have"):
        load_weights(model, state)


def test_official_mae():
    """Oracle: the encoder's tensors; files of facebookresearch/mae also contain mask_token and a decoder."""
    state = build("vit_tiny_patch16_224", num_classes=0).state_dict()
    extra = {key: torch.randn(3) for key in ("mask_token", "decoder_embed.weight", "decoder_blocks.0.norm1.weight")}
    model = build("vit_tiny_patch16_224")
    report = load_weights(model, {"model": state | extra})
    assert report.family == "MAE (model)" and set(report.dropped) == set(extra)
    assert report.reinitialised == ("head.weight", "head.bias")


# transformers

# 5.23 → 4.56, from the state dicts of transformers 4.56.2; the first rule that matches a key applies
OLD_NAMES = [
    (r"^((?:vit|deit)\.|)layers\.(\d+)\.attention\.o_proj\.", r"\1encoder.layer.\2.attention.output.dense."),
    (r"^((?:vit|deit)\.|)layers\.(\d+)\.mlp\.fc1\.", r"\1encoder.layer.\2.intermediate.dense."),
    (r"^((?:vit|deit)\.|)layers\.(\d+)\.mlp\.fc2\.", r"\1encoder.layer.\2.output.dense."),
    (r"^((?:vit|deit)\.|)layers\.(\d+)\.attention\.q_proj\.", r"\1encoder.layer.\2.attention.attention.query."),
    (r"^((?:vit|deit)\.|)layers\.(\d+)\.attention\.k_proj\.", r"\1encoder.layer.\2.attention.attention.key."),
    (r"^((?:vit|deit)\.|)layers\.(\d+)\.attention\.v_proj\.", r"\1encoder.layer.\2.attention.attention.value."),
    (r"^((?:vit|deit)\.|)layers\.(\d+)\.layernorm_", r"\1encoder.layer.\2.layernorm_"),
    (r"(encoder\.layer\.\d+\.attention\.)o_proj\.", r"\1output.dense."),
    (r"(encoder\.layer\.\d+\.attention\.)q_proj\.", r"\1attention.query."),
    (r"(encoder\.layer\.\d+\.attention\.)k_proj\.", r"\1attention.key."),
    (r"(encoder\.layer\.\d+\.attention\.)v_proj\.", r"\1attention.value."),
    (r"mlp\.down_proj\.", "mlp.weights_out."),
    (r"^(embeddings\.(?:patch_embedding|position_embedding|class_embedding)\b)", r"vision_model.\1"),
    (r"^(encoder\.layers\.|pre_layrnorm\.|post_layernorm\.|head\.)", r"vision_model.\1"),
]


def old_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A 5.x state dict under 4.x names."""
    out = {}
    for key, tensor in state.items():
        if ".mlp.up_proj." in key:
            continue
        if ".mlp.gate_proj." in key:  # 4.x packs gate and value
            up = state[key.replace("gate_proj", "up_proj")]
            key, tensor = key.replace("gate_proj", "weights_in"), torch.cat((tensor, up))
        for pattern, replacement in OLD_NAMES:
            renamed = re.sub(pattern, replacement, key)
            if renamed != key:
                key = renamed
                break
        out[key] = tensor
    return out


def models_of(case: str) -> tuple[nn.Module, Callable, nn.Module, nn.Module]:
    """A model of transformers and its output, without what our head does not have, and two of ours."""
    name, options, *_ = TRANSFORMERS[case]
    theirs, run = foreign(case)
    state = theirs.state_dict()
    if "Dinov2" in type(theirs).__name__ and "classifier.weight" in state:
        state["classifier.weight"][:, 48:] = 0  # the half for the patch mean
    return theirs, run, build(name, **options), build(name, **options)


@pytest.mark.parametrize("case", TRANSFORMERS)
def test_reading_transformers(case):
    """Oracle: transformers' model and its output; 5.x and 4.x names give the same tensors."""
    theirs, run, ours, old = models_of(case)
    state = theirs.state_dict()
    report = load_weights(ours, state)
    assert report.family.startswith("transformers") and not report.reinitialised
    assert_agree(ours, run)
    renamed = old_names(state)
    assert renamed.keys() != state.keys() or case == "clip"
    load_weights(old, renamed)
    assert_equal(old, ours)


@pytest.mark.parametrize("case", TRANSFORMERS)
def test_gradients_equal_transformers(case):
    """Oracle: transformers' gradients; reading is linear, so `load_weights` maps gradients like weights."""
    theirs, run, ours, carrier = models_of(case)
    load_weights(ours, theirs.state_dict())
    x = images(ours)
    y = ours(x)
    cotangent = torch.randn_like(y)
    y.backward(cotangent)
    run(x).backward(cotangent)
    # tensors outside the graph (mask token, pooler) have no gradient; our head lacks half of a classifier
    grads = {k: p.grad if p.grad is not None else torch.zeros_like(p) for k, p in theirs.named_parameters()}
    if "Dinov2" in type(theirs).__name__ and "classifier.weight" in grads:
        grads["classifier.weight"][:, 48:] = 0
    if (
        ours.config.no_embed_class
    ):  # reading adds the class token's position to the token, so its gradient would count twice
        (position,) = (grad for key, grad in grads.items() if "position_embeddings" in key)
        position[:, :1] = 0
    load_weights(carrier, grads)
    largest = max(float(p.grad.norm()) for p in ours.parameters())
    for (key, parameter), wanted in zip(ours.named_parameters(), carrier.parameters(), strict=True):
        if key == "head.bias" and "clip" in case:
            continue  # theirs has no gradient
        error = float((parameter.grad - wanted.detach()).norm())
        assert error <= TOLERANCE * max(float(wanted.detach().norm()), 1e-3 * largest), key


@pytest.mark.parametrize("case", TRANSFORMERS)
def test_writing_transformers(case, tmp_path):
    """Oracle: transformers' model loads the file strictly, directly and by `from_pretrained`, and gives our output."""
    name, options, *_ = TRANSFORMERS[case]
    ours = build(name, **options)
    if "clip" in name and ours.config.num_classes:
        nn.init.zeros_(ours.head.bias)
    save_weights(ours, tmp_path / "model.safetensors", layout="transformers")
    theirs, run = foreign(case)
    theirs.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    assert_agree(ours, run)
    again = build(name, **options)
    load_weights(again, tmp_path / "model.safetensors")
    assert_equal(again, ours)

    theirs.config.save_pretrained(tmp_path)
    extra = dict(add_pooling_layer=False) if case == "vit headless" else {}
    loaded, info = type(theirs).from_pretrained(tmp_path, output_loading_info=True, **extra)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for key, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, theirs.state_dict()[key])


def test_siglip_classifier(tmp_path):
    """Oracle: transformers' SiglipForImageClassification, which averages the tokens after the last norm."""
    text = dict(hidden_size=48, intermediate_size=96, num_hidden_layers=1, num_attention_heads=3, vocab_size=10)
    text |= dict(max_position_embeddings=4, bos_token_id=1, eos_token_id=2)
    config = transformers.SiglipConfig(text_config=text, vision_config={**T, "vision_use_head": False}, num_labels=7)
    theirs = randomize(transformers.SiglipForImageClassification(config))
    ours = build("vit_base_patch16_siglip_gap_224", act="gelu_tanh")
    save_weights(ours, tmp_path / "a.safetensors", layout="transformers")
    theirs.load_state_dict(load_file(tmp_path / "a.safetensors"), strict=True)
    assert_agree(ours, lambda x: theirs(x).logits)


def test_two_towers():
    """Oracle: the vision tower itself; text tower, temperature and the unused pooling head are dropped and listed."""
    theirs, _ = foreign("siglip")
    both = {f"vision_model.{key}": tensor for key, tensor in theirs.state_dict().items()}
    others = {"text_model.final_layer_norm.weight": torch.randn(48), "logit_scale": torch.tensor(1.0)}
    others["vision_model.embeddings.position_ids"] = torch.arange(16)[None]
    both |= others
    alone, tower = build("vit_base_patch16_siglip_224"), build("vit_base_patch16_siglip_224")
    load_weights(alone, theirs.state_dict())
    report = load_weights(tower, both)
    assert_equal(tower, alone)
    assert set(report.dropped) == set(others)
    assert "vision_model.head.probe" in load_weights(build("vit_base_patch16_siglip_gap_224"), both).dropped


def test_dinov2_classifier_on_the_patch_mean_is_refused():
    """Oracle: an error: a head on the class token cannot store a classifier that also reads the patch mean."""
    theirs, _ = foreign("deit3")
    with pytest.raises(WeightsError, match=r"classifier.weight is \[7, 96\].*head.weight is \[7, 48\]"):
        load_weights(build("deit3_small_patch16_224"), theirs.state_dict())


def test_deit_fine_tuned_without_its_second_head():
    """Oracle: transformers' DeiTForImageClassification, which reads the class token only: the other head is zero."""
    config = transformers.DeiTConfig(**T, **EPS, num_labels=7)
    theirs = randomize(transformers.DeiTForImageClassification(config))
    ours = build("deit_tiny_distilled_patch16_224")
    report = load_weights(ours, theirs.state_dict())
    assert report.reinitialised == ("head_dist.weight", "head_dist.bias")
    assert torch.equal(ours.head.weight, theirs.classifier.weight)


# torchvision


def test_torchvision():
    """Oracle: torchvision's VisionTransformer, also with the names of its first release (linear_1)."""
    theirs = torchvision.models.VisionTransformer(32, 8, 2, 3, 48, 192, num_classes=7)
    randomize(theirs)
    ours, old = build("vit_tiny_patch16_224"), build("vit_tiny_patch16_224")
    load_weights(ours, theirs.state_dict())
    assert_agree(ours, theirs)
    names = {".mlp.0.": ".mlp.linear_1.", ".mlp.3.": ".mlp.linear_2."}
    renamed = {}
    for key, tensor in theirs.state_dict().items():
        for new, first in names.items():
            key = key.replace(new, first)
        renamed[key] = tensor
    load_weights(old, renamed)
    assert_equal(old, ours)


# JAX

JAX = {
    "the ViT paper's": ("", dict(vit_paper=True), "vit_tiny_patch16_224", {}),
    "with optimizer": ("opt/target/", dict(vit_paper=True), "vit_tiny_patch16_224", {}),
    "big_vision": ("params/", dict(vit_paper=False), "vit_tiny_patch16_224", dict(no_embed_class=True)),
    "stacked": (
        *("params/", dict(vit_paper=False, pool="gap", stacked=True), "vit_base_patch16_siglip_gap_224"),
        dict(num_classes=7),
    ),
    "SigLIP": (
        *("params/img/", dict(vit_paper=False, pool="map", classes=0), "vit_base_patch16_siglip_224"),
        dict(num_classes=0),
    ),
}


@pytest.mark.parametrize("case", JAX)
def test_jax(case, tmp_path):
    """Oracle: timm's npz loader in timm's model; optimizer state, counters and the text tower are dropped."""
    prefix, tree, name, options = JAX[case]
    arrays = {prefix + key: array for key, array in jax_arrays(**tree).items()}
    if prefix:
        arrays["opt/state/step" if "opt" in prefix else "params/t"] = np.zeros((), np.float32)
        arrays["opt/state/param_states/cls/grad_ema" if "opt" in prefix else "params/txt/head/bias"] = np.zeros(3, "f4")
    np.savez(tmp_path / "a.npz", **arrays)
    theirs = timm.create_model(name, **{**SMALL, "num_classes": 7, **options}).eval()
    with torch.no_grad():
        _load_weights(theirs, str(tmp_path / "a.npz"))
    ours = build(name, **options)
    report = load_weights(ours, tmp_path / "a.npz")
    assert report.family == "JAX" and len(report.dropped) == 2 * bool(prefix)
    assert_agree(ours, theirs)
    for key, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], tensor), key


def test_jax_bfloat16(tmp_path):
    """Oracle: the upper halves of the float32 file; big_vision saves bfloat16, which numpy stores as two raw bytes."""
    arrays = jax_arrays(vit_paper=False)
    np.savez(tmp_path / "a.npz", **arrays)
    half = {key: (array.view(np.uint32) >> 16).astype(np.uint16).view("V2") for key, array in arrays.items()}
    np.savez(tmp_path / "b.npz", **half)
    full, upper = (build("vit_tiny_patch16_224", no_embed_class=True) for _ in range(2))
    load_weights(full, tmp_path / "a.npz")
    load_weights(upper, tmp_path / "b.npz")
    for a, b in zip(full.state_dict().values(), upper.state_dict().values(), strict=True):
        assert torch.equal(b, (a.contiguous().view(torch.int32) & -65536).view(torch.float32))


def test_jax_pre_logits():
    """Oracle: the arrays; the tanh layer is loaded if the model has one, and dropped with a head for other classes."""
    arrays = jax_arrays(vit_paper=True)
    arrays |= {"pre_logits/kernel": np.full((48, 48), 0.5, "f4"), "pre_logits/bias": np.ones(48, "f4")}
    model = build("vit_tiny_patch16_224", pre_logits=True)
    load_weights(model, arrays)
    assert (model.pre_logits.fc.weight == 0.5).all() and (model.pre_logits.fc.bias == 1).all()
    report = load_weights(build("vit_tiny_patch16_224", num_classes=5), arrays)
    assert {"pre_logits/kernel", "head/kernel"} < set(report.dropped)
    with pytest.raises(WeightsError, match="pre_logits"):
        load_weights(build("vit_tiny_patch16_224"), arrays)


@pytest.mark.parametrize(("name", "stages"), [("vit_tiny_r_s16_p8_224", ()), ("vit_small_r26_s32_224", (2, 2, 2, 2))])
def test_jax_hybrid(name, stages, tmp_path):
    """Oracle: timm's npz loader on a ResNet in front of the blocks."""
    arrays = jax_arrays(vit_paper=True)
    width = 256 * 2 ** (len(stages) - 1) if stages else 64
    shapes = {"embedding/kernel": (1, 1, width, 48) if stages else (8, 8, width, 48), "conv_root/kernel": (7, 7, 3, 64)}
    shapes |= {"gn_root/scale": (1, 1, 1, 64), "gn_root/bias": (1, 1, 1, 64)}
    shapes["Transformer/posembed_input/pos_embedding"] = (1, 5, 48)
    inputs = 64
    for i, depth in enumerate(stages):
        outputs = 256 * 2**i
        for j in range(depth):
            unit, middle = f"block{i + 1}/unit{j + 1}", outputs // 4
            convs = {1: (1, inputs, middle), 2: (3, middle, middle), 3: (1, middle, outputs)}
            convs |= {"_proj": (1, inputs, outputs)} if j == 0 else {}
            for r, (kernel, a, b) in convs.items():
                shapes[f"{unit}/conv{r}/kernel"] = (kernel, kernel, a, b)
                shapes |= {f"{unit}/gn{r}/{leaf}": (1, 1, 1, b) for leaf in ("scale", "bias")}
            inputs = outputs
    arrays |= {key: np.random.default_rng(1).normal(0, 0.1, shape).astype("f4") for key, shape in shapes.items()}
    np.savez(tmp_path / "a.npz", **arrays)
    options = dict(img_size=64, embed_dim=48, depth=2, num_heads=3, num_classes=7)
    theirs, ours = timm.create_model(name, **options).eval(), create_model(name, **options)
    with torch.no_grad():
        _load_weights(theirs, str(tmp_path / "a.npz"))
    load_weights(ours, tmp_path / "a.npz")
    for key, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], tensor), key
