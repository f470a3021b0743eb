"""Reads and writes timm's config.json, from which `timm.create_model("local-dir:…")` and "hf-hub:…" build a model."""

import dataclasses
from typing import Any

from ...checkpoints.tensors import WeightsError, variant
from ..base import ImageModel
from ..catalogue import CATALOGUE, model_config
from . import pretrained
from .transformers_stages import square

ARGUMENTS = {"act_layer": "act"}  # timm's argument → our option; others have the same name, see `ViTConfig`
IGNORED = ("dynamic_img_pad", "use_naflex", "fix_init", "scriptable", "exportable", "no_jit")
TRAINING = ("weight_init", "grad_checkpointing")  # options that change no output in evaluation, and all rates
GENERIC = "vit_base_patch16_224"  # the architecture that is written for a plain ViT that timm has not
FIXED = ("eps", "mlp", "norm", "head_dim", "pre_logits")  # options that timm takes as Python objects, or not at all
BASIC = "img_size in_chans global_pool patch_size mlp_ratio"
# layout, but of plain ViTs → options that timm's class takes from a config.json; "a=b": our a is its b
OPTIONS = {
    "swin": f"{BASIC} embed_dim depths num_heads window_size always_partition qkv_bias dynamic_img_size",
    "twins": f"{BASIC} embed_dims depths num_heads mlp_ratios sr_ratios wss",
    "cait": f"{BASIC} embed_dim depth num_heads qkv_bias init_values depth_token_only mlp_ratio_token_only",
    "pit": f"{BASIC} base_dims depths=depth num_heads=heads stride",
    "tnt": f"{BASIC} embed_dim depth qkv_bias inner_dim num_heads_inner num_heads_outer first_stride legacy",
    "crossvit": f"{BASIC} embed_dim depth num_heads qkv_bias img_scale multi_conv crop_scale",
    "levit": "img_size in_chans global_pool mlp_ratio embed_dim depths=depth num_heads key_dim attn_ratio",
}


def tuples(cfg: dict[str, Any]) -> dict[str, Any]:
    """A configuration from JSON with tuples instead of lists."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in cfg.items()}


def read(config: dict[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Our name, options and configuration of a checkpoint, from config.json in timm's present and older forms."""
    name, _, tag = config["architecture"].partition(".")
    cfg = tuples(dict(config.get("pretrained_cfg", config)))
    cfg |= {key: config[key] for key in ("num_classes", "label_names", "label_descriptions") if key in config}
    cfg |= {"architecture": name} | ({"tag": tag} if tag else {})
    if ours := config.get("fastvit_triton"):  # written by `save_pretrained`
        return ours["variant"], dict(ours["config"]), cfg | {"architecture": ours["variant"]}
    arguments: dict[str, Any] = {key: cfg[key] for key in ("num_classes", "global_pool") if key in cfg}
    if "input_size" in cfg:
        arguments["in_chans"] = cfg["input_size"][0]
        if cfg.get("fixed_input_size", True):
            arguments["img_size"] = tuple(cfg["input_size"][1:])
    arguments |= config.get("model_args") or {}
    layout = getattr(CATALOGUE[name], "MODEL", ImageModel).layout if name in CATALOGUE else ""
    ours_by_theirs = ARGUMENTS | {theirs: ours for ours, theirs in _names(layout).items()}
    options = {ours_by_theirs.get(key, key): value for key, value in arguments.items() if key not in IGNORED}
    return name, {key: value for key, value in options.items() if value is not None}, cfg


def _names(layout: str) -> dict[str, Any]:
    """Our options of a layout → timm's; none for plain ViTs."""
    pairs = (name.partition("=") for name in OPTIONS.get(layout, "").split())
    return {ours: theirs or ours for ours, _, theirs in pairs}


def write(model: ImageModel, cfg: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a model, in which timm finds all that differs from its architecture of that name."""
    name = variant(model)
    is_timms = bool(pretrained.pretrained_cfg(name)) if name in CATALOGUE else False
    if not is_timms and model.layout != "vit":
        raise WeightsError(f"timm has no {name}; use --to fastvit_triton")
    architecture = name if is_timms else GENERIC
    standard = dataclasses.asdict(model_config(architecture))
    config = dataclasses.asdict(model.config)
    changed = {key: value for key, value in config.items() if value != standard.get(key)}
    changed = {key: value for key, value in changed.items() if key not in TRAINING and not key.endswith("_rate")}
    if wrong := [key for key in FIXED if key in changed]:
        needs = ", ".join(f"{key}={standard[key]!r}, not {config[key]!r}" for key in wrong)
        fix = "use --to fastvit_triton, or a .safetensors file"
        raise WeightsError(f"timm cannot build {name} from a config.json: its {architecture} has {needs}; {fix}")
    layout = model.layout if is_timms else "vit"
    names = _names(layout) or dict.fromkeys(standard) | {ours: theirs for theirs, ours in ARGUMENTS.items()}
    if wrong := [key for key in changed if key not in names and key != "num_classes"]:
        raise WeightsError(f"timm's {architecture} has no option {', '.join(wrong)}; use --to fastvit_triton")
    if layout == "cait" and config["global_pool"] not in ("token", "avg"):
        raise WeightsError(f"timm's {architecture} has no global_pool {config['global_pool']!r}; use token or avg")
    if layout == "twins" and "patch_size" in changed:  # for which timm takes no tuple
        changed["patch_size"] = square(changed["patch_size"])
    if architecture.startswith("naflex") or "." in name:
        raise WeightsError(f"timm has other parameter names for {name}; use --to fastvit_triton")
    if str(changed.get("pos_embed", "none")) != "none":  # a fixed table is stored as if it were learned
        del changed["pos_embed"]
    changed.pop("patch_embed", None)  # likewise a linear stem, as a convolution
    changed.pop("num_classes", None)
    first = "patch_embed.backbone.stem.conv" if hasattr(getattr(model, "patch_embed", None), "backbone") else None
    heads = model.head_names
    inside = {key: value for key, value in cfg.items() if key not in ("label_names", "architecture")}
    inside |= {"num_classes": model.num_classes, "custom_load": False, "fixed_input_size": True, "pool_size": None}
    inside |= {"first_conv": first or "patch_embed.proj", "classifier": heads[0] if len(heads) == 1 else heads}
    config = {"architecture": architecture, "num_classes": model.num_classes, "num_features": model.num_features}
    if cfg.get("label_names"):
        config["label_names"] = cfg["label_names"]
    if changed:
        config["model_args"] = {names[key] or key: value for key, value in changed.items()}
    return {**config, "pretrained_cfg": inside}
