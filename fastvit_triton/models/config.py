"""`BaseConfig`: options of every model; `ViTConfig`: all options of a plain Vision Transformer.

Names are timm's where timm has one, and mean the same in all families: what a family's config does not describe is as
in `ViTConfig`. A variant is a dictionary of options, from which `create_model` builds a config.
"""

import dataclasses
import difflib
import math
from dataclasses import dataclass
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, ClassVar, TypeVar, get_args

from ..layers.embed import sides

Config = TypeVar("Config", bound="BaseConfig")
Options = dict[str, Any]  # fields of a config, which are checked when it is built


@dataclass(frozen=True, kw_only=True)
class BaseConfig:
    """Options of every model; a family's config adds its own.

    Attributes:
        img_size: image side in pixels, or (height, width).
        in_chans: C, image channels.
        num_classes: outputs of the head; 0 returns the pooled features.
        drop_path_rate: stochastic depth of the last block; rises linearly from 0 (arXiv:1603.09382).
        grad_checkpointing: recompute each block in the backward pass instead of storing it.
    """

    img_size: int | tuple[int, int] = 224
    in_chans: int = 3
    num_classes: int = 1000
    drop_path_rate: float = 0.0
    grad_checkpointing: bool = False

    pools: ClassVar[tuple[str, ...]] = ()  # values of global_pool that the family has
    choices: ClassVar[dict[str, tuple[str, ...]]] = {}  # field → its values
    least: ClassVar[dict[str, int]] = dict(in_chans=1)  # field → its least value
    only: ClassVar[dict[str, Any]] = {}  # field → its one value in the family
    zeros: ClassVar[tuple[str, ...] | None] = None  # numbers that may be 0, where all others but rates are positive

    def __post_init__(self) -> None:
        """Normalises and checks the fields."""
        check_types(self)
        for field in dataclasses.fields(self):  # JSON has lists
            object.__setattr__(self, field.name, _as_tuple(getattr(self, field.name)))
            if field.name in ("img_size", "patch_size") and field.type == int | tuple[int, int]:
                object.__setattr__(self, field.name, sides(getattr(self, field.name)))
        if self.num_classes < 0:
            raise ValueError(f"num_classes is {self.num_classes}; use 0 for no head, or the number of classes")
        for name in (f.name for f in dataclasses.fields(self) if f.name.endswith(("drop_rate", "drop_path_rate"))):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}; use a rate in [0, 1)")
        if self.pools:
            given = vars(self)["global_pool"]
            pool = ALIASES.get(given, given)
            object.__setattr__(self, "global_pool", pool)
            if pool not in self.pools:
                raise ValueError(f"global_pool is {pool!r}; use one of {', '.join(self.pools)}")
            if pool == "token" and not vars(self).get("class_token", True):
                other = "global_pool='avg'" if "avg" in self.pools else "'seq'"
                raise ValueError(f"global_pool 'token' needs class_token=True; use {other} without a class token")
        for name, allowed in self.choices.items():
            if (given := getattr(self, name)) not in allowed:
                raise ValueError(f"{name} is {given!r}; use one of {', '.join(allowed)}")
        for name, least in self.least.items():
            if (given := getattr(self, name)) is not None and given < least:
                raise ValueError(f"{name} is {given}; it must be at least {least}")
        if self.zeros is not None:
            self.check_positive(self.zeros)
        check_only(self, **self.only)

    def check_positive(self, zeros: tuple[str, ...]) -> None:
        """Raises ValueError unless all numbers are above 0, except rates, and the fields `zeros`, which may be 0."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            may = field.name in zeros
            if not field.name.endswith("_rate") and any(v < 0 or (v == 0 and not may) for v in _numbers(value)):
                raise ValueError(f"{field.name} is {value}; use numbers {'of at least' if may else 'above'} 0")

    def replace(self: Config, **overrides: Any) -> Config:
        """Returns a copy with some fields changed; as in timm, None leaves a field that cannot be None.

        Raises:
            TypeError: a field is unknown; the message suggests names.
            ValueError: a value is outside its range.
        """
        return dataclasses.replace(self, **self.known(overrides))

    @classmethod
    def known(cls, overrides: Options) -> Options:
        """The overrides, but for those that are None of fields that cannot be None.

        Raises:
            TypeError: a field is unknown; the message suggests names.
        """
        kinds = {field.name: field.type for field in dataclasses.fields(cls)}
        for name in overrides:
            if name not in kinds:
                near = difflib.get_close_matches(name, kinds, n=3, cutoff=0.3) or kinds
                raise TypeError(f"{cls.__name__} has no option {name!r}; the nearest are {', '.join(near)}")
        unset = {name for name, value in overrides.items() if value is None and NoneType not in get_args(kinds[name])}
        return {name: value for name, value in overrides.items() if name not in unset}


CHOICES = {
    "norm": ("pre", "post"),
    "act": ("gelu", "gelu_tanh", "quick_gelu", "relu", "silu"),
    "mlp": ("mlp", "swiglu"),
    "pos_embed": ("learned", "sincos1d", "sincos2d", "learned2d", "relative", "none"),
    "patch_embed": ("conv", "linear", "norm_linear_norm"),
    "global_pool": ("token", "avg", "map", "none"),
    "weight_init": ("timm", "jax"),
}
ALIASES = {"gap": "avg", "": "none"}  # of global_pool


@dataclass(frozen=True, kw_only=True)
class ViTConfig(BaseConfig):
    """Options of a plain ViT, in addition to those of `BaseConfig`.

    Attributes:
        patch_size: P, patch side in pixels, or (height, width).
        embed_dim: D, channels per token.
        depth: number of blocks.
        num_heads: H.
        head_dim: channels per head; None means D / H.
        mlp_ratio: hidden channels of the MLP divided by D; for "swiglu" gate and value together.
        mlp: "mlp" (fc1, act, fc2) or "swiglu" (fc1 holds gate and value; DINOv2 giant).
        act: "gelu" (exact, erf), "gelu_tanh" (JAX), "quick_gelu" (OpenAI CLIP), "relu" or "silu".
        norm: "pre" (x + f(LN x), the ViT paper) or "post" (LN(x + f(x)), the original Transformer).
        eps: LayerNorm epsilon.
        qkv_bias: bias on the query, key and value projections.
        proj_bias: bias on the attention's output projection and on both MLP layers, as in timm.
        qk_norm: LayerNorm on each head's queries and keys (ViT-22B, arXiv:2302.05442, section 2).
        init_values: initial LayerScale (CaiT, arXiv:2103.17239, eq. 6); None means no LayerScale.
        class_token: prepend a learned token; required by global_pool="token".
        reg_tokens: register tokens after the class token (arXiv:2309.16588).
        pos_embed: "learned" (1-D table), "sincos1d", "sincos2d" (fixed), "learned2d" (a row and a column table),
            "relative" (key embeddings of 1-D offsets inside attention; ViT paper, appendix D.4) or "none".
        no_embed_class: True adds positions before the prefix tokens are prepended (N rows), False after (prefix + N).
        patch_embed: "conv", "linear" (the same map on flattened patches) or "norm_linear_norm" (vit-pytorch's stem).
        pre_norm: a LayerNorm between the embedding and the first block, and no patch bias (CLIP).
        dynamic_img_size: accept any size that the patch divides; learned positions are resampled on the fly.
        global_pool: "token" (class token), "avg" (mean of patch tokens; "gap" is the same), "map" (attention pooling)
            or "none" (all tokens go to the head; timm's "" is the same).
        final_norm: LayerNorm after the last block; None means yes for norm="pre", no for norm="post".
        fc_norm: put that norm after the pooling; None means yes for "avg", as in timm.
        pre_logits: a D x D layer with tanh before the head (ViT paper, section 3.1, pre-training head).
        drop_rate: dropout before the head.
        pos_drop_rate: dropout after the positions.
        patch_drop_rate: fraction of patch tokens dropped while training (arXiv:2212.00794).
        proj_drop_rate: dropout after the attention projection and inside the MLP.
        attn_drop_rate: dropout on attention probabilities.
        weight_init: "timm" (truncated normal 0.02) or "jax" (the ViT paper's code: Xavier uniform, zero head).
    """

    patch_size: int | tuple[int, int] = 16
    embed_dim: int = 768
    depth: int = 12
    num_heads: int = 12
    head_dim: int | None = None
    mlp_ratio: float = 4.0
    mlp: str = "mlp"
    act: str = "gelu"
    norm: str = "pre"
    eps: float = 1e-6
    qkv_bias: bool = True
    proj_bias: bool = True
    qk_norm: bool = False
    init_values: float | None = None
    class_token: bool = True
    reg_tokens: int = 0
    pos_embed: str = "learned"
    no_embed_class: bool = False
    patch_embed: str = "conv"
    pre_norm: bool = False
    dynamic_img_size: bool = False
    global_pool: str = "token"
    final_norm: bool | None = None
    fc_norm: bool | None = None
    pre_logits: bool = False
    drop_rate: float = 0.0
    pos_drop_rate: float = 0.0
    patch_drop_rate: float = 0.0
    proj_drop_rate: float = 0.0
    attn_drop_rate: float = 0.0
    weight_init: str = "timm"
    pools = CHOICES["global_pool"]
    choices: ClassVar = CHOICES
    least: ClassVar = dict(in_chans=1, embed_dim=1, depth=1, num_heads=1, head_dim=1, reg_tokens=0, eps=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_patches(self.img_size, self.patch_size)
        if self.embed_dim * self.mlp_ratio < 1:
            raise ValueError(f"mlp_ratio is {self.mlp_ratio}; the MLP needs at least 1 hidden channel")
        if self.head_dim is None and self.embed_dim % self.num_heads:
            raise ValueError(
                f"embed_dim {self.embed_dim} is not a multiple of num_heads {self.num_heads}; "
                "change one of them or give head_dim"
            )
        if self.pos_embed == "sincos2d" and self.embed_dim % 4:
            raise ValueError(f"pos_embed 'sincos2d' needs embed_dim divisible by 4, got {self.embed_dim}")
        if self.pos_embed in ("sincos1d", "learned2d") and self.embed_dim % 2:
            raise ValueError(f"pos_embed {self.pos_embed!r} needs an even embed_dim, got {self.embed_dim}")

    @property
    def grid_size(self) -> tuple[int, int]:
        """Patches per column and per row."""
        (height, width), (rows, columns) = sides(self.img_size), sides(self.patch_size)
        return height // rows, width // columns


def check_types(config: BaseConfig) -> None:
    """Raises ValueError unless each field has its annotated type; numbers must be finite."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        kind = field.type
        kinds: tuple[Any, ...] = get_args(kind) if isinstance(kind, UnionType) else (kind,)
        if not any(_is_a(value, kind) for kind in kinds):
            words = " or ".join("None" if kind is NoneType else getattr(kind, "__name__", str(kind)) for kind in kinds)
            raise ValueError(f"{field.name} is {value!r}; its type is {words}")


def check_patches(img_size: int | tuple[int, int], patch_size: int | tuple[int, int]) -> None:
    """Raises ValueError unless the sides of a patch divide those of the image."""
    for axis, image, patch in zip(("height", "width"), sides(img_size), sides(patch_size), strict=True):
        if patch < 1:
            raise ValueError(f"patch_size is {patch_size}; it must be at least 1")
        if image < patch or image % patch:
            raise ValueError(
                f"img_size {axis} {image} is not a multiple of patch_size {patch}; {fitting(image, patch)}"
            )


def check_multiple(config: BaseConfig, channels: str, heads: str) -> None:
    """Raises ValueError unless the field `channels` is a multiple of the field `heads`."""
    D = getattr(config, channels)
    H = getattr(config, heads)
    if D % H:
        raise ValueError(f"{channels} {D} is not a multiple of {heads} {H}; change one of them")


def check_only(config: BaseConfig, **only: Any) -> None:
    """Raises ValueError unless the fields have these values, the only ones that the family has."""
    for field, value in only.items():
        if getattr(config, field) != value:
            raise ValueError(f"{field} is {getattr(config, field)!r}; this model has {field}={value!r} only")


def _as_tuple(value: Any) -> Any:
    """A list, and those in it, as tuples."""
    return tuple(map(_as_tuple, value)) if isinstance(value, (tuple, list)) else value


def _numbers(value: Any) -> list[Any]:
    """The numbers in a value, which may be a tuple of tuples; booleans are none."""
    if isinstance(value, (tuple, list)):
        return [number for v in value for number in _numbers(v)]
    return [value] if isinstance(value, Real) and not isinstance(value, bool) else []


def _is_a(value: Any, kind: Any) -> bool:
    if kind is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if isinstance(kind, type) and kind is not tuple and not get_args(kind):
        return isinstance(value, kind)
    each, *more = get_args(kind)  # of tuple[int, int], or of tuple[int, ...]
    fits = isinstance(value, (tuple, list)) and (more == [...] or len(value) == 2)
    return fits and all(_is_a(v, each) for v in value)


def fitting(image: int, patch: int) -> str:
    """Text that suggests valid image sides for an error message."""
    below = image // patch * patch
    above = -(-image // patch) * patch
    return f"use {above}" if below < patch else f"use {below} or {above}"
