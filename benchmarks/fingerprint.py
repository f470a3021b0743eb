"""Keys of launches: a short hash of everything that can change a kernel's binary or a number computed from its launch.

A key covers the code of the kernel and of every function and constant that it uses, its arguments, launch options,
grid and architecture. Code is read as a syntax tree without the names of functions, parameters and variables, without
docstrings, comments, layout and annotations (`constexpr` excepted): renaming something or moving it to another file
does not change a key. Triton's own functions count by name, so keys do not depend on the version of Triton.
"""

import ast
import builtins
import functools
import hashlib
import inspect
import textwrap
from collections import ChainMap
from types import ModuleType

from triton.language import constexpr
from triton.runtime.jit import JITFunction

from . import lint, sass
from .launch_recorder import Launch, Pointer

_LOCAL = object()  # placeholder for the value of a parameter, a variable or an expression


def key(launch: Launch, arch: str) -> str:
    """Twelve hexadecimal digits for a launch on an architecture such as "sm_90".

    A pointer counts by its dtype, size in bytes, 16-byte alignment, and which other arguments are the same tensor or
    overlap with it; on AMD also by whether its storage is below 2 GiB. Integers and compile-time arguments count by
    value, other floats by type. A global of a kind whose effect on the binary is not known is a TypeError.
    """
    tensors: dict[tuple, int] = {}
    fixed = {p.name for p in launch.kernel.params if p.is_constexpr}
    names = [n for n in launch.kernel.arg_names if n in launch.values]
    arguments = [
        (launch.kernel.arg_names.index(n), _argument(launch.values[n], n in fixed, arch, tensors)) for n in names
    ]
    options = sorted(launch.options.items())
    return _digest(arch, launch.grid, code(launch.kernel), arguments, launch.overlaps, options)[:12]


@functools.cache
def checks(arch: str) -> str:
    """Twelve hexadecimal digits for all that decides what is read from a binary of an architecture such as "sm_90".

    That is the code of lint.py and sass.py, and the figures of the architecture's GPU; not Triton or ptxas.
    """
    return _digest(*(rules(inspect.getsource(module)) for module in (lint, sass)), sass.GPUS[arch])[:12]


def rules(source: str) -> str:
    """Source of a module as text without comments, docstrings, layout and the table of GPUs."""
    tree = ast.parse(source)
    return _spelled([n for n in tree.body if not (isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "GPUS")])


def _spelled(node: object) -> str:
    """A syntax tree as text, without docstrings."""
    if isinstance(node, list):
        return "[" + ",".join(_spelled(n) for n in node if not _is_docstring(n)) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [f"{n}={_spelled(v)}" for n, v in ast.iter_fields(node) if v is not None and v != []]
    return f"{type(node).__name__}({','.join(fields)})"


def _argument(value: object, fixed: bool, arch: str, tensors: dict[tuple, int]) -> object:
    if isinstance(value, tuple):
        return tuple(_argument(v, fixed, arch, tensors) for v in value)
    if isinstance(value, Pointer):
        number = tensors.setdefault((value.data_ptr(), value.shape), len(tensors))
        near = arch.startswith("gfx") and value.ptr_range() < 2**31
        return str(value.dtype), value.nbytes, value.data_ptr() % 16 == 0, near, number
    return "float" if isinstance(value, float) and not fixed else repr(value)


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@functools.cache
def code(function: JITFunction) -> str:
    """Hash of a function's code, including the functions it calls and the constants it uses."""
    kinds = [
        (p.is_constexpr, p.is_const, p.annotation_type, p.do_not_specialize, p.do_not_specialize_on_alignment)
        for p in function.params
    ]
    return _digest(_Speller(function).text, kinds, bool(function.noinline))


class _Speller:
    """Writes one function as `text`, with variables numbered in order of appearance."""

    def __init__(self, function: JITFunction) -> None:
        plain = function.fn
        tree = ast.parse(textwrap.dedent(inspect.getsource(plain))).body[0]
        self.name = plain.__qualname__
        self.scope = ChainMap(inspect.getclosurevars(plain).nonlocals, plain.__globals__, vars(builtins))
        self.numbers = {name: number for number, name in enumerate(function.arg_names)}
        self.text = self.spell([tree.args.defaults, tree.args.kw_defaults, tree.body])

    def spell(self, node: object) -> str:
        if isinstance(node, list):
            return "[" + ",".join(self.spell(n) for n in node if not _is_docstring(n)) + "]"
        if isinstance(node, (ast.Name, ast.Attribute)):
            value = self.resolve(node)
            if value is not _LOCAL:
                return self.spell_global(node, value)
            if isinstance(node, ast.Name):
                return f"${self.numbers.setdefault(node.id, len(self.numbers))}"
        if isinstance(node, ast.Call):
            node = self.with_numbered_keywords(node)
        if isinstance(node, ast.AnnAssign):
            kind = "Constexpr" if "constexpr" in ast.unparse(node.annotation) else "Assign"
            return f"{kind}(value={self.spell(node.value)},targets={self.spell([node.target])})"
        if not isinstance(node, ast.AST):
            return repr(node)
        fields = [(n, v) for n, v in ast.iter_fields(node) if n != "ctx" and v is not None and v != []]
        fields.sort(key=lambda field: field[0] not in ("value", "iter", "generators"))  # evaluation order
        return f"{type(node).__name__}({','.join(f'{n}={self.spell(v)}' for n, v in fields)})"

    def resolve(self, node: ast.AST) -> object:
        """The value of a global name or of an attribute of a module; `_LOCAL` for anything else.

        As in Triton, a name is global until it is assigned.
        """
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in self.numbers:
            if node.id not in self.scope:
                raise NameError(f"{self.name} uses {node.id}, which is not defined")
            return self.scope[node.id]
        if isinstance(node, ast.Attribute):
            owner = self.resolve(node.value)
            if isinstance(owner, ModuleType):
                return getattr(owner, node.attr)
        return _LOCAL

    def spell_global(self, node: ast.Name | ast.Attribute, value: object) -> str:
        if isinstance(value, ModuleType):
            return f"module {value.__name__}"
        if isinstance(value, constexpr):
            return f"constexpr({value.value!r})"
        if value is None or isinstance(value, (bool, int, float, str, tuple)):
            return repr(value)
        if isinstance(value, JITFunction) and not _is_tritons(value):
            return f"call {code(value)}"
        if _is_tritons(value) or getattr(value, "__module__", "") == "builtins":
            owner = self.resolve(node.value).__name__ if isinstance(node, ast.Attribute) else value.__module__
            return f"{owner}.{node.attr if isinstance(node, ast.Attribute) else node.id}"
        raise TypeError(f"{self.name} uses {ast.unparse(node)}, a {type(value).__name__}, which has no fingerprint")

    def with_numbered_keywords(self, node: ast.Call) -> ast.Call:
        """A call of one of our functions with its keywords numbered as the parameters are."""
        callee = self.resolve(node.func)
        if not isinstance(callee, JITFunction) or _is_tritons(callee):
            return node
        keywords = [ast.keyword(f"${callee.arg_names.index(k.arg)}", k.value) for k in node.keywords]
        return ast.Call(node.func, node.args, keywords)


def _is_tritons(value: object) -> bool:
    return (getattr(value, "__module__", None) or "").startswith("triton.")


def _is_docstring(node: object) -> bool:
    """True for a string that stands alone as a statement."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
