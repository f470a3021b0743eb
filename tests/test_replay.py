"""Tests of replays of blocks. Oracle: the same call without replays, bit by bit: outputs, gradients, random numbers."""

import contextlib
import copy
import gc
import linecache
import pickle
import random
import types
import weakref

import pytest
import timm
import torch
import transformers
from interpreter import interpreting
from sampling import marked, sampled
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.no_device import no_device
from fastvit_triton import create_model, freeze, optimize, unfreeze
from fastvit_triton.engine import ways
from fastvit_triton.engine.replay import build, calls, emit, record
from fastvit_triton.engine.replay.recorder import CallRecorder
from fastvit_triton.kernels import backend, launch, onednn
from fastvit_triton.kernels.settings import forcing
from fastvit_triton.kernels.tile import jit, tl

SMALL = dict(img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=0)


def ours(**options):
    """Our model."""
    return create_model("vit_tiny_patch16_224", **SMALL | options)


def converted(name="vit_tiny_patch16_224", save="least", **options):
    """timm's model after `optimize`."""
    model = timm.create_model(name, **SMALL | options)
    optimize(model, save=save)
    return model


class Hidden(nn.Module):
    """The last hidden states of a transformers model after `optimize`."""

    def __init__(self, name, **options):
        super().__init__()
        sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4)
        config = getattr(transformers, f"{name}Config")(**sizes, **options)
        self.model = getattr(transformers, f"{name}Model")(config)
        optimize(self.model)

    def forward(self, x):
        return self.model(x).last_hidden_state


MODELS = {
    "ours": ours,
    "layer scale, drop path": lambda: ours(init_values=0.5, drop_path_rate=0.4),
    "timm": converted,
    "timm, layer scale, drop path": lambda: converted(init_values=0.5, drop_path_rate=0.4),
    "timm, qk norm": lambda: converted(qk_norm=True),
    "transformers' ViT": lambda: Hidden("ViT", intermediate_size=32),
    "transformers' DINOv2": lambda: Hidden("Dinov2", drop_path_rate=0.4),
    "transformers' BEiT": lambda: Hidden("Beit", intermediate_size=32, use_relative_position_bias=True),
    "eva02": lambda: converted("eva02_tiny_patch14_224"),
    "timm, hidden layer saved": lambda: converted(save="hidden"),
}
CALLS = {
    "inference": dict(),
    "training": dict(training=True),
    "autocast": dict(autocast=True),
    "autocast training": dict(autocast=True, training=True),
}


def recorded(model):
    """The records of all modules of a model."""
    holders = (m.__dict__.get(calls.PROGRAMS) for m in model.modules())
    return [found for held in holders if held for found in held.found.values() if type(found) is calls.Recorded]


def run(model, x, training=False, autocast=False, enabled=True):
    """Output, gradients, and the random numbers drawn next."""
    model.train(training).requires_grad_(training)
    torch.manual_seed(1)
    before, ways.REPLAYS = ways.REPLAYS, enabled
    try:
        x = x.detach().requires_grad_(training)
        with torch.autocast("cpu", torch.float16, enabled=autocast):
            y = model(x)
        if training:
            y.float().square().sum().backward()
    finally:
        ways.REPLAYS = before
    gradients = [t.grad for t in (x, *model.parameters())]
    model.zero_grad()
    return [y.detach(), torch.rand(3), *(g for g in gradients if g is not None)]


@pytest.fixture
def interpreted(always_folded):
    """Runs kernels in Triton's interpreter."""
    with interpreting():
        yield


def same(found, wanted):
    """True if equal bit by bit."""
    return len(found) == len(wanted) and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


SHORT = [("timm, layer scale, drop path", "fused", "training"), ("eva02", "fused", "inference")]
SHORT += [("transformers' ViT", "fused", "training")]
CASES = [  # each two of model, way and call occur together; which of the two ways a model and a call have alternates
    pytest.param(make, way, call, marks=[] if make == "ours" or (make, way, call) in SHORT else pytest.mark.full)
    for i, make in enumerate(MODELS)
    for j, way in enumerate(("fused", "mixed"))
    for k, call in enumerate(CALLS)
    if (i + j + k) % 2 == 0 or make == "ours" or (make, way, call) in SHORT
]


@pytest.mark.few(1)
@pytest.mark.parametrize("make, way, call", sampled(CASES, 3))
def test_replays_equal_the_call(interpreted, make, way, call):
    """Oracle: three calls in a row, of which the first two record; each with other images and other weights."""
    model = MODELS[make]()
    with forcing(way):
        for _ in range(4):
            x = torch.randn(3, 3, 8, 8)
            wanted = run(model, x, **CALLS[call], enabled=False)
            assert same(run(model, x, **CALLS[call]), wanted)
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1.125)
        assert recorded(model)


@pytest.mark.full
@pytest.mark.parametrize("name", ["Beit", "Data2VecVision"])
def test_tables_of_biases_are_read_in_each_replay(interpreted, name):
    """Oracle: the call without replays, after each way of writing to the tables; the first records remain in use."""
    model = Hidden(name, intermediate_size=32, use_relative_position_bias=True)
    tables = [p for path, p in model.named_parameters() if path.endswith("bias_table")]
    optimizer = torch.optim.SGD(tables, 1.0)
    x, seen, records = torch.randn(2, 3, 8, 8), [], []
    numbers = torch.Generator().manual_seed(2)  # as `run` sets the seed

    def other(t):
        return torch.randn(t.shape, generator=numbers)

    def load():
        model.load_state_dict({k: other(v) if "bias_table" in k else v for k, v in model.state_dict().items()})

    def write():
        for t in tables:
            t.data.copy_(other(t))

    def replace():
        for t in tables:
            t.data = other(t)

    def step():
        for t in tables:
            t.grad = other(t)
        optimizer.step()

    with forcing("fused"):
        for change in (write, write, write, load, write, replace, step):
            change()
            got, wanted = (run(model, x, enabled=enabled)[0] for enabled in (True, False))
            assert torch.equal(got, wanted) and not any(torch.equal(got, before) for before in seen)
            seen.append(got)
            records.append(recorded(model))
        assert len(records[2]) == 2 and all(a is b for a, b in zip(records[2], records[-1], strict=True))


def hooked(seen):
    """A forward hook that counts calls."""
    return lambda *_: seen.append(1)


class Wrapped(nn.Module):
    """A layer of an unknown package, such as LoRA's."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return 2 * self.layer(x)


def swap(module, name, value):
    """Replaces a parameter by a new object."""
    setattr(module, name, nn.Parameter(value, requires_grad=getattr(module, name).requires_grad))


def double(forward):
    """A forward that returns twice the result."""
    return lambda *given, **named: 2 * forward(*given, **named)


CHANGES = {  # changes made after a call was recorded: functions of the first block
    "values in place": lambda b: b.mlp.fc1.weight.data.mul_(2),
    "values by NumPy": lambda b: b.mlp.fc1.weight.detach().numpy().__imul__(2),
    "values in other memory": lambda b: setattr(b.mlp.fc1.weight, "data", b.mlp.fc1.weight.data * 2),
    "transposed": lambda b: setattr(b.attn.proj.weight, "data", b.attn.proj.weight.data.t()),
    "misaligned": lambda b: setattr(b.norm1.weight, "data", torch.ones(17)[1:]),
    "another parameter": lambda b: swap(b.mlp.fc1, "weight", b.mlp.fc1.weight.data * 2),
    "no bias": lambda b: setattr(b.attn.proj, "bias", None),
    "another module": lambda b: setattr(b.mlp, "fc2", nn.Linear(64, 16)),
    "unknown module": lambda b: setattr(b.mlp, "fc2", Wrapped(b.mlp.fc2)),
    "norm without weights": lambda b: setattr(b, "norm2", nn.LayerNorm(16, elementwise_affine=False)),
    "eps": lambda b: setattr(b.norm1, "eps", 1.0),
    "scale": lambda b: setattr(b.attn, "scale", 0.1),
    "an instance's forward": lambda b: setattr(b.mlp.fc1, "forward", double(b.mlp.fc1.forward)),
    "parametrised": lambda b: nn.utils.parametrizations.weight_norm(b.mlp.fc1),
    "half": lambda b: b.half().float(),
    "gradients": lambda b: b.mlp.requires_grad_(not b.mlp.fc1.weight.requires_grad),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("make, training", [("ours", False), pytest.param("timm", True, marks=pytest.mark.full)])
@pytest.mark.parametrize("change", marked(CHANGES, pytest.mark.fast, lambda c: c in ("scale", "transposed")))
def test_later_changes_take_effect(interpreted, make, change, training):
    """Oracle: a copy of the model that never replays, changed in the same way."""
    block = MODELS[make]().blocks[0].train(training).requires_grad_(training)
    other, x = copy.deepcopy(block), torch.randn(2, 3, 16)
    if make == "timm":
        optimize(other)
    with forcing("mixed" if training else "fused"):
        for _ in range(3):
            again(block, x, training)
        assert len(recorded(block)) == 1
        for each in (block, other):
            torch.manual_seed(2)
            CHANGES[change](each)
        wanted = again(other, x, training, enabled=False)
        for _ in range(3):
            assert same(again(block, x, training), wanted)


@pytest.mark.few(7)
@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("make", MODELS)
def test_plain_blocks_are_replayed_on_a_cpu(make, forced):
    """Oracle: the calls without replays, bit by bit, also of a model that draws random numbers; by hand, the blocks."""
    model, x = MODELS[make]().requires_grad_(False), torch.randn(2, 3, 8, 8)
    with torch.no_grad(), forcing("plain") if forced else contextlib.nullcontext():
        for mode in (False, True, False):
            model.train(mode)
            wanted = drawn(model, x, enabled=False)
            for _ in range(4):
                assert same(drawn(model, x), wanted)
            # EVA-02's rotary table is a second tensor; BEiT's original reads a table that is not an attribute
            assert len(recorded(model)) == (0 if make in ("transformers' BEiT", "eva02") else 2)
    assert same(run(model, x, training=True), run(model, x, training=True, enabled=False))  # no replay


def drawn(model, x, enabled=True):
    """Output in the model's mode, and the random numbers drawn next."""
    torch.manual_seed(1)
    return [*again(model, x, False, enabled), torch.rand(3)]


@pytest.mark.parametrize("change", CHANGES)
def test_later_changes_of_plain_blocks_take_effect(change):
    """Oracle: a copy of the model that never replays, changed in the same way."""
    block = converted(qk_norm=True).blocks[0].eval().requires_grad_(False)
    other, x = copy.deepcopy(block), torch.randn(2, 3, 16)
    optimize(other)
    with torch.no_grad():
        for _ in range(3):
            again(block, x, False)
        assert len(recorded(block)) == 1
        for each in (block, other):
            torch.manual_seed(2)
            CHANGES[change](each)
        wanted = again(other, x, False, enabled=False)
        for _ in range(3):
            assert same(again(block, x, False), wanted)


def test_plain_modules_that_are_not_replayed(monkeypatch):
    """Oracle: by hand: a layer of two modules costs less than its check; a module of an unknown package cannot be.

    Nor are calls with a second tensor, whose values `tolist` may read unseen, or of a large input.
    """
    model, x, mask = converted(depth=4), torch.randn(2, 5, 16), torch.zeros(2, 1, 5, 5)
    model.blocks[0].mlp.fc2 = Wrapped(model.blocks[0].mlp.fc2)
    layer = nn.Sequential(nn.Linear(16, 16), nn.GELU())
    with torch.no_grad():
        for _ in range(8):
            model.blocks[0](x)
            model.blocks[1](x, attn_mask=mask)
            calls.call_plain(None, layer, x)
            with monkeypatch.context() as patch:
                patch.setattr(calls, "MAX_VALUES", x.numel() - 1)
                model.blocks[2](x)
        assert not recorded(model) and not recorded(layer)
        for tokens in range(1, 30):
            for _ in range(3):
                model.blocks[3](torch.randn(2, tokens, 16))
    assert len(recorded(model)) == calls.MAX_PLAIN


def test_unusual_inputs_of_plain_modules():
    """Oracle: the model before `optimize`, for inputs that no record takes."""
    model = timm.create_model("vit_tiny_patch16_224", **SMALL).eval()
    other = copy.deepcopy(model)
    optimize(other)
    with torch.inference_mode():
        learns = torch.randn(2, 5, 16, requires_grad=True)
    for path, x in (("blocks.0", learns), ("blocks.0.mlp", torch.randn(2, 5, 16).to_mkldnn())):
        with torch.no_grad():
            wanted = model.get_submodule(path)(x)
            for _ in range(4):
                found = other.get_submodule(path)(x)
                assert found.is_mkldnn == wanted.is_mkldnn and torch.equal(found.to_dense(), wanted.to_dense())


class Double(nn.Parameter):
    """A weight whose products are doubled, such as a quantised one."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            y = function(*args, **(kwargs or {}))
        return 2 * y if function is nn.functional.linear else y


def other_class(block):
    """Turns a weight into one of another class, without another object."""
    weight = block.mlp.fc1.weight
    torch.utils.swap_tensors(weight, torch.Tensor._make_subclass(Double, weight.detach().clone(), False))


def other_order(block):
    """Moves the first of the layers between the linear layers to their end."""
    layers = block.mlp.act._modules
    layers["0"] = layers.pop("0")


@pytest.mark.parametrize("change", [other_class, other_order])
def test_changes_that_keep_every_object(change):
    """Oracle: the model before `optimize`, changed in the same way."""
    model = timm.create_model("vit_tiny_patch16_224", **SMALL).eval()
    for block in model.blocks:
        block.mlp.act = nn.Sequential(nn.GELU(), nn.Tanh())
    other, x = copy.deepcopy(model), torch.randn(2, 3, 8, 8)
    optimize(other)
    with torch.no_grad():
        for _ in range(4):
            assert torch.equal(other(x), model(x))
        before = model(x)
        for each in (model, other):
            change(each.blocks[0])
        assert torch.equal(other(x), model(x)) and not torch.equal(before, model(x))


def test_lengths_are_read_in_each_call():
    """Oracle: the model before `optimize`; its attention reads the lengths of the images as a list."""
    from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen

    sizes = dict(depth=2, embed_dim=16, hidden_size=8, num_heads=2, patch_size=4)
    model = qwen.Qwen2VisionTransformerPretrainedModel(qwen.Qwen2VLVisionConfig(**sizes)).eval()
    other, x = copy.deepcopy(model), torch.randn(48, 96)
    optimize(other)
    grids = torch.tensor([[1, 4, 4], [1, 8, 4]]), torch.tensor([[1, 8, 4], [1, 4, 4]])
    fewest = dict.fromkeys(onednn.PHASES, 1e9)
    with torch.no_grad(), onednn.using_row({"float32": fewest}):
        for grid in (*grids[:1] * 4, grids[1]):
            pair = (each(x, grid_thw=grid).last_hidden_state for each in (model, other))
            assert torch.equal(*pair)


def test_plain_blocks_in_training_select_once(monkeypatch):
    """Oracle: the number of selections: of the first call of each block, and after its sizes or mode changed."""
    selected = []
    real = ways.known_way
    monkeypatch.setattr(ways, "known_way", lambda *given: selected.append(1) or real(*given))
    block, x = converted().blocks[0], torch.randn(2, 5, 16)
    with onednn.using_row({"float32": dict.fromkeys(onednn.PHASES, 1e9)}):
        for expected in (3, 1, 0, 0):  # the first call reads the block and its two branches
            selected.clear()
            block(x)
            assert len(selected) <= expected
        block.eval()
        selected.clear()
        block(x)
        assert selected


def again(model, x, training, enabled=True):
    """Output and gradients of a model in its current state."""
    ways.REPLAYS, x = enabled, x.detach().requires_grad_(training)
    try:
        y = model(x)
    finally:
        ways.REPLAYS = True
    if training:
        y.square().sum().backward()
    gradients = [t.grad for t in (x, *model.parameters()) if t.grad is not None]
    model.zero_grad()
    return [y.detach(), *gradients]


CONTEXTS = {  # contexts in which operators are observed or changed
    "flops": lambda: FlopCounterMode(display=False),
    "function mode": torch.overrides.BaseTorchFunctionMode,
    "offloading": torch.autograd.graph.save_on_cpu,
    "switch": lambda: backend.using_backend("torch"),
    "another way": lambda: forcing("plain"),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("context", CONTEXTS)
def test_contexts_end_replays(interpreted, replayed, context):
    """Oracle: nothing is replayed inside a context, and calls are replayed again after it."""
    model, x = ours(), torch.randn(2, 3, 8, 8)
    with forcing("fused"):
        for _ in range(3):
            wanted = run(model, x, training=True)
        replayed.clear()
        with CONTEXTS[context]():
            run(model, x, training=True)
        assert not replayed
        assert same(run(model, x, training=True), wanted) and len(replayed) == 2


@pytest.mark.full
@pytest.mark.parametrize("where", ["block", "layer", "all modules"])
def test_hooks_added_after_recording_are_called(interpreted, where):
    """Oracle: the hook is called as often as the model."""
    model, x, seen = converted(), torch.randn(2, 3, 8, 8), []
    with forcing("fused"):
        for _ in range(3):
            run(model, x)
        if where == "all modules":
            handle = nn.modules.module.register_module_forward_hook(
                lambda m, *_: seen.append(1) if m is model.blocks[0].mlp.fc1 else None
            )
        else:
            module = model.blocks[0] if where == "block" else model.blocks[0].mlp.fc1
            handle = module.register_forward_hook(hooked(seen))
        for _ in range(4):
            run(model, x)
        handle.remove()
        assert len(seen) == 4
        run(model, x)
    assert len(seen) == 4


@pytest.mark.full
def test_only_repeatable_calls_are_recorded(interpreted, monkeypatch):
    """Oracle: by hand: calls that wait for a value or write to a buffer, and unknown modules, are not recorded."""

    def reads(self, x):
        return type(self).forward(self, x) * (2.0 if float(x.detach().sum()) > 0 else 1.0)

    def writes(self, x):
        self.bias.data.add_(1)
        return type(self).forward(self, x)

    for forward in (reads, writes):
        monkeypatch.setattr(record, "runs_known_code", lambda module, **_: True)
        model = converted()
        fc = model.blocks[0].mlp.fc2
        fc.forward = types.MethodType(forward, fc)
        other, x = copy.deepcopy(model), torch.randn(2, 3, 8, 8)
        other.blocks[0].mlp.fc2.forward = types.MethodType(forward, other.blocks[0].mlp.fc2)
        with forcing("fused"):
            for i in range(6):
                x = x * -1.0
                assert same(again(model.eval(), x, False), again(other.eval(), x, False, enabled=False)), i
        assert len(recorded(model.blocks[0])) == 0 and len(recorded(model.blocks[1])) > 0


@pytest.mark.full
def test_copies_and_pickles_have_no_records(interpreted):
    """Oracle: a copy records its own calls; a recorded model is freed with its last reference."""
    model, x = ours(), torch.randn(2, 3, 8, 8)
    with forcing("fused"):
        for _ in range(3):
            wanted = run(model, x)
        for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert recorded(made) == [] and same(run(made, x), wanted) and same(run(made, x), wanted)
    alive = weakref.ref(model)
    del model, made
    gc.collect()
    assert alive() is None


@pytest.mark.full
def test_autograd_guards_saved_tensors(interpreted):
    """Oracle: PyTorch's errors for a tensor modified in place, a freed graph and second derivatives."""
    model, x = ours().train(), torch.randn(2, 5, 16)
    with forcing("fused"):
        for _ in range(3):
            model.blocks(x.clone().requires_grad_()).sum().backward()
        given = x.clone().requires_grad_()
        y = model.blocks(given)
        y.sum().backward(retain_graph=True)
        first = given.grad.clone()
        y.sum().backward()
        assert torch.equal(given.grad, 2 * first)
        with pytest.raises(RuntimeError, match="second time"):
            y.sum().backward()
        y = model.blocks(given)
        with torch.no_grad():
            model.blocks[1].mlp.fc1.weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        with pytest.raises(RuntimeError, match="one gradient at a time"):
            torch.autograd.grad(model.blocks(given), given, torch.randn(2, *x.shape), is_grads_batched=True)
        (slope,) = torch.autograd.grad(model.blocks(given).sum(), given, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiated once"):
            slope.sum().backward()


def test_unused_parameters_are_not_in_the_graph(interpreted):
    """Oracle: the call without replays; DistributedDataParallel finds unused parameters by walking the graph."""
    model, x = ours().train(), torch.randn(2, 5, 16)
    block = model.blocks[0]
    block.mlp.unused = nn.Parameter(torch.ones(3))
    with forcing("mixed"):
        for _ in range(4):
            y = block(x)
    assert len(recorded(block)) == 1
    reached = {id(getattr(node, "variable", None)) for node, _ in y.grad_fn.next_functions if node is not None}
    assert {id(p) for p in block.parameters()} - reached == {id(block.mlp.unused)}


@pytest.mark.fast
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("way", ["fused", "mixed"])
def test_replayed_launches_get_the_same_arguments(way, training):
    """Oracle: the arguments that a call without replays passes to Triton's launcher. Parameters have equal addresses,
    other tensors equally aligned ones; tensors are compared by number."""
    seen = []

    def launcher(x, y, z, stream, function, metadata, *rest):
        seen.append((x, y, z, stream, function, metadata, rest))

    with no_device(launcher), forcing(way):
        model, x = ours().train(training), torch.randn(2, 5, 16, requires_grad=training)
        model.requires_grad_(training)

        def numbers(value):
            if isinstance(value, tuple):
                return tuple(map(numbers, value))
            address = value.data_ptr() if isinstance(value, torch.Tensor) else value
            large = type(address) is int and address > 2**32
            return address % 16 if large and address not in known else address

        def launched(enabled):
            ways.REPLAYS = enabled
            seen.clear()
            y = model.blocks(x)
            if training:
                y.backward(torch.zeros_like(y))
            return [numbers(one) for one in seen]

        try:
            for shift in (False, True):
                if shift:
                    model.blocks[0].norm1.weight.data = torch.ones(17)[1:]
                known = {t.data_ptr() for t in model.parameters()}
                for _ in range(3):
                    launched(True)
                found, wanted = launched(True), launched(False)
                assert len(recorded(model)) == 2
                assert found == wanted and len(found) > 4
        finally:
            ways.REPLAYS = True


INFERENCE = """\
def replay(given, addresses):
    if is_autocast_enabled('cpu'):
        return without_autocast('cpu', replay, given, addresses)
    x, _ = given
    _, weight_at = addresses
    buffer = empty(256, dtype=uint8, device=cpu)
    buffer_float32 = buffer.view(float32)
    aten_copy_(buffer_float32.as_strided((2, 4), (4, 1), 0), x)
    var_mean, var_mean_2 = aten_var_mean(x, [1], correction=0, keepdim=True)
    del var_mean
    buffer_at = buffer.data_ptr()
    y = empty_strided((2, 4), (4, 1), dtype=float32, device=cpu)
    y_at = y.data_ptr()
    var_mean_2_at = var_mean_2.data_ptr()
    stream = current_stream(-1)
    test_replay_scale(
        2, 1, 1, stream, test_replay_scale_binary, test_replay_scale_metadata, None, None, None, buffer_at,
        (weight_at, y_at), var_mean_2_at, 4,
    )
    del buffer
    del var_mean_2
    return (y, None)
"""
TRAINING = """\
def forward(given, addresses):
    if is_autocast_enabled('cpu'):
        return without_autocast('cpu', forward, given, addresses)
    x, weight, _ = given
    y = aten_mm(x, weight.t())
    saved = x, weight
    return (y,), (), saved


def backward(saved, dy):
    if is_autocast_enabled('cpu'):
        return without_autocast('cpu', backward, saved, dy)
    x, weight = saved
    d_weight = aten_mm(dy.t(), x)
    d_x = aten_mm(dy, weight)
    return d_x, d_weight, None


def replay(given, addresses):
    given[2] = given[2].detach()
    (y0,) = apply(forward, backward, 0, addresses, *given)
    return y0
"""


@jit
def _scale_kernel(x, weight_and_y, mean, D: tl.constexpr):
    """Is never compiled."""


def emitted(function, **tensors):
    """The generated function that replays a function of these tensors."""
    recorder = CallRecorder(torch.device("cpu"))
    with recorder:
        result = function(**tensors)
    marks, incoming, gradients = record._record_backward(recorder, [*tensors.values()], result)
    wanted = [gradients.get(id(t)) for t in tensors.values()]
    return emit.emit(build.Plan(recorder, [*tensors.items()], result, marks, incoming, wanted)).run


def source(function):
    """The text of the file in which a generated function is."""
    return "".join(linecache.getlines(function.__code__.co_filename))


@pytest.mark.fast
def test_source_of_a_launch():
    """Oracle: by hand: the generated function, and what the launcher gets."""
    seen = []

    def forward(x, weight):
        hidden, y = torch.empty_like(x).copy_(x), torch.empty_like(x)
        _, mean = torch.ops.aten.var_mean.correction(x, [1], correction=0, keepdim=True)
        launch.launch(_scale_kernel, (2,), hidden, (weight, y), mean, D=4, enable_fp_fusion=True)
        return y, None

    with no_device(lambda *given: seen.append(given)), torch.no_grad():
        x, weight = torch.randn(2, 4), torch.randn(4)
        forward(x, weight)
        replay = emitted(forward, x=x, weight=weight)
        seen.clear()
        y, nothing = replay([x, weight], [0, 1])
    assert source(replay) == INFERENCE
    ((*first, _, of_both, _, D),) = [(*given[:4], *given[9:]) for given in seen]
    assert (first, of_both, D, nothing) == ([2, 1, 1, 0], (1, y.data_ptr()), 4, None)


@pytest.mark.full
def test_source_of_a_backward_pass():
    """Oracle: by hand, and PyTorch's gradients; errors show the generated line, until the function is freed."""
    x, weight, unused = tensors = [torch.randn(*shape, requires_grad=True) for shape in ((2, 3), (4, 3), (3,))]
    replay = emitted(lambda x, weight, unused: x @ weight.t(), x=x, weight=weight, unused=unused)
    assert source(replay) == TRAINING
    tensors, dy = [torch.randn_like(t).requires_grad_() for t in tensors], torch.randn(2, 4)
    found = torch.autograd.grad(replay([*tensors], [0, 0, 0]), tensors[:2], dy)
    assert same(found, torch.autograd.grad(tensors[0] @ tensors[1].t(), tensors[:2], dy))
    with pytest.raises(RuntimeError) as error:
        replay([unused, weight, unused], [0, 0, 0])
    assert str(error.traceback[-1].statement).strip() == "y = aten_mm(x, weight.t())"
    filename = replay.__code__.co_filename
    del replay, error
    gc.collect()
    assert filename not in linecache.cache


@pytest.mark.fast
def test_buffers_keep_live_tensors_apart():
    """Oracle: no two tensors alive at the same step share a byte; the buffer is at most as large as all of them."""
    draw = random.Random(0)
    for _ in range(200):
        spans = [(a := draw.randrange(9), draw.randrange(a, 9), draw.randrange(0, 2000)) for _ in range(8)]
        offsets, size = build._pack(spans)
        assert all(offset % build.ALIGNMENT == 0 for offset in offsets)
        assert size <= sum(-(-n // build.ALIGNMENT) * build.ALIGNMENT for *_, n in spans)
        for (a, b, n), at in zip(spans, offsets, strict=True):
            assert at + n <= size
            for (c, d, m), other in zip(spans, offsets, strict=True):
                if (a, b, n, at) != (c, d, m, other) and a <= d and c <= b:
                    assert at + n <= other or other + m <= at


@pytest.mark.full
def test_frozen_models_follow_their_weights(interpreted):
    """Oracle: the model without replays. Writes counted by PyTorch take effect; `unfreeze` frees the folds."""
    model, x = ours().eval().requires_grad_(False), torch.randn(2, 3, 8, 8)
    freeze(model)
    with forcing("fused"):
        for _ in range(3):
            again(model, x, False)
        held = [weakref.ref(t) for one in recorded(model) for t in one.held if t.dim() == 2]
        assert recorded(model)[0].folds
        for change in (lambda w: w.mul_(2), lambda w: w.copy_(torch.randn_like(w))):
            change(model.blocks[0].attn.qkv.weight)
            for _ in range(3):
                assert same(again(model, x, False), again(model, x, False, enabled=False))
        unfreeze(model)
        gc.collect()
        kept = {id(p) for p in model.parameters()}
        assert all(ref() is None or id(ref()) in kept for ref in held)
        assert same(again(model, x, False), again(model, x, False, enabled=False))


@pytest.mark.full
def test_misaligned_and_strided_inputs(interpreted):
    """Oracle: the call without replays; each memory layout has its own record."""
    model = ours().eval().requires_grad_(False)
    wide = torch.randn(2, 5, 32)
    inputs = [
        wide[..., :16],
        wide[..., 1:17],
        torch.randn(161)[1:].view(2, 5, 16),
        torch.randn(5, 2, 16).transpose(0, 1),
    ]
    with forcing("fused"):
        for _ in range(3):
            for x in inputs:
                assert torch.equal(model.blocks(x), plain(model.blocks, x))
    assert len(recorded(model.blocks[0])) == len(inputs)


@pytest.mark.full
def test_shallow_copies_do_not_replay_the_original(interpreted):
    """Oracle: the copy without replays. DataParallel's replicas are shallow copies with parameters of their own."""
    block, x = ours().eval().requires_grad_(False).blocks[0], torch.randn(2, 5, 16)
    with forcing("fused"):
        for _ in range(3):
            block(x)
        assert len(recorded(block)) == 1
        other = copy.copy(block)
        other._modules = dict(block._modules, mlp=copy.deepcopy(block.mlp))
        other.mlp.fc1.weight.mul_(3)
        for _ in range(3):
            assert torch.equal(other(x), plain(other, x)) and not torch.equal(other(x), block(x))


def test_functions_of_the_user_are_called(interpreted):
    """Oracle: the call without replays. A user's function may depend on anything, so nothing is recorded."""
    factor = [1.0]
    layer = nn.TransformerEncoderLayer(
        16, 2, 32, 0.0, lambda h: nn.functional.gelu(h) * factor[0], batch_first=True, norm_first=True
    )
    optimize(layer.eval().requires_grad_(False))
    x = torch.randn(2, 5, 16)
    with forcing("fused"):
        for factor[0] in (1.0, 1.0, 1.0, 2.0):
            assert torch.equal(layer(x), plain(layer, x))
    assert recorded(layer) == []


@pytest.mark.parametrize("training", [False, True])
def test_outputs_may_be_written_to(interpreted, training):
    """Oracle: the call without replays; no output is a view of another tensor."""
    model = converted().train(training).requires_grad_(training)
    block, x = model.blocks[0], torch.randn(2, 5, 16)
    with forcing("mixed"):
        for _ in range(4):
            y, wanted = block(x), plain(block, x)
            assert torch.equal(y.mul_(2), wanted.mul_(2)) and y._base is None
    assert len(recorded(block)) == 1


def test_tensors_equal_by_value_are_another_state(interpreted):
    """Oracle: by hand: a replaced parameter or buffer of one element is noticed, and such an attribute not recorded."""
    for kind in ("parameter", "buffer", "attribute"):
        block, x = ours().train().blocks[0], torch.randn(2, 5, 16)
        one = torch.ones(1) if kind == "buffer" else nn.Parameter(torch.ones(1))
        if kind == "attribute":
            block.mlp.gate = one.detach()
        else:
            getattr(block.mlp, f"register_{kind}")("gate", one)
        with forcing("mixed"):
            for _ in range(4):
                block(x)
        found = recorded(block)
        assert len(found) == (kind != "attribute") and all(one.guard.holds(block) for one in found)
        block.mlp.gate = copy.deepcopy(one)
        assert not any(one.guard.holds(block) for one in found), kind


def test_settings_of_pytorchs_attention_are_followed(interpreted):
    """Oracle: the call without replays; outside of the context in which it was recorded, it is recorded again."""
    block, x = ours().eval().requires_grad_(False).blocks[0], torch.randn(2, 5, 16)
    with forcing("mixed"):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            for _ in range(3):
                block(x)
        (mathematical,) = recorded(block)
        for _ in range(3):
            assert torch.equal(block(x), plain(block, x))
        assert len(recorded(block)) == 1 and recorded(block)[0] is not mathematical


def plain(module, x):
    """The call without replays."""
    ways.REPLAYS = False
    try:
        return module(x)
    finally:
        ways.REPLAYS = True


@pytest.mark.full
def test_deterministic_algorithms_are_followed(interpreted):
    """Oracle: the call without replays; it runs another attention, whose gradients are deterministic."""
    block, x = ours().train().blocks[0], torch.randn(2, 5, 16)
    with forcing("mixed"):
        for _ in range(3):
            again(block, x, True)
        torch.use_deterministic_algorithms(True)
        try:
            for _ in range(3):
                assert same(again(block, x, True), again(block, x, True, enabled=False))
        finally:
            torch.use_deterministic_algorithms(False)
    assert len(recorded(block)) == 2


def put(memory, *parameters):
    """Moves parameters of 16 elements to offsets in a tensor."""
    for parameter, offset in parameters:
        parameter.data = memory[offset : offset + 16]


SHARED = {  # how two norms' weights share memory, and whether the call may be recorded
    "the same memory": (lambda b: put(torch.randn(16), (b.norm1.weight, 0), (b.norm2.weight, 0)), False),
    "in part": (lambda b: put(torch.randn(20), (b.norm1.weight, 0), (b.norm2.weight, 4)), False),
    "one parameter": (lambda b: setattr(b.norm2, "weight", b.norm1.weight), True),
    "side by side": (lambda b: put(torch.randn(32), (b.norm1.weight, 0), (b.norm2.weight, 16)), True),
    "input and weight": (lambda b: put(torch.randn(16), (b.norm1.weight, 0)), False),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("shared", SHARED)
def test_tensors_that_share_memory_may_be_separated(interpreted, shared, training):
    """Oracle: the call without replays, while they share memory and afterwards."""
    block, (share, allowed) = ours().train(training).blocks[0], SHARED[shared]
    block.requires_grad_(training)
    share(block)
    x = block.norm1.weight.detach().view(1, 1, 16) if shared.startswith("input") else torch.randn(2, 5, 16)
    with forcing("mixed"):
        for _ in range(4):
            again(block, x, training)
        assert len(recorded(block)) == allowed
        put(torch.randn(48), (block.norm2.weight, 16), (block.norm1.weight, 32))
        for _ in range(2):
            assert same(again(block, x, training), again(block, x, training, enabled=False))


@pytest.mark.parametrize("change", [freeze, unfreeze])
def test_frozen_parts_of_a_recorded_block_may_change(interpreted, change):
    """Oracle: the block without replays. A part is frozen again, or no longer, after a write that is not counted."""
    block, x = ours().eval().requires_grad_(False).blocks[0], torch.randn(2, 5, 16)
    freeze(block)
    with forcing("fused"):
        for _ in range(3):
            block(x)
        (found,) = recorded(block)
        assert found.folds
        block.norm1.weight.data.mul_(3)
        change(block.norm1)
        for _ in range(4):
            assert torch.equal(block(x), plain(block, x))


class Middle(nn.Linear):
    """A layer of a known package that only the record knows."""

    __module__ = "timm.layers"


class Derived(Middle):
    """A subclass with the forward of its base."""

    __module__ = "timm.layers"


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["forward", "__call__"])
@pytest.mark.parametrize("owner", [Derived, Middle, nn.Linear])
def test_later_patches_of_a_class_take_effect(interpreted, monkeypatch, owner, name):
    """Oracle: the call without replays, which calls the patch; it is of the module's type or of one of its bases."""
    block, x = ours().eval().requires_grad_(False).blocks[0], torch.randn(2, 5, 16)
    block.mlp.fc2 = Derived(64, 16).requires_grad_(False)
    with forcing("mixed"):
        for _ in range(4):
            before = block(x)
        assert len(recorded(block)) == 1
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, double(getattr(owner, name)))
            for _ in range(3):
                found = block(x)
                assert torch.equal(found, plain(block, x)) and not torch.equal(found, before)
        for _ in range(3):
            assert torch.equal(block(x), before)
