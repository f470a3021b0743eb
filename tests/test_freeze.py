"""Tests of folded weights: changes between calls, however they are written, and models that are frozen."""

import contextlib
import copy
import gc
import math
import pickle
import weakref
from collections import Counter

import pytest
import research
import torch
from agreement import normal
from budget import allowed
from captured import without_inductor
from catalogue import build, inputs, joined, outputs
from interpreter import interpreting
from sampling import marked, sampled
from torch.testing import assert_close

from fastvit_triton import create_model, freeze, optimize, unfreeze
from fastvit_triton.engine import freeze as freeze_file
from fastvit_triton.engine import ways
from fastvit_triton.expected.count import traced
from fastvit_triton.expected.gpus import gpus
from fastvit_triton.kernels import fold as fold_file
from fastvit_triton.kernels.settings import forcing

SIZES = dict(img_size=8, patch_size=4, embed_dim=16, num_heads=2, num_classes=3)
IMAGE = torch.linspace(-1, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8).sin()


def model(depth: int = 1) -> torch.nn.Module:
    """A small ViT with LayerScale and random parameters."""
    torch.manual_seed(0)
    return normal(create_model("vit_tiny_patch16_224", depth=depth, init_values=0.1, **SIZES).eval())


def captured(name: str) -> torch.nn.Module:
    """A model whose blocks `optimize` captures."""
    net = research.MODELS[name].build().float().eval()
    example = torch.utils._pytree.tree_map(torch.Tensor.float, research.MODELS[name].inputs(2, 5))
    optimize(net, example=example)
    return net


@pytest.fixture(params=["fold", "norms"])
def way(request, monkeypatch):
    """Folds within the call for any number of rows, or never."""
    border = 0 if request.param == "fold" else math.inf
    monkeypatch.setitem(fold_file.SPACE, "border", dict(ROWS_PER_OUTPUT=border))
    return request.param


@contextlib.contextmanager
def folding():
    """Records the folds made inside."""
    made, launch = [], fold_file.launch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fold_file, "launch", lambda *given: made.append(len(given[0])) or launch(*given))
        yield made


def _optimizer(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


def _average(net):
    with torch.no_grad():
        for p in net.parameters():
            p.lerp_(torch.ones_like(p), 0.5)


def _assign(net):
    net.load_state_dict({name: t * 0.5 for name, t in net.state_dict().items()}, assign=True)


def _load(net):
    net.load_state_dict({name: t * 0.5 for name, t in net.state_dict().items()})


def _norm_alone(net):
    norm = next(m for m in net.modules() if isinstance(m, torch.nn.LayerNorm) and m.weight.requires_grad)
    with torch.no_grad():
        norm.bias.add_(1.0)


def _gathered(net):
    """A parameter gathered again by FSDP2: the same object in other memory."""
    for p in net.parameters():
        p.data = p.data * 0.5


def _new_parameter(net):
    for module in net.modules():
        for name, p in list(module._parameters.items()):
            if p is not None:
                setattr(module, name, torch.nn.Parameter(p.detach() * 0.5))


def _data_teacher(net):
    """Teacher of DINO and I-JEPA: param_k.data.mul_(m).add_((1 - m) * param_q.detach().data)."""
    for p in net.parameters():
        p.data.mul_(0.9).add_(0.1 * torch.ones_like(p))


def _data_merge(net):
    """Adapter merge in PEFT: base_layer.weight.data += delta."""
    for p in net.parameters():
        p.data += 0.1


def _data_copy(net):
    for p in net.parameters():
        p.data.copy_(p.data * 0.5)


def _numpy(net):
    for p in net.parameters():
        p.detach().numpy()[...] *= 0.5


def _dlpack(net):
    for p in net.parameters():
        torch.from_dlpack(torch.utils.dlpack.to_dlpack(p.detach())).mul_(0.5)


def _storage(net):
    for p in net.parameters():
        if p.numel():
            p.untyped_storage().copy_((p.detach() * 0.5).untyped_storage())


COUNTED = [_optimizer, _average, _assign, _load, _norm_alone, _gathered, _new_parameter]
SILENT = [_data_teacher, _data_merge, _data_copy, _numpy, _dlpack, _storage]
MODELS = {
    "ours": (model, IMAGE),
    "timm": (lambda: build("timm_deit3", torch.float32).eval(), inputs("timm_deit3").float()),
    "captured": (lambda: captured("dino"), torch.linspace(-1, 1, 2 * 5 * research.D).view(2, 5, research.D).sin()),
}


def changed(name: str, change, frozen: bool = False, again: bool = False):
    """(output before the change, output after it, output of a fresh copy of the changed model), in the interpreter."""
    make, image = MODELS[name]
    net = make()
    optimize(net)
    if frozen:
        freeze(net)
    with interpreting():
        with torch.no_grad():
            before = net(image)
        change(net)
        if again:
            freeze(net)
        with torch.no_grad():
            return before, net(image), copy.deepcopy(net)(image)


FEW = (_optimizer, _assign, *SILENT[:2])
CHANGED = [("ours", c) for c in (*COUNTED, *SILENT)] + [(name, c) for name in ("timm", "captured") for c in FEW]


def typical(name, change):
    """True for the changes that the fast tests make."""
    return change in (_optimizer, _assign) or (name, change) == ("ours", _data_merge)


CHANGED = marked(CHANGED, pytest.mark.fast, typical)


@pytest.mark.few(4)
@pytest.mark.parametrize("name, change", sampled(CHANGED, 3))
def test_changed_weights_change_the_next_call(name, change, way):
    """Oracle: a fresh copy of the changed model, which has cached nothing, bit by bit."""
    before, after, fresh = changed(name, change)
    assert torch.equal(after, fresh) and not torch.equal(after, before)


@pytest.mark.few(1)
@pytest.mark.parametrize("name, change", sampled(CHANGED, 2))
def test_frozen_models_detect_counted_writes(name, change, always_folded):
    """Oracle: a fresh copy, which folds in its call; after writes that PyTorch does not count, `freeze` is repeated."""
    before, after, fresh = changed(name, change, frozen=True, again=change in SILENT)
    assert torch.equal(after, fresh) and not torch.equal(after, before)


@pytest.mark.full
def test_frozen_models_fold_once():
    """Oracle: the number of fold launches: one per block for both norms, then none, for any batch."""
    net = model(depth=2)
    freeze(net)
    with interpreting(), torch.no_grad(), folding() as made:
        net(IMAGE)
        assert made == [2, 2]
        net(IMAGE), net(IMAGE[:1])
        with torch.inference_mode():
            net(IMAGE)
        assert made == [2, 2]
        unfreeze(net)
        net(IMAGE)
        assert made == [2, 2]  # with so few rows the LayerNorms run


@pytest.mark.full
@pytest.mark.parametrize("name", ["timm_deit3", "timm_beit", "hf_vit", "torchvision_vit", "vit_pytorch_vit"])
def test_converted_models_freeze(name, always_folded):
    """Oracle: the same model without freezing, bit by bit; separate query, key and value layers are one fold."""
    net, given = build(name, torch.float32).eval(), inputs(name, torch.float32)
    optimize(net)
    twin = copy.deepcopy(net)
    optimize(net, freeze=True)
    with interpreting(), torch.no_grad(), folding() as made:
        want = outputs(twin, given)
        per_call = len(made)
        assert torch.equal(outputs(net, given), want) and len(made) == 2 * per_call >= 4
        assert torch.equal(outputs(net, given), want) and len(made) == 2 * per_call


@pytest.mark.full
def test_captured_blocks_freeze():
    """Oracle: the same model without freezing, bit by bit; by hand, what two blocks no longer launch.

    Each folds two LayerNorms, packs weights and biases of two projections, and multiplies a bias by a mask.
    """
    net, given = captured("rotary"), research.MODELS["rotary"].inputs(16, 5)
    given = torch.utils._pytree.tree_map(torch.Tensor.float, given)
    twin = copy.deepcopy(net)
    freeze(net)
    with interpreting(), torch.no_grad(), folding() as made:
        want = joined(twin(*given))
        assert len(made) == 4
        assert torch.equal(joined(net(*given)), want) and len(made) == 8
        assert torch.equal(joined(net(*given)), want) and len(made) == 8
    with forcing("fused"):
        traces = [traced(twin, gpus()["h200"], False, given, {}, frozen) for frozen in (False, True)]
    before, after = (Counter(event.name for event in trace.events if event.launches) for trace in traces)
    assert before - after == {"fold._fold_kernel": 4, "cat": 4, "mul": 2} and not after - before


@pytest.mark.full
def test_compiled_blocks_freeze(monkeypatch):
    """Oracle: the model as written; a block that was compiled before is compiled anew, and folds nothing in later calls
    until its weights change; unfrozen, it computes all in each call."""
    compiler = without_inductor(monkeypatch)
    rotary = research.MODELS["rotary"]
    original = rotary.build().float().eval()
    net = copy.deepcopy(original)
    given = torch.utils._pytree.tree_map(torch.Tensor.float, rotary.inputs(16, 5))

    def folds() -> int:
        with folding() as made:
            assert_close(joined(net(*given)), joined(original(*given)))
        return len(made)

    with interpreting(), torch.no_grad():
        optimize(net, example=given, compile=True)
        assert folds() > 0 and compiler["compiled"] == 1
        freeze(net)
        assert folds() == 2 and compiler["compiled"] == 2  # the first block runs as written, and is captured
        assert folds() == 2 and folds() == 0
        freeze(net)  # after writes that PyTorch does not count
        assert folds() == 4 and folds() == 0 and compiler["compiled"] == 2
        for model in (original, net):
            for parameter in model.parameters():
                parameter.mul_(1.25)
        assert folds() > 0 and folds() == 0
        unfreeze(net)
        assert folds() > 0 and folds() > 0 and compiler["compiled"] == 2


class BiasedAttention(torch.nn.Module):
    """Attention with a bias for each pair of tokens, whose heads are the last axis of its table, as in Swin."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)
        self.table = torch.nn.Parameter(torch.randn(25, 2))

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        bias = self.table.exp().view(5, 5, 2).permute(2, 0, 1)
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])
        return self.proj(o.transpose(1, 2).flatten(2))


@pytest.mark.full
def test_kept_tensors_have_the_strides_that_inductor_saw():
    """Oracle: the model as written; Inductor's code checks strides, also when nothing is kept."""
    net = torch.nn.Sequential(BiasedAttention()).eval()
    original, x = copy.deepcopy(net), torch.randn(2, 5, 16)
    with interpreting(), torch.no_grad():
        optimize(net, example=x, compile=True, freeze=True)
        for _ in range(2):
            assert_close(net(x), original(x))
        unfreeze(net)
        assert_close(net(x), original(x))


def kept_tensors(net):
    """The tensors that a frozen model caches."""
    kept = [freeze_file._frozen.get(m, {}) for m in net.modules()]
    return [t for entries in kept for entry in entries.values() for t in entry.folded[:3]]


@pytest.mark.full
def test_a_captured_graph_keeps_the_folds():
    """Oracle: the addresses that a captured graph reads: folds stay there, alive, and hold the latest weights."""
    net = model()
    freeze(net)
    with interpreting():
        with torch.no_grad():
            net(IMAGE)
        kept = kept_tensors(net)
        places, alive = [t.data_ptr() for t in kept], [weakref.ref(t) for t in kept]
        assert len(kept) == 6
        del kept
        for change in (
            lambda: net.train()(IMAGE),
            lambda: net.eval()(IMAGE),
            lambda: _average(net),
            lambda: _load(net),
        ):
            change()
            gc.collect()
            assert all(ref() is not None for ref in alive)
            with torch.no_grad():
                assert torch.equal(net.eval()(IMAGE), net(IMAGE))
            assert [t.data_ptr() for t in kept_tensors(net)] == places
        with torch.no_grad():
            qkv, norm = net.blocks[0].attn.qkv, net.blocks[0].norm1
            assert torch.equal(kept_tensors(net)[0], qkv.weight * norm.weight)
    unfreeze(net)
    gc.collect()
    assert not any(ref() is not None for ref in alive)


def test_another_tensor_at_the_same_address_is_folded_again():
    """Oracle: folded biases by hand; the second has the address and version counter of the first, which is freed."""
    norm = torch.nn.LayerNorm(8).eval().requires_grad_(False)
    x, weight, memory = torch.zeros(2, 8), torch.zeros(4, 8), torch.ones(4).numpy()
    freeze(norm)

    def folded_bias():
        bias = torch.from_numpy(memory)
        group = fold_file.Group((weight,), (bias,), norm.weight, norm.bias)
        entry = freeze_file.Entry(norm, group, norm.eps, (weight, bias, norm.weight, norm.bias))
        return freeze_file.fold_norms(x, entry)[0].folded.bias.clone()

    with interpreting(), torch.no_grad():
        assert torch.equal(folded_bias(), torch.ones(4))
        memory[:] = 2
        assert torch.equal(folded_bias(), torch.full((4,), 2.0))


def test_copies_and_pickles_are_not_frozen():
    """Oracle: their cached tensors, which are none; state dictionaries have no additional entries."""
    net = model()
    keys = set(net.state_dict())
    freeze(net)
    with interpreting(), torch.no_grad():
        net(IMAGE)
        for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            assert torch.is_tensor(twin(IMAGE)) and not kept_tensors(twin)
    assert kept_tensors(net) and set(net.state_dict()) == keys
    pairs = zip(net.modules(), model().modules(), strict=True)
    assert all(set(m.__dict__) - {ways.SIZES} == set(n.__dict__) for m, n in pairs)


@pytest.mark.full
def test_training_and_gradients_fold_within_the_call(always_folded):
    """Oracle: the same model without freezing, bit by bit; a frozen backbone passes gradients to its input."""
    net, twin = model(), model()
    freeze(net)
    with interpreting():
        for learns, mode in ((True, True), (True, False), (False, False)):
            grads = []
            for owner in (net, twin):
                image = IMAGE.clone().requires_grad_()
                owner.train(mode).requires_grad_(learns).zero_grad()
                owner(image).square().sum().backward()
                grads.append([image.grad, *(p.grad for p in owner.parameters() if learns)])
            assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
            assert bool(kept_tensors(net)) == (not learns)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["ours", "timm"])
def test_gradients_reach_folded_parameters(name, way):
    """Oracle: float64 on the PyTorch path; error ≤ 2 · (its float32 error + one rounding of the largest gradient)."""
    make, image = MODELS[name]
    net, found = make().train(), {}
    optimize(net)
    exact = copy.deepcopy(net).double()
    for key, owner, given, where in (
        ("kernels", net, image, interpreting()),
        ("plain", net, image, contextlib.nullcontext()),
        ("exact", exact, image.double(), contextlib.nullcontext()),
    ):
        with where:
            found[key] = torch.autograd.grad(owner(given).square().sum(), list(owner.parameters()))
    size = max(float(g.norm()) for g in found["exact"])
    for got, plain, want in zip(*found.values(), strict=True):
        assert (got - want).norm() <= allowed((plain - want).norm(), size, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_fold_is_recomputed_for_another_dtype(dtype, always_folded):
    """Oracle: a fresh copy under the same autocast; a float32 LayerScale widens the stream after the first branch."""
    net, image = model(), IMAGE.to(dtype)
    freeze(net)
    with interpreting(), torch.no_grad():
        net(IMAGE)
        with torch.autocast("cpu", dtype):
            assert torch.equal(net.blocks(net.patch_embed(IMAGE)), copy.deepcopy(net).blocks(net.patch_embed(IMAGE)))
        half, x = copy.deepcopy(net).to(dtype), net.patch_embed(IMAGE)
        freeze(half)
        assert half(image).dtype == dtype
        assert {t.dtype for t in kept_tensors(half)} == {dtype, torch.float32}
        net.to(dtype)
        assert torch.equal(net(image), half(image)) and x.dtype == torch.float32


@pytest.mark.full
def test_a_compiled_model_folds_in_each_call():
    """Oracle: the model itself, whose weights change unnoticed between two calls of the compiled program."""
    net = model()
    freeze(net)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    with interpreting(), torch.no_grad(), folding() as made:
        compiled(IMAGE)
        assert made == [2] and not kept_tensors(net)
        _data_teacher(net)
        got = compiled(IMAGE)
        assert made == [2] * 2 and not kept_tensors(net)
        freeze(net)
        want = net(IMAGE)
    torch._dynamo.reset()
    assert float((got - want).abs().max()) <= 64 * torch.finfo(torch.float32).eps * float(want.abs().max())


@pytest.mark.fast
def test_the_folding_threshold_comes_from_a_table(monkeypatch):
    """Oracle: bytes: a fold moves 2·F·K values, a LayerNorm 2·M·K; a table may set another threshold."""
    x = torch.empty(4, 10, 16)
    assert fold_file.pays(x, 40) and not fold_file.pays(x, 41)
    monkeypatch.setattr(fold_file, "config", lambda row, default, device: {"ROWS_PER_OUTPUT": 0.5})
    assert fold_file.pays(x, 80) and not fold_file.pays(x, 81)


@pytest.mark.fast
def test_invalid_arguments_raise():
    """Oracle: one sentence that names the argument, states what was given and suggests a remedy."""
    for call in (freeze, unfreeze):
        with pytest.raises(TypeError, match=r"model is str; give an nn.Module"):
            call("vit_base_patch16_224")
    with pytest.raises(TypeError, match="freeze is 'yes'; give True or False"):
        optimize(torch.nn.Linear(2, 2), freeze="yes")
    unfreeze(model())  # has no effect on a model that is not frozen


@pytest.mark.parametrize("frozen", [False, True])
def test_a_failed_optimize_keeps_the_folds(frozen):
    """Oracle: the state before the call; folds that a CUDA graph may read are not freed."""
    tower = build("timm_vit")
    if frozen:
        freeze(tower)
    with pytest.raises(ValueError):
        optimize(tower, freeze=True, filter_fn=lambda module, path: int(path))
    assert freeze_file.is_frozen(tower) == frozen


def test_compiled_code_does_not_depend_on_other_frozen_models():
    """Oracle: the number of compilations: the end of another frozen model does not compile anew."""
    norm, compiled = torch.nn.LayerNorm(4), []

    def call(x):
        return freeze_file.derived(norm, "sum", (x,), lambda: x + 1)

    def backend(graph, examples):
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    run = torch.compile(call, backend=backend, fullgraph=True)
    other = freeze(model())
    with torch.no_grad():
        run(torch.ones(3))
        del other
        gc.collect()
        assert torch.equal(run(torch.ones(3)), torch.full((3,), 2.0)) and len(compiled) == 1
