"""Reads config.json and preprocessor_config.json of DETR and Deformable DETR in transformers.

Sources: the configuration classes of transformers 5.23, whose defaults a file may leave out, and files of 4.x.
"""

from typing import Any

from .. import CATALOGUE, model_config

DETECTORS = {"detr": "detr_resnet50", "deformable_detr": "deformable_detr_resnet50"}
DEPTHS = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3), "resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3)}
FIELDS = {"d_model": "hidden_dim", "encoder_layers": "encoder_layers", "decoder_layers": "decoder_layers"}
FIELDS |= {"encoder_attention_heads": "num_heads", "encoder_ffn_dim": "mlp_dim", "num_queries": "num_queries"}
FIELDS |= {"dropout": "drop_rate", "num_channels": "in_chans", "dilation": "dilation"}
LEVELS = {
    "num_feature_levels": "num_levels",
    "encoder_n_points": "encoder_points",
    "decoder_n_points": "decoder_points",
}
LEVELS |= {"with_box_refine": "refine", "two_stage": "two_stage"}
FIXED = dict(activation_function="relu", position_embedding_type="sine")
TWINS = {"decoder_attention_heads": "encoder_attention_heads", "decoder_ffn_dim": "encoder_ffn_dim"}


def read(config: dict[str, Any], processor: dict[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Our name, options, and what is known of the weights with timm's keys; the arguments are the files' contents.

    Raises:
        ValueError: the backbone is no ResNet of ours, or a field has a value that our models do not have.
    """
    base = DETECTORS[config["model_type"]]
    family = CATALOGUE[base]
    for key, value in FIXED.items():
        if config.get(key, value) != value:
            raise ValueError(f"{key} is {config[key]!r}; our detectors have {value!r}")
    for key, twin in TWINS.items():
        if key in config and twin in config and config[key] != config[twin]:
            raise ValueError(f"{key} is {config[key]} and {twin} {config[twin]}; our detectors have one for both")
    fields = FIELDS | (LEVELS if config["model_type"] == "deformable_detr" else {})
    options: dict[str, Any] = {ours: config[theirs] for theirs, ours in fields.items() if theirs in config}
    if options.get("two_stage") and "two_stage_num_proposals" in config:
        options["num_queries"] = config["two_stage_num_proposals"]
    labels = config.get("id2label") or {}
    options |= _backbone(config) | dict(num_classes=len(labels) or config.get("num_labels", 2))
    size = processor.get("size", 800)
    shortest = size.get("shortest_edge", 800) if isinstance(size, dict) else size
    options["img_size"] = (shortest, shortest)
    choices = []
    for name in family.VARIANTS:
        ours: Any = model_config(name)
        if not ours.depths:  # it has no ResNet
            continue
        choices.append((name, {key: value for key, value in options.items() if getattr(ours, key) != value}))
    name, options = min(choices, key=lambda pair: len(pair[1]))
    channels = config.get("num_channels", 3)
    cfg = {"architecture": name, "num_classes": model_config(name, **options).num_classes}
    cfg |= {"input_size": (channels, shortest, shortest), "interpolation": "bilinear", "crop_pct": 1.0}
    cfg |= {"crop_mode": "squash", "mean": tuple(processor.get("image_mean", (0.485, 0.456, 0.406)))}
    cfg |= {"std": tuple(processor.get("image_std", (0.229, 0.224, 0.225)))}
    if labels and not str(next(iter(labels.values()))).startswith("LABEL_"):
        cfg["label_names"] = tuple(str(labels[key]) for key in sorted(labels, key=int))
    return name, options, cfg


def _backbone(config: dict[str, Any]) -> dict[str, Any]:
    """Options of the ResNet: a name of timm's, or a configuration of transformers' own."""
    inner = config.get("backbone_config") or {}
    name = inner.get("backbone") or (None if inner else config.get("backbone")) or "resnet50"
    if inner.get("model_type") != "resnet":
        if name not in DEPTHS:
            raise ValueError(f"backbone is {name!r}; known are {', '.join(DEPTHS)}")
        dilated = {"dilation": True} if inner.get("output_stride") == 16 else {}
        return dict(depths=DEPTHS[name], bottleneck=name not in ("resnet18", "resnet34")) | dilated
    bottleneck = inner.get("layer_type", "bottleneck") == "bottleneck"
    stem = inner.get("embedding_size", 64)
    widths = [stem * (4 if bottleneck else 1) * 2**i for i in range(4)]
    if list(inner.get("hidden_sizes", (256, 512, 1024, 2048))) != widths:
        raise ValueError(f"hidden_sizes is {inner['hidden_sizes']}; our ResNets have {widths} after a stem of {stem}")
    return dict(depths=tuple(inner.get("depths", (3, 4, 6, 3))), stem_dim=stem, bottleneck=bottleneck)
