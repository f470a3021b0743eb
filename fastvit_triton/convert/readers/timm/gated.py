"""Fused linear layers of timm's MLPs gated by a GELU (ViTamin, Gemma 4) and of Gemma 4's attention."""

from functools import partial

import torch
from torch import Tensor

from ....engine.body import Body
from ....engine.hooks import has_hooks, type_name
from ....engine.leaves import Foreign, Layer, is_readable
from ....engine.mlp import MlpBody, gated_mlp_body
from ....kernels.attention import attention
from ...forwards import fused_body
from ...third_party import four_axes
from .attention import dropped

CLIPPABLE = "timm.models.gemma4_vit.Gemma4ClippableLinear"


@fused_body("timm.models.vitamin.GeGluMlp", needs="norm w0 act w1 drop1 w2 drop2", takes="")
def vitamin_parts(self: Foreign) -> MlpBody | Body:
    """Parts of ViTamin's gated MLP with its norm."""
    return gated_mlp_body((self.w0, self.w1), self.act, self.w2, (self.drop1, self.drop2), first=self.norm)


def _linears(*layers: Foreign) -> tuple[Layer, ...]:
    """The linear layers inside those of Gemma 4; those that clip, have a hook or are of another type are called."""
    plain = (type_name(layer) == CLIPPABLE and not layer.use_clipped and not has_hooks(layer) for layer in layers)
    return tuple(layer.linear if bare else layer for layer, bare in zip(layers, plain, strict=True))


@fused_body("timm.models.gemma4_vit.Gemma4GatedMlp", needs="gate_proj up_proj down_proj act drop", takes="")
def gemma_mlp_parts(self: Foreign) -> MlpBody | Body | str:
    """Parts of Gemma 4's gated MLP."""
    layers = _linears(self.gate_proj, self.up_proj, self.down_proj)
    if not any(map(is_readable, layers)):
        return "its layers are called: they clip their inputs and outputs, were replaced or have a hook"
    return gated_mlp_body(layers[:2], self.act, layers[2], (None, self.drop))


@fused_body(
    "timm.models.gemma4_vit.Gemma4Attention",
    needs="q_proj k_proj v_proj o_proj q_norm k_norm v_norm num_heads num_kv_heads num_kv_groups attn_drop proj_drop",
    takes="rope_cos rope_sin attn_mask",
)
def gemma_parts(
    self: Foreign,
    rope_cos: Tensor | None = None,
    rope_sin: Tensor | None = None,
    attn_mask: Tensor | None = None,
) -> Body | str:
    """Parts of Gemma 4's attention, with norms of queries, keys and values, and rotary positions along both axes."""
    if self.num_kv_heads * self.num_kv_groups != self.num_heads:
        return f"{self.num_heads} heads for {self.num_kv_heads} keys of {self.num_kv_groups} heads each"
    *projections, proj = _linears(self.q_proj, self.k_proj, self.v_proj, self.o_proj)
    between = partial(_gemma_heads, self, rope=(rope_cos, rope_sin), mask=attn_mask)
    return dropped(self) or Body(
        "attention", tuple(projections), between, proj, self.num_heads, drops=(self.proj_drop,)
    )


def _gemma_heads(self: Foreign, qkv: Tensor, rope: tuple[Tensor | None, ...], mask: Tensor | None) -> Tensor:
    """Projections [B, N, (H + 2 · H') · D] → [B, N, H · D], where a key serves H / H' heads."""
    heads = self.num_heads, self.num_kv_heads, self.num_kv_heads
    q, k, v = qkv.unflatten(-1, (sum(heads), -1)).split(heads, 2)
    cos, sin = (t.unsqueeze(2) for t in rope if t is not None)
    q, k = (_rotated(norm(t), cos, sin).transpose(1, 2) for norm, t in ((self.q_norm, q), (self.k_norm, k)))
    v = self.v_norm(v).transpose(1, 2)
    if self.num_kv_groups > 1:
        k, v = (t.repeat_interleave(self.num_kv_groups, 1) for t in (k, v))
    return attention(q, k, v.to(q.dtype), four_axes(mask), 1.0).transpose(1, 2).flatten(2)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions of x [B, N, H, D] along two axes, each for half of the channels."""
    first, second = x.unflatten(-1, (2, 2, -1)).unbind(-2)
    return x * cos + torch.stack((-second, first), -2).flatten(-3) * sin
