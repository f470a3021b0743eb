"""Registry of models by name: each family is a module listed here.

It has CONFIG (class of its options), VARIANTS (name → options), MODEL (its class, or MODELS by name), and CHECKPOINTS
(names in published files), if they are not those of plain ViTs, which are in `plain`.
"""

import difflib
import fnmatch
import re
from collections.abc import Sequence
from typing import Any, Literal, overload

from ..convert.conversion import attach
from . import (
    attention_conv,
    botnet,
    cait,
    cct,
    ceit,
    clip,
    cpvt,
    crossvit,
    cvt,
    deepvit,
    deformable_detr,
    deit,
    detr,
    dinov2,
    hybrid,
    igpt,
    image_transformer,
    ipt,
    levit,
    lvvit,
    naflex,
    pit,
    pvt,
    refiner,
    setr,
    siglip,
    simplevit,
    swin,
    t2t,
    tnt,
    twins,
    vit,
    vt,
)
from .config import ViTConfig
from .features import FeatureGetterNet
from .transformer import VisionTransformer

FAMILIES: tuple[Any, ...] = (
    vit,
    hybrid,
    simplevit,
    deit,
    dinov2,
    clip,
    siglip,
    naflex,
    cpvt,
    swin,
    twins,
    pvt,
    cct,
    cait,
    deepvit,
    lvvit,
    refiner,
    pit,
    tnt,
    crossvit,
    levit,
    t2t,
    ceit,
    cvt,
    botnet,
    vt,
    attention_conv,
    igpt,
    image_transformer,
    ipt,
    detr,
    deformable_detr,
    setr,
)
SIZES = {"ti": "tiny", "t": "tiny", "s": "small", "b": "base", "l": "large", "h": "huge", "g": "giant"}  # in papers
CATALOGUE = {name: family for family in FAMILIES for name in family.VARIANTS}


@overload
def create_model(name: str, *, features_only: Literal[True], **overrides: Any) -> FeatureGetterNet:
    """Builds a feature extractor."""


@overload
def create_model(name: str, **overrides: Any) -> VisionTransformer:
    """Builds a classifier."""


def create_model(
    name: str,
    *,
    features_only: bool = False,
    out_indices: int | Sequence[int] | None = None,
    output_fmt: str | None = None,
    **overrides: Any,
) -> VisionTransformer | FeatureGetterNet:
    """Builds a model with random weights by a name of `list_models()`; see `weights.create.create_model`."""
    if not features_only and (out_indices, output_fmt) != (None, None):
        raise TypeError("out_indices and output_fmt are options of features; add features_only=True")
    config = model_config(name, **overrides)
    family = CATALOGUE[name]
    model = (getattr(family, "MODELS", {}).get(name) or family.MODEL)(config)
    model.variant = name
    attach(model)
    return FeatureGetterNet(model, out_indices, output_fmt=output_fmt) if features_only else model


def model_config(name: str, **overrides) -> ViTConfig:
    """The configuration that `create_model` would build, with the same arguments and errors."""
    family = family_of(name)
    return family.CONFIG(**family.VARIANTS[name] | family.CONFIG.known(overrides))


def family_of(name: str) -> Any:
    """The module of a model's family; raises ValueError with suggestions if the name is unknown."""
    if name not in CATALOGUE:
        raise ValueError(f"no model is called {name!r}; the nearest are {', '.join(nearest(name))}")
    return CATALOGUE[name]


def nearest(name: str, count: int = 3) -> list[str]:
    """The names of the catalogue that share most words with a name, and of these the ones that are spelt most alike."""
    words = set(_words(name))

    def likeness(candidate: str) -> tuple[int, float]:
        shared = len(words & set(_words(candidate)))
        return shared, difflib.SequenceMatcher(None, name.lower(), candidate).ratio()

    return sorted(CATALOGUE, key=likeness, reverse=True)[:count]


def _words(name: str) -> list[str]:
    """Letters and numbers of a name, with the sizes of papers in full."""
    return [SIZES.get(word, word) for word in re.findall(r"[a-z]+|\d+", name.lower())]


def list_models(pattern: str = "*") -> list[str]:
    """Names that match a shell pattern, such as "vit_*_224", sorted."""
    return sorted(fnmatch.filter(CATALOGUE, pattern))
