"""Initial values of the parameters of our families, as the code of their authors or of timm draws them.

A value is (mean, standard deviation), with the deviation 0 for constants; None for tables that are computed.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Value = tuple[Any, float] | None
Rule = Value | Callable[[nn.Module, nn.Module, Tensor], Value]

VIT = dict(embed_dim=48, num_heads=2, depth=2, num_classes=10)
SMALL = dict(img_size=4, embed_dim=16, depth=2, num_heads=2)
# Models with initial values of their own that have no case in `catalogue.ours`: name → options.
MODELS: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_postnorm_224": VIT | dict(img_size=32, pos_embed="relative"),
    "vit_base_patch32_224": VIT | dict(img_size=64, weight_init="jax", reg_tokens=1, pre_logits=True),
    "vit_tiny_r_s16_p8_224": VIT | dict(img_size=64, patch_size=32),
    "vit_small_r26_s32_224": VIT | dict(img_size=64),
    "simplevit_tiny_patch16_224": VIT | dict(img_size=32),
    "deit_tiny_distilled_patch16_224": VIT | dict(img_size=32),
    "deit3_small_patch16_224": VIT | dict(img_size=32),
    "vit_giant_patch14_reg4_dinov2": VIT | dict(img_size=28),
    "vit_base_patch16_clip_quickgelu_224": VIT | dict(img_size=32),
    "vit_base_patch16_siglip_224": VIT | dict(img_size=32),
    "naflexvit_base_patch16_gap": VIT | dict(img_size=32),
    "setr_pup_large_768": VIT | dict(img_size=32, decoder_dim=8, aux_indices=(0,)),
    "igpt_digits": SMALL,
    "image_transformer_cifar10": SMALL | dict(mlp_dim=32),
    "ipt_digits": dict(img_size=6, features=4, depth=2, num_heads=3),
    "detr_digits": {},
    "deformable_detr_digits": {},
    "deformable_detr_tiny": {},
    "detr_resnet50": dict(depths=(1, 1, 1, 1), stem_dim=4, hidden_dim=32, num_heads=4, mlp_dim=48)
    | dict(encoder_layers=1, decoder_layers=1, num_queries=5, num_classes=3),
}

ZERO, ONE, USUAL, TINY = (0.0, 0.0), (1.0, 0.0), (0.0, 0.02), (0.0, 1e-6)


def fan(tensor: Tensor) -> tuple[int, int]:
    """Inputs and outputs of a product, counted as `nn.init` does."""
    field = tensor[0, 0].numel()
    return tensor.shape[1] * field, tensor.shape[0] * field


def usual(_: nn.Module, module: Any, __: Tensor) -> Value:
    """PyTorch's own values of weights and biases: uniform in ± 1 / √inputs."""
    weight = module.in_proj_weight if hasattr(module, "in_proj_weight") else module.weight
    return 0.0, (3 * fan(weight)[0]) ** -0.5


def xavier(_: nn.Module, __: nn.Module, tensor: Tensor) -> Value:
    """Glorot's: √(2 / (inputs + outputs))."""
    return 0.0, math.sqrt(2 / sum(fan(tensor)))


def unit(_: nn.Module, __: nn.Module, tensor: Tensor) -> Value:
    """LeCun's: 1 / √inputs."""
    return 0.0, fan(tensor)[0] ** -0.5


def of_inputs(_: nn.Module, __: nn.Module, tensor: Tensor) -> Value:
    """He's: √(2 / inputs)."""
    return 0.0, math.sqrt(2 / fan(tensor)[0])


def of_outputs(_: nn.Module, __: nn.Module, tensor: Tensor) -> Value:
    """He's by outputs: √(2 / outputs)."""
    return 0.0, math.sqrt(2 / fan(tensor)[1])


def of_group(_: nn.Module, module: Any, tensor: Tensor) -> Value:
    """He's by outputs of a group, as in MobileNet V2."""
    return 0.0, math.sqrt(2 * module.groups / fan(tensor)[1])


def init_values(model: Any, _: nn.Module, __: Tensor) -> Value:
    """The option of this name, a constant."""
    return model.config.init_values, 0.0


# By class of the model, for names that begin with the kind of the module; those of a subclass come first.
RULES: dict[str, dict[str, Rule]] = {
    "VisionTransformer": {
        "(cls|reg)_token$": TINY,
        "attn_pool.latent$": lambda _, __, t: (0.0, t.shape[-1] ** -0.5),
        "gamma$": init_values,
    },
    "Cait": {"cls_token$": USUAL, "gamma_[12]$": init_values},
    "RefinedTransformer": {"scale_channel$": (1e-5, 0.0)},
    "Twins": {"^conv .*weight$": of_group, "^conv .*bias$": ZERO},
    "CompactTransformer": {"^conv .*weight$": of_inputs, "positional_emb$": (0.0, 0.2), "class_emb$": ZERO},
    "PoolingVisionTransformer": {"^linear": usual},
    "Levit": {
        "attention_biases$": ZERO,
        r"(blocks.*attn\.proj|mlp\.ln2)\S*\.bn\.weight$": ZERO,  # ends of branches
        "^linear (?!head)": usual,
    },
    "TokensToTokenViT": {
        "pos_embed$": None,
        r"\.w$": lambda _, __, t: (0.0, (t.shape[0] / t.shape[1]) ** 0.5),  # orthogonal rows of length √rows
    },
    "ConvolutionalTransformer": {"pos_layer_embed$": ZERO},
    "BottleneckTransformer": {
        r"conv3_1x1\.bn\.weight$": ZERO,
        r"qkv\.weight$": unit,
        "_rel$": lambda _, __, t: (0.0, t.shape[1] ** -0.5),
        "^conv .*weight$": of_outputs,
        "^linear .*weight$": (0.0, 0.01),
    },
    "VisualTransformerResNet": {
        r"conv2_kxk\.bn\.weight$": ZERO,
        "^conv .*weight$": of_outputs,
        "(^linear .*weight|filters)$": (0.0, 0.01),
    },
    "AttentionConv": {
        "attention_centers$": (0.0, 2.0),
        "attention_spreads$": lambda m, _, t: (1.0 if t.dim() == 1 else torch.eye(2), 0.01),
    },
    "IGPT": {
        r"c_proj\.weight$": lambda m, _, __: (0.0, 0.02 / math.sqrt(2 * m.config.depth)),
        "^embedding": USUAL,
    },
    "ImageTransformer": {"^linear .*weight$": unit, "^embedding": lambda _, __, t: (0.0, t.shape[1] ** -0.5)},
    "IPT": {
        "(sub|add)_mean": None,
        r"tail\.\d+\.1\.": ZERO,
        r"encoder\S*in_proj_weight$": usual,
        "in_proj_weight$": xavier,
        "^embedding": (0.0, 1.0),
        "^linear": usual,
    },
    "Detector": {
        r"transformer\S*(in_proj_weight|out_proj\.weight|linear[12]\.weight)$": xavier,
        r"(in_proj_bias|out_proj\.bias)$": ZERO,
        r"^conv backbone\.0\.body\.(conv1|stem|layer\d)": of_outputs,  # of a ResNet
        r"body\.layer\d\S*conv2_kxk\.bn\.weight$": ZERO,  # each block is its shortcut
        "^embedding": (0.0, 1.0),
        "^linear": usual,
    },
    "DeformableDetr": {
        r"sampling_offsets\.bias$": None,
        r"(sampling_offsets\.weight|attention_weights\.(weight|bias))$": ZERO,
        r"(value_proj|output_proj|reference_points)\.bias$": ZERO,
        r"(enc_output|pos_trans)\.weight$": xavier,
        r"(value_proj|output_proj|reference_points)\.weight$": xavier,
        "level_embed$": (0.0, 1.0),
        r"input_proj\S*bias$": ZERO,
        r"^conv input_proj\S*weight$": xavier,
        r"class_embed\S*bias$": (-math.log(99), 0.0),
        r"bbox_embed\.0\.layers\.2\.bias$": lambda m, _, __: (
            torch.tensor([0.0, 0.0, -2.0, -2.0]) * (not m.config.two_stage),
            0.0,
        ),
        r"bbox_embed\.\d+\.layers\.2\.": ZERO,
    },
}
JAX: dict[str, Rule] = {
    "(cls|reg)_token$": ZERO,
    r"mlp\S*\.bias$": TINY,
    "^linear head.weight$": ZERO,
    "^linear .*weight$": xavier,
    "^conv .*weight$": unit,
    "^conv .*bias$": ZERO,
}
OTHERS: dict[str, Rule] = {
    "^norm .*weight$": ONE,
    "^norm .*bias$": ZERO,
    "^linear .*weight$": USUAL,
    "^linear .*bias$": ZERO,
    "^conv": usual,
    r"(token|cls_token_\d|pos|pos_embed(_?\d)?|relative_position_bias_table|position\.weight)$": USUAL,
}
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm)
KINDS = {"norm": NORMS, "linear": nn.Linear, "conv": nn.modules.conv._ConvNd, "embedding": nn.Embedding}


def value(model: nn.Module, name: str) -> Value:
    """The value of a parameter.

    Raises:
        KeyError: no rule is of this name.
    """
    module = model.get_submodule(name.rpartition(".")[0])
    kind = next((kind for kind, types in KINDS.items() if isinstance(module, types)), type(module).__name__)
    rules = JAX if getattr(model.config, "weight_init", "") == "jax" else {}
    for own in (rules, *(RULES.get(cls.__name__, {}) for cls in type(model).__mro__), OTHERS):
        for pattern, rule in own.items():
            if re.search(pattern, f"{kind} {name}"):
                return rule(model, module, model.get_parameter(name)) if callable(rule) else rule
    raise KeyError(f"{kind} {name}")
