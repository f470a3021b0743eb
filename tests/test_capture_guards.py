"""Tests that captured blocks are never stale. Oracle: the block as written, with the same changes and calls.

The cases are those of capture_scenarios.py, most of them from a review. Whether a block is captured or refused does not
matter here, only that nothing shows a difference: outputs, gradients, and what calls write, print, log, warn and raise.
Dynamo does not guard what `LIMITS` has.
"""

import contextlib
import copy
import dataclasses
import enum
import gc
import io
import logging
import random
import types
import warnings
import weakref
from collections.abc import Iterator, Mapping

import capture_scenarios as scenarios
import numpy as np
import pytest
import torch
from capture_scenarios import Block, Case, call, tokens
from captured import without_inductor
from sampling import marked
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves

from fastvit_triton import optimize
from fastvit_triton.convert import captured
from fastvit_triton.kernels.backend import using_backend


class Handler(logging.Handler):
    """Keeps messages."""

    def emit(self, record):
        scenarios.LOG.append(record.getMessage())


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Runs the references, without captures of other tests, and with copies of the globals that cases change."""
    monkeypatch.setattr(captured, "_by_forward", weakref.WeakKeyDictionary())
    for name in scenarios.GLOBALS:
        monkeypatch.setattr(scenarios, name, copy.deepcopy(getattr(scenarios, name)))
    monkeypatch.setattr(scenarios.logger, "handlers", [Handler()])
    with using_backend("torch"):
        yield


def same(got, want):
    """Asserts that two values are alike, at any depth, within the rounding of float64."""
    assert type(got) is type(want)
    if isinstance(want, Tensor):
        assert_close(got, want, equal_nan=True)
        assert all(getattr(got, name) == getattr(want, name) for name in ("requires_grad", "is_leaf", "retains_grad"))
        same(*({name: fact for name, fact in vars(t).items() if name[0] != "_"} for t in (got, want)))
    elif isinstance(want, np.ndarray):
        same(torch.from_numpy(got), torch.from_numpy(want))
    elif isinstance(want, nn.Module):
        same(got.state_dict(), want.state_dict())
    elif isinstance(want, Mapping):
        assert [*got] == [*want]
        same([*got.values()], [*want.values()])
    elif hasattr(want, "__getitem__") and not isinstance(want, (str, bytes, type, np.generic)):
        assert len(got) == len(want)
        for i in range(len(want)):
            same(got[i], want[i])
    elif isinstance(want, types.GeneratorType):
        same([*got], [*want])
    elif dataclasses.is_dataclass(want) or isinstance(want, types.SimpleNamespace):
        same(vars(got), vars(want))
    elif type(want).__eq__ is not object.__eq__ or isinstance(want, (enum.Enum, torch.dtype)):
        assert got == want or (got != got and want != want)


def tensors(values):
    return [t for t in tree_leaves(values) if isinstance(t, Tensor)]


def outcome(block, args, named):
    """What a call shows: outputs or the error's class, gradients, memory that is shared, and what the call writes."""
    printed = io.StringIO()
    with warnings.catch_warnings(record=True) as warned, contextlib.redirect_stdout(printed):
        warnings.simplefilter("always")
        try:
            outputs = block(*args, **named)
        # any error of a block
        except Exception as error:
            outputs = type(error)
    given, made = tensors((args, named)), tensors(outputs)
    places = [[t.untyped_storage()._cdata == s.untyped_storage()._cdata for s in (*given, *made)] for t in made]
    total = sum(t.abs().square().sum() for t in made if t.requires_grad)
    gradients = None
    if isinstance(total, Tensor) and total.requires_grad:
        leaves = [t for t in (*given, *block.parameters()) if t.requires_grad]
        gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    said = [str(each.message) for each in warned]
    return outputs, gradients, places, (args, named), printed.getvalue(), said, torch.is_grad_enabled()


def facts(block):
    """What a block and its modules hold, besides functions, iterators, and what PyTorch and this package keep."""
    held = {
        f"{path}.{name}": value
        for path, module in block.named_modules()
        for name, value in vars(module).items()
        if name[0] != "_" and not callable(value) and not isinstance(value, Iterator)
    }
    own = {f"class {name}": value for name, value in vars(type(block)).items() if type(value) in (int, float)}
    return held | own | dict(block.named_buffers()) | dict(block.named_parameters())


def seed():
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


def streams():
    """The states of random numbers."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def run(block, case):
    """What two rounds of the calls of a case show and leave; the second one may take what the first one captured."""
    scenarios.LOG.clear()
    scenarios.NOTES.clear()
    seed()
    shown = []
    for _ in range(2):
        for args, named in case.calls(block):
            with torch.set_grad_enabled(case.grad):
                shown.append(outcome(block, args, named))
    return shown, [*scenarios.LOG], dict(scenarios.NOTES), facts(block), streams()


def outputs(result):
    return [shown[0] for shown in result[0]]


def optimized(block, case, compiles=False):
    """The block of a case after `optimize`, with the first call as its example."""
    args, named = case.calls(block)[0]
    optimize(block, compile=compiles, example=named | dict(zip("x", args, strict=False)) if named else args)
    why = captured.why_none(block)
    assert captured.captures_of(block) or not any(
        word in why for word in ("rewriting failed", "code was changed", "does not reach", "nothing to fuse")
    )
    for name, value in case.has().items() if case.again else ():
        setattr(block, name, value)
    return block


def check(case, patch, varies=False, without=None, compiles=False):
    """Compares a block with itself optimised; outputs may have to vary, or to differ from those of another forward."""
    original, block = case.block(), optimized(case.block(), case, compiles)
    want = run(original, case)
    same(run(block, case), want)
    raised = {y for y in outputs(want) if isinstance(y, type) and issubclass(y, Exception)}
    assert raised == ({case.raises} if case.raises else set())
    if case.change is not None:
        for each in (original, block):
            case.change(each, patch)
        changed = run(original, case)
        same(run(block, case), changed)
        differ(outputs(changed), outputs(want))
    if varies:
        differ(outputs(want), outputs(want)[:1] * len(outputs(want)))
    if without is not None:
        differ(run(case.block(), case), run(case._replace(run=without).block(), case))


def differ(one, other):
    """Asserts that two values are not the same: that a test can fail."""
    with pytest.raises(AssertionError):
        same(one, other)


@pytest.mark.few(1, one_in=4)
@pytest.mark.parametrize("name", scenarios.STATES)
def test_changes_of_state(name, monkeypatch):
    """Calls before and after a change of what the block reads."""
    check(scenarios.STATES[name], monkeypatch)


@pytest.mark.few(1, one_in=4)
@pytest.mark.parametrize("name", scenarios.COMPILING)
def test_code_that_asks_whether_it_is_compiled(name, monkeypatch):
    """It is told that it is not, as in an eager call."""
    check(Case(scenarios.COMPILING[name]), monkeypatch)


@pytest.mark.few(1, one_in=4)
@pytest.mark.parametrize("name", scenarios.SETTINGS)
def test_settings(name):
    """Calls before, within and after a context that changes what the block reads."""
    is_set, context = scenarios.SETTINGS[name]
    case = Case(lambda m, x: m.attend(x, scenarios.pick(is_set())))
    original, block = case.block(), optimized(case.block(), case)
    shown = []
    for inside in (False, True, False):
        with torch.no_grad(), context() if inside else contextlib.nullcontext():
            want, got = ([outcome(each, (tokens(),), {}) for _ in range(2)] for each in (original, block))
        same(got, want)
        shown.append(want[0][0])
    differ(shown[0], shown[1])


@pytest.mark.parametrize("name", marked(scenarios.INTEGERS, pytest.mark.full(one_in=4), lambda name: name != "truth"))
def test_integer_arguments(name, monkeypatch):
    """Calls with integers, of which the first one is captured."""
    forward, example, *has = scenarios.INTEGERS[name]
    case = Case(forward, lambda m: [call(tokens(), n) for n in (example, 0, 1, 2, 3)], *has)
    check(case, monkeypatch, varies=True)


@pytest.mark.few(1, one_in=4)
@pytest.mark.parametrize("name", scenarios.ARGUMENTS)
def test_arguments(name, monkeypatch):
    """Calls with arguments, and facts of tensors, of which the first ones are captured."""
    check(scenarios.ARGUMENTS[name], monkeypatch, varies=True)


@pytest.mark.few(1, one_in=4)
@pytest.mark.parametrize("name", scenarios.OUTPUTS)
def test_outputs(name, monkeypatch):
    """Outputs of any structure, with the memory that they share."""
    check(scenarios.OUTPUTS[name], monkeypatch)


@pytest.mark.few(1, one_in=4)
@pytest.mark.filterwarnings("ignore:a warning of the block")
@pytest.mark.parametrize("name", scenarios.EFFECTS)
def test_effects(name, monkeypatch):
    """What a forward changes besides its outputs, and the random numbers that it draws."""
    check(scenarios.EFFECTS[name], monkeypatch, without=Block.attend)


@pytest.mark.few(1, one_in=4)
@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("statement", scenarios.WRITES)
def test_writes(statement, copies, monkeypatch):
    """A statement that writes between a norm and the linear layer that reads it."""
    without = None if statement in scenarios.SILENT else scenarios.writing("pass", copies).run
    check(scenarios.writing(statement, copies), monkeypatch, without=without)


CASES = scenarios.STATES | scenarios.ARGUMENTS | scenarios.OUTPUTS | scenarios.EFFECTS
CASES |= {text: scenarios.writing(text, True) for text in scenarios.WRITES}
CASES = {name: case for name, case in CASES.items() if name not in scenarios.COMPILED_OTHERWISE}


@pytest.mark.full(one_in=4)
@pytest.mark.filterwarnings("ignore:a warning of the block")
@pytest.mark.parametrize("name", CASES)
def test_regions(name, monkeypatch):
    """The same cases with compiled graphs, which run operator by operator here."""
    without_inductor(monkeypatch)
    check(CASES[name], monkeypatch, compiles=True)


@pytest.mark.full
@pytest.mark.parametrize("name", scenarios.LIMITS)
@pytest.mark.xfail(strict=True, reason="Dynamo does not guard it", raises=AssertionError)
def test_limits(name, monkeypatch):
    """What Dynamo reads and does not guard."""
    check(scenarios.LIMITS[name], monkeypatch)


@pytest.mark.few(1, one_in=4)
@pytest.mark.parametrize("name", scenarios.STATEFUL)
def test_optimize_leaves_state_as_it_was(name):
    """Oracle: attributes of another block, and the random numbers' states before."""
    case = scenarios.STATEFUL[name]
    original, block = case.block(), case.block()
    seed()
    before = streams()
    optimized(block, case)
    same(facts(block), facts(original))
    same(streams(), before)


@pytest.mark.few(1, one_in=4)
@pytest.mark.parametrize("limit", [1, captured.MAX_CAPTURES])
def test_captures_of_a_changing_attribute_are_bounded(limit, monkeypatch):
    """At most MAX_CAPTURES of a block in a mode, after which it runs as written; none outlives the block."""
    monkeypatch.setattr(captured, "MAX_CAPTURES", limit)
    case = Case(lambda m, x: m.attend(x, m.s), has=lambda: dict(s=0.1))
    original, block = case.block(), optimized(case.block(), case)
    for step in range(limit + 2):
        original.s = block.s = 0.1 + step
        for grad in (False, True) if limit > 1 else (False,):
            with torch.set_grad_enabled(grad):
                same(outcome(block, (tokens(),), {}), outcome(original, (tokens(),), {}))
    made = captured.captures_of(block)
    assert {len(each.found) for each in captured._captures[block].values()} == {limit}
    references = [weakref.ref(each) for each in made]
    del made, block
    gc.collect()
    assert references and not any(each() for each in references)
