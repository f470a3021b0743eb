"""Folds LayerNorms into the projections after them: in each call, or once for a model whose weights are final.

PyTorch counts writes to a tensor in `_version`, but not those through `.data`, NumPy, DLPack or the storage, so a
cached fold can become stale without detection. Folds are cached only in a model that `freeze` has marked.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from ..kernels import onednn, settings
from ..kernels.argument import Norm
from ..kernels.backend import kernels_available
from ..kernels.fold import Folded, Group, fold_groups, packed, pays
from ..kernels.op import can_fold_norm

PROGRAMS = "_fastvit_triton_programs"  # key in a module's __dict__: recordings of `replay`, which hold cached folds
SIZES = "_fastvit_triton_sizes"  # key in a module's __dict__: its `ways.Sizes`
_frozen: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # module → what is kept for it, a `Kept` by key
_indices: dict[tuple, Tensor] = {}  # by key and device
_precisions: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # frozen module → "bf16" or "int8"


class FoldedNorm(NamedTuple):
    """A norm folded into the projections after it, and the norm without its parameters: ε and kind."""

    folded: Folded
    bare: Norm


class Entry(NamedTuple):
    """A LayerNorm or RMSNorm and the projections after it."""

    norm: nn.Module  # the module
    group: Group  # its parameters and those of the projections
    bare: Norm  # the norm without its parameters: ε and kind
    sources: tuple[Tensor, ...]  # the tensors that the group is computed from

    @property
    def parameters(self) -> Norm:
        """Weight, bias and eps of the norm."""
        return Norm(self.group.norm_weight, self.group.norm_bias, *self.bare[2:])


class Kept(NamedTuple):
    """A cached fold, packed weight or tensor of `derived`; weak references to its sources' storages, and their state.

    Weak references to the tensors themselves would keep `torch.utils.swap_tensors` from swapping them.
    """

    folded: Any  # a `Folded`, an `onednn.Packed` or the tensors of `derived`
    sources: tuple[StorageWeakRef, ...]
    state: tuple


class CachedFold(NamedTuple):
    """Where something is cached: `store[key] is kept` until it is computed again or the module is not frozen."""

    store: dict
    key: tuple
    kept: Kept


def freeze(model: nn.Module, precision: str = "float32") -> None:
    """Marks a model's weights as final; `convert.frozen.freeze` is the public function.

    Raises:
        TypeError, ValueError: see there.
    """
    _check(model)
    _check_precision(model, precision)
    for module in model.modules():
        module.__dict__.pop(PROGRAMS, None)
        module.__dict__.pop(SIZES, None)
        store = _frozen.setdefault(module, {})
        if precision_of(module) != precision:  # weights packed in another precision
            for key in [key for key, entry in store.items() if isinstance(entry.folded, onednn.PackedWeight)]:
                del store[key]
        _precisions.pop(module, None)
        if precision != "float32":
            _precisions[module] = precision
    settings.reduced = bool(_precisions)
    fold_again(model)


def _check_precision(model: nn.Module, precision: str) -> None:
    """Raises ValueError if linear layers of this model cannot run in this precision."""
    if precision not in onednn.PRECISIONS:
        raise ValueError(f"precision is {precision!r}; use one of {', '.join(onednn.PRECISIONS)}")
    if precision == "float32":
        return
    parameter = next(model.parameters(), None)
    if parameter is not None and (parameter.device.type, parameter.dtype) != ("cpu", torch.float32):
        actual = f"{parameter.dtype} on {parameter.device}".removeprefix("torch.")
        raise ValueError(f'precision "{precision}" is for models in float32 on a CPU, this one is {actual}')
    cpu = torch.device("cpu")
    why = onednn.why_not(cpu, torch.bfloat16) if precision == "bf16" else onednn.refusal(torch.float32, "int8")
    if why is not None:
        raise ValueError(f'precision "{precision}" cannot run here: {why}')


def is_frozen(model: nn.Module) -> bool:
    """True if `freeze` was called for the model or a module in it."""
    return any(module in _frozen for module in model.modules())


def precision_of(module: nn.Module | None) -> str | None:
    """The precision with which `freeze` was called for this module or one around it; None if it was not."""
    return _precisions.get(module, "float32") if module in _frozen else None


def fold_again(model: nn.Module) -> None:
    """Invalidates cached folds; the next call recomputes them in place."""
    for module in model.modules():
        store = _frozen.get(module, {})
        for key, entry in store.items():
            store[key] = entry._replace(state=())


def unfreeze(model: nn.Module) -> None:
    """Ends `freeze` and frees the folds; CUDA graphs captured while the model was frozen must not be replayed.

    Args:
        model: as for `freeze`; no effect if it is not frozen.

    Raises:
        TypeError: model is not an nn.Module.
    """
    _check(model)
    fold_again(model)  # for records of modules around this one
    for module in model.modules():
        module.__dict__.pop(PROGRAMS, None)
        module.__dict__.pop(SIZES, None)
        _frozen.pop(module, None)
        _precisions.pop(module, None)
    settings.reduced = bool(_precisions)


def _check(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}; give an nn.Module")


def operands(
    weight: Tensor | tuple[Tensor, ...],
    bias: Tensor | tuple[Tensor | None, ...] | None,
    norm: FoldedNorm | Norm | None,
) -> tuple:
    """(weight, bias, norm) for `linear` and `mlp`: unchanged, or the folded weights."""
    return (norm.folded, None, norm.bare) if isinstance(norm, FoldedNorm) else (weight, bias, norm)


def of_dtype(norm: FoldedNorm | Norm | None, x: Tensor) -> FoldedNorm | Norm | None:
    """The norm; None if it is folded for a dtype other than x's (a float32 LayerScale can promote x)."""
    return None if isinstance(norm, FoldedNorm) and norm.folded.weight.dtype != x.dtype else norm


def fold_norms(x: Tensor, *entries: Entry | None) -> list[FoldedNorm | None]:
    """Folds each norm of x [..., K] into its projections; None where a separate norm is to run.

    Frozen folds are cached. Others are computed in one launch if x has at least as many rows as the widest packed
    projection has outputs; if the weights require gradients, the fold carries its source.
    """
    placed = [(i, e) for i, e in enumerate(entries) if e is not None and _same_dtype(x, e.group.weights)]
    foldable = [entry for _, entry in placed]
    norms: list[FoldedNorm | None] = [None] * len(entries)
    if not (foldable and kernels_available(x) and can_fold_norm(x)):
        return norms
    if not torch.compiler.is_compiling() and all(map(_is_kept, foldable)):
        folds = _keep(x, foldable)
    elif pays(x, max([sum(map(len, e.group.weights)) for e in foldable])):
        folds = fold_groups([e.group for e in foldable], x.dtype)
        folds = [f._replace(source=_source(e.group)) if _learns(e) else f for f, e in zip(folds, foldable, strict=True)]
    else:
        return norms
    for (i, entry), folded in zip(placed, folds, strict=True):
        norms[i] = FoldedNorm(folded, entry.bare)
    return norms


def derived(owner: nn.Module, name: str, sources: tuple[Tensor | None, ...], make: Callable[[], Tensor]) -> Tensor:
    """make(), a tensor computed from weights, such as a table of biases; cached if the owner is frozen.

    Args:
        owner: module that has the weights.
        name: of the tensor, unique for the owner.
        sources: the tensors that it is computed from, and nothing else, or none for a constant that depends on the name
            alone, which then has its device, too; None is ignored.
        make: computes it.
    """
    tensors = tuple(t for t in sources if t is not None)
    return all_derived(owner, name, tensors, lambda: (make(),))[0] if keeps(owner, *tensors) else make()


def all_derived(
    owner: nn.Module, name: str, sources: tuple[Tensor, ...], make: Callable[[], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """As `derived`, for several tensors; `keeps` is true of the owner and the sources."""
    store = _frozen.get(owner, {})  # another thread may unfreeze concurrently
    key = (name, *map(id, sources))
    if not _is_fresh(store.get(key), sources):
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return make()
        with torch.inference_mode(False), torch.no_grad():
            made = tuple(t.contiguous() for t in make())
            _store(store, key, made, sources)
        if made[0].is_cuda:
            torch.cuda.current_stream().synchronize()
    found: tuple[Tensor, ...] = store[key].folded
    return found


def index_of(key: tuple, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
    """make(), an index on this device; kept for the process, as replays read only tensors that outlive the call.

    Args:
        key: everything that it depends on besides the device, so that it never changes.
        device: where it is used.
        make: computes it, on any device.
    """
    found = _indices.get((*key, device))
    if found is None:
        with torch.inference_mode(False), torch.no_grad(), _disable_current_modes():
            found = _indices.setdefault((*key, device), make().to(device))
    return found


def kept_indices() -> list[Tensor]:
    """All that `index_of` keeps."""
    return list(_indices.values())


def packed_weight(layers: tuple, x: Tensor, layer_scale: Tensor | None = None) -> onednn.PackedWeight | None:
    """The weights of these linear layers as one weight in oneDNN's layout, cached if all of them are frozen.

    None if one is not frozen or gradients are enabled.

    Args:
        layers: linear layers that read x.
        x: [..., K], the operand of the product.
        layer_scale: multiplied into weight and bias; or None.
    """
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or not x.numel():
        return None
    if not all(isinstance(layer, nn.Module) and layer in _frozen and not layer.training for layer in layers):
        return None
    store = _frozen.get(layers[0])  # another thread may unfreeze concurrently
    if store is None:
        return None
    precision = _precisions.get(layers[0], "float32") if x.dtype == torch.float32 else "float32"  # after `.half()`
    sources = tuple(t for layer in layers for t in (layer.weight, layer.bias) if t is not None)
    sources = sources if layer_scale is None else (*sources, layer_scale)
    if any(t.dtype != x.dtype for t in sources) or onednn.refusal(x.dtype, "packed") is not None:
        return None
    key = ("onednn", *map(id, sources))
    if not _is_fresh(store.get(key), sources):
        # a recorder of the call must not see it
        with torch.inference_mode(False), torch.no_grad(), _disable_current_modes():
            weight, bias = packed(tuple(layer.weight for layer in layers), tuple(layer.bias for layer in layers))
            reordered = onednn.pack(weight, bias, layer_scale, x.numel() // x.shape[-1], precision)
        _forget_lost(store)
        store[key] = Kept(reordered, _storages(sources), _state(sources))
    cached: onednn.PackedWeight = store[key].folded
    return cached


def keeps(owner: nn.Module, *sources: Tensor | None) -> bool:
    """True if `derived` caches a tensor computed from these: the owner is frozen, and they are not being trained."""
    if torch.compiler.is_compiling():  # first, as Dynamo would guard on all modules that are frozen
        return False
    learns = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in sources)
    return owner in _frozen and not (owner.training or learns)


def _same_dtype(x: Tensor, weights: tuple[Tensor, ...]) -> bool:
    """True if a matmul accepts these dtypes: they are equal, or autocast is on."""
    return torch.is_autocast_enabled(x.device.type) or all([w.dtype == x.dtype for w in weights])


def _learns(entry: Entry) -> bool:
    """True if gradients are enabled and a source of this fold requires one."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in entry.sources)


def _source(group: Group) -> Group:
    """The group with its projections packed into one, differentiably."""
    weight, bias = packed(group.weights, group.biases)
    return Group((weight,), (bias,), group.norm_weight, group.norm_bias)


def _is_kept(entry: Entry) -> bool:
    """True if a fold of this entry is cached: the norm is frozen, and the model is not being trained."""
    return entry.norm in _frozen and not (entry.norm.training or _learns(entry))


def _keep(x: Tensor, entries: list[Entry]) -> list[Folded]:
    """The cached folds of these frozen entries; recomputes those whose sources have changed."""
    keys = [(x.dtype, *map(id, e.group.weights)) for e in entries]
    stores = [_frozen.get(e.norm, {}) for e in entries]  # another thread may unfreeze concurrently
    todo = zip(stores, keys, entries, strict=True)
    stale = [(store, key, e) for store, key, e in todo if not _is_fresh(store.get(key), e.sources)]
    if stale and x.is_cuda and torch.cuda.is_current_stream_capturing():
        return fold_groups([e.group for e in entries], x.dtype)  # captured launches have not run yet
    if stale:
        with torch.inference_mode(False), torch.no_grad():  # inference tensors cannot be updated in place later
            folds = fold_groups([e.group for *_, e in stale], x.dtype)
            for (store, key, entry), new in zip(stale, folds, strict=True):
                _store(store, key, new, entry.sources)
        if x.is_cuda:
            torch.cuda.current_stream().synchronize()  # other streams and threads may read these folds
    return [store[key].folded for store, key in zip(stores, keys, strict=True)]


def _store(store: dict, key: tuple, new: Folded | tuple[Tensor, ...], sources: tuple[Tensor, ...]) -> None:
    """Stores what was computed from these sources, into the memory of its predecessor if that has the same layout."""
    old = store.pop(key, None)
    if old is not None and all(_like(a, b) for a, b in _pairs(old.folded, new)):
        for a, b in _pairs(old.folded, new):
            a.copy_(b)
        new = old.folded
    _forget_lost(store)
    store[key] = Kept(new, _storages(sources), _state(sources))


def _pairs(old: tuple, new: tuple) -> list[tuple[Tensor, Tensor]]:
    """The tensors of two results of the same computation; a fold that is kept has no source."""
    return [(a, b) for a, b in zip(old, new, strict=True) if a is not None]


def _forget_lost(store: dict) -> None:
    """Removes what was computed from tensors that no longer exist."""
    for key in [k for k, v in store.items() if any(storage.expired() for storage in v.sources)]:
        del store[key]


def kept_folds(modules: Iterable[nn.Module]) -> list[CachedFold]:
    """The folds cached for these modules, the tensors of `derived`, and weights packed for oneDNN."""
    stores = [_frozen.get(module, {}) for module in modules]
    return [CachedFold(store, key, entry) for store in stores for key, entry in store.items()]


def _is_fresh(entry: Kept | None, sources: tuple[Tensor, ...]) -> bool:
    """True if it was computed from these tensors and PyTorch records no change of them."""
    if entry is None or entry.state != _state(sources):
        return False
    pairs = zip(entry.sources, sources, strict=True)
    return all(storage.cdata == t.untyped_storage()._cdata for storage, t in pairs)


def _storages(sources: tuple[Tensor, ...]) -> tuple[StorageWeakRef, ...]:
    return tuple(StorageWeakRef(t.untyped_storage()) for t in sources)


def _state(sources: tuple[Tensor, ...]) -> tuple:
    """(address, version, layout, dtype, device) of each source; inference tensors have no version."""
    versions = (0 if t.is_inference() else t._version for t in sources)
    return tuple(
        (t.data_ptr(), version, t.shape, t.stride(), t.dtype, t.device)
        for t, version in zip(sources, versions, strict=True)
    )


def _like(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
