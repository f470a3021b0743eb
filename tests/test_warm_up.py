"""Tests of warm-up: it compiles what a call launches. The driver is a stand-in; Triton compiles for an H200."""

import os
import sys
from pathlib import Path

import pytest
import torch
from commands import run_python
from torch import nn
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from benchmarks.no_device import Driver, no_device
from fastvit_triton import create_model, freeze, warmup
from fastvit_triton.kernels import compiling, launch, layer_norm
from fastvit_triton.kernels.compiling import Collector
from fastvit_triton.kernels.tile import TRITON
from fastvit_triton.measure.variants import Case, Variant, compile_kernels

pytestmark = pytest.mark.fast

SMALL = dict(img_size=16, patch_size=8, depth=2, embed_dim=32, num_heads=2, num_classes=3)


def small(train=False, **options):
    torch.manual_seed(0)
    model = create_model("vit_tiny_patch16_224", **SMALL | options).to(torch.bfloat16).train(train)
    return model, torch.randn(2, 3, 16, 16).to(torch.bfloat16)


def step(model, x, train):
    with torch.set_grad_enabled(train):
        y = model(x)
        if train:
            torch.autograd.grad(y, list(model.parameters()), torch.ones_like(y))


@pytest.mark.full
@pytest.mark.skipif(TRITON is None, reason="the direct launches of this release of Triton are not known")
def test_a_call_after_warm_up_compiles_nothing():
    """Oracle: the number of binaries that the first call after the warm-up compiles: none, in a process of its own."""
    code = "import test_warm_up as t; t.check_warm_up(False); t.check_warm_up(True)"
    root, here = Path(__file__).parents[1], Path(__file__).parent
    run_python("-c", code, PYTHONPATH=os.pathsep.join([str(here), str(root), *filter(None, sys.path)]))


def check_warm_up(train):
    """Asserts that a call after the warm-up compiles nothing, and that progress counts all."""
    model, x = small(train)
    with no_device(), pytest.MonkeyPatch.context() as patch:
        made, compile_one = [], JITFunction._do_compile
        patch.setattr(JITFunction, "_do_compile", lambda *given: made.append(1) or compile_one(*given))
        counted = []
        warmed = warmup(model, x, train, lambda done, total: counted.append((done, total)))
        assert warmed.kernels == len(made) == len(counted) and counted[-1] == (len(made),) * 2 and made
        step(model, x, train)
        assert len(made) == warmed.kernels
        assert warmup(model, (x,), train).kernels == warmup(model, dict(image=x), train).kernels == warmed.kernels
        assert len(made) == warmed.kernels


def test_warm_up_leaves_the_model_unchanged():
    """Oracle: the values before: buffers, random state, gradients, weights and folds."""
    model, x = small(True, proj_drop_rate=0.5)
    model.register_buffer("count", torch.zeros(()))
    model.register_forward_pre_hook(lambda module, inputs: module.count.add_(1) and None)
    before, random = {n: t.clone() for n, t in model.state_dict().items()}, torch.get_rng_state()
    with no_device():
        warmup(model, x, train=True)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random) and all(p.grad is None for p in model.parameters())


def test_a_frozen_model_folds_after_a_warmup():
    """Oracle: the launched kernels: warm-up omits launches, folds included, so the next call must fold."""
    model, x = small()
    freeze(model)
    with no_device(), launch.overriding({"fold.border": dict(ROWS_PER_OUTPUT=0)}):
        warmup(model, x)
        names = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "run", lambda kernel, *rest: names.append(kernel.__name__))
            for _ in range(2):
                with torch.no_grad():
                    model(x)
    assert names.count("_fold_kernel") == 2  # once per block


class Replacing(nn.Module):
    """A module that replaces a buffer and has buffers that cannot be written."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("wide", torch.zeros(1).expand(4))
        with torch.inference_mode():
            self.register_buffer("final", torch.ones(2))

    def forward(self, x):
        self.mean = self.mean + x.mean()
        return x + self.final


def test_buffers_are_the_same_tensors_with_the_same_values():
    """Oracle: the tensors and values before."""
    model = Replacing().requires_grad_(False)
    held = dict(model.named_buffers())
    for train in (False, True):  # no parameter requires gradients, so there is no backward pass
        assert warmup(model, torch.ones(2), train).kernels == 0
        assert all(b is held[name] for name, b in model.named_buffers()) and model.mean == 0


def test_other_threads_launch_normally():
    """Oracle: launches that reach the driver from another thread, where nothing is collected."""
    import threading

    model, x = small()
    log = []
    with no_device(lambda *given: log.append(1)):
        with torch.no_grad():
            model(x)
        usual = len(log)
        thread = threading.Thread(target=step, args=(model, x, False))
        with Collector() as found, torch.no_grad():
            thread.start()
            thread.join()
            model(x)
        assert len(log) == 2 * usual and 0 < len(found.launches) <= usual


def test_binaries_equal_those_of_real_launches():
    """Oracle: Triton's cache, after Triton compiles a recorded launch: one entry, for sm_90."""
    model, x = small()
    before, kernels = driver._active, set()
    driver.set_active(Driver())
    try:
        with launch.targeting("sm_90"), Collector() as found, torch.no_grad():
            model(x)
        kernels = {one.kernel for one in found.launches}
        with compiling.compiling(found.launches[:1], threads=1) as futures:
            binary = futures[0].result()
        assert binary.metadata.target.arch == 90 and binary.asm["cubin"]
    finally:
        driver._active = before
        for kernel in kernels:
            kernel.device_caches.pop(-1, None)


def test_without_a_gpu_nothing_is_compiled():
    """Oracle: the result and the error sentences."""
    assert warmup(*small()).kernels == 0
    with pytest.raises(TypeError, match="example is list"):
        warmup(small()[0], [torch.ones(1)])
    with pytest.raises(TypeError, match="model is int"):
        warmup(3, torch.ones(1))


def test_compile_errors_are_raised(monkeypatch):
    """Oracle: the compiler's error."""
    model, x = small()
    with no_device():
        monkeypatch.setattr(compiling, "_compile", lambda one: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            warmup(model, x)


def test_benchmarks_compile_ahead():
    """Oracle: layer_norm's kernels are compiled, and variants that are compiled or captured are not called."""
    op = layer_norm.OP
    inputs = op.inputs(next(iter(op.cases.values())), torch.bfloat16, "cpu")
    calls = dict(eager=op.reference, ours=op.run) | {"torch.compile": None, "ours, CUDA graph": None}
    made = [Variant(name, None, call) for name, call in calls.items()]
    case = Case("layer_norm", torch.bfloat16, lambda seed: inputs, made, op.reference)
    with no_device():
        assert [compile_kernels(case, inputs, phase) for phase in ("forward", "training")] == [1, 3]


class Plain(nn.Module):
    def forward(self, x):
        return x


def test_a_model_without_kernels():
    """Oracle: no kernel is compiled."""
    with no_device():
        assert warmup(Plain(), torch.ones(2)).kernels == 0
