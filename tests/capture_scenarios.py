"""What a block may read, be given, return and change: the cases of test_capture_guards.py, each in a few lines.

The first function of a case is the forward of a `Block`. Each test starts with copies of `GLOBALS`, and pytest's
monkeypatch undoes what a change does to a class of this file or to a module of Python.
"""

import collections
import contextlib
import contextvars
import dataclasses
import enum
import functools
import itertools
import logging
import math
import operator
import os
import random
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from research import D
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode

W = torch.float64
VALUES = torch.linspace(-2, 2, 2 * 7 * D, dtype=W).sin().reshape(2, 7, D).roll(1, 1)


def tokens(batch: int = 2, length: int = 7) -> Tensor:
    """The same tokens in each call, in memory of their own."""
    return VALUES[:batch, :length].clone()


class Block(nn.Module):
    """Attention in float64 of norm, two linear layers and a softmax, in a forward that is given.

    Args:
        run: block, arguments → outputs.
        held: further attributes.
    """

    def __init__(self, run: Callable, **held: Any) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = (
            layer.to(W) for layer in (nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D))
        )
        self.run = run
        for name, value in held.items():
            setattr(self, name, value)
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(0.4 * torch.linspace(1, 40 + i, p.numel(), dtype=W).square().sin().reshape(p.shape))

    def forward(self, *args, **named):
        return self.run(self, *args, **named)

    def attend(self, x, scale=0.35):
        """x and its attention, whose scores are multiplied by `scale`."""
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return x + self.proj((q @ k.transpose(-2, -1) * scale).softmax(dim=-1) @ v)


def call(*args: Any, **named: Any) -> tuple[tuple, dict[str, Any]]:
    """Arguments of a call."""
    return args, named


class Case(NamedTuple):
    """A block and its calls.

    Attributes:
        run: its forward.
        calls: block → arguments of the calls, new ones each time; the first is also the example.
        has: its further attributes, new ones each time.
        change: what then changes, and has an effect; the same calls follow. Given the block and pytest's monkeypatch.
        cls: makes its class.
        grad: whether gradients are enabled, and compared.
        training: whether it is in training mode.
        raises: the error that some calls raise.
        again: whether its attributes are made again after the example's call, which changes objects that `optimize`
            leaves as they are.
    """

    run: Callable
    calls: Callable[[Block], list] = lambda m: [call(tokens())]
    has: Callable[[], dict[str, Any]] = dict
    change: Callable | None = None
    cls: Callable[[], type[Block]] = lambda: Block
    grad: bool = False
    training: bool = False
    raises: type[Exception] | None = None
    again: bool = False

    def block(self) -> Block:
        """A new block, always with the same weights."""
        return self.cls()(self.run, **self.has()).train(self.training)


def pick(far: Any) -> float:
    """One of two scales."""
    return 0.9 if far else 0.35


def having(thing: Any, **facts: Any) -> Any:
    """An object, after its attributes were set."""
    for name, value in facts.items():
        setattr(thing, name, value)
    return thing


# what changes between two calls

SCALE = 0.35
TABLE = {"s": 0.35}
LIST = [0.35]
SET = {1, 2}
THING = types.SimpleNamespace(s=0.35, list=[0.35], mode=1)
TENSOR = torch.tensor([0.35], dtype=W)
LOG: list = []
NOTES: dict = {}
GLOBALS = ("TABLE", "LIST", "SET", "THING", "TENSOR", "LOG", "NOTES")  # which a test may change in place
ENVIRONMENT = os.environ
NAME = "is_leaf"
VARIABLE = contextvars.ContextVar("scale", default=0.35)
LOCAL = threading.local()
LOCAL.s = 0.35
logger = logging.getLogger(__name__)


def factor() -> float:
    """A global function, which a test replaces."""
    return 0.35


def other() -> float:
    """Another one."""
    return 0.9


class Slotted:
    """A class with a slot."""

    __slots__ = ("s",)


class Config(Slotted):
    """A class with a slot and a dictionary."""

    def get(self):
        """The slot's value."""
        return self.s


class Fixed(nn.Module):
    """A module that returns a number."""

    def __init__(self):
        super().__init__()
        self.s = 0.35

    def forward(self):
        return self.s


class Proxy:
    """Has the attributes of another object."""

    def __init__(self, target):
        self.target = target

    def __getattr__(self, name):
        return getattr(self.target, name)


class Descriptor:
    """An attribute with the state of the descriptor."""

    value = 0.35

    def __get__(self, owner, cls=None):
        return self.value


class Sized:
    """An object with a length, a truth value and an item."""

    n = 1

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return self.n * i


class Mode(enum.Enum):
    """Two modes."""

    NEAR = 1
    FAR = 2


class Level(enum.IntEnum):
    """Two integers."""

    LOW = 1
    HIGH = 2


@dataclasses.dataclass
class Options:
    """A configuration."""

    s: float = 0.35
    list: list = dataclasses.field(default_factory=lambda: [0.35])


class Items(list):
    """A list of its own class."""


class Number(float):
    """A float of its own class."""


Frozen = dataclasses.make_dataclass("Frozen", [("s", float, 0.35)], frozen=True)
Pair = collections.namedtuple("Pair", "p q")


class OfClass(Block):
    """A block with attributes of its class, of all kinds."""

    own = 0.35
    table: ClassVar = {"s": 0.35}
    described = Descriptor()

    @property
    def s(self):
        return TABLE["s"]

    def __getattr__(self, name):
        return TABLE["s"] if name == "dynamic" else super().__getattr__(name)

    @classmethod
    def shared(cls):
        return cls.table["s"]

    @functools.cached_property
    def kept(self):
        return 0.35


def own(base: type = Block, **facts: Any) -> Callable[[], type]:
    """Makes a class of its own, with these class attributes."""
    return lambda: type("Own", (type("Base", (base,), facts),), {})


def multiplied(times: dict, s: float = 1.0) -> float:
    return times["s"] * s


def number(s: float) -> float:
    return s


def norms(n: int = 1) -> list:
    return [nn.LayerNorm(D, dtype=W) for _ in range(n)]


def doubled(module: nn.Module, given: tuple, y: Tensor) -> Tensor:
    """A forward hook."""
    return 2 * y


def state(run: Callable, change: Callable, has: Callable = dict, cls: Callable = lambda: Block, **facts: Any) -> Case:
    """A case of a change."""
    return Case(run, has=has, change=change, cls=cls, **facts)


def by_scale(read: Callable, change: Callable, has: Callable = dict, cls: Callable = lambda: Block) -> Case:
    """A change of what `read` reads of the block, which gives a scale."""
    return state(lambda m, x: m.attend(x, read(m)), change, has, cls)


def by_attribute(value: Any, change: Callable, read: Callable) -> Case:
    """A change of the attribute `a`, by a function of the block; `read` gives a scale for its value."""
    return Case(lambda m, x: m.attend(x, read(m.a)), has=lambda: dict(a=value()), change=lambda m, p: change(m))


def to(value: Any) -> Callable:
    """Sets the attribute `a`."""
    return lambda m: setattr(m, "a", value)


STATES = {
    # classes and functions
    "class attribute": by_scale(lambda m: m.own, lambda m, p: p.setattr(type(m), "own", 0.9), cls=lambda: OfClass),
    "class attribute that hides an inherited one": by_scale(
        lambda m: m.s, lambda m, p: setattr(type(m), "s", 0.9), cls=own(s=0.35)
    ),
    "inherited class attribute": by_scale(
        lambda m: m.s, lambda m, p: setattr(type(m).__base__, "s", 0.9), cls=own(s=0.35)
    ),
    "hasattr of the class": by_scale(
        lambda m: pick(not hasattr(m, "z")), lambda m, p: setattr(type(m), "z", 1), cls=own()
    ),
    "getattr with a default, of the class": by_scale(
        lambda m: getattr(m, "z", 0.9), lambda m, p: setattr(type(m), "z", 0.35), cls=own()
    ),
    "hasattr of the block": by_scale(lambda m: pick(not hasattr(m, "z")), lambda m, p: setattr(m, "z", 1)),
    "key of __dict__": by_scale(lambda m: pick("z" not in m.__dict__), lambda m, p: setattr(m, "z", 1)),
    "get of __dict__": by_scale(lambda m: vars(m).get("z", 0.9), lambda m, p: setattr(m, "z", 0.35)),
    "value in __dict__": by_scale(lambda m: m.__dict__["z"], lambda m, p: setattr(m, "z", 0.9), lambda: dict(z=0.35)),
    "attribute deleted": by_scale(lambda m: pick(not hasattr(m, "z")), lambda m, p: delattr(m, "z"), lambda: dict(z=1)),
    "property that reads a global": by_scale(lambda m: m.s, lambda m, p: TABLE.update(s=0.9), cls=lambda: OfClass),
    "__getattr__ that reads a global": by_scale(
        lambda m: m.dynamic, lambda m, p: TABLE.update(s=0.9), cls=lambda: OfClass
    ),
    "state of a descriptor": by_scale(
        lambda m: m.described, lambda m, p: p.setattr(Descriptor, "value", 0.9), cls=lambda: OfClass
    ),
    "class method that reads a dictionary of the class": by_scale(
        lambda m: m.shared(), lambda m, p: p.setitem(type(m).table, "s", 0.9), cls=lambda: OfClass
    ),
    "cached property": by_scale(lambda m: m.kept, lambda m, p: setattr(m, "kept", 0.9), cls=lambda: OfClass),
    "class of the block": by_scale(lambda m: pick(type(m) is not Block), lambda m, p: setattr(m, "__class__", OfClass)),
    "closure cell": by_attribute(
        lambda: (lambda k: lambda: k)(0.35), lambda m: setattr(m.a.__closure__[0], "cell_contents", 0.9), lambda a: a()
    ),
    "list in a closure": by_attribute(
        lambda: (lambda k: lambda: k[-1])([0.35]), lambda m: m.a.__closure__[0].cell_contents.append(0.9), lambda a: a()
    ),
    "closure of a closure": by_attribute(
        lambda: (lambda f: lambda: f())((lambda k: lambda: k)(0.35)),
        lambda m: setattr(m.a.__closure__[0].cell_contents.__closure__[0], "cell_contents", 0.9),
        lambda a: a(),
    ),
    "__defaults__": by_attribute(
        lambda: lambda s=0.35: s, lambda m: setattr(m.a, "__defaults__", (0.9,)), lambda a: a()
    ),
    "__kwdefaults__": by_attribute(
        lambda: lambda *, s=0.35: s, lambda m: m.a.__kwdefaults__.update(s=0.9), lambda a: a()
    ),
    "mutable default": by_attribute(
        lambda: lambda s=[0.35]: s[0], lambda m: m.a.__defaults__[0].insert(0, 0.9), lambda a: a()
    ),
    "__code__": by_attribute(lambda: lambda: 0.35, lambda m: setattr(m.a, "__code__", other.__code__), lambda a: a()),
    "__name__ of a function": by_attribute(
        lambda: lambda: 0, lambda m: setattr(m.a, "__name__", "far"), lambda a: pick(a.__name__ == "far")
    ),
    "attribute of a function": by_attribute(
        lambda: having(lambda: 0, s=0.35), lambda m: setattr(m.a, "s", 0.9), lambda a: a.s
    ),
    "function replaced": by_attribute(lambda: factor, to(other), lambda a: a()),
    "function in a list replaced": by_attribute(
        lambda: [factor], lambda m: operator.setitem(m.a, 0, other), lambda a: a[0]()
    ),
    "dictionary in a partial": by_attribute(
        lambda: functools.partial(multiplied, {"s": 0.35}), lambda m: m.a.args[0].update(s=0.9), lambda a: a()
    ),
    "keywords of a partial": by_attribute(
        lambda: functools.partial(number, s=0.35), lambda m: m.a.keywords.update(s=0.9), lambda a: a()
    ),
    "partial of a partial": by_attribute(
        lambda: functools.partial(having(functools.partial(multiplied, {"s": 0.35}), name="inner"), s=1.0),
        lambda m: m.a.func.args[0].update(s=0.9),
        lambda a: a(),
    ),
    "partial in a partial": by_attribute(
        lambda: functools.partial(lambda f: f(), functools.partial(number, s=0.35)),
        lambda m: m.a.args[0].keywords.update(s=0.9),
        lambda a: a(),
    ),
    "bound method of an object": by_attribute(
        lambda: having(Config(), s=0.35).get, lambda m: setattr(m.a.__self__, "s", 0.9), lambda a: a()
    ),
    # what an attribute holds
    "attribute of a class": by_attribute(
        lambda: type("Options", (), dict(s=0.35)), lambda m: setattr(m.a, "s", 0.9), lambda a: a.s
    ),
    "attribute of a module of Python": by_attribute(
        lambda: having(types.ModuleType("options"), s=0.35), lambda m: setattr(m.a, "s", 0.9), lambda a: a.s
    ),
    "slot of an object with a dictionary": by_attribute(
        lambda: having(Config(), s=0.35), lambda m: setattr(m.a, "s", 0.9), lambda a: a.s
    ),
    "slot": by_attribute(lambda: having(Slotted(), s=0.35), lambda m: setattr(m.a, "s", 0.9), lambda a: a.s),
    "attribute of what a proxy stands for": by_attribute(
        lambda: Proxy(Options()), lambda m: setattr(m.a.target, "s", 0.9), lambda a: a.s
    ),
    "target of a weak reference": by_scale(
        lambda m: m.b().s,
        lambda m, p: setattr(m.a, "s", 0.9),
        lambda: dict(a=(options := Options()), b=weakref.ref(options)),
    ),
    "length of an object": by_attribute(Sized, lambda m: setattr(m.a, "n", 2), lambda a: 0.35 * len(a)),
    "truth of an object": by_attribute(Sized, lambda m: setattr(m.a, "n", 0), lambda a: pick(not a)),
    "item of an object": by_attribute(Sized, lambda m: setattr(m.a, "n", 2), lambda a: 0.35 * a[1]),
    "list in a dataclass": by_attribute(Options, lambda m: operator.setitem(m.a.list, 0, 0.9), lambda a: a.list[0]),
    "dataclass replaced": by_attribute(
        Frozen, lambda m: setattr(m, "a", dataclasses.replace(m.a, s=0.9)), lambda a: a.s
    ),
    "named tuple replaced": by_attribute(
        lambda: Pair(0.35, 1), lambda m: setattr(m, "a", m.a._replace(p=0.9)), lambda a: a.p
    ),
    "attribute of a list": by_attribute(
        lambda: having(Items([1]), s=0.35), lambda m: setattr(m.a, "s", 0.9), lambda a: a.s
    ),
    "attribute of a float": by_attribute(
        lambda: having(Number(1), s=0.35), lambda m: setattr(m.a, "s", 0.9), lambda a: a.s
    ),
    "attribute of a member of an enum": by_attribute(
        lambda: having(Mode.NEAR, s=0.35), lambda m: setattr(m.a, "s", 0.9), lambda a: a.s
    ),
    "member of an enum replaced": by_attribute(lambda: Mode.NEAR, to(Mode.FAR), lambda a: pick(a is not Mode.NEAR)),
    "deque rotated": by_attribute(lambda: collections.deque([0.35, 0.9]), lambda m: m.a.rotate(), lambda a: a[0]),
    "set grown": by_attribute(lambda: {1}, lambda m: m.a.add(2), lambda a: pick(2 in a)),
    "range replaced": by_attribute(lambda: range(1, 3), to(range(1, 4)), lambda a: 0.3 * sum(a)),
    "key of a nested dictionary": by_attribute(
        lambda: {"a": {"b": [0.35]}}, lambda m: operator.setitem(m.a["a"]["b"], 0, 0.9), lambda a: a["a"]["b"][0]
    ),
    "array in place": by_attribute(
        lambda: np.array([0.35]), lambda m: operator.setitem(m.a, 0, 0.9), lambda a: float(a[0])
    ),
    "array in a list, in place": by_attribute(
        lambda: [np.array([0.35])], lambda m: operator.setitem(m.a[0], 0, 0.9), lambda a: torch.from_numpy(a[0])
    ),
    # numbers that are equal
    "True to 1": by_attribute(lambda: True, to(1), lambda a: pick(a is not True)),
    "1 to 1.0": by_attribute(lambda: 1, to(1.0), lambda a: pick(not isinstance(a, int))),
    "NaN to a number": by_attribute(lambda: math.nan, to(0.35), lambda a: 0.9 if math.isnan(a) else a),
    "None to 0": by_attribute(lambda: None, to(0), lambda a: 0.9 if a is None else a),
    "large integer": by_attribute(lambda: 2**70, to(2**70 + 1), lambda a: 0.35 + a % 2),
    "complex number": by_attribute(lambda: 0.35 + 1j, to(0.9 + 1j), lambda a: a.real),
    "text": by_attribute(lambda: "near", to("far"), lambda a: pick(a != "near")),
    "bytes": by_attribute(lambda: b"ab", to(b"abc"), lambda a: 0.3 * len(a)),
    # tensors and modules
    "tensor in a list, in place": by_attribute(lambda: [TENSOR.clone()], lambda m: m.a[0].fill_(0.9), lambda a: a[0]),
    "tensor in a list replaced": by_attribute(
        lambda: [TENSOR.clone()], lambda m: operator.setitem(m.a, 0, 2 * TENSOR), lambda a: a[0]
    ),
    "tensor in a dictionary replaced": by_attribute(
        lambda: {"a": TENSOR.clone()}, lambda m: m.a.update(a=2 * TENSOR), lambda a: a["a"]
    ),
    "tensor appended": by_attribute(lambda: [TENSOR.clone()], lambda m: m.a.append(TENSOR.clone()), lambda a: sum(a)),
    "number of tensors in a ParameterList": by_attribute(
        lambda: nn.ParameterList([TENSOR.clone()]), lambda m: m.a.append(TENSOR.clone()), lambda a: sum(a)
    ),
    "buffer of another dtype": by_attribute(
        lambda: nn.Buffer(TENSOR.clone()), lambda m: setattr(m, "a", nn.Buffer(m.a.float() + 1)), lambda a: a
    ),
    "buffer of other strides": by_attribute(
        lambda: nn.Buffer(torch.ones(7, 7, dtype=W)),
        lambda m: setattr(m, "a", nn.Buffer(torch.ones(7, 14, dtype=W)[:, ::2])),
        lambda a: a * (pick(not a.is_contiguous())),
    ),
    "size of a tensor, by data": by_attribute(
        lambda: TENSOR.clone(), lambda m: setattr(m.a, "data", torch.full((7, 7), 0.9, dtype=W)), lambda a: a * len(a)
    ),
    "requires_grad of a weight": by_scale(
        lambda m: pick(m.qkv.weight.requires_grad), lambda m, p: m.qkv.weight.requires_grad_(False)
    ),
    "gradient of a weight": by_scale(
        lambda m: pick(m.qkv.weight.grad is None),
        lambda m, p: setattr(m.qkv.weight, "grad", torch.ones_like(m.qkv.weight)),
    ),
    "attribute of a weight": by_scale(
        lambda m: m.proj.weight.s,
        lambda m, p: setattr(m.proj.weight, "s", 0.9),
        cls=lambda: Block,
        has=lambda: dict(
            proj=having(nn.Linear(D, D, dtype=W), weight=having(nn.Parameter(torch.eye(D, dtype=W)), s=0.35))
        ),
    ),
    "one weight of two layers": state(
        lambda m, x: m.attend(m.b(m.a(x)), pick(m.a.weight is not m.b.weight)),
        lambda m, p: setattr(m.b, "weight", m.a.weight),
        lambda: dict(a=nn.Linear(D, D, dtype=W), b=nn.Linear(D, D, dtype=W)),
    ),
    "bias removed": state(lambda m, x: m.attend(x), lambda m, p: setattr(m.proj, "bias", None)),
    "module removed": state(
        lambda m, x: m.attend(x if m.a is None else m.a(x)),
        lambda m, p: setattr(m, "a", None),
        lambda: dict(a=nn.Linear(D, D, dtype=W)),
    ),
    "module appended to a ModuleList": state(
        lambda m, x: m.attend(functools.reduce(lambda y, f: f(y), m.a, x)),
        lambda m, p: m.a.append(nn.Tanh()),
        lambda: dict(a=nn.ModuleList([nn.Sigmoid()])),
    ),
    "key of a ModuleDict": state(
        lambda m, x: m.attend(m.a[m.key](x)),
        lambda m, p: setattr(m, "key", "far"),
        lambda: dict(a=nn.ModuleDict(dict(near=nn.Sigmoid(), far=nn.Tanh())), key="near"),
    ),
    "order of modules": state(
        lambda m, x: m.attend(functools.reduce(lambda y, f: f(y), (f for n, f in m.named_children() if n in "ab"), x)),
        lambda m, p: m._modules.update(a=m._modules.pop("a")),
        lambda: dict(a=nn.Tanh(), b=nn.Sigmoid()),
    ),
    "training mode of one module": state(
        lambda m, x: m.attend(m.a(x), pick(m.a.training)), lambda m, p: m.a.train(), lambda: dict(a=nn.Dropout(1.0))
    ),
    # modules that the block holds in other ways than as submodules
    "eps of a norm in a list": state(
        lambda m, x: m.attend(m.a[0](x)), lambda m, p: setattr(m.a[0], "eps", 0.5), lambda: dict(a=norms())
    ),
    "weight of a norm in a list, in place": state(
        lambda m, x: m.attend(m.a[0](x)), lambda m, p: m.a[0].weight.data.mul_(2), lambda: dict(a=norms())
    ),
    "weight of a norm in a list replaced": state(
        lambda m, x: m.attend(m.a[0](x)),
        lambda m, p: setattr(m.a[0], "weight", nn.Parameter(torch.full((D,), 3.0, dtype=W))),
        lambda: dict(a=norms()),
    ),
    "hook of a norm in a list": state(
        lambda m, x: m.attend(m.a[0](x)), lambda m, p: m.a[0].register_forward_hook(doubled), lambda: dict(a=norms())
    ),
    "hook before a norm in a tuple": state(
        lambda m, x: m.attend(m.a[0](x).tanh()),
        lambda m, p: m.a[0].register_forward_pre_hook(lambda module, given: given[0] ** 3),
        lambda: dict(a=tuple(norms())),
    ),
    "forward of a norm in a list": state(
        lambda m, x: m.attend(m.a[0](x)),
        lambda m, p: setattr(m.a[0], "forward", torch.sigmoid),
        lambda: dict(a=norms()),
    ),
    "module in a list replaced": state(
        lambda m, x: m.attend(m.a[0](x)), lambda m, p: operator.setitem(m.a, 0, nn.Tanh()), lambda: dict(a=norms())
    ),
    "modules in a list swapped": state(
        lambda m, x: m.attend(m.a[0](x) - 2 * m.a[1](x)),
        lambda m, p: m.a.reverse(),
        lambda: dict(a=[nn.Tanh(), nn.Sigmoid()]),
    ),
    "module in a dictionary replaced": state(
        lambda m, x: m.attend(m.a["f"](x)), lambda m, p: m.a.update(f=nn.Tanh()), lambda: dict(a=dict(f=nn.ReLU()))
    ),
    "dropout in a list, in training mode": state(
        lambda m, x: m.attend(m.a[0](x)), lambda m, p: m.a[0].train(), lambda: dict(a=[nn.Dropout(1.0).eval()])
    ),
    "rate of a dropout in a list": state(
        lambda m, x: m.attend(m.a[0](x)), lambda m, p: setattr(m.a[0], "p", 1.0), lambda: dict(a=[nn.Dropout(0.0)])
    ),
    "attribute of a module in a tuple": by_attribute(
        lambda: (Fixed(),), lambda m: setattr(m.a[0], "s", 0.9), lambda a: a[0]()
    ),
    "training mode of a module in a list": by_attribute(
        lambda: [Fixed()], lambda m: m.a[0].eval(), lambda a: pick(not a[0].training)
    ),
    "bound method of a module": by_attribute(
        lambda: Fixed().forward, lambda m: setattr(m.a.__self__, "s", 0.9), lambda a: a()
    ),
    "attribute of a module in a partial": by_attribute(
        lambda: functools.partial(Fixed()), lambda m: setattr(m.a.func, "s", 0.9), lambda a: a()
    ),
    "attribute of a module in a closure": by_attribute(
        lambda: (lambda f: lambda: f())(Fixed()),
        lambda m: setattr(m.a.__closure__[0].cell_contents, "s", 0.9),
        lambda a: a(),
    ),
    # globals
    "global": by_scale(lambda m: SCALE, lambda m, p: p.setitem(globals(), "SCALE", 0.9)),
    "global dictionary": by_scale(lambda m: TABLE["s"], lambda m, p: TABLE.update(s=0.9)),
    "attribute of a global": by_scale(lambda m: THING.s, lambda m, p: setattr(THING, "s", 0.9)),
    "list of a global": by_scale(lambda m: THING.list[0], lambda m, p: operator.setitem(THING.list, 0, 0.9)),
    "length of a global": by_scale(
        lambda m: 0.35 * len(LIST), lambda m, p: operator.setitem(LIST, slice(0, 9), [1, 2])
    ),
    "member of a global set": by_scale(lambda m: pick(3 not in SET), lambda m, p: SET.add(3)),
    "hasattr of a global": by_scale(lambda m: pick(not hasattr(THING, "z")), lambda m, p: setattr(THING, "z", 1)),
    "key of a global dictionary": by_scale(lambda m: pick("k" not in TABLE), lambda m, p: TABLE.update(k=1)),
    "get with a default, of a global dictionary": by_scale(
        lambda m: TABLE.get("k", 0.9), lambda m, p: TABLE.update(k=0.35)
    ),
    "global tensor in place": by_scale(lambda m: TENSOR, lambda m, p: TENSOR.fill_(0.9)),
    "global function replaced": by_scale(lambda m: factor(), lambda m, p: p.setitem(globals(), "factor", other)),
    "constant of an imported module": by_scale(lambda m: math.tau, lambda m, p: p.setattr(math, "tau", 0.35)),
    "imported modules": by_scale(
        lambda m: pick("made_up" not in sys.modules),
        lambda m, p: p.setitem(sys.modules, "made_up", types.ModuleType("made_up")),
    ),
    "text that a global selects": state(lambda m, x: (m.attend(x), TABLE["s"]), lambda m, p: TABLE.update(s="far")),
    "member that a global selects": state(
        lambda m, x: (m.attend(x), THING.mode), lambda m, p: setattr(THING, "mode", 2)
    ),
    "environment": by_scale(
        lambda m: float(os.environ.get("FASTVIT_TEST_SCALE", "0.35")),
        lambda m, p: p.setenv("FASTVIT_TEST_SCALE", "0.9"),
    ),
    "environment by getenv": by_scale(
        lambda m: float(os.getenv("FASTVIT_TEST_SCALE", "0.35")), lambda m, p: p.setenv("FASTVIT_TEST_SCALE", "0.9")
    ),
    "environment by another name": by_scale(
        lambda m: float(ENVIRONMENT.get("FASTVIT_TEST_SCALE", "0.35")),
        lambda m, p: p.setenv("FASTVIT_TEST_SCALE", "0.9"),
    ),
    "working directory": by_scale(lambda m: pick(os.getcwd() != "/"), lambda m, p: p.chdir("/")),
    "recursion limit": by_scale(
        lambda m: pick(sys.getrecursionlimit() != 5000), lambda m, p: p.setattr(sys, "getrecursionlimit", lambda: 5000)
    ),
    "level of a logger": by_scale(
        lambda m: pick(not logger.isEnabledFor(logging.DEBUG)),
        lambda m, p: p.setattr(logger, "level", logging.DEBUG) or p.setattr(logger, "_cache", {}),
    ),
    "variable of the thread": by_scale(lambda m: LOCAL.s, lambda m, p: p.setattr(LOCAL, "s", 0.9)),
}

COMPILING = {  # name → what reads it; it must be False in eager calls
    "torch.compiler.is_compiling": lambda m, x: m.attend(x, pick(torch.compiler.is_compiling())),
    "is_dynamo_compiling": lambda m, x: m.attend(x, pick(torch.compiler.is_dynamo_compiling())),
    "torch._dynamo.is_compiling": lambda m, x: m.attend(x, pick(torch._dynamo.is_compiling())),
    "torch.compiler.is_exporting": lambda m, x: m.attend(x, pick(torch.compiler.is_exporting())),
    "torch.jit.is_scripting": lambda m, x: m.attend(x, pick(torch.jit.is_scripting())),
    "torch.jit.is_tracing": lambda m, x: m.attend(x, pick(torch.jit.is_tracing())),
    "torch.onnx.is_in_onnx_export": lambda m, x: m.attend(x, pick(torch.onnx.is_in_onnx_export())),
    "torch.fx": lambda m, x: m.attend(x, pick(torch.fx._symbolic_trace.is_fx_tracing())),
    "type of the tensor": lambda m, x: m.attend(x, pick(type(x) is not Tensor)),
}


@contextlib.contextmanager
def setting(get: Callable, put: Callable, value: Any):
    """Context with another value of a setting."""
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


backends = torch.backends
SETTINGS = {  # name → (what is true in a context, the context)
    "inference mode": (lambda: torch.is_inference_mode_enabled(), torch.inference_mode),
    "gradients": (lambda: torch.is_grad_enabled(), torch.enable_grad),
    "deterministic": (
        lambda: torch.are_deterministic_algorithms_enabled(),
        lambda: setting(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    ),
    "default dtype": (
        lambda: torch.get_default_dtype() == W,
        lambda: setting(torch.get_default_dtype, torch.set_default_dtype, W),
    ),
    "default device": (lambda: torch.get_default_device().type == "meta", lambda: torch.device("meta")),
    "threads": (lambda: torch.get_num_threads() == 2, lambda: setting(torch.get_num_threads, torch.set_num_threads, 2)),
    "flash attention": (
        lambda: backends.cuda.flash_sdp_enabled(),
        lambda: setting(backends.cuda.flash_sdp_enabled, backends.cuda.enable_flash_sdp, False),
    ),
    "autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda: torch.autocast("cpu", torch.bfloat16)),
    "anomalies": (lambda: torch.is_anomaly_enabled(), lambda: torch.autograd.set_detect_anomaly(True)),
    "precision of products": (
        lambda: torch.get_float32_matmul_precision() == "high",
        lambda: setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"),
    ),
    "cuDNN": (lambda: backends.cudnn.benchmark, lambda: backends.cudnn.flags(benchmark=True)),
    "oneDNN": (
        lambda: backends.mkldnn.enabled,
        lambda: setting(torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, False),
    ),
    "fast path": (
        lambda: backends.mha.get_fastpath_enabled(),
        lambda: setting(backends.mha.get_fastpath_enabled, backends.mha.set_fastpath_enabled, False),
    ),
    "warnings": (
        lambda: torch.is_warn_always_enabled(),
        lambda: setting(torch.is_warn_always_enabled, torch.set_warn_always, True),
    ),
    "uninitialised memory": (
        lambda: torch.utils.deterministic.fill_uninitialized_memory,
        lambda: setting(
            lambda: torch.utils.deterministic.fill_uninitialized_memory,
            functools.partial(setattr, torch.utils.deterministic, "fill_uninitialized_memory"),
            False,
        ),
    ),
    "function mode": (lambda: len(torch.overrides._get_current_function_mode_stack()) > 0, BaseTorchFunctionMode),
    "hooks of saved tensors": (
        lambda: torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    ),
    "context variable": (lambda: VARIABLE.get() == 0.9, lambda: setting(VARIABLE.get, VARIABLE.set, 0.9)),
    "name of the thread": (
        lambda: threading.current_thread().name == "other",
        lambda: setting(
            lambda: threading.current_thread().name,
            lambda name: setattr(threading.current_thread(), "name", name),
            "other",
        ),
    ),
    "errors of NumPy": (lambda: np.geterr()["divide"] == "raise", lambda: np.errstate(divide="raise")),
}

# integer arguments


def added(m, x, n):
    s = 0.1
    for _ in range(n):
        s = s + 0.2
    return m.attend(x, s)


def repeated(m, x, n):
    for _ in range(n):
        x = m.attend(x)
    return m.proj(x)


def counted_down(m, x, n):
    while n > 0:
        x = m.attend(x)
        n -= 1
    return m.proj(x)


def matched(m, x, n):
    match n:
        case 0:
            return m.attend(x, 0.1)
        case 1 | 2:
            return m.attend(x, 0.5)
    return m.attend(x, 0.9)


def layers() -> dict:
    return dict(layers=nn.ModuleList(nn.Linear(D, D, dtype=W) for _ in range(4)))


INTEGERS = {  # name → (forward for x and n, the example's n) and, if it needs them, attributes
    "range, example 0": (added, 0),
    "range, example 1": (added, 1),
    "range, example 2": (added, 2),
    "range of blocks, example 0": (repeated, 0),
    "range of blocks, example 2": (repeated, 2),
    "while": (counted_down, 2),
    "index of a list": (lambda m, x, n: m.attend(x, [0.1, 0.2, 0.3, 0.4][n]), 1),
    "index of an attribute": (lambda m, x, n: m.attend(x, m.s[n]), 1, lambda: dict(s=[0.1, 0.2, 0.3, 0.4])),
    "key of a dictionary": (lambda m, x, n: m.attend(x, m.s[n]), 1, lambda: dict(s={0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4})),
    "index of a ModuleList": (lambda m, x, n: m.attend(m.layers[n](x)), 1, layers),
    "length of a list": (lambda m, x, n: m.attend(x, len([0] * n) + 0.1), 1),
    "math.sqrt": (lambda m, x, n: m.attend(x, 0.1 + math.sqrt(n)), 1),
    "integer part of a root": (lambda m, x, n: m.attend(x, 0.1 + int(n**0.5)), 2),
    "float": (lambda m, x, n: m.attend(x, 0.1 + float(n)), 2),
    "truth": (lambda m, x, n: m.attend(x, 0.9 if n else 0.1), 2),
    "member of a tuple": (lambda m, x, n: m.attend(x, 0.9 if n in (1, 3) else 0.1), 2),
    "text": (lambda m, x, n: m.attend(x, 0.9 if str(n) == "2" else 0.1), 2),
    "tensor": (lambda m, x, n: m.attend(x) * torch.tensor(n), 2),
    "full": (lambda m, x, n: m.attend(x) + torch.full((1,), n), 2),
    "arange": (lambda m, x, n: m.attend(x) + torch.arange(n).sum(), 2),
    "slice": (lambda m, x, n: m.attend(x)[:, :n], 2),
    "unsqueeze": (lambda m, x, n: m.attend(x).unsqueeze(n), 2),
    "roll": (lambda m, x, n: m.attend(x).roll(n, 1), 2),
    "hash": (lambda m, x, n: m.attend(x) * hash(n), 2),
    "bits": (lambda m, x, n: m.attend(x) * (n & 1) + (n >> 1) + (n << 1), 2),
    "max, min and divmod": (lambda m, x, n: m.attend(x) * max(n, 2) + min(n, 1) + divmod(n, 2)[0], 2),
    "sum of a generator": (lambda m, x, n: x + sum(m.attend(x) for _ in range(n)), 2),
    "round": (lambda m, x, n: m.attend(x) * round(n / 2), 2),
    "comparison as a factor": (lambda m, x, n: m.attend(x) * (n == 2), 2),
    "bool": (lambda m, x, n: m.attend(x) + bool(n), 2),
    "tensors in a list": (lambda m, x, n: torch.stack([m.attend(x)] * n + [x]).sum(0), 2),
    "index of a tensor": (lambda m, x, n: m.attend(x) + torch.eye(D, dtype=x.dtype)[n], 2),
    "index of chunks": (lambda m, x, n: x + m.attend(x).chunk(4, -1)[n].mean(), 2),
    "power": (lambda m, x, n: m.attend(x).pow(n), 2),
    "norm": (lambda m, x, n: m.attend(x).norm(n), 2),
    "factor, example 0": (lambda m, x, n: m.attend(x) * n, 0),
    "factor, example 1": (lambda m, x, n: m.attend(x) * n, 1),
    "factor, example 5": (lambda m, x, n: m.attend(x) * n, 5),
    "branch, example 0": (lambda m, x, n: m.attend(x, 0.3 if n > 2 else 0.9), 0),
    "branch, example 3": (lambda m, x, n: m.attend(x, 0.3 if n > 2 else 0.9), 3),
    "dimension of a concatenation": (lambda m, x, n: torch.cat([m.attend(x)] * 2, dim=n - 1), 1),
    "arithmetic": (lambda m, x, n: m.attend(x) + (n // 2) + n % 3 + n**2 + abs(n - 2), 3),
    "narrow": (lambda m, x, n: m.attend(x).narrow(1, 0, n), 3),
    # not in the review's scripts
    "layer from the end": (lambda m, x, n: m.attend(m.layers[-n](x)), 1, layers),
    "layers up to one": (lambda m, x, n: m.attend(functools.reduce(lambda y, f: f(y), m.layers[:n], x)), 2, layers),
    "layers by islice": (lambda m, x, n: m.attend(x + sum(f(x) for f in itertools.islice(m.layers, n))), 2, layers),
    "layer by name": (lambda m, x, n: m.attend(getattr(m.layers, str(n))(x)), 1, layers),
    "attribute by index": (lambda m, x, n: m.attend(getattr(m, ("proj", "norm", "proj", "norm")[n])(x)), 1),
    "function by key": (lambda m, x, n: m.attend({0: torch.sin, 1: torch.cos}.get(n, torch.tanh)(x)), 1),
    "match": (matched, 1),
    "sum of a range": (lambda m, x, n: m.attend(x, 0.1 + sum(range(n))), 2),
    "reversed range": (lambda m, x, n: m.attend(x, 0.1 + sum(i * 0.1 for i in reversed(range(n, 4)))), 2),
    "enumerate": (lambda m, x, n: m.attend(x, 0.1 * sum(i for i, _ in enumerate("abc", start=n))), 2),
    "length of a text": (lambda m, x, n: m.attend(x, 0.1 + len("a" * n)), 2),
    "bit_length": (lambda m, x, n: m.attend(x, 0.1 + n.bit_length()), 2),
    "or": (lambda m, x, n: m.attend(x, n or 0.35), 2),
    "even or odd": (lambda m, x, n: m.attend(x, pick(n % 2 == 0)), 2),
    "key of a made dictionary": (lambda m, x, n: m.attend(x, {n: 0.9}.get(2, 0.35)), 2),
    "size of a set": (lambda m, x, n: m.attend(x, 0.35 * len({n, 1, 2})), 2),
    "equal to a size": (lambda m, x, n: m.attend(x, pick(n == x.shape[0])), 2),
    "stride of a slice": (lambda m, x, n: m.attend(x)[:, :: n + 1], 2),
    "padding": (lambda m, x, n: F.pad(m.attend(x), (0, 0, n, 0)), 2),
    "sizes of a split": (lambda m, x, n: m.attend(x).split([n, 7 - n], dim=1)[0], 2),
    "repeat": (lambda m, x, n: m.attend(x).repeat(1, n, 1), 2),
    "triangle of a mask": (lambda m, x, n: m.attend(x, torch.ones(7, 7, dtype=x.dtype).tril(n)), 2),
    "groups of channels": (lambda m, x, n: m.attend(x).unflatten(-1, (2**n, -1)).sum(-1), 2),
    "binary text": (lambda m, x, n: m.attend(x, 0.1 + bin(n).count("1")), 2),
    "format": (lambda m, x, n: m.attend(x, 0.9 if "%d" % n == "2" else 0.1), 2),  # noqa: UP031
    "math.gcd": (lambda m, x, n: m.attend(x, 0.1 + math.gcd(n, 6)), 2),
    "product": (lambda m, x, n: m.attend(x, 0.1 + math.prod([2] * n)), 2),
    "comparison of tuples": (lambda m, x, n: m.attend(x, 0.9 if (n, 1) < (2, 0) else 0.1), 2),
    "chained comparison": (lambda m, x, n: m.attend(x, 0.9 if 0 < n < 3 else 0.1), 2),
    "seeded generator": (
        lambda m, x, n: m.attend(x) + torch.rand(1, generator=torch.Generator().manual_seed(n), dtype=W),
        2,
    ),
}

# arguments, and facts of tensors


def by_fact(read: Callable, other: Callable[[], Tensor], grad: bool = False) -> Case:
    """A case of a branch that a fact of the tokens selects; `other` gives tokens for which it differs."""
    return Case(lambda m, x: m.attend(x, pick(read(x))), lambda m: [call(tokens()), call(other())], grad=grad)


def by_values(run: Callable, *values: Any, **facts: Any) -> Case:
    """A case of a second argument of these values."""
    return Case(run, lambda m: [call(tokens(), value) for value in values], **facts)


def by_number(read: Callable, *values: Any, **facts: Any) -> Case:
    """A case of a second argument of these values, of which `read` gives a scale."""
    return by_values(lambda m, x, s: m.attend(x, read(s)), *values, **facts)


def caught(m, x):
    try:
        if x.shape[1] > 5:
            raise ValueError
        return m.attend(x)
    except ValueError:
        return m.attend(x, 0.9)


def written(m, x, b):
    """Writes its second argument between a norm and the linear layer that reads it."""
    h = m.norm(x)
    b.cos_()
    return m.qkv(h) + x.mean()


def buffer_written(m, x):
    h = m.norm(x)
    m.b.cos_()
    return m.qkv(h) + x.mean()


def aliased(view: Callable) -> Case:
    """The second argument is a view of the first one, or both are one tensor."""

    def calls(m):
        x = tokens()
        return [call(tokens(), tokens()), call(x, view(x))]

    return Case(written, calls)


def buffer_aliased(view: Callable) -> Case:
    """The argument is a view of a buffer that the forward writes."""

    def calls(m):
        m.b.copy_(tokens())
        return [call(tokens()), call(view(m.b))]

    return Case(buffer_written, calls, lambda: dict(b=nn.Buffer(tokens())))


def grown(t: Tensor) -> Tensor:
    """Tokens in memory that does not start with them."""
    return torch.cat([t[:1], t])[1:]


ARGUMENTS = {
    "text": by_number(lambda s: dict(near=0.35, far=0.9)[s], "near", "far"),
    "float": by_number(lambda s: s, 0.3, 0.9, 0.3, 0.0, -1.0),
    "float, integer or boolean": by_number(lambda s: 0.5 if isinstance(s, bool) else type(s)(3.7), 1.0, 1, True),
    "integer or boolean": by_number(lambda s: 0.9 if isinstance(s, bool) else 0.1, 1, True, 0, False),
    "infinity and NaN": by_number(lambda s: pick(s == s), math.inf, math.nan, 1.0),
    "None or 0": by_number(lambda s: pick(s is None), None, 0, False),
    "complex": by_number(lambda s: abs(s), 0.3 + 0.4j, 0.6 + 0.8j),
    "integer of NumPy": by_number(lambda s: [0.1, 0.4, 0.9][s], np.int64(1), np.int64(2)),
    "float of NumPy": by_number(lambda s: float(s), np.float64(0.3), np.float64(0.9)),
    "array of NumPy": by_number(
        lambda s: torch.from_numpy(s), np.array([0.3]), np.array([0.9]), np.linspace(0.1, 0.9, 7)
    ),
    "integer enum": by_number(lambda s: 0.3 * s, Level.LOW, Level.HIGH, 1),
    "enum": by_number(lambda s: 0.3 * s.value, Mode.NEAR, Mode.FAR),
    "dtype": by_values(lambda m, x, s: m.attend(x).to(s), W, torch.float32),
    "device": by_values(lambda m, x, s: m.attend(x).to(s).device.type, torch.device("cpu"), torch.device("meta")),
    "size": by_values(
        lambda m, x, s: m.attend(x).reshape(s), torch.Size([14, D]), torch.Size([7, 2, D]), torch.Size([7, 2 * D])
    ),
    "slice": by_values(lambda m, x, s: m.attend(x)[:, s], slice(0, 3), slice(1, 3), slice(None)),
    "ellipsis or index": by_values(lambda m, x, s: m.attend(x)[s], ..., 0, None, 1),
    "function": by_values(lambda m, x, s: m.attend(s(x)), torch.sin, torch.cos, functools.partial(torch.add, other=1)),
    "lambda": by_values(lambda m, x, s: m.attend(s(x)), lambda x: 2 * x, lambda x: 3 * x),
    "module": by_values(lambda m, x, s: m.attend(s(x)), nn.Tanh(), nn.Sigmoid(), nn.Linear(D, D, dtype=W)),
    "nested": Case(
        lambda m, x, s: m.attend(x, s[0]["a"]) + s[1],
        lambda m: [call(tokens(), [{"a": k}, k * tokens()]) for k in (0.3, 0.9)],
    ),
    "list or tuple": by_number(lambda s: 0.9 if isinstance(s, list) else s[0], [0.3], (0.3,)),
    "length of a list": by_number(lambda s: sum(s), [0.1, 0.2], [0.1, 0.2, 0.3], []),
    "length of a list of tensors": Case(
        lambda m, x, s: m.attend(x + sum(s)), lambda m: [call(tokens(), [tokens()] * n) for n in (2, 3, 0)]
    ),
    "keys of a dictionary": by_number(lambda s: s.get("b", 0.9), dict(a=0.1), dict(a=0.1, b=0.3), {}),
    "order of a dictionary": by_number(lambda s: next(iter(s.values())), dict(a=0.1, b=0.9), dict(b=0.9, a=0.1)),
    "integer in a list": by_number(lambda s: 0.1 + sum(range(s[0])), [2], [3], [0]),
    "integer in a dictionary": by_values(
        lambda m, x, s: m.layers[s["i"]](m.attend(x)), dict(i=1), dict(i=2), has=layers
    ),
    "two integers": Case(
        lambda m, x, n, k: m.attend(x, 0.9 if n == k else 0.1 * n),
        lambda m: [call(tokens(), *pair) for pair in ((2, 2), (2, 3), (3, 3), (3, 2))],
    ),
    "height and width": Case(
        lambda m, x, h, w: m.attend(x).reshape(2, h, w, D).mean(1),
        lambda m: [call(tokens(2, 6), *pair) for pair in ((2, 3), (3, 2), (1, 6), (6, 1))],
    ),
    "named integer": Case(
        lambda m, x, n=1: m.layers[n](m.attend(x)), lambda m: [call(x=tokens(), n=n) for n in (1, 2, 0)], layers
    ),
    "default or given": Case(
        lambda m, x, n=1: m.layers[n](m.attend(x)),
        lambda m: [call(tokens()), call(tokens(), 2), call(tokens(), n=2), call(tokens(), n=1)],
        layers,
    ),
    "more names": Case(
        lambda m, x, **named: m.attend(x, 0.3 * (1 + len(named))),
        lambda m: [call(tokens()), call(tokens(), a=1), call(tokens(), a=1, b=2)],
    ),
    "number of arguments": Case(
        lambda m, *xs: m.attend(sum(xs)), lambda m: [call(*(tokens() for _ in range(n))) for n in (1, 2, 3)]
    ),
    "data class": by_number(lambda s: s.s, Options(0.35), Options(0.9)),
    "named tuple": by_number(lambda s: s.p, Pair(0.35, 1), Pair(0.9, 1), (0.9,), raises=AttributeError),
    "iterator": Case(lambda m, x, s: m.attend(x, next(s)), lambda m: [call(tokens(), iter([k])) for k in (0.3, 0.9)]),
    "object of NumPy's random numbers": Case(
        lambda m, x, s: m.attend(x, s.random()), lambda m: [call(tokens(), np.random.default_rng(k)) for k in (1, 2)]
    ),
    # tensors
    "mask or None": Case(
        lambda m, x, mask=None: m.attend(x) if mask is None else m.attend(x * mask[..., None], 0.9),
        lambda m: [
            call(tokens()),
            call(tokens(), torch.ones(2, 7, dtype=W)),
            call(tokens(), None),
            call(tokens(), torch.ones(2, 7)),
            call(tokens(), torch.zeros(2, 7, dtype=torch.bool)),
        ],
    ),
    "mask of one row": Case(
        lambda m, x, mask: m.attend(x * mask), lambda m: [call(tokens(), torch.ones(n, 7, 1) / n) for n in (1, 2)]
    ),
    "mask of one row, after two": Case(
        lambda m, x, mask: m.attend(x * mask), lambda m: [call(tokens(), torch.ones(n, 7, 1) / n) for n in (2, 1)]
    ),
    "number of dimensions": Case(
        lambda m, x, mask: m.attend(x, mask[0] if mask.ndim == 3 else mask),
        lambda m: [call(tokens(), torch.ones(*size) / len(size)) for size in ((7, 7), (2, 7, 7))],
    ),
    "integers of another dtype": by_values(
        lambda m, x, i: m.attend(x)[:, i],
        torch.tensor([0, 1]),
        torch.tensor([1, 0], dtype=torch.int32),
        torch.tensor([True] + [False] * 6),
    ),
    "value of a tensor": by_values(lambda m, x, i: m.attend(x, 0.1 + i.item()), torch.tensor(1), torch.tensor(2)),
    "range of a tensor's value": by_values(
        lambda m, x, i: m.attend(x, 0.1 + sum(range(int(i)))), torch.tensor(1), torch.tensor(3)
    ),
    "batch of 1 after 2": Case(
        lambda m, x: m.attend(x, pick(x.shape[0] == 1)), lambda m: [call(tokens(n)) for n in (2, 1, 0, 2)]
    ),
    "batch of 2 after 1": Case(
        lambda m, x: m.attend(x, pick(x.shape[0] == 1)), lambda m: [call(tokens(n)) for n in (1, 2, 0, 1)]
    ),
    "arithmetic of sizes": Case(
        lambda m, x: m.attend(x) / x.shape[0] + x * (x.shape[1] ** 0.5),
        lambda m: [call(tokens(b, n)) for b in (2, 1) for n in (7, 1, 3)],
    ),
    "range of a size": Case(
        lambda m, x: m.attend(x, 0.1 * sum(range(x.shape[1]))), lambda m: [call(tokens(2, n)) for n in (7, 3, 4)]
    ),
    "table by size": Case(
        lambda m, x: m.attend(x, m.s[x.shape[1]]),
        lambda m: [call(tokens(2, n)) for n in (7, 3, 4)],
        lambda: dict(s={7: 0.1, 3: 0.5, 4: 0.9}),
    ),
    "batch as long as the tokens": Case(
        lambda m, x: m.attend(x, pick(x.shape[0] == x.shape[1])),
        lambda m: [call(tokens(*size)) for size in ((2, 7), (2, 2), (1, 1), (1, 2))],
    ),
    "error that is caught": Case(caught, lambda m: [call(tokens()), call(tokens(2, 3))]),
    "one tensor twice": Case(
        lambda m, x, y: m.attend(x + y, pick(x is y)), lambda m: [call(tokens(), tokens()), call(*[tokens()] * 2)]
    ),
    "dtype of the tokens": Case(
        lambda m, x: m.attend(x.to(W), pick(x.dtype == torch.float32)),
        lambda m: [call(tokens()), call(tokens().float()), call(tokens().bfloat16())],
    ),
    "view of the first argument is written": aliased(lambda x: x.view(2, 7, D)),
    "part of the first argument is written": aliased(lambda x: x[:, 3:]),
    "the first argument is written": aliased(lambda x: x),
    "the argument is a buffer that is written": buffer_aliased(lambda b: b),
    "the argument is a view of a buffer that is written": buffer_aliased(lambda b: b[:]),
    "the argument is the detached weight": Case(
        lambda m, x, w: m.attend(x) + w.mean(),
        lambda m: [call(tokens(), tokens()), call(tokens(), m.qkv.weight.detach())],
    ),
    "the argument is the weight": Case(
        lambda m, x, w: m.attend(x, pick(w is m.qkv.weight)) + w.mean(),
        lambda m: [call(tokens(), nn.Parameter(tokens()[0])), call(tokens(), m.qkv.weight)],
        grad=True,
    ),
    # facts of the tokens
    "requires_grad": by_fact(lambda x: x.requires_grad, lambda: tokens().requires_grad_(), grad=True),
    "is_leaf": by_fact(lambda x: x.is_leaf, lambda: tokens().requires_grad_() * 1, grad=True),
    "grad_fn": by_fact(lambda x: x.grad_fn is None, lambda: tokens().requires_grad_() * 1, grad=True),
    "_version": by_fact(lambda x: x._version > 0, lambda: tokens().add_(0)),
    "attribute of a tensor": by_fact(lambda x: hasattr(x, "tag"), lambda: having(tokens(), tag=1)),
    "value of an attribute of a tensor": Case(
        lambda m, x: m.attend(x, x.tag), lambda m: [call(having(tokens(), tag=k)) for k in (0.3, 0.9)]
    ),
    "is_contiguous": by_fact(lambda x: x.is_contiguous(), lambda: tokens().mT.contiguous().mT),
    "stride": by_fact(lambda x: x.stride(0) == 0, lambda: tokens(1).expand(2, -1, -1)),
    "storage_offset": by_fact(lambda x: x.storage_offset() == 0, lambda: grown(tokens())),
    "size of the storage": by_fact(lambda x: x.untyped_storage().nbytes() == 8 * x.numel(), lambda: grown(tokens())),
    "is_leaf by name": by_fact(lambda x: getattr(x, NAME), lambda: tokens().requires_grad_() * 1, grad=True),
    "_grad_fn": by_fact(lambda x: x._grad_fn is None, lambda: tokens().requires_grad_() * 1, grad=True),
    "_base": by_fact(lambda x: x._base is None, lambda: grown(tokens())),
    "_is_view": by_fact(lambda x: x._is_view(), lambda: grown(tokens())),
    "grad": by_fact(lambda x: x.grad is None, lambda: having(tokens().requires_grad_(), grad=tokens()), grad=True),
    "retains_grad": by_fact(lambda x: x.retains_grad, lambda: retained(), grad=True),
    "output_nr": by_fact(
        lambda x: x.output_nr == 1, lambda: tokens(2, 7).requires_grad_().repeat(2, 1, 1).split(2)[1], grad=True
    ),
    "hooks of a tensor": by_fact(lambda x: x._backward_hooks is None, lambda: hooked(), grad=True),
    "is_inference": by_fact(lambda x: x.is_inference(), lambda: made_in_inference_mode()),
    "class of a tensor": by_fact(lambda x: isinstance(x, nn.Parameter), lambda: nn.Parameter(tokens()), grad=True),
    "shared memory": by_fact(lambda x: x.is_shared(), lambda: tokens().share_memory_()),
    "negative view": by_fact(lambda x: x.is_neg(), lambda: torch._neg_view(tokens())),
    "address": by_fact(lambda x: x.data_ptr() == KEPT.data_ptr(), lambda: KEPT),
    "identity": by_fact(lambda x: x is KEPT, lambda: KEPT),
    "id": by_fact(lambda x: id(x) == id(KEPT), lambda: KEPT),
}
KEPT = tokens()


def retained() -> Tensor:
    x = tokens().requires_grad_() * 1
    x.retain_grad()
    return x


def hooked() -> Tensor:
    x = tokens().requires_grad_()
    x.register_hook(lambda g: 2 * g)
    return x


def made_in_inference_mode() -> Tensor:
    with torch.inference_mode():
        return tokens()


# outputs

Out = dataclasses.make_dataclass("Out", [("a", Any), ("b", Any, None)])
FrozenOut = dataclasses.make_dataclass("FrozenOut", [("a", Any), ("b", Any, None)], frozen=True)


class Outputs(collections.OrderedDict):
    """Outputs that are read by key and by attribute, as those of transformers."""

    def __getattr__(self, name):
        if name not in self:
            raise AttributeError(name)
        return self[name]


def of(build: Callable, **facts: Any) -> Case:
    """A case of outputs that are built of the block, the tokens and its attention."""
    return Case(lambda m, x: build(m, x, m.attend(x)), **facts)


SIZES = lambda m: [call(tokens()), call(tokens(1, 4)), call(tokens(2, 2)), call(tokens())]  # noqa: E731
OUTPUTS = {
    "tuple, reversed": of(lambda m, x, y: (2 * y, y)),
    "nested": of(lambda m, x, y: {"b": 2 * y, "a": [y, (y + 1, x)], "n": None, "s": "t", "f": True, "e": ()}),
    "data class": of(lambda m, x, y: Out(2 * y, y)),
    "frozen data class": of(lambda m, x, y: FrozenOut(2 * y, y)),
    "named tuple": of(lambda m, x, y: Pair(2 * y, y)),
    "ordered dictionary": of(lambda m, x, y: collections.OrderedDict(b=2 * y, a=y)),
    "dictionary of its own class": of(lambda m, x, y: Outputs(b=2 * y, a=y)),
    "list of its own class": of(lambda m, x, y: Items([2 * y, y])),
    "object": of(lambda m, x, y: types.SimpleNamespace(a=2 * y, b=y)),
    "set of texts": of(lambda m, x, y: (y, {"a", "b"})),
    "view_as of the input": of(lambda m, x, y: (x.view_as(x), y, y.contiguous())),
    "reshape of the input": of(lambda m, x, y: (x.reshape(x.shape), y, y.contiguous())),
    "view of the input": of(lambda m, x, y: (x.view(x.shape), y, y.to(y.dtype))),
    "flattened view of the input": of(lambda m, x, y: (x.flatten(1).view(x.shape), y, F.dropout(y, 0.1, False))),
    "input": of(lambda m, x, y: (y, x)),
    "input twice": of(lambda m, x, y: [x, y, x, y]),
    "weight": of(lambda m, x, y: (y, m.qkv.weight)),
    "view of a weight": of(lambda m, x, y: (y, m.qkv.weight.detach()[0])),
    "buffer": of(lambda m, x, y: (y, m.b), has=lambda: dict(b=nn.Buffer(tokens()))),
    "global tensor": of(lambda m, x, y: (y, TENSOR)),
    "view of an output": of(lambda m, x, y: (y, y.transpose(0, 1), y[0])),
    "nothing but the input": of(lambda m, x, y: x),
    "None": of(lambda m, x, y: None),
    "sizes": of(lambda m, x, y: (y, x.shape, x.shape[1], x.numel(), y.dim()), calls=SIZES),
    "float": of(lambda m, x, y: (y, 0.5)),
    "float of a size": of(lambda m, x, y: (y, x.shape[1] ** 0.5, x.shape[0] / x.shape[1]), calls=SIZES),
    "comparison of a size": of(lambda m, x, y: (y, x.shape[1] > 5), calls=SIZES),
    "text of a size": of(lambda m, x, y: (y, "long" if x.shape[0] > 1 else "short"), calls=SIZES),
    "formatted size": of(lambda m, x, y: (y, str(x.shape[1])), calls=SIZES),
    "list as long as the tokens": of(lambda m, x, y: [0] * x.shape[1], calls=SIZES),
    "comparison of sizes": of(lambda m, x, y: (y, y.shape[1] == x.shape[0]), calls=SIZES),
    "tokens one by one": of(lambda m, x, y: y.unbind(1), calls=SIZES),
    "text that is given": by_values(lambda m, x, s: (m.attend(x), s), "a", "b"),
    "boolean that is given": by_values(lambda m, x, s: (m.attend(x), not s), True, False),
    "integer that is given": by_values(lambda m, x, s: (m.attend(x), s, s + 1), 2, 3, 0),
    "float that is given": by_values(lambda m, x, s: (m.attend(x), s, 2 * s), 0.5, 1.0, 2.0),
    "list that is given": by_values(lambda m, x, s: (m.attend(x), s), [1], [1, 2]),
    "object that is given": by_values(lambda m, x, s: (m.attend(x), s), Options(), Options(0.9)),
    "is_contiguous": Case(
        lambda m, x: (m.attend(x), x.is_contiguous()),
        lambda m: [call(tokens()), call(tokens().transpose(0, 1).contiguous().transpose(0, 1))],
    ),
    "dtype and device": of(lambda m, x, y: (y, y.dtype, y.device)),
    "block": of(lambda m, x, y: (y, m.norm)),
    "function": of(lambda m, x, y: (y, torch.sin)),
    "member of an enum": of(lambda m, x, y: (y, Mode.FAR)),
    "slice": of(lambda m, x, y: (y, slice(0, x.shape[1])), calls=SIZES),
    "range": of(lambda m, x, y: (y, range(x.shape[1])), calls=SIZES),
    "boolean tensor": of(lambda m, x, y: (y > 0, y.argmax(-1), y.isnan().any())),
    "empty tensor": of(lambda m, x, y: (y, y[:, :0])),
    "complex tensor": of(lambda m, x, y: torch.fft.fft(y)),
    "array of NumPy": of(lambda m, x, y: (y, y.detach().numpy())),
    "transposed": of(lambda m, x, y: (y.mT, y.mT.stride())),
    "requires_grad": of(lambda m, x, y: (y, y.requires_grad, y.detach(), y.detach().requires_grad), grad=True),
    "detached": of(lambda m, x, y: y * x.data.mean() + x.detach().sum() * 0, grad=True),
    "without gradient": Case(lambda m, x: (m.attend(x), torch.no_grad()(m.attend)(x)), grad=True),
    "shape of an output that is never computed": of(lambda m, x, y: torch.empty(y.shape).shape),
}

# what a forward changes, and random numbers


def changed(do: Callable, has: Callable = dict, **facts: Any) -> Case:
    """A case of a forward that changes what it, its arguments or outputs hold: `do` of the block, tokens, attention."""

    def run(m, x):
        y = m.attend(x)
        result = do(m, x, y)
        return result if isinstance(result, Tensor) else y

    return Case(run, has=has, **facts)


def layer_drop(draw: Callable) -> Case:
    return Case(lambda m, x: x if draw() < 0.5 else m.attend(x), lambda m: [call(tokens()) for _ in range(3)])


def scaled(draw: Callable) -> Case:
    return Case(lambda m, x: m.attend(x, draw()), lambda m: [call(tokens()) for _ in range(3)])


def counted(m, x):
    m.n += 1
    return m.attend(x) * m.n


def cached(m, x):
    n = x.shape[1]
    if n not in m.a:
        m.a[n] = torch.arange(n, dtype=x.dtype)
    return m.attend(x) * m.a[n][None, :, None]


def warned(m, x):
    warnings.warn("a warning of the block", stacklevel=2)
    return m.attend(x)


def asserted(m, x):
    assert not torch.isnan(x).any(), "NaN"
    return m.attend(x)


def checked(m, x):
    torch._assert(x.shape[1] > 3, "short")
    return m.attend(x)


def finished(m, x):
    try:
        return m.attend(x)
    finally:
        LOG.append("end")


def buffer() -> dict:
    return dict(n=nn.Buffer(torch.ones((), dtype=W)))


EFFECTS = {
    "buffer +=": Case(counted, has=buffer),
    "buffer add_": changed(lambda m, x, y: y * m.n.add_(1), buffer),
    "buffer replaced": changed(lambda m, x, y: setattr(m, "n", m.n + 1) or y * m.n, buffer),
    "buffer by data": changed(lambda m, x, y: setattr(m.n, "data", m.n.data + 1) or y * m.n, buffer),
    "buffer by index": changed(lambda m, x, y: operator.setitem(m.n, ..., x.mean()) or y * m.n, buffer),
    "buffer by out": changed(lambda m, x, y: y * torch.add(m.n, 1, out=m.n), buffer),
    "buffer by copy_": changed(lambda m, x, y: y * m.n.copy_(x.mean()), buffer),
    "running mean": changed(lambda m, x, y: y * m.n.lerp_(x.mean(), 0.1), buffer, training=True),
    "batch norm": Case(
        lambda m, x: m.attend(m.bn(x.mT).mT), has=lambda: dict(bn=nn.BatchNorm1d(D, dtype=W)), training=True
    ),
    "counter": Case(counted, has=lambda: dict(n=0)),
    "list": changed(lambda m, x, y: m.a.append(y.mean()), lambda: dict(a=[])),
    "list that is popped": changed(lambda m, x, y: y * m.a.pop(), lambda: dict(a=[0.1 * i for i in range(99)])),
    "output is kept": changed(lambda m, x, y: setattr(m, "a", y), lambda: dict(a=None)),
    "input is kept": changed(lambda m, x, y: setattr(m, "a", x), lambda: dict(a=None)),
    "size is kept": Case(lambda m, x: setattr(m, "a", x.shape[1]) or m.attend(x), SIZES, lambda: dict(a=None)),
    "cache by size": Case(cached, SIZES, lambda: dict(a={})),
    "set": changed(lambda m, x, y: m.a.add(x.shape[1]), lambda: dict(a=set()), calls=SIZES),
    "deque": changed(lambda m, x, y: m.a.append(y.mean()), lambda: dict(a=collections.deque(maxlen=2))),
    "list in a list": changed(lambda m, x, y: m.a[0].append(1), lambda: dict(a=[[]])),
    "attribute of an object": changed(
        lambda m, x, y: setattr(m.a, "s", m.a.s + 1), lambda: dict(a=Options()), again=True
    ),
    "attribute of the class": changed(lambda m, x, y: setattr(type(m), "z", 1), cls=own()),
    "attribute deleted": changed(lambda m, x, y: hasattr(m, "z") and delattr(m, "z"), lambda: dict(z=1)),
    "attribute deleted by __dict__": changed(lambda m, x, y: m.__dict__.pop("z", None), lambda: dict(z=1)),
    "attribute by __dict__": changed(lambda m, x, y: vars(m).__setitem__("z", x.shape[1]), calls=SIZES),
    "attribute by setdefault": changed(lambda m, x, y: m.__dict__.setdefault("z", 1)),
    "default of a dictionary": changed(lambda m, x, y: m.a["z"], lambda: dict(a=collections.defaultdict(list))),
    "attribute of a module": changed(lambda m, x, y: setattr(m.norm, "calls", 1)),
    "training mode": changed(lambda m, x, y: m.norm.train()),
    "iterator": changed(lambda m, x, y: y * next(m.a), lambda: dict(a=itertools.count()), again=True),
    "generator": changed(lambda m, x, y: y * next(m.a), lambda: dict(a=(i for i in range(99))), again=True),
    "callback": changed(lambda m, x, y: m.a(1), lambda: dict(a=lambda value: LOG.append(value))),
    "global list": changed(lambda m, x, y: LOG.append(1) or y * len(LOG)),
    "global dictionary": changed(lambda m, x, y: NOTES.update(last=1)),
    "end of the forward": Case(finished),
    "warning": Case(warned),
    "log": changed(lambda m, x, y: logger.warning("a message of the block")),
    "print": changed(lambda m, x, y: print("a line of the block")),
    "attribute of the input": changed(lambda m, x, y: setattr(x, "tag", 3)),
    "attribute of the output": changed(lambda m, x, y: setattr(y, "tag", 3)),
    "requires_grad of the input": changed(lambda m, x, y: (x.requires_grad_(), None)[1], grad=True),
    "requires_grad of a weight": changed(lambda m, x, y: (m.qkv.weight.requires_grad_(False), None)[1], grad=True),
    "hook of the output": changed(lambda m, x, y: y.requires_grad and y.register_hook(lambda g: 2 * g), grad=True),
    "hook of the input": Case(
        lambda m, x: (x.register_hook(lambda g: 2 * g), m.attend(x))[1],
        lambda m: [call(tokens().requires_grad_())],
        grad=True,
    ),
    "retain_grad": changed(lambda m, x, y: y.requires_grad and y.retain_grad(), grad=True),
    "settings of PyTorch": Case(lambda m, x: (torch.set_grad_enabled(False), m.attend(x))[1], grad=True),
    "seed of PyTorch": changed(lambda m, x, y: torch.manual_seed(2)),
    "error of values": Case(asserted, lambda m: [call(tokens()), call(tokens() * math.nan)], raises=AssertionError),
    "error of sizes": Case(checked, lambda m: [call(tokens()), call(tokens(2, 2))], raises=AssertionError),
    "error of a size that PyTorch refuses": Case(
        lambda m, x: m.attend(x) + torch.ones(7, 1),
        lambda m: [call(tokens()), call(tokens(2, 3)), call(tokens(2, 1))],
        raises=RuntimeError,
    ),
    "branch of values": Case(
        lambda m, x: x if torch.isnan(x).any() else m.attend(x), lambda m: [call(tokens()), call(tokens() * math.nan)]
    ),
    # random numbers
    "random.random, dropping": layer_drop(lambda: random.random()),
    "random.random": scaled(lambda: random.random()),
    "random.uniform": scaled(lambda: random.uniform(1, 2)),
    "random.randint": scaled(lambda: random.randint(1, 5)),
    "random.choice": scaled(lambda: random.choice([0.1, 0.5, 0.9])),
    "random.Random": changed(lambda m, x, y: y * m.a.random(), lambda: dict(a=random.Random(1)), again=True),
    "NumPy, dropping": layer_drop(lambda: np.random.rand()),
    "NumPy": scaled(lambda: float(np.random.rand())),
    "NumPy's generator": changed(
        lambda m, x, y: y * m.a.random(), lambda: dict(a=np.random.default_rng(1)), again=True
    ),
    "torch.rand": scaled(lambda: torch.rand(1, dtype=W)),
    "torch.rand, dropping": layer_drop(lambda: torch.rand(())),
    "torch.randperm": Case(lambda m, x: m.attend(x)[:, torch.randperm(x.shape[1])]),
    "torch.bernoulli": Case(lambda m, x: m.attend(x) * torch.empty(2, 1, 1).bernoulli_(0.5)),
    "torch.Generator": changed(
        lambda m, x, y: y * torch.rand(1, generator=m.a), lambda: dict(a=torch.Generator().manual_seed(1)), again=True
    ),
    "seeded": Case(lambda m, x: (torch.manual_seed(3), m.attend(x, torch.rand(1, dtype=W)))[1]),
    "dropout": Case(lambda m, x: x + F.dropout(m.attend(F.dropout(x, 0.2, True)), 0.3, True)),
    "dropout with gradients": Case(lambda m, x: x + F.dropout(m.attend(F.dropout(x, 0.2, True)), 0.3, True), grad=True),
    "dropout in training": Case(
        lambda m, x: F.dropout(m.attend(x), 0.5) if m.training else m.attend(x), training=True, grad=True
    ),
}

STATEFUL = {  # what `optimize` leaves as it was, though the example's call changes it
    "counter": EFFECTS["counter"],
    "list": EFFECTS["list"],
    "output is kept": EFFECTS["output is kept"],
    "cache by size": EFFECTS["cache by size"],
    "random.random": EFFECTS["random.random"],
    "NumPy": EFFECTS["NumPy"],
    "torch.rand": EFFECTS["torch.rand"],
    "set": EFFECTS["set"],
    "deque": EFFECTS["deque"],
    "list in a list": EFFECTS["list in a list"],
    "list that is popped": EFFECTS["list that is popped"],
    "new attribute": changed(lambda m, x, y: setattr(m, "new", 1)),
    "attribute deleted": EFFECTS["attribute deleted"],
    "attribute of a module": EFFECTS["attribute of a module"],
    "buffer +=": EFFECTS["buffer +="],
    "buffer replaced": EFFECTS["buffer replaced"],
    "buffer by data": EFFECTS["buffer by data"],
    "new buffer": changed(lambda m, x, y: m.register_buffer("new", y)),
    "tensor": changed(lambda m, x, y: m.a.add_(1) and None, lambda: dict(a=TENSOR.clone())),
    "tensor in a list": changed(lambda m, x, y: m.a[0].add_(1) and None, lambda: dict(a=[TENSOR.clone()])),
    "batch norm": EFFECTS["batch norm"],
    "training mode": EFFECTS["training mode"],
    "dictionary of its own class": changed(lambda m, x, y: m.a.update(b=1), lambda: dict(a=Outputs())),
    "order of a dictionary": changed(lambda m, x, y: m.a.move_to_end("a"), lambda: dict(a=Outputs(a=1, b=2))),
}

# each is run on an argument and, so that a graph may hold it, on a copy of the argument
WRITES = (
    "x += torch.arange(16, dtype=x.dtype)",
    "x //= 0.3",
    "x %= 0.7",
    "x[..., ::2] = 3",
    "x.copy_(x.flip(-1) * x)",
    "x.view(-1)[::3].fill_(2)",
    "torch._foreach_cos_([x])",
    "torch.cos(x, out=x)",
    "x.data.cos_()",
    "x.mT.cos_()",
    "x.mul_(x)",
    "torch.Tensor.cos_(x)",
    "torch.ops.aten.cos_(x)",
    "x.transpose(1, 2)[:, 1] = 1",
    "nn.init.ones_(x)",
    "F.relu(x, inplace=True)",
    "F.dropout(x, 0.5, True, True)",
    "x.index_fill_(1, torch.tensor([0, 2]), 3.0)",
    "x.detach().cos_()",
    "F.gelu(x).cos_()",
    "x.zero_()",
    "x.masked_fill_(x > 0, 2.0)",
    "x.clamp_(0)",
    "x.swapaxes_(0, 0).cos_()",
    "x.resize_(x.shape).cos_()",
    "x.data = x * x",
    "x.set_(x * x)",
    # not in the review's scripts
    "x[0] += 1",
    "x[:, 0], x[:, 1] = x[:, 1].clone(), 0",
    "x[x > 0] = 2",
    "x.unbind(1)[0].zero_()",
    "x.chunk(2, dim=-1)[0].neg_()",
    "x.as_strided((3,), (1,)).fill_(2)",
    "x.view(torch.int64).zero_()",
    "x.numpy()[...] = 1",
    "x.untyped_storage().fill_(0)",
    "x.index_put_((torch.tensor([0]),), torch.ones((), dtype=x.dtype))",
    "x.scatter_(1, torch.zeros(2, 1, 16, dtype=torch.int64), 5.0)",
    "x.uniform_()",
    "x.squeeze().diagonal(dim1=0, dim2=1).fill_(4)",
    "x.unfold(1, 2, 2)[..., 0].neg_()",
    "torch.clamp(x, 0, out=x)",
    "torch.add(x, 1, out=x[:])",
    "torch.split(x, [3, 4], dim=1)[1].exp_()",
    "[t.neg_() for t in x.unbind()]",
    "torch._foreach_add_([x], 1.0)",
    "F.silu(x, inplace=True)",
    "nn.ReLU6(inplace=True)(x)",
    "x.set_(x.mT.contiguous().mT)",
    "x.requires_grad_(True)",
)
SILENT = ("F.gelu(x).cos_()", "x.set_(x.mT.contiguous().mT)", "x.requires_grad_(True)")  # those that change no value


def writing(statement: str, copies: bool) -> Case:
    """A case of a statement between a norm and the linear layer that reads it, on the argument or a copy of it."""
    lines = ("x = x.clone()" if copies else "pass", "h = m.norm(x)", statement, "return m.attend(x) + m.proj(h)")
    found: dict[str, Any] = {}
    exec(compile("def run(m, x):\n    " + "\n    ".join(lines), __file__, "exec"), globals(), found)
    return Case(found["run"])


# what Dynamo does not guard


@functools.lru_cache
def noise(n: int) -> Tensor:
    return torch.rand(n, dtype=W)


# what PyTorch's compiler does otherwise: it draws where a rate is 1, and dropout that is off gives new memory
COMPILED_OTHERWISE = {
    "training mode of one module",
    "dropout in a list, in training mode",
    "rate of a dropout in a list",
    "flattened view of the input",
}

LIMITS = {
    "attribute of a metaclass": by_attribute(
        lambda: type("Meta", (type,), dict(s=0.35))("Options", (), {}),
        lambda m: setattr(type(m.a), "s", 0.9),
        lambda a: a.s,
    ),
    "0.0 to -0.0": by_attribute(lambda: 0.0, to(-0.0), lambda a: 0.5 + math.copysign(0.25, a)),
    "zero with a sign": by_values(lambda m, x, s: m.attend(x, 0.5 + math.copysign(0.25, s)), 0.0, -0.0),
    "order of names": Case(
        lambda m, x, **named: m.attend(x, next(iter(named.values()))),
        lambda m: [call(tokens(), a=0.1, b=0.9), call(tokens(), b=0.9, a=0.1)],
    ),
    "generator that is returned": of(lambda m, x, y: (t for t in (y, x))),
    "lru_cache": Case(lambda m, x: m.attend(x) * noise(x.shape[-1])),
    "f-string of an integer": by_values(lambda m, x, n: m.attend(x, 0.9 if f"{n}" == "2" else 0.1), 2, 0, 1, 3),
    "order of a dictionary": by_attribute(
        lambda: collections.OrderedDict(a=0.35, b=0.9), lambda m: m.a.move_to_end("a"), lambda a: next(iter(a.values()))
    ),
    "attribute of a dictionary of its own class": by_attribute(
        lambda: having(Outputs(), s=0.35), lambda m: setattr(m.a, "s", 0.9), lambda a: a.s
    ),
}
