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
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
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
        return _Writer(self, function, bound).text()

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


class _Writer:
    """Writes one function as text."""

    def __init__(self, reader: _Reader, function: FunctionType, bound: bool) -> None:
        self.reader = reader
        self.function = function
        self.node = _tree(function)
        arguments = [*self.node.args.posonlyargs, *self.node.args.args, *self.node.args.kwonlyargs]
        self.self_name = arguments[0].arg if bound and arguments else None
        self.names = {a.arg: f"argument {a.arg}" for a in arguments}  # callers may pass them by name
        if self.self_name is not None:
            self.names[self.self_name] = "self"
        others = [a.arg for a in (self.node.args.vararg, self.node.args.kwarg) if a is not None]
        for name in [*others, *_assigned(self.node)]:
            self.names.setdefault(name, f"local {len(self.names)}")

    def text(self) -> str:
        """Arguments with defaults, decorators and statements."""
        defaults = [*(self.function.__defaults__ or ()), *(self.function.__kwdefaults__ or {}).items()]
        decorators = [self.write(d) for d in self.node.decorator_list]
        body = self.node.body
        if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):  # a docstring
            body = body[1:]
        names = ", ".join(self.names[a.arg] for a in ast.walk(self.node.args) if isinstance(a, ast.arg))
        return f"({names}; {self.reader.value(defaults)}; {decorators}; {[self.write(n) for n in body]})"

    def write(self, node: ast.AST) -> str:
        """Text of a syntax tree without positions, names of variables and empty fields."""
        if isinstance(node, ast.Name):
            return self._name(node.id)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        kind = type(node).__name__
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            return f"Assign([{self.write(node.target)}], {self.write(node.value)})"
        if isinstance(node, ast.Assign):
            return f"Assign([{', '.join(map(self.write, node.targets))}], {self.write(node.value)})"
        fields = ((n, v) for n, v in ast.iter_fields(node) if n not in SKIPPED and v not in (None, []))
        if isinstance(node, ast.Constant):
            return f"{type(node.value).__name__} {node.value!r}"
        return f"{kind}({', '.join(f'{name}={self._field(value)}' for name, value in fields)})"

    def _field(self, value: object) -> str:
        if isinstance(value, list):
            return f"[{', '.join(self._field(v) for v in value)}]"
        return self.write(value) if isinstance(value, ast.AST) else repr(value)

    def _name(self, name: str) -> str:
        if name in self.names:
            return self.names[name]
        if name in self.function.__globals__:
            return self.reader.value(self.function.__globals__[name])
        return f"builtin {name}" if hasattr(builtins, name) else f"unbound {name}"

    def _attribute(self, node: ast.Attribute) -> str:
        """An attribute of the module, of an imported module, or of any other value."""
        if isinstance(node.value, ast.Name) and node.value.id == self.self_name:
            cls = self.reader.cls
            if any(node.attr in base.__dict__ for base in cls.__mro__):
                return f"self.{node.attr}={self.reader.method(node.attr)}"
            return f"self.{node.attr}"
        module = self._module(node.value)
        if module is not None and hasattr(module, node.attr):
            return self.reader.value(getattr(module, node.attr))
        return f"{self.write(node.value)}.{node.attr}"

    def _module(self, node: ast.AST) -> ModuleType | None:
        """The imported module that an expression such as `nn.functional` stands for."""
        value: object = None
        if isinstance(node, ast.Name) and node.id not in self.names:
            value = self.function.__globals__.get(node.id)
        elif isinstance(node, ast.Attribute) and (outer := self._module(node.value)) is not None:
            value = getattr(outer, node.attr, None)
        return value if isinstance(value, ModuleType) else None


def _tree(function: Callable) -> ast.FunctionDef:
    """Syntax tree of a function."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError) as error:
        raise Unreadable(f"the source of {function.__qualname__} is not available") from error
    if not isinstance(tree, ast.FunctionDef) or tree.name != function.__name__:
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
