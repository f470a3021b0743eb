"""Submodules that Dynamo cannot trace, such as rotations that read positions: a captured graph calls them as they are.

In the graph the call of such a submodule is one node, whose output is like its first tensor; the submodule runs its own
code in each call. Whether its outputs are such, and whether it leaves its inputs as they are, is seen in one call.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.utils._pytree import tree_leaves

from .example import unchanged


class Changed(Exception):
    """Raised if the output of a submodule is not like its first tensor."""


def paths_in(module: nn.Module, error: BaseException | None, is_eligible: Callable[[nn.Module], bool]) -> list[str]:
    """Paths of the submodules in whose code Dynamo failed; none if it failed elsewhere."""
    lines = [(frame.filename, frame.lineno) for frame in getattr(error, "real_stack", None) or ()]
    children = {path: child for path, child in module.named_modules() if path and is_eligible(child)}
    return [path for path, child in children.items() if any(_has(type(child), *line) for line in lines)]


def _has(cls: type, file: str, line: int | None) -> bool:
    """True if a method of a class has a line of a file."""
    codes = (getattr(value, "__code__", None) for base in cls.__mro__[:-1] for value in vars(base).values())
    return any(
        isinstance(code, CodeType) and code.co_filename == file and any(n == line for *_, n in code.co_lines())
        for code in codes
    )


def are_known(module: nn.Module, paths: Sequence[str], args: tuple, named: dict[str, Any]) -> bool:
    """True if the submodules at these paths do what a graph expects in a call of a module, which is left unchanged."""
    seen: list[bool] = []

    def watched(child: nn.Module, *args: Any, **named: Any) -> Any:
        tensors = [t for t in tree_leaves((args, named)) if isinstance(t, Tensor)]
        versions = [t._version for t in tensors if not t.is_inference()]
        output = type(child).forward(child, *args, **named)
        kept = versions == [t._version for t in tensors if not t.is_inference()]
        memory = {t.untyped_storage()._cdata for t in tensors}
        seen.append(kept and _is_like(output, tensors) and output.untyped_storage()._cdata not in memory)
        return output

    with unchanged(module), torch.no_grad(), _replaced(module, paths, lambda path, child: partial(watched, child)):
        type(module).forward(module, *args, **named)
    return bool(seen) and all(seen)


def opaque(
    module: nn.Module, paths: Sequence[str], running: Callable[[], nn.Module | None]
) -> contextlib.AbstractContextManager:
    """Context in which Dynamo takes the calls of the submodules at these paths for one operator each.

    Args:
        module: that is captured.
        paths: of submodules.
        running: () → the module whose graph runs.
    """

    def forward(path: str, child: nn.Module) -> Callable:
        def call(*args: Any, **named: Any) -> Tensor:
            tensors = [t for t in tree_leaves((args, named)) if isinstance(t, Tensor)]
            if any(is_fake(t) or t.is_meta for t in tensors):
                return tensors[0].clone()
            owner = running()
            assert owner is not None  # as its graph runs
            child = owner.get_submodule(path)
            output = type(child).forward(child, *args, **named)
            if not _is_like(output, tensors):
                raise Changed
            return output

        return torch._dynamo.allow_in_graph(call)

    return _replaced(module, paths, forward)


def _is_like(output: Any, tensors: list[Tensor]) -> bool:
    """True for a tensor with the sizes, dtype and device of the first of these."""
    if not (tensors and isinstance(output, Tensor)):
        return False
    return (output.shape, output.dtype, output.device) == (tensors[0].shape, tensors[0].dtype, tensors[0].device)


@contextlib.contextmanager
def _replaced(module: nn.Module, paths: Sequence[str], make: Callable[[str, nn.Module], Callable]) -> Iterator[None]:
    """Context in which the submodules have other forwards; they have none of their own before and after it."""
    children = {path: module.get_submodule(path) for path in paths}
    try:
        for path, child in children.items():
            child.__dict__["forward"] = make(path, child)
        yield
    finally:
        for child in children.values():
            child.__dict__.pop("forward", None)
