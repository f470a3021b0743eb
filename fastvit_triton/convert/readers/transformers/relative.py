"""Fused forwards for transformers' attention with relative positions by axis: SAM and its copies, SegGPT, ViTDet.

The bias of a query q at (i, j) and a key at (k, l) is q · rows[i − k] + q · columns[j − l], from Li et al., MViTv2,
arXiv:2112.01526, section 4.1. It depends on the image, so that it is computed for each window.
"""

from torch import Tensor

from ....engine.attention import heads_of, merged_heads
from ....engine.body import Body
from ....engine.hooks import has_hooks
from ....engine.leaves import Foreign
from ....kernels.attention import attention
from ...forwards import fused_body
from ...third_party import classes
from ...windows import bias_by_axis


def _parts(self: Foreign, heads: int, positions: bool, scale: float | None) -> Body:
    """Parts of an attention on a map [B, height, width, D]; no scale is 1 / √d."""

    def attend(qkv: Tensor) -> Tensor:
        q, k, v = heads_of(qkv, heads)
        grid = qkv.shape[1:3]
        axes = bias_by_axis(self, q, grid) if positions else None
        return merged_heads(attention(q, k, v, scale=scale, axis_bias=axes), grid)

    return Body("attention", (self.qkv,), attend, self.proj, heads, decomposed=bool(positions))


@fused_body(
    *classes("sam.SamVisionSdpaAttention"), needs="qkv proj num_attention_heads use_rel_pos get_rel_pos", after=(None,)
)
def sam_sdpa_parts(self: Foreign, output_attentions: bool = False) -> Body:
    """Parts of SAM's attention by PyTorch's function, which has its own scale, no dropout and no weights to return."""
    return _parts(self, self.num_attention_heads, self.use_rel_pos, None)


@fused_body(
    *classes("sam.SamVisionAttention"),
    needs="qkv proj num_attention_heads scale dropout use_rel_pos get_rel_pos",
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
    after=(None,),
)
@fused_body(
    *classes("vitdet.VitDetAttention"), needs="qkv proj num_heads scale use_relative_position_embeddings", after=()
)
def seggpt_parts(self: Foreign, output_attentions: bool = False) -> Body | str:
    """Parts of SegGPT's and ViTDet's attention."""
    if output_attentions:
        return "its weights are requested"
    heads = self.num_attention_heads if hasattr(self, "num_attention_heads") else self.num_heads
    return _parts(self, heads, self.use_relative_position_embeddings, self.scale)
