"""Tests of damaged, hostile and unsuitable checkpoints: one sentence, and nothing changed."""

import errno
import json
import os
import pickle

import numpy as np
import pytest
import timm
import torch
import torchvision
from agreement import one_sentence
from checkpoints import assert_equal, build, jax_arrays
from safetensors.torch import save_file

from fastvit_triton import create_model, load_model, load_weights, save_weights
from fastvit_triton.checkpoints import WeightsError

pytestmark = pytest.mark.fast


class Hostile:
    """An object whose unpickling calls os.mkdir."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def damaged(tmp_path, kind: str):
    """(source, expected message) of each kind of invalid checkpoint."""
    state = build("vit_tiny_patch16_224").state_dict()
    save_file(state, tmp_path / "a.safetensors")
    torch.save(state, tmp_path / "a.pt")
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    np.savez(tmp_path / "a.npz", **jax_arrays(vit_paper=True))
    if kind == "missing":
        return tmp_path / "nothing.pt", "there is no checkpoint"
    if kind == "folder":
        (tmp_path / "empty").mkdir()
        return tmp_path / "empty", "there is no checkpoint .*model.safetensors"
    if kind == "suffix":
        (tmp_path / "a.txt").write_text("hello")
        return tmp_path / "a.txt", "is no file of safetensors, torch.save, .*: it begins with b.hello"
    if kind == "page":
        (tmp_path / "b.pt").write_text("<!DOCTYPE html><html>404</html>")
        return tmp_path / "b.pt", "damaged, cut short or no .pt file: it begins with b.<!DOCTYPE html>"
    if kind == "exported":
        torch.export.save(torch.export.export(torch.nn.Identity(), (torch.zeros(1),)), tmp_path / "b.pt2")
        return tmp_path / "b.pt2", "b.pt2 is an exported model, which other runtimes run; give the checkpoint that"
    if kind in ("a.onnx", "a.xml", "a.bin"):
        for name in ("a.onnx", "a.xml", "a.bin"):
            (tmp_path / name).write_bytes(b"\x08\n\x12\x07pytorch")
        return tmp_path / kind, f"{kind} is an exported model, which other runtimes run; .* model.safetensors"
    if kind == "bin alone":
        (tmp_path / "b.bin").write_bytes(b"\x08\n\x12\x07pytorch")
        return tmp_path / "b.bin", "damaged, cut short or no .bin file: it begins with"
    if kind == "hostile":
        torch.save({"model": Hostile(tmp_path / "pwned")}, tmp_path / "b.pt")
        return (
            tmp_path / "b.pt",
            r"refused: it names (posix|nt)\.mkdir, whose code would run, and it holds model \((posix|nt)\.mkdir\)",
        )
    if kind == "hostile legacy":
        (tmp_path / "b.bin").write_bytes(pickle.dumps({"model": Hostile(tmp_path / "pwned")}, protocol=2))
        return tmp_path / "b.bin", r"refused: it names (posix|nt)\.mkdir.* and it holds model \((posix|nt)\.mkdir\)"
    if kind == "hostile npz":
        np.savez(tmp_path / "b.npz", embedding=np.array([Hostile(tmp_path / "pwned")], dtype=object))
        return tmp_path / "b.npz", "refused: it names a pickled object, whose code would run, and it holds embedding;"
    if kind == "list":
        torch.save([1, 2], tmp_path / "b.pt")
        return tmp_path / "b.pt", "holds a list of 2; expected a state dict"
    if kind == "resnet":
        with torch.device("meta"):
            return (
                torchvision.models.resnet18().state_dict(),
                r"a plain ViT: its keys \(conv1.weight",
            )
    if kind == "empty":
        return {}, r"its keys \(none\) match no known layout; known are "
    if kind == "deeper":
        state = build("vit_tiny_patch16_224", depth=3).state_dict()
        return state, r"a timm checkpoint .* has blocks.2.norm1.weight and 11 more, which the model does not have"
    if kind == "post-norm":
        state = build("vit_tiny_patch16_224").state_dict()
        state = {key.replace("norm.", "extra."): t for key, t in state.items()}
        return state, r"does not fit vit_tiny_patch16_224: it lacks norm.weight and 1 more and it has extra.weight"
    if kind == "channels":
        return (
            build("vit_tiny_patch16_224", in_chans=1).state_dict(),
            r"patch_embed.proj.weight is \[48, 1, 8, 8\] in the timm checkpoint, but .* is \[48, 3, 8, 8\].*in_chans=1",
        )
    if kind == "width":
        state = {key: torch.zeros(96 if key == "norm.bias" else t.shape) for key, t in state.items()}
        return state, r"norm.bias is \[96\] in the timm checkpoint, but norm.bias is \[48\]"
    if kind == "foreign width":
        state = torchvision.models.VisionTransformer(32, 8, 2, 3, 48, 96, num_classes=7).state_dict()
        return state, r"encoder_layer_0.mlp.0.weight is \[96, 48\].*blocks.0.mlp.fc1.weight is \[192, 48\]"
    if kind == "integers":
        return state | {"norm.bias": torch.zeros(48, dtype=torch.int8)}, "norm.bias holds torch.int8"
    if kind == "sparse":
        torch.save(state | {"blocks.1.mlp.fc2.bias": torch.ones(48).to_sparse()}, tmp_path / "b.pt")
        return tmp_path / "b.pt", "checkpoint's blocks.1.mlp.fc2.bias is sparse_coo; save it as a dense tensor"
    if kind == "without values":
        return {key: t.to("meta") for key, t in state.items()}, "has no values; save it as a dense tensor"
    if kind == "not finite":
        state = state | {"norm.bias": torch.full((48,), torch.nan)}
        return state, r"checkpoint's norm.bias has non-finite values; verify=False loads it anyway"
    if kind == "no checksums":
        torch.serialization.set_crc32_options(False)
        try:
            torch.save(state, tmp_path / "b.pt")
        finally:
            torch.serialization.set_crc32_options(True)
        return (
            tmp_path / "b.pt",
            r"without checksums, after torch.serialization.set_crc32_options\(False\); verify=False",
        )
    if kind == "no token":
        state = build("vit_tiny_patch16_224").state_dict()
        del state["cls_token"]
        return state, "does not fit vit_tiny_patch16_224: it lacks cls_token"
    if kind == "odd shapes":
        arrays = jax_arrays(vit_paper=True)
        key = "Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel"
        return arrays | {key: np.zeros(48, "f4")}, "JAX checkpoint has tensors of unusual shape|does not fit"
    part = float(kind.split()[1])
    path = tmp_path / kind.split()[0]
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * part)])
    return path, "damaged, cut short"


CUTS = [f"{name} {part}" for name in ("a.safetensors", "a.pt", "old.pt", "a.npz") for part in (0, 0.001, 0.5, 0.999)]
FAULTS = ["missing", "folder", "suffix", "page", "hostile", "hostile legacy", "hostile npz", "list", "resnet", "empty"]
FAULTS += ["exported", "a.onnx", "a.xml", "a.bin", "bin alone"]
FAULTS += [
    "sparse",
    "without values",
    "not finite",
    "no checksums",
    "deeper",
    "post-norm",
    "channels",
    "width",
    "foreign width",
    "integers",
    "no token",
    "odd shapes",
    *CUTS,
]


@pytest.mark.few(43)
@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("no_embed_class", [False, True])
def test_invalid_checkpoints_raise_and_change_nothing(kind, no_embed_class, tmp_path):
    """Oracle: WeightsError with one sentence, and a model that is bitwise unchanged."""
    model = build("vit_tiny_patch16_224", no_embed_class=no_embed_class)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    source, message = damaged(tmp_path, kind)
    with one_sentence(message, WeightsError):
        load_weights(model, source)
    assert not (tmp_path / "pwned").exists()
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[key])


@pytest.mark.full
@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_one_flipped_bit_is_detected(suffix, tmp_path):
    """Oracle: the model; for 200 bits anywhere in the file, one at a time, loading is exact or raises."""
    model, path = build("vit_tiny_patch16_224", depth=1, embed_dim=12), tmp_path / f"a.{suffix}"
    if suffix == "pt":
        torch.save(model.state_dict(), path)
    else:
        save_weights(model, path)
    wanted, content, rng, refused = model.state_dict(), path.read_bytes(), np.random.default_rng(0), 0
    for position in rng.integers(0, len(content), 200):
        changed = bytearray(content)
        changed[position] ^= 1 << int(rng.integers(8))
        path.write_bytes(changed)
        found = build("vit_tiny_patch16_224", depth=1, embed_dim=12)
        try:
            load_weights(found, path)
        except WeightsError:
            refused += 1
        else:
            assert all(torch.equal(t, wanted[key]) for key, t in found.state_dict().items())
    assert refused > 100  # most bits belong to values


@pytest.mark.parametrize("kind", ["not finite", "no checksums"])
def test_files_load_unverified(kind, tmp_path):
    """Oracle: the state dict."""
    source, _ = damaged(tmp_path, kind)
    model = build("vit_tiny_patch16_224")
    load_weights(model, source, verify=False)
    wanted = torch.load(tmp_path / "a.pt")["norm.bias"] if kind == "no checksums" else source["norm.bias"]
    assert torch.equal(model.norm.bias.nan_to_num(7.0), wanted.nan_to_num(7.0))


def test_a_changed_value_of_ours_loads_unverified(tmp_path):
    """Oracle: the message; then the file, whose header does not reflect the change."""
    model, path = build("vit_tiny_patch16_224"), tmp_path / "a.safetensors"
    save_weights(model, path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    for load in (lambda **how: load_model(path, **how), lambda **how: load_weights(model, path, **how)):
        with pytest.raises(WeightsError, match="its checksum is wrong; verify=False loads it"):
            load()
        load(verify=False)


@pytest.mark.parametrize("suffix", ["safetensors", "pt", "npz"])
def test_flipped_bytes_load_whole_or_raise(suffix, tmp_path):
    """Oracle: a damaged file raises WeightsError and changes nothing, unless only values are damaged."""
    model = build("vit_tiny_patch16_224")
    path = tmp_path / f"a.{suffix}"
    save = {"safetensors": save_file, "pt": torch.save, "npz": lambda arrays, path: np.savez(path, **arrays)}[suffix]
    save(jax_arrays(vit_paper=True) if suffix == "npz" else model.state_dict(), path)
    content, rng = path.read_bytes(), np.random.default_rng(0)
    ends = (*range(0, 400, 8), *range(len(content) - 400, len(content), 8))
    for position in ends:
        changed = bytearray(content)
        changed[position] ^= int(rng.integers(1, 256))
        path.write_bytes(changed)
        before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        try:
            load_weights(model, path)
        except WeightsError:
            for key, tensor in model.state_dict().items():
                assert torch.equal(tensor, before[key])


def test_files_that_do_not_name_their_model(tmp_path):
    """Oracle: WeightsError if the file names no model, and if its config is from another version."""
    model = build("vit_tiny_patch16_224")
    save_file(model.state_dict(), tmp_path / "a.safetensors")
    with pytest.raises(WeightsError, match="does not say which model"):
        load_model(tmp_path / "a.safetensors")
    header = {"variant": "vit_tiny_patch16_224", "config": json.dumps({"wings": 2})}
    save_file(model.state_dict(), tmp_path / "a.safetensors", header)
    with pytest.raises(WeightsError, match="cannot build: ViTConfig has no option 'wings'"):
        load_model(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("name", "options", "layout", "message"),
    [
        ("vit_tiny_patch16_postnorm_224", {}, "timm", "timm needs norm='pre', not 'post'"),
        ("vit_tiny_patch16_224", dict(pos_embed="relative"), "timm", "needs pos_embed="),
        ("vit_tiny_patch16_224", dict(pre_logits=True), "timm", "needs pre_logits=False, not True"),
        ("vit_tiny_patch16_224", dict(qk_norm=True), "transformers", "ViT needs qk_norm=False, not True"),
        ("vit_base_patch16_siglip_224", dict(num_classes=7), "transformers", "SigLIP needs head_after_map=False"),
        ("vit_base_patch32_clip_quickgelu_224", {}, "transformers", "CLIP needs head_bias=False"),
        ("vit_tiny_r_s16_p8_224", {}, "transformers", "needs hybrid=False"),
        (
            "vit_tiny_patch16_224",
            {},
            "flax",
            "layout is 'flax'; for a plain ViT use one of fastvit_triton, timm, transformers",
        ),
    ],
)
def test_unsupported_layouts_raise(name, options, layout, message, tmp_path):
    """Oracle: the sentence says why the model cannot be written, and nothing is written."""
    with pytest.raises(WeightsError, match=message):
        save_weights(build(name, **options), tmp_path / "a.safetensors", layout=layout)
    assert not list(tmp_path.iterdir())


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    """Oracle: on a full disk the error says so, the old checkpoint is intact, and no partial file remains."""
    model = build("vit_tiny_patch16_224")
    save_weights(model, tmp_path / "a.safetensors")

    def full(state, path, metadata):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("fastvit_triton.checkpoints.writing.save_file", full)
    with pytest.raises(WeightsError, match=r"cannot write .*No space left on device"):
        save_weights(build("vit_tiny_patch16_224"), tmp_path / "a.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
    monkeypatch.undo()
    assert_equal(load_model(tmp_path / "a.safetensors")[0], model)
    with pytest.raises(WeightsError, match=r"name the file a\.safetensors"):
        save_weights(model, tmp_path / "a.pth")


def test_pyramid_checkpoints_are_rejected():
    """Oracle: an error for timm's Swin and PVT, which also have a patch_embed.proj.weight."""
    vit = create_model("vit_tiny_patch16_224", depth=1)
    for name in ("swin_tiny_patch4_window7_224", "pvt_v2_b0"):
        with torch.device("meta"):
            state = timm.create_model(name).state_dict()
        with pytest.raises(WeightsError, match="not a checkpoint of a plain ViT"):
            load_weights(vit, state)
