"""Reads attention layers of all libraries: from a layer's arguments to its input and its submodules, or a reason."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import layers
from ..convert.forwards import Forward, forward_for
from ..convert.readers.timm.attention import dropped
from ..convert.readers.timm.class_attention import projections
from ..convert.readers.timm.tnt import tnt_parts
from ..convert.readers.torch import multihead_parts
from ..convert.third_party import head_norms
from ..engine.attention import WindowHeads, attention_body
from ..engine.body import Body, project
from ..engine.hooks import type_name
from ..engine.leaves import Foreign, Packed
from .heads import Heads, Parts, plain, split

MULTIHEAD = "torch.nn.modules.activation.MultiheadAttention"
WORDS = ("attention", "attn")  # in names of classes of unknown types that are reported


def reader(module: nn.Module) -> Callable[..., tuple[Tensor, Parts, nn.Module | None] | str | None] | None:
    """A function from an attention layer's arguments to (x, parts, position) or a reason; None for other modules."""
    if type(module) is layers.Attention:
        return partial(own, module)
    if type(module) in (layers.WindowAttention, layers.ReducedAttention):
        return partial(_spatial, module)
    if type_name(module) == MULTIHEAD:
        return partial(_multihead, module)
    if type_name(module) in READERS:
        return partial(_foreign, module, READERS[type_name(module)])
    forward = forward_for(module)
    read = forward.read if isinstance(forward, Forward) and forward.attention else None
    return None if read is None else partial(_foreign, module, read)


def unknown(modules: dict[str, nn.Module], known: set[str]) -> list[str]:
    """Paths of modules with weights that are attention by the name of their class, but have no reader."""
    named = {p for p, m in modules.items() if p and any(word in type(m).__name__.lower() for word in WORDS)}
    inner = [p for p in named - known if not any(q.startswith(f"{p}.") for q in named | known)]
    outside = [p for p in inner if not any(p.startswith(f"{q}.") for q in known)]
    return [p for p in modules if p in outside and any(True for _ in modules[p].parameters())]


def own(module: layers.Attention, x: Tensor, **branch: object) -> tuple[Tensor, Body, nn.Module | None] | str:
    """Input, parts and position module of our attention, or a reason."""
    if module.training and module.attn_drop.p > 0:
        return f"attention dropout {module.attn_drop.p}"
    norms = head_norms(module.q_norm, module.k_norm)
    parts = attention_body(
        (module.qkv,), module.proj, module.num_heads, module.scale, norms=norms, drops=(module.proj_drop,)
    )
    return x, parts, module.position


def _spatial(module: Any, x: Tensor, **branch: object) -> tuple[Tensor, Parts, None] | str:
    """Input and parts of our attention that describes itself, or a reason."""
    drop = getattr(module, "attn_drop", None)
    if module.training and drop is not None and drop.p > 0:
        return f"attention dropout {drop.p}"
    forward = forward_for(module)
    assert isinstance(forward, Forward) and forward.read is not None  # as it is registered
    parts = forward.read(module)
    assert isinstance(parts, Body)
    return x, parts, None


def _foreign(module: nn.Module, read: Callable, *inputs: Any, **named: Any):
    x, *rest = inputs or (named.get("hidden_states", named.get("x")),)
    named = {n: v for n, v in named.items() if n not in ("hidden_states", "x")}
    parts = read(module, *rest, **named)
    if isinstance(parts, str) and len(masks := [t for t in (*rest, *named.values()) if isinstance(t, Tensor)]) == 1:
        parts = _with_mask(read(module), masks[0]) or parts
    if isinstance(parts, Body) and getattr(parts.between, "varlen", None) is not None:
        parts = "images of different sizes in one sequence"
    return parts if isinstance(parts, str) else (x, parts, None)


def _with_mask(parts: Parts | str, mask: Tensor) -> Body | None:
    """Parts of windows with the mask [windows, n, n] or [windows, 1, n, n] of shifted windows; None for other types."""
    if not isinstance(parts, Body) or not isinstance(parts.between, WindowHeads):
        return None
    bias = parts.between.bias
    mask = mask if mask.dim() == 4 else mask[:, None]
    return parts.having(bias=mask if bias is None else bias + mask)


def _multihead(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
):
    if query.shape != key.shape or query.data_ptr() != key.data_ptr():  # cross-attention
        return None
    if query.dim() != 3 or query.is_nested or (is_causal and attn_mask is None):
        return "unbatched, nested, or causal without a mask"
    parts = multihead_parts(module, attn_mask, key_padding_mask, is_causal)
    return parts if isinstance(parts, str) else (query if module.batch_first else query.transpose(0, 1), parts, None)


def _class_attention(module: Foreign) -> Parts | str:
    """Class attention of CaiT and CrossViT: the first token is the only query."""
    return dropped(module) or partial(_first_token, module)


def _first_token(module: Foreign, x: Tensor) -> Heads:
    query, keys = projections(module)
    tokens = (project(x[:, :1], (query,)), *project(x, keys).chunk(2, -1))
    q, k, v = (split(t, module.num_heads) for t in tokens)
    return Heads(q, k, v, None, module.scale, lambda o: module.proj_drop(module.proj(o.transpose(1, 2).flatten(2))))


def _talking_heads(module: Foreign) -> Parts | str:
    """CaiT's attention, whose heads mix their scores and their probabilities."""
    parts = attention_body((module.qkv,), module.proj, module.num_heads, module.scale, drops=(module.proj_drop,))
    return dropped(module) or (lambda x: plain(parts, x, None, None)._replace(mixes=(module.proj_l, module.proj_w)))


def _re_attention(module: Foreign) -> Parts | str:
    """DeepViT's attention, whose heads mix their probabilities; its BatchNorm is part of that map."""
    if module.var_norm.training:
        return "the BatchNorm of its maps is in training mode"
    parts = attention_body((module.qkv,), module.proj, module.num_heads, module.scale, drops=(module.proj_drop,))
    mixes = Packed(torch.eye(module.num_heads).to(module.qkv.weight), None), module.folded()
    return dropped(module) or (lambda x: plain(parts, x, None, None)._replace(mixes=mixes))


def _refined(module: Foreign, *maps: object, **named: object) -> str:
    """Refiner's attention."""
    return "its maps are those of other blocks, too, or refine them by convolutions"


def _levit(module: Foreign) -> Parts | str:
    """LeViT's attention, whose projections have a BatchNorm; fewer queries than keys between stages."""
    if getattr(module, "use_conv", False):
        return "its projections are convolutions"
    if module.training:
        return "the BatchNorm of its projections is in training mode"
    return partial(_levit_heads, module)


def _levit_heads(module: Foreign, x: Tensor) -> Heads:
    sizes: list[int] = [module.key_dim, module.key_dim, module.val_dim]
    halves = not hasattr(module, "qkv")
    if not halves:
        q, k, v = module.qkv(x).unflatten(-1, (module.num_heads, -1)).transpose(1, 2).split(sizes, -1)
    else:
        q = split(module.q(x), module.num_heads)
        k, v = module.kv(x).unflatten(-1, (module.num_heads, -1)).transpose(1, 2).split(sizes[1:], -1)
    bias = module.get_attention_biases(x.device)[None]

    def output(o: Tensor) -> Tensor:
        return module.proj(o.transpose(1, 2).flatten(2))

    return Heads(q, k, v, bias, module.scale, output, halves=halves)


def _convolved(module: Foreign, size: tuple[int, int]) -> Parts | str:
    """CvT's attention, whose queries, keys and values are convolutions with a BatchNorm; fewer keys than queries."""
    if module.training:
        return "the BatchNorm of its projections is in training mode"
    return partial(_convolved_heads, module, size)


def _convolved_heads(module: Foreign, grid: tuple[int, int], x: Tensor) -> Heads:
    q, k, v = module.heads(x, grid)
    return Heads(q, k, v, None, module.scale, lambda o: module.proj_drop(module.proj(o.transpose(1, 2).flatten(2))))


def _relative(module: Foreign) -> Parts:
    """BoTNet's attention on a map, whose bias depends on the queries."""
    return partial(_relative_heads, module)


def _relative_heads(module: Foreign, x: Tensor) -> Heads:
    q, k, v = module.heads(x)
    return Heads(q, k, v, module.scale * module.pos_embed(q), module.scale, module.merge)


def _one_head(module: Foreign, tokens: Tensor | None) -> Parts:
    """Attention of a visual transformer, between a map and tokens."""
    return partial(_one_head_of, module, tokens)


def _one_head_of(module: Foreign, tokens: Tensor | None, x: Tensor) -> Heads:
    q, k, v = (t[:, None] for t in module.heads(x, tokens))
    return Heads(q, k, v, None, 1.0, lambda o: o[:, 0])


def _positional(module: Foreign) -> Parts:
    """Attention by relative position alone: its maps are the same for every image, and values are the tokens."""
    return partial(_positional_heads, module)


def _positional_heads(module: Foreign, x: Tensor) -> Heads:
    values = x[:, None].expand(-1, module.num_heads, -1, -1)
    q = x.new_zeros(1, 1, 1, 1).expand(*values.shape[:3], 1)
    bias = module.maps().log()[None]

    def output(o: Tensor) -> Tensor:
        return module.proj_drop(module.proj(module.value(o.transpose(1, 2).flatten(2))))

    return Heads(q, q, values, bias, 1.0, output)


READERS: dict[str, Callable[..., Parts | str]] = {  # types whose heads are not those of a fused body
    "timm.models.cait.ClassAttn": _class_attention,
    "timm.models.crossvit.CrossAttention": _class_attention,
    "fastvit_triton.models.crossvit.CrossAttention": _class_attention,
    "fastvit_triton.layers.class_attention.ClassAttention": _class_attention,
    "timm.models.cait.TalkingHeadAttn": _talking_heads,
    "fastvit_triton.models.tnt.SplitAttention": tnt_parts,
    "fastvit_triton.models.levit.DistanceAttention": _levit,
    "fastvit_triton.models.levit.DistanceDownsample": _levit,
    "timm.models.levit.Attention": _levit,
    "timm.models.levit.AttentionDownsample": _levit,
    "fastvit_triton.models.cvt.ConvAttention": _convolved,
    "fastvit_triton.models.botnet.BottleneckAttention": _relative,
    **{f"fastvit_triton.models.vt.{n}": _one_head for n in ("Tokenizer", "TokenAttention", "Projector")},
    "fastvit_triton.models.attention_conv.QuadraticAttention": _positional,
    "fastvit_triton.models.cait.TalkingHeads": _talking_heads,
    "fastvit_triton.models.deepvit.ReAttention": _re_attention,
    "fastvit_triton.models.refiner.RefinedAttention": _refined,
}
