"""Fused forwards for transformers' towers with smaller maps in later stages: Hiera, SAM 2 and Florence-2 (DaViT)."""

import torch
from torch import Tensor

from ....engine.attention import heads_of, merged_heads, window_body
from ....engine.body import Body
from ....engine.hooks import has_hooks
from ....engine.leaves import Foreign, activation_of
from ....engine.mlp import MlpBody
from ....kernels.argument import Window
from ....kernels.attention import attention
from ...forwards import fused_body, fused_forward
from .vit import attention_reason, classes


@fused_body(
    *classes("hiera.HieraMaskUnitAttention"),
    needs="qkv proj num_heads scale query_stride window_size use_mask_unit_attn",
    takes="output_attentions",
    after=(None,),
)
def hiera_parts(self: Foreign, output_attentions: bool = False) -> Body | str:
    """Parts of Hiera's attention in mask units, whose queries are maxima over `query_stride` tokens."""
    if output_attentions:
        return "its weights are requested"
    heads, stride = self.num_heads, self.query_stride

    def attend(qkv: Tensor) -> Tensor:
        tokens = stride * self.window_size if self.use_mask_unit_attn else qkv.shape[1]
        units = qkv.shape[1] // tokens
        pieces = qkv.unflatten(1, (tokens, units)).transpose(1, 2).flatten(0, 1)  # a unit's tokens are units apart
        q, k, v = heads_of(pieces, heads)
        if stride > 1:
            q = q.unflatten(2, (stride, -1)).max(2).values
        o = attention(q, k, v, None, self.scale).transpose(1, 2).flatten(2)
        return o.unflatten(0, (-1, units)).transpose(1, 2).flatten(1, 2)

    return Body("attention", (self.qkv,), attend, self.proj, heads)


@fused_body(
    *classes("sam2.Sam2MultiScaleAttention"),
    needs="qkv proj num_attention_heads scale query_stride is_causal config",
    takes="",
)
def sam2_parts(self: Foreign, **more: object) -> Body | str:
    """Parts of SAM 2's attention on a map [B, height, width, D], whose queries may be pooled to a smaller one."""
    why = attention_reason(self, 0.0, None, None, more)
    if why is not None:
        return why
    heads, stride = self.num_attention_heads, self.query_stride

    def attend(qkv: Tensor) -> Tensor:
        if not stride:
            q, k, v = heads_of(qkv, heads)
            return merged_heads(attention(q, k, v, None, self.scale), qkv.shape[1:-1])
        q = torch.nn.functional.max_pool2d(qkv.chunk(3, -1)[0].permute(0, 3, 1, 2), stride, stride).permute(0, 2, 3, 1)
        _, k, v = heads_of(qkv, heads)
        small = q.flatten(1, 2).unflatten(-1, (heads, -1)).transpose(1, 2)
        return merged_heads(attention(small, k, v, None, self.scale), q.shape[1:-1])

    return Body("attention", (self.qkv,), attend, self.proj, heads)


@fused_body(*classes("sam2.Sam2FeedForward"), needs="proj_in activation layers proj_out sigmoid_output", takes="")
def sam2_mlp_parts(self: Foreign) -> MlpBody | str:
    """Parts of SAM 2's MLP, if it has two layers."""
    if len(self.layers) or self.sigmoid_output:
        return "more than two layers, or a sigmoid after them"
    return MlpBody((self.proj_in,), activation_of(self.activation), self.proj_out)


def _window_reason(self: Foreign) -> str | None:
    return attention_reason(self, 0.0, None, None, {})


@fused_forward(
    "window attention",
    *classes("florence2.Florence2VisionWindowAttention"),
    needs="qkv proj num_heads scale window_size is_causal config",
    takes="",
    reason=_window_reason,
)
def florence2_windows(self: Foreign, hidden_states: Tensor) -> Tensor:
    """Attention in separate windows of a map; [B, H, W, D] → [B, H·W, D]."""
    if has_hooks(self.qkv) or has_hooks(self.proj):  # they would see a map instead of windows
        return NotImplemented
    window = Window((self.window_size,) * 2)
    return window_body((self.qkv,), self.proj, self.num_heads, self.scale, window)(hidden_states).flatten(1, 2)


@fused_body(*classes("florence2.Florence2VisionChannelAttention"), needs="qkv proj groups is_causal config", takes="")
def florence2_channel_parts(self: Foreign) -> Body | str:
    """Parts of an attention among the channels of a group, whose vectors are as long as the image has tokens."""
    why = attention_reason(self, 0.0, None, None, {})
    if why is not None:
        return why

    def attend(qkv: Tensor) -> Tensor:
        q, k, v = (t.mT for t in heads_of(qkv, self.groups))  # [B, groups, d, N]
        return attention(q, k, v, None, qkv.shape[1] ** -0.5).mT.transpose(1, 2).flatten(2)

    return Body("attention", (self.qkv,), attend, self.proj, self.groups)
