"""Reads and writes config.json and preprocessor_config.json of transformers: plain ViTs, iGPT and detectors.

Sources: the configuration classes of transformers 5.23, whose defaults a file may leave out, and files of 4.x.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from ...checkpoints.tensors import WeightsError, variant
from ..catalogue import CATALOGUE, model_config
from ..config import sides
from ..detector import FROZEN
from . import transformers_stages
from .transformers_stages import STAGES, square

ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "quick_gelu": "quick_gelu"}
ACTIVATIONS |= {"relu": "relu", "silu": "silu"}
FIELDS = {"hidden_size": "embed_dim", "num_hidden_layers": "depth", "num_attention_heads": "num_heads"}
FIELDS |= {"image_size": "img_size", "patch_size": "patch_size", "num_channels": "in_chans", "layer_norm_eps": "eps"}
RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}  # of Pillow
IMAGENET = dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


class Kind(NamedTuple):
    """A model type of transformers."""

    layout: str  # name of its layout
    model_type: str  # entry of config.json
    base: str  # one of our models of this kind
    bare: str  # class without a head
    headed: str  # class with a head
    defaults: dict[str, Any]  # fields whose defaults differ from those of ViT
    outer: str = ""  # model type of the configuration that holds this one as vision_config; "" if there is none


DEFAULTS: dict[str, Any] = dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072)
DEFAULTS |= dict(hidden_act="gelu", layer_norm_eps=1e-12, image_size=224, patch_size=16, num_channels=3)
DINO = dict(layer_norm_eps=1e-6, patch_size=14, mlp_ratio=4, layerscale_value=1.0)
REGISTERS = dict(DINO, patch_size=16, num_register_tokens=4)
SIGLIP = dict(layer_norm_eps=1e-6, hidden_act="gelu_pytorch_tanh")
CLIP = dict(layer_norm_eps=1e-5, hidden_act="quick_gelu", patch_size=32, projection_dim=512)
KINDS = (
    Kind("transformers ViT", "vit", "vit_base_patch16_224", "ViTModel", "ViTForImageClassification", {}),
    Kind(
        *("transformers DeiT", "deit", "deit_base_distilled_patch16_224", "DeiTModel"),
        *("DeiTForImageClassificationWithTeacher", {}),
    ),
    Kind(
        *("transformers Dinov2", "dinov2", "vit_base_patch14_dinov2", "Dinov2Model", "Dinov2ForImageClassification"),
        DINO,
    ),
    Kind(
        *("transformers Dinov2WithRegisters", "dinov2_with_registers", "vit_base_patch14_reg4_dinov2"),
        *("Dinov2WithRegistersModel", "Dinov2WithRegistersForImageClassification", REGISTERS),
    ),
    Kind(
        *("transformers SigLIP", "siglip_vision_model", "vit_base_patch16_siglip_224", "SiglipVisionModel"),
        *("SiglipForImageClassification", SIGLIP, "siglip"),
    ),
    Kind(
        *("transformers CLIP", "clip_vision_model", "vit_base_patch32_clip_224", "CLIPVisionModel"),
        *("CLIPVisionModelWithProjection", CLIP, "clip"),
    ),
)


def read(config: dict[str, Any], processor: dict[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Our name, options and configuration of a checkpoint, from its config.json and preprocessor_config.json."""
    model_type = config["model_type"]
    if model_type == "imagegpt":
        return _read_igpt(config, processor)
    if model_type in DETECTORS:
        return _read_detector(config, processor)
    if model_type in STAGES:
        name, overrides = _nearest(*transformers_stages.read(config, processor))
        sizes = {"image_size": model_config(name, **overrides).img_size, "num_channels": config.get("num_channels", 3)}
        return name, overrides, _cfg(name, overrides, sizes, config, processor)
    kind = next((kind for kind in KINDS if model_type in (kind.model_type, kind.outer)), None)
    if kind is None:
        names = [name for kind in KINDS for name in (kind.outer, kind.model_type) if name]
        raise ValueError(
            f"model_type is {model_type!r}; known are {', '.join([*names, 'imagegpt', *STAGES, *DETECTORS])}"
        )
    entries = DEFAULTS | kind.defaults | (config.get("vision_config", {}) if model_type == kind.outer else config)
    head = (config.get("architectures") or [kind.bare])[0]
    if head == "CLIPForImageClassification":
        raise ValueError(f"{head} classifies the mean of the patches, and our CLIP towers the class token")
    if entries["hidden_act"] not in ACTIVATIONS:
        raise ValueError(f"hidden_act is {entries['hidden_act']!r}; known are {', '.join(ACTIVATIONS)}")
    options: dict[str, Any] = {ours: entries[theirs] for theirs, ours in FIELDS.items()}
    options |= {"act": ACTIVATIONS[entries["hidden_act"]], "qkv_bias": entries.get("qkv_bias", True)}
    width = options["embed_dim"]
    hidden = int(width * entries["mlp_ratio"]) if "mlp_ratio" in kind.defaults else entries["intermediate_size"]
    if entries.get("use_swiglu_ffn"):
        hidden = _gated(hidden)
        options["mlp"] = "swiglu"
    options["mlp_ratio"] = hidden / width if hidden % width == 0 else (hidden + 0.5) / width
    if "layerscale_value" in entries:
        options["init_values"] = float(entries["layerscale_value"])
    if "num_register_tokens" in entries:
        options["reg_tokens"] = entries["num_register_tokens"]
    base = kind.base
    if "ForImageClassification" in head:
        options["num_classes"] = len(config.get("id2label") or ()) or config.get("num_labels", 2)
    elif head in ("CLIPModel", kind.headed):
        options["num_classes"] = config.get("projection_dim", entries["projection_dim"])
    else:
        options["num_classes"] = 0
    if kind.outer == "siglip" and (head == kind.headed or not entries.get("vision_use_head", True)):
        base = base.replace("_siglip_", "_siglip_gap_")
    name, options = _nearest(base, options)
    return name, options, _cfg(name, options, entries, config, processor)


PIXELS = {"n_embd": "embed_dim", "n_layer": "depth", "n_head": "num_heads", "layer_norm_epsilon": "eps"}
PIXEL_DEFAULTS: dict[str, Any] = dict(n_embd=512, n_layer=24, n_head=8, layer_norm_epsilon=1e-5, vocab_size=513)
PIXEL_DEFAULTS |= dict(n_positions=1024, n_inner=None, activation_function="quick_gelu", scale_attn_weights=True)
PIXEL_DEFAULTS |= dict(scale_attn_by_inverse_layer_idx=False, tie_word_embeddings=False)


def _read_igpt(config: dict[str, Any], processor: dict[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """As `read`, of ImageGPTConfig; the colours are in preprocessor_config.json."""
    entries = PIXEL_DEFAULTS | config
    fixed = ("activation_function", "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "tie_word_embeddings")
    wrong = [key for key in fixed if entries[key] != PIXEL_DEFAULTS[key]]
    wrong += ["n_inner"] if entries["n_inner"] not in (None, 4 * entries["n_embd"]) else []
    side = math.isqrt(entries["n_positions"])
    wrong += ["n_positions"] if side * side != entries["n_positions"] else []
    if wrong:
        raise ValueError(f"{wrong[0]} is {entries[wrong[0]]!r}; our iGPT has no such models")
    wanted = {ours: entries[theirs] for theirs, ours in PIXELS.items()}
    wanted |= dict(n_colors=entries["vocab_size"] - 1, img_size=(side, side))
    name, options = _closest(CATALOGUE["igpt_small"].VARIANTS, wanted)
    cfg = {"architecture": name, "num_classes": 0, "input_size": (3, side, side), "interpolation": "bilinear"}
    cfg |= {"clusters": processor["clusters"]} if processor.get("clusters") else {}
    return name, options, cfg


def _write_igpt(model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """As `write`, of ImageGPTConfig and ImageGPTImageProcessor."""
    config = model.config
    height, width = sides(config.img_size)
    entries = {theirs: getattr(config, ours) for theirs, ours in PIXELS.items()}
    entries |= dict(vocab_size=model.wte.num_embeddings, n_positions=height * width, activation_function="quick_gelu")
    head = dict(architectures=["ImageGPTForCausalImageModeling"], model_type="imagegpt", dtype="float32")
    common = dict(do_resize=True, resample=2, do_normalize=True, do_color_quantize=True)
    size = dict(height=height, width=width)
    colours = model.clusters.tolist()
    return head | entries, dict(image_processor_type="ImageGPTImageProcessor", size=size, clusters=colours, **common)


DETECTORS = {"detr": "detr_resnet50", "deformable_detr": "deformable_detr_resnet50"}
DEPTHS = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3), "resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3)}
DETECTOR_FIELDS = {"d_model": "hidden_dim", "encoder_layers": "encoder_layers", "decoder_layers": "decoder_layers"}
DETECTOR_FIELDS |= {"encoder_attention_heads": "num_heads", "encoder_ffn_dim": "mlp_dim", "num_queries": "num_queries"}
DETECTOR_FIELDS |= {"dropout": "drop_rate", "num_channels": "in_chans", "dilation": "dilation"}
LEVELS = {
    "num_feature_levels": "num_levels",
    "encoder_n_points": "encoder_points",
    "decoder_n_points": "decoder_points",
}
LEVELS |= {"with_box_refine": "refine", "two_stage": "two_stage"}
DETECTOR_FIXED = dict(activation_function="relu", position_embedding_type="sine")
TWINS = {"decoder_attention_heads": "encoder_attention_heads", "decoder_ffn_dim": "encoder_ffn_dim"}


def _read_detector(config: dict[str, Any], processor: dict[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """As `read`, of DetrConfig and DeformableDetrConfig."""
    base = DETECTORS[config["model_type"]]
    family = CATALOGUE[base]
    for key, value in DETECTOR_FIXED.items():
        if config.get(key, value) != value:
            raise ValueError(f"{key} is {config[key]!r}; our detectors have {value!r}")
    for key, twin in TWINS.items():
        if key in config and twin in config and config[key] != config[twin]:
            raise ValueError(f"{key} is {config[key]} and {twin} {config[twin]}; our detectors have one for both")
    fields = DETECTOR_FIELDS | (LEVELS if config["model_type"] == "deformable_detr" else {})
    options: dict[str, Any] = {ours: config[theirs] for theirs, ours in fields.items() if theirs in config}
    if options.get("two_stage") and "two_stage_num_proposals" in config:
        options["num_queries"] = config["two_stage_num_proposals"]
    classes = len(config.get("id2label") or ()) or config.get("num_labels", 2)
    options |= _backbone(config) | dict(num_classes=classes)
    size = processor.get("size", 800)
    shortest = size.get("shortest_edge", 800) if isinstance(size, dict) else size
    options["img_size"] = (shortest, shortest)
    frozen = [name for name, given in family.VARIANTS.items() if family.CONFIG(**given).frozen]
    name, options = _closest(frozen, options)
    channels = config.get("num_channels", 3)
    cfg: dict[str, Any] = {"architecture": name, "num_classes": classes}
    cfg |= {"input_size": (channels, shortest, shortest), "interpolation": "bilinear", "crop_pct": 1.0}
    cfg |= {"crop_mode": "squash", "mean": tuple(processor.get("image_mean", (0.485, 0.456, 0.406)))}
    cfg |= {"std": tuple(processor.get("image_std", (0.229, 0.224, 0.225)))}
    return name, options, cfg | _label_names(config, classes)


def _backbone(config: dict[str, Any]) -> dict[str, Any]:
    """Options of the ResNet: a name of timm's, or a configuration of transformers' own."""
    inner = config.get("backbone_config") or {}
    name = inner.get("backbone") or (None if inner else config.get("backbone")) or "resnet50"
    if inner.get("model_type") != "resnet":
        if name not in DEPTHS:
            raise ValueError(f"backbone is {name!r}; known are {', '.join(DEPTHS)}")
        dilated = {"dilation": True} if inner.get("output_stride") == 16 else {}
        return dict(depths=DEPTHS[name], block=FROZEN[name in ("resnet18", "resnet34")]) | dilated
    bottleneck = inner.get("layer_type", "bottleneck") == "bottleneck"
    stem = inner.get("embedding_size", 64)
    widths = [stem * (4 if bottleneck else 1) * 2**i for i in range(4)]
    if list(inner.get("hidden_sizes", (256, 512, 1024, 2048))) != widths:
        raise ValueError(f"hidden_sizes is {inner['hidden_sizes']}; our ResNets have {widths} after a stem of {stem}")
    return dict(depths=tuple(inner.get("depths", (3, 4, 6, 3))), stem_dim=stem, block=FROZEN[not bottleneck])


def _cfg(
    name: str, options: dict[str, Any], entries: dict[str, Any], config: dict[str, Any], processor: dict[str, Any]
) -> dict[str, Any]:
    """The configuration with timm's keys: images, classes and their names."""
    classes = model_config(name, **options).num_classes
    cfg = {"architecture": name, "num_classes": classes, **_images(entries, processor)}
    return cfg | _label_names(config, classes)


def _label_names(config: dict[str, Any], classes: int) -> dict[str, tuple[str, ...]]:
    """The names of the classes in the order of the outputs, as `label_names`; {} if they are unknown."""
    labels = config.get("id2label") or {}
    if len(labels) != classes or str(next(iter(labels.values()), "LABEL_")).startswith("LABEL_"):
        return {}
    return {"label_names": tuple(str(labels[key]) for key in sorted(labels, key=int))}


def write(model: Any, layout: str, cfg: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json and preprocessor_config.json of a model that `save_weights` writes in a layout."""
    if model.layout == "igpt":
        return _write_igpt(model)
    if model.layout in DETECTORS:
        raise WeightsError(f"no config.json of transformers is written for {variant(model)}; use a .safetensors file")
    if model.layout in STAGES:
        labels = _labels(model.num_classes, cfg)
        return transformers_stages.write(model.layout, model.config) | labels, _processor(cfg)
    kind = next(kind for kind in KINDS if kind.layout == layout)
    config = model.config
    entries: dict[str, Any] = {theirs: square(getattr(config, ours)) for theirs, ours in FIELDS.items()}
    entries |= {
        "hidden_act": next(t for t, ours in ACTIVATIONS.items() if ours == config.act),
        "qkv_bias": config.qkv_bias,
    }
    hidden = int(config.embed_dim * config.mlp_ratio)
    if "mlp_ratio" not in kind.defaults:
        entries["intermediate_size"] = hidden
    else:
        entries["use_swiglu_ffn"] = config.mlp == "swiglu"
        size = _gated if entries["use_swiglu_ffn"] else int
        ratio = next((r for r in range(1, 65) if size(config.embed_dim * r) == hidden), None)
        if ratio is None:
            raise WeightsError(f"mlp_ratio is {config.mlp_ratio}; {kind.headed} of transformers needs a whole number")
        entries["mlp_ratio"] = ratio
    if "layerscale_value" in kind.defaults:
        entries["layerscale_value"] = config.init_values
    if "num_register_tokens" in kind.defaults:
        entries["num_register_tokens"] = config.reg_tokens
    if kind.outer == "siglip":
        entries["vision_use_head"] = config.global_pool == "map"
    labels = {}
    if config.num_classes and "projection_dim" in kind.defaults:
        entries["projection_dim"] = config.num_classes
    else:
        labels = _labels(config.num_classes, cfg)
    nested = kind.outer == "siglip" and config.num_classes
    entries["model_type"] = kind.model_type
    entries = {"model_type": kind.outer, "vision_config": entries} if nested else entries
    architecture = kind.headed if config.num_classes else kind.bare
    return {"architectures": [architecture], "dtype": "float32", **entries, **labels}, _processor(cfg)


def _labels(classes: int, cfg: dict[str, Any]) -> dict[str, Any]:
    """The names of the classes, by default LABEL_0, LABEL_1, …; none without a head."""
    if not classes:
        return {}
    names = cfg.get("label_names") or [f"LABEL_{i}" for i in range(classes)]
    return {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}


def _gated(hidden: int) -> int:
    """Channels of gate and value together of a SwiGLU, each a multiple of 8, as in Dinov2SwiGLUFFN."""
    return 2 * ((int(hidden * 2 / 3) + 7) // 8 * 8)


def _closest(names: Iterable[str], wanted: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Of these names the one that needs the fewest of the options wanted, and these options."""
    choices = [(n, {k: v for k, v in wanted.items() if getattr(model_config(n), k) != v}) for n in names]
    return min(choices, key=lambda pair: len(pair[1]))


def _nearest(base: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name in the family of `base` that needs the fewest options, and these options."""
    family = CATALOGUE[base]
    same = getattr(family, "MODELS", {})
    choices = []
    for name in [base, *family.VARIANTS]:
        if same.get(name) is not same.get(base) or ("_gap_" in name) != ("_gap_" in base):
            continue
        ours: Any = model_config(name)
        wanted = ours.replace(**options)
        if "depth" in options and int(ours.embed_dim * ours.mlp_ratio) == int(wanted.embed_dim * wanted.mlp_ratio):
            wanted = wanted.replace(mlp_ratio=ours.mlp_ratio)
        choices.append(
            (name, {key: getattr(wanted, key) for key in options if getattr(wanted, key) != getattr(ours, key)})
        )
    return min(choices, key=lambda pair: len(pair[1]))


def _images(entries: dict[str, Any], processor: dict[str, Any]) -> dict[str, Any]:
    """How images are prepared, with timm's keys."""
    height, width = sides(entries["image_size"])
    size = processor.get("size", {})
    crop = processor.get("crop_size")
    kind = str(processor.get("image_processor_type") or processor.get("feature_extractor_type"))
    convnext = kind.startswith("ConvNext")
    levit = kind.startswith("Levit")
    size = size if isinstance(size, dict) else {"shortest_edge" if crop or convnext or levit else "height": size}
    cfg: dict[str, Any] = {"input_size": (entries["num_channels"], height, width), **IMAGENET}
    cfg |= {
        ours: tuple(processor[key]) for ours, key in (("mean", "image_mean"), ("std", "image_std")) if key in processor
    }
    cfg["interpolation"] = RESAMPLING.get(processor.get("resample", 2), "bilinear")
    if convnext and size.get("shortest_edge", 384) < 384:  # its size is that of the crop; from 384 it crops nothing
        return cfg | {"crop_pct": processor.get("crop_pct", 224 / 256), "crop_mode": "center"}
    if convnext or "shortest_edge" not in size or not processor.get("do_center_crop", True):
        return cfg | {"crop_pct": 1.0, "crop_mode": "squash"}
    inner = crop.get("height", height) if isinstance(crop, dict) else crop or size["shortest_edge"]
    shortest = int(256 / 224 * size["shortest_edge"]) if levit else size["shortest_edge"]
    return cfg | {"crop_pct": min(inner / shortest, 1.0), "crop_mode": "center"}


def _processor(cfg: dict[str, Any]) -> dict[str, Any]:
    """preprocessor_config.json: the inverse of `_images`."""
    _, height, width = cfg["input_size"]
    common: dict[str, Any] = dict(do_resize=True, do_rescale=True, rescale_factor=1 / 255, do_normalize=True)
    common |= dict(image_mean=list(cfg["mean"]), image_std=list(cfg["std"]))
    common |= dict(resample=next((key for key, name in RESAMPLING.items() if name == cfg["interpolation"]), 3))
    sized = dict(height=height, width=width)
    if cfg["crop_mode"] == "squash" and cfg["crop_pct"] == 1.0:
        return {"image_processor_type": "ViTImageProcessor", "size": sized, **common}
    shortest = int(min(height, width) / cfg["crop_pct"])
    more = dict(size={"shortest_edge": shortest}, do_center_crop=True, crop_size=sized)
    return {"image_processor_type": "BitImageProcessor", **more, **common}
