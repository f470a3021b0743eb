"""Fused forwards for hierarchical models of timm and ours: Swin, Swin V2, Twins, PVT, PVT v2, and CvT's block."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from ....engine.attention import WindowHeads, as_map, as_tokens, reduced_body, window_body
from ....engine.body import Body, normalize, project
from ....engine.branch import Branch, add_branches
from ....engine.freeze import derived
from ....engine.hooks import has_hooks, is_our_forward, type_name
from ....engine.leaves import (
    Foreign,
    activation_of,
    is_depthwise_conv,
    is_identity,
    is_inactive,
    is_readable,
    softmax_reason,
)
from ....engine.mlp import depthwise_mlp_body, taps_of
from ....kernels.argument import Window
from ....kernels.depthwise import depthwise
from ....kernels.sizes import Branch as Sizes
from ...forwards import fused_body, fused_forward
from ...windows import continuous_bias, cosine_scale, hooked, merge, merged, pooled, table_bias, unusual_norm
from .attention import dropped, is_own, packed_projection, scale_of
from .blocks import both_norms

Grid = tuple[int, int]
SWIN = "norm1 attn _attn drop_path1 norm2 mlp drop_path2 window_size shift_size input_resolution"


def _swin_reason(block: Foreign) -> str | None:
    """Why a Swin block must run its own forward now, or None; it calls its attention on windows, not on the map."""
    attn = block.attn
    if type_name(attn) != f"{type(block).__module__}.WindowAttention":
        return f"its attention is {type(attn).__name__}"
    why = dropped(attn) or unusual_norm(block.norm1, block.drop_path1)
    why = why or softmax_reason(attn.softmax) or hooked(attn.modules())
    if why is None and not is_inactive(attn.proj_drop):
        why = f"dropout {attn.proj_drop.p} within windows"
    separate = getattr(attn, "q_bias", None) is not None and not is_readable(attn.qkv)
    return "qkv was replaced" if why is None and separate else why


def _swin(block: Foreign, x: Tensor) -> Tensor:
    """A Swin block; where the mask is not that of the grid of x [B, H, W, D] its own forward raises an error."""
    attn, grid = block.attn, x.shape[1:3]
    masked = any(block.shift_size) and not getattr(block, "dynamic_mask", False)
    fits = x.dim() == 4 and is_our_forward(attn.__dict__.get("forward"))
    if not fits or (masked and grid != tuple(block.input_resolution)):
        return NotImplemented
    window = Window(tuple(block.window_size), tuple(block.shift_size), pad_first=False)
    qkv = packed_projection(attn)
    assert not isinstance(qkv, str)  # see `_swin_reason`
    cosine = hasattr(attn, "logit_scale")  # Swin V2, whose norms come after the branches
    bias, scale = (continuous_bias(attn), cosine_scale(attn)) if cosine else (table_bias(attn), scale_of(attn))
    parts = window_body((qkv,), attn.proj, attn.num_heads, scale, window, bias, grid=(grid[0], grid[1]))
    norm1, norm2, *after = (None, None, block.norm1, block.norm2) if cosine else (block.norm1, block.norm2, None, None)
    first = Branch(parts, norm1, None, block.drop_path1, post_norm=after[0])
    second = Branch(block.mlp, norm2, None, block.drop_path2, post_norm=after[1])
    return add_branches(x.flatten(1, 2), first, second, block=block).unflatten(1, grid)


@fused_forward(
    "pre-norm block",
    "timm.models.swin_transformer.SwinTransformerBlock",
    needs=SWIN,
    reason=_swin_reason,
    folds=both_norms,
    by_name=True,
)
def swin_block(self: Foreign, x: Tensor) -> Tensor:
    """Swin's block; [B, H, W, D] → [B, H, W, D]."""
    return _swin(self, x)


@fused_forward(
    "post-norm block",
    "timm.models.swin_transformer_v2.SwinTransformerV2Block",
    needs=SWIN,
    reason=_swin_reason,
    by_name=True,
)
def swin_v2_block(self: Foreign, x: Tensor) -> Tensor:
    """Swin V2's block with norms after the branches; [B, H, W, D] → [B, H, W, D]."""
    return _swin(self, x)


@fused_body(
    "timm.models.swin_transformer_v2.WindowAttention",
    needs="qkv num_heads logit_scale cpb_mlp relative_coords_table relative_position_index softmax attn_drop proj "
    "proj_drop window_size",
)
def swin_v2_parts(self: Foreign, mask: Tensor | None = None) -> Body | str:
    """Parts of Swin V2's attention, called on windows [B·windows, n, D]."""
    why = "windows with a mask" if mask is not None else dropped(self) or softmax_reason(self.softmax)
    why = why or hooked(self.cpb_mlp.modules())
    qkv = packed_projection(self) if why is None else why
    if isinstance(qkv, str):
        return qkv
    size = tuple(self.window_size)
    bias = continuous_bias(self)
    scale = cosine_scale(self)
    return window_body((qkv,), self.proj, self.num_heads, scale, Window(size), bias, drops=(self.proj_drop,), grid=size)


@fused_forward(
    "patch merging",
    "timm.models.swin_transformer.PatchMerging",
    "fastvit_triton.layers.window.PatchMerging",
    needs="norm reduction",
    folds=lambda self: [(self.norm, self.reduction)],
)
def swin_merging(self: Foreign, x: Tensor) -> Tensor:
    """Swin's patch merging; [B, H, W, D] → [B, ⌈H/2⌉, ⌈W/2⌉, D']."""
    return merge(x, self.norm, self.reduction)


@fused_forward("patch merging", "timm.models.swin_transformer_v2.PatchMerging", needs="norm reduction")
def swin_v2_merging(self: Foreign, x: Tensor) -> Tensor:
    """Swin V2's patch merging; [B, H, W, D] → [B, ⌈H/2⌉, ⌈W/2⌉, D']."""
    return normalize(project(merged(x), (self.reduction,)), self.norm)


@dataclass(frozen=True, eq=False)
class _Dropped:
    """What runs between the projections of an attention of ours while its probabilities are dropped: PyTorch's."""

    attn: Foreign  # a `WindowAttention` or a `ReducedAttention`
    heads: Any  # what runs without dropout
    takes_input: ClassVar[bool] = True

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        """The projections."""
        return self.heads.layers

    def sizes(self, body: Body) -> Sizes:
        """See `engine.body.Body`."""
        return self.heads.sizes(body)

    def __call__(self, h: Tensor, x: Tensor, way: str) -> Tensor:
        """Packed projections of x [B, H, W, D], or x itself if there is a reduction → [B, H, W, D]."""
        attn = self.attn
        if isinstance(self.heads, WindowHeads):
            return attn.attend(h)
        if attn.sr is None:
            return attn.attend(*h.split((x.shape[-1], 2 * x.shape[-1]), -1))
        q = project(x, (attn.q,), None, None, way)
        return attn.attend(q, project(attn.reduce(x), (attn.kv,), None, None, way))


def _unless_dropped(attn: Foreign, body: Body) -> Body | str:
    """The body; while probabilities are dropped, ours with PyTorch's attention, and the reason for any other."""
    if not is_own(attn):
        return dropped(attn) or body
    drops = attn.attn_drop.training and attn.attn_drop.p > 0
    return body._replace(between=_Dropped(attn, body.between)) if drops else body


@fused_body(
    "timm.models.twins.LocallyGroupedAttn",
    "fastvit_triton.layers.window.WindowAttention",
    needs="qkv num_heads scale attn_drop proj proj_drop ws|window",
)
def window_parts(self: Foreign, size: Grid | None = None) -> Body | str:
    """Parts of an attention in windows of a map, given as tokens if it has this size; its bias is kept while frozen."""
    ours = is_own(self)
    if not ours and (why := hooked((self.qkv,))) is not None:  # which is called on windows
        return why
    window = self.window if ours else Window((self.ws, self.ws))
    table = self.relative_position_bias_table if ours else None
    bias = None if table is None else derived(self, "bias", (table,), self.bias)
    layers = (self.qkv,), self.proj, self.num_heads, scale_of(self)
    return _unless_dropped(self, window_body(*layers, window, bias, (self.proj_drop,), size))


@fused_body(
    "timm.models.twins.GlobalSubSampleAttn",
    "timm.models.pvt_v2.Attention",
    "fastvit_triton.layers.reduced.ReducedAttention",
    needs="q kv num_heads scale attn_drop proj proj_drop sr norm",
)
def reduced_parts(self: Foreign, size: Grid | None = None, feat_size: Grid | None = None) -> Body | str:
    """Parts of an attention to a smaller map, by a convolution or by pooling (linear attention); tokens have a size."""
    grid = size if feat_size is None else feat_size
    reduce = self.sr
    norm = self.norm
    if getattr(self, "pool", None) is not None:
        reduce = partial(pooled, pool=self.pool, conv=self.sr, norm=self.norm, act=self.act)
        norm = None
    ratio = self.sr_ratio if hasattr(self, "sr_ratio") else 1 if self.sr is None else self.sr.stride[0]
    layers = self.q, (self.kv,), self.proj, self.num_heads, scale_of(self)
    return _unless_dropped(self, reduced_body(*layers, reduce, norm, ratio, (self.proj_drop,), grid))


@fused_body("timm.models.pvt_v2.MlpWithDepthwiseConv", needs="fc1 relu dwconv act fc2 drop")
def pvt_mlp_parts(self: Foreign, feat_size: Grid | None = None) -> Body | str:
    """Parts of PVT v2's MLP with a depthwise convolution."""
    act = activation_of(self.act)
    relu = activation_of(self.relu) == "relu"
    if not relu and not is_identity(self.relu):
        return "relu was replaced or has a hook"
    return depthwise_mlp_body(self.fc1, self.dwconv, act, self.fc2, (self.drop, self.drop), relu, feat_size)


@fused_forward(
    "pre-norm block",
    "timm.models.twins.Block",
    "timm.models.pvt_v2.Block",
    "fastvit_triton.models.cvt.ConvBlock",
    needs="norm1 attn drop_path1 norm2 mlp drop_path2",
    takes="size feat_size",
    folds=both_norms,
    by_name=True,
)
def pyramid_block(self: Foreign, x: Tensor, *inputs: Any, **named: Any) -> Tensor:
    """Pre-norm block of tokens of a grid; [B, N, D] → [B, N, D]."""
    (size,) = (*inputs, *named.values())
    name = "feat_size" if type_name(self).endswith("pvt_v2.Block") else "size"
    spatial = name == "feat_size"
    attn = Branch(self.attn, self.norm1, None, self.drop_path1, call={name: size})
    mlp = Branch(self.mlp, self.norm2, None, self.drop_path2, call={name: size} if spatial else None)
    return add_branches(x, attn, mlp, block=self)


def _pos_reason(self: Foreign) -> str | None:
    conv = self.proj[0] if type(self.proj) is nn.Sequential and len(self.proj) == 1 else None
    keeps_size = getattr(self, "stride", 1) == 1  # ours has none
    plain = keeps_size and conv is not None and not has_hooks(self.proj) and is_depthwise_conv(conv)
    return None if plain else "its convolution has a stride, was replaced or has a hook"


@fused_forward(
    "depthwise convolution",
    "timm.models.twins.PosConv",
    "fastvit_triton.layers.conv.Peg",
    needs="proj",
    reason=_pos_reason,
)
def pos_conv(self: Foreign, x: Tensor, size: Grid | None = None) -> Tensor:
    """Positional encoding by a depthwise convolution of a map [B, H, W, D], or of tokens [B, N, D] with its size."""
    conv = self.proj[0]
    return as_tokens(depthwise(as_map(x, size), taps_of(conv), conv.bias, residual=True), size)
