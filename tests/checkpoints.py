"""Small random models, ours and of other libraries, for tests of checkpoints."""

from collections.abc import Callable

import numpy as np
import torch
import transformers
from agreement import distance, normal
from torch import Tensor, nn

from fastvit_triton import create_model

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
    """A model in evaluation mode, with random parameters."""
    return normal(model).eval()


def images(model: nn.Module) -> Tensor:
    config = model.config
    return torch.randn(2, config.in_chans, *config.img_size)


def assert_agree(ours: nn.Module, other: Callable[[Tensor], Tensor]) -> None:
    """Asserts that a model of ours and a function give the same outputs of random images."""
    x = images(ours)
    with torch.no_grad():
        assert distance(ours(x), other(x)) <= TOLERANCE


def assert_equal(a: nn.Module, b: nn.Module) -> None:
    """Asserts that the same tensors have the same names, bit by bit."""
    a, b = a.state_dict(), b.state_dict()
    assert list(a) == list(b)
    for key in a:
        assert torch.equal(a[key], b[key]), key


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
