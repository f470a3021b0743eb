"""Tests of global settings: every one that a choice reads is in one list, and each cache follows each of the list."""

import ast
import contextlib
import inspect
import re
import textwrap
from functools import partial
from pathlib import Path

import pytest
import torch
from capture_scenarios import setting
from torch import nn
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import BaseTorchDispatchMode
from triton import knobs

import fastvit_triton
from benchmarks.no_device import no_device
from fastvit_triton import create_model
from fastvit_triton.deploy.cuda_graph import key_of
from fastvit_triton.engine import ways
from fastvit_triton.engine.replay import calls
from fastvit_triton.kernels import attention_launch, backend, choose, launch, measured, onednn, settings

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated")
PACKAGE = Path(fastvit_triton.__file__).parent
SMALL = dict(img_size=8, patch_size=4, embed_dim=16, depth=1, num_heads=2, num_classes=0)


@contextlib.contextmanager
def precision(owner, name, value):
    """Context in which an attribute of torch.backends has a value; afterwards TF32 is not allowed."""
    setattr(owner, name, value)
    try:
        yield
    finally:
        owner.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")


def switched(name):
    """A context in which one of PyTorch's settings of attention is reversed."""
    cuda = torch.backends.cuda
    get, set = getattr(cuda, f"{name}_enabled"), getattr(cuda, f"enable_{name}")
    return lambda: setting(get, set, not get())


@contextlib.contextmanager
def other_order():
    """Context in which PyTorch tries backends of attention in the another order."""
    before = torch._C._get_sdp_priority_order()
    torch._C._set_sdp_priority_order(before[1:] + before[:1])
    try:
        yield
    finally:
        torch._C._set_sdp_priority_order(before)


@contextlib.contextmanager
def patched(name):
    """Context in which a method of nn.Module is patched."""
    with pytest.MonkeyPatch.context() as patch:
        own = getattr(nn.Module, name)
        patch.setattr(nn.Module, name, lambda *given, **named: own(*given, **named))
        yield


@contextlib.contextmanager
def level():
    """Context of a torch.func transform."""
    torch._C._functorch._grad_increment_nesting()
    try:
        yield
    finally:
        torch._C._functorch._grad_decrement_nesting()


@contextlib.contextmanager
def global_hook():
    """Context in which a global forward hook is registered."""
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def tracing():
    """Context in which torch.jit.trace records operators."""
    states = []
    torch.jit.trace(lambda x: states.append(torch._C._get_tracing_state()) or x + 1, torch.zeros(1), check_trace=False)
    torch._C._set_tracing_state(states[0])
    try:
        yield
    finally:
        torch._C._set_tracing_state(None)


@contextlib.contextmanager
def knob(owner, name, value):
    """Context in which a setting of Triton has a value."""
    with owner.scope():
        setattr(owner, name, value)
        yield


def reduction():
    """Context in which PyTorch's written-out attention may sum in 16 bits."""
    cuda = torch.backends.cuda
    get, set = cuda.fp16_bf16_reduction_math_sdp_allowed, cuda.allow_fp16_bf16_reduction_math_sdp
    return setting(get, set, not get())


cuda, matmul = torch.backends.cuda, torch.backends.cuda.matmul
deterministic = torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
CHOICES = {  # for each setting a context in which it has another value
    "gradients": lambda: torch.set_grad_enabled(not torch.is_grad_enabled()),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "precision": lambda: setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"),
    "TF32": lambda: precision(matmul, "allow_tf32", True),
    "TF32 of fp32_precision": lambda: precision(matmul, "fp32_precision", "tf32"),
    "deterministic algorithms": lambda: setting(*deterministic, True),
    "forced way": lambda: settings.forcing("fused"),
    "assumed GPU": lambda: settings.assuming("a100"),
    "switch": lambda: backend.using_backend("torch"),
    "architecture": lambda: launch.targeting("sm_80"),
    "row of the CPU": lambda: onednn.using_row({}),
    "measurements": lambda: measured.using(measured.Measured()),
}
mha = torch.backends.mha
autocast_of_cuda = partial(torch.is_autocast_enabled, "cuda"), partial(torch.set_autocast_enabled, "cuda")
OPERATORS = {
    "flash attention": switched("flash_sdp"),
    "memory-efficient attention": switched("mem_efficient_sdp"),
    "written-out attention": switched("math_sdp"),
    "cuDNN's attention": switched("cudnn_sdp"),
    "order of backends": other_order,
    "reduction in 16 bits": reduction,
    "cuDNN": lambda: torch.backends.cudnn.flags(enabled=not torch.backends.cudnn.enabled),
    "oneDNN": lambda: setting(torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, False),
    "fast path of attention": lambda: setting(mha.get_fastpath_enabled, mha.set_fastpath_enabled, False),
    "autocast of CUDA": lambda: setting(*autocast_of_cuda, True),
    "default dtype": lambda: setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
}
BINARIES = {
    "debug": lambda: knob(knobs.runtime, "debug", True),
    "instrumentation": lambda: knob(knobs.compilation, "instrumentation_mode", "other"),
}
OBSERVERS = {
    "dispatch mode": BaseTorchDispatchMode,
    "function mode": BaseTorchFunctionMode,
    "torch.func": level,
    "forward-mode AD": torch.autograd.forward_ad.dual_level,
    "tracing": tracing,
    "saved tensors": torch.autograd.graph.save_on_cpu,
    "anomaly mode": lambda: setting(torch.is_anomaly_enabled, torch._C.set_anomaly_enabled, True),
    "observer": lambda: settings.observing(lambda choice: None),
    "other rows": lambda: launch.overriding({}),
    "global hook": global_hook,
    "patched nn.Module.__call__": lambda: patched("__call__"),
    "patched nn.Module._call_impl": lambda: patched("_call_impl"),
}


def a_block():
    """A block in inference, and an input."""
    model = create_model("vit_tiny_patch16_224", **SMALL)
    return model.eval().requires_grad_(False).blocks[0], torch.randn(2, 5, 16)


ON_CPU = ("gradients", "autocast", "forced way", "switch", "row of the CPU", "measurements")
LISTS = {
    "choices": (lambda: settings.choices("cpu"), CHOICES),
    "choices on a CPU": (settings.choices_on_cpu, {name: CHOICES[name] for name in ON_CPU}),
    "operators": (settings.operators, OPERATORS),
    "binaries": (launch.binaries, BINARIES),
}


@pytest.mark.parametrize("name", LISTS)
def test_each_setting_changes_its_list(name):
    """Oracle: every context changes the list and restores it, and together they change each of its values."""
    read, contexts = LISTS[name]
    before, found = read(), set()
    for each, context in contexts.items():
        with context():
            places = {i for i, (a, b) in enumerate(zip(before, read(), strict=True)) if a is not b and a != b}
        assert places and read() == before, each
        found |= places
    assert found == set(range(len(before)))


def test_each_condition_is_observed():
    """Oracle: by hand, as many contexts as conditions in the source; each is observed, and no longer after it."""
    (function,) = ast.parse(inspect.getsource(settings.is_observed)).body
    (conditions,) = [node for node in ast.walk(function) if isinstance(node, ast.BoolOp)]
    assert len(conditions.values) == len(OBSERVERS)
    for name, context in OBSERVERS.items():
        assert not settings.is_observed()
        with context():
            assert settings.is_observed(), name


FOLLOWED = {  # where calls are replayed → the settings that these depend on
    "launches": (no_device, "mixed", CHOICES | OPERATORS | BINARIES | OBSERVERS),
    "plain": (contextlib.nullcontext, None, {name: CHOICES[name] for name in ON_CPU} | OPERATORS | OBSERVERS),
}


@pytest.mark.parametrize("where", FOLLOWED)
def test_replays_follow_each_setting(replayed, where):
    """Oracle: a call that is replayed before is not replayed in a context that changes a setting or observes it."""
    device, way, contexts = FOLLOWED[where]
    forced = contextlib.nullcontext() if way is None else settings.forcing(way)
    with device(), forced, torch.no_grad():
        block, x = a_block()
        block(x)
        for name, context in contexts.items():
            vars(block).pop(calls.PROGRAMS, None)
            for _ in range(3):
                block(x)
            assert len(replayed) == 1, name
            replayed.clear()
            with context():
                block(x)
            assert not replayed, name


def test_caches_of_choices_follow_each_setting():
    """Oracle: in each context every cache misses: of ways, of choices, of prepared launches and of CUDA graphs."""
    made = []

    def make(tensors):
        made.append(1)
        return [None]

    with no_device(), torch.no_grad():
        block, x = a_block()
        block(x)
        sizes = vars(block)[ways.SIZES].branches

        def look_up():
            """Keys that two of the caches use, and numbers of entries of the others."""
            choose.way_of(x, sizes, False, True)
            attention_launch.prepared(make, dict(q=x))
            return ways.known_way(block, x)[1], key_of(2, (x,)), len(choose._choices), len(made)

        for name, context in CHOICES.items():
            before = look_up()
            assert look_up() == before
            with context():
                assert all(a != b for a, b in zip(before, look_up(), strict=True)), name
            choose._choices.clear()
            attention_launch._prepared.clear()
        for name, context in OPERATORS.items():
            before = key_of(2, (x,))
            with context():
                assert key_of(2, (x,)) != before, name


def test_direct_launches_follow_each_setting():
    """Oracle: in each context Triton selects the binaries again."""
    with no_device(), settings.forcing("fused"), torch.no_grad():
        block, x = a_block()
        with BaseTorchDispatchMode():  # not replayed
            for name, context in BINARIES.items():
                block(x)
                found = len(launch._direct.found)
                block(x)
                assert len(launch._direct.found) == found
                with context():
                    block(x)
                assert len(launch._direct.found) > found, name


READS = re.compile(
    r"torch\.((jit|compiler|autograd|cuda|backends|overrides|_C|_C\._autograd|autograd\.forward_ad)\.)*"
    r"(_?(is|are|get|has|len)_\w+|_?cuda_?get\w+|_top_saved\w+|_current_level|(?!set_)\w*(enabled|allowed)\w*|\w+_available)$"
    r"|torch\.backends\.\w+\.\w+$|torch\.(jit|cuda)\.(is|get|current)_\w+$|os\.environ$"
)
NOT_SETTINGS = {  # reads that no cached choice depends on, with the reason
    "torch.compiler.is_compiling": "traced calls are not cached, but for choices, whose key has it",
    "torch.compiler.is_dynamo_compiling": "traced calls are not cached",
    "torch.jit.is_tracing": "checks of arguments",
    "torch._C._get_dispatch_stack_at": "notifies the recorder of launches",
    "torch.are_deterministic_algorithms_enabled": "torch._C._get_deterministic_algorithms, in another way",
    "torch.get_rng_state": "restored after a recording",
    "torch.cuda.get_rng_state": "restored after a recording",
    "torch.cuda.get_device_properties": "a fact about the device, which is in each key",
    "torch.cuda.get_device_name": "a fact about the device",
    "torch.cuda.is_initialized": "asked before whether a stream is captured, which fails without CUDA",
    "torch._C._cuda_getDevice": "direct launches and replays compare it",
    "torch.cuda.current_device": "direct launches and replays compare it",
    "torch.cuda.current_stream": "read at each launch",
    "torch.cuda.is_current_stream_capturing": "folds are not cached then, nor calls recorded",
    "torch._C._get_function_stack_at": "`onednn.usable` reads it in each call, before a choice is looked up",
    "torch.backends.mkldnn.is_available": "a fact about the software",
    "torch.backends.cpu.get_cpu_capability": "a fact about the process",
    "torch.get_num_threads": "in the names of files of measurements, which are read once",
    "torch.backends.cudnn.version": "a fact about the software, in the names of files of measurements",
    "os.environ": "read once, at import or when a switch or a file is set; the results are in the lists",
}
PRIVATE = {  # package variables that are assigned at run time, with the reason why they are not in a list
    "_direct": "launches and records compare it",
    "_override": "`in_use` changes with it",
    "_files": "`in_use` changes with it",
}


def reads(tree):
    """Dotted names of all attributes of names in a syntax tree."""
    return {dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def dotted(node):
    """`a.b.c` as text; what precedes an attribute of another expression is left out."""
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def test_no_other_setting_is_read():
    """Oracle: the source of the lists. A choice that reads another global setting must add it to a list."""
    listed = set()
    for function in (
        settings.choices,
        settings.choices_on_cpu,
        settings.operators,
        settings.is_observed,
        launch.binaries,
    ):
        listed |= reads(ast.parse(textwrap.dedent(inspect.getsource(function))))
    found, assigned = {}, {}
    for path in (file for folder in ("kernels", "engine", "layers") for file in (PACKAGE / folder).rglob("*.py")):
        tree, name = ast.parse(path.read_text()), path.relative_to(PACKAGE)
        found |= {read: name for read in reads(tree) if READS.match(read)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Global):
                assigned |= {each: f"{path.stem}.{each}" for each in node.names}
    unknown = {read: str(path) for read, path in found.items() if read not in listed | NOT_SETTINGS.keys()}
    assert not unknown, "add these to a list of kernels/settings.py"
    missing = {dotted for name, dotted in assigned.items() if dotted not in listed and name not in PRIVATE}
    assert not missing, "add these to a list of kernels/settings.py"
    assert NOT_SETTINGS.keys() <= found.keys() and PRIVATE.keys() <= assigned.keys()
