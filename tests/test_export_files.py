"""Tests of `export_model` and the command `export`: what the files compute and hold, and what is refused."""

import contextlib
import copy
import importlib
import importlib.util
import json
import logging
import shutil
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
from agreement import normal
from budget import allowed, telling
from catalogue import build
from commands import prints, refused, run_python
from odd_images import odd_images
from test_predict import by_command, save_as_trained
from torch import nn

from fastvit_triton import create_model, export_model, freeze, load_model, optimize, predict, save_weights, transforms
from fastvit_triton.cli import main
from fastvit_triton.deploy import export
from fastvit_triton.engine.freeze import is_frozen
from fastvit_triton.train.data.naflex import to_patches

VIT = dict(embed_dim=24, num_heads=2, depth=2, num_classes=5)
PYRAMID = dict(img_size=64, depths=(1, 1, 1, 1), num_classes=5)
# One name for each difference in the code that is recorded, by family.
CATALOGUE = {
    "vit_tiny_patch16_224": VIT | dict(img_size=32),
    "vit_small_patch16_224": VIT | dict(img_size=(32, 48), global_pool="avg"),
    "vit_tiny_patch16_postnorm_224": VIT | dict(img_size=32, pos_embed="relative", patch_embed="norm_linear_norm"),
    "vit_tiny_r_s16_p8_224": VIT | dict(img_size=64, patch_size=32),
    "vit_small_r26_s32_224": VIT | dict(img_size=64),
    "simplevit_tiny_patch16_224": VIT | dict(img_size=32),
    "deit_tiny_distilled_patch16_224": VIT | dict(img_size=32),
    "deit3_small_patch16_224": VIT | dict(img_size=32),
    "vit_giant_patch14_reg4_dinov2": VIT | dict(img_size=28),
    "vit_base_patch32_clip_quickgelu_224": VIT | dict(img_size=64),
    "vit_base_patch16_siglip_224": VIT | dict(img_size=32),
    "naflexvit_base_patch16_gap": VIT | dict(img_size=32),
    "cpvt_small_gap": VIT | dict(img_size=32),
    "cpvt_tiny_5peg": VIT | dict(img_size=32),
    "swin_tiny_patch4_window7_224": dict(img_size=(72, 100), depths=(2, 2, 2, 1), embed_dim=24, num_classes=5),
    "twins_pcpvt_small": PYRAMID,
    "twins_svt_small": PYRAMID | dict(depths=(2, 2, 2, 2)),
    "pvt_tiny": PYRAMID,
    "cct_7_3x2_32": VIT,
    "vit_lite_7_4_32": VIT,
    "cait_xxs24_224": VIT | dict(img_size=32),
    "deepvit_16b": VIT | dict(img_size=32),
    "deepvit_s": VIT | dict(img_size=32, plain_depth=1),
    "lvvit_small": VIT | dict(img_size=32),
    "refiner_vit_small": VIT | dict(img_size=32),
}
FEATURES = partial(create_model, "vit_digits_patch2_8", features_only=True)
CLASSES = ("cat", "dög", "a b", 'c"d', "e")
ALONE = """
import sys, torch
sys.modules["fastvit_triton"] = sys.modules["triton"] = None  # importing them fails
held = {"metadata.json": ""}
program = torch.export.load(sys.argv[1], extra_files=held).module()
torch.save((held["metadata.json"], program(torch.load(sys.argv[2]))), sys.argv[3])
"""


def drawn(name: str = "vit_tiny_patch16_224", std: float = 0.1, **more: object) -> nn.Module:
    """A small model of that name, with random parameters of this standard deviation."""
    return normal(create_model(name, **CATALOGUE[name] | more).eval(), std)


@pytest.fixture
def trained(tmp_path: Path) -> tuple[nn.Module, Path]:
    """(model, file that `train` could have written, with class names and how images are prepared)."""
    model, path = drawn(depth=1), tmp_path / "model.safetensors"
    return model, save_as_trained(model, path, CLASSES)


def agrees(got: torch.Tensor, model: nn.Module, images: torch.Tensor) -> bool:
    """True if another runtime's error is at most what another order of summation explains, see `export.FACTOR`."""
    with torch.no_grad():
        own, exact = model(images), model.double()(images.double())
    most = allowed((own - exact).abs().max(), telling(exact).abs().max(), torch.float32)
    return bool((got.double() - exact).abs().max() <= export.FACTOR / 2 * most)


def prepared(metadata: dict[str, object]) -> bool:
    """True if the metadata are those of `trained`."""
    want = dict(model="vit_tiny_patch16_224", classes=list(CLASSES), input_size=[3, 32, 32], mean=[0.5, 0.4, 0.3])
    want |= dict(std=[0.2, 0.2, 0.1], crop_pct=0.9, crop_mode="box", interpolation="bilinear")
    return {key: metadata[key] for key in want} == want


def test_onnx(trained, tmp_path, capsys, caplog, monkeypatch):
    """Oracle: the model in float64, in onnxruntime for another batch size; operators of ONNX; what `train` stored; the
    command `predict` on images of every kind. Without torchvision nothing warns of it."""
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    model, checkpoint = trained
    path, images = tmp_path / "model.onnx", torch.randn(5, 3, 32, 32)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *of: None if name == "torchvision" else find(name, *of)
    )
    assert main(["export", "--to", "onnx", "--opset", "17", str(checkpoint), str(path)]) == 0
    assert "opset 17" in (printed := capsys.readouterr().out) and "largest difference from PyTorch" in printed
    assert all(record.levelno < logging.WARNING for record in caplog.records)
    session = onnxruntime.InferenceSession(path)
    (logits,) = session.run(["logits"], {"images": images.numpy()})
    assert agrees(torch.from_numpy(logits), model, images)
    assert [given.shape for given in session.get_inputs()] == [["batch", 3, 32, 32]]
    files = sorted(odd_images(tmp_path / "images"))
    texts = session.get_modelmeta().custom_metadata_map
    held = {key: json.loads(text) for key, text in texts.items()}
    assert prepared(held) and held["opset"] == 17
    transform = transforms(held)
    (logits,) = session.run(["logits"], {"images": torch.stack([transform(file) for file in files]).numpy()})
    shares = torch.from_numpy(logits).softmax(1).tolist()
    want = dict(zip(files, predict(load_model(checkpoint)[0], files), strict=True))
    assert by_command(checkpoint, tmp_path / "images") == want
    for file, row in zip(files, shares, strict=True):
        got = dict(zip(CLASSES, row, strict=True))
        assert max(CLASSES, key=lambda name: got[name]) == want[file][0][0]
        torch.testing.assert_close(got, dict(want[file]))
    proto = importlib.import_module("onnx").load(path)
    assert {(entry.domain, entry.version) for entry in proto.opset_import} == {("", 17)}
    assert not {node.domain for node in proto.graph.node} - {""}
    assert b"fastvit_triton/" not in path.read_bytes()  # no path of a source file


@pytest.mark.full
def test_openvino(trained, tmp_path, capsys):
    """Oracle: the model in float64, in OpenVINO for another batch size; what `train` stored; neither file is replaced
    without --overwrite."""
    pytest.importorskip("onnxscript")
    openvino = pytest.importorskip("openvino")
    model, checkpoint = trained
    path, images = tmp_path / "model.xml", torch.randn(5, 3, 32, 32)
    words = ["export", "--to", "openvino", str(checkpoint), str(path)]
    printed = prints(capsys, *words)
    assert f"its weights in {tmp_path / 'model.bin'}" in printed and "largest difference from PyTorch" in printed
    program = openvino.Core().read_model(path)
    compiled = openvino.compile_model(program, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    assert agrees(torch.from_numpy(compiled({"images": images.numpy()})["logits"]), model, images)
    keys = ("model", "classes", "input_size", "mean", "std", "crop_pct", "crop_mode", "interpolation", "free_sizes")
    held = {key: json.loads(program.get_rt_info(["framework", key]).astype(str)) for key in keys}
    assert prepared(held) and held["free_sizes"] == ["batch"]
    path.unlink()
    assert main(words) == 2 and "model.bin exists already" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"OpenVINO .* does not run the program: (?!Exception from)"):
        export.load_openvino(checkpoint)


def test_openvino_writes_two_files_or_none(tmp_path, monkeypatch):
    """Oracle: stand-ins for the writer and the runtime: both files get their contents, and the runtime gets both; a
    program that differs leaves both as they were."""
    model = drawn(depth=1)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setitem(export.WRITERS, "openvino", lambda *_: {".xml": b"graph", ".bin": b"weights"})

    def load(*files):
        assert [file.read_bytes() for file in files] == [b"graph", b"weights"]
        assert [file.suffix for file in files] == [".xml", ".bin"]
        return lambda images: factor * model(images)

    monkeypatch.setitem(export.LOADERS, "openvino", load)
    for factor, raises in ((1.0, contextlib.nullcontext()), (1.1, pytest.raises(ValueError, match="differs from"))):
        for file in ("m.xml", "m.bin"):
            (tmp_path / file).write_bytes(b"old")
        with raises:
            assert export_model(model, tmp_path / "m.xml", "openvino").difference <= 1e-6
        held = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
        assert held == ({"m.xml": b"graph", "m.bin": b"weights"} if factor == 1.0 else dict.fromkeys(held, b"old"))
        assert len(held) == 2


@pytest.mark.full
def test_torch_export_runs_alone(trained, tmp_path):
    """Oracle: the model in float64; the file is loaded by a process that cannot import this package or Triton."""
    model, checkpoint = trained
    path, images = tmp_path / "model.pt2", torch.randn(5, 3, 32, 32)
    assert main(["export", "--to", "torch-export", str(checkpoint), str(path)]) == 0
    torch.save(images, tmp_path / "images.pt")
    run_python("-c", ALONE, path, tmp_path / "images.pt", tmp_path / "logits.pt")
    text, logits = torch.load(tmp_path / "logits.pt")
    assert prepared(json.loads(text)) and agrees(logits.detach(), model, images)


@pytest.mark.full
@pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++")), reason="Inductor needs a C++ compiler")
def test_aotinductor(trained, tmp_path):
    """Oracle: the model in float64, for another batch size; what `train` stored."""
    model, checkpoint = trained
    path, images = tmp_path / "model.pt2", torch.randn(5, 3, 32, 32)
    assert main(["export", "--to", "aotinductor", str(checkpoint), str(path)]) == 0
    loaded = torch._inductor.aoti_load_package(str(path))
    held = {key: json.loads(text) for key, text in loaded.get_metadata().items() if not key.startswith("AOTI_")}
    assert prepared(held) and agrees(loaded(images), model, images)


@pytest.mark.full
@pytest.mark.parametrize("to", ["onnx", "openvino", "torch-export"])
@pytest.mark.parametrize("name", CATALOGUE)
def test_every_family(name, to, tmp_path):
    """Oracle: the comparison of `export_model`, which must have been made."""
    pytest.importorskip("openvino" if to == "openvino" else "onnxruntime")
    path = tmp_path / f"model{export.SUFFIXES[to]}"
    assert export_model(drawn(name), path, to).difference is not None and path.stat().st_size


@pytest.mark.full
@pytest.mark.parametrize("name", ["timm_deit3", "torchvision_vit", "vit_pytorch_simple"])
def test_optimised_models(name, tmp_path):
    """Oracle: the comparison of `export_model`; the model stays optimised, and gives what it gave."""
    pytest.importorskip("onnxruntime")
    model, images = build(name).float().eval(), torch.randn(2, 3, 32, 32)
    optimize(model)
    freeze(model)

    def fused() -> list[str]:
        return [key for key, module in model.named_modules() if "forward" in vars(module)]

    before, own = fused(), model(images)
    done = export_model(model, tmp_path / "model.onnx", "onnx", preparation={"input_size": (3, 32, 32)})
    assert done.difference is not None and torch.equal(model(images), own)
    assert before and fused() == before and is_frozen(model)


@pytest.mark.full
def test_naflex_takes_images(tmp_path):
    """Oracle: the NaFlex model on the patches of the same images."""
    model, images = drawn("naflexvit_base_patch16_gap"), torch.randn(2, 3, 32, 48)  # its own table is 2 x 2
    export_model(model, tmp_path / "model.pt2", "torch-export", preparation={"input_size": (3, 32, 48)})
    got = torch.export.load(tmp_path / "model.pt2").module()(images)
    patches = torch.stack([to_patches(image, 6, (16, 16)) for image in images])
    assert agrees(got.detach(), model, patches)


@pytest.mark.full
def test_commands_take_naflex(tmp_path, capsys):
    """Oracle: the NaFlex model on the patches; its weights name another image size than the table of positions has."""
    model, path = drawn("naflexvit_base_patch16_gap"), tmp_path / "model.pt2"
    save_weights(model, tmp_path / "model.safetensors")
    assert main(["export", "--to", "torch-export", str(tmp_path / "model.safetensors"), str(path)]) == 0
    assert "naflexvit_base_patch16_gap for images of 3 x 384 x 384, and any batch" in capsys.readouterr().out
    images = torch.randn(1, 3, 384, 384)
    got = torch.export.load(path).module()(images)
    assert agrees(got.detach(), model, to_patches(images[0], 24 * 24, (16, 16))[None])


@pytest.mark.full
def test_wrong_programs_are_refused(tmp_path, monkeypatch):
    """Oracle: GELU by tanh instead of erf, NaN, and a class too few are found; what is not compared is written."""
    path = tmp_path / "model.pt2"
    path.write_bytes(b"old")
    model = drawn(std=0.5, depth=1)
    approximate = drawn(depth=1, act="gelu_tanh")
    approximate.load_state_dict(model.state_dict())
    for wrong in (approximate, lambda x: model(x) * torch.nan, lambda x: model(x)[:, :-1]):
        monkeypatch.setitem(export.LOADERS, "torch-export", lambda path, wrong=wrong: wrong)
        with pytest.raises(ValueError, match=r"differs from PyTorch by .*, more than .* was not written"):
            export_model(model, path, "torch-export")
        assert path.read_bytes() == b"old" and [file.name for file in tmp_path.iterdir()] == ["model.pt2"]
    monkeypatch.setitem(export.LOADERS, "torch-export", lambda path: None)
    assert export_model(model, path, "torch-export").difference is None and path.read_bytes() != b"old"


class Branches(nn.Module):
    """A model whose Python code reads its images."""

    def forward(self, images):
        return images.flatten(1) if images.sum() > 0 else -images.flatten(1)


class Bessel(nn.Module):
    """A model with an operator that ONNX lacks."""

    def forward(self, images):
        return torch.special.bessel_j0(images.flatten(1))


def inside(model: nn.Module) -> nn.Module:
    """The model with a compiled block."""
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    return model


def frozen(model: nn.Module) -> nn.Module:
    """The model with int8 weights beside its own."""
    optimize(model)
    freeze(model, precision="int8")
    return model


WRAPPED = {
    "compiled": partial(torch.compile, backend="eager"),
    "compiled block": inside,
    "DataParallel": nn.DataParallel,
    "frozen int8": frozen,
}


@pytest.mark.few(2)
@pytest.mark.parametrize("wrap", WRAPPED)
def test_wrapped_models_of_timm(wrap, tmp_path):
    """Oracle: the model in float64; its size is that with which it was built, not that of its published weights."""
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=5, depth=1).eval()
    done = export_model(WRAPPED[wrap](copy.deepcopy(model)), tmp_path / "model.pt2", "torch-export")
    assert done.metadata["input_size"] == (3, 64, 64) and done.metadata["model"] == "VisionTransformer"
    images = torch.randn(2, 3, 64, 64)
    assert agrees(torch.export.load(tmp_path / "model.pt2").module()(images).detach(), model, images)


@pytest.mark.filterwarnings("ignore")  # of PyTorch, which deprecates its own quantisation
def test_quantised_models_are_refused(tmp_path):
    """Oracle: one sentence that names the first quantised layer; nothing is written."""
    model = torch.ao.quantization.quantize_dynamic(drawn(depth=1), {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(
        ValueError, match=r"its blocks\.0\.attn\.qkv is a quantised Linear; export the plain model, and"
    ):
        export_model(model, tmp_path / "model.onnx", "onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.few(1)
@pytest.mark.parametrize("make", [drawn, partial(timm.create_model, "vit_tiny_patch16_224", num_classes=5, depth=1)])
def test_free_height_and_width(make, tmp_path):
    """Oracle: the model in float64, for its own size, which is not resampled, and for others; the batch is fixed."""
    model = make(img_size=32, dynamic_img_size=True).eval()
    export_model(model, tmp_path / "model.pt2", "torch-export", free_sizes=("height", "width"))
    program = torch.export.load(tmp_path / "model.pt2").module()
    for size in ((32, 32), (48, 80), (96, 32)):
        images = torch.randn(1, 3, *size)
        assert agrees(program(images).detach(), copy.deepcopy(model), images)
    with pytest.raises(AssertionError):
        program(torch.randn(2, 3, 32, 32))


@pytest.mark.few(8)
@pytest.mark.fast
@pytest.mark.parametrize(
    "make, path, to, options, message",
    [
        (drawn, "model.onnx", "tensorrt", {}, "to is 'tensorrt'; use one of onnx, openvino, torch-export"),
        (drawn, "model.onnx", "openvino", {}, r"model\.onnx is no name for openvino; name a file that ends in \.xml"),
        (drawn, "model.pt", "torch-export", {}, r"model\.pt is no name for torch-export; .* ends in \.pt2"),
        (drawn, "model.onnx", "onnx", dict(opset=12), "opset is 12; use 17 to 25"),
        (drawn, "model.pt2", "torch-export", dict(free_sizes=("depth",)), r"is \('depth',\); give a sequence"),
        (drawn, "model.pt2", "torch-export", dict(free_sizes="batch"), "free_sizes is 'batch'; give a sequence of"),
        (drawn, "model.pt2", "torch-export", dict(free_sizes=("width",)), "32 x 64: .*; leave height and width out"),
        (drawn, "model.pt2", "torch-export", dict(preparation=dict(input_size=(3, 8, 8))), "cannot run on images of"),
        (partial(nn.LSTM, 4, 4), "model.pt2", "torch-export", {}, "LSTM cannot run on images of 3 x 224 x 224"),
        (Branches, "model.pt2", "torch-export", {}, "torch.export cannot record Branches .*data-dependent"),
        (Bessel, "model.onnx", "onnx", {}, "Bessel cannot be exported to onnx: No ONNX function found for .*bessel_j0"),
        (FEATURES, "model.pt2", "torch-export", {}, "FeatureGetterNet returns a list; give a model from images"),
        (lambda: torch.zeros(1), "model.pt2", "torch-export", {}, "model is Tensor; give an nn.Module"),
    ],
)  # fmt: skip
def test_invalid_arguments(make, path, to, options, message, tmp_path):
    """Oracle: one sentence that names what was given; nothing is written."""
    with pytest.raises((ValueError, TypeError), match=message):
        export_model(make(), tmp_path / path, to, **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_what_is_missing(tmp_path, monkeypatch):
    """Oracle: one sentence for a package, a compiler, a folder, and weights that exceed an ONNX file."""
    model = drawn(depth=1)
    with pytest.raises(OSError, match=r"cannot write .*model\.pt2: No such file"):
        export_model(model, tmp_path / "none" / "model.pt2", "torch-export")
    with torch.device("meta"):
        giant = create_model("vit_giant_patch14_224")
    with pytest.raises(ValueError, match=r"take 3\.8 GiB, and an ONNX file holds 2; export to torch-export"):
        export_model(giant, tmp_path / "model.onnx", "onnx")

    def fail(*_, **__):
        raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found in torch._inductor.config.cpp.cxx")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", fail)
    with pytest.raises(ValueError, match=r"needs a C\+\+ compiler; install g\+\+"):
        export_model(model, tmp_path / "model.pt2", "aotinductor")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert export.LOADERS["onnx"](tmp_path / "model.onnx") is None
    with pytest.raises(ValueError, match=r"onnxscript is not installed, which ONNX .*'fastvit_triton\[export\]'"):
        export_model(model, tmp_path / "model.onnx", "onnx")
    with pytest.raises(ValueError, match=r"openvino is not installed, which OpenVINO .*'fastvit_triton\[openvino\]'"):
        export_model(model, tmp_path / "model.xml", "openvino")
    assert not list(tmp_path.iterdir())


def test_the_command_builds_models_of_timm(tmp_path, capsys):
    """Oracle: timm's model with the weights in the file, which the command calls random; timm's names for errors."""
    path = tmp_path / "model.pt2"
    said = prints(capsys, "export", "timm:test_vit", path, "--to", "torch-export")
    assert "for images of 3 x 160 x 160, and any batch\nits weights are random;" in said
    program = torch.export.load(path)
    model = timm.create_model("test_vit").eval()
    model.load_state_dict(program.state_dict)
    images = torch.randn(2, 3, 160, 160)
    assert agrees(program.module()(images).detach(), model, images)
    assert main(["export", "timm:test_vitt", str(path), "--to", "torch-export"]) == 2
    assert "timm has no model called 'test_vitt'; the nearest are test_vit" in capsys.readouterr().err


@pytest.mark.full
def test_the_command_refuses(trained, tmp_path, monkeypatch, capsys):
    """Oracle: one sentence each and exit code 2; an existing file is replaced only with --overwrite."""
    _, checkpoint = trained
    path = tmp_path / "model.pt2"
    path.write_bytes(b"old")
    words = ["export", str(checkpoint), str(path), "--to"]
    for more, sentence in (
        (["torch-export"], f"{path} exists already; name another file, or give --overwrite"),
        (["torch-export", "--overwrite", "--opset", "18"], "--opset is 18, and torch-export has none; leave it out"),
        (["tensorrt"], "--to: invalid choice: 'tensorrt'"),
        (
            ["torch-export", "--overwrite", "--free", "batch,depth"],
            "--free is 'batch,depth'; use batch, height and width",
        ),
    ):
        assert sentence in refused(capsys, *words, *more) and path.read_bytes() == b"old"
    assert main([*words, "torch-export", "--overwrite", "--free", "none"]) == 0 and path.read_bytes() != b"old"
    assert "for images of 3 x 32 x 32\n" in capsys.readouterr().out
    monkeypatch.setitem(export.LOADERS, "torch-export", lambda path: None)
    assert main([*words, "torch-export", "--overwrite"]) == 0
    assert "not compared with PyTorch: onnxruntime is not installed" in capsys.readouterr().out


def test_an_old_onnxruntime_is_one_sentence(tmp_path):
    """Oracle: a version of the operators that no onnxruntime has."""
    pytest.importorskip("onnxruntime")
    helper, path = importlib.import_module("onnx.helper"), tmp_path / "model.onnx"
    value = helper.make_tensor_value_info("images", 1, [1])
    graph = helper.make_graph([helper.make_node("Identity", ["images"], ["logits"])], "g", [value], [value])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 200)])
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ValueError, match=r"onnxruntime .* does not run the program"):
        export.LOADERS["onnx"](path)
