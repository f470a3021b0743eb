"""Calls of a model with an example input that leave the model as it was."""

import contextlib
import itertools
import operator
import random
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from ..engine.freeze import fold_again

PRIVATE = "_fastvit_triton"  # attributes that the engine sets
INTERNAL = frozenset(vars(nn.Module())) - {"training"}  # hooks, and tables of parameters, buffers and modules
CONTAINERS = list, dict, set, deque


def arguments(inputs: Any) -> tuple[tuple, dict[str, Any]]:
    """Positional and keyword arguments of a call: a dictionary is keywords, a tuple or list several arguments."""
    if isinstance(inputs, dict):
        return (), inputs
    return (tuple(inputs), {}) if isinstance(inputs, (tuple, list)) else ((inputs,), {})


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Context that restores what a call may change, and invalidates cached folds.

    These are buffers, the modules' attributes, with lists, dictionaries, sets and tensors in them at any depth, and the
    random states of PyTorch, Python and NumPy. Other objects stay as the call leaves them.
    """
    modules = [m for m in model.modules() if not isinstance(m, LazyModuleMixin)]  # whose first call makes weights
    before = [(m.__dict__, {name: value for name, value in vars(m).items() if _is_attribute(name)}) for m in modules]
    tables = [(m._buffers, dict(m._buffers)) for m in modules]
    contents: dict[int, tuple[Any, list]] = {}
    for _, held in before:
        _collect(held, contents)
    in_modules = (held.values() for _, held in (*before, *tables))
    kept = itertools.chain(*in_modules, *(inside for _, inside in contents.values()))
    tensors = {id(t): t for t in kept if isinstance(t, Tensor) and not is_lazy(t)}
    values = [(t, t.detach().clone()) for t in tensors.values()]
    devices = {t.device for t in (*model.parameters(), *model.buffers()) if t.is_cuda}
    try:
        with same_random_states([d.index for d in devices]):
            yield
    finally:
        fold_again(model)
        for facts, held in before:
            for name in [name for name in facts if _is_attribute(name) and name not in held]:
                del facts[name]
            facts.update(held)
        for table, held in tables:
            table.clear()
            table.update(held)
        for container, parts in contents.values():
            if not all(map(operator.is_, _parts(container), parts)) or len(_parts(container)) != len(parts):
                container.clear()
                if isinstance(container, dict):
                    container.update(zip(parts[::2], parts[1::2], strict=True))
                else:
                    (container.update if isinstance(container, set) else container.extend)(parts)
        for t, value in values:
            with torch.no_grad(), torch.inference_mode(t.is_inference()):
                if not torch.equal(t, value):
                    t.copy_(value)


@contextlib.contextmanager
def same_random_states(devices: Sequence[int] = ()) -> Iterator[None]:
    """Context that restores the random states of PyTorch on the CPU and these GPUs, of Python and of NumPy."""
    state, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


def _is_attribute(name: str) -> bool:
    """True for an attribute that is neither PyTorch's nor ours."""
    return name not in INTERNAL and not name.startswith(PRIVATE)


def _collect(value: Any, contents: dict[int, tuple[Any, list]]) -> None:
    """Adds the containers in a value, at any depth, each with its parts as they are now."""
    if not isinstance(value, (*CONTAINERS, tuple)) or id(value) in contents:
        return
    parts = _parts(value)
    if not isinstance(value, tuple):
        contents[id(value)] = value, parts
    for part in parts:
        _collect(part, contents)


def _parts(container: Any) -> list:
    """What a container holds; of a dictionary keys and values in turn."""
    return [part for item in container.items() for part in item] if isinstance(container, dict) else [*container]
