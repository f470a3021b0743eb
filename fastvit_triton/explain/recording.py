"""Records the inputs of a model's attention layers, with hooks, and recomputes attention maps from them.

Math      q, k, v = the layer's own projections, norms and rotations of its captured input      (1)
          L = ln Σₙ exp(scale · q kᵀ + bias)    [B, H, N], one `attention(..., return_lse=True)`  (2)
          A[m] = exp(scale · q[m] kᵀ + bias[m] − L[m])    for any subset of rows m               (3)
          dA = dO vᵀ, with dO the gradient of the output projection's input                      (4)
A map costs one more attention call; the model's own forward and backward pass never form an N × N matrix.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from threading import get_ident
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor, nn

from .. import layers
from ..convert.forwards import Forward, forward_for
from ..convert.from_torch import multihead_parts
from ..convert.third_party import head_norms
from ..kernels.attention import attention
from ..kernels.attention_qkv import rotate
from ..layers.body import AttentionParts, finish, fold_or_normalize, project
from ..layers.hooks import type_name

MULTIHEAD = "torch.nn.modules.activation.MultiheadAttention"
ROWS = 256  # queries that `blocks` yields at a time


@dataclass(eq=False)
class AttentionLayer:
    """Recorded input of one attention layer, and the attention maps computed from it.

    Attributes:
        path: the module's name in the model.
        x: input of the layer, [B, N, D].
        parts: its projections and settings.
        norm: norm between x and the projections; None if x is already normalised, or the layer has no norm.
        position: module that computes a bias from queries (our models only).
        output_grad: gradient of the layer's output, [B, N, D]; set by a backward pass with `gradients=True`.
    """

    path: str
    x: Tensor
    parts: AttentionParts
    norm: nn.Module | None = None
    position: nn.Module | None = None
    output_grad: Tensor | None = None

    @cached_property
    @torch.no_grad()
    def qkv(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """(1): q and k after norms and rotations, and v, [B, H, N, d] each; and the bias [G, H, N, N] or None."""
        parts = self.parts
        x, folded = fold_or_normalize(self.x, self.norm if parts.first is None else parts.first, parts.projections)
        packed = project(x, parts.projections, folded)
        q, k, v = packed.unflatten(-1, (3, parts.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        if parts.norms is not None:
            q, k = (norm(t) for norm, t in zip(parts.norms, (q, k), strict=True))
        if parts.rope is not None:
            prefix = q.shape[2] - parts.rope[0].shape[-2]
            q, k = (rotate(t, parts.rope, prefix).to(v.dtype) for t in (q, k))
        bias = parts.bias if self.position is None else parts.scale * self.position(q)
        return q, k, v, bias

    @cached_property
    @torch.no_grad()
    def attended(self) -> tuple[Tensor, Tensor]:
        """(2): outputs of the heads [B, H, N, d], and L [B, H, N] in fp32."""
        q, k, v, bias = self.qkv
        o, lse = attention(q, k, v, bias, self.parts.scale, return_lse=True)
        return o, lse

    @torch.no_grad()
    def rows(self, queries: Tensor | slice | int) -> Tensor:
        """(3): attention probabilities of some queries over all tokens.

        Args:
            queries: token indices; the class token, if any, is 0.

        Returns:
            [B, H, M, N], fp32 (or fp64); rows sum to 1, or to 0 if every key is masked.
        """
        queries = slice(queries, queries + 1 or None) if isinstance(queries, int) else queries
        q, k, _, bias = self.qkv
        lse = self.attended[1][:, :, queries, None]
        q, k = (t if t.dtype == torch.float64 else t.float() for t in (q[:, :, queries], k))
        scores = self.parts.scale * (q @ k.mT)
        if bias is not None:
            bias = bias if bias.shape[0] in (1, len(q)) else bias[torch.arange(len(q)) % bias.shape[0]]
            bias = bias.expand(*bias.shape[:2], self.x.shape[1], -1)[:, :, queries]
            scores = scores.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else scores + bias
        return (scores - lse).exp().masked_fill(lse == -torch.inf, 0.0)

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """All rows in chunks of at most `ROWS` queries: (queries [M], rows [B, H, M, N])."""
        for queries in torch.arange(self.x.shape[1], device=self.x.device).split(ROWS):
            yield queries, self.rows(queries)

    def map(self) -> Tensor:
        """The whole attention map, [B, H, N, N]."""
        return self.rows(slice(None))

    def map_grad(self) -> Tensor:
        """(4): gradient of the attention probabilities, [B, H, N, N].

        Raises:
            ValueError: no backward pass recorded `output_grad`.
        """
        if self.output_grad is None:
            raise ValueError(f"{self.path} has no gradient; capture with gradients=True and run a backward pass inside")
        parts, v, o = self.parts, self.qkv[2], self.attended[0]
        with torch.enable_grad():
            o = o.transpose(1, 2).flatten(2).requires_grad_()
            y = finish(o, parts.proj, parts.last, *parts.drops)
        (grad,) = torch.autograd.grad(y, o, self.output_grad.to(y.dtype))
        return (grad.unflatten(-1, (parts.num_heads, -1)).transpose(1, 2) @ v.mT).to(
            torch.promote_types(v.dtype, torch.float32)
        )


@dataclass
class Recording:
    """Recording of one forward pass; a second pass overwrites it.

    Attributes:
        layers: attention layers in the order of their calls.
        stream: tokens [B, N, D] before the first block and after each block, for blocks that are modules.
        left: reason by path, for attention layers that could not be recorded.
    """

    found: dict[str, AttentionLayer] = field(default_factory=dict)
    blocks: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    @property
    def layers(self) -> list[AttentionLayer]:
        return list(self.found.values())

    @property
    def stream(self) -> list[Tensor]:
        pairs = list(self.blocks.values())
        return [pairs[0][0], *(after for _, after in pairs)] if pairs else []


@contextmanager
def capture(model: nn.Module, gradients: bool = False) -> Iterator[Recording]:
    """Records the input of each attention layer while the model runs inside the `with`, in the same thread.

    Supports our models, and timm, transformers, torchvision, vit-pytorch and torch.nn attention, optimised or not.
    Kernels stay enabled: our blocks stay fused; blocks of other libraries call their attention, which runs fused.
    Outputs differ at most by rounding, where a fused call is split in two. All hooks are removed at the end.

    Args:
        model: in training or evaluation mode; layers with active attention dropout are not recorded.
        gradients: also record the gradient of each attention layer's output, for `AttentionLayer.map_grad`.

    Yields:
        Recording: filled by the forward pass.

    Raises:
        ValueError: no attention layer was recorded.
    """
    recording, handles, watched = Recording(), [], set()
    parents = dict(model.named_modules())
    try:
        for path, module in model.named_modules():
            read = _reader(module)
            if read is None:
                continue
            outer, block = _block(path, parents)
            if type(module) is layers.Attention and isinstance(block, layers.Block) and not gradients:
                norm = None if isinstance(block, layers.PostNormBlock) else block.norm1
                enter = partial(_enter, recording, path, partial(_own, module), norm)
                handles.append(block.register_forward_pre_hook(_here(enter), with_kwargs=True))
            else:
                enter = partial(_enter, recording, path, read, None)
                handles.append(module.register_forward_pre_hook(_here(enter), with_kwargs=True))
            if gradients:
                handles.append(module.register_forward_hook(_here(partial(_leave, recording, path))))
            if block is not None and outer not in watched:
                watched.add(outer)
                after = partial(_after, recording, outer)
                handles.append(block.register_forward_hook(_here(after), with_kwargs=True))
        yield recording
    finally:
        for handle in handles:
            handle.remove()
    if not recording.found:
        why = "; ".join(f"{path}: {reason}" for path, reason in list(recording.left.items())[:1])
        raise ValueError(
            f"no attention of {type(model).__name__} could be recorded ({why or 'none of a known type ran'}); "
            "run the model itself, in eval mode and not compiled, inside capture"
        )


def _reader(module: nn.Module) -> Callable[..., tuple[Tensor, AttentionParts, nn.Module | None] | str | None] | None:
    """A function from an attention layer's arguments to (x, parts, position) or a reason; None for other modules."""
    if type(module) is layers.Attention:
        return partial(_own, module)
    if type_name(module) == MULTIHEAD:
        return partial(_multihead, module)
    forward = forward_for(module)
    read = forward.read if isinstance(forward, Forward) else None
    if read is None or AttentionParts not in get_args(get_type_hints(read)["return"]):  # an MLP's
        return None
    return partial(_foreign, module, read)


def _own(
    module: layers.Attention, x: Tensor, **branch: object
) -> tuple[Tensor, AttentionParts, nn.Module | None] | str:
    if module.training and module.attn_drop.p > 0:
        return f"attention dropout {module.attn_drop.p}"
    norms = head_norms(module.q_norm, module.k_norm)
    parts = AttentionParts(
        (module.qkv,), module.proj, module.num_heads, module.scale, norms=norms, drops=(module.proj_drop,)
    )
    return x, parts, module.position


def _foreign(module: nn.Module, read: Callable, *inputs: object, **named: object):
    x, *rest = inputs or (named.get("hidden_states", named.get("x")),)
    parts = read(module, *rest, **{n: v for n, v in named.items() if n not in ("hidden_states", "x")})
    return parts if isinstance(parts, str) else (x, parts, None)


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
    parts = multihead_parts(module, attn_mask, key_padding_mask)
    return parts if isinstance(parts, str) else (query if module.batch_first else query.transpose(0, 1), parts, None)


def _here(record: Callable[..., None]) -> Callable[..., None]:
    """Wraps a hook so that it ignores other threads, which may call the model while hooks are being registered."""
    thread = get_ident()
    return lambda *call: record(*call) if get_ident() == thread else None


@torch.no_grad()
def _enter(
    recording: Recording,
    path: str,
    read: Callable,
    norm: nn.Module | None,
    module: nn.Module,
    inputs: tuple,
    named: dict,
) -> None:
    """Forward pre-hook of an attention layer: stores its input."""
    found = read(*inputs, **named)
    if found is not None:
        recording.found.pop(path, None)  # a repeated call moves to the end of the call order
    if isinstance(found, str):
        recording.left[path] = found
    elif found is not None:
        x, parts, position = found
        recording.found[path] = AttentionLayer(path, x.detach(), parts, norm, position)


def _leave(recording: Recording, path: str, module: nn.Module, inputs: tuple, output: Tensor | tuple) -> None:
    """Forward hook of an attention layer: registers a hook that stores the gradient of its output."""
    y, layer = output[0] if isinstance(output, tuple) else output, recording.found.get(path)
    if layer is not None and y.requires_grad:
        turned = isinstance(module, nn.MultiheadAttention) and not module.batch_first
        y.register_hook(lambda grad: setattr(layer, "output_grad", grad.transpose(0, 1) if turned else grad))


def _after(recording: Recording, path: str, module: nn.Module, inputs: tuple, named: dict, output: object) -> None:
    """Forward hook of a block: stores its input and output tokens."""
    x = inputs[0] if inputs else next((v for v in named.values() if isinstance(v, Tensor)), None)
    y = output[0] if isinstance(output, tuple) else output
    recording.blocks.pop(path, None)
    if isinstance(x, Tensor) and isinstance(y, Tensor) and x.dim() == 3 and x.shape == y.shape:
        recording.blocks[path] = x.detach(), y.detach()


def _block(path: str, modules: dict[str, nn.Module]) -> tuple[str, nn.Module | None]:
    """Path and module of the nearest ancestor of an attention layer that is not a ModuleList."""
    while path:
        path = path.rpartition(".")[0]
        if type(modules[path]) is not nn.ModuleList:
            return path, modules[path]
    return "", None
