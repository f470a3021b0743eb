"""`optimize` and `revert`: bind fused forwards to instances of third-party modules, and remove them."""

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..engine.batch_norm import NORMED
from ..engine.body import Body
from ..engine.freeze import freeze as freeze_weights
from ..engine.freeze import is_frozen, unfreeze
from ..engine.hooks import PACKAGE, are_plain_tensors, has_hooks, has_type, is_our_forward, type_name
from ..engine.leaves import CONVOLUTIONS, LINEARS, VOLUME_CONVOLUTIONS, is_readable, norm_of
from ..engine.mlp import EXACT, HIDDEN, MlpBody, mark
from ..engine.source import code_of
from ..engine.ways import SIZES
from ..kernels import onednn, settings
from ..kernels.backend import backend, why_not
from ..kernels.mixed import takes_tanh_for_erf
from . import (
    candidates,
    captured,
    on_cpu,
    readers,  # noqa: F401  (registers the fused forwards)
)
from .flop_shares import CountedModel, enclosing
from .forwards import FORWARDS, INNER, METHODS, Forward, Parts, bind, forward_for, known_type
from .readers.torch import KEEPS_LAYOUT, STEMS, stems_of, unknown_stems_of
from .readers.transformers import attention_interface
from .recognition import forget, is_ours
from .reporting import OURS, UNKNOWN, Report, Row
from .sharded import as_gathered
from .third_party import inherited
from .verify import TOLERANCE, as_double, differences

LEFT: dict[str, str | None] = {
    "transformers.models.videoprism.modeling_videoprism.VideoPrismAttention": "its scores are capped by a tanh"
}  # type → why it is not converted
LEFT |= dict.fromkeys(INNER)  # submodules of a candidate
NEEDS_EXAMPLE = "it needs an example: optimize(model, example=images)"
NO_GRAPH = "it has no graph in this process, so it runs as it is written until `warmup`, or `optimize` with an example"
WORDS = re.compile("attention|attn|mlp|feedforward|layernorm", re.IGNORECASE)  # in unknown classes that are reported


def optimize(
    model: nn.Module,
    *,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    example: Any = None,
    compile: bool | None = None,
    freeze: bool = False,
    tune: Any = None,
    verify: Any = None,
    exact_gelu: bool = False,
    save: str = "least",
) -> Report:
    """Replaces, in place, the forward of every module of a known type by one that can run fused.

    Parameters remain the same objects under the same keys, classes are not changed, and gradients equal the original's,
    so optimisers, checkpoints, EMA copies, DDP and FSDP2 keep working. Each call selects again: a module runs its own
    forward if the kernels cannot run (float64, or a CPU without linear layers by oneDNN), if attention needs dropout or
    a causal mask, or if PyTorch's code is expected to be fastest (see `kernels.choose` and `fastvit-triton doctor`).
    Submodules that have hooks or were replaced (LoRA, quantised, parametrised) are called, not fused. The original code
    also runs under global module hooks (`torch.nn.modules.module.register_module_forward_hook` and similar), if the
    code of a class or a function that it uses is not that of its source file (see `engine.source`), if another
    attention function is registered in transformers, and under torch.fx and torch.jit.trace, which record the
    original's graph. torch.jit.script reads source code and raises an AttributeError on an optimised model: `revert`
    first. A module whose attributes differ from those that the fused forward expects, as in another release of its
    package, is not converted; the report gives the reason. If transformers is imported, "fastvit_triton" is registered
    in its attention interface. Shallow copies (replicas of nn.DataParallel) share the original's forward: use
    DistributedDataParallel, or `revert` first.

    With an example, blocks of types that are not known are captured as graphs, as torch.compile does, and their
    attention, linear layers, norms and activations fused where this computes the same. A block that holds modules of
    known types keeps these if its graph has more launches. Calls in other modes and dtypes than the example's are
    captured when they first occur. The graph runs only while the block is as it was: with a hook
    inside, patched code or another attribute the block's own forward runs. Copies share the graphs; a model that was
    unpickled in another process has none, until `optimize` or `warmup` runs it on an example. On a GPU, or with
    `compile`, Inductor also compiles these graphs, so that norms, rotations and gates take few launches; blocks that
    are alike share the result. As under torch.compile, gradients of gradients then raise an error. On a GPU, up to 8
    images without gradients run the graph as it is, which is replayed.

    If an exception is raised, also in filter_fn, all modules are restored.

    Args:
        model: timm, transformers, torchvision, vit-pytorch, torch.nn modules, or a model that contains some of these.
        filter_fn: called with a candidate and its path; only candidates for which it returns True are converted. A
            fused block calls the others.
        example: an input of the model, a tensor or a tuple or dictionary of arguments: blocks of unknown types are
            captured from one call with it, without gradients and in the mode that the model is in.
        compile: whether Inductor compiles captured blocks: True, False, or None for those on a GPU. It takes 3 to 10
            seconds for each kind of block, dtype and mode; the report says how long.
        freeze: the weights are final: also call `fastvit_triton.freeze` on the model.
        tune: an example input: also measure how the model runs fastest on this GPU or CPU, in training if it is in
            training mode; see `fastvit_triton.tune`. Nothing is measured if neither the kernels nor oneDNN can run.
        verify: an example input (a tensor, or a tuple or dictionary of arguments): also run each converted module and
            its original in float64 with PyTorch, on two copies of the model, and undo the conversions whose outputs
            differ; the report gives the difference.
        exact_gelu: GELU is that of erf everywhere. Otherwise bfloat16 inference may compute its tanh form, where that
            saves a launch; it differs by a tenth or less of the rounding to bfloat16.
        save: what MLPs keep for the backward pass: "least", or "hidden" for their hidden layer, too. That is 40 % more
            memory for a block of a ViT, and one tensor of that size less to write in the backward pass.

    Returns:
        Report: for each candidate, what it became or why it was not converted; prints as a table with its share of the
            model's FLOPs if `verify` or `tune` is given or the model states its input size, otherwise of its weights.

    Raises:
        TypeError: model is not an nn.Module, filter_fn cannot be called, freeze or exact_gelu is not a bool, or verify
            or example is a bool or a path, or compile is neither a bool nor None.
        ValueError: the model does not run on the input to verify, or save is unknown.
        Exception: whatever the model raises on the example.
    """
    _check(model)
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(f"filter_fn is {filter_fn!r}; give a function of a module and its path, or None")
    for name, flag in (("freeze", freeze), ("exact_gelu", exact_gelu)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} is {flag!r}; give True or False")
    if save not in ("least", "hidden"):
        raise ValueError(f"save is {save!r}; give 'least' or 'hidden'")
    if not (compile is None or isinstance(compile, bool)):
        raise TypeError(f"compile is {compile!r}; give True or False, or None to compile captured blocks on a GPU")
    for name, value in (("verify", verify), ("example", example)):
        if isinstance(value, (bool, str, os.PathLike)):
            raise TypeError(f"{name} is {value!r}; give an example input of the model, such as a tensor, or None")
    attention_interface.register()
    forget()
    seconds: list[float] = []
    captured.state.seconds = seconds
    with _all_or_nothing(model):
        mark(model, **{EXACT: exact_gelu, HIDDEN: save == "hidden"})
        if freeze:  # first, as only frozen BatchNorms are folded
            freeze_weights(model)
        with as_gathered(model):
            rows = _rows(model, filter_fn, example is not None)
        rows = _with_others(model, _with_captured(model, rows, filter_fn, example, compile))
        verified = None
        if verify is not None:
            rows, verified = _verified(model, rows, verify)
    parameter = next(model.parameters(), None)
    if tune is not None and (parameter is None or _can_be_tuned(parameter)):
        from .. import tune as measure  # by its public name: `measure` imports this package

        measure(model, tune, model.training)
        captured.forget(model)  # what was compiled has the choices from before
    return Report(
        rows,
        *((None, None) if parameter is None else _on_device(parameter)),
        compiled=(len(seconds), sum(seconds)) if seconds else None,
        verified=verified,
        tanh_gelu=parameter is not None and not exact_gelu and _takes_tanh_for_erf(model, parameter),
        subject=CountedModel(
            model, next((e for e in (example, verify, tune) if e is not None), None), captured.replaced_parts
        ),
    )


def _takes_tanh_for_erf(model: nn.Module, parameter: nn.Parameter) -> bool:
    """True if an MLP of a converted model may compute the tanh form of GELU in inference."""
    parts = (_parts(forward, module) for module, forward in _fused(model))
    has_gelu = any(isinstance(part, MlpBody) and part.act == "gelu" for part in parts)
    with torch.no_grad():
        return has_gelu and not settings.exact and takes_tanh_for_erf(parameter)


def _fused(model: nn.Module) -> Iterator[tuple[nn.Module, Forward]]:
    """Yields the modules with a fused forward, and that."""
    for module in model.modules():
        if is_our_forward(module.__dict__.get("forward")) and isinstance(forward := forward_for(module), Forward):
            yield module, forward


def _can_be_tuned(parameter: nn.Parameter) -> bool:
    """True if the kernels, or oneDNN on a CPU, can run on a parameter's device."""
    place = parameter.device, parameter.dtype
    return backend() != "torch" and (why_not(*place) is None or onednn.why_not(*place) is None)


def _on_device(parameter: nn.Parameter) -> tuple[str | None, Callable[[CountedModel], str] | None]:
    """`Report.device` and `Report.on_cpu`."""
    cpu = parameter.device.type == "cpu"
    why_no_kernel = why_not(parameter.device, parameter.dtype) if cpu or backend() != "torch" else None
    is_choosing = why_no_kernel is not None and cpu and backend() != "torch"
    return why_no_kernel, partial(on_cpu.sentences, dtype=parameter.dtype) if is_choosing else None


def engine_layers(model: nn.Module) -> list[Any]:
    """The linear layers of modules that call the engine, which `freeze` may pack for oneDNN on a CPU."""
    layers: dict[int, Any] = {}
    for module, forward in _fused(model):
        parts = _parts(forward, module)
        found = () if parts is None or isinstance(parts, str) else parts.layers()
        layers |= {id(layer): layer for layer in found if isinstance(layer, nn.Module) and is_readable(layer)}
    return list(layers.values())


def folded_norms(model: nn.Module) -> list[nn.Module]:
    """The norms that fused forwards of a model fold into the linear layers after them."""
    fused = [module for module, _ in _fused(model)]
    norms = (norm for module in fused for norm in _folded(module, {*map(id, fused)}) if norm is not None)
    return list({id(norm): norm for norm in norms}.values())


def attach(model: nn.Module) -> None:
    """Binds their fused forwards to the modules of this package in a model, as `create_model` does.

    Copies and pickles keep them. A module whose forward was replaced keeps what it has.
    """
    for module in model.modules():
        name = type_name(module)
        name = name if name in FORWARDS or name in METHODS else inherited(type(module)) or name
        if not name.startswith(f"{PACKAGE}."):
            continue
        if name in FORWARDS and "forward" not in module.__dict__:
            bind(module, "forward", FORWARDS[name][0].run)
        if name in METHODS and METHODS[name][0] not in module.__dict__:
            bind(module, *METHODS[name])


@contextmanager
def _all_or_nothing(model: nn.Module) -> Iterator[None]:
    """Context that restores the attributes of all instances, and ends a new freeze, if an exception is raised in it."""
    frozen = is_frozen(model)
    before = [(module.__dict__, dict(module.__dict__)) for module in model.modules()]
    try:
        yield
    except BaseException:
        for facts, earlier in before:
            for name in facts.keys() - earlier.keys():
                del facts[name]
            facts.update(earlier)
        if not frozen:
            unfreeze(model)
        raise


def _rows(
    model: nn.Module, filter_fn: Callable[[nn.Module, str], bool] | None, everywhere: bool = False
) -> tuple[Row, ...]:
    """Converts all modules that can be converted, `everywhere` stems of unknown code, too; a row for each candidate."""
    rows: list[Row] = []
    rows_by_module: dict[int, Row] = {}
    inside: list[str] = []
    our_paths: list[str] = []
    by_path = dict(model.named_modules(remove_duplicate=False))
    stems = {id(conv) for module in by_path.values() for conv in stems_of(module)}
    for module in by_path.values() if everywhere else ():
        for conv in unknown_stems_of(module):
            conv.__dict__[KEEPS_LAYOUT] = True
    stems |= {id(module) for module in by_path.values() if KEEPS_LAYOUT in module.__dict__}
    for path, module in by_path.items():
        if id(module) in rows_by_module:  # shared module, at another path
            first = rows_by_module[id(module)]
            rows.append(Row(path, first.type, first.became, why=f"the same module as {first.path}"))
            continue
        if type_name(module) in CONVOLUTIONS | VOLUME_CONVOLUTIONS and id(module) not in stems:
            continue
        if is_ours(path, by_path):
            attach(module)
            if not any(f"{path}.".startswith(p + "." if p else "") for p in our_paths):
                our_paths.append(path)
                rows.append(Row(path, type(module).__name__, why=OURS))
            continue
        row = _convert(path, module, filter_fn)
        if row is None:
            continue
        inside = [p for p in inside if path.startswith(p + "." if p else "")]
        row = replace(row, within=inside[-1] if inside else None)
        rows_by_module[id(module)] = row
        rows.append(row)
        if row.became is not None:
            inside.append(path)
    fused = [by_path[row.path] for row in rows if row.became is not None]
    folded = {id(norm) for module in fused for norm in _folded(module, {id(m) for m in fused})}
    return tuple(_named(row, by_path[row.path], folded) for row in rows)


def _with_captured(
    model: nn.Module,
    rows: tuple[Row, ...],
    filter_fn: Callable[[nn.Module, str], bool] | None,
    example: Any,
    compiles: bool | None,
) -> tuple[Row, ...]:
    """The rows with those of the blocks that are captured from an example, or could be."""
    modules = {row.path: model.get_submodule(row.path) for row in rows}
    bound = {row.path for row in rows if not row.bare and is_our_forward(modules[row.path].__dict__.get("forward"))}
    converted = {row.path for row in rows if row.why == OURS}
    converted |= {path for path in bound if not captured.is_bound(modules[path])}
    called = {row.path for row in rows if row.why == UNKNOWN}
    by_path: dict[str, Row] = {}
    paths = list(candidates.candidates(model, converted, called, example is not None))
    while paths:
        to_capture: list[str] = []
        for path in paths:
            module = model.get_submodule(path)
            left = partial(Row, path, type(module).__name__)
            if filter_fn is not None and not filter_fn(module, path):
                by_path[path] = left(why="excluded by filter_fn")
            elif example is None and captured.is_bound(module):  # a copy, or unpickled
                known = captured.captures_of(module) != []
                by_path[path] = _captured_row(module, path, converted) if known else left(why=NO_GRAPH)
            elif example is None:
                by_path[path] = left(why=NEEDS_EXAMPLE)
            elif "forward" in module.__dict__ and not captured.is_bound(module):
                by_path[path] = left(why="its forward was replaced")
            else:
                to_capture.append(path)
        paths = []
        _capture(model, [model.get_submodule(path) for path in to_capture], example, compiles)
        for path in to_capture:
            row = by_path[path] = _captured_row(model.get_submodule(path), path, converted)
            if row.became is None:
                del model.get_submodule(path).__dict__["forward"]
                paths += candidates.candidates(model, converted, called, False, path)
    if example is not None:
        taken = {path for path, row in by_path.items() if row.became is not None} | converted
        by_path |= _with_inductor_alone(model, [*candidates.computing(model, taken)], filter_fn, example, compiles)
    return _merged(model, rows, by_path)


def _capture(model: nn.Module, modules: Collection[nn.Module], example: Any, compiles: bool | None) -> None:
    """Calls the model with the example so that these modules of it are captured."""
    for module in modules:
        captured.ask(module, compiles)
        bind(module, "forward", captured.run)
    if modules:
        captured.call(model, example)


def _with_inductor_alone(
    model: nn.Module,
    paths: list[str],
    filter_fn: Callable[[nn.Module, str], bool] | None,
    example: Any,
    compiles: bool | None,
) -> dict[str, Row]:
    """The rows of modules without products, for those that Inductor compiles; the others are left as they are."""
    modules = {path: model.get_submodule(path) for path in paths}
    for module in filter(captured.is_bound, modules.values()):  # by an earlier call
        del module.__dict__["forward"]
    if not (any(not p.is_cpu for p in model.parameters()) if compiles is None else compiles):
        return {}
    free = {path: module for path, module in modules.items() if "forward" not in module.__dict__}
    chosen = {path: module for path, module in free.items() if filter_fn is None or filter_fn(module, path)}
    _capture(model, chosen.values(), example, compiles)
    rows = {}
    for path, module in chosen.items():
        if captured.captures_of(module):
            rows[path] = Row(path, type(module).__name__, "fused captured module (by Inductor)")
        elif captured.is_bound(module):
            del module.__dict__["forward"]
    return rows


def _captured_row(module: nn.Module, path: str, converted: set[str]) -> Row:
    """The row of a module whose call was to be captured, when those at the paths `converted` have a fused forward."""
    name = type(module).__name__
    captures = captured.captures_of(module)
    if not captures:
        return Row(path, name, why=f"it cannot be captured: {captured.why_none(module)}")
    calls = Counter[str]()
    unfused: dict[str, None] = {}
    for capture in captures:
        calls |= capture.calls
        unfused |= dict.fromkeys(f"{row.type}: {row.why}" for row in capture.left)
    why_not = (c.region.why for c in captures if c.compiles)
    unfused |= dict.fromkeys(f"not compiled: {why}" for why in why_not if why is not None)
    prefix = f"{path}." if path else ""
    inside = {other.removeprefix(prefix) for other in converted if other.startswith(prefix)}
    left = [row for capture in captures for row in capture.left if not inside.isdisjoint(enclosing(row.path))]
    if layers := {row.type for row in left} - {"layer_norm", "gelu", "relu", "silu", "rate"}:
        return Row(path, name, why=f"what it holds is fused instead, as its graph leaves {', '.join(sorted(layers))}")
    for launches in (capture.launches for capture in captures if inside):
        if launches.rewritten > (apart := launches.beside(inside)):
            graph = f"its graph has {launches.rewritten} launches, and the block {apart}"
            return Row(path, name, why=f"what it holds is fused instead, as {graph}")
    kind = "block" if re.search("Block|Layer", name) else "module"
    parts = ", ".join(function if n == 1 else f"{function} ×{n}" for function, n in calls.items())
    if all(capture.region.call for capture in captures):
        parts = f"{parts}, the rest by Inductor" if parts else "by Inductor"
    return Row(path, name, f"fused captured {kind} ({parts})", why="; ".join(unfused) or None)


def _merged(model: nn.Module, rows: tuple[Row, ...], captured_rows: dict[str, Row]) -> tuple[Row, ...]:
    """All rows in the order of the model's modules; that of a captured module replaces those of all that it holds."""
    within = {row.path: row.within for row in rows}
    by_path = {row.path: row for row in rows}
    by_path |= {path: replace(row, within=within.get(path)) for path, row in captured_rows.items()}
    tops = tuple(f"{path}." if path else "" for path, row in captured_rows.items() if row.became is not None)
    order = (path for path, _ in model.named_modules(remove_duplicate=False) if path in by_path)
    return tuple(by_path[path] for path in order if f"{path}." in tops or not path.startswith(tops))


def _with_others(model: nn.Module, rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """The rows, and one for each other module inside the model with linear layers of its own, which stay PyTorch's."""
    named, by_path = {row.path for row in rows}, dict(model.named_modules())
    others = {}
    for path, module in by_path.items():
        if path and candidates.is_foreign(module) and not is_ours(path, by_path) and named.isdisjoint(enclosing(path)):
            if any(isinstance(child, (nn.Linear, nn.MultiheadAttention)) for child in module.children()):
                others[path] = Row(path, type(module).__name__, why=UNKNOWN, other=True)
    return _merged(model, rows, others)


def _verified(model: nn.Module, rows: tuple[Row, ...], inputs: Any) -> tuple[tuple[Row, ...], tuple[int, float] | None]:
    """The rows after undoing the conversions whose outputs differ from the originals', and `Report.verified`."""
    original = as_double(model)
    revert(original)
    converted = as_double(model)
    for module in filter(captured.is_bound, converted.modules()):
        captured.ask_if_new(module)
    paths = [row.path for row in rows if row.became is not None and "the same module as" not in (row.why or "")]
    try:
        errors = differences(original, converted, paths, inputs)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        text = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"verify: the model does not run on this input: {text}") from error
    wrong = {path: by for path, by in errors.items() if not by <= TOLERANCE}
    for path in wrong:
        del model.get_submodule(path).__dict__["forward"]
    right = [by for path, by in errors.items() if path not in wrong]
    kept = tuple(
        Row(row.path, row.type, why=f"its outputs differ from the original's by {wrong[row.path]:.1e}")
        if row.path in wrong
        else replace(row, within=None if row.within in wrong else row.within)
        for row in rows
    )
    return kept, (len(right), max(right)) if right else None


def _named(row: Row, module: nn.Module, folded: set[int]) -> Row:
    """The row, marked `bare` for a norm that remains a separate launch."""
    if row.became not in ("fused LayerNorm", "fused RMSNorm") or id(module) in folded:
        return row
    return replace(row, became=f"{row.became.removeprefix('fused ')} kernel", bare=True)


def _folded(module: nn.Module, fused: set[int]) -> Iterator[nn.Module | None]:
    """Yields the norms that this module's fused forward folds into the next matmul."""
    forward = forward_for(module)
    assert isinstance(forward, Forward)  # as it was converted
    parts = _parts(forward, module)
    if isinstance(parts, Parts):
        yield from parts.norms()
        yield from getattr(getattr(parts, "between", None), "norms", None) or ()
    for norm, body in () if forward.folds is None else forward.folds(module):
        if body is not None and ((id(body) in fused and _reads_first(body)) or is_readable(body)):
            yield norm


def _reads_first(body: nn.Module) -> bool:
    """True if a fused body's first matmuls are all that reads its input."""
    forward = forward_for(body)
    assert isinstance(forward, Forward)  # as it was converted
    parts = _parts(forward, body)
    return not has_hooks(body) and not (isinstance(parts, Parts) and not parts.entering())


def _convert(path: str, module: nn.Module, filter_fn: Callable[[nn.Module, str], bool] | None) -> Row | None:
    """Binds the fused forward of this module's type and returns its row; None if the module is not a candidate."""
    name = type_name(module)
    cls = type(module).__name__
    forward = forward_for(module)
    if forward is None and name in STEMS and not hasattr(module, STEMS[name]):
        return Row(path, cls, why=f"it has no {STEMS[name]}, which its fused forward reads")
    if forward is None:
        why = LEFT.get(known_type(module), UNKNOWN)
        return Row(path, cls, why=why) if why is not None and WORDS.search(cls) else None
    if isinstance(forward, str):
        return Row(path, cls, why=forward)
    parts = _changed_code(module) or _parts(forward, module)
    if isinstance(parts, MlpBody) and not any(is_readable(m) or has_type(m, NORMED) for m in parts.layers()):
        parts = "; ".join(dict.fromkeys(f"{type(m).__name__} is called: {_why_called(m)}" for m in parts.layers()))
    if isinstance(module, nn.Sequential) and isinstance(parts, str):
        return None
    if filter_fn is not None and not filter_fn(module, path):
        return Row(path, cls, why="excluded by filter_fn")
    if "forward" in module.__dict__ and not is_our_forward(module.__dict__["forward"]):
        return Row(path, cls, why="its forward was replaced")
    bind(module, "forward", forward.run)
    if forward.became == "":
        return None
    if isinstance(parts, str):
        return Row(path, cls, why=parts)
    became = forward.became if parts is None else parts.name
    return Row(path, cls, f"fused {became}", why="; ".join(dict.fromkeys(_notes(forward, module, parts))) or None)


def _changed_code(module: nn.Module) -> str | None:
    """Why the module does not run the code that its fused forward replaces; None if it does."""
    code = code_of(type(module))
    replaced = next((name for name in code.shadowed if name in module.__dict__), None)
    return code.why if replaced is None else f"its {replaced} was replaced"


def _parts(forward: Forward, module: nn.Module) -> Parts | str | None:
    """The parts of a body, a reason (str) to run the module's own forward, or None, also if only a call tells them."""
    with torch.no_grad():
        if forward.read is None:
            return None if forward.reason is None else forward.reason(module)
        if forward.by_call:
            return None
        given = {} if forward.call is None else forward.call(module)
        return forward.read(module, **given)


def _notes(forward: Forward, module: nn.Module, parts: Parts | None) -> Iterator[str]:
    """Yields notes: what is called instead of fused, and when the module's own forward runs."""
    if (code_type := known_type(module)) != type_name(module):
        yield f"it runs the code of {code_type.rpartition('.')[2]}"
    if has_hooks(module):
        yield "it has a hook, so it is called"
    if parts is not None:
        for layer in parts.layers():
            if layer is not None and not is_readable(layer):
                yield f"{type(layer).__name__} is called: {_why_called(layer)}"
        for norm in parts.norms():
            if norm is not None and norm_of(norm) is None:
                yield f"{type(norm).__name__} is called"
        act = getattr(parts.between if isinstance(parts, Body) else parts, "act", "")
        if not isinstance(act, str):
            yield f"activation {type(act).__name__} is called"
    if forward.read is not None or forward.reason is not None:
        was = {m: m.training for m in module.modules()}
        for m in was:
            m.training = True
        why = _parts(forward, module)
        for m, training in was.items():
            m.training = training
        if isinstance(why, str):
            yield f"own forward while training: {why}"


def _why_called(layer: Any) -> str:
    """Why a linear layer is called, when its weight cannot be read."""
    if isinstance(layer, nn.modules.conv._ConvNd) and not has_hooks(layer):
        return "it is a convolution"
    if has_type(layer, NORMED) and not has_hooks(layer):
        return "its BatchNorm is folded after `freeze`"
    weight = getattr(layer, "weight", None)
    if has_type(layer, LINEARS) and not has_hooks(layer) and not are_plain_tensors(weight):
        fused = "so that what would be fused with it runs in launches of its own"
        return f"its weight is of {type(weight).__name__}, {fused}"
    return "replaced, quantised or hooked"


def _check(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}; give an nn.Module, whose parts are converted in place")


def revert(model: nn.Module) -> None:
    """Undoes `optimize` and `freeze`: removes every fused forward of modules of other packages.

    torch.jit.script then accepts the model again.

    Raises:
        TypeError: model is not an nn.Module.
    """
    _check(model)
    unfreeze(model)
    mark(model)
    with _all_or_nothing(model):
        for module in model.modules():
            ours = known_type(module).startswith(f"{PACKAGE}.")
            if is_our_forward(module.__dict__.get("forward")) and not ours:
                del module.__dict__["forward"]
            for key in (SIZES, KEEPS_LAYOUT):
                module.__dict__.pop(key, None)
