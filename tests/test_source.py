"""Tests of `engine.source`: any patch of what a class runs is seen, and what its file defines is none."""

import functools
import importlib
import sys
import types
from collections.abc import Callable

import pytest
import torch.nn.functional as F
from torch import nn

from fastvit_triton.engine.source import code_of

SOURCE = """
import functools
import torch
import torch.nn.functional as F
from torch import nn

def doubling(function):
    @functools.wraps(function)
    def inner(*inputs, **named):
        return 2 * function(*inputs, **named)
    return inner

@doubling
def decorated(x):
    return x + 1

def helper(x):
    return decorated(x)

def other(x):
    return x

class Base(nn.Module):
    def __init_subclass__(cls, **named):
        super().__init_subclass__(**named)
        forward = cls.forward
        @functools.wraps(forward)
        def around(self, *inputs):
            return forward(self, *inputs)
        cls.forward = around

    @property
    def rate(self):
        return 0.5

    def scaled(self, x):
        return self.rate * x

class Layer(Base):
    @doubling
    def norm(self, x):
        return F.layer_norm(x, x.shape[-1:])

    @staticmethod
    def shift(x):
        return x + 1

    @classmethod
    def power(cls, x):
        return x ** 2

    def forward(self, x):
        return helper(self.power(self.shift(self.scaled(self.norm(x)))))

class Child(Layer):
    pass

class Plain(nn.Module):
    def forward(self, x):
        return helper(x)
"""


@pytest.fixture
def module(tmp_path):
    """A module loaded from a file with SOURCE."""
    (tmp_path / "written_first.py").write_text(SOURCE)
    yield load(tmp_path / "written_first.py")
    sys.modules.pop("written_first")


def load(path) -> types.ModuleType:
    """The module in this file, as `sys.modules` has it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def patch(function: Callable) -> Callable:
    """A function around this one, with its names and `__wrapped__`."""
    return functools.wraps(function)(lambda *inputs, **named: function(*inputs, **named))


PATCHES = {  # what is patched → (where, name, its new value)
    "forward": lambda m: (m.Layer, "forward", patch(m.Layer.forward)),
    "forward of the file": lambda m: (m.Layer, "forward", m.doubling(m.Layer.forward)),
    "forward of another class": lambda m: (m.Layer, "forward", m.Plain.forward),
    "__call__": lambda m: (m.Layer, "__call__", lambda self, x: x),
    "__call__ of the base": lambda m: (m.Base, "__call__", lambda self, x: x),
    "method": lambda m: (m.Layer, "norm", lambda self, x: x),
    "method of the base": lambda m: (m.Base, "scaled", patch(m.Base.scaled)),
    "inherited method": lambda m: (m.Layer, "scaled", lambda self, x: x),
    "property": lambda m: (m.Base, "rate", property(lambda self: 0.25)),
    "method by a partial": lambda m: (m.Layer, "norm", functools.partialmethod(m.other)),
    "forward by a partial": lambda m: (m.Plain, "forward", functools.partialmethod(m.other)),
    "static method": lambda m: (m.Layer, "shift", staticmethod(lambda x: x)),
    "class method": lambda m: (m.Layer, "power", classmethod(lambda cls, x: x)),
    "function": lambda m: (m, "helper", patch(m.helper)),
    "function of the file": lambda m: (m, "helper", m.other),
    "function of a function": lambda m: (m, "decorated", lambda x: x),
    "PyTorch's function": lambda m: (F, "layer_norm", patch(F.layer_norm)),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", PATCHES)
def test_patches_are_seen(name, when, module, monkeypatch):
    """Oracle: by hand; a patch counts whether it is older or newer than the first look, and until it is undone."""
    if when == "after":
        assert code_of(module.Layer).why is None and code_of(module.Child).why is None
    with monkeypatch.context() as context:
        context.setattr(*PATCHES[name](module))
        for cls in (module.Plain,) if "forward by" in name else (module.Layer, module.Child):
            assert code_of(cls).why is not None
    assert code_of(module.Layer).why is None and code_of(module.Child).why is None


def test_a_wrapper_is_read_again_once_its_base_class_is_restored(module, monkeypatch):
    """Oracle: by hand; the wrapper is that of `Base.__init_subclass__`, which is replaced during the first look."""
    with monkeypatch.context() as context:
        context.setattr(module.Base, "__init_subclass__", classmethod(lambda cls: None))
        assert "Layer.forward" in code_of(module.Layer).why
    assert code_of(module.Layer).why is None


def test_what_a_file_defines_is_no_patch(module):
    """Oracle: by hand, decorators, wrappers of a base class, constants, and a class without code of its own."""
    assert code_of(module.Layer).why is None
    assert code_of(module.Child).base is module.Layer
    assert set(code_of(module.Layer).shadowed) == {"norm", "scaled", "shift", "power"}
    assert code_of(module.Plain).why is None
    for cls in (nn.Linear, nn.LayerNorm, nn.MultiheadAttention, nn.TransformerEncoderLayer):
        assert code_of(cls).why is None and code_of(cls).base is cls


def test_code_without_a_file_is_judged_by_its_names():
    """Oracle: a class made by `exec`, as in a notebook, has its own forward; one of another class is a patch."""
    scope = {"__name__": "written_nowhere"}
    exec("from torch import nn\nclass A(nn.Module):\n    def forward(self, x):\n        return x\n", scope)
    exec("class B(nn.Module):\n    def forward(self, x):\n        return -x\n", scope)
    assert code_of(scope["A"]).why is None
    scope["A"].forward = scope["B"].forward
    assert "A.forward" in code_of(scope["A"]).why


def test_code_compiled_elsewhere_under_a_known_name_is_a_patch(module):
    """Oracle: a class that pretends to be of the module, with other code."""
    exec("class Plain(nn.Module):\n    def forward(self, x):\n        return x", vars(module) | {}, scope := {})
    assert "Plain.forward is not the one in the file of written_first" in code_of(scope["Plain"]).why


def test_a_module_that_is_loaded_again_is_read_again(module, tmp_path):
    """Oracle: new source, whose classes are as it defines them."""
    assert code_of(module.Plain).why is None
    (tmp_path / "written_first.py").write_text(SOURCE.replace("return helper(x)", "return helper(2 * x)"))
    again = load(tmp_path / "written_first.py")
    assert again.Plain is not module.Plain and code_of(again.Plain).why is None


def test_methods_set_on_an_instance_are_named(module):
    """Oracle: `shadowed` names what a call looks up on the instance first."""
    layer = module.Layer()
    layer.scaled = lambda x: x
    assert set(code_of(module.Layer).shadowed) & vars(layer).keys() == {"scaled"}
