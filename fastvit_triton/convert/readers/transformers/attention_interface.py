"""Our attention as attention functions of transformers, for models that `optimize` does not convert.

`attn_implementation="fastvit_triton"` replaces "sdpa". Models that pack images of different sizes, as Qwen2-VL does,
then call attention once for each image. With "fastvit_triton_flash" they pass all images in one call, with
cu_seq_lens_q. Set it by `tower.config._attn_implementation = "fastvit_triton_flash"`: for every name with "flash",
`set_attn_implementation` imports a package of FlashAttention first.
"""

import sys
import warnings
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from ....engine.hooks import ATTENTIONS
from ....engine.leaves import Foreign
from ....engine.source import is_written
from ....kernels.attention import attention, varlen_attention
from ....kernels.backend import constant
from ...third_party import can_run, four_axes

NAME = "fastvit_triton"  # in transformers' AttentionInterface
FLASH = f"{NAME}_flash"
UNSUPPORTED = ("position_bias", "cache", "softcap", "sliding_window")  # arguments that change the scores
_WARNED: set[tuple[str, tuple[str, ...]]] = set()  # classes and causes that a warning has named


def function_reason(module: Foreign) -> str | None:
    """Why the attention function that this module calls is not one that the kernels replace; None if it is.

    Its name must be one that transformers or this package registers, and the function the one that was registered. The
    function for "eager" stands in the module's file and is compared with it, see `engine.source`.
    """
    return _function_reason(type(module), module.config._attn_implementation)


@constant
def _function_reason(cls: type, name: str | None) -> str | None:
    if name not in ATTENTIONS:
        return f"its attention function is {name!r}"
    home = sys.modules.get(cls.__module__)
    registry = getattr(home, "ALL_ATTENTION_FUNCTIONS", None)
    function = None if registry is None or name is None else registry.get(name)
    if function is None or function is attention_forward or _is_shipped(function):
        return None
    return f"the attention function {name!r} was registered again"


@cache
def _is_shipped(function: Callable) -> bool:
    """True for a function of transformers' integrations, as its file defines it."""
    return getattr(function, "__module__", "").startswith("transformers.integrations.") and is_written(function)


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

    With cu_seq_lens_q the tokens of a batch of one are those of several images, and each attends to its own image.
    What no kernel computes, such as grouped heads and dropout, runs transformers' "sdpa", and a warning says so once.
    """
    cu_seqlens = more.get("cu_seq_lens_q")
    starts = cu_seqlens if isinstance(cu_seqlens, Tensor) else None
    packed = starts is not None
    padding = attention_mask if attention_mask is not None and attention_mask.dim() == 2 else None
    causal = query.shape[2] > 1 and (attention_mask is None or padding is not None)  # other masks hold causality
    causal = causal and (getattr(module, "is_causal", not packed) if is_causal is None else is_causal)
    if starts is not None and (query.shape[0] != 1 or not _same(starts, more.get("cu_seq_lens_k", starts))):
        raise ValueError(f"{NAME} takes packed images as a batch of one, with the same cu_seq_lens for q and k")
    window = more.get("sliding_window")
    hidden = isinstance(window, int) and window < key.shape[2] and (packed or attention_mask is padding)
    if more.get("s_aux") is not None or hidden:  # "sdpa" would ignore them
        what = "a sliding window without a mask" if hidden else "attention sinks"
        raise ValueError(f"{NAME} does not support {what}; give {type(module).__name__} attn_implementation='eager'")
    asked = {
        "causal attention to other tokens": causal and query.shape[2] != key.shape[2],  # its first query is the first
        "grouped heads": query.shape[1] != key.shape[1],
        "dropout": dropout > 0,
        "masks of packed images": packed and attention_mask is not None,
        **{name: more.get(name) is not None for name in UNSUPPORTED},
    }
    unsupported = [name for name, is_asked in asked.items() if is_asked]
    if starts is not None and not unsupported:
        q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
        longest = _longest(starts, more.get("max_length_q"))
        return varlen_attention(q, k, v, starts, longest, scaling, bool(causal))[None], None
    if padding is not None:
        attention_mask = padding[:, None, None].bool()
    if not unsupported and can_run(query):
        mask = four_axes(attention_mask)
        return attention(query, key, value, mask, scaling, causal=bool(causal)).transpose(1, 2), None
    _warn(module, unsupported)
    if causal and (packed or padding is not None):
        attention_mask = _both(attention_mask, _lower_triangle(query, key))
    if starts is not None:
        attention_mask = _both(attention_mask, _same_image(starts, query.shape[2]))
    sdpa = sys.modules["transformers.integrations.sdpa_attention"].sdpa_attention_forward
    named = dict(more, scaling=scaling, dropout=dropout, is_causal=is_causal)
    return sdpa(module, query, key, value, attention_mask, **named)


def _warn(module: Foreign, unsupported: list[str]) -> None:
    """Warns, once for each class and cause, that "sdpa" runs; never while tracing."""
    cause = type(module).__name__, tuple(unsupported)
    if unsupported and not torch.compiler.is_compiling() and cause not in _WARNED:
        _WARNED.add(cause)
        warnings.warn(
            f'{cause[0]} runs transformers\' "sdpa": the kernels do not support {", ".join(unsupported)}', stacklevel=3
        )


def _lower_triangle(query: Tensor, key: Tensor) -> Tensor:
    """Boolean mask [Nq, Nk]: True where a query may see a key, with the last query at the last key."""
    q, k = query.shape[2], key.shape[2]
    return torch.ones(q, k, dtype=torch.bool, device=query.device).tril(k - q)


def _same_image(starts: Tensor, tokens: int) -> Tensor:
    """Boolean mask [N, N]: True where two packed tokens are of the same image."""
    image = torch.searchsorted(starts, torch.arange(tokens, device=starts.device), right=True)
    return image[:, None] == image


def _both(mask: Tensor | None, kept: Tensor) -> Tensor:
    """A mask, boolean or to be added, that also hides what `kept` hides."""
    if mask is None or mask.dtype == torch.bool:
        return kept[None, None] if mask is None else mask & kept
    return mask.masked_fill(~kept, torch.finfo(mask.dtype).min)


def _same(a: Tensor, b: object) -> bool:
    """True for the same images of queries and keys; values are compared on a CPU only, where that is free."""
    return a is b or (isinstance(b, Tensor) and a.shape == b.shape and (a.is_cuda or bool((a == b).all())))


def _longest(starts: Tensor, longest: object) -> int:
    """The number of tokens of the longest image; waits for the GPU if it is not given as an int."""
    return longest if isinstance(longest, int) else int((starts[1:] - starts[:-1]).max())


def register() -> None:
    """Registers both names in transformers, if that is imported; masks are those of "sdpa" and "flash_attention_2"."""
    models, masks = (sys.modules.get(f"transformers.{m}") for m in ("modeling_utils", "masking_utils"))
    if models is not None and masks is not None:
        for name, mask in ((NAME, "sdpa_mask"), (FLASH, "flash_attention_mask")):
            if hasattr(masks, mask):
                models.AttentionInterface.register(name, attention_forward)
                masks.AttentionMaskInterface.register(name, getattr(masks, mask))
