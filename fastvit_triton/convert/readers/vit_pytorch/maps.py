"""Fused forwards for vit-pytorch's models of maps [B, C, H, W]: LeViT, CvT and Twins.

Their linear layers are 1×1 convolutions and their LayerNorms normalize channels. A map that is stored with channels
last is a view of tokens [B, H·W, C], on which their bodies run.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from ....engine.attention import heads_of, merged_heads, reduced_map
from ....engine.batch_norm import folded_linear, is_pointwise
from ....engine.body import Body, activate, project
from ....engine.branch import Branch, add_branches, runs_plain
from ....engine.freeze import derived
from ....engine.hooks import has_hooks, is_our_forward, is_plain_module, type_name
from ....engine.leaves import (
    DROPOUTS,
    Foreign,
    Packed,
    activation_of,
    is_depthwise_conv,
    is_identity,
    is_inactive,
    is_patch_conv,
    softmax_reason,
)
from ....engine.mlp import MlpBody, taps_of
from ....engine.replay import call_block
from ....kernels.attention import attention
from ....kernels.depthwise import depthwise
from ....kernels.layer_norm import layer_norm
from ....kernels.linear import linear
from ....kernels.window import window_attention
from ...batch_norm import convolve_depthwise
from ...forwards import fused_forward
from ...third_party import is_fusable

LEVIT, CVT, TWINS = (f"vit_pytorch.{file}." for file in ("levit", "cvt", "twins_svt"))
Parts = Body | MlpBody | str
NORMS = (f"{CVT}LayerNorm", f"{TWINS}LayerNorm")
REPLACED = "a layer was replaced or has a hook"
Grid = tuple[int, int]


def tokens_of(image: Tensor) -> Tensor:
    """A map [B, C, H, W] as tokens [B, H·W, C]."""
    return image.flatten(2).transpose(1, 2)


def map_of(tokens: Tensor, grid: Grid) -> Tensor:
    """The reverse of `tokens_of`."""
    return tokens.transpose(1, 2).unflatten(2, grid)


def map_like(x: Tensor, tokens: Tensor, grid: Grid, training: bool) -> Tensor:
    """The map of tokens; in training with the layout of the map x, as dropout draws numbers in the order of memory."""
    y = map_of(tokens, grid)
    return y.contiguous() if training and x.is_contiguous() else y


def layers_of(sequence: Foreign, count: int) -> list[Foreign] | None:
    """The modules of a Sequential of this length without hooks; None for any other module."""
    plain = type(sequence) is nn.Sequential and len(sequence) == count and not has_hooks(sequence)
    return list(sequence) if plain else None


def packed(conv: Foreign) -> Packed | None:
    """A 1×1 convolution of stride 1 as a linear layer; None if it must be called."""
    plain = is_pointwise(conv) and conv.stride == (1, 1)
    return Packed(conv.weight.flatten(1), conv.bias) if plain else None


def dropped(*drops: Foreign) -> str | None:
    """Why modules with these dropouts run their own forwards now (random numbers in the order of a map), or None."""
    drop = next((drop for drop in drops if not is_inactive(drop)), None)
    if drop is None:
        return None
    return f"dropout {drop.p}" if type_name(drop) in DROPOUTS else "dropout was replaced"


def is_norm(norm: Foreign) -> bool:
    """True for a LayerNorm of channels that may be read."""
    return is_plain_module(norm, NORMS)


def normalized(norm: Foreign, tokens: Tensor) -> Tensor:
    """A LayerNorm of channels, of tokens [B, N, C]."""
    return layer_norm(tokens, norm.g.flatten(), norm.b.flatten(), norm.eps)


@fused_forward("LayerNorm", *NORMS, needs="g b eps", by_name=True, products=False)
def channel_norm(self: Foreign, x: Tensor) -> Tensor:
    """LayerNorm of the channels of a map; [B, C, H, W] → [B, C, H, W]."""
    if not is_norm(self):
        return NotImplemented
    return map_like(x, normalized(self, tokens_of(x)), (x.shape[2], x.shape[3]), self.training)


def _cross(q: Tensor, kv: Tensor, heads: int, scale: float) -> Tensor:
    """Attention of queries [B, N, H · D] to keys and values [B, M, 2 · H · D], → [B, N, H · D]."""
    q, k, v = *heads_of(q, heads, 1), *heads_of(kv, heads, 2)
    return merged_heads(attention(q, k, v, scale=scale), q.shape[2:3])


def _levit_mlp(self: Foreign, grid: Grid) -> Parts:
    """Parts of LeViT's MLP, which has no norm."""
    layers = layers_of(self.net, 5)
    fc1, fc2 = (None, None) if layers is None else (packed(layers[0]), packed(layers[3]))
    if layers is None or fc1 is None or fc2 is None or not isinstance(act := activation_of(layers[1]), str):
        return REPLACED
    return dropped(layers[2], layers[4]) or MlpBody((fc1,), act, fc2)


def _levit_attention(self: Foreign, grid: Grid) -> Parts:
    """Parts of LeViT's attention to all tokens of its map, with a bias for each distance."""
    if (why := dropped(self.dropout)) is not None or grid[0] != grid[1]:
        return why or f"a map of {grid[0]} × {grid[1]} tokens, which is not square"
    if (why := softmax_reason(self.attend)) is not None:
        return why
    table = self.pos_bias
    if not is_plain_module(table, ("torch.nn.modules.sparse.Embedding",)):
        return "pos_bias was replaced or has a hook"
    if table.max_norm is not None or table.padding_idx is not None or table.scale_grad_by_freq or table.sparse:
        return "pos_bias has an option that changes its weights or gradients"
    end = layers_of(self.to_out, 4)
    between = partial(_levit_attended, self, grid=grid)
    last = None if end is None else folded_linear(self, end[1], end[2])
    act = None if end is None else activation_of(end[0])
    if end is None or last is None or not isinstance(act, str) or dropped(end[3]) is not None:
        return Body("attention", (), partial(_levit_called, self, grid=grid), None, self.heads)
    return Body("attention", (), lambda x: activate(between(x), act), last, self.heads)


def _fewer(self: Foreign, grid: Grid) -> Grid:
    """The grid of LeViT's queries: every other row and column of a map that attention makes smaller."""
    few, all_tokens = self.pos_indices.shape
    return grid if few == all_tokens else (-(-grid[0] // 2), -(-grid[1] // 2))


def _levit_attended(self: Foreign, x: Tensor, grid: Grid) -> Tensor:
    q, k, v = (_levit_projected(layer, x, grid) for layer in (self.to_q, self.to_k, self.to_v))
    q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
    table, index = self.pos_bias.weight, self.pos_indices
    bias = derived(self, "bias", (table, index), lambda: table[index].permute(2, 0, 1) / self.scale)
    return attention(q, k, v, bias[None], self.scale).transpose(1, 2).flatten(2)


def _levit_called(self: Foreign, x: Tensor, grid: Grid) -> Tensor:
    """The whole attention, whose last layers are called."""
    return tokens_of(self.to_out(map_of(_levit_attended(self, x, grid), _fewer(self, grid))))


def _levit_projected(layer: Foreign, x: Tensor, grid: Grid) -> Tensor:
    """A 1×1 convolution and BatchNorm of tokens x, on every other row and column for a stride of 2."""
    layers = layers_of(layer, 2)
    both = None if layers is None else folded_linear(layer, *layers)
    if layers is None or both is None:
        return tokens_of(layer(map_of(x, grid)))
    step = layers[0].stride[0]
    return project(x if step == 1 else x.unflatten(1, grid)[:, ::step, ::step].flatten(1, 2), (both,))


def _mlp(self: Foreign, grid: Grid) -> Parts:
    """Parts of the MLP of CvT and Twins, with its norm."""
    layers = layers_of(self.net, 6)
    fc1, fc2 = (None, None) if layers is None else (packed(layers[1]), packed(layers[4]))
    if layers is None or fc1 is None or fc2 is None or not is_norm(layers[0]):
        return REPLACED
    if not isinstance(act := activation_of(layers[2]), str):
        return REPLACED

    def hidden(x: Tensor) -> Tensor:
        return linear(normalized(layers[0], x), fc1.weight, fc1.bias, activation=act)

    return dropped(layers[3], layers[5]) or Body("MLP", (), hidden, fc2)


def _last(end: Foreign) -> Packed | str:
    """The output projection of a Sequential with dropout; a reason (str) why it must be called."""
    layers = layers_of(end, 2)
    last = None if layers is None else packed(layers[0])
    return REPLACED if layers is None or last is None else dropped(layers[1]) or last


def _cvt_attention(self: Foreign, grid: Grid) -> Parts:
    """Parts of CvT's attention, whose projections are depthwise convolutions, BatchNorms and linear layers."""
    last = _last(self.to_out)
    if isinstance(last, str) or not is_norm(self.norm):
        return last if isinstance(last, str) else REPLACED
    if (why := softmax_reason(self.attend)) is not None:
        return why

    def between(x: Tensor) -> Tensor:
        image = normalized(self.norm, x).unflatten(1, grid)
        return _cross(_separable(self.to_q, image), _separable(self.to_kv, image), self.heads, self.scale)

    return dropped(self.dropout) or Body("attention", (), between, last, self.heads)


def _separable(self: Foreign, image: Tensor) -> Tensor:
    """Depthwise convolution, BatchNorm and 1×1 convolution of a map [B, H, W, C] → tokens [B, M, F]."""
    layers = layers_of(self.net, 3)
    last = None if layers is None else packed(layers[2])
    plain = layers is not None and last is not None and is_plain_module(self, (f"{CVT}DepthWiseConv2d",))
    if layers is None or last is None or not plain or not is_depthwise_conv(layers[0], (1, 2)):
        return tokens_of(self(image.permute(0, 3, 1, 2)))
    conv, norm, _ = layers
    return project(convolve_depthwise(image, self, conv, norm).flatten(1, 2), (last,))


def _local_attention(self: Foreign, grid: Grid) -> Parts:
    """Parts of Twins' attention in windows."""
    last = _last(self.to_out)
    q = packed(self.to_q)
    kv = packed(self.to_kv)
    if isinstance(last, str) or q is None or kv is None or not is_norm(self.norm):
        return last if isinstance(last, str) else REPLACED
    side = self.patch_size
    layers = (q, kv)

    def between(x: Tensor) -> Tensor:
        qkv = project(normalized(self.norm, x), layers).unflatten(1, grid)
        return window_attention(qkv, self.heads, (side, side), scale=self.scale).flatten(1, 2)

    if grid[0] % side or grid[1] % side:
        return f"a map of {grid[0]} × {grid[1]} tokens, which windows of {side} do not divide"
    return Body("attention in windows", (), between, last, self.heads, side * side)


def _global_attention(self: Foreign, grid: Grid) -> Parts:
    """Parts of Twins' attention to a smaller map."""
    last = _last(self.to_out)
    q = packed(self.to_q)
    if isinstance(last, str) or q is None or not is_norm(self.norm) or not is_patch_conv(self.to_kv):
        return last if isinstance(last, str) else REPLACED

    def between(x: Tensor) -> Tensor:
        x = normalized(self.norm, x)
        return _cross(project(x, (q,)), reduced_map(self.to_kv, x.unflatten(1, grid)), self.heads, self.scale)

    return dropped(self.dropout) or Body("attention", (), between, last, self.heads)


READERS: dict[str, Callable[[Foreign, Grid], Parts]] = {
    f"{LEVIT}Attention": _levit_attention,
    f"{LEVIT}FeedForward": _levit_mlp,
    f"{CVT}Attention": _cvt_attention,
    f"{CVT}FeedForward": _mlp,
    f"{TWINS}LocalAttention": _local_attention,
    f"{TWINS}GlobalAttention": _global_attention,
    f"{TWINS}FeedForward": _mlp,
}


def _body_reason(self: Foreign) -> str | None:
    side = getattr(self, "patch_size", 1)
    parts = READERS[type_name(self)](self, (side, side))
    return parts if isinstance(parts, str) else None


def _run(self: Foreign, x: Tensor) -> Tensor:
    grid = x.shape[2], x.shape[3]
    parts = READERS[type_name(self)](self, grid) if is_fusable(self, x) else ""
    if isinstance(parts, str):
        return NotImplemented
    return map_like(x, parts(tokens_of(x)), _fewer(self, grid) if hasattr(self, "pos_indices") else grid, self.training)


@fused_forward(
    "attention of a map", *(n for n in READERS if "Attention" in n), reason=_body_reason, by_name=True, checked=False
)
def map_attention(self: Foreign, x: Tensor) -> Tensor:
    """Attention of a map; [B, C, H, W] → [B, C', H', W'], a view of tokens."""
    return _run(self, x)


@fused_forward("MLP of a map", *(n for n in READERS if "Feed" in n), reason=_body_reason, by_name=True, checked=False)
def map_mlp(self: Foreign, x: Tensor) -> Tensor:
    """MLP of a map; [B, C, H, W] → [B, C, H, W], a view of tokens."""
    return _run(self, x)


def _branches(bodies: list[Foreign], grid: Grid) -> list[Branch] | None:
    """The branches of these modules as parts; None if one of them must be called."""
    branches = []
    for body in bodies:
        if has_hooks(body) or not is_our_forward(body.__dict__.get("forward")) or type_name(body) not in READERS:
            return None
        parts = READERS[type_name(body)](body, grid)
        if isinstance(parts, str):
            return None
        branches.append(Branch(parts))
    return branches


def _added(self: Foreign, x: Tensor, pairs: list[tuple[Foreign, tuple[Foreign, ...]]]) -> Tensor:
    """The map x with the branches of all bodies of (module, bodies) added, unless one of them must be called."""
    grid = (x.shape[2], x.shape[3])
    y = tokens_of(x)
    branches = _branches([body for _, bodies in pairs for body in bodies], grid)
    if branches is None:
        return NotImplemented
    if runs_plain(y, *branches[:2]):
        for module, bodies in pairs:
            y = call_block(_pair, module, y, grid, *bodies)
    else:
        y = add_branches(y, *branches)
    return map_like(x, y, grid, self.training)


def _pair(module: Foreign, x: Tensor, grid: Grid, *bodies: Foreign) -> Tensor:
    return add_branches(x, *_branches(list(bodies), grid) or (), block=module)


@fused_forward("blocks", f"{CVT}Transformer", f"{LEVIT}Transformer", needs="layers", by_name=True)
def blocks(self: Foreign, x: Tensor) -> Tensor:
    """Runs all blocks; [B, C, H, W] → [B, C', H', W']."""
    adds = getattr(self, "attn_residual", True)
    return _added(self, x, [(pair, tuple(pair)) for pair in self.layers]) if adds else NotImplemented


@fused_forward("blocks", f"{TWINS}Transformer", needs="layers", by_name=True)
def twins_blocks(self: Foreign, x: Tensor) -> Tensor:
    """Runs all blocks of Twins, of four branches each; [B, C, H, W] → [B, C, H, W]."""
    bodies = [body for block in self.layers for body in block if not is_identity(body)]
    if not all(is_plain_module(body, (f"{TWINS}Residual",)) for body in bodies):
        return NotImplemented
    return _added(self, x, [(a, (a.fn, b.fn)) for a, b in zip(bodies[::2], bodies[1::2], strict=True)])


def _position_reason(self: Foreign) -> str | None:
    plain = is_plain_module(self.proj, (f"{TWINS}Residual",)) and is_depthwise_conv(self.proj.fn)
    return None if plain else REPLACED


@fused_forward("depthwise convolution", f"{TWINS}PEG", needs="proj.fn", reason=_position_reason, by_name=True)
def positions(self: Foreign, x: Tensor) -> Tensor:
    """Positional encoding by a depthwise convolution; [B, C, H, W] → [B, C, H, W]."""
    conv = self.proj.fn
    y = depthwise(x.permute(0, 2, 3, 1), taps_of(conv), conv.bias, residual=True)
    return map_like(x, y.flatten(1, 2), (x.shape[2], x.shape[3]), self.training)
