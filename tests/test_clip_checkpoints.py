"""Tests of checkpoints of CLIP in their authors' layout. Oracle: open_clip, whose code also reads OpenAI's files."""

import pytest
import torch
from budget import allowed, telling
from safetensors.torch import load_file

import fastvit_triton
from fastvit_triton.checkpoints.tensors import WeightsError
from fastvit_triton.cli import main

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
