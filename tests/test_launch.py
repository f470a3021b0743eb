"""Tests of direct launches. Oracle: JITFunction.run, which must pass the same arguments to the driver.

The driver is a stand-in, so nothing is compiled or run (see benchmarks/no_device.py).
"""

import contextlib
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton.language as tl
from budget import leaves
from triton import jit, knobs
from triton.backends.nvidia import driver as nvidia
from triton.compiler.compiler import LazyDict
from triton.runtime.jit import JITFunction

from benchmarks.launch_recorder import record, recording, specialization
from benchmarks.no_device import Driver, no_device
from fastvit_triton import create_model
from fastvit_triton.kernels import (
    OPS,
    attention,
    attention_launch,
    attention_qkv,
    depthwise,
    descriptor,
    launch,
    layer_norm,
    settings,
)
from fastvit_triton.kernels.tile import TRITON, __version__

EVERY = [pytest.param(op, case, id=f"{op.name}-{name}") for op in OPS for name, case in (op.cases | op.ragged).items()]
OLDER = Path("/tmp/triton36")  # `pip install --target /tmp/triton36 --no-deps triton==3.6.0`


class Log:
    """The driver's calls: (grid, function, metadata, arguments, whether Triton's launch hooks were passed)."""

    def __init__(self):
        self.calls = []

    def __call__(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *arguments):
        for hook in (enter, leave):
            if hook is not None:  # like Triton's launcher
                hook(launch_metadata)
        self.calls.append(((x, y, z), function, metadata, arguments, enter is not None))

    def last(self, by_triton):
        """The last call, which must have been made by Triton or directly, as given."""
        *call, hooked = self.calls[-1]
        assert hooked == by_triton, "launched by the other path"
        return call


@contextlib.contextmanager
def compared():
    """In this context every launch is made by Triton and directly, and both must pass the same arguments.

    Yields the log of the launches and the list of the kernels launched.
    """
    log, kernels = Log(), []

    def both(kernel, grid, arguments, fixed):
        assert fixed["enable_fp_fusion"] is True, kernel.__name__  # whose default differs between releases
        by_triton(kernel, grid, arguments, fixed)
        grid_of, function, metadata, passed = log.last(by_triton=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "run", by_triton)
            launch.launch(kernel, grid, *arguments, **fixed)  # the first launch with a key is made by Triton
            launch.launch(kernel, grid, *arguments, **fixed)
        again = log.last(by_triton=False)
        assert [grid_of, function, metadata] == again[:3], kernel.__name__
        assert len(passed) == len(again[3])
        assert all(a is b or (type(a) is type(b) and a == b) for a, b in zip(passed, again[3], strict=True))
        kernels.append(kernel)

    by_triton = launch.run
    with no_device(log), settings.forcing("fused"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "run", both)
        yield log, kernels


def shifted(t):
    """A copy of the tensor that starts one element after an address divisible by 16."""
    memory = torch.empty(t.numel() + 17, dtype=t.dtype)
    start = next(i for i in range(17) if memory[i:].data_ptr() % 16)
    return memory[start : start + t.numel()].view(t.shape).copy_(t)


def strided(t):
    """A copy of the tensor whose axes are reversed in memory."""
    return t.permute(*reversed(range(t.dim()))).contiguous().permute(*reversed(range(t.dim())))


def far(t):
    """The tensor with a new first axis of size 1 and stride 2³¹ + 1; no memory is added."""
    return t if t.shape[:1] != (1,) else t.as_strided(t.shape, (2**31 + 1, *t.stride()[1:]))


def moved(value, layout):
    """The argument with every tensor in another layout."""
    if isinstance(value, torch.Tensor):
        return layout(value.detach()).requires_grad_(value.requires_grad)
    if isinstance(value, tuple):
        made = (moved(v, layout) for v in value)
        return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
    return value


@pytest.mark.few(73)
@pytest.mark.parametrize("op, case", EVERY)
def test_both_launch_paths_pass_the_same_arguments(op, case):
    """Oracle: Triton's launches, for inference, forward and backward in four layouts, one after the other."""
    with compared() as (log, kernels):
        for layout in (torch.clone, shifted, strided, far):
            arguments = {n: moved(v, layout) for n, v in op.inputs(case, torch.bfloat16, "cpu").items()}
            with torch.no_grad():
                op.run(**arguments)
            outputs = [t for t in leaves(op.run(**arguments)) if t.requires_grad]
            inputs = [t for t in leaves(tuple(arguments.values())) if t.requires_grad]
            torch.autograd.grad(outputs, inputs, [torch.empty_like(t) for t in outputs], allow_unused=True)
    assert len(log.calls) == 3 * len(kernels), "a launch that launch.run did not make"
    assert kernels or "empty" in str(case) or not any(t.numel() for t in outputs)


def numbers(launches):
    """Everything in a launch except its tensors."""
    held = bool | int | float | str | None
    for one in launches:
        tuples = {n: v for n, v in one.values.items() if isinstance(v, tuple)}
        yield one.name, one.grid, {n: v for n, v in one.values.items() if isinstance(v, held)} | tuples, one.options


@pytest.mark.full
def test_cached_launches_equal_uncached_launches():
    """Oracle: the same calls without attention's cache of launches, which is keyed by the layout of its tensors."""

    def every(remembering):
        for op in (attention.OP, attention.OP_VARLEN, attention_qkv.OP):
            for case, layout, dtype, arch in itertools.product(
                (op.cases | op.ragged).values(),
                (torch.clone, strided),
                (torch.float16, torch.float32),
                ("cpu", "sm_90"),
            ):
                arguments = {n: moved(v, layout) for n, v in op.inputs(case, dtype, "cpu").items()}
                for precision in ("highest", "high"):
                    if not remembering:
                        attention_launch._prepared.clear()
                    torch.set_float32_matmul_precision(precision)
                    phases = record(arch, op.run, **arguments)
                    yield {phase: list(numbers(launches)) for phase, launches in phases.items()}

    precision = torch.get_float32_matmul_precision()
    try:
        remembered, fresh = list(every(True)), list(every(False))
    finally:
        torch.set_float32_matmul_precision(precision)
    assert remembered == fresh and len(fresh) > 100


def stats(M=3, x=None, grid=(2,), **options):
    """Launches a small kernel on the rows x."""
    x = torch.empty(M if M < 100 else 3, 8) if x is None else x
    mean, rstd = torch.empty(2, 3)
    fixed = dict(K=8, RMS=False, BLOCK_M=128, BLOCK_K=8, num_warps=1, enable_fp_fusion=True) | options
    launch.launch(layer_norm._stats_kernel, grid, x, mean, rstd, M, 1e-6, **fixed)


@pytest.mark.fast
def test_numbers_of_64_bits_and_large_tensors():
    """Oracle: sizes on both sides of 2³¹, divisible by 16 or not, for a tensor of 2³¹ elements that repeats one row."""
    with compared() as (log, _):
        functions = []
        for M in (1, 15, 16, 2**31 - 1, 2**31, 2**31 + 16):
            stats(M, torch.empty(1, 8).expand(2**28, 8))
            functions.append(log.calls[-1][1])
    assert functions == [1, 1, 1, 1, 2, 2]  # by width only: Triton does not specialise on the number of rows


@pytest.mark.fast
def test_grids_of_one_to_three_axes():
    """Oracle: the three sizes passed to the driver."""
    with compared() as (log, _):
        for grid in ((2,), (3, 4), (5, 6, 7)):
            stats(grid=grid)
    assert {grid for grid, *_ in log.calls} == {(2, 1, 1), (3, 4, 1), (5, 6, 7)}


@pytest.fixture
def log():
    """The log of launches made once, as `launch.run` decides."""
    found = Log()
    with no_device(found):
        stats()
        stats()
        yield found


@pytest.mark.fast
def test_second_launch_is_direct(log):
    """Oracle: the launch hooks, which Triton passes to the driver and a direct launch does not."""
    assert [hooked for *_, hooked in log.calls] == [True, False]


@pytest.mark.fast
def test_hooks_are_called(log):
    """Oracle: hooks of all launches and of one kernel are called once per launch, until they are removed."""
    seen, kernel = [], layer_norm._stats_kernel
    chains = [(c.add, c.remove) for c in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)]
    for number, (add, remove) in enumerate([*chains, (kernel.add_pre_run_hook, kernel.pre_run_hooks.remove)], 1):
        add(hook := lambda *arguments, **named: seen.append(arguments))
        try:
            stats()
            log.last(by_triton=True)
        finally:
            remove(hook)
        stats()
        log.last(by_triton=False)
        assert len(seen) == number


@pytest.mark.fast
def test_knobs_choose_another_binary(log):
    """Oracle: `debug`, instrumentation and launch options each give another binary."""
    first = log.calls[-1][1]
    with knobs.runtime.scope():
        knobs.runtime.debug = True
        stats()
        stats()
        assert log.last(by_triton=False)[1] != first
    stats()
    assert log.last(by_triton=False)[1] == first
    stats(num_warps=2)
    assert log.last(by_triton=True)[1] != first


@pytest.mark.fast
def test_a_replaced_run_is_called(log, monkeypatch):
    """Oracle: a patch of JITFunction.run, as in profilers, sees every launch."""
    seen = []
    monkeypatch.setattr(JITFunction, "run", lambda self, *arguments, **named: seen.append(self))
    stats()
    assert seen == [layer_norm._stats_kernel]


@pytest.mark.fast
def test_another_release_is_launched_by_triton(log, monkeypatch):
    """Oracle: Triton's launch, for a release whose launcher is unknown."""
    monkeypatch.setattr(launch, "TRITON", None)
    stats()
    log.last(by_triton=True)


SCALE = 3


@jit
def _reads_a_global(x_ptr, N: tl.constexpr):
    tl.store(x_ptr, N * SCALE)


@pytest.mark.fast
def test_a_kernel_that_reads_globals_is_launched_by_triton():
    """Oracle: Triton's launch, which compares the values of globals; our kernels read none."""
    log = Log()
    with no_device(log):
        for _ in range(2):
            launch.launch(_reads_a_global, (1,), torch.empty(1), N=1, enable_fp_fusion=True)
            log.last(by_triton=True)
    kernels = {v for op in OPS for v in vars(sys.modules[op.run.__module__]).values() if isinstance(v, JITFunction)}
    assert [k.cache_key and k.used_global_vals for k in kernels] == [{}] * len(kernels)


@pytest.mark.fast
def test_launches_on_the_device_of_the_tensors(monkeypatch):
    """Oracle: the current device changes during a launch on another device, and each device has its own binary.

    CPU tensors are left to Triton.
    """
    entered, log = [], Log()

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            entered.append(self.index)
            self.before, TRITON.driver._active.device = TRITON.driver._active.device, self.index

        def __exit__(self, *error):
            TRITON.driver._active.device = self.before

    class Elsewhere(torch.Tensor):
        index = 1

        def get_device(self):
            return self.index

    monkeypatch.setattr(torch.cuda, "device", Device)
    with no_device(log, device=0):
        for _ in range(3):
            stats(x=torch.empty(3, 8).as_subclass(Elsewhere))
        assert set(entered) == {1} and TRITON.driver._active.device == 0
        Elsewhere.index = 0
        for _ in range(2):
            stats(x=torch.empty(3, 8).as_subclass(Elsewhere))
        stats()
        stats()
    assert [hooked for *_, hooked in log.calls] == [True, False, False, True, False, True, True]
    assert [function for _, function, *_ in log.calls] == [1, 1, 1, 2, 2, 2, 2]


def test_tokens_after_a_class_token_are_not_copied():
    """Oracle: the address and strides that the kernel is given are those of the view."""
    tokens = torch.randn(2, 1 + 15, 8, requires_grad=True)
    x = tokens[:, 1:].unflatten(1, (3, 5))
    with recording("sm_90") as launches:
        depthwise.depthwise(x, torch.randn(8, 1, 3, 3), residual=True)
    (found,) = launches
    given = found.values
    assert given["x_ptr"].data_ptr() == given["residual_ptr"].data_ptr() == x.data_ptr()
    assert given["x_strides"] == given["residual_strides"] == x.stride()[:3]


@pytest.mark.few(1)
@pytest.mark.parametrize("phase, most", [("inference", 12), ("training", 24)])
def test_few_kernels_over_all_batch_sizes(phase, most):
    """Oracle: the keys by which Triton's binder chooses binaries, for ViT-B at batch sizes 1 to 32."""
    model, found = create_model("vit_base_patch16_224", depth=2).to(torch.bfloat16), set()
    model.train(phase == "training")
    for batch in range(1, 33):
        with recording("sm_90") as launches, torch.set_grad_enabled(phase == "training"):
            y = model(torch.empty(batch, 3, 224, 224, dtype=torch.bfloat16))
            if phase == "training":
                y.backward(torch.empty_like(y))
        found |= {(x.name, *specialization(x, "sm_90")) for x in launches}
    assert len(found) <= most, sorted(name for name, *_ in found)


@pytest.mark.releases
def test_older_triton():
    """Oracle: this file under triton 3.6.0, whose launcher takes other arguments."""
    path = os.pathsep.join((str(OLDER), str(Path(__file__).parent.parent)))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:benchmark", __file__]
    done = subprocess.run(command, env=dict(os.environ, PYTHONPATH=path), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.fixture
def boxed(monkeypatch):
    """(a function that launches attention with descriptors, what the driver is passed, what is encoded).

    Triton's launcher is that of this release, except for what needs a GPU; an encoding is what is encoded.
    """
    passed, encoded = [], []
    kernel = attention._fwd_tma_kernel
    signature = {name: "tensordesc<bf16[1, 64, 64]>" if name.endswith("_desc") else "i32" for name in kernel.arg_names}
    signature |= dict.fromkeys(("k1_desc", "k2_desc", "v1_desc", "v2_desc"), "constexpr")  # None
    meta = dict(swizzle=3, elem_size=2, elem_type=10, block_size=[1, 64, 64], fp4_padded=False)
    run = nvidia.CudaLauncher.__new__(nvidia.CudaLauncher)
    run.launch = nvidia.wrap_handle_tensordesc(lambda *given: passed.append(given), signature, [meta] * 4)
    sizes = ("global_scratch_size", "global_scratch_align", "profile_scratch_size", "profile_scratch_align")
    more = dict(launch_cooperative_grid=False, launch_pdl=True)
    more |= {} if __version__.startswith("3.6.") else dict(arg_annotations="annotated", kernel_signature=b"")
    vars(run).update(dict.fromkeys(sizes, 0), num_ctas=1, gsan_enabled=False, **more)
    for name in ("fill_tma_descriptor", "fill_tma_descriptor_tiled"):  # of triton 3.6, and later
        monkeypatch.setattr(Driver.utils, name, lambda *what: encoded.append(what) or what, raising=False)
    monkeypatch.setattr(descriptor, "_encoded", {})

    def attend(q, k, v, o, lse):
        tensors = dict(q=q, k=k, v=v, bias=None, kv_lens=None, cu_seqlens=None, o=o, l=lse)
        (prepared,) = attention._prepare(tensors, 0, 0.1, 0, False)
        attention_launch.start(prepared, tensors)

    rows = attention_launch.whole(BLOCK_M=128, TMA=1, num_warps=8, num_stages=3)
    with no_device(run), launch.overriding(rows):
        yield attend, passed, encoded


def without_hooks(call):
    """The arguments of the driver's launch; a direct launch passes no hooks, and nothing that they would read."""
    kinds = type(knobs.runtime.launch_enter_hook), LazyDict
    return [None if isinstance(value, kinds) else value for value in call]


def heads():
    """q, k, v, o and L, in new memory."""
    q, k, v = (torch.zeros(2, 3, 50, 64, dtype=torch.bfloat16) for _ in range(3))
    return q, k, v, torch.zeros(2, 50, 3, 64, dtype=torch.bfloat16).transpose(1, 2), torch.zeros(2, 3, 50)


KNOWN = __version__.startswith(("3.6.", "3.7."))  # releases whose launcher takes encoded descriptors


def test_direct_launches_encode_a_descriptor_once(boxed):
    """Oracle: Triton's launch, which encodes q, k, v and o each time and must pass the same to the driver."""
    attend, passed, encoded = boxed
    first, second = heads(), heads()
    attend(*first)
    assert [(what[0], list(what[5])) for what in encoded] == [
        *((t.data_ptr(), [6, 50, 64]) for t in first[:3]),  # heads first in memory
        (first[3].data_ptr(), [2, 50, 192]),
    ]
    for _ in range(3):
        attend(*first)
    assert len(encoded) == (8 if KNOWN else 16)
    assert all(without_hooks(call) == without_hooks(passed[0]) for call in passed) and len(passed) == 4
    attend(*second[:3], *first[3:])  # three other addresses
    attend(*(t[:1] for t in (*second[:3], *first[3:])))  # other shapes at these addresses
    assert len(encoded) == (8 + 3 + 4 if KNOWN else 24)


def test_few_encodings_are_kept(boxed, monkeypatch):
    """Oracle: the limit; what was forgotten is encoded again."""
    attend, _, encoded = boxed
    monkeypatch.setattr(descriptor, "MAX_ENCODED", 5)
    for arguments in (held := [heads() for _ in range(4)]):
        attend(*arguments)
        assert len(descriptor._encoded) <= 5
    before = len(encoded)
    attend(*held[0])
    assert len(encoded) == before + 4


def test_replays_pass_addresses_for_descriptors(boxed):
    """Oracle: a launch of the same tensors."""
    attend, passed, encoded = boxed
    for _ in range(2):
        attend(*(arguments := heads()))
    with pytest.MonkeyPatch.context() as patch:
        given = []
        patch.setattr(attention_launch, "launch", lambda kernel, grid, *arguments, **fixed: given.extend(arguments))
        attend(*arguments)
    given = [(a[0].data_ptr(), *a[1:]) if type(a) is tuple and isinstance(a[0], torch.Tensor) else a for a in given]
    (binary,) = (each for key, each in launch._direct.found.items() if key[0] is attention._fwd_tma_kernel.fn)
    before, (x, y, z, stream, function, *_) = len(encoded), passed[-1]
    binary.run(x, y, z, stream, function, binary.metadata, None, None, None, *given, *binary.constants)
    assert without_hooks(passed[-1]) == without_hooks(passed[-2])
    assert len(encoded) == before + (0 if KNOWN else 4)


def test_an_unknown_launcher_encodes_descriptors_itself():
    """Oracle: what the launcher of a release that is not known is passed: descriptors as it reads them."""
    rows = attention_launch.whole(BLOCK_M=128, TMA=1, num_warps=8, num_stages=3)
    with no_device(log := Log()), launch.overriding(rows):
        q, k, v, *_ = heads()
        for _ in range(2):
            attention.fwd_op(q, k, v, None, None, None, 0, 0.1)
    by_triton, direct = (call[3] for call in log.calls)
    assert [hooked for *_, hooked in log.calls] == [True, False]
    for theirs, ours, t in zip(by_triton[:2], direct[:2], (q, k), strict=True):
        fields = {name: value for name, value in vars(theirs).items() if name != "base"}
        assert fields and fields == {name: getattr(ours, name) for name in fields}
        assert theirs.base.data_ptr() == ours.base.data_ptr() == t.data_ptr()
    assert direct[2] is direct[3] is None
