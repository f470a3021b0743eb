"""LayerNorms folded into the projections behind them: within each call, or once for a model whose weights are final.

PyTorch counts writes to a tensor in `_version`, but not those through `.data`, NumPy, DLPack or the storage, so a fold
that outlives its call can be wrong unnoticed. It does so only in a model that `freeze` has marked.
"""

import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..kernels.argument import Norm
from ..kernels.backend import kernels_available
from ..kernels.fold import Folded, Group, fold_groups, packed, pays
from ..kernels.op import can_fold_norm

PROGRAMS = "_fastvit_triton_programs"  # key in a module's __dict__: what `replay` recorded, which holds kept folds
_frozen: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # module → its folds by dtype and weights


class FoldedNorm(NamedTuple):
    """A LayerNorm folded into the projections behind it."""

    folded: Folded
    eps: float


class Entry(NamedTuple):
    """A LayerNorm and the projections behind it.

    Attributes:
        norm: the module.
        group: its parameters and those of the projections.
        eps: of the norm.
        sources: the tensors that the group was made from.
    """

    norm: nn.Module
    group: Group
    eps: float
    sources: tuple[Tensor, ...]

    @property
    def parameters(self) -> Norm:
        """Weight, bias and eps of the norm."""
        return Norm(self.group.norm_weight, self.group.norm_bias, self.eps)


class Kept(NamedTuple):
    """A fold, the tensors it was made from, and what is compared of them."""

    folded: Folded
    sources: tuple[weakref.ref, ...]
    state: tuple


def freeze(model: nn.Module) -> None:
    """Marks a model's weights as final: its LayerNorms are folded once, in the next inference call, and stay folded.

    In blocks that run fused this saves the launch that otherwise folds both LayerNorms in each call, or the two
    LayerNorms where a batch has few rows; others have nothing to fold. Each call compares the weights with those that
    were folded: the same tensors at the same addresses, no write counted by PyTorch, the same dtype. If they differ it
    folds again, into the same memory. Writes that PyTorch does not count (through `.data`, NumPy, DLPack, the storage,
    or to inference tensors) are not noticed: call `freeze` again after them. Calls in training mode or with gradients
    for the weights fold within the call.

    The folds take about 58 % of the memory of a block's weights until `unfreeze`. A CUDA graph reads them at fixed
    addresses: run the frozen model once before the capture, and do not unfreeze it while the graph is in use. Copies
    and pickles of a model are not frozen, and a compiled model folds in each call. Where the kernels do not run, as on
    a CPU, nothing is folded.

    Args:
        model: one of ours, or one that `optimize` converted.

    Raises:
        TypeError: model is no nn.Module.
    """
    _check(model)
    for module in model.modules():
        module.__dict__.pop(PROGRAMS, None)
        _frozen.setdefault(module, {})
    fold_again(model)


def is_frozen(model: nn.Module) -> bool:
    """True if `freeze` was called for the model or a module in it."""
    return any(module in _frozen for module in model.modules())


def fold_again(model: nn.Module) -> None:
    """Has the next call fold kept folds again, in place."""
    for module in model.modules():
        kept = _frozen.get(module, {})
        for key, entry in kept.items():
            kept[key] = entry._replace(state=())


def unfreeze(model: nn.Module) -> None:
    """Ends `freeze` and frees the folds; CUDA graphs that were captured meanwhile must not be replayed.

    Args:
        model: as for `freeze`; one that is not frozen stays as it is.

    Raises:
        TypeError: model is no nn.Module.
    """
    _check(model)
    for module in model.modules():
        module.__dict__.pop(PROGRAMS, None)
        _frozen.pop(module, None)


def _check(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}; give an nn.Module")


def operands(
    weight: Tensor | tuple[Tensor, ...],
    bias: Tensor | tuple[Tensor | None, ...] | None,
    norm: FoldedNorm | Norm | None,
) -> tuple:
    """(weight, bias, norm) for `linear` and `mlp`: as they are, or what the norm was folded into."""
    return (norm.folded, None, (None, None, norm.eps)) if isinstance(norm, FoldedNorm) else (weight, bias, norm)


def of_dtype(norm: FoldedNorm | Norm | None, x: Tensor) -> FoldedNorm | Norm | None:
    """The norm, unless it is folded for another dtype than x's, which a float32 LayerScale before it changes."""
    return None if isinstance(norm, FoldedNorm) and norm.folded.weight.dtype != x.dtype else norm


def fold_norms(x: Tensor, *entries: Entry | None) -> list[FoldedNorm | None]:
    """Each LayerNorm of x [..., K] folded into its projections; None where a LayerNorm of its own is to run.

    Frozen ones are kept. Others are folded in one launch where x has as many rows as the widest packed projection has
    outputs; where weights get gradients they come with their source.
    """
    given = [e for e in entries if e is not None and _same_dtype(x, e.group.weights)]
    if not (given and kernels_available(x) and can_fold_norm(x)):
        return [None] * len(entries)
    if not torch.compiler.is_compiling() and all(e.norm in _frozen and _is_final(e) for e in given):
        made = _keep(x, given)
    elif pays(x, max(sum(map(len, e.group.weights)) for e in given)):
        made = fold_groups([e.group for e in given], x.dtype)
        made = [f._replace(source=_source(e.group)) if _learns(e) else f for f, e in zip(made, given, strict=True)]
    else:
        return [None] * len(entries)
    found = {id(e): FoldedNorm(f, e.eps) for e, f in zip(given, made, strict=True)}
    return [found.get(id(e)) for e in entries]


def _same_dtype(x: Tensor, weights: tuple[Tensor, ...]) -> bool:
    """The product would not raise for its dtypes: they are equal, or autocast makes them so."""
    return torch.is_autocast_enabled(x.device.type) or all(w.dtype == x.dtype for w in weights)


def _learns(entry: Entry) -> bool:
    """Gradients are on, and a source of this fold gets one."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in entry.sources)


def _source(group: Group) -> Group:
    """The group with its projections packed into one, through which gradients flow."""
    weight, bias = packed(group.weights, group.biases)
    return Group((weight,), (bias,), group.norm_weight, group.norm_bias)


def _is_final(entry: Entry) -> bool:
    """A fold of this entry may outlive the call: the model is not being trained."""
    return not (entry.norm.training or _learns(entry))


def _keep(x: Tensor, entries: list[Entry]) -> list[Folded]:
    """The folds that these frozen entries keep, after folding those whose sources have changed."""
    keys = [(x.dtype, *map(id, e.group.weights)) for e in entries]
    places = [_frozen.get(e.norm, {}) for e in entries]  # another thread may unfreeze meanwhile
    todo = zip(places, keys, entries, strict=True)
    stale = [(kept, key, e) for kept, key, e in todo if not _is_fresh(kept.get(key), e)]
    if stale and x.is_cuda and torch.cuda.is_current_stream_capturing():
        return fold_groups([e.group for e in entries], x.dtype)  # what a graph captures has not run yet
    if stale:
        with torch.inference_mode(False), torch.no_grad():  # inference tensors could not be written to again
            made = fold_groups([e.group for *_, e in stale], x.dtype)
            for (kept, key, entry), new in zip(stale, made, strict=True):
                old = kept.pop(key, None)
                if old is not None and all(_like(a, b) for a, b in zip(old.folded[:3], new[:3], strict=True)):
                    for a, b in zip(old.folded[:3], new[:3], strict=True):
                        a.copy_(b)
                    new = old.folded
                for other in [k for k, v in kept.items() if any(ref() is None for ref in v.sources)]:
                    del kept[other]
                kept[key] = Kept(new, tuple(map(weakref.ref, entry.sources)), _state(entry))
        if x.is_cuda:
            torch.cuda.current_stream().synchronize()  # other streams and threads read these folds, too
    return [kept[key].folded for kept, key in zip(places, keys, strict=True)]


def kept_folds(modules: Iterable[nn.Module]) -> list[Kept]:
    """The folds that these modules keep."""
    return [kept for module in modules for kept in _frozen.get(module, {}).values()]


def _is_fresh(kept: Kept | None, entry: Entry) -> bool:
    """A kept fold was made from these tensors, and nothing that PyTorch tells of them has changed."""
    if kept is None or kept.state != _state(entry):
        return False
    return all(ref() is t for ref, t in zip(kept.sources, entry.sources, strict=True))


def _state(entry: Entry) -> tuple:
    """Address, counted writes, dtype and device of each source; writes to inference tensors are not counted."""
    return tuple((t.data_ptr(), 0 if t.is_inference() else t._version, t.dtype, t.device) for t in entry.sources)


def _like(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
