"""Tests of checkpoint reading and writing. Oracle: the libraries that write them; all parameters are random."""

import argparse
import errno
import json
import math
import os
import pickle
import re
from collections.abc import Callable

import numpy as np
import pytest
import scipy.ndimage
import timm
import torch
import torchvision
import transformers
from pyramids import CASES
from safetensors.torch import load_file, save_file
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import _load_weights, checkpoint_filter_fn
from torch import Tensor, nn

from fastvit_triton import create_model, load_model, load_weights, save_weights, weights
from fastvit_triton.layers import resize_pos_embed
from fastvit_triton.weights import WeightsError, stems

# 24-bit significand: 1e-5 is 84 roundings, for sums through two blocks in another order.
TOLERANCE = 1e-5
SMALL = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3)

# name → options: one model of every family and of every option that affects what is stored
MODELS = {
    "vit_tiny_patch16_224": dict(num_classes=7),
    "deit_tiny_distilled_patch16_224": dict(num_classes=7),
    "deit3_small_patch16_224": dict(num_classes=7),
    "vit_small_patch14_dinov2": {},
    "vit_small_patch14_reg4_dinov2": dict(num_classes=7),
    "vit_giant_patch14_reg4_dinov2": {},
    "vit_base_patch32_clip_quickgelu_224": dict(num_classes=20),
    "vit_base_patch16_siglip_224": {},
    "vit_base_patch16_siglip_gap_224": dict(num_classes=7),
    "vit_tiny_r_s16_p8_224": dict(num_classes=7, img_size=64, patch_size=32),
}
OURS = {
    "simplevit_tiny_patch16_224": dict(num_classes=7, pre_logits=True),
    "vit_tiny_patch16_postnorm_224": dict(num_classes=7, pos_embed="relative", patch_embed="norm_linear_norm"),
    "vit_digits_patch2_8": dict(pos_embed="learned2d", img_size=(16, 32), in_chans=1, qk_norm=True),
}


def build(name: str, **options) -> nn.Module:
    """A small random model of ours."""
    return randomize(create_model(name, **{**SMALL, **(MODELS | OURS).get(name, {}), **options}))


def randomize(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    return model.eval()


def images(model: nn.Module) -> Tensor:
    config = model.config
    return torch.randn(2, config.in_chans, *config.img_size)


def distance(a: Tensor, b: Tensor) -> float:
    """‖a − b‖ / ‖b‖."""
    assert a.shape == b.shape
    return float((a - b).norm() / b.norm())


def assert_equal(a: nn.Module, b: nn.Module) -> None:
    """Asserts that the same tensors have the same names, bit by bit."""
    a, b = a.state_dict(), b.state_dict()
    assert list(a) == list(b)
    for key in a:
        assert torch.equal(a[key], b[key]), key


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
    x = images(ours)
    with torch.no_grad():
        assert distance(ours(x), theirs.eval()(x)) <= TOLERANCE
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
    x = images(ours)
    with torch.no_grad():
        assert distance(ours(x), theirs(x)) <= TOLERANCE


def test_official_mae():
    """Oracle: the encoder's tensors; files of facebookresearch/mae also contain mask_token and a decoder."""
    state = build("vit_tiny_patch16_224", num_classes=0).state_dict()
    extra = {key: torch.randn(3) for key in ("mask_token", "decoder_embed.weight", "decoder_blocks.0.norm1.weight")}
    model = build("vit_tiny_patch16_224")
    report = load_weights(model, {"model": state | extra})
    assert report.family == "MAE (model)" and set(report.dropped) == set(extra)
    assert report.reinitialised == ("head.weight", "head.bias")


# transformers

T = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=192, image_size=32, patch_size=8)
DINO = {key: T[key] for key in T if key != "intermediate_size"}
EPS = dict(layer_norm_eps=1e-6)
# our model and options, their class, its config, how to read its output
TRANSFORMERS = {
    "vit": ("vit_tiny_patch16_224", {}, "ViTForImageClassification", "ViTConfig", {**T, **EPS}, "logits"),
    "vit headless": (
        *("vit_tiny_patch16_224", dict(num_classes=0), "ViTModel", "ViTConfig", {**T, **EPS}),
        "last_hidden_state",
    ),
    "deit": (
        *("deit_tiny_distilled_patch16_224", {}, "DeiTForImageClassificationWithTeacher", "DeiTConfig", {**T, **EPS}),
        "logits",
    ),
    "deit3": ("deit3_small_patch16_224", {}, "Dinov2ForImageClassification", "Dinov2Config", DINO, "logits"),
    "dinov2": ("vit_small_patch14_dinov2", {}, "Dinov2Model", "Dinov2Config", DINO, "pooler_output"),
    "dinov2 swiglu": (
        *("vit_giant_patch14_dinov2", {}, "Dinov2Model", "Dinov2Config", {**DINO, "use_swiglu_ffn": True}),
        "pooler_output",
    ),
    "dinov2 registers": (
        *("vit_small_patch14_reg4_dinov2", {}, "Dinov2WithRegistersForImageClassification"),
        *("Dinov2WithRegistersConfig", DINO, "logits"),
    ),
    "siglip": (
        *("vit_base_patch16_siglip_224", dict(act="gelu_tanh"), "SiglipVisionModel", "SiglipVisionConfig", T),
        "pooler_output",
    ),
    "clip": (
        *("vit_base_patch32_clip_quickgelu_224", {}, "CLIPVisionModelWithProjection", "CLIPVisionConfig"),
        *({**T, "projection_dim": 20}, "image_embeds"),
    ),
    "clip headless": (
        *("vit_base_patch32_clip_quickgelu_224", dict(num_classes=0), "CLIPVisionModel", "CLIPVisionConfig"),
        *(T, "pooler_output"),
    ),
}
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


def foreign(case: str) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """A small random transformers model, and a function from images to its output."""
    name, options, cls, config, fields, output = TRANSFORMERS[case]
    classes = {**MODELS.get(name, {}), **options}.get("num_classes", 0)
    config = getattr(transformers, config)(**fields, num_labels=classes, attn_implementation="eager")
    extra = dict(add_pooling_layer=False) if cls == "ViTModel" else {}
    model = randomize(getattr(transformers, cls)(config, **extra))

    def run(x: Tensor, **more) -> Tensor:
        y = getattr(model(x, **more), output)
        return y[:, 0] if output == "last_hidden_state" else y

    return model, run


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


@pytest.mark.parametrize("case", TRANSFORMERS)
def test_reading_transformers(case):
    """Oracle: transformers' model and its output; 5.x and 4.x names give the same tensors."""
    name, options, *_ = TRANSFORMERS[case]
    theirs, run = foreign(case)
    state = theirs.state_dict()
    if "Dinov2" in type(theirs).__name__ and "classifier.weight" in state:
        state["classifier.weight"][:, 48:] = 0  # the half for the patch mean, which our head does not have
    ours, old = build(name, **options), build(name, **options)
    report = load_weights(ours, state)
    assert report.family.startswith("transformers") and not report.reinitialised
    x = images(ours)
    with torch.no_grad():
        assert distance(ours(x), run(x)) <= TOLERANCE
    renamed = old_names(state)
    assert renamed.keys() != state.keys() or case == "clip"
    load_weights(old, renamed)
    assert_equal(old, ours)


@pytest.mark.parametrize("case", TRANSFORMERS)
def test_gradients_equal_transformers(case):
    """Oracle: transformers' gradients; reading is linear, so `load_weights` maps gradients like weights."""
    name, options, *_ = TRANSFORMERS[case]
    theirs, run = foreign(case)
    state = theirs.state_dict()
    if "Dinov2" in type(theirs).__name__ and "classifier.weight" in state:
        state["classifier.weight"][:, 48:] = 0
    ours, carrier = build(name, **options), build(name, **options)
    load_weights(ours, state)
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
        if key == "head.bias" and "clip" in name:
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
    x = images(ours)
    with torch.no_grad():
        assert distance(run(x), ours(x)) <= TOLERANCE
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
    x = images(ours)
    with torch.no_grad():
        assert distance(theirs(x).logits, ours(x)) <= TOLERANCE


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
    x = images(ours)
    with torch.no_grad():
        assert distance(ours(x), theirs(x)) <= TOLERANCE
    names = {".mlp.0.": ".mlp.linear_1.", ".mlp.3.": ".mlp.linear_2."}
    renamed = {}
    for key, tensor in theirs.state_dict().items():
        for new, first in names.items():
            key = key.replace(new, first)
        renamed[key] = tensor
    load_weights(old, renamed)
    assert_equal(old, ours)


# JAX


def jax_arrays(vit_paper: bool, pool: str = "tok", stacked: bool = False, classes: int = 7) -> dict[str, np.ndarray]:
    """Random arrays as flattened by google-research/vision_transformer (`vit_paper`) or big_vision; D 48, 2 blocks."""
    D, H, F = 48, 3, 192
    mha, mlp, second = (1, 3, 2) if vit_paper else (0, 0, 1)

    def attention(path: str) -> dict:
        parts = {f"{path}/{name}/{leaf}": shape for name in ("query", "key", "value")
                 for leaf, shape in (("kernel", (D, H, D // H)), ("bias", (H, D // H)))}  # fmt: skip
        return parts | {f"{path}/out/kernel": (H, D // H, D), f"{path}/out/bias": (D,)}

    def norm(path: str) -> dict:
        return {f"{path}/scale": (D,), f"{path}/bias": (D,)}

    def dense(path: str, inputs: int, outputs: int) -> dict:
        return {f"{path}/kernel": (inputs, outputs), f"{path}/bias": (outputs,)}

    def two_layers(path: str) -> dict:
        return dense(f"{path}/Dense_0", D, F) | dense(f"{path}/Dense_1", F, D)

    shapes = {"embedding/kernel": (8, 8, 3, D), "embedding/bias": (D,), **norm("Transformer/encoder_norm")}
    rows = 17 if vit_paper else 16
    shapes["Transformer/posembed_input/pos_embedding" if vit_paper else "pos_embedding"] = (1, rows, D)
    if pool == "tok":
        shapes["cls"] = (1, 1, D)
    if pool == "map":
        shapes |= {"MAPHead_0/probe": (1, 1, D), **norm("MAPHead_0/LayerNorm_0"), **two_layers("MAPHead_0/MlpBlock_0")}
        shapes |= attention("MAPHead_0/MultiHeadDotProductAttention_0")
    if classes:
        shapes |= dense("head", D, classes)
    block = norm("LayerNorm_0") | norm(f"LayerNorm_{second}") | two_layers(f"MlpBlock_{mlp}")
    block |= attention(f"MultiHeadDotProductAttention_{mha}")
    for key, shape in block.items():
        if stacked:
            shapes[f"Transformer/encoderblock/{key}"] = (2, *shape)
        else:
            shapes |= {f"Transformer/encoderblock_{i}/{key}": shape for i in range(2)}
    rng = np.random.default_rng(0)
    return {key: rng.normal(0, 0.3, shape).astype(np.float32) for key, shape in shapes.items()}


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
    x = images(ours)
    with torch.no_grad():
        assert distance(ours(x), theirs(x)) <= TOLERANCE
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


# Positions


def positions_after(state: dict, name: str = "vit_tiny_patch16_224", grid=(6, 6), resize: str | None = None, **options):
    """pos_embed [1, T + N, D] after loading into a model of that grid."""
    model = build(name, img_size=(8 * grid[0], 8 * grid[1]), **options)
    report = load_weights(model, state, resize=resize)
    assert f"4x4 resized to {grid[0]}x{grid[1]}" in report.positions
    return model.pos_embed.detach()


@pytest.mark.parametrize("grid", [(6, 6), (3, 3), (5, 9)])
def test_jax_positions(grid):
    """Oracle: scipy.ndimage.zoom(order=1), which the ViT paper's code calls; the class token's row is kept."""
    arrays = jax_arrays(vit_paper=True)
    got = positions_after(arrays, grid=grid)
    table = arrays["Transformer/posembed_input/pos_embedding"][0]
    want = scipy.ndimage.zoom(table[1:].reshape(4, 4, 48), (grid[0] / 4, grid[1] / 4, 1), order=1).reshape(-1, 48)
    assert torch.equal(got[0, 0], torch.from_numpy(table[0]))
    assert distance(got[0, 1:], torch.from_numpy(want)) <= TOLERANCE


@pytest.mark.parametrize("grid", [(6, 6), (3, 3), (5, 9)])
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "deit3_small_patch16_224"])
def test_timm_positions(name, grid):
    """Oracle: timm's resample_abs_pos_embed, with one, two and no prefix rows."""
    state = build(name).state_dict()
    prefix = {"vit": 1, "deit": 2, "deit3": 0}[name.split("_")[0]]
    want = resample_abs_pos_embed(state["pos_embed"], list(grid), num_prefix_tokens=prefix)
    assert distance(positions_after(state, name, grid), want) <= TOLERANCE


def test_torchvision_positions():
    """Oracle: torchvision's interpolate_embeddings."""
    state = torchvision.models.VisionTransformer(32, 8, 2, 3, 48, 192, num_classes=7).state_dict()
    want = torchvision.models.vision_transformer.interpolate_embeddings(48, 8, dict(state))["encoder.pos_embedding"]
    assert distance(positions_after(state), want) <= TOLERANCE


@pytest.mark.parametrize("case", ["vit", "deit", "dinov2", "dinov2 registers", "siglip", "clip"])
@pytest.mark.parametrize("grid", [(6, 6), (5, 9)])
def test_transformers_positions(case, grid):
    """Oracle: transformers' model with interpolate_pos_encoding, called on the larger image."""
    theirs, run = foreign(case)
    name, options, *_ = TRANSFORMERS[case]
    state = theirs.state_dict()
    if "classifier.weight" in state and "dinov2" in case:
        state["classifier.weight"][:, 48:] = 0
    ours = build(name, **options, img_size=(8 * grid[0], 8 * grid[1]))
    load_weights(ours, state)
    x = images(ours)
    more = {} if "dinov2" in case else dict(interpolate_pos_encoding=True)
    with torch.no_grad():
        assert distance(ours(x), run(x, **more)) <= TOLERANCE


def test_dinov2_positions():
    """Oracle: the coordinates in facebookresearch/dinov2's code, (i + 1/2) · h / (H + 0.1) − 1/2, with Keys' bicubic
    weights (a = −0.75) in float64; with registers its code switches to antialiasing, which is timm's function.
    """

    def weights_of(new: int, old: int) -> np.ndarray:  # [new, old]
        table = np.zeros((new, old))
        for i in range(new):
            x = (i + 0.5) * old / (new + 0.1) - 0.5
            for j in range(math.floor(x) - 1, math.floor(x) + 3):
                t, a = abs(x - j), -0.75
                near, far = (a + 2) * t**3 - (a + 3) * t**2 + 1, a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a
                table[i, min(max(j, 0), old - 1)] += near if t <= 1 else far
        return table

    state = build("vit_small_patch14_dinov2").state_dict()
    pos, mask = state["pos_embed"], {"mask_token": torch.zeros(1, 48)}
    got = positions_after(state | mask, "vit_small_patch14_dinov2", (6, 9))
    grid = pos[0, 1:].double().numpy().reshape(4, 4, 48)
    want = np.einsum("ai,bj,ijd->abd", weights_of(6, 4), weights_of(9, 4), grid).reshape(1, 54, 48)
    assert torch.equal(got[:, :1], pos[:, :1])
    assert distance(got[:, 1:].double(), torch.from_numpy(want)) <= TOLERANCE

    state = build("vit_small_patch14_reg4_dinov2").state_dict()
    state["register_tokens"] = state.pop("reg_token")
    got = positions_after(state | mask, "vit_small_patch14_reg4_dinov2", (6, 9))
    assert distance(got, resample_abs_pos_embed(state["pos_embed"], [6, 9], num_prefix_tokens=0)) <= TOLERANCE


@pytest.mark.parametrize("mode", ["bilinear", "bilinear_align_corners", "bicubic", "bicubic_align_corners"])
def test_resize_overrides_the_family(mode):
    """Oracle: F.interpolate with the arguments that the mode names."""
    state = build("vit_tiny_patch16_224").state_dict()
    grid = state["pos_embed"][:, 1:].unflatten(1, (4, 4)).permute(0, 3, 1, 2)
    kind, _, corners = mode.partition("_")
    want = nn.functional.interpolate(grid, (6, 6), mode=kind, align_corners=bool(corners)).flatten(2).mT
    assert distance(positions_after(state, resize=mode)[:, 1:], want) <= TOLERANCE
    with pytest.raises(WeightsError, match="resize is 'cubic'; use one of bilinear"):
        load_weights(build("vit_tiny_patch16_224"), state, resize="cubic")


def test_our_files_store_a_grid_that_is_not_square(tmp_path):
    """Oracle: timm's resample_abs_pos_embed, given the old size; without the config, 2 · 8 patches look like 4 · 4."""
    wide = build("vit_tiny_patch16_224", img_size=(16, 64))
    save_weights(wide, tmp_path / "a.safetensors")
    model = build("vit_tiny_patch16_224", img_size=(32, 32))
    assert "2x8 resized to 4x4" in load_weights(model, tmp_path / "a.safetensors").positions
    want = resample_abs_pos_embed(wide.pos_embed.detach(), [4, 4], [2, 8], num_prefix_tokens=1)
    assert distance(model.pos_embed.detach(), want) <= TOLERANCE


@pytest.mark.parametrize("registers", [0, 4])
@pytest.mark.parametrize(("old", "new"), [(False, True), (True, False)])
def test_positions_of_prefix_tokens_are_moved_exactly(old, new, registers):
    """Oracle: the first model; a token plus its position is one sum, wherever the two are stored."""
    options = dict(reg_tokens=registers, pos_embed="learned")
    first = build("vit_tiny_patch16_224", no_embed_class=old, **options)
    second = build("vit_tiny_patch16_224", no_embed_class=new, **options)
    report = load_weights(second, first.state_dict())
    assert "moved into the tokens" in report.positions
    x = images(first)
    with torch.no_grad():
        assert distance(second(x), first(x)) <= TOLERANCE


def test_positions_of_the_class_token_alone():
    """Oracle: transformers' model with registers, which have no position there and a zero position in ours."""
    theirs, run = foreign("dinov2 registers")
    state = theirs.state_dict()
    state["classifier.weight"][:, 48:] = 0
    ours = build("vit_small_patch14_reg4_dinov2", no_embed_class=False)
    assert "prefix rows 1 to 5" in load_weights(ours, state).positions
    x = images(ours)
    with torch.no_grad():
        assert distance(ours(x), run(x)) <= TOLERANCE


def test_no_square_grid():
    """Oracle: for 15 patches, which form no square, an error that names the rows, the grid, and a remedy."""
    state = build("vit_tiny_patch16_224").state_dict()
    state["pos_embed"] = torch.randn(1, 16, 48)[:, :15]
    with pytest.raises(WeightsError, match=r"pos_embed has 15 rows.*4x4 patches.*img_size"):
        load_weights(build("vit_tiny_patch16_224"), state)


# Heads


@pytest.mark.parametrize("classes", [7, None])
def test_a_head_that_does_not_fit_becomes_zero(classes):
    """Oracle: zeros for other classes or a checkpoint without a head, listed in the report; the rest is loaded."""
    name = "deit_tiny_distilled_patch16_224"
    state = build(name).state_dict()
    if classes is None:
        state = {key: tensor for key, tensor in state.items() if not key.startswith("head")}
    model = build(name, num_classes=9 if classes else 7)
    report = load_weights(model, state)
    for parameter in (*model.head.parameters(), *model.head_dist.parameters()):
        assert not parameter.any()
    assert report.reinitialised == ("head.weight", "head.bias", "head_dist.weight", "head_dist.bias")
    assert torch.equal(model.norm.weight, state["norm.weight"])
    assert "initialised to zero, must be trained: head.weight" in str(report)
    assert ("dropped: head.weight" in str(report)) == bool(classes)


def test_a_headless_model_drops_the_head():
    """Oracle: for a model without a head, the head is listed as dropped."""
    report = load_weights(build("vit_tiny_patch16_224", num_classes=0), build("vit_tiny_patch16_224").state_dict())
    assert report.dropped == ("head.weight", "head.bias") and not report.reinitialised


# What stays


def test_dtype_device_and_requires_grad_are_kept(tmp_path):
    """Oracle: a bfloat16 model with a frozen part stays so, and its version counters (`_version`) show the change."""
    source = build("vit_tiny_patch16_224")
    save_weights(source, tmp_path / "a.safetensors")
    model = build("vit_tiny_patch16_224").bfloat16()
    model.blocks[0].requires_grad_(False)
    before = {name: (p.requires_grad, p.data_ptr(), p._version) for name, p in model.named_parameters()}
    load_weights(model, tmp_path / "a.safetensors")
    for name, p in model.named_parameters():
        assert (p.requires_grad, p.data_ptr()) == before[name][:2] and p._version > before[name][2]
        assert p.dtype == torch.bfloat16 and p.grad is None
        assert torch.equal(p, source.state_dict()[name].bfloat16())


# What is refused


class Hostile:
    """An object whose unpickling calls os.mkdir."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def damaged(tmp_path, kind: str):
    """(source, expected message) of each kind of invalid checkpoint."""
    state = build("vit_tiny_patch16_224").state_dict()
    save_file(state, tmp_path / "a.safetensors")
    torch.save(state, tmp_path / "a.pt")
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    np.savez(tmp_path / "a.npz", **jax_arrays(vit_paper=True))
    if kind == "missing":
        return tmp_path / "nothing.pt", "there is no checkpoint"
    if kind == "folder":
        (tmp_path / "empty").mkdir()
        return tmp_path / "empty", "there is no checkpoint .*model.safetensors"
    if kind == "suffix":
        (tmp_path / "a.txt").write_text("hello")
        return tmp_path / "a.txt", "expected .safetensors, .pt"
    if kind == "page":
        (tmp_path / "b.pt").write_text("<!DOCTYPE html><html>404</html>")
        return tmp_path / "b.pt", "damaged, cut short or no .pt file"
    if kind == "hostile":
        torch.save({"model": Hostile(tmp_path / "pwned")}, tmp_path / "b.pt")
        return tmp_path / "b.pt", r"refused: it is a pickle that would run code \((posix|nt)\.mkdir\)"
    if kind == "hostile legacy":
        (tmp_path / "b.bin").write_bytes(pickle.dumps({"model": Hostile(tmp_path / "pwned")}, protocol=2))
        return tmp_path / "b.bin", "refused: it is a pickle"
    if kind == "hostile npz":
        np.savez(tmp_path / "b.npz", embedding=np.array([Hostile(tmp_path / "pwned")], dtype=object))
        return tmp_path / "b.npz", "refused: it is a pickle"
    if kind == "list":
        torch.save([1, 2], tmp_path / "b.pt")
        return tmp_path / "b.pt", "holds a list; expected a state dict"
    if kind == "resnet":
        with torch.device("meta"):
            return (
                torchvision.models.resnet18().state_dict(),
                r"a plain ViT: its keys \(conv1.weight",
            )
    if kind == "empty":
        return {}, r"its keys \(none\)"
    if kind == "deeper":
        state = build("vit_tiny_patch16_224", depth=3).state_dict()
        return state, r"a timm checkpoint .* has blocks.2.norm1.weight and 11 more, which the model does not have"
    if kind == "post-norm":
        state = build("vit_tiny_patch16_224").state_dict()
        state = {key.replace("norm.", "extra."): t for key, t in state.items()}
        return state, r"does not fit vit_tiny_patch16_224: it lacks norm.weight and 1 more and it has extra.weight"
    if kind == "channels":
        return (
            build("vit_tiny_patch16_224", in_chans=1).state_dict(),
            r"patch_embed.proj.weight is \[48, 1, 8, 8\] in the timm checkpoint, but .* is \[48, 3, 8, 8\].*in_chans=1",
        )
    if kind == "width":
        state = {key: torch.zeros(96 if key == "norm.bias" else t.shape) for key, t in state.items()}
        return state, r"norm.bias is \[96\] in the timm checkpoint, but norm.bias is \[48\]"
    if kind == "foreign width":
        state = torchvision.models.VisionTransformer(32, 8, 2, 3, 48, 96, num_classes=7).state_dict()
        return state, r"encoder_layer_0.mlp.0.weight is \[96, 48\].*blocks.0.mlp.fc1.weight is \[192, 48\]"
    if kind == "integers":
        return state | {"norm.bias": torch.zeros(48, dtype=torch.int8)}, "norm.bias holds torch.int8"
    if kind == "sparse":
        torch.save(state | {"blocks.1.mlp.fc2.bias": torch.ones(48).to_sparse()}, tmp_path / "b.pt")
        return tmp_path / "b.pt", "checkpoint's blocks.1.mlp.fc2.bias is sparse_coo; save it as a dense tensor"
    if kind == "without values":
        return {key: t.to("meta") for key, t in state.items()}, "has no values; save it as a dense tensor"
    if kind == "not finite":
        state = state | {"norm.bias": torch.full((48,), torch.nan)}
        return state, r"checkpoint's norm.bias has non-finite values; verify=False loads it anyway"
    if kind == "no checksums":
        torch.serialization.set_crc32_options(False)
        try:
            torch.save(state, tmp_path / "b.pt")
        finally:
            torch.serialization.set_crc32_options(True)
        return (
            tmp_path / "b.pt",
            r"without checksums, after torch.serialization.set_crc32_options\(False\); verify=False",
        )
    if kind == "no token":
        state = build("vit_tiny_patch16_224").state_dict()
        del state["cls_token"]
        return state, "does not fit vit_tiny_patch16_224: it lacks cls_token"
    if kind == "odd shapes":
        arrays = jax_arrays(vit_paper=True)
        key = "Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel"
        return arrays | {key: np.zeros(48, "f4")}, "JAX checkpoint has tensors of unusual shape|does not fit"
    part = float(kind.split()[1])
    path = tmp_path / kind.split()[0]
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * part)])
    return path, "damaged, cut short"


CUTS = [f"{name} {part}" for name in ("a.safetensors", "a.pt", "old.pt", "a.npz") for part in (0, 0.001, 0.5, 0.999)]
FAULTS = ["missing", "folder", "suffix", "page", "hostile", "hostile legacy", "hostile npz", "list", "resnet", "empty"]
FAULTS += [
    "sparse",
    "without values",
    "not finite",
    "no checksums",
    "deeper",
    "post-norm",
    "channels",
    "width",
    "foreign width",
    "integers",
    "no token",
    "odd shapes",
    *CUTS,
]


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("no_embed_class", [False, True])
def test_invalid_checkpoints_raise_and_change_nothing(kind, no_embed_class, tmp_path):
    """Oracle: WeightsError with one sentence, and a model that is bitwise unchanged."""
    model = build("vit_tiny_patch16_224", no_embed_class=no_embed_class)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    source, message = damaged(tmp_path, kind)
    with pytest.raises(WeightsError, match=message) as caught:
        load_weights(model, source)
    assert "\n" not in str(caught.value) and not (tmp_path / "pwned").exists()
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[key])


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_one_flipped_bit_is_detected(suffix, tmp_path):
    """Oracle: the model; for 200 bits anywhere in the file, one at a time, loading is exact or raises."""
    model, path = build("vit_tiny_patch16_224", depth=1, embed_dim=12), tmp_path / f"a.{suffix}"
    if suffix == "pt":
        torch.save(model.state_dict(), path)
    else:
        save_weights(model, path)
    wanted, content, rng, refused = model.state_dict(), path.read_bytes(), np.random.default_rng(0), 0
    for position in rng.integers(0, len(content), 200):
        changed = bytearray(content)
        changed[position] ^= 1 << int(rng.integers(8))
        path.write_bytes(changed)
        found = build("vit_tiny_patch16_224", depth=1, embed_dim=12)
        try:
            load_weights(found, path)
        except WeightsError:
            refused += 1
        else:
            assert all(torch.equal(t, wanted[key]) for key, t in found.state_dict().items())
    assert refused > 100  # most bits belong to values


@pytest.mark.parametrize("kind", ["not finite", "no checksums"])
def test_files_load_unverified(kind, tmp_path):
    """Oracle: the state dict."""
    source, _ = damaged(tmp_path, kind)
    model = build("vit_tiny_patch16_224")
    load_weights(model, source, verify=False)
    wanted = torch.load(tmp_path / "a.pt")["norm.bias"] if kind == "no checksums" else source["norm.bias"]
    assert torch.equal(model.norm.bias.nan_to_num(7.0), wanted.nan_to_num(7.0))


def test_a_changed_value_of_ours_loads_unverified(tmp_path):
    """Oracle: the message; then the file, whose header does not reflect the change."""
    model, path = build("vit_tiny_patch16_224"), tmp_path / "a.safetensors"
    save_weights(model, path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    for load in (lambda **how: load_model(path, **how), lambda **how: load_weights(model, path, **how)):
        with pytest.raises(WeightsError, match="its checksum is wrong; verify=False loads it"):
            load()
        load(verify=False)


@pytest.mark.parametrize("suffix", ["safetensors", "pt", "npz"])
def test_flipped_bytes_load_whole_or_raise(suffix, tmp_path):
    """Oracle: a damaged file raises WeightsError and changes nothing, unless only values are damaged."""
    model = build("vit_tiny_patch16_224")
    path = tmp_path / f"a.{suffix}"
    save = {"safetensors": save_file, "pt": torch.save, "npz": lambda arrays, path: np.savez(path, **arrays)}[suffix]
    save(jax_arrays(vit_paper=True) if suffix == "npz" else model.state_dict(), path)
    content, rng = path.read_bytes(), np.random.default_rng(0)
    ends = (*range(0, 400, 8), *range(len(content) - 400, len(content), 8))
    for position in ends:
        changed = bytearray(content)
        changed[position] ^= int(rng.integers(1, 256))
        path.write_bytes(changed)
        before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        try:
            load_weights(model, path)
        except WeightsError:
            for key, tensor in model.state_dict().items():
                assert torch.equal(tensor, before[key])


def test_files_that_do_not_name_their_model(tmp_path):
    """Oracle: WeightsError if the file names no model, and if its config is from another version."""
    model = build("vit_tiny_patch16_224")
    save_file(model.state_dict(), tmp_path / "a.safetensors")
    with pytest.raises(WeightsError, match="does not say which model"):
        load_model(tmp_path / "a.safetensors")
    header = {"variant": "vit_tiny_patch16_224", "config": json.dumps({"wings": 2})}
    save_file(model.state_dict(), tmp_path / "a.safetensors", header)
    with pytest.raises(WeightsError, match="cannot build: ViTConfig has no option 'wings'"):
        load_model(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("name", "options", "layout", "message"),
    [
        ("vit_tiny_patch16_postnorm_224", {}, "timm", "timm needs norm='pre', not 'post'"),
        ("vit_tiny_patch16_224", dict(pos_embed="relative"), "timm", "needs pos_embed="),
        ("vit_tiny_patch16_224", dict(pre_logits=True), "timm", "needs pre_logits=False, not True"),
        ("vit_tiny_patch16_224", dict(qk_norm=True), "transformers", "ViT needs qk_norm=False, not True"),
        ("vit_base_patch16_siglip_224", dict(num_classes=7), "transformers", "SigLIP needs head_after_map=False"),
        ("vit_base_patch32_clip_quickgelu_224", {}, "transformers", "CLIP needs head_bias=False"),
        ("vit_tiny_r_s16_p8_224", {}, "transformers", "needs hybrid=False"),
        (
            "vit_tiny_patch16_224",
            {},
            "flax",
            "layout is 'flax'; for a plain ViT use one of fastvit_triton, timm, transformers",
        ),
    ],
)
def test_unsupported_layouts_raise(name, options, layout, message, tmp_path):
    """Oracle: the sentence says why the model cannot be written, and nothing is written."""
    with pytest.raises(WeightsError, match=message):
        save_weights(build(name, **options), tmp_path / "a.safetensors", layout=layout)
    assert not list(tmp_path.iterdir())


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    """Oracle: on a full disk the error says so, the old checkpoint is intact, and no partial file remains."""
    model = build("vit_tiny_patch16_224")
    save_weights(model, tmp_path / "a.safetensors")

    def full(state, path, metadata):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(weights, "save_file", full)
    with pytest.raises(WeightsError, match=r"cannot write .*No space left on device"):
        save_weights(build("vit_tiny_patch16_224"), tmp_path / "a.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
    monkeypatch.undo()
    assert_equal(load_model(tmp_path / "a.safetensors")[0], model)
    with pytest.raises(WeightsError, match=r"name the file a\.safetensors"):
        save_weights(model, tmp_path / "a.pth")


def test_pyramid_checkpoints_are_rejected():
    """Oracle: an error for timm's Swin and PVT, which also have a patch_embed.proj.weight."""
    vit = create_model("vit_tiny_patch16_224", depth=1)
    for name in ("swin_tiny_patch4_window7_224", "pvt_v2_b0"):
        with torch.device("meta"):
            state = timm.create_model(name).state_dict()
        with pytest.raises(WeightsError, match="not a checkpoint of a plain ViT"):
            load_weights(vit, state)


# Hierarchical models


def pyramid(family: str, **options) -> nn.Module:
    """A small random model of a family."""
    case = CASES[family]
    return randomize(create_model(case.name, **case.options | dict(img_size=case.sizes[1], num_classes=7) | options))


@pytest.mark.parametrize("family", CASES)
def test_our_files_rebuild_hierarchical_models(family, tmp_path):
    """Oracle: the model itself: names, options and every bit."""
    model = pyramid(family)
    save_weights(model, tmp_path / "a.safetensors")
    again, _ = load_model(tmp_path / "a.safetensors")
    assert_equal(again, model)
    assert (again.variant, again.config) == (model.variant, model.config)
    x = images(model)
    with torch.no_grad():
        assert torch.equal(again.eval()(x), model(x))


OF_TIMM = ["swin", "twins_svt", "twins_pcpvt", "cait", "pit", "pit_distilled", "tnt", "crossvit", "levit"]


@pytest.mark.parametrize("family", OF_TIMM)
def test_hierarchical_models_of_timm(family, tmp_path):
    """Oracle: timm's model: its weights give its logits here, and ours, saved in its layout, give ours there."""
    case, ours = CASES[family], pyramid(family).eval()
    theirs = randomize(case.build(img_size=case.sizes[1], **case.options, num_classes=7)).eval()
    assert load_weights(ours, {"state_dict": theirs.state_dict()}).family == "timm (state_dict)"
    x = images(ours)
    with torch.no_grad():
        assert distance(ours(x), theirs(x)) <= TOLERANCE
        save_weights(randomize(ours), tmp_path / "a.safetensors", layout="timm")
        theirs.load_state_dict(load_file(tmp_path / "a.safetensors"), strict=True)
        theirs.train().eval()  # timm's LeViT keeps its biases until then
        assert distance(theirs(x), ours(x)) <= TOLERANCE


SWIN = dict(img_size=16, patch_size=2, embed_dim=12, depths=(1, 2), num_heads=(2, 3), window_size=4, num_classes=7)


def swin_of_microsoft() -> tuple[nn.Module, dict[str, Tensor]]:
    """timm's Swin, and its weights under the names of microsoft/Swin-Transformer, with the buffers of its files."""
    theirs = randomize(timm.models.swin_transformer.SwinTransformer(**SWIN))
    state = {
        key.replace("layers.1.downsample", "layers.0.downsample").replace("head.fc", "head"): tensor
        for key, tensor in theirs.state_dict().items()
    }
    buffers = {"layers.0.blocks.0.attn.relative_position_index": torch.zeros(16, 16, dtype=torch.long)}
    return theirs, state | buffers | {"layers.1.blocks.1.attn_mask": torch.zeros(4, 16, 16)}


def test_official_swin():
    """Oracle: timm's converter of Microsoft's files, which merge patches at the end of a stage."""
    theirs, state = swin_of_microsoft()
    ours = randomize(create_model("swin_tiny_patch4_window7_224", **SWIN))
    report = load_weights(ours, {"model": state})
    assert report.family == "Swin (model)" and len(report.dropped) == 2
    converted = timm.models.swin_transformer.checkpoint_filter_fn({"model": dict(state)}, theirs)
    for key, tensor in ours.state_dict().items():
        assert torch.equal(tensor, converted[key]), key


OLD_SWIN = [
    (r"attention\.([qkv])_proj", lambda m: "attention.self." + dict(q="query", k="key", v="value")[m[1]]),
    (r"attention\.relative_position_bias\.", "attention.self."),
    (r"attention\.o_proj", "attention.output.dense"),
    (r"mlp\.fc1", "intermediate.dense"),
    (r"mlp\.fc2", "output.dense"),
]


@pytest.mark.parametrize("old", [False, True], ids=["5", "4"])
def test_transformers_swin(old):
    """Oracle: transformers' logits; also with the names in files of 4.x, which hold indices."""
    config = transformers.SwinConfig(
        image_size=16, patch_size=2, embed_dim=12, depths=[1, 2], num_heads=[2, 3], window_size=4, num_labels=7
    )
    theirs = randomize(transformers.SwinForImageClassification(config))
    state = theirs.state_dict()
    if old:
        for pattern, replacement in OLD_SWIN:
            state = {re.sub(pattern, replacement, key): tensor for key, tensor in state.items()}
        state["swin.encoder.layers.0.blocks.0.attention.self.relative_position_index"] = torch.zeros(16, 16).long()
    ours = randomize(create_model("swin_tiny_patch4_window7_224", **SWIN))
    report = load_weights(ours, state)
    assert report.family == "transformers Swin" and not report.reinitialised and len(report.dropped) == old
    x = images(ours)
    with torch.no_grad():
        assert distance(ours(x), theirs(x).logits) <= TOLERANCE


def test_torchvision_swin():
    """Oracle: torchvision's logits."""
    theirs = randomize(torchvision.models.SwinTransformer([2, 2], 12, [1, 2], [2, 3], [4, 4], num_classes=7))
    ours = randomize(create_model("swin_tiny_patch4_window7_224", **SWIN))
    report = load_weights(ours, theirs.state_dict())
    assert report.family == "torchvision Swin" and not report.reinitialised
    x = images(ours)
    with torch.no_grad():
        assert distance(ours(x), theirs(x)) <= TOLERANCE


@pytest.mark.parametrize("layout", ["PVT", "transformers PVT"])
def test_pvt(layout):
    """Oracle: transformers' model, with its names and with the authors'."""
    ours, case = pyramid("pvt"), CASES["pvt"]
    theirs = randomize(case.build(img_size=(32, 32), **case.options, num_classes=7))
    state = theirs.state_dict() if layout != "PVT" else case.convert(theirs.state_dict())
    report = load_weights(ours, state)
    assert report.family == layout and not report.reinitialised and not report.dropped
    x = images(ours)
    with torch.no_grad():
        assert distance(ours(x), case.logits(theirs, x)) <= TOLERANCE


@pytest.mark.filterwarnings("ignore:torch.searchsorted", "ignore:Using a non-tuple sequence")  # in timm
def test_windows_are_resized_as_by_timm():
    """Oracle: timm's converter for another window; a window that is not square is not guessed."""
    _, state = swin_of_microsoft()
    options = SWIN | dict(img_size=24, window_size=(6, 5))
    ours = randomize(create_model("swin_tiny_patch4_window7_224", **options))
    report = load_weights(ours, state)
    assert report.positions == "windows of 4x4 resized to 6x5"
    theirs = timm.models.swin_transformer.SwinTransformer(**options)
    converted = timm.models.swin_transformer.checkpoint_filter_fn(dict(state), theirs)
    for key, tensor in ours.state_dict().items():
        assert torch.allclose(tensor, converted[key], atol=1e-6), key
    with pytest.raises(WeightsError, match="no square window; create the model with its window_size"):
        load_weights(create_model("swin_tiny_patch4_window7_224", **SWIN), ours.state_dict())


def test_positions_of_every_stage_are_resized():
    """Oracle: bilinear interpolation as in the authors' code; the class token's row stays."""
    ours, larger = pyramid("pvt", img_size=(16, 64)), pyramid("pvt", img_size=(48, 32))
    save = ours.state_dict()
    with pytest.raises(WeightsError, match="create the model with its img_size"):
        load_weights(larger, {key: t[:, 1:] if key == "pos_embed1" else t for key, t in save.items()})
    report = load_weights(larger, pyramid("pvt").state_dict())
    assert report.positions == "8x8 resized to 12x8 (bilinear), 4x4 resized to 6x4 (bilinear)"


def test_files_of_ours_say_the_grid(tmp_path):
    """Oracle: the model itself, resampled to another image size."""
    ours, larger = pyramid("pvt", img_size=(16, 32)), pyramid("pvt", img_size=(48, 32))
    save_weights(ours, tmp_path / "a.safetensors")
    assert "4x8 resized to 12x8 (bilinear)" in load_weights(larger, tmp_path / "a.safetensors").positions
    x = images(larger)
    with torch.no_grad():
        assert distance(larger(x), ours(x)) <= TOLERANCE


def renamed(state: dict[str, Tensor], *rows: tuple[str, str]) -> dict[str, Tensor]:
    """The tensors under names in which each pattern is replaced."""
    for old, new in rows:
        state = {re.sub(old, new, key): tensor for key, tensor in state.items()}
    return state


def test_official_pit_at_another_size():
    """Oracle: timm's converter of the authors' names, and antialiased interpolation of positions."""
    ours, larger = pyramid("pit"), pyramid("pit", img_size=(27, 33))
    state = renamed(ours.state_dict(), (r"^transformers\.1\.pool", "pools.0"))
    converted = timm.models.pit.checkpoint_filter_fn(state, None)
    report = load_weights(larger, state)
    assert report.family == "PiT" and report.positions == "7x5 resized to 8x10 (bicubic_antialias)"
    for key, tensor in larger.state_dict().items():
        assert key == "pos_embed" or torch.equal(tensor, converted[key]), key
    x = images(larger)
    with torch.no_grad():
        assert distance(larger(x), ours(x)) <= TOLERANCE


def test_official_tnt_at_another_size():
    """Oracle: timm's converter of the authors' names, which also resizes positions, antialiased."""
    case, larger = CASES["tnt"], pyramid("tnt", img_size=(24, 32))
    theirs = randomize(case.build(img_size=(16, 16), **case.options, num_classes=7))
    names = {ours: official for official, ours in stems.TNT_NAMES.items()}
    state = {".".join(names.get(part, part) for part in key.split(".")): t for key, t in theirs.state_dict().items()}
    state["inner_pos"] = state["inner_pos"].flatten(2).transpose(1, 2)
    state["outer_tokens"] = torch.zeros(1, 4, 12)
    report = load_weights(larger, state, resize="bicubic_antialias")
    assert report.family == "TNT" and report.positions == "2x2 resized to 3x4 (bicubic_antialias)"
    assert report.dropped == ("outer_tokens",)
    built = case.build(img_size=(24, 32), **case.options, num_classes=7)
    built.load_state_dict(timm.models.tnt.checkpoint_filter_fn(state, built))
    x = images(larger)
    with torch.no_grad():
        assert distance(larger(x), built.eval()(x)) <= TOLERANCE


def test_official_crossvit_at_another_size():
    """Oracle: the same model built for another size, with tables resized by hand."""
    ours, larger = pyramid("crossvit", img_size=(24, 24)), pyramid("crossvit", img_size=(36, 24))
    state = renamed(ours.state_dict(), (r"^(pos_embed|cls_token)_", r"\1."))
    report = load_weights(larger, state)
    sizes = "4x4 resized to 6x4 (bicubic_antialias)"
    assert report.family == "CrossViT" and report.positions == f"{sizes}, {sizes}"
    for key, tensor in larger.state_dict().items():
        want = ours.state_dict()[key]
        want = resize_pos_embed(want, (4, 4), (6, 4), 1) if key.startswith("pos_embed") else want
        assert torch.equal(tensor, want), key


def test_official_t2t_at_another_size():
    """Oracle: the weights themselves; fixed positions are those of the model."""
    ours, larger = pyramid("t2t_performer"), pyramid("t2t_performer", img_size=(48, 32))
    positions = larger.pos_embed.clone()
    report = load_weights(larger, {"state_dict_ema": ours.state_dict()})
    assert report.family == "T2T-ViT (state_dict_ema)"
    assert report.positions == "sinusoids for 4 tokens replaced by those for 7"
    for key, tensor in larger.state_dict().items():
        assert torch.equal(tensor, positions if key == "pos_embed" else ours.state_dict()[key]), key


def test_official_ceit_at_another_size():
    """Oracle: the weights themselves, with positions resized by hand."""
    ours, larger = pyramid("ceit", img_size=16), pyramid("ceit", img_size=(24, 32))
    report = load_weights(larger, {"model": ours.state_dict()})
    assert report.family == "CeiT (model)" and report.positions == "2x2 resized to 3x4 (bicubic)"
    for key, tensor in larger.state_dict().items():
        want = ours.state_dict()[key]
        want = resize_pos_embed(want, (2, 2), (3, 4), 1, "bicubic") if key == "pos_embed" else want
        assert torch.equal(tensor, want), key


def test_checkpoints_of_another_architecture_are_refused():
    """Oracle: the architecture and its layouts, in one sentence."""
    with pytest.raises(WeightsError, match=r"this is not a checkpoint of Swin: .* known are torchvision Swin"):
        load_weights(pyramid("swin"), pyramid("pvt").state_dict())
    with pytest.raises(WeightsError, match="of a plain ViT"):
        load_weights(build("vit_tiny_patch16_224"), pyramid("swin").state_dict())


# Other models with one scale


@pytest.mark.parametrize("family", ["cct", "compact_cvt", "vit_lite"])
def test_compact_transformers_of_the_authors(family):
    """Oracle: vit-pytorch's logits, whose names are the authors'; positions are resized bilinearly, as by them."""
    ours, case = pyramid(family, img_size=(16, 16)), CASES[family]
    theirs = randomize(case.build(img_size=(16, 16), **case.options, num_classes=7)).eval()
    report = load_weights(ours, {"state_dict": theirs.state_dict()})
    assert report.family == "CCT (state_dict)" and not report.reinitialised and not report.dropped
    x = images(ours)
    with torch.no_grad():
        assert distance(ours.eval()(x), theirs(x)) <= TOLERANCE
    larger = pyramid(family, img_size=(24, 32))
    assert "4x4 resized to 6x8 (bilinear)" == load_weights(larger, ours.state_dict()).positions
    with torch.no_grad():
        x = images(larger)
        assert distance(larger.eval()(x), ours(x)) <= TOLERANCE
    with pytest.raises(WeightsError, match="no square grid; create the model with its img_size"):
        load_weights(ours, pyramid(family, img_size=(16, 24)).state_dict())


@pytest.mark.parametrize("layout", ["CvT", "transformers CvT"])
def test_cvt(layout):
    """Oracle: transformers' model with the authors' activation, with its names and with the authors'."""
    ours, case = pyramid("cvt").eval(), CASES["cvt"]
    theirs = randomize(case.build(img_size=(20, 24), **case.options, num_classes=7)).eval()
    state = theirs.state_dict() if layout != "CvT" else case.convert(theirs.state_dict())
    report = load_weights(ours, state)
    assert report.family == layout and not report.reinitialised and not report.dropped
    x = images(ours)
    with torch.no_grad():
        assert distance(ours(x), case.logits(theirs, x)) <= TOLERANCE
