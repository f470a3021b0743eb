"""Which modules of a model `optimize` captures: blocks, and modules without products that Inductor compiles."""

import re
from collections.abc import Iterator

from torch import nn

from ..engine.hooks import PACKAGE
from .flop_shares import enclosing

LAYERS = (nn.Linear, nn.MultiheadAttention, nn.modules.conv._ConvNd)
STACKS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
NAMES = re.compile("(?<!Batch)Norm|Attention|Attn|M[Ll][Pp]|F[Ff][Nn]|Feed[Ff]orward|Glu|GLU")


def candidates(
    model: nn.Module, converted: set[str], called: set[str], within: bool, inside: str | None = None
) -> Iterator[str]:
    """Yields paths of modules to capture: the outermost ones that hold no stack of such modules.

    Each is of a class that is not PyTorch's, holds an `nn.MultiheadAttention` or two linear layers, and a class whose
    name is that of a norm, an attention or an MLP. A list of branches or experts, smaller than blocks, is no stack.
    """
    free: set[str] = set()
    for path, _ in model.named_modules():  # a module before those inside it
        if path not in converted and (not path or path in called or path.rpartition(".")[0] in free):
            free.add(path)

    def is_candidate(path: str, module: nn.Module) -> bool:
        below = dict(module.named_modules(prefix=path))
        layers = (m for name, m in below.items() if within or name in free)
        number = sum(2 * isinstance(m, nn.MultiheadAttention) + isinstance(m, nn.Linear) for m in layers)
        parts = (part for m in below.values() if isinstance(m, STACKS) for part in m.children())
        named = any(NAMES.search(type(m).__name__) for m in below.values())
        return is_foreign(module) and number > 1 and named and not any(map(_is_block, parts))

    def visit(path: str, module: nn.Module) -> Iterator[str]:
        if path in free and path != inside and is_candidate(path, module):
            yield path
            return
        for name, child in module.named_children():
            yield from visit(f"{path}.{name}" if path else name, child)

    top = inside or ""
    yield from visit(top, model.get_submodule(top))


def computing(model: nn.Module, taken: set[str]) -> Iterator[str]:
    """Yields paths of modules to compile by Inductor alone: positions, norms and gates that are written out.

    They are the outermost ones of classes that are not PyTorch's or ours, without layers of products inside, and not
    inside a module at the paths `taken`, nor around one.
    """
    found: list[str] = []
    for path, module in model.named_modules():
        if not path or not taken.isdisjoint(enclosing(path)) or not set(found).isdisjoint(enclosing(path)):
            continue
        inside = (name for name in taken if name.startswith(f"{path}."))
        if next(inside, None) is None and has_no_products(module):
            found.append(path)
            yield path


def has_no_products(module: nn.Module) -> bool:
    """True for a module of a class that is not PyTorch's or ours, without layers of products inside."""
    if not is_foreign(module) or type(module).__module__.partition(".")[0] == PACKAGE:
        return False
    return not any(isinstance(m, (*LAYERS, *STACKS)) for m in module.modules())


def is_foreign(module: nn.Module) -> bool:
    """True for a module whose class is not PyTorch's."""
    return not type(module).__module__.startswith("torch.")


def _is_block(module: nn.Module) -> bool:
    """True for a module that is not PyTorch's with four layers, or some with a norm or attention, or such modules."""
    if isinstance(module, STACKS):
        return any(is_foreign(m) and any(isinstance(part, LAYERS) for part in m.modules()) for m in module.modules())
    layers = sum(1 + isinstance(m, nn.MultiheadAttention) for m in module.modules() if isinstance(m, LAYERS))
    names = [type(m).__name__ for m in module.modules()]
    normed, attends = (any(re.search(part, name) for name in names) for part in ("Norm", "Att(entio)?n"))
    return is_foreign(module) and layers > 0 and (layers > 3 or normed or (layers > 1 and attends))
