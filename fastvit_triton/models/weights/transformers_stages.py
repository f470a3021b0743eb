"""Reads and writes the part of transformers' config.json that describes a model with stages.

Sources: the configuration classes of transformers 5.23, whose defaults a file may leave out: those of our `base`.
"""

from typing import Any, NamedTuple

from ...checkpoints.tensors import WeightsError
from ..catalogue import model_config


class Stages(NamedTuple):
    """A model type of transformers that has stages."""

    base: str  # one of our models, which has the defaults of transformers
    fields: dict[str, str]  # theirs → ours
    fixed: dict[str, Any]  # fields that have one value in our models
    headed: str = ""  # class with a head, if `base` has other heads than the class named ForImageClassification


COMMON = {"image_size": "img_size", "num_channels": "in_chans", "depths": "depths"}
BIASED = COMMON | {"layer_norm_eps": "eps", "qkv_bias": "qkv_bias"}
PLAIN = {"hidden_act": "gelu", "use_absolute_embeddings": False}
CONVOLVED: dict[str, Any] = dict(patch_sizes=[7, 3, 3], patch_stride=[4, 2, 2], patch_padding=[2, 1, 1])
CONVOLVED |= dict(qkv_bias=[True] * 3, cls_token=[False, False, True], qkv_projection_method=["dw_bn"] * 3)
CONVOLVED |= dict(kernel_qkv=[3] * 3, padding_kv=[1] * 3, stride_kv=[2] * 3, padding_q=[1] * 3, stride_q=[1] * 3)
STAGES = {
    "swin": Stages(
        "swin_tiny_patch4_window7_224",
        BIASED | {name: name for name in ("patch_size", "embed_dim", "num_heads", "window_size", "mlp_ratio")},
        PLAIN,
    ),
    "pvt": Stages(
        "pvt_tiny",
        BIASED
        | {"hidden_sizes": "embed_dims", "num_attention_heads": "num_heads", "sequence_reduction_ratios": "sr_ratios"}
        | {"mlp_ratios": "mlp_ratios"},
        PLAIN,
    ),
    "cvt": Stages(
        "cvt_13_224",
        {"num_channels": "in_chans", "depth": "depths"} | {k: k for k in ("embed_dim", "num_heads", "mlp_ratio")},
        CONVOLVED,
    ),
    "levit": Stages(
        "levit_128",
        COMMON
        | {"hidden_sizes": "embed_dim", "num_attention_heads": "num_heads", "attention_ratio": "attn_ratio"}
        | {name: name for name in ("patch_size", "key_dim", "mlp_ratio")},
        dict(kernel_size=3, stride=2, padding=1),
        "LevitForImageClassificationWithTeacher",
    ),
}


def read(config: dict[str, Any], processor: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """One of our models of this type, and options; for the arguments see `transformers_config.read`."""
    base, fields, fixed, headed = STAGES[config["model_type"]]
    for name, only in fixed.items():
        if config.get(name, only) != only:
            raise ValueError(f"{name} is {config[name]!r}; our {base} has {only!r}")
    options = {fields[key]: value for key, value in config.items() if key in fields}
    ours = model_config(base)
    for key, value in options.items():
        if isinstance(value, list) and not isinstance(getattr(ours, key), tuple):
            if len(set(value)) != 1:
                raise ValueError(f"{key} is {value}; our {base} has one value for all stages")
            options[key] = value[0]
        elif isinstance(value, list):
            options[key] = tuple(value)
    if "image_size" not in fields and (size := processor.get("size")):
        options["img_size"] = size.get("shortest_edge") or size["height"] if isinstance(size, dict) else size
    head = (config.get("architectures") or [""])[0]
    if headed and "ForImageClassification" in head and head != headed:
        raise ValueError(f"{head} has one head; our {base} has those of {headed}")
    count = len(config.get("id2label") or ()) or config.get("num_labels", 2)
    return base, options | {"num_classes": count if "ForImageClassification" in head else 0}


def write(model_type: str, config: Any) -> dict[str, Any]:
    """config.json, but for the names of the classes, of a model with this configuration."""
    entries: dict[str, Any] = {theirs: getattr(config, ours) for theirs, ours in STAGES[model_type].fields.items()}
    entries |= {key: square(entries[key]) for key in entries.keys() & {"image_size", "patch_size", "window_size"}}
    if model_type == "pvt":
        entries["mlp_ratios"] = [int(ratio) for ratio in config.mlp_ratios]
        if any(ratio != int(ratio) for ratio in config.mlp_ratios):
            raise WeightsError(f"mlp_ratios is {config.mlp_ratios}; PvtConfig of transformers needs whole numbers")
        patches = [config.patch_size[0], *[2] * (len(config.depths) - 1)]
        entries |= dict(num_encoder_blocks=len(config.depths), patch_sizes=patches, strides=patches)
        entries |= {"num_labels": config.num_classes} if config.num_classes else {}  # PvtConfig counts no labels
    name = model_type.capitalize() + ("ForImageClassification" if config.num_classes else "Model")
    return {"architectures": [name], "dtype": "float32", "model_type": model_type, "hidden_act": "gelu", **entries}


def square(value: Any) -> Any:
    """One number for two equal sides, as transformers writes them."""
    return value[0] if isinstance(value, (tuple, list)) and value[0] == value[1] else value
