"""Our attention as an attention function of transformers: `attn_implementation="fastvit_triton"`."""

import sys

from torch import Tensor

from ..kernels.attention import attention
from ..layers.module_parts import Foreign
from .third_party import can_run, scores_mask

NAME = "fastvit_triton"  # in transformers' AttentionInterface


def attention_forward(
    module: Foreign,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **more: object,
) -> tuple[Tensor, None]:
    """Attention as transformers' AttentionInterface calls it: [B, H, N, D] each → ([B, Nq, H, Dv], no weights).

    Unsupported cases, such as grouped heads, causal masks and dropout, use transformers' "sdpa".
    """
    causal = query.shape[2] > 1 and attention_mask is None
    causal = causal and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    grouped = query.shape[1] != key.shape[1]
    odd = any(more.get(name) is not None for name in ("position_bias", "cache", "softcap"))
    if causal or grouped or odd or dropout > 0 or not can_run(query):
        sdpa = sys.modules["transformers.integrations.sdpa_attention"].sdpa_attention_forward
        named = dict(more, scaling=scaling, dropout=dropout, is_causal=is_causal)
        return sdpa(module, query, key, value, attention_mask, **named)
    return attention(query, key, value, scores_mask(attention_mask), scaling).transpose(1, 2), None


def register() -> None:
    """Registers "fastvit_triton" as an attention in transformers, if that is imported; masks are those of "sdpa"."""
    models, masks = (sys.modules.get(f"transformers.{m}") for m in ("modeling_utils", "masking_utils"))
    if models is not None and masks is not None:
        models.AttentionInterface.register(NAME, attention_forward)
        masks.AttentionMaskInterface.register(NAME, masks.sdpa_mask)
