"""Weights of models that mix convolutions and attention: names in other libraries.

Our names are those of timm and, where it lacks the model, the authors'. No tensor of a CvT depends on the image's size.

Sources: state dicts of transformers 5.23 and timm 1.0.31; microsoft/CvT (lib/models/cls_cvt.py); epfml/attention-cnn
(models/bert.py, models/transformer.py).
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F

from . import pyramid
from .adapt import State
from .layouts import Layout


def _from_cvt(key: str) -> str:
    """Stages and their blocks have shorter paths in the authors' code."""
    key = re.sub(r"^encoder\.stages\.(\d+)\.", r"stage\1.", key)
    key = re.sub(r"^(stage\d+)\.layers\.", r"\1.blocks.", key)
    key = key.replace("embedding.convolution_embeddings.projection", "patch_embed.proj")
    return key.replace("embedding.convolution_embeddings.normalization", "patch_embed.norm")


CONVOLVED = "attention.attention.convolution_projection_{{query,key,value}}.convolution_projection.{}"
CVT_LAYOUTS = (
    Layout(
        name="transformers CvT",
        mark="encoder.stages.0.embedding.convolution_embeddings.projection.weight",
        resize="bilinear",
        number=_from_cvt,
        stem={"norm": "layernorm", "head": "classifier"},
        home="stage{}.blocks.{}",
        blocks="stage{}.blocks.{}",
        block={
            "norm{1,2}": "layernorm_{before,after}",
            "attn.conv_proj_{q,k,v}.conv": CONVOLVED.format("convolution"),
            "attn.conv_proj_{q,k,v}.bn": CONVOLVED.format("normalization"),
            "attn.proj_{q,k,v}": "attention.attention.projection_{query,key,value}",
            "attn.proj": "attention.output.dense",
            "mlp.fc{1,2}": "{intermediate,output}.dense",
        },
        base="cvt.",
    ),
    Layout(
        name="CvT",
        mark="stage0.patch_embed.proj.weight",
        resize="bilinear",
        home="stage{}.blocks.{}",
        blocks="stage{}.blocks.{}",
    ),
)

BOTNET = Layout(name="timm", mark="stem.conv1.conv.weight", beside="head.fc.weight", resize="linear")

VT = Layout(name="VT-ResNet", mark="stem.conv1.conv.weight", resize="linear")


POSITIONAL_LAYOUTS = (
    Layout(
        name="attention-cnn",
        mark="features_upscale.weight",
        beside="encoder.layer.0.attention.self.attention_centers",
        resize="linear",
        stem={"patch_embed.proj": "features_upscale", "head": "classifier"},
        blocks="encoder.layer.{}",
        block={
            "attn.attention_centers": "attention.self.attention_centers",
            "attn.attention_spreads": "attention.self.attention_spreads",
            "attn.value": "attention.self.value",
            "attn.proj": "attention.output.dense",
            "norm1": "attention.output.LayerNorm",
            "mlp.fc1": "intermediate.dense",
            "mlp.fc2": "output.dense",
            "norm2": "output.LayerNorm",
        },
    ),
    Layout(
        name="fastvit_triton", mark="patch_embed.proj.weight", beside="blocks.0.attn.attention_centers", resize="linear"
    ),
)


def fit_positional(
    model: Any, target: State, state: State, metadata: Mapping[str, str], mode: str
) -> tuple[list[str], str]:
    """Makes the authors' tensors fit: a linear layer of concatenated pixels [D, p · p · C] becomes a convolution, and
    a table of positions and embeddings that their classifier does not read are dropped; see `vit.fit`."""
    names = ("attention_mask", "mask_embedding", "cls_embedding", "features_downscale.", "pixelizer.")
    useless = [key for key in state if key.endswith("attention.self.R") or key.startswith(names)]
    for key in useless:
        del state[key]
    weight, size = state.get("patch_embed.proj.weight"), model.config.patch_size
    if weight is not None and weight.dim() == 2 and weight.shape[1] % math.prod(size) == 0:
        state["patch_embed.proj.weight"] = weight.unflatten(1, (*size, -1)).permute(0, 3, 1, 2)
    return useless, ""


def fit_distances(
    model: Any, target: State, state: State, metadata: Mapping[str, str], mode: str
) -> tuple[list[str], str]:
    """Interpolates embeddings of distances for the grids of a BoTNet, as SAM does; for the arguments see `vit.fit`."""
    notes = []
    for key in (key for key in state if key.endswith(("pos_embed.height_rel", "pos_embed.width_rel"))):
        old, new = state[key], target[key].shape if key in target else state[key].shape
        if old.shape != new and old.shape[1:] == new[1:]:
            state[key] = F.interpolate(old.mT[None], new[0], mode=mode)[0].mT.contiguous()
            notes.append(f"{key.split('.')[-1]} {len(old)} resized to {new[0]} ({mode})")
    return [], ", ".join(dict.fromkeys(notes))


ROWS: dict[str, tuple] = {  # see `Spelling`
    "cvt": ("CvT", CVT_LAYOUTS, pyramid.keep),
    "botnet": ("BoTNet", (BOTNET,), fit_distances),
    "attention_conv": ("attention as convolution", POSITIONAL_LAYOUTS, fit_positional),
    "vt": ("VT-ResNet", (VT,), pyramid.keep),
}
