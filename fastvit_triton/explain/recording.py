"""Records the attention of a model: `scaled_dot_product_attention`, and softmaxes whose results multiply values.

A map is what multiplies the values. A softmax is followed through functions that keep its queries and keys, such as
dropout or a linear map over the heads, up to a matrix product.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ..engine import ways
from .layer import AttentionLayer, LayerScores

WORDS = ("attention", "attn")  # in names of classes in which attention is expected
CHANNELS = ("XCA", "ChannelAttention", "ChannelAttentionV2", "Florence2VisionChannelAttention")
POOLS = ("AttentionPool", "AttentionPoolLatent", "AttentionPool2d", "PoolingHead")  # ends of names of classes
HALVING = ("DistanceDownsample", "AttentionDownsample", "LevitAttentionSubsample")  # of LeViT, without a residual
SOFTMAXES = (F.softmax, torch.softmax, Tensor.softmax)
DROPOUTS = (F.dropout, torch.dropout)
PRODUCTS = (torch.matmul, torch.bmm, Tensor.matmul, Tensor.__matmul__, Tensor.bmm)
TRANSPOSES = (torch.transpose, Tensor.transpose, Tensor.mT.__get__)  # type: ignore[attr-defined]
VIEWS = (
    torch.reshape, Tensor.reshape, Tensor.view, torch.flatten, Tensor.flatten, Tensor.unflatten, torch.unsqueeze,
    Tensor.unsqueeze,
)  # fmt: skip
# which gives itself to a function mode as a whole; as PyTorch writes it, but for that
MULTIHEAD = FunctionType(
    F.multi_head_attention_forward.__code__,
    F.multi_head_attention_forward.__globals__ | {"has_torch_function": lambda tensors: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)


@dataclass
class Recording:
    """Recording of one forward pass; a second pass overwrites it.

    Attributes:
        layers: attention layers in the order of their calls.
        stream: tokens [B, N, D] before the first block and after each block, for blocks that are modules.
        left: reason by path, for attention layers that could not be recorded.
        images: number of images; None if the model's first input was no image.
        maps: outputs by path that need gradients, of modules with parts that return the shape that they take.
    """

    found: dict[str, list[AttentionLayer]] = field(default_factory=dict)
    blocks: dict[str, tuple[Any, list[Tensor]]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    images: int | None = None
    maps: dict[str, list[Tensor]] = field(default_factory=dict)

    @property
    def layers(self) -> list[AttentionLayer]:
        return [layer for layers in self.found.values() for layer in layers]

    @property
    def stream(self) -> list[Tensor]:
        pairs = [*self._pairs().values()]
        return [pairs[0][0], *(after for _, after in pairs)] if pairs else []

    @property
    def depths(self) -> list[int]:
        """The number of the last layer before each entry of the stream; 0 is before the first."""
        paths = [layer.path for layer in self.layers]
        inside = [[n for n, path in enumerate(paths, 1) if f"{path}.".startswith(f"{of}.")] for of in self._pairs()]
        return [inside[0][0] - 1, *(numbers[-1] for numbers in inside)] if inside else []

    def _pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Tokens before and after each block that keeps their shape, by path."""
        return {
            path: (x.detach(), ys[0].detach())
            for path, (x, ys) in self.blocks.items()
            if isinstance(x, Tensor) and ys and x.dim() == 3 and x.shape == ys[0].shape
        }


@contextmanager
def capture(model: nn.Module, gradients: bool = False) -> Iterator[Recording]:
    """Records the attention of a model that runs inside the `with`, in the same thread.

    Works for any model that calls `scaled_dot_product_attention`, or a softmax and a matrix product. Modules that
    `optimize` converted run the forward of their class, without its kernels. All hooks are removed at the end.

    Args:
        model: in training or evaluation mode; layers with active attention dropout are not recorded.
        gradients: also record what `AttentionLayer.map_grad` needs, in a backward pass.

    Yields:
        Recording: filled by the forward pass.

    Raises:
        ValueError: no attention layer was recorded.
    """
    with record(model, gradients) as recording:
        yield recording
    if not recording.found:
        why = "; ".join(f"{path}: {reason}" for path, reason in list(recording.left.items())[:3])
        why += f"; and {len(recording.left) - 3} more" if len(recording.left) > 3 else ""
        raise ValueError(
            f"no attention of {type(model).__name__} could be recorded ({why or 'no softmax multiplies values'}); "
            "run the model itself, in eval mode and not compiled, inside capture"
        )


@contextmanager
def record(model: nn.Module, gradients: bool = False) -> Iterator[Recording]:
    """`capture`, also for models without attention."""
    recorder = _Recorder(gradients)
    handles = []
    before = ways.state.inside_plain
    try:
        for path, module in model.named_modules():
            enter, leave = (partial(function, path) for function in (recorder.enter, recorder.leave))
            handles.append(module.register_forward_pre_hook(_here(enter), with_kwargs=True))
            handles.append(module.register_forward_hook(_here(leave), with_kwargs=True, always_call=True))
        ways.state.inside_plain = True  # kernels call none of PyTorch's functions
        with recorder:
            yield recorder.recording
    finally:
        ways.state.inside_plain = before
        for handle in handles:
            handle.remove()


def _here(record: Callable[..., None]) -> Callable[..., None]:
    """Wraps a hook so that it ignores other threads, which may call the model while hooks are being registered."""
    thread = get_ident()
    return lambda *call: record(*call) if get_ident() == thread else None


class _Followed(NamedTuple):
    """A tensor computed of a softmax."""

    size: tuple[int, int]  # queries and keys of the softmax
    keys: int = -1  # axis of its keys, -1 or -2; 0 if unknown
    whole: Tensor | None = None  # the map of which it is a view with other axes; None if it is no view
    why: str | None = None  # why the map cannot be recorded; None if it can


class _Recorder(TorchFunctionMode):
    """Fills a recording."""

    def __init__(self, gradients: bool) -> None:
        super().__init__()
        self.recording = Recording()
        self.gradients = gradients
        # (path, module, number of layers before it) of the modules that are running, outermost first
        self.stack: list[tuple[str, nn.Module, int]] = []
        self.maps: Any = WeakIdKeyDictionary()  # results of softmaxes and what was computed of them
        self.within: dict[tuple[int, ...], str] = {}  # block around the layers of these numbers
        self.calls: list[AttentionLayer] = []  # all layers, in the order of their calls

    def enter(self, path: str, module: nn.Module, inputs: tuple, named: dict) -> None:
        """Forward pre-hook: what an earlier call recorded is dropped."""
        recording = self.recording
        recording.found.pop(path, None)
        recording.left.pop(path, None)
        if not path:
            for kept in (recording.found, recording.blocks, recording.left, recording.maps, self.within, self.calls):
                kept.clear()
            x = next((t for t in (*inputs, *named.values()) if isinstance(t, Tensor)), None)
            recording.images = len(x) if x is not None and x.dim() == 4 else None
        self.stack.append((path, module, len(self.calls)))

    def leave(self, path: str, module: nn.Module, inputs: tuple, named: dict, output: object) -> None:
        """Forward hook: stores tokens around a block."""
        *_, before = self.stack.pop()
        x = inputs[0] if inputs else next((v for v in named.values() if isinstance(v, Tensor)), None)
        parts = output if isinstance(output, (tuple, list)) else (output,)
        maps = [part for part in parts if isinstance(part, Tensor) and part.dim() in (3, 4)]
        same = isinstance(x, Tensor) and bool(maps) and x.shape == maps[0].shape
        if same and maps[0].requires_grad and next(module.children(), None) is not None:
            self.recording.maps.pop(path, None)
            self.recording.maps[path] = maps
        inside = tuple(range(before, len(self.calls)))
        if not inside:
            self._miss(path, module)
        elif maps and any(self.calls[i].path != path for i in inside):
            self._block(path, inside, x, maps, same)

    def _block(self, path: str, inside: tuple[int, ...], x: Any, maps: list[Tensor], same: bool) -> None:
        """A block is the outermost module around a layer and no other that returns what it takes, or the innermost."""
        known = inside in self.within
        taken = {i for layers in self.within for i in layers}
        if not same if known else taken & set(inside):
            return
        self.recording.blocks.pop(self.within.pop(inside, path), None)
        self.recording.blocks.pop(path, None)
        self.within[inside] = path
        self.recording.blocks[path] = x, maps

    def _miss(self, path: str, module: nn.Module) -> None:
        """Names a module that should have attention by the name of its class, but has none."""
        named = any(word in type(module).__name__.lower() for word in WORDS)
        known = any(inner == path or inner.startswith(f"{path}.") for inner in self.recording.left)
        if named and not known and any(True for _ in module.parameters()):
            self.recording.left[path] = f"{type(module).__name__} multiplies no values by a softmax"

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        named = kwargs or {}
        if function is F.multi_head_attention_forward:
            with self:
                return MULTIHEAD(*args, **named)
        result = function(*args, **named)
        if function is F.scaled_dot_product_attention:
            self._fused(result, *args, **named)
        elif function in SOFTMAXES:
            axis = named.get("dim", args[1] if len(args) > 1 else None)
            if result.dim() > 2 and axis in (-1, result.dim() - 1):
                self.maps[result] = _Followed((result.shape[-2], result.shape[-1]))
        elif len(self.maps):
            listed = [t for one in args for t in (one if isinstance(one, (tuple, list)) else (one,))]
            given = [t for t in (*listed, *named.values()) if isinstance(t, Tensor)]
            attended = next((t for t in given if t in self.maps), None)
            if attended is not None and isinstance(result, Tensor):
                self._follow(function, result, attended, given, args, named)
        return result

    def _follow(
        self, function: Any, result: Tensor, attended: Tensor, given: list[Tensor], args: tuple, named: dict
    ) -> None:
        """A function of a map: its product with the values, or one that keeps its queries and keys."""
        facts = self.maps[attended]
        place = next(i for i, t in enumerate(given) if t is attended)
        if function in PRODUCTS and facts.keys == (-1, -2)[place]:
            whole, turned = facts.whole, place == 1
            channels = result.shape[-2 if turned else -1]
            if whole is not None and attended.dim() == 2:  # one map for all images, whose gradient is their sum
                values = given[1].detach()
                axes = whole.shape[:-1]
                self._add(
                    whole.expand(len(result), *whole.shape), channels, facts.why, result,
                    lambda grad: (grad @ values.mT).unflatten(1, axes),
                )  # fmt: skip
            elif whole is not None:
                self._add(whole, channels, facts.why, whole)
            else:
                maps = (attended.mT if turned else attended).expand(*result.shape[:-2], *facts.size)
                self._add(maps, channels, facts.why, attended, (lambda grad: grad.mT) if turned else None)
        elif function is torch.einsum and facts.keys == -1 and _sums_last(args[0], place):
            self._add(attended, result.shape[-1], facts.why, attended)
        elif function in TRANSPOSES and result.shape[-2:] == facts.size[::-1]:
            self.maps[result] = facts._replace(keys=-3 - facts.keys if facts.keys else 0)
        elif result.numel() == attended.numel() or result.shape[-2:] == attended.shape[-2:]:
            known = -1 if result.shape[-2:] == facts.size else -1 if result.shape[-1] == facts.size[1] else 0
            whole = attended if facts.whole is None else facts.whole
            view = function in VIEWS and result.shape[-2:] != facts.size
            self.maps[result] = facts._replace(
                keys=known, whole=whole if view else None, why=facts.why or _dropped(function, args, named)
            )

    def _fused(
        self,
        result: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        if query.is_nested:
            self.recording.left[self.stack[-1][0] if self.stack else ""] = "images of different sizes in one sequence"
            return
        if enable_gqa:
            key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
        lead = result.shape[:-2]
        q, k, v = (t.detach().expand(*lead, *t.shape[-2:]) for t in (query, key, value))
        mask = None if attn_mask is None else attn_mask.detach().expand(*lead, q.shape[-2], k.shape[-2])
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        why = f"attention dropout {dropout_p}" if dropout_p > 0 else None
        self._add(LayerScores(q, k, v, mask, scale, is_causal), q.shape[-1], why, result)

    def _add(
        self,
        weights: Tensor | LayerScores,
        channels: int,
        why: str | None,
        watched: Tensor,
        change: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Adds a layer; what `map_grad` needs is the gradient of `watched`, after this change."""
        path, module, _ = self.stack[-1] if self.stack else ("", None, 0)
        names = [type(running).__name__ for _, running, _ in self.stack]
        if any(name.endswith(POOLS) for name in names):
            why = "its query is learned and no token"
        elif names and names[-1] in CHANNELS:
            why = f"{names[-1]} attends to channels"
        left = self.recording.left
        if why is not None:
            left[path] = why
            return
        for inner in [inner for inner in left if inner.startswith(f"{path}.")]:
            del left[inner]  # projections that are called attention
        images = self.recording.images
        counts = (getattr(module, name, None) for name in ("num_heads", "heads", "num_attention_heads"))
        heads = next((count for count in counts if isinstance(count, int)), None)
        first = weights if isinstance(weights, Tensor) else weights.q
        windows = _axis_of_windows(first, heads) if first.dim() == 5 else None
        four = partial(_four, images=images, heads=heads, windows=windows)
        if isinstance(weights, LayerScores):
            mask = None if weights.mask is None else four(weights.mask)
            weights = weights._replace(q=four(weights.q), k=four(weights.k), v=four(weights.v), mask=mask)
        else:
            weights = four(weights.detach())
        layer = AttentionLayer(path, weights, channels, images, type(module).__name__ in HALVING)
        self.calls.append(layer)
        self.recording.found.setdefault(path, []).append(layer)
        if self.gradients and watched.requires_grad:
            watched.register_hook(lambda grad: setattr(layer, "grad", four(grad if change is None else change(grad))))


def _dropped(function: Any, args: tuple, named: dict) -> str | None:
    """The reason against a map that this function drops some of."""
    if function not in DROPOUTS:
        return None
    rate = named.get("p", args[1] if len(args) > 1 else 0.5)
    training = named.get("training", args[2] if len(args) > 2 else True)
    return f"attention dropout {rate}" if training and rate > 0 else None


def _sums_last(equation: object, place: int) -> bool:
    """True if an einsum sums over the last axis of this operand."""
    if not isinstance(equation, str):
        return False
    operands, _, result = equation.replace(" ", "").partition("->")
    return operands.split(",")[place][-1] not in result


def _axis_of_windows(t: Tensor, heads: int | None) -> int:
    """Axis of the windows, 1 or 2 of [B, ., ., N, d]; the other one is that of the heads, whose stride is smaller."""
    if t.shape[1] != t.shape[2] and heads in t.shape[1:3]:
        return 2 if t.shape[1] == heads else 1
    return 2 if t.stride(1) < t.stride(2) else 1


def _four(t: Tensor, images: int | None, heads: int | None, windows: int | None) -> Tensor:
    """[G, H, N, M] of a tensor whose last axes are N and M, and which may have others for windows, or one for both."""
    if windows is not None and t.dim() == 5:
        return t.movedim(windows, 1).flatten(0, 1)
    if t.dim() == 4 and heads and t.shape[1] > heads and t.shape[1] % heads == 0:  # windows · heads
        return t.unflatten(1, (-1, heads)).flatten(0, 1)
    if t.dim() == 3:
        several = images is not None and len(t) > images and len(t) % images == 0
        return t.unflatten(0, (-1, heads or len(t) // (images or 1))) if several and heads != 1 else t[:, None]
    return t[None, None] if t.dim() == 2 else t
