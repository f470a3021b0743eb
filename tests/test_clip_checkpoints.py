"""Tests of checkpoints of CLIP in their authors' layout. Oracle: open_clip, whose code also reads OpenAI's files."""

import shutil
import zipfile

import pytest
import torch
from budget import allowed, telling
from safetensors.torch import load_file

import fastvit_triton
from fastvit_triton.checkpoints.tensors import WeightsError
from fastvit_triton.checkpoints.torchscript import MAX_MODULES, read_program
from fastvit_triton.cli import main

pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{name}") for name in ("DeprecationWarning", "torch.jit.TracerWarning")
]
SIDE, WIDTH, EMBEDDING = 32, 64, 16
IMAGES = torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def clip():
    """A whole CLIP with random weights, whose text tower has the image tower's width, so that equal keys fit both."""
    model = pytest.importorskip("open_clip").model
    vision = model.CLIPVisionCfg(layers=2, width=WIDTH, head_width=32, patch_size=8, image_size=SIDE)
    text = model.CLIPTextCfg(context_length=8, vocab_size=32, width=WIDTH, heads=2, layers=2)
    made = model.CLIP(EMBEDDING, vision, text, quick_gelu=True).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def tower(**options):
    """Our model of that size."""
    sizes = dict(img_size=SIDE, patch_size=8, embed_dim=WIDTH, depth=2, num_heads=2, num_classes=EMBEDDING) | options
    return fastvit_triton.create_model("vit_base_patch16_clip_quickgelu_224", **sizes).eval()


@pytest.mark.parametrize("prefix", ["visual.", "", "module.visual."])
def test_outputs_are_those_of_the_checkpoint(clip, prefix):
    """In float32 ours is as close to float64 as open_clip's own; the text tower is dropped by name."""
    whole = clip.state_dict()
    kept = {key.removeprefix("visual."): tensor for key, tensor in whole.items() if key.startswith("visual.")}
    given = {prefix + key: tensor for key, tensor in kept.items()}
    text = {key: tensor for key, tensor in whole.items() if not key.startswith("visual.")}
    given |= {prefix.replace("visual.", "") + key: tensor for key, tensor in text.items()} if prefix else {}
    model = tower()
    report = fastvit_triton.load_weights(model, given)
    assert report.tensors == len(kept) + 1 and len(report.dropped) == len(text) * bool(prefix)  # 1: the head's bias
    assert report.family == "CLIP" and not report.reinitialised and not model.head.bias.any()
    own, got = clip.encode_image(IMAGES).double(), model(IMAGES).double()
    want = telling(clip.double().encode_image(IMAGES.double()))
    assert (got - want).norm() <= allowed((own - want).norm(), want.norm(), torch.float32)


def test_written_files_are_read_by_open_clip(clip, tmp_path):
    """Oracle: the state dicts of open_clip's whole model and of its tower, bit for bit; and by the command."""
    model = tower()
    fastvit_triton.load_weights(model, clip.state_dict())
    for layout, theirs in (("open_clip", clip), ("open_clip_visual", clip.visual)):
        path = tmp_path / f"{layout}.safetensors"
        fastvit_triton.save_weights(model, path, layout=layout)
        written, want = load_file(path), theirs.state_dict()
        assert len(written) == len(clip.visual.state_dict())
        assert all(torch.equal(want[key], tensor) for key, tensor in written.items())
        again = tower()
        assert not fastvit_triton.load_weights(again, path).dropped
        assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
        assert torch.equal(fastvit_triton.load_model(path)[0].eval()(IMAGES), model(IMAGES))
    fastvit_triton.save_weights(model, tmp_path / "ours.safetensors")
    convert = ["convert", str(tmp_path / "ours.safetensors"), "--to", "open_clip"]
    assert main([*convert, str(tmp_path / "theirs.safetensors")]) == 0
    assert load_file(tmp_path / "theirs.safetensors").keys() == load_file(tmp_path / "open_clip.safetensors").keys()


def test_what_clip_cannot_hold_is_refused(tmp_path, capsys):
    """Oracle: the sentences."""
    biased = tower()
    torch.nn.init.ones_(biased.head.bias)
    with pytest.raises(WeightsError, match="head_bias=False, not True"):
        fastvit_triton.save_weights(biased, tmp_path / "x.safetensors", layout="open_clip")
    fastvit_triton.save_weights(tower(), tmp_path / "ours.safetensors")
    assert main(["convert", str(tmp_path / "ours.safetensors"), str(tmp_path / "out"), "--to", "open_clip"]) != 0
    assert "would be a folder, which open_clip does not read" in capsys.readouterr().err.replace("\n", " ")


def module(*attributes: bytes) -> bytes:
    """The pickle of a TorchScript module with these attributes, each its name and a value."""
    return b"c__torch__\nTower\n)\x81}(" + b"".join(attributes) + b"ub"


def text(value: str) -> bytes:
    """The pickle of a string."""
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def with_pickle(program, path, pickled: bytes):
    """A copy of a TorchScript file with other attributes."""
    with zipfile.ZipFile(program) as source, zipfile.ZipFile(path, "w") as target:
        for record in source.infolist():
            own = record.filename.endswith("/data.pkl")
            target.writestr(record.filename, b"\x80\x02" + pickled + b"." if own else source.read(record))
    return path


@pytest.fixture
def program(clip, tmp_path):
    """A TorchScript file of a whole CLIP in half precision, as OpenAI published them."""
    tokens = torch.zeros(2, 8, dtype=torch.long)
    traced = torch.jit.trace_module(clip, {"encode_image": (IMAGES,), "encode_text": (tokens,)}, check_trace=False)
    torch.jit.save(traced.half(), tmp_path / "program.pt")
    return tmp_path / "program.pt"


def test_programs_are_read_without_their_code(clip, program, tmp_path):
    """Oracle: the state dict after `torch.jit.load`, bit for bit; the code of the copy is no program."""
    want = torch.jit.load(program).state_dict()
    assert any(tensor.dtype == torch.half for tensor in want.values())
    broken = tmp_path / "broken.pt"
    with zipfile.ZipFile(program) as source, zipfile.ZipFile(broken, "w") as target:
        for record in source.infolist():
            is_code = "/code/" in record.filename
            target.writestr(record.filename, "no program" if is_code else source.read(record))
    with pytest.raises(RuntimeError):
        torch.jit.load(broken)
    for path in (program, broken):
        got = read_program(path)
        assert all(torch.equal(got[key], tensor) and got[key].dtype == tensor.dtype for key, tensor in want.items())
    models = tower(), tower()
    reports = [fastvit_triton.load_weights(model, given) for model, given in zip(models, (broken, want), strict=True)]
    assert reports[0].tensors == reports[1].tensors and reports[0].family == "CLIP"
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models), strict=True))


@pytest.fixture
def small(tmp_path):
    """A TorchScript file of one linear layer, whose attributes tests replace."""
    torch.jit.save(torch.jit.trace(torch.nn.Linear(1, 1), torch.ones(1, 1)), tmp_path / "small.pt")
    return tmp_path / "small.pt"


def test_programs_that_name_other_code_are_refused(small, tmp_path):
    """Oracle: the sentence; the call is not made."""
    called = tmp_path / "called"
    for name in ("posix\nsystem", "builtins\neval", "torch\nload", "torch._utils\n_rebuild_tensor"):
        attack = module(text("a"), b"c" + name.encode() + b"\n(" + text(f"touch {called}") + b"tR")
        with pytest.raises(WeightsError, match="it names " + name.replace("\n", ".") + ", whose code"):
            fastvit_triton.load_weights(tower(), with_pickle(small, tmp_path / "attack.pt", attack))
        assert not called.exists()


def test_damaged_programs_are_refused(small, tmp_path):
    """Oracle: the sentences, for a tensor beyond its bytes, and modules whose number is exponential in the size."""
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x01tQ"
    wide = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x00(J\xff\xff\xff\x00t(K\x01t\x89}tR"
    doubled = module(text("a"), b"N") + b"q\x000"
    for i in range(MAX_MODULES.bit_length()):
        doubled += module(text("a"), b"h" + bytes([i]), text("b"), b"h" + bytes([i])) + b"q" + bytes([i + 1]) + b"0"
    doubled += b"h" + bytes([MAX_MODULES.bit_length()])
    for pickled, reason in (
        (module(text("a"), wide), "storage|bounds"),
        (doubled, f"more than {MAX_MODULES:,} modules"),
    ):
        with pytest.raises(WeightsError, match=f"damaged, cut short or no .pt file: .*({reason})"):
            fastvit_triton.load_weights(tower(), with_pickle(small, tmp_path / "bad.pt", pickled))
    shutil.copy(small, tmp_path / "cut.pt")
    with open(tmp_path / "cut.pt", "r+b") as file:
        file.truncate(small.stat().st_size // 2)
    with pytest.raises(WeightsError):
        fastvit_triton.load_weights(tower(), tmp_path / "cut.pt")


@pytest.mark.parametrize("bias", [False, True])
def test_towers_of_timm_in_open_clip(bias, tmp_path):
    """In float32 ours is as close to float64 as open_clip's own, with all prefixes; written files are theirs."""
    model = pytest.importorskip("open_clip").model
    options = dict(
        timm_model_name="test_vit", timm_pool="token", timm_proj="linear", timm_proj_bias=bias, image_size=160
    )
    text_tower = model.CLIPTextCfg(context_length=8, vocab_size=32, width=WIDTH, heads=2, layers=2)
    theirs = model.CLIP(EMBEDDING, model.CLIPVisionCfg(**options), text_tower).eval()
    sizes = dict(img_size=160, embed_dim=64, depth=6, num_heads=2, mlp_ratio=3, num_classes=EMBEDDING)
    images = torch.randn(1, 3, 160, 160, generator=torch.Generator().manual_seed(1))
    own = theirs.encode_image(images).double()
    whole = theirs.state_dict()
    text_keys = [key for key in whole if not key.startswith("visual.")]
    want = telling(theirs.double().encode_image(images.double()))
    for given in (whole, {f"module.{key}": t for key, t in whole.items()}, theirs.visual.float().state_dict()):
        ours = fastvit_triton.create_model("vit_tiny_patch16_224", **sizes).eval()
        report = fastvit_triton.load_weights(ours, given)
        assert not report.reinitialised and len(report.dropped) in (0, len(text_keys))
        assert (ours(images).double() - want).norm() <= allowed((own - want).norm(), want.norm(), torch.float32)
    path = tmp_path / "trunk.safetensors"
    fastvit_triton.save_weights(ours, path, layout="open_clip_trunk")
    written, state = load_file(path), {f"visual.{key}": t for key, t in theirs.visual.state_dict().items()}
    assert written.keys() == state.keys() and all(torch.equal(state[key], t) for key, t in written.items())
    assert torch.equal(fastvit_triton.load_model(path)[0].eval()(images), ours(images))


def test_other_families_and_heads_of_towers(tmp_path):
    """Oracle: a model of Swin before it was written, bit for bit; the sentence for a head that is no projection."""
    sizes = dict(img_size=32, embed_dim=16, depths=(1, 1), num_heads=(1, 2), window_size=4, num_classes=EMBEDDING)
    ours, again = (fastvit_triton.create_model("swin_tiny_patch4_window7_224", **sizes) for _ in range(2))
    fastvit_triton.save_weights(ours, tmp_path / "swin.safetensors", layout="open_clip_trunk")
    written = load_file(tmp_path / "swin.safetensors")
    assert "visual.head.proj.weight" in written
    assert not fastvit_triton.load_weights(again, written).dropped
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), again.parameters(), strict=True))
    with pytest.raises(WeightsError, match=r"visual\.head\.mlp\.fc1\.weight is no linear projection"):
        fastvit_triton.load_weights(again, written | {"visual.head.mlp.fc1.weight": torch.ones(1)})
