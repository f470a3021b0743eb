"""Tests of `predict` and `read_image`: one decoding for Python and the commands, and what is refused."""

import csv
import dataclasses
import json
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from agreement import normal
from odd_images import odd_images
from PIL import Image
from torch import nn

from fastvit_triton import create_model, data_config, load_model, predict, read_image, save_weights, transforms
from fastvit_triton.cli import main
from fastvit_triton.models.weights.pretrained import imagenet_classes
from fastvit_triton.train import Transform

CLASSES = ("cat", "dög", "a b", 'c"d', "e")
SMALL = dict(img_size=32, embed_dim=24, num_heads=2, depth=1, num_classes=5)


def drawn(name: str = "vit_tiny_patch16_224", **more: object) -> nn.Module:
    """A small model with random parameters, by which different images have different classes."""
    return normal(create_model(name, **SMALL | more).eval())


def save_as_trained(model: nn.Module, path: Path, classes: tuple[str, ...], levels: float | None = None) -> Path:
    """Writes a file with the header that `train` writes."""
    transform = dataclasses.asdict(Transform((32, 32), (0.5, 0.4, 0.3), (0.2, 0.2, 0.1), 0.9, levels=levels))
    known = {"crop_pct": 0.9, "label_names": classes, "input_size": (3, *transform["size"])}
    keys = ("mean", "std", "crop_mode", "interpolation", *(["levels"] if levels else []))
    model.pretrained_cfg = known | {key: transform[key] for key in keys}
    save_weights(model, path, metadata={"training": json.dumps({"classes": classes, "transform": transform})})
    return path


def by_command(checkpoint: Path, folder: Path, *options: str) -> dict[Path, list[tuple[str, float]]]:
    """What the command `predict` writes of each file."""
    out = folder.parent / "classes.csv"
    words = ["--checkpoint", str(checkpoint), "--top", "5", "--out", str(out), *options]
    assert main(["predict", *words, str(folder)]) == 0
    with out.open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    return {
        Path(row["file"]): [(row[f"class_{i}"], float(row[f"probability_{i}"])) for i in range(1, 6)] for row in rows
    }


@pytest.mark.fast
def test_python_and_the_command_decode_alike(tmp_path: Path):
    """Oracle: equal numbers for paths, open files, PIL images and the command; and where nothing is lost, those of the
    picture that a file shows, which differ from those of its bare pixels."""
    checkpoint = save_as_trained(drawn(), tmp_path / "model.safetensors", CLASSES)
    shown = odd_images(tmp_path / "images")
    model, _ = load_model(checkpoint)
    files = sorted(shown)
    want = predict(model, files)
    assert model.training and len({str(classes) for classes in want}) > 8
    assert by_command(checkpoint, tmp_path / "images") == dict(zip(files, want, strict=True))
    with ExitStack() as stack:
        opened = [stack.enter_context(Image.open(file)) for file in files]
        assert predict(model, map(str, files)) == predict(model, opened) == want
    pictures = [file for file in files if shown[file] is not None]
    exact = predict(model, [Image.fromarray(shown[file]) for file in pictures], batch_size=7)
    for file, one in zip(pictures, exact, strict=True):  # batches of another size are summed in another order
        torch.testing.assert_close(dict(want[files.index(file)]), dict(one))
    with (tmp_path / "images" / "turned6.jpg").open("rb") as stream:
        (one,) = predict(model, stream, top=2)
    torch.testing.assert_close(dict(one), dict(want[files.index(Path(stream.name))][:2]))


def test_levels_of_training_hold_for_python_and_the_command(tmp_path: Path):
    """Oracle: the 8-bit image with 255 / 4095 of the values of one with 12 of 16 bits."""
    values = np.random.default_rng(0).integers(0, 4096, (32, 32)).astype(np.uint16)
    (tmp_path / "images").mkdir()
    file = tmp_path / "images" / "deep.png"
    Image.fromarray(values).save(file)
    shallow = Image.fromarray((values / 4095 * 255).round().astype(np.uint8))
    net = drawn()
    checkpoint = save_as_trained(net, tmp_path / "model.safetensors", CLASSES, 4095.0)
    model, _ = load_model(checkpoint)
    (found,) = predict(model, file)
    assert [found] == predict(model, shallow) == [*by_command(checkpoint, tmp_path / "images").values()]
    other = save_as_trained(net, tmp_path / "other.safetensors", CLASSES)
    assert transforms(load_model(other)[0]).levels is None
    assert [found] == [*by_command(other, tmp_path / "images", "--levels", "4095").values()]


def test_what_read_image_returned_stays_as_it_is(tmp_path: Path):
    """Oracle: the same pixels when it is read again, so that a PIL image may come from it."""
    for file in odd_images(tmp_path / "images"):
        once = read_image(file)
        twice = read_image(once)
        assert once.mode == twice.mode and np.array_equal(np.asarray(once), np.asarray(twice)), file


def test_models_of_timm_and_wrapped_models():
    """Oracle: softmax of the logits by hand; names of ImageNet where the weights have its classes, else numbers."""
    model, image = (
        timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1).eval(),
        Image.new("RGB", (90, 70), "red"),
    )
    with torch.no_grad():
        best = model(transforms(model)(image)[None]).softmax(1)[0].topk(3)
    assert transforms(model).size == (64, 64)
    for wrapped in (model, torch.compile(model, backend="eager"), nn.DataParallel(model), model.bfloat16()):
        (classes,) = predict(wrapped, image, top=3)
        within = {} if model.head.weight.dtype == torch.float32 else dict(atol=1e-3, rtol=0.1)
        torch.testing.assert_close([share for _, share in classes], best.values.tolist(), **within)
        assert within or [name for name, _ in classes] == [tuple(imagenet_classes().values())[i] for i in best.indices]
    (numbered,) = predict(drawn(), image)
    assert sorted(name for name, _ in numbered) == list("01234")


def test_what_predict_refuses(tmp_path: Path):
    """Oracle: one sentence that names the argument."""
    (tmp_path / "bad.jpg").write_bytes(b"no image")
    model, image = drawn(), Image.new("RGB", (40, 40))
    for arguments, words in (
        ((model, tmp_path / "bad.jpg"), "bad.jpg cannot be read as an image: not an image"),
        ((model, str(tmp_path / "none.jpg")), "none.jpg cannot be read as an image: No such file or directory"),
        ((model, image, 0), "top is 0; use an integer of at least 1"),
        ((drawn(num_classes=0), image), "model has no classifier, and predict returns classes"),
        ((create_model("deformable_detr_digits"), image), "model is trained to detect"),
        ((drawn(global_pool="none"), image), "VisionTransformer does not return logits [B, classes]"),
    ):
        with pytest.raises(ValueError) as error:
            predict(*arguments)
        assert words in str(error.value) and "\n" not in str(error.value)
    for images in (3, b"data", None):
        with pytest.raises(TypeError, match=f"images is of type {type(images).__name__}; give paths or PIL images"):
            predict(model, images)
    assert predict(model, []) == []


@pytest.mark.parametrize(
    "name, options, size",
    [
        ("vit_tiny_patch16_224", dict(img_size=(32, 64), in_chans=1), (1, 32, 64)),
        ("vit_tiny_r_s16_p8_224", dict(img_size=64), (3, 64, 64)),  # its patch_embed.proj takes features
        ("convnext_atto", dict(in_chans=5), (5, 224, 224)),  # of any size
    ],
)
def test_the_size_that_a_model_of_timm_was_built_for(name: str, options: dict, size: tuple):
    """Oracle: its options."""
    with torch.device("meta"):
        model = timm.create_model(name, **options)
    config = data_config(model)
    assert config["input_size"] == size and len(config["mean"]) == size[0]
