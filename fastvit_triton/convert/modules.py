"""`optimize` and `revert`: foreign modules get fused forwards in place, one instance at a time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from ..kernels.backend import backend, why_not
from ..layers.body import AttentionParts, MlpParts
from ..layers.freeze import freeze as freeze_weights
from ..layers.freeze import unfreeze
from ..layers.hooks import has_hooks, is_our_forward, is_patched, type_name
from ..layers.module_parts import LAYER_NORMS, is_readable, norm_of
from ..layers.ways import SIZES
from . import from_timm_blocks, from_torch, from_transformers, from_vit_pytorch  # noqa: F401  (they declare)
from .forwards import Forward, forward_for
from .from_torch import CONV, STEMS
from .reporting import Report, Row

LEFT = {"timm.models.cait.TalkingHeadAttn": "its heads mix their attention maps"}  # type → why
LEFT |= dict.fromkeys(from_transformers.INNER)  # parts of a candidate, none themselves
WORDS = ("attention", "attn", "mlp", "feedforward", "layernorm")  # of class names that a user would ask about


def optimize(
    model: nn.Module,
    *,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    freeze: bool = False,
    tune: object = None,
) -> Report:
    """Gives every module of a known type a forward that can run fused, in place.

    Parameters stay the same objects under the same keys, classes stay as they are, and gradients are the original's, so
    optimisers, checkpoints, EMA copies, DDP and FSDP2 go on working. Each call decides anew: where the kernels cannot
    run (a CPU, float64), where attention would need dropout or a causal mask, or where PyTorch's own code is expected
    to take the least time (see `kernels.plan` and `fastvit-triton doctor`), the module runs its own forward; parts that
    are hooked or were replaced (LoRA, quantised, parametrised) are called instead of read through. The original code
    runs under hooks of all modules (`torch.nn.modules.module.register_module_forward_hook` and its kin), where a
    class's `forward` was replaced, and under torch.fx and torch.jit.trace, which record the original's graph.
    torch.jit.script reads source code and raises an AttributeError on an optimised model: `revert` first. A module that
    its package's release builds otherwise than the fused forward expects is left alone, as the report says. Where
    transformers is loaded, its attention interface also learns the name "fastvit_triton". Shallow copies, as
    nn.DataParallel makes them, share their original's forward: use DistributedDataParallel, or `revert` first.

    An exception, also one of filter_fn, leaves every module as it was.

    Args:
        model: timm, transformers, torchvision, vit-pytorch, torch.nn modules, or a model that holds some of these.
        filter_fn: called with a candidate and its path; only candidates for which it is true are converted, and a fused
            block calls the others.
        freeze: the weights are final: also `fastvit_triton.freeze` the model.
        tune: an example of the model's input: also measure on this GPU how the model runs fastest, in training if it is
            in training mode; see `fastvit_triton.tune`. Where no kernel can run nothing is measured.

    Returns:
        Report: what each candidate can run as, or why it was left; print it for a table.

    Raises:
        TypeError: model is no nn.Module, filter_fn cannot be called, or freeze is no bool.
    """
    _check(model)
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(f"filter_fn is {filter_fn!r}; give a function of a module and its path, or None")
    if not isinstance(freeze, bool):
        raise TypeError(f"freeze is {freeze!r}; give True or False")
    from_transformers.register()
    with _all_or_nothing(model):
        rows = _rows(model, filter_fn)
    if freeze:
        freeze_weights(model)
    parameter = next(model.parameters(), None)
    device = None if parameter is None or backend() == "torch" else why_not(parameter.device, parameter.dtype)
    if tune is not None and device is None and backend() != "torch":
        from .. import tune as measure  # by its public name: it is above this package

        measure(model, tune, model.training)
    return Report(rows, device)


@contextmanager
def _all_or_nothing(model: nn.Module) -> Iterator[None]:
    """Whatever is raised inside, every instance then has the attributes that it had before."""
    before = [(module.__dict__, dict(module.__dict__)) for module in model.modules()]
    try:
        yield
    except BaseException:
        for facts, earlier in before:
            for name in facts.keys() - earlier.keys():
                del facts[name]
            facts.update(earlier)
        raise


def _rows(model: nn.Module, filter_fn: Callable[[nn.Module, str], bool] | None) -> tuple[Row, ...]:
    """Converts all that can be converted; one row for each candidate."""
    rows, seen, inside, known = [], {}, [], dict(model.named_modules(remove_duplicate=False))
    stems = {id(getattr(m, STEMS[type_name(m)], None)) for m in known.values() if type_name(m) in STEMS}
    for path, module in known.items():
        if id(module) in seen:  # at another path
            first = seen[id(module)]
            rows.append(Row(path, first.type, first.became, why=f"the same module as {first.path}"))
            continue
        if type_name(module) == CONV and id(module) not in stems:
            continue
        row = _convert(path, module, filter_fn)
        if row is None:
            continue
        inside = [p for p in inside if path.startswith(p + "." if p else "")]
        row = replace(row, within=inside[-1] if inside else None)
        seen[id(module)] = row
        rows.append(row)
        if row.became is not None:
            inside.append(path)
    fused = [known[row.path] for row in rows if row.became is not None]
    folded = {id(norm) for module in fused for norm in _folded(module, {id(m) for m in fused})}
    return tuple(_named(row, known[row.path], folded) for row in rows)


def _named(row: Row, module: nn.Module, folded: set[int]) -> Row:
    """The row; of a LayerNorm that stays a launch of its own, one that tells so."""
    bare = row.became is not None and type_name(module) in LAYER_NORMS and id(module) not in folded
    return replace(row, became="LayerNorm kernel", bare=True) if bare else row


def _folded(module: nn.Module, fused: set[int]) -> Iterator[nn.Module | None]:
    """The norms that the fused forward of this module takes into the product behind them."""
    forward = forward_for(module)
    parts = _parts(forward, module)
    if isinstance(parts, AttentionParts | MlpParts):
        yield from (parts.first, parts.last, *(getattr(parts, "norms", None) or ()))
    for norm, body in () if forward.folds is None else forward.folds(module):
        if (id(body) in fused and not has_hooks(body)) or (body is not None and is_readable(body)):
            yield norm


def _convert(path: str, module: nn.Module, filter_fn: Callable[[nn.Module, str], bool] | None) -> Row | None:
    """Binds the fused forward of this module's type; None where the module is no candidate."""
    name, cls = type_name(module), type(module).__name__
    forward = forward_for(module)
    if forward is None and name in STEMS and not hasattr(module, STEMS[name]):
        return Row(path, cls, why=f"it has no {STEMS[name]}, which its fused forward reads")
    if forward is None:
        why = LEFT.get(name, "unknown type")
        asked = why is not None and any(word in cls.lower() for word in WORDS)
        return Row(path, cls, why=why) if asked else None
    if isinstance(forward, str):
        return Row(path, cls, why=forward)
    parts = "the forward of its class was replaced" if is_patched(type(module)) else _parts(forward, module)
    if isinstance(module, nn.Sequential) and isinstance(parts, str):
        return None
    if filter_fn is not None and not filter_fn(module, path):
        return Row(path, cls, why="left out by filter_fn")
    if "forward" in module.__dict__ and not is_our_forward(module.__dict__["forward"]):
        return Row(path, cls, why="another forward is in its place")
    module.forward = partial(forward.run, module)
    if isinstance(parts, str):
        return Row(path, cls, why=parts)
    return Row(path, cls, _became(forward, parts), why="; ".join(_notes(forward, module, parts)) or None)


def _became(forward: Forward, parts: AttentionParts | MlpParts | None) -> str:
    """The fused forward in a few words."""
    if isinstance(parts, AttentionParts):
        return "fused attention"
    if isinstance(parts, MlpParts):
        return f"fused MLP, {parts.act if isinstance(parts.act, str) else type(parts.act).__name__}"
    return f"fused {forward.became}"


def _parts(forward: Forward, module: nn.Module) -> AttentionParts | MlpParts | str | None:
    """What the fused forward would find: a body's parts, a reason to run the module's own forward, or None."""
    if forward.read is not None:
        with torch.no_grad():
            return forward.read(module, **({} if forward.call is None else forward.call(module)))
    return None if forward.reason is None else forward.reason(module)


def _notes(forward: Forward, module: nn.Module, parts: AttentionParts | MlpParts | None) -> Iterator[str]:
    """What is not merged, and when the module's own forward would run after all."""
    if has_hooks(module):
        yield "a hook watches it, so it is called"
    if parts is not None:
        layers = (*parts.projections, parts.proj) if isinstance(parts, AttentionParts) else (*parts.fc1, parts.fc2)
        for layer in layers:
            if layer is not None and not is_readable(layer):
                yield f"{type(layer).__name__} is called: replaced, quantised or hooked"
        for norm in (parts.first, parts.last):
            if norm is not None and norm_of(norm) is None:
                yield f"{type(norm).__name__} is called"
        if isinstance(parts, MlpParts) and not isinstance(parts.act, str):
            yield f"activation {type(parts.act).__name__} is called"
    if forward.read is not None or forward.reason is not None:
        was = {m: m.training for m in module.modules()}
        for m in was:
            m.training = True
        why = _parts(forward, module)
        for m, training in was.items():
            m.training = training
        if isinstance(why, str):
            yield f"own forward while training: {why}"


def _check(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}; give an nn.Module, whose parts are converted in place")


def revert(model: nn.Module) -> None:
    """Takes every fused forward away again, and ends `freeze`; instances are as they were before `optimize`.

    They are then what torch.jit.script takes, too.

    Raises:
        TypeError: model is no nn.Module.
    """
    _check(model)
    unfreeze(model)
    with _all_or_nothing(model):
        for module in model.modules():
            if is_our_forward(module.__dict__.get("forward")):
                del module.__dict__["forward"]
            module.__dict__.pop(SIZES, None)
