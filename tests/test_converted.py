"""Tests of the conversion of every model of the catalogue. Oracle: the original model.

In float64 on PyTorch both are equal up to rounding; kernels are as close to float64 as PyTorch in float32.
"""

import copy
import pickle
import sys

import pytest
import torch
from catalogue import COMMON, MODELS, build, inputs, joined, outputs
from catalogue.comparison import (
    BATCHED,
    EXACT,
    FEW,
    SINGLE,
    distance,
    distances,
    run,
    tolerance,
    unrounded,
)
from catalogue.transformers import DENSE, PACKED, TOWERS
from interpreter import interpreting
from recording import Recorder
from sampling import marked, sampled
from torch.utils._pytree import tree_map_only

from fastvit_triton import optimize, revert
from fastvit_triton.convert import forwards
from fastvit_triton.engine.freeze import kept_folds
from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.kernels.settings import forcing

# towers of transformers, one for each reader and each kind of block; the others run in the full test
FORMS = """AltCLIPVisionModel BlipVisionModel Blip2VisionModel InternVLVisionModel MLCDVisionModel MllamaVisionModel
Molmo2VisionModel DPTModel ViltModel GroupViTVisionModel PixioModel Aimv2VisionModel HunYuanVLVisionTransformer
qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel Qwen3VLVisionModel GlmOcrVisionModel Inkling2VisionModel"""
FORMS = [f"hf_{name}" for name in FORMS.split()]
RARE = [name for name in TOWERS | PACKED if name not in FORMS]
SAME = "hf_levit_drop"  # in evaluation it is hf_levit, without stochastic depth
STATISTICS = [name for name, entry in MODELS.items() if entry.batched and name != SAME]


def full(cases, often):
    """Parameters, of which those that are not in `often` are marked full."""
    return marked(cases, pytest.mark.full, lambda *values: (values[0] if len(values) == 1 else values) not in often)


TRAINING = full([(name, "training") for name in MODELS], {(n, "training") for n in MODELS if n not in RARE})
EVALUATION = sampled([(name, "evaluation") for name in COMMON], 3)
EVALUATION += [
    (name, "evaluation") for name in MODELS if name not in COMMON and (name.startswith("timm_") or name in STATISTICS)
]


@pytest.fixture
def fallbacks(monkeypatch):
    """Classes of the converted modules whose own forward ran."""
    found, original = set(), forwards.original

    def noted(module, *inputs, **named):
        tower = forwards.forward_for(module).became == ""  # a tower's own forward, called by ours
        if not tower and not isinstance(module, torch.nn.Sequential):  # the MLP of Swin2SR's bias, of another shape
            found.add(type(module).__name__)
        return type(module).forward(module, *inputs, **named)

    for name, module in list(sys.modules.items()):
        if name.startswith("fastvit_triton.convert.") and getattr(module, "original", None) is original:
            monkeypatch.setattr(module, "original", noted)
    return found


@pytest.mark.few(20)
@pytest.mark.parametrize("name, mode", marked(TRAINING, pytest.mark.fast, lambda name, _: name in COMMON) + EVALUATION)
def test_outputs_and_gradients(name, mode, fallbacks):
    """They and statistics equal the original's, to float32 where the original rounds to it; a pickled model's are the
    same; `revert` leaves nothing. What the entry names is all that is left, and no converted module falls back."""
    entry, train = MODELS[name], mode == "training"
    torch.manual_seed(1)
    model, given = build(name).train(train), inputs(name)
    original = copy.deepcopy(model)
    report = optimize(model)
    assert (len(report.fused), {row.type for row in report.left}) == (entry.fused, set(entry.left))
    want = run(original, given)
    with using_backend("torch"):
        got = run(model, given)
    assert fallbacks <= {*entry.left, *entry.own}
    assert max(distances(got, want)) <= tolerance(name, train)
    for (key, ours), theirs in zip(model.named_buffers(), original.buffers(), strict=True):
        assert "running" not in key or distance(ours, theirs) <= EXACT, key
    if entry.rounded:
        with unrounded(), using_backend("torch"):
            assert max(distances(run(model, given), run(original, given))) <= EXACT
    with using_backend("torch"):
        again = run(pickle.loads(pickle.dumps(model)), given)
    assert torch.equal(again[0], got[0])
    revert(model)
    assert not any("forward" in vars(m) for m in model.modules())


MORE = [name for name in MODELS if name not in (*COMMON, *RARE, SAME)]  # kernels of the common: test_convert.py
KERNELS = [(name, "kernels") for name in MORE if MODELS[name].fused]
KERNELS += [(name, "frozen kernels") for name in MORE if name in STATISTICS or name.startswith("timm_")]
OFTEN = [(f"hf_{name}VisionModel", "kernels") for name in ("AltCLIP", "Blip", "Blip2")]
OFTEN += [("timm_vitamin", "kernels"), ("timm_vitamin", "frozen kernels"), ("vit_pytorch_cct", "kernels")]
OFTEN += [(name, "frozen kernels") for name in ("vit_pytorch_cvt", "hf_levit", "hf_cvt")]
STEMS = {"hf_levit": 4}  # BatchNorms outside of attention and MLPs


def single(t):
    return t.float() if t.is_floating_point() else t


@pytest.mark.few(2)
@pytest.mark.parametrize("name, kind", full(KERNELS, OFTEN))
def test_kernels(name, kind):
    """Oracle: the original in float64, from which the kernels in the interpreter and PyTorch in float32 differ."""
    torch.manual_seed(1)
    truth, exact = build(name).eval(), inputs(name)
    given = tree_map_only(torch.Tensor, single, exact)
    plain, model = (copy.deepcopy(truth).float() for _ in range(2))
    optimize(model, freeze=kind == "frozen kernels")
    want, own = run(truth, exact), run(plain, given)
    with interpreting(), forcing("fused"), Recorder() as launched:
        if kind == "kernels" and name not in TOWERS | PACKED | DENSE:  # whose kernels' gradients the common models show
            got = run(model, given)
        else:
            torch.manual_seed(2)  # as `run`: ViLT draws the order of its patches
            with torch.no_grad():
                got = outputs(model, given), own[1]
    assert launched.ours
    for exact, theirs, ours in zip(*((y, joined(grads)) for y, grads in (want, own, got)), strict=True):
        assert distance(ours, exact) <= SINGLE + 2 * distance(theirs, exact)
    if kind != "kernels" and name.startswith(("hf", "vit")):
        assert sum("batch_norm" in op for op in launched.ops) == STEMS.get(name, 0)


def hooked(model):
    """Doubles the output of every linear layer that is called, and notes the shapes of its inputs."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.shapes = []
            module.register_forward_hook(lambda layer, x, y: layer.shapes.append(x[0].shape) or 2 * y)


def dropping(model):
    """Turns on all dropout."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.3
        for name in ("attention_dropout", "dropout", "dropout_prob"):
            if isinstance(getattr(module, name, None), (int, float)):
                setattr(module, name, 0.3)


def eager(model):
    """Selects attention that returns its weights."""
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = "eager"


SHORT = [f"hf_{name}" for name in ("sam.SamVisionEncoder", "Llama4VisionModel", "MgpstrModel", "HieraModel")]
VIT_PYTORCH = [name for name in MODELS if name.startswith("vit_pytorch_") and name not in COMMON]
CHANGED = [(name, change) for name in (*VIT_PYTORCH, *DENSE) for change in (hooked, dropping, eager)]
CHANGED = [case for case in CHANGED if case[0] in DENSE or case[1] is not eager]
EVERY = [case for case in CHANGED if case[0] in (*VIT_PYTORCH, *SHORT)] + [("hf_cvt", dropping)]


@pytest.mark.few(16)
@pytest.mark.parametrize("name, change", full([*CHANGED, ("hf_cvt", dropping)], EVERY))
def test_changed(name, change):
    """A changed model equals the original, with the same random numbers; hooked layers are called with its inputs."""
    torch.manual_seed(1)
    model, given = build(name).train(), inputs(name)
    change(model)
    original = copy.deepcopy(model)
    optimize(model)
    want = run(original, given)
    with using_backend("torch"):
        got = run(model, given)
    shapes = [[getattr(m, "shapes", None) for m in each.modules()] for each in (model, original)]
    assert shapes[0] == shapes[1]
    most = FEW if change is eager else tolerance(name, True)
    if change is hooked:  # doubled layers amplify rounding: the original's answer to one rounding of its inputs
        rounding = torch.finfo(torch.float32 if most == FEW else torch.float64).eps
        nudged = tree_map_only(torch.Tensor, lambda t: t * (1 + rounding) if t.is_floating_point() else t, given)
        most += 2 * distance(joined(run(copy.deepcopy(original), nudged)[1]), joined(want[1]))
    assert max(distances(got, want)) <= most


@pytest.mark.few(5)
@pytest.mark.parametrize("name", STATISTICS)
def test_statistics(name):
    """After `freeze` BatchNorms are folded, anew after a training forward, whose writes PyTorch does not count."""
    torch.manual_seed(1)
    model, given = build(name), inputs(name)
    original = copy.deepcopy(model.eval())
    optimize(model, freeze=True)
    want = run(original, given)
    with using_backend("torch"):
        assert max(distances(run(model, given), want)) <= EXACT
        for _ in range(2):
            for train, most in ((False, EXACT), (False, EXACT), (True, BATCHED)):
                results = []
                for each in (model, original):
                    torch.manual_seed(2)
                    with torch.no_grad():
                        results.append(outputs(each.train(train), given))
                assert distance(*results) <= most
                assert train or name == "vit_pytorch_twins" or kept_folds(model.modules())


@pytest.mark.few(2)
@pytest.mark.parametrize("name", [name for name, entry in MODELS.items() if entry.hooked])
def test_hooks(name):
    """A hook on a submodule runs as in the original, registered before or after `optimize`, and frozen."""
    torch.manual_seed(1)
    model, given = build(name).eval(), inputs(name)
    original = copy.deepcopy(model)
    optimize(model, freeze=True)
    with torch.no_grad():
        plain = outputs(original, given)
    for end in MODELS[name].hooked:
        path = next(path for path, _ in model.named_modules() if path.endswith(end))
        hook = lambda module, given, y: 1.5 * y  # noqa: E731
        handles = [m.get_submodule(path).register_forward_hook(hook) for m in (model, original)]
        before = copy.deepcopy(original)
        optimize(before)
        with using_backend("torch"), torch.no_grad():
            want = outputs(original, given)
            assert distance(want, plain) > EXACT or end == "softmax", path  # which timm calls only without SDPA
            assert max(distance(outputs(m, given), want) for m in (model, before)) <= EXACT, path
        for handle in handles:
            handle.remove()
