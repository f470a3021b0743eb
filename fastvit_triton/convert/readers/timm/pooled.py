"""Fused forwards for timm's attention with pooled queries or class tokens: Hiera, SAM 2's Hiera, MViT v2, VOLO."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....engine.attention import attend_all, axis_bias, heads_of
from ....engine.body import Body, finish, normalize, project
from ....engine.branch import Branch, add_branches
from ....engine.freeze import derived
from ....engine.leaves import Foreign
from ....kernels.attention import attention, sum_of_axes
from ...forwards import fused_body, fused_forward
from ...windows import attend_pooled
from .attention import dropped, scale_of
from .blocks import both_norms

Grid = tuple[int, int]


@fused_body(
    "timm.models.hiera.MaskUnitAttention", needs="qkv proj heads head_dim scale q_stride window_size use_mask_unit_attn"
)
def hiera_parts(self: Foreign) -> Body | str:
    """Parts of Hiera's attention, within mask units or among all tokens, with queries pooled by their maximum."""
    if 3 * self.heads * self.head_dim != self.qkv.out_features:
        return f"{self.heads} heads of {self.head_dim} channels for a projection to {self.qkv.out_features}"
    keys = self.q_stride * self.window_size if self.use_mask_unit_attn else 0
    return Body("attention", (self.qkv,), partial(_hiera_heads, self), self.proj, self.heads, keys)


def _hiera_heads(self: Foreign, qkv: Tensor) -> Tensor:
    """Packed projections [B, N, 3 · H · D] → [B, N / stride, H · D]; a unit's tokens are N / n apart."""
    B, N, _ = qkv.shape
    units = N // (self.q_stride * self.window_size) if self.use_mask_unit_attn else 1
    q, k, v = qkv.view(B, -1, units, 3, self.heads, self.head_dim).permute(3, 0, 2, 4, 1, 5).flatten(1, 2).unbind(0)
    if self.q_stride > 1:
        q = q.unflatten(2, (self.q_stride, -1)).amax(2)  # [B · units, H, n / stride, D]
    o = attention(q, k, v, scale=scale_of(self)).unflatten(0, (B, units))
    return o.permute(0, 3, 1, 2, 4).flatten(3).flatten(1, 2)


@fused_forward(
    "pre-norm block",
    "timm.models.hiera.HieraBlock",
    needs="norm1 attn ls1 drop_path1 norm2 mlp ls2 drop_path2 do_expand proj",
    folds=lambda self: both_norms(self)[self.do_expand :],
)
def hiera_block(self: Foreign, x: Tensor) -> Tensor:
    """Hiera's block, which may pool and widen its tokens; [B, N, D] → [B, N / stride, D']."""
    attn = Branch(self.attn, self.norm1, self.ls1, self.drop_path1)
    mlp = Branch(self.mlp, self.norm2, self.ls2, self.drop_path2)
    if not self.do_expand:
        return add_branches(x, attn, mlp, block=self)
    y = normalize(x, self.norm1)
    wide = (x if self.proj is None else self.proj(y)).unflatten(1, (self.attn.q_stride, -1))
    wide = torch.cat((wide.amax(1), wide.mean(1)), -1) if self.proj is None else wide.amax(1)
    return add_branches(wide + self.drop_path1(self.ls1(self.attn(y))), mlp)


@fused_body("timm.models.hieradet_sam2.MultiScaleAttention", needs="qkv proj num_heads scale q_pool")
def sam2_parts(self: Foreign) -> Body:
    """Parts of the attention of SAM 2's Hiera among the tokens of a map, with pooled queries."""
    between = partial(attend_pooled, heads=self.num_heads, scale=scale_of(self), pool=self.q_pool)
    return Body("attention", (self.qkv,), between, self.proj, self.num_heads)


@fused_forward(
    "pooled attention",
    "timm.models.mvitv2.MultiScaleAttention",
    needs="qkv proj num_heads scale has_cls_token pool_q pool_k pool_v norm_q norm_k norm_v rel_pos_type "
    "residual_pooling",
)
def mvit_attention(self: Foreign, x: Tensor, feat_size: Grid) -> tuple[Tensor, list[int]]:
    """Attention with pooled queries, keys and values; [B, N, D] → ([B, N', D'], the size of the pooled map)."""
    (q, size), (k, small), (v, _) = (
        _mvit_pooled(self, t, feat_size, getattr(self, f"pool_{name}"), getattr(self, f"norm_{name}"))
        for t, name in zip(heads_of(project(x, (self.qkv,)), self.num_heads), "qkv", strict=True)
    )
    axes = None
    bias = None
    first = int(self.has_cls_token)
    if self.rel_pos_type == "spatial":
        tables = (_mvit_distances(self, f"rel_pos_{axis}", n, m) for axis, n, m in zip("hw", size, small, strict=True))
        row, column = axis_bias(q[:, :, first:], tables, size)
        if first:  # the class token is in no row or column
            bias = F.pad(sum_of_axes(row, column), (first, 0, first, 0))
        else:
            axes = row, column
    o = attention(q, k, v, bias, scale_of(self), axis_bias=axes)
    o = o + q if self.residual_pooling else o
    return finish(o.transpose(1, 2).flatten(2), self.proj), list(size)


def _mvit_pooled(
    self: Foreign, x: Tensor, grid: Grid, pool: nn.Module | None, norm: nn.Module | None
) -> tuple[Tensor, Grid]:
    """Heads [B, H, N, D] with the map after the class token pooled, and its size."""
    if pool is not None:
        first = int(self.has_cls_token)
        image = x[:, :, first:].transpose(2, 3).unflatten(3, tuple(grid)).flatten(0, 1)
        small = pool(image)
        grid = small.shape[2], small.shape[3]
        small = small.flatten(2).reshape(*x.shape[:2], -1, grid[0] * grid[1]).transpose(2, 3)
        x = torch.cat((x[:, :, :first], small), 2) if first else small
    return x if norm is None else normalize(x, norm), grid


def _mvit_distances(self: Foreign, name: str, n: int, m: int) -> Tensor:
    """The embedding of each pair of n queries and m keys on the same length, [n, m, D]."""
    table = getattr(self, name)

    def make() -> Tensor:
        queries, keys = (torch.arange(count, device=table.device) for count in (n, m))
        spread = max(n / m, 1.0)
        return table[(queries[:, None] * max(m / n, 1.0) - keys * spread + (m - 1) * spread).long()]

    return derived(self, f"{name} {n} {m}", (table,), make)


@fused_body("timm.models.volo.Attention", needs="qkv num_heads scale attn_drop proj proj_drop")
def volo_parts(self: Foreign) -> Body | str:
    """Parts of VOLO's attention among the tokens of a map."""
    between = partial(attend_all, num_heads=self.num_heads, scale=scale_of(self))
    return dropped(self) or Body("attention", (self.qkv,), between, self.proj, self.num_heads, drops=(self.proj_drop,))


@fused_forward(
    "outlook attention",
    "timm.models.volo.OutlookAttention",
    needs="v attn num_heads scale kernel_size padding stride attn_drop proj proj_drop unfold pool",
    reason=dropped,
)
def outlook_attention(self: Foreign, x: Tensor) -> Tensor:
    """VOLO's outlook attention, whose weights are a projection of the central token; [B, h, w, D] → [B, h, w, D]."""
    K = self.kernel_size**2
    grid = x.shape[1:3]
    windows = self.unfold(project(x, (self.v,)).permute(0, 3, 1, 2))  # [B, D · K, centres]
    v = windows.unflatten(1, (self.num_heads, -1, K)).permute(0, 1, 4, 3, 2)  # [B, H, centres, K, D]
    centres = self.pool(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1).flatten(1, 2)
    scores = project(centres, (self.attn,)).unflatten(-1, (self.num_heads, K, K)).transpose(1, 2) * self.scale
    o = (scores.softmax(-1) @ v).permute(0, 1, 4, 3, 2).flatten(1, 3)
    o = F.fold(o, tuple(grid), self.kernel_size, padding=self.padding, stride=self.stride)
    return finish(o.permute(0, 2, 3, 1), self.proj, drop=self.proj_drop)
