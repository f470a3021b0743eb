"""Recognition of classes by the code of their forward, and comparison of converted modules with originals."""

import importlib
import json
import sys
import types
from pathlib import Path

import pytest
import timm
import torch
from catalogue import build, inputs
from torch import nn

import fastvit_triton
from benchmarks.recognition import merged
from fastvit_triton.convert import forwards, recognition
from fastvit_triton.convert.recognition import KNOWN, Unreadable, fingerprint, recognised

PACKAGE = str(Path(fastvit_triton.__file__).parent)
CLIP = "transformers.models.clip.modeling_clip"


def transformers_class(name: str) -> type[nn.Module]:
    """A class of transformers from "model.Class"."""
    model, cls = name.split(".")
    return getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), cls)


@pytest.fixture(autouse=True)
def forget():
    recognition.forget()
    yield
    recognition.forget()


def module_from(source: str, name: str, tmp_path) -> types.ModuleType:
    """A module imported from a file with this source."""
    (tmp_path / f"{name}.py").write_text(source)
    spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


BASE = """
import math
import torch
import torch.nn.functional as F
from torch import nn

SCALE = 2.0

def helper(x, power: float = 2.0):
    return x ** power

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def half(self, x):
        return x / 2

    @property
    def wide(self):
        return self.fc.weight.shape[0] > 2

    def forward(self, x: torch.Tensor, mask=None) -> torch.Tensor:
        '''Docstring.'''
        out: torch.Tensor = F.gelu(self.fc(x))
        both = [helper(t) for t in (out, SCALE * out)]
        return self.half(both[0] + both[1]) if self.wide else x
"""
SAME = {
    "names of classes and variables": lambda s: s.replace("Layer", "Other").replace("both", "pair").replace("out", "h"),
    "names of helpers": lambda s: s.replace("helper", "other_helper").replace("SCALE", "FACTOR"),
    "annotations, docstrings, layout": lambda s: (
        s.replace(": torch.Tensor", "")
        .replace(" -> torch.Tensor", "")
        .replace("'''Docstring.'''", "")
        .replace("x / 2", "(x / \n            2)  # half")
    ),
    "imports under another name": lambda s: s.replace("import torch.nn.functional as F", "").replace(
        "F.gelu", "nn.functional.gelu"
    ),
    "submodules": lambda s: s.replace("nn.Linear(4, 4)", "nn.Linear(8, 8)"),
}
OTHER = {
    "a statement": lambda s: s.replace("both[0] +", "both[0] -"),
    "an attribute": lambda s: s.replace("self.fc", "self.fc1"),
    "an argument's name": lambda s: s.replace("mask=None", "bias=None"),
    "a default": lambda s: s.replace("mask=None", "mask=1"),
    "a helper's code": lambda s: s.replace("x ** power", "x * power"),
    "a helper's default": lambda s: s.replace("= 2.0):", "= 3.0):"),
    "a constant": lambda s: s.replace("SCALE = 2.0", "SCALE = 4.0"),
    "a method": lambda s: s.replace("x / 2", "x / 3"),
    "a property": lambda s: s.replace("> 2", "> 3"),
    "a function of torch": lambda s: s.replace("F.gelu", "F.relu"),
    "a decorator": lambda s: s.replace("    def forward", "    @torch.no_grad()\n    def forward"),
}


@pytest.mark.parametrize("change", SAME)
def test_what_does_not_count(change, tmp_path):
    """Oracle: the fingerprint of the unchanged class."""
    first = module_from(BASE, "meaning_first", tmp_path).Layer
    second = module_from(SAME[change](BASE), "meaning_second", tmp_path)
    other = next(v for v in vars(second).values() if isinstance(v, type) and v.__module__ == "meaning_second")
    assert fingerprint(other) == fingerprint(first)


@pytest.mark.parametrize("change", OTHER)
def test_what_counts(change, tmp_path):
    """Oracle: the fingerprint of the unchanged class, from which it differs."""
    first = module_from(BASE, "meaning_first", tmp_path).Layer
    assert OTHER[change](BASE) != BASE
    other = module_from(OTHER[change](BASE), "meaning_second", tmp_path).Layer
    assert fingerprint(other) != fingerprint(first)


def other_helper(x, power):
    return x * power


def third(self, x):
    return x / 3


NOW = {
    "a helper": lambda m: setattr(m, "helper", abs),
    "a helper's code": lambda m: setattr(m.helper, "__code__", other_helper.__code__),
    "a helper's default": lambda m: setattr(m.helper, "__defaults__", (3.0,)),
    "a constant": lambda m: setattr(m, "SCALE", 4.0),
    "an imported module": lambda m: setattr(m, "F", m.torch),
    "a method": lambda m: setattr(m.Layer, "half", third),
    "a property": lambda m: setattr(m.Layer, "wide", True),
}


@pytest.mark.parametrize("change", NOW)
def test_functions_count_as_they_are_now(change, tmp_path):
    """Oracle: the fingerprint before the change, from which it differs."""
    module = module_from(BASE, "meaning_first", tmp_path)
    before = fingerprint(module.Layer)
    assert fingerprint(module.Layer) == before
    NOW[change](module)
    assert fingerprint(module.Layer) != before


def test_equal_code_with_another_decorator_counts(tmp_path):
    """Oracle: the fingerprint before the file was changed and loaded again, from which it differs."""
    source = BASE.replace("    def forward", "    @torch.no_grad()\n    def forward")
    first = module_from(source, "meaning_first", tmp_path).Layer
    before = fingerprint(first)
    other = module_from(source.replace("no_grad", "enable_grad"), "meaning_first", tmp_path).Layer
    assert other.forward.__wrapped__.__code__ == first.forward.__wrapped__.__code__
    assert fingerprint(other) != before


def test_a_second_model_takes_few_calls():
    """Oracle: by count, 2,741 of this package's functions for two blocks; code is read once in a process."""
    models = [timm.create_model("vit_base_patch16_224", depth=2, embed_dim=64, num_heads=2) for _ in range(2)]
    fastvit_triton.optimize(models[0])
    calls = 0

    def count(frame, event, _):
        nonlocal calls
        calls += event == "call" and PACKAGE in frame.f_code.co_filename

    sys.setprofile(count)
    try:
        fastvit_triton.optimize(models[1])
    finally:
        sys.setprofile(None)
    assert 0 < calls <= 2800


def test_torch_classes_differ():
    """Oracle: a subclass without a forward of its own runs that of its base, which counts by name."""
    linear, conv = type("Linear", (nn.Linear,), {}), type("Conv", (nn.Conv2d,), {})
    assert fingerprint(linear) != fingerprint(conv)


def test_code_without_source_or_with_free_variables_is_unreadable(tmp_path):
    """Oracle: no fingerprint, hence no recognition."""
    scope = {"__name__": "meaning_exec"}
    exec(compile(BASE, "<string>", "exec"), scope)
    with pytest.raises(Unreadable, match="source"):
        fingerprint(scope["Layer"])
    source = "from torch import nn\ndef make(scale):\n    class Layer(nn.Module):\n"
    source += "        def forward(self, x):\n            return x * scale\n    return Layer\n"
    with pytest.raises(Unreadable, match="scale"):
        fingerprint(module_from(source, "meaning_closure", tmp_path).make(2))
    assert recognised(scope["Layer"]) is None


def test_rows_of_other_releases_stay():
    """Oracle: by hand; every row of the file is of a class that is registered now."""
    old = {"a": {"as": "x.B", "classes": ["x.B"], "releases": ["x 1.9.0"]}}
    new = {"a": {"as": "x.A", "classes": ["x.A"], "releases": ["x 1.10.0"]}}
    both = {"as": "x.A", "classes": ["x.A", "x.B"], "releases": ["x 1.9.0", "x 1.10.0"]}
    assert merged(old, new) == {"a": both} and merged(old, {}) == old
    rows = json.loads(KNOWN.read_text())
    assert {row["as"] for row in rows.values()} <= {*forwards.FORWARDS, *forwards.INNER}


# the registered class whose code each one runs; the last ones differ in a helper or in what they pass to attention
COPIES = {
    "altclip.AltCLIPMLP": f"{CLIP}.CLIPMLP",
    "metaclip_2.MetaClip2Attention": f"{CLIP}.CLIPAttention",
    "x_clip.XCLIPAttention": f"{CLIP}.CLIPAttention",
    "metaclip_2.MetaClip2EncoderLayer": f"{CLIP}.CLIPEncoderLayer",
    "vit_msn.ViTMSNAttention": "transformers.models.deit.modeling_deit.DeiTAttention",
    "vit_msn.ViTMSNLayer": "transformers.models.deit.modeling_deit.DeiTLayer",
    "smolvlm.SmolVLMVisionAttention": "transformers.models.siglip.modeling_siglip.SiglipAttention",
    "chinese_clip.ChineseCLIPVisionAttention": "transformers.models.altclip.modeling_altclip.AltCLIPAttention",
    "instructblip.InstructBlipAttention": "transformers.models.blip_2.modeling_blip_2.Blip2Attention",
    "got_ocr2.GotOcr2MLPBlock": "transformers.models.sam.modeling_sam.SamMLPBlock",
    "sam_hq.SamHQVisionSdpaAttention": "transformers.models.sam.modeling_sam.SamVisionSdpaAttention",
    "videoprism.VideoPrismAttention": None,
    "minimax_m3_vl.MiniMaxM3VLVisionAttention": None,
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_are_recognised(name):
    """Oracle: the source of the installed transformers, compared by hand."""
    found = recognised(transformers_class(name))
    rows = [row for row in json.loads(KNOWN.read_text()).values() if row["as"] == found]
    assert any(COPIES[name] in row["classes"] for row in rows) if COPIES[name] else found is None


class Doubled(nn.Module):
    """A body whose fused forward is made wrong by the test."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return 2 * self.fc(x)


@pytest.mark.parametrize("now", recognition.MOVED)
def test_objects_that_newer_pythons_moved_are_the_same(now):
    """Oracle: the text where older Pythons have the object, which is that of every digest in known.json."""

    def text(name):
        moved = types.FunctionType((lambda: None).__code__, {})
        moved.__module__, _, moved.__qualname__ = name.rpartition(".")
        return recognition._Reader(Doubled).value(moved)

    assert text(now) == text(recognition.MOVED[now]) == f"object:{recognition.MOVED[now]}"


@pytest.mark.parametrize("wrong", [False, True])
def test_verify_undoes_what_differs(wrong, monkeypatch):
    """Oracle: the original's output; a wrong conversion is undone and reported, the others stay."""
    monkeypatch.setattr(forwards, "FORWARDS", dict(forwards.FORWARDS))
    run = forwards.fused_forward("doubled", f"{__name__}.Doubled")(lambda self, x: (3 if wrong else 2) * self.fc(x))
    run.__module__ = "fastvit_triton.test"
    norm = nn.LayerNorm(4)
    model = nn.Sequential(Doubled(), norm)
    x = torch.randn(3, 4)
    report = fastvit_triton.optimize(model, verify=x)
    row = next(row for row in report.rows if row.type == "Doubled")
    assert (row.became is None) == wrong == ("forward" not in model[0].__dict__)
    assert not wrong or "differ from the original's by 5.0e-01" in row.why
    assert any(row.type == "LayerNorm" and row.became for row in report.rows)
    modules = "1 module" if wrong else "2 modules"
    assert f"Verified in float64: the outputs of {modules} are equal to the original's." in str(report)


@pytest.mark.parametrize("name", ["timm_vit", "hf_clip", "hf_dinov2"])
def test_verify_agrees_with_known_models(name):
    """Oracle: no conversion of a known model is undone, whatever its dtype; outputs are those without `verify`."""
    model = build(name, torch.bfloat16).eval()
    given = inputs(name, torch.bfloat16)
    report = fastvit_triton.optimize(model, verify=given)
    assert report.fused and not any("differ" in (row.why or "") for row in report.rows)
    assert next(model.parameters()).dtype == torch.bfloat16
