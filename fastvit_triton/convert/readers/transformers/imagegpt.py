"""Fused forwards for transformers' ImageGPT, whose linear layers are transposed (`Conv1D`) and norms are RMSNorms.

Every mask that the model makes holds causality, and so does the buffer `bias` of each attention: while that is the
lower triangle, kernels skip the keys that no query sees.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ....engine.attention import attention_body, heads_of, merged_heads
from ....engine.body import Body
from ....engine.branch import Branch, add_branches
from ....engine.hooks import are_plain_tensors, has_hooks, is_plain_module
from ....engine.leaves import RMS_FORWARDS, Foreign, Layer, Packed, activation_of, is_inactive
from ....engine.mlp import MlpBody
from ....kernels.attention import attention
from ....kernels.rms_norm import rms_norm
from ...forwards import fused_body, fused_forward
from ...third_party import classes, four_axes

CONV1D = ("transformers.pytorch_utils.Conv1D",)

_triangular: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # buffer → (its version, True for a lower triangle)


def linear_of(layer: Foreign) -> Layer:
    """The linear map of a `Conv1D`, whose weight is transposed; the layer itself if it must be called."""
    if not is_plain_module(layer, CONV1D) or not are_plain_tensors(layer.weight, layer.bias):
        return layer
    return Packed(layer.weight.T, layer.bias, (layer.weight, layer.bias))


@fused_body(
    *classes("imagegpt.ImageGPTAttention"),
    needs="config bias num_heads split_size scale_attn_weights is_cross_attention scale_attn_by_inverse_layer_idx "
    "layer_idx reorder_and_upcast_attn c_attn c_proj attn_dropout resid_dropout",
    after=(None,),
)
def imagegpt_parts(
    self: Foreign,
    layer_past: Any = None,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: object = None,
    encoder_attention_mask: object = None,
    use_cache: bool | None = False,
    output_attentions: bool | None = False,
) -> Body | str:
    """Parts of ImageGPT's causal attention; keys and values of earlier tokens come from a cache if one is given."""
    if encoder_hidden_states is not None or self.is_cross_attention or hasattr(layer_past, "cross_attention_cache"):
        return "keys and values of another sequence"
    if self.reorder_and_upcast_attn:
        return "scores in float32"
    if output_attentions or self._forward_hooks or has_hooks(self):
        return "its attention weights are requested"
    if not is_inactive(self.attn_dropout):
        return "attention dropout"
    if attention_mask is not None and attention_mask.dim() != 4:
        return "a mask that is not [B, H, N, N]"
    width = self.c_attn.nf // 3 // self.num_heads
    scale = width**-0.5 if self.scale_attn_weights else 1.0
    scale /= self.layer_idx + 1 if self.scale_attn_by_inverse_layer_idx else 1
    if not _is_triangular(self.bias):
        return "a mask of its own"
    bias = four_axes(attention_mask)
    projections = (linear_of(self.c_attn),)
    proj = linear_of(self.c_proj)
    drops = (self.resid_dropout,)
    if layer_past is None:
        return attention_body(projections, proj, self.num_heads, scale, bias, drops=drops, causal=True)

    def attend(qkv: Tensor) -> Tensor:
        q, k, v = heads_of(qkv, self.num_heads)
        k, v = layer_past.update(k, v, self.layer_idx)
        return merged_heads(attention(q, k, v, bias, scale, causal=True), qkv.shape[1:-1])

    return Body("attention", projections, attend, proj, self.num_heads, drops=drops)


def _is_triangular(mask: Tensor) -> bool:
    """True for a lower triangle; its values are read once, and again after it was written."""
    if mask.is_inference():  # PyTorch does not count writes to it
        return torch.equal(mask, torch.ones_like(mask).tril())
    found = _triangular.get(mask)
    if found is None or found[0] != mask._version:
        found = mask._version, torch.equal(mask, torch.ones_like(mask).tril())
        _triangular[mask] = found
    return found[1]


@fused_body(*classes("imagegpt.ImageGPTMLP"), needs="c_fc c_proj act dropout")
def imagegpt_mlp_parts(self: Foreign) -> MlpBody:
    """Parts of ImageGPT's MLP."""
    return MlpBody((linear_of(self.c_fc),), activation_of(self.act), linear_of(self.c_proj), (None, self.dropout))


@fused_forward("RMSNorm", *classes("imagegpt.ImageGPTLayerNorm"), needs="weight eps", products=False)
def imagegpt_norm(self: Foreign, tensor: Tensor) -> Tensor:
    """RMSNorm; [..., D] → [..., D]."""
    if tensor.dtype != self.weight.dtype or not are_plain_tensors(self.weight):
        return NotImplemented
    return rms_norm(tensor, self.weight, self.eps)


RMS_FORWARDS[imagegpt_norm] = "eps"


@fused_forward(
    "pre-norm block",
    *classes("imagegpt.ImageGPTBlock"),
    needs="ln_1 attn ln_2 mlp gradient_checkpointing",
    folds=lambda self: [(self.ln_1, self.attn), (self.ln_2, self.mlp)],
)
def imagegpt_block(
    self: Foreign,
    hidden_states: Tensor,
    layer_past: object = None,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: object = None,
    encoder_attention_mask: object = None,
    use_cache: bool | None = False,
    output_attentions: bool | None = False,
) -> tuple[Tensor, None]:
    """Block of a decoder, fused without a cache; [B, N, D] → [B, N, D], and no attention weights."""
    if output_attentions or layer_past is not None or encoder_hidden_states is not None:
        return NotImplemented
    attn = Branch(self.attn, self.ln_1, call=dict(attention_mask=attention_mask))
    return add_branches(hidden_states, attn, Branch(self.mlp, self.ln_2), block=self), None
