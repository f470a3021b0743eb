"""Reads what a call of a class runs, and compares it with the source files that define it.

A fused forward replaces the code of a class: its `forward`, the methods that it uses, and the functions that these
call. `code_of` collects these bindings once for each class, compares every function with the code of its module's file,
and afterwards detects changes by identity. So a patch is seen whether it was made before or after: on the class, a base
class, a helper function or a PyTorch function. A wrapper counts as a patch unless the source shows it: as a decorator,
or as the `__init_subclass__` of a base class.

Functions of the package of a class are followed; those of PyTorch and of this package are compared, not followed.
Constants, and PyTorch's queries of settings (`is_…`, `get_…`), are not compared.
"""

import ast
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from inspect import getattr_static
from operator import attrgetter, itemgetter
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

from ..kernels.backend import constant

PACKAGE = __package__.partition(".")[0]
LEAVES = ("torch", PACKAGE)  # packages whose functions are not followed
ALWAYS = ("forward", "__call__", "__getattr__")  # looked up by every call of a module

_codes: dict[type, "Code"] = {}


class Code:
    """What the calls of a class run.

    Attributes:
        cls: the class.
        base: the class that defines the code: `cls` itself, or the base class from which it inherits all of it.
        why: the first binding that its source file does not define, as a sentence; None if there is none.
        shadowed: names of the methods that an attribute of an instance would replace, besides `forward`.
        lookups: (class or dictionary, names): what the calls look up where; no names for the whole dictionary.
        facts: the same with the objects that were found, see `hold`.
    """

    def __init__(self, cls: type[nn.Module]) -> None:
        reading = _Reading(cls)
        self.cls = cls
        self.base = reading.base()
        self.why = reading.why
        self.shadowed = reading.shadowed()
        self.lookups = tuple(reading.lookups())
        self.facts = _facts(self.lookups)


def code_of(cls: type[nn.Module]) -> Code:
    """The code of a class as it is now."""
    code = _codes.get(cls)
    if code is None or not hold(code.facts):
        code = _codes[cls] = Code(cls)
    return code


@constant
def methods_of(cls: type[nn.Module]) -> tuple[str, ...] | None:
    """Names of the methods that an attribute of an instance would replace; None if the code of the class is patched."""
    code = _codes.get(cls)
    if code is None:
        code = code_of(cls)
    try:
        for get, place, values in code.facts:  # as `hold`; each call of a model comes here many times
            if get(place) != values:
                code = code_of(cls)
                break
    except (KeyError, AttributeError):
        code = code_of(cls)
    return code.shadowed if code.why is None else None


def is_written(function: Callable) -> bool:
    """True if a function is one that its module's file defines under its name."""
    return isinstance(function, FunctionType) and _defined_in(_home(function), function.__name__, function)


def defines(cls: type, method: str) -> bool:
    """True if a method of a class is one that the file of the class, or of its base, defines."""
    owner = next(base for base in cls.__mro__ if method in base.__dict__)
    function = owner.__dict__[method]
    code = _file_code(owner.__module__)
    return isinstance(function, FunctionType) and code is not None and function.__code__ in _all(code)


Lookups = Iterable[tuple[Any, tuple[str, ...]]]
Facts = list[tuple[Callable, Any, object]]  # (function, argument, its result)


def facts_of(classes: Iterable[type]) -> Facts:
    """What the calls of these classes look up, each place once, with the values of now; see `hold`."""
    places: dict[int, tuple[Any, dict[str, None]]] = {}
    for cls in classes:
        for place, names in code_of(cls).lookups:
            places.setdefault(id(place), (place, {}))[1].update(dict.fromkeys(names))
    return _facts((place, tuple(names)) for place, names in places.values())


def _facts(lookups: Lookups) -> Facts:
    facts = []
    for place, names in lookups:
        get: Callable = attrgetter(*names) if isinstance(place, type) else itemgetter(*names) if names else dict.copy
        facts.append((get, place, get(place)))
    return facts


def hold(facts: Facts) -> bool:
    """True if all of these are as they were; each comparison is one call, as every call of a module makes them."""
    try:
        for get, place, values in facts:
            if get(place) != values:
                return False
    except (KeyError, AttributeError):
        return False
    return True


class _Reading:
    """Follows the functions that the calls of a class reach.

    Attributes:
        why: see `Code`.
        names: attributes looked up on the class.
        bound: namespace by identity, with the names looked up in it.
        tables: dictionaries of functions, such as a registry of attention functions.
    """

    def __init__(self, cls: type[nn.Module]) -> None:
        self.cls = cls
        self.why: str | None = None
        self.own = [base for base in cls.__mro__ if base.__module__ != nn.Module.__module__ and base is not object]
        self.names: dict[str, None] = {}
        self.bound: dict[int, tuple[dict[str, Any], dict[str, None]]] = {}
        self.tables: dict[int, dict] = {}
        self._seen: set[FunctionType] = set()
        for name in ALWAYS:
            self._method(name)

    def base(self) -> type:
        """The class that defines `forward`, if all other methods used are its own too; else the class itself."""
        forward = self._written(self.cls.forward, partial(_defines, self.own, "forward"))
        owner = next((base for base in self.own if forward and _defines([base], "forward", forward)), self.cls)
        others = (name for name in self.names if name != "forward")
        same = all(getattr_static(self.cls, name, None) is getattr_static(owner, name, None) for name in others)
        return owner if same else self.cls

    def shadowed(self) -> tuple[str, ...]:
        """See `Code`."""
        names = (name for name in self.names if name != "forward" and not name.startswith("__"))
        return tuple(name for name in names if callable(getattr(self.cls, name, None)))

    def lookups(self) -> Iterator[tuple[Any, tuple[str, ...]]]:
        """Yields what `Code.lookups` has."""
        yield self.cls, tuple(name for name in self.names if hasattr(self.cls, name))
        for base in self.own:  # what `super()` finds
            names = [name for name in self.names if base.__dict__.get(name, self) is not getattr(self.cls, name, None)]
            if names := [name for name in names if name in base.__dict__]:
                yield base, tuple(names)
        if self.why is not None:  # `__init_subclass__` may have been patched, which made `_written` refuse a wrapper
            for base in self.own:
                if "__init_subclass__" in base.__dict__:
                    yield base, ("__init_subclass__",)
        for namespace, bound in self.bound.values():
            yield namespace, tuple(bound)
        for table in self.tables.values():
            yield table, ()

    def _refuse(self, why: str) -> None:
        self.why = self.why or why

    def _method(self, name: str) -> None:
        """Follows every definition of an attribute in the class and its bases; `super()` may call each."""
        if name in self.names:
            return
        self.names[name] = None
        for owner in self.own:
            if name in owner.__dict__:
                self._definition(owner, name, owner.__dict__[name])

    def _definition(self, owner: type, name: str, value: object) -> None:
        for function in (value.fget,) if isinstance(value, property) else (value,):
            function = getattr(function, "__func__", function)
            if not isinstance(function, FunctionType) and name not in ALWAYS and not _methods(self.own, name):
                continue  # not a method
            inner = self._written(function, partial(_defines, self.own, name))
            if inner is None:
                self._refuse(f"{owner.__qualname__}.{name} is not the one in the file of {owner.__module__}")
            elif isinstance(inner, FunctionType) and _top(owner.__module__) != PACKAGE:
                self._follow(inner)

    def _written(self, function: Any, defines: Callable[[FunctionType], bool]) -> Callable | None:
        """The function that a source file defines, inside wrappers that it shows; None if there is another.

        Args:
            function: as it is bound.
            defines: tells if the file defines a function under this name.
        """
        wrappers: list[Any] = []
        while not (isinstance(function, FunctionType) and defines(function)):
            if not hasattr(function, "__wrapped__"):
                return function if isinstance(function, BuiltinFunctionType) and not wrappers else None
            wrappers.append(function)
            function = function.__wrapped__
        decorators = _decorators(function) if wrappers else []
        for wrapper in wrappers:
            if _top(type(wrapper).__module__) == "numpy":  # its dispatcher in C around each of its functions
                continue
            code = getattr(wrapper, "__code__", None)
            by_base = any(_contains(vars(base).get("__init_subclass__"), code) for base in self.own)
            if not by_base and not any(_makes(decorator, wrapper, function) for decorator in decorators):
                return None
        return function

    def _follow(self, function: FunctionType) -> None:
        """Adds the bindings that a function reads, and follows the functions among them."""
        if function in self._seen:
            return
        self._seen.add(function)
        names = _names(function.__code__)
        home = function.__globals__
        self._bindings(home, names, _top(home.get("__name__", "")), set())
        written = set().union(*map(vars, self.own))
        for name in names:
            if name in written and not hasattr(nn.Module, name):
                self._method(name)

    def _bindings(self, home: dict[str, Any], names: frozenset[str], package: str, visited: set[int]) -> None:
        """Adds what these names are bound to in a module and in the modules that it imports.

        Args:
            home: attributes of the module.
            names: globals and attributes that a function reads.
            package: of the function.
            visited: modules that were read for this function, by identity.
        """
        visited.add(id(home))
        queries = _top(home.get("__name__", "")) == "torch"
        for name in names & home.keys():
            value = home[name]
            if isinstance(value, ModuleType):
                if id(vars(value)) not in visited:
                    self._bindings(vars(value), names, package, visited)
            elif isinstance(value, (FunctionType, BuiltinFunctionType)) or hasattr(value, "__wrapped__"):
                if not (queries and name.startswith(("is_", "get_"))):
                    self._function(home, name, value, package)
            elif _top(type(value).__module__) == package and package not in LEAVES:
                for namespace in (getattr(value, "__dict__", {}), *(vars(base) for base in type(value).__mro__)):
                    self.tables |= {id(table): table for table in namespace.values() if type(table) is dict}

    def _function(self, home: dict[str, Any], name: str, value: Any, package: str) -> None:
        """Compares a function of a module with the module's file, and follows those of the package."""
        self.bound.setdefault(id(home), (home, {}))[1][name] = None
        module = home.get("__name__", "")
        inner = self._written(value, partial(_defined_in, module, name))
        if inner is None:
            self._refuse(f"{module}.{name} is not the one in the file of {module}")
        elif isinstance(inner, FunctionType) and package not in LEAVES and _top(_home(inner)) == package:
            self._follow(inner)


def _layers(function: Any) -> Iterator[Any]:
    """Yields a function, and what it wraps, to the innermost."""
    yield function
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
        yield function


def _top(module: str) -> str:
    """Name of the package of a module."""
    return module.partition(".")[0]


def _home(function: object) -> str:
    """Name of the module that defines a Python function; "" for other objects."""
    return getattr(function, "__globals__", {}).get("__name__", "")


def _file_code(module: str) -> CodeType | None:
    """The code of a module as compiled from its file; None without a file."""
    return _compiled(module, *_version(module))


def _version(module: str) -> tuple[str | None, int]:
    """(path of a module's file, time of its last change); a module may be changed and loaded again."""
    path = getattr(sys.modules.get(module), "__file__", None)
    try:
        return path, 0 if path is None else os.stat(path).st_mtime_ns
    except OSError:  # in an archive
        return path, 0


@cache
def _compiled(module: str, path: str | None, changed: int) -> CodeType | None:
    loader = getattr(getattr(sys.modules.get(module), "__spec__", None), "loader", None)
    try:
        if loader is not None:  # one without `get_code` runs other code than the file's, as pytest does
            return loader.get_code(module) if hasattr(loader, "get_code") else None
        return None if path is None else compile(Path(path).read_text("utf-8"), path, "exec", dont_inherit=True)
    except (ImportError, OSError, SyntaxError, ValueError):
        return None


@cache
def _inside(code: CodeType) -> dict[str, tuple[CodeType, ...]]:
    """The codes of the functions and classes that a code defines, by name; type parameters are transparent."""
    by_name: dict[str, tuple[CodeType, ...]] = {}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            parts = _inside(inner).items() if inner.co_name.startswith("<generic") else [(inner.co_name, (inner,))]
            for name, codes in parts:
                by_name[name] = by_name.get(name, ()) + codes
    return by_name


@cache
def _names(code: CodeType) -> frozenset[str]:
    """Names of globals and attributes that a function reads, with those of the functions inside."""
    inside = (_names(inner) for inner in code.co_consts if isinstance(inner, CodeType))
    return frozenset(code.co_names).union(*inside)


def _defines(classes: list[type], name: str, function: Any) -> bool:
    """True if one of these classes defines the function under this name, by its source file."""
    for cls in classes:
        if _file_code(cls.__module__) is None and _home(function) == cls.__module__:  # as far as names tell
            if function.__qualname__ == f"{cls.__qualname__}.{name}":
                return True
    return function.__code__ in _methods(classes, name)


def _methods(classes: list[type], name: str) -> list[CodeType]:
    """The codes of the functions that the source files of these classes define in them under this name."""
    codes: list[CodeType] = []
    for cls in classes:
        code = _file_code(cls.__module__)
        scopes: tuple[CodeType, ...] = () if code is None else (code,)
        for part in cls.__qualname__.split("."):
            if part != "<locals>":
                scopes = sum((_inside(scope).get(part, ()) for scope in scopes), ())
        codes += [inner for scope in scopes for inner in _inside(scope).get(name, ())]
    return codes


def _defined_in(module: str, name: str, function: FunctionType) -> bool:
    """True if a module's file defines the function under this name, or imports it.

    A function that the file defines must be that; any other must be as its own module's file defines it.
    """
    code = _file_code(module)
    home = _home(function)
    if code is not None and name in _inside(code):
        return function.__code__ in _inside(code)[name]
    home_code = _file_code(home)
    if home_code is None:
        return home == module
    reachable = code is None or _top(home) == _top(module) or _top(home) in _imported(code)
    return reachable and function.__code__ in _all(home_code)


@cache
def _imported(code: CodeType) -> frozenset[str]:
    """Packages among the names that a module's code uses."""
    names = set(code.co_names).union(*[inner.co_names for inner in _all(code)])
    return frozenset([name.partition(".")[0] for name in names]).intersection(sys.modules)


@cache
def _all(code: CodeType) -> tuple[CodeType, ...]:
    """All codes inside a code."""
    codes = [code]
    for outer in codes:  # to which those inside it are added
        for inner in outer.co_consts:
            if isinstance(inner, CodeType):
                codes.append(inner)
    return tuple(codes[1:])


def _contains(function: Any, code: CodeType | None) -> bool:
    """True if a code is that of a function inside a method."""
    outer = getattr(getattr(function, "__func__", function), "__code__", None)
    return outer is not None and code is not None and code in _all(outer)


def _makes(decorator: Any, wrapper: Any, function: Any) -> bool:
    """True if a decorator makes this wrapper: it contains its code, or both are of another module than the function."""
    code = getattr(wrapper, "__code__", None)
    for layer in _layers(decorator):
        if isinstance(layer, FunctionType) and code is not None and code in _all(layer.__code__):
            return True
        home = _home(layer) or getattr(layer, "__module__", None) or ""
        if home not in ("", _home(function)) and _top(home) == _top(_home(wrapper) or type(wrapper).__module__):
            return True
    return False


def _decorators(function: Any) -> list[object]:
    """What the decorators of a function are bound to in its module, by its source file."""
    if not isinstance(function, FunctionType):
        return []
    code, home = function.__code__, function.__globals__
    decorators: list[object] = []
    for node in ast.walk(_tree(*_version(home.get("__name__", "")))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == code.co_name:
            if node.decorator_list and node.decorator_list[0].lineno == code.co_firstlineno:
                decorators += [_value(decorator, home) for decorator in node.decorator_list]
    return decorators


def _value(node: ast.expr, home: dict[str, Any]) -> object:
    """What a decorator's expression is bound to; for a call, what is called."""
    if isinstance(node, ast.Call):
        return _value(node.func, home)
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, home), node.attr, None)
    return home.get(node.id) if isinstance(node, ast.Name) else None


@cache
def _tree(path: str | None, changed: int) -> ast.Module:
    """Syntax tree of a module's file; empty without one."""
    try:
        return ast.parse("" if path is None else Path(path).read_text("utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return ast.parse("")
