"""Tests of optimised models under hooks, patched classes, a failing `optimize`, and tracers. Oracle: the original."""

import copy
import functools
import itertools
import threading
import warnings

import pytest
import timm
import torch
import torchvision
import transformers
from catalogue import COMMON, PYRAMIDS, build, inputs, outputs
from interpreter import interpreting
from recording import Recorder
from sampling import sampled
from test_convert import same
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.launch_recorder import recording
from fastvit_triton import create_model, layers, optimize, revert
from fastvit_triton.convert import forwards
from fastvit_triton.engine import hooks
from fastvit_triton.engine.leaves import LAYER_NORMS
from fastvit_triton.explain import capture
from fastvit_triton.kernels.backend import using_backend

FAMILIES = ["timm_vit", "timm_eva02", "hf_vit", "hf_siglip", "torchvision_vit", "vit_pytorch_vit"]
IN_PLACE = "swin_v2", "swinv2", "twins"  # on the output of a module, which backward hooks forbid
FAMILIES += [n for n in PYRAMIDS if not any(kind in n for kind in IN_PLACE)]
SMALL = dict(img_size=32, embed_dim=24, depth=2, num_heads=2, num_classes=5)


def ours():
    """A small model of ours with every module that a fused block reads instead of calling."""
    return create_model("vit_base_patch16_224", **SMALL, init_values=0.1, drop_path_rate=0.1)


def forward_pre(seen):
    return torch_module.register_module_forward_pre_hook(lambda m, x: seen.append((m, x)))


def forward(seen):
    return torch_module.register_module_forward_hook(lambda m, x, y: seen.append((m, (*x, y))))


def backward_pre(seen):
    return torch_module.register_module_full_backward_pre_hook(lambda m, g: seen.append((m, g)))


def backward(seen):
    return torch_module.register_module_full_backward_hook(lambda m, g, h: seen.append((m, (*g, *h))))


def watched_run(model, given, register):
    """(paths and tensors of every call that a global hook sees, the model's output)."""
    paths, seen = {m: path for path, m in model.named_modules()}, []
    handle = register(seen)
    try:
        y = outputs(model, given)
        if register in (backward_pre, backward):
            y.square().sum().backward()
    finally:
        handle.remove()
    return [(paths[m], [t.detach() for t in found if isinstance(t, torch.Tensor)]) for m, found in seen], y


REGISTER = forward_pre, forward, backward_pre, backward


@pytest.mark.few(6)
@pytest.mark.fast
@pytest.mark.filterwarnings("ignore:.*backward hook:UserWarning")  # for images without a gradient, and dictionaries
@pytest.mark.parametrize("name, register", sampled(itertools.product(FAMILIES, REGISTER), 3))
def test_global_hooks_see_every_call(name, register, references):
    """Oracle: the same hook on the original: the same modules in the same order, with the same tensors."""
    model, given = build(name).train(), inputs(name)
    plain = copy.deepcopy(model)
    optimize(model)
    outputs(model, given)  # state of a call without hooks must not persist
    (got, y), (want, z) = (watched_run(m, given, register) for m in (model, plain))
    assert [path for path, _ in got] == [path for path, _ in want] and len(got) > 20
    assert torch.equal(y, z)
    for (_, a), (_, b) in zip(got, want, strict=True):
        assert len(a) == len(b) and all(torch.equal(s, t) for s, t in zip(a, b, strict=True))
    calls = []
    handle = register([])
    optimize(model)  # while the hook is registered
    handle.remove()
    model.register_forward_hook(lambda *_: calls.append(1))
    assert same(outputs(model, given), z) and calls == [1]


@pytest.mark.filterwarnings("ignore:.*backward hook:UserWarning")  # for images without a gradient, and dictionaries
@pytest.mark.parametrize("register", REGISTER)
def test_global_hooks_see_every_call_of_our_models(register):
    """Oracle: the PyTorch path of the same model, which calls every module; without a hook the kernels run."""
    model, given = ours().eval(), torch.randn(2, 3, 32, 32)
    want, z = watched_run(model, given, register)
    with interpreting():
        with Recorder() as run:
            got, y = watched_run(model, given, register)
        with Recorder() as free:
            outputs(model, given)
    assert [path for path, _ in got] == [path for path, _ in want] and len(got) > 25
    assert same(y, z) and "linear_fwd" not in run.ours and "layer_norm_fwd" not in run.ours
    assert len(free.ours) > len(run.ours)


def test_flops_are_counted_by_module(references):
    """Oracle: the counter's table for the original; it finds modules by global hooks."""
    model, given = build("timm_vit"), inputs("timm_vit")
    plain, tables = copy.deepcopy(model), []
    optimize(model)
    for owner in (model, plain):
        with FlopCounterMode(display=False) as counter:
            outputs(owner, given)
        tables.append(counter.get_flop_counts())
    assert tables[0] == tables[1] and "VisionTransformer.blocks.1.mlp.fc1" in tables[0]


def wrapping(own):
    """A patch with functools.wraps, which copies name, module and __wrapped__ from the original."""

    @functools.wraps(own)
    def twice(*inputs, **named):
        y = own(*inputs, **named)
        return (2 * y[0], *y[1:]) if isinstance(y, tuple) else 2 * y

    return twice


def disguised(own):
    """The same patch without __wrapped__."""
    twice = wrapping(own)
    del twice.__wrapped__
    return twice


def decorated(own):
    """A patch by a torch decorator."""
    return torch.no_grad()(own)


class Twice:
    """A callable that is not a function."""

    def __init__(self, own):
        self.own = own

    def __get__(self, instance, owner):
        return self if instance is None else functools.partial(wrapping(self.own), instance)

    def __call__(self, *inputs, **named):
        return wrapping(self.own)(*inputs, **named)


def as_partial(own):
    return functools.partialmethod(wrapping(own))


def as_lambda(own):
    return lambda *inputs, **named: wrapping(own)(*inputs, **named)


PATCHES = [wrapping, disguised, decorated, Twice, as_partial, as_lambda]
PATCHED = {
    "linear": ("timm_vit", nn.Linear),
    "norm": ("torchvision_vit", nn.LayerNorm),
    "gelu": ("timm_vit", nn.GELU),
    "timm_norm": ("timm_vit", timm.layers.LayerNorm),
    "timm_attention": ("timm_vit", timm.layers.Attention),
    "timm_mlp": ("timm_vit", timm.layers.Mlp),
    "timm_block": ("timm_vit", timm.models.vision_transformer.Block),
    "timm_patches": ("timm_vit", timm.layers.PatchEmbed),
    "conv": ("timm_vit", nn.Conv2d),
    "scale": ("timm_deit3", timm.layers.LayerScale),
    "pool": ("timm_siglip", timm.layers.AttentionPoolLatent),
    "window": ("timm_swin", timm.models.swin_transformer.WindowAttention),
    "swin_block": ("timm_swin", timm.models.swin_transformer.SwinTransformerBlock),
    "swin_merging": ("timm_swin", timm.models.swin_transformer.PatchMerging),
    "cosine_window": ("timm_swin_v2", timm.models.swin_transformer_v2.WindowAttention),
    "local": ("timm_twins_svt", timm.models.twins.LocallyGroupedAttn),
    "global": ("timm_twins_svt", timm.models.twins.GlobalSubSampleAttn),
    "positions": ("timm_twins_svt", timm.models.twins.PosConv),
    "pvt_mlp": ("timm_pvt_v2", timm.models.pvt_v2.MlpWithDepthwiseConv),
    "depthwise": ("timm_pvt_v2", nn.Conv2d),
    "tnt_attention": ("timm_tnt", timm.models.tnt.Attention),
    "cross_attention": ("timm_crossvit", timm.models.crossvit.CrossAttention),
    "shifted": ("torchvision_swin", torchvision.models.swin_transformer.ShiftedWindowAttention),
    "shifted_v2": ("torchvision_swin_v2", torchvision.models.swin_transformer.ShiftedWindowAttentionV2),
    "row_depth": ("torchvision_swin", torchvision.ops.StochasticDepth),
    "hf_attention": ("hf_vit", transformers.models.vit.modeling_vit.ViTAttention),
    "hf_layer": ("hf_vit", transformers.models.vit.modeling_vit.ViTLayer),
    "hf_act": ("hf_vit", transformers.activations.GELUActivation),
    "multihead": ("torchvision_vit", nn.MultiheadAttention),
    "encoder": ("torch_encoder_layer", nn.TransformerEncoderLayer),
    "sequential": ("vit_pytorch_vit", nn.Sequential),
}


@pytest.mark.few(2)
@pytest.mark.fast
@pytest.mark.parametrize("name, when", sampled(itertools.product(PATCHED, ("before", "after")), 3))
def test_patched_forwards_are_called(name, when, references, monkeypatch):
    """Oracle: the original under the same patch, and without it after the patch is undone."""
    family, cls = PATCHED[name]
    model, given = build(family), inputs(family)
    plain, own = copy.deepcopy(model), cls.forward
    free = outputs(plain, given)
    for patch in PATCHES:
        if when == "after":
            optimize(model)
        monkeypatch.setattr(cls, "forward", patch(cls.__dict__.get("forward", own)))
        optimize(model)
        got, want = outputs(model, given), outputs(plain, given)
        assert same(got, want) and (patch is decorated or not same(want, free)), patch
        assert got.requires_grad == want.requires_grad
        monkeypatch.undo()
        kept = []
        with monkeypatch.context() as spied:
            spied.setattr(forwards, "original", lambda module, *x, kept=kept, **more: kept.append(module))
            outputs(model, given)
        assert not kept  # every module is fused again
        revert(model)


def test_a_method_of_another_class_is_a_patch(references, monkeypatch):
    """Oracle: the original under the same patch; the function belongs to another class of the same package."""
    model, given = build("timm_vit"), inputs("timm_vit")
    plain = copy.deepcopy(model)
    report = optimize(model)
    monkeypatch.setattr(timm.layers.Mlp, "forward", timm.layers.GluMlp.forward)
    for owner in (model, plain):
        for module in owner.modules():
            if type(module) is timm.layers.Mlp:
                module.chunk_dim, module.gate_last = -1, True
                module.fc2 = nn.Linear(module.fc1.out_features // 2, 24, dtype=torch.float64)
                nn.init.constant_(module.fc2.weight, 0.1)
                nn.init.zeros_(module.fc2.bias)
    assert same(outputs(model, given), outputs(plain, given))
    (why,) = {row.why for row in optimize(model).left}
    assert why == "Mlp.forward is not the one in the file of timm.layers.mlp" and not report.left


def test_a_method_set_on_an_instance_is_called(references):
    """Oracle: the original with the same method, and another output without it."""
    attention = timm.models.beit.Attention(16, 2, window_size=(2, 2)).eval()
    nn.init.normal_(attention.relative_position_bias_table)
    x = torch.randn(2, 5, 16)
    free = attention(x)
    own = attention._get_rel_pos_bias
    optimize(attention)
    assert same(attention(x), free)
    attention._get_rel_pos_bias = lambda: 2 * own()
    assert same(attention(x), type(attention).forward(attention, x)) and not same(attention(x), free)


@pytest.mark.few(3)
@pytest.mark.parametrize("cls", [layers.Attention, layers.Mlp, layers.LayerScale, nn.Linear, nn.LayerNorm, nn.GELU])
def test_patched_forwards_are_called_in_our_models(cls, monkeypatch):
    """Oracle: the PyTorch path under the same patch."""
    model, given = ours().eval(), torch.randn(2, 3, 32, 32)
    free = outputs(model, given)
    monkeypatch.setattr(cls, "forward", wrapping(cls.forward))
    want = outputs(model, given)
    with interpreting(), torch.no_grad():
        assert same(outputs(model, given), want)
    assert same(want, free) == (cls is nn.GELU)  # which our models do not use
    monkeypatch.undo()
    with interpreting(), torch.no_grad(), Recorder() as run:
        assert same(outputs(model, given), free)
    assert "attention_fwd" in run.ours


class Stop(BaseException):
    """An exception that is not an Exception and that no handler expects, like KeyboardInterrupt."""


def facts(model):
    return {path: dict(module.__dict__) for path, module in model.named_modules()}


def unchanged(model, before):
    return all(
        module.__dict__.keys() == before[path].keys() and all(module.__dict__[k] is v for k, v in before[path].items())
        for path, module in model.named_modules()
    )


@pytest.mark.fast
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, Stop])
@pytest.mark.parametrize("place", ["filter", "reader", "revert"])
@pytest.mark.parametrize("earlier", [False, True], ids=["plain", "optimised"])
def test_a_failed_optimize_changes_nothing(earlier, place, error, monkeypatch, references):
    """Oracle: every instance's dictionary before the call; the model then works as before."""
    model, given, left = build("timm_beit").train(), inputs("timm_beit"), [5]
    model.blocks[0].attn.eval()
    if earlier:
        optimize(model, filter_fn=lambda module, path: "blocks.0" in path)
    before, want = facts(model), outputs(model, given)

    def fail(*_):
        left[0] -= 1
        if left[0] == 0:
            raise error
        return True

    with pytest.raises(error):
        if place == "filter":
            optimize(model, filter_fn=fail)
        elif place == "reader":
            beit = type(model.blocks[0].attn)
            own = torch.Tensor.permute
            monkeypatch.setattr(torch.Tensor, "permute", lambda t, *axes: fail() and own(t, *axes))
            assert beit.__name__ == "Attention"
            left[0] = 2  # as during training
            optimize(model)
        else:
            optimize(model)
            before = facts(model)
            ours = "fastvit_triton.convert.conversion.is_our_forward"
            monkeypatch.setattr(ours, lambda forward: fail() and hooks.is_our_forward(forward))
            revert(model)
    monkeypatch.undo()
    assert unchanged(model, before)
    assert same(outputs(model, given), want)


GRAPHS = ["timm_vit", "timm_siglip", "timm_swin", "timm_eva02", "torchvision_vit"]


@pytest.mark.fast
@pytest.mark.parametrize("name", GRAPHS)
def test_fx_traces_the_original(name, references):
    """Oracle: the original's graph, node by node, and its results."""
    model, given = build(name).eval(), inputs(name)
    plain = copy.deepcopy(model)
    optimize(model)
    got, want = torch.fx.symbolic_trace(model), torch.fx.symbolic_trace(plain)
    assert str(got.graph) == str(want.graph)
    assert same(got(given), plain(given))


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("name", ["test_vit_relpos", "swinv2_cr_tiny_ns_224"])
def test_fx_traces_modules_that_are_called_with_buffers(name, backend):
    """Oracle: the original's results. Their MLPs of positions take a buffer, while parameters are proxies."""
    timm = pytest.importorskip("timm")
    options = dict(img_size=64) if name == "test_vit_relpos" else dict(img_size=64, depths=(1, 1, 1, 1), window_size=2)
    model = timm.create_model(name, **options).eval()
    plain, given = copy.deepcopy(model), torch.randn(1, 3, 64, 64)
    with using_backend(backend):
        optimize(model)
        assert same(torch.fx.symbolic_trace(model)(given), plain(given))


def test_feature_extractors(references):
    """Oracle: the feature extractors of torchvision and timm applied to the original."""
    from timm.models import FeatureGraphNet
    from torchvision.models.feature_extraction import create_feature_extractor

    vit, given = build("torchvision_vit").eval(), inputs("torchvision_vit")
    nodes = ["encoder.layers.encoder_layer_0.mlp", "encoder.ln"]
    plain = create_feature_extractor(copy.deepcopy(vit), nodes)(given)
    optimize(vit)
    got = create_feature_extractor(vit, nodes)(given)
    assert got.keys() == plain.keys() and all(same(got[n], plain[n]) for n in nodes)
    swin, given = build("timm_swin").eval(), inputs("timm_swin")
    nodes = {"layers.0": "0", "layers.1": "1"}
    want = create_feature_extractor(copy.deepcopy(swin), nodes)(given)
    optimize(swin)
    for extractor in (create_feature_extractor(swin, nodes), FeatureGraphNet(swin, (0, 1))):
        got = extractor(given)
        assert same(next(iter(got.values())) if isinstance(got, dict) else got[0], want["0"])


def trace(model, given):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(model, given, check_trace=False, strict=False)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", ["timm_vit", "timm_swin", "hf_vit", "torchvision_vit", "vit_pytorch_vit", "ours"])
def test_jit_traces_the_original(name):
    """Oracle: node kinds in the original's trace; none of our operators is in it, even where the kernels would run."""
    model, given = (ours() if name == "ours" else build(name, torch.float32)).eval(), torch.randn(2, 3, 32, 32)
    plain = trace(copy.deepcopy(model), given)
    optimize(model)
    with interpreting():
        got = trace(model, given)
    assert [n.kind() for n in got.inlined_graph.nodes()] == [n.kind() for n in plain.inlined_graph.nodes()]
    assert "fastvit_triton::" not in str(got.inlined_graph)
    y, z = got(given), plain(given)
    y, z = (y["last_hidden_state"], z["last_hidden_state"]) if isinstance(y, dict) else (y, z)
    assert same(y, z)


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", ["timm_vit", "timm_swin", "torchvision_vit"])
def test_jit_scripts_after_revert(name):
    """Oracle: the original's scripted code; TorchScript rejects an optimised model instead of scripting it wrongly."""
    model, given = build(name).eval(), inputs(name)
    plain = torch.jit.script(copy.deepcopy(model))
    optimize(model)
    with pytest.raises(AttributeError, match="partial"):
        torch.jit.script(model)
    revert(model)
    scripted = torch.jit.script(model)
    assert scripted.code == plain.code and same(scripted(given), plain(given))


def test_jit_capture_ignores_other_threads():
    """Oracle: the model's output; other threads run it meanwhile, and none of their operations is recorded."""
    model, given = build("timm_vit").eval(), inputs("timm_vit")
    optimize(model)
    want, errors, stop = outputs(model, given).detach(), [], threading.Event()
    other = torch.randn(3, 3, 32, 32, dtype=torch.float64)

    def work():
        try:
            while not stop.is_set():
                with torch.no_grad():
                    outputs(model, other)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            with capture(model, gradients=True) as seen, torch.no_grad():
                assert same(outputs(model, given), want)
            assert [layer.shape[0] for layer in seen.layers] == [2, 2]
            assert all(len(tokens) == 2 for tokens in seen.stream)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


CALLED = [n for n in COMMON if n not in ("torch_multihead", "torch_encoder_layer", "torch_encoder_layer_first")]


@pytest.mark.few(8)
@pytest.mark.parametrize("name", sampled(CALLED, 2))
def test_the_report_matches_what_runs(name, monkeypatch, always_folded):
    """Oracle: the called modules, and those that ran their own forward, in one inference call that folds norms.

    A LayerNorm is called if and only if its row is bare, and no fused row falls back to its own forward.
    """
    model, given = build(name, torch.float32).eval(), inputs(name, torch.float32)
    report, own, called = optimize(model), nn.Module.__call__, set()
    monkeypatch.setattr(nn.Module, "__call__", lambda self, *x, **more: called.add(id(self)) or own(self, *x, **more))
    fallbacks = set()
    for file in ("forwards", "readers.timm.tnt", "readers.transformers.swin"):
        kept = __import__(f"fastvit_triton.convert.{file}", fromlist=["original"]).original

        def spy(module, *x, kept=kept, **more):
            fallbacks.add(id(module))
            return kept(module, *x, **more)

        monkeypatch.setattr(f"fastvit_triton.convert.{file}.original", spy)
    with torch.no_grad(), recording("sm_90"):
        outputs(model, given)
    for row in report.rows:
        module = model.get_submodule(row.path)
        if row.became is not None:
            assert id(module) not in fallbacks, row
        if hooks.type_name(module) in LAYER_NORMS and (id(module) in called or not row.bare):
            assert (id(module) in called) == row.bare, row


@pytest.mark.fast
def test_labels_of_text_towers():
    """Oracle: CLIP's text tower is always causal, and all of it is fused but the norm after its blocks."""
    sizes = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, vocab_size=9)
    config = transformers.CLIPTextConfig(**sizes, eos_token_id=8, bos_token_id=0)
    report = optimize(transformers.CLIPTextModel(config).eval())
    assert not report.left and [row.path.split(".")[-1] for row in report.norms] == ["final_layer_norm"]
    assert str(report).startswith("2 of 2 blocks are converted, ")
    assert "LayerNorm, in a launch of its own" in report.text(verbose=True)
