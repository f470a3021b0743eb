"""Foreign models after `optimize`: the same numbers, gradients, keys and habits, and the report of what was done."""

import copy

import pytest
import torch
from foreign import MODELS, build, inputs, outputs
from interpreter import interpreting
from torch.utils._python_dispatch import TorchDispatchMode

from fastvit_triton import optimize
from fastvit_triton.kernels import op


@pytest.fixture
def references():
    """The fused forwards run on PyTorch, as FASTVIT_TRITON_BACKEND=torch asks."""
    op.set_backend("torch")
    yield
    op.set_backend(None)


class Recorder(TorchDispatchMode):
    """The names of all operators that run, our own by their last part."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, function, kinds, arguments=(), named=None):
        self.ops.append(str(function.name()))
        return function(*arguments, **named or {})

    @property
    def ours(self):
        return [name.split("::")[1] for name in self.ops if name.startswith("fastvit_triton::")]


def results(model, given):
    """Outputs and every gradient in float64, for the same random cotangent each time."""
    y = outputs(model, given)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(y.dtype)
    learning = {n: p for n, p in model.named_parameters() if p.requires_grad and p.numel()}
    grads = torch.autograd.grad((y * weights).sum(), list(learning.values()), allow_unused=True)
    found = {n: g.double() for n, g in zip(learning, grads, strict=True) if g is not None}
    return {"output": y.detach().double()} | found


def assert_within_budget(got, baseline, truth, dtype):
    """Error ≤ 2 · (PyTorch's own error in this dtype + one rounding), output and every gradient.

    Some gradients cancel (key biases have none in exact arithmetic), so a gradient's rounding is that of the model's
    largest one.
    """
    largest = max(float(g.norm()) for n, g in truth.items() if n != "output")
    assert got.keys() == truth.keys()
    for name, want in truth.items():
        size = float(want.norm()) if name == "output" else largest
        allowed = 2 * (float((baseline[name] - want).norm()) + torch.finfo(dtype).eps * size)
        error = float((got[name] - want).norm())
        assert got[name].isfinite().all() and error <= allowed, (name, error, allowed)


def twins(name, train):
    """(original in float64, in float32, a second one to optimise) with the same weights, and their inputs."""
    truth = build(name).train(train)
    plain = copy.deepcopy(truth).float()
    truth.load_state_dict({k: v.double() if v.is_floating_point() else v for k, v in plain.state_dict().items()})
    given = inputs(name)
    if isinstance(given, dict):
        return truth, plain, copy.deepcopy(plain), given, {k: single(v) for k, v in given.items()}
    return truth, plain, copy.deepcopy(plain), given.float().double(), given.float()


def single(t):
    return t.float() if t.is_floating_point() else t


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", MODELS)
def test_references_give_the_originals_numbers(name, train, references):
    """Oracle: the untouched model; truth in float64. The fused forwards must have run."""
    truth, plain, model, exact, given = twins(name, train)
    assert optimize(model).fused
    assert_within_budget(results(model, given), results(plain, given), results(truth, exact), torch.float32)


@pytest.mark.parametrize("name", MODELS)
def test_kernels_give_the_originals_numbers(name):
    """The same through the Triton kernels, in the interpreter."""
    truth, plain, model, exact, given = twins(name, True)
    optimize(model)
    baseline, want = results(plain, given), results(truth, exact)
    with interpreting(), Recorder() as run:
        got = results(model, given)
    assert run.ours
    assert_within_budget(got, baseline, want, torch.float32)
