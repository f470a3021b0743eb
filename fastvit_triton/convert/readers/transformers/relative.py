"""Fused forwards for transformers' attention with relative positions by axis: SAM and its copies, SegGPT, ViTDet.

The bias of a query q at (i, j) and a key at (k, l) is q · rows[i − k] + q · columns[j − l], from Li et al., MViTv2,
arXiv:2112.01526, section 4.1. It depends on the image, so that it is computed for each window.
"""

from torch import Tensor, nn

from ....engine.attention import axis_bias, heads_of, merged_heads
from ....engine.body import Body
from ....engine.freeze import derived
from ....engine.hooks import has_hooks
from ....engine.leaves import Foreign
from ....kernels.attention import attention
from ...forwards import fused_body
from ...third_party import classes


def _table(self: Foreign, name: str, size: int) -> Tensor:
    """Positions [n, n, d] of all pairs of queries and keys along an axis, interpolated to its length."""
    table = getattr(self, name)
    return derived(self, f"{name} {size}", (table,), lambda: _expanded(table, size))


def _expanded(table: Tensor, size: int) -> Tensor:
    """Views and a flip, not an index, whose gradient is not the same in every run on a CPU."""
    if len(table) != 2 * size - 1:
        table = nn.functional.interpolate(table.mT[None], size=2 * size - 1, mode="linear")[0].mT
    return table.unfold(0, size, 1).flip(-1).mT


def _parts(self: Foreign, heads: int, positions: bool, scale: float | None) -> Body:
    """Parts of an attention on a map [B, height, width, D]; no scale is 1 / √d."""

    def attend(qkv: Tensor) -> Tensor:
        q, k, v = heads_of(qkv, heads)
        grid = qkv.shape[1:3]
        axes = None
        if positions:
            tables = (_table(self, f"rel_pos_{axis}", n) for axis, n in zip("hw", grid, strict=True))
            axes = axis_bias(q, tables, grid)
        return merged_heads(attention(q, k, v, scale=scale, axis_bias=axes), qkv.shape[1:-1])

    return Body("attention", (self.qkv,), attend, self.proj, heads, decomposed=bool(positions))


@fused_body(
    *classes("sam.SamVisionSdpaAttention"),
    needs="qkv proj num_attention_heads use_rel_pos get_rel_pos",
    takes="output_attentions",
    after=(None,),
)
def sam_sdpa_parts(self: Foreign, output_attentions: bool = False) -> Body:
    """Parts of SAM's attention by PyTorch's function, which has its own scale, no dropout and no weights to return."""
    return _parts(self, self.num_attention_heads, self.use_rel_pos, None)


@fused_body(
    *classes("sam.SamVisionAttention"),
    needs="qkv proj num_attention_heads scale dropout use_rel_pos get_rel_pos",
    takes="output_attentions",
    after=(None,),
)
def sam_parts(self: Foreign, output_attentions: bool | None = None) -> Body | str:
    """Parts of SAM's attention with softmax written out; its weights are returned to hooks only."""
    if self.training and self.dropout > 0:
        return f"attention dropout {self.dropout}"
    if output_attentions or self._forward_hooks or has_hooks(self):
        return "its attention weights are requested or have a hook"
    return _parts(self, self.num_attention_heads, self.use_rel_pos, self.scale)


@fused_body(
    *classes("seggpt.SegGptAttention"),
    needs="qkv proj num_attention_heads scale use_relative_position_embeddings get_rel_pos",
    takes="output_attentions",
    after=(None,),
)
def seggpt_parts(self: Foreign, output_attentions: bool = False) -> Body | str:
    """Parts of SegGPT's attention."""
    if output_attentions:
        return "its weights are requested"
    return _parts(self, self.num_attention_heads, self.use_relative_position_embeddings, self.scale)


@fused_body(
    *classes("vitdet.VitDetAttention"),
    needs="qkv proj num_heads scale use_relative_position_embeddings",
    takes="output_attentions",
    after=(),
)
def vitdet_parts(self: Foreign, output_attentions: bool = False) -> Body | str:
    """Parts of ViTDet's attention."""
    if output_attentions:
        return "its weights are requested"
    return _parts(self, self.num_heads, self.use_relative_position_embeddings, self.scale)
