"""Recognises a class by the meaning of its forward: classes that run the same code are converted alike.

Model libraries copy the code of a layer from model to model under other names. A fingerprint covers all that a forward
executes: its statements, arguments with defaults and decorators, the methods and properties of the class that it uses,
and the functions and constants that its global names are bound to now, of the same package with all that they call, of
other packages by name. Names of classes, functions and local variables, annotations, docstrings and layout do not
count. Submodules are not covered: readers check their types.

known.json lists the fingerprints of the classes whose forwards are registered by name, for several releases of their
packages; `python -m benchmarks.recognition` writes it.
"""

import ast
import builtins
import hashlib
import inspect
import json
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

from ..engine.hooks import PACKAGE
from ..engine.source import Code, code_of

KNOWN = Path(__file__).with_name("known.json")
CALLERS = ("torch", "transformers")  # packages whose `__call__` a recognised class may have
SKIPPED = ("type_comment", "type_params", "kind", "ctx", "returns", "annotation")  # fields of a syntax tree
# objects of the standard library of newer Pythons → where older ones have them
MOVED = {
    "types.get_original_bases": "typing_extensions.get_original_bases",  # 3.12
    "typing.override": "typing_extensions.override",  # 3.12
    "warnings.deprecated": "typing_extensions.deprecated",  # 3.13
    "pathlib._local.Path": "pathlib.Path",  # 3.13
}
LITERALS = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))


class Unreadable(ValueError):
    """Raised if the code of a forward cannot be read or depends on what a fingerprint does not cover."""


_recognised: dict[Code, str | None] = {}


def recognised(cls: type[nn.Module]) -> str | None:
    """Name of the registered class with the same fingerprint; None for an unknown one. Cached until `forget`.

    The class's `__call__` must be that of PyTorch or transformers, and its code that of its source file.
    """
    code = code_of(cls)
    if code not in _recognised:
        try:
            usual = code.why is None and _caller(cls) in CALLERS
            _recognised[code] = _names().get(fingerprint(cls)) if usual else None
        except Unreadable:
            _recognised[code] = None
    return _recognised[code]


def _caller(cls: type[nn.Module]) -> str:
    """Name of the package that defines the `__call__` of a class."""
    return next(base for base in cls.__mro__ if "__call__" in base.__dict__).__module__.partition(".")[0]


def fingerprint(cls: type[nn.Module]) -> str:
    """Sixteen hexadecimal digits for all code that the forward of a class executes."""
    text = _Reader(cls).method("forward")
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def forget() -> None:
    """Clears the cached answers, so that patches are seen."""
    _recognised.clear()


@cache
def _names() -> dict[str, str]:
    """Registered class by fingerprint."""
    rows = json.loads(KNOWN.read_text()) if KNOWN.exists() else {}
    return {digest: row["as"] for digest, row in rows.items()}


class _Reader:
    """Writes the methods of a class and the functions they call as text."""

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.package = cls.__module__.partition(".")[0]
        self.written = frozenset().union(*map(vars, cls.__mro__))  # names that the class has
        self.seen: dict[FunctionType, int] = {}  # functions by the order of their first use, as they may be recursive

    def method(self, name: str) -> str:
        """Text of a method or property; only the name of one that torch defines."""
        owner = next(base for base in self.cls.__mro__ if name in base.__dict__)
        attribute = owner.__dict__[name]
        if owner.__module__.partition(".")[0] == "torch":
            return f"{owner.__module__}.{owner.__qualname__}.{name}"
        kind = type(attribute).__name__
        attribute = attribute.fget if isinstance(attribute, property) else getattr(attribute, "__func__", attribute)
        if not isinstance(attribute, FunctionType):
            return f"{kind}:{self.value(attribute)}"
        return f"{kind}:{self.function(attribute, kind != 'staticmethod')}"

    def function(self, function: FunctionType, bound: bool = False) -> str:
        """Text of a function; of a `bound` one the first argument is the module or its class."""
        function = inspect.unwrap(function)
        if function in self.seen:
            return f"seen:{self.seen[function]}"
        self.seen[function] = len(self.seen)
        free = [name for name in function.__code__.co_freevars if name != "__class__"]
        if free:
            raise Unreadable(f"{function.__qualname__} uses {free[0]} of an enclosing function")
        syntax, home = _syntax_of(function, bound), function.__globals__
        decorators = [self._filled(parts, home) for parts in syntax.decorators]
        defaults = self.value([*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()])
        return f"({syntax.arguments}; {defaults}; {decorators}; {[self._filled(p, home) for p in syntax.statements]})"

    def _filled(self, parts: "Parts", home: dict[str, Any]) -> str:
        text = ""
        for part in parts:
            text += part if isinstance(part, str) else self._bound(part, home)
        return text

    def _bound(self, names: tuple[str, ...], home: dict[str, Any]) -> str:
        """Text of what names of `Parts` stand for; `home` has the globals."""
        first, *rest = names
        if first == "":
            if not rest:
                return "self"
            own = rest.pop(0)
            text = f"self.{own}={self.method(own)}" if own in self.written else f"self.{own}"
        elif first not in home:
            text = f"builtin {first}" if hasattr(builtins, first) else f"unbound {first}"
        else:
            value = home[first]
            while rest and isinstance(value, ModuleType) and hasattr(value, rest[0]):
                value = getattr(value, rest.pop(0))
            text = self.value(value)
        return ".".join([text, *rest])

    def value(self, value: Any) -> str:
        """Text of what a global name is bound to."""
        if isinstance(value, LITERALS):
            return repr(value)
        if isinstance(value, (tuple, list)):
            return f"({', '.join(map(self.value, value))})"
        if isinstance(value, ModuleType):
            return f"module:{value.__name__}"
        if isinstance(value, FunctionType) and value.__module__.partition(".")[0] == self.package:
            return f"function:{self.function(value)}"
        if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
            name = f"{getattr(value, '__module__', '')}.{value.__qualname__}"
            return f"object:{MOVED.get(name, name)}"
        return f"instance:{type(value).__module__}.{type(value).__qualname__}"


# a text, and names between such as ("nn", "functional", "gelu"), of which "" is the module itself
Parts = list[str | tuple[str, ...]]


class _Syntax:
    """The source of a function as text, in which what its global names are bound to is left out."""

    def __init__(self, function: FunctionType, bound: bool) -> None:
        node = _tree(function)
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        self._self = arguments[0].arg if bound and arguments else None
        self._names = {a.arg: f"argument {a.arg}" for a in arguments}  # callers may pass them by name
        if self._self is not None:
            self._names[self._self] = "self"
        others = [a.arg for a in (node.args.vararg, node.args.kwarg) if a is not None]
        for name in [*others, *_assigned(node)]:
            self._names.setdefault(name, f"local {len(self._names)}")
        is_documented = isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)
        self.arguments = ", ".join(self._names[a.arg] for a in ast.walk(node.args) if isinstance(a, ast.arg))  # as text
        self.decorators = [self._write(decorator, []) for decorator in node.decorator_list]  # each in parts
        self.statements = [self._write(statement, []) for statement in node.body[is_documented:]]  # each in parts

    def _write(self, node: object, parts: Parts) -> Parts:
        """Adds the text of a syntax tree without positions, names of variables and empty fields, to these parts."""
        if isinstance(node, ast.Name):
            parts.append(("",) if node.id == self._self else self._names.get(node.id, (node.id,)))
        elif isinstance(node, ast.Attribute):
            self._write(node.value, parts)
            names = parts[-1]
            if isinstance(node.value, (ast.Name, ast.Attribute)) and isinstance(names, tuple):
                parts[-1] = (*names, node.attr)
            else:
                parts.append(f".{node.attr}")
        elif isinstance(node, ast.Constant):
            parts.append(f"{type(node.value).__name__} {node.value!r}")
        elif isinstance(node, ast.Assign) or (isinstance(node, ast.AnnAssign) and node.value is not None):
            parts.append("Assign(")
            self._write(node.targets if isinstance(node, ast.Assign) else [node.target], parts)
            parts.append(", ")
            self._write(node.value, parts).append(")")
        elif isinstance(node, ast.AST):
            parts.append(f"{type(node).__name__}(")
            before = ""
            for name, value in ast.iter_fields(node):
                if name not in SKIPPED and value not in (None, []):
                    parts.append(f"{before}{name}=")
                    self._write(value, parts)
                    before = ", "
            parts.append(")")
        elif isinstance(node, list):
            before = "["
            for value in node:
                parts.append(before)
                self._write(value, parts)
                before = ", "
            parts.append("]" if node else "[]")
        else:
            parts.append(repr(node))
        return parts


_syntaxes: dict[tuple[int, bool], tuple[CodeType, _Syntax]] = {}  # by identity: equal codes may differ in decorators


def _syntax_of(function: FunctionType, bound: bool) -> _Syntax:
    """The syntax of a function's code, read once, as a code object never changes; kept, so that its id is unique."""
    code = function.__code__
    if (id(code), bound) not in _syntaxes:
        _syntaxes[id(code), bound] = code, _Syntax(function, bound)
    return _syntaxes[id(code), bound][1]


def _tree(function: FunctionType) -> ast.FunctionDef:
    """Syntax tree of a function's code."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError) as error:
        raise Unreadable(f"the source of {function.__qualname__} is not available") from error
    if not isinstance(tree, ast.FunctionDef) or tree.name != function.__code__.co_name:
        raise Unreadable(f"the source of {function.__qualname__} is not that of a function")
    return tree


def _assigned(node: ast.FunctionDef) -> Iterator[str]:
    """Names that a function assigns, in order, those of nested functions and comprehensions included."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            yield inner.id
        elif isinstance(inner, ast.arg):
            yield inner.arg
        elif isinstance(inner, (ast.FunctionDef, ast.ClassDef)) and inner is not node:
            yield inner.name
        elif isinstance(inner, ast.ExceptHandler) and inner.name:
            yield inner.name
        elif isinstance(inner, ast.alias):
            yield (inner.asname or inner.name).partition(".")[0]


def is_ours(path: str, by_path: dict[str, nn.Module]) -> bool:
    """True for a module of this package, and for PyTorch's modules directly in one."""
    while path and type(by_path[path]).__module__.startswith("torch."):
        path = path.rpartition(".")[0]
    return type(by_path[path]).__module__.startswith(f"{PACKAGE}.")
