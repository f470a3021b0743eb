"""Tests of `as_hf`: models of ours as models of transformers. Oracle: the model itself, and timm's preprocessing."""

import pytest
import torch
import transformers
from PIL import Image
from torch.nn import functional as F
from trainer_job import Images, train

import fastvit_triton
from fastvit_triton.integrations.transformers import FvtConfig, FvtForImageClassification, as_hf

SMALL = dict(img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=3)
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")


def model(name="vit_tiny_patch16_224", **options):
    torch.manual_seed(0)
    made = fastvit_triton.create_model(name, **SMALL | options).eval()
    torch.nn.init.normal_(made.head.weight)
    return made


def test_outputs_are_those_of_the_model():
    """Oracle: logits of the model itself, and their cross entropy; the model is not copied."""
    own, images = model(), torch.stack([Images()[i]["pixel_values"] for i in range(4)])
    labels = torch.tensor([0, 1, 2, 0])
    wrapped = as_hf(own, ["a", "b", "c"])
    assert wrapped.model is own and wrapped.config.id2label == {0: "a", 1: "b", 2: "c"}
    found, want = wrapped(pixel_values=images, labels=labels), own(images)
    assert torch.equal(found.logits, want) and want.std() > 0
    assert torch.equal(found.loss, F.cross_entropy(want, labels))
    assert torch.equal(wrapped(images, return_dict=False)[0], want)


@pytest.mark.parametrize(
    "name, options", [("vit_tiny_patch16_224", {"pos_embed": "sincos2d"}), ("swin_tiny_patch4_window7_224", None)]
)
def test_saved_models_are_loaded(name, options, tmp_path):
    """Oracle: the outputs before, bit for bit, with tables that are computed and not stored; by both classes."""
    if options is None:
        torch.manual_seed(0)
        own = fastvit_triton.create_model(
            name, img_size=32, embed_dim=24, depths=(1, 1), num_heads=(1, 2), num_classes=3, window_size=4
        ).eval()
        torch.nn.init.normal_(own.get_classifier().weight)
    else:
        own = model(name, **options)
    own.pretrained_cfg = {"mean": (0.1, 0.2, 0.3)}
    images = torch.randn(2, 3, *own.config.img_size)
    as_hf(own).save_pretrained(tmp_path)
    for cls in (FvtForImageClassification, transformers.AutoModelForImageClassification):
        again = cls.from_pretrained(tmp_path)
        assert torch.equal(again(images).logits, own(images))
        assert again.model.variant == name and again.model.pretrained_cfg["mean"] == [0.1, 0.2, 0.3]
    fewer = FvtForImageClassification.from_pretrained(tmp_path, num_labels=5, ignore_mismatched_sizes=True)
    assert fewer(images).logits.shape == (2, 5) and not fewer.model.get_classifier().weight.any()


def test_pipeline_prepares_images_as_the_model_needs(tmp_path):
    """Oracle: `fastvit_triton.transforms` to one level of an image, and the scores of the model on these images."""
    own = model()
    own.pretrained_cfg = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4), "crop_pct": 0.8, "interpolation": "bilinear"}
    as_hf(own, ["a", "b", "c"]).save_pretrained(tmp_path)
    pixels = torch.randint(0, 256, (20, 32, 3), dtype=torch.uint8).numpy()
    image = Image.fromarray(pixels)
    want = fastvit_triton.transforms(own)(image)
    prepare = transformers.AutoImageProcessor.from_pretrained(tmp_path)
    got = prepare(image, return_tensors="pt")["pixel_values"][0]
    step = 1 / 255 / min(own.pretrained_cfg["std"])  # of one level of an image
    assert got.shape == want.shape and (got - want).abs().max() <= step + torch.finfo(torch.float32).eps * 8
    classify = transformers.pipeline("image-classification", str(tmp_path), device="cpu")
    scores = {row["label"]: row["score"] for row in classify(image)}
    exact = dict(zip("abc", own(got[None]).softmax(-1)[0].tolist(), strict=True))
    roundings = (len(exact) + 1) * torch.finfo(torch.float32).eps  # of the sum, and of a quotient
    assert all(abs(scores[name] - score) <= roundings for name, score in exact.items())


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}])
def test_the_trainer_trains_it(options, tmp_path):
    """Oracle: its loss falls, and its checkpoint holds the weights that it has."""
    wrapped = as_hf(model(drop_path_rate=0.0))
    batch = [Images()[i] for i in range(8)]
    images, labels = torch.stack([b["pixel_values"] for b in batch]), torch.tensor([b["labels"] for b in batch])
    before = float(wrapped(images, labels).loss)
    trained, _, trainer = train(str(tmp_path), lambda: wrapped, max_steps=4, learning_rate=1e-2, **options)
    assert wrapped.model.grad_checkpointing is bool(options)
    assert float(trained.eval()(images, labels).loss) < before
    trainer.save_model(str(tmp_path / "out"))
    again = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert torch.equal(again(images).logits, trained(images).logits)


def test_what_is_no_classifier_is_refused():
    """Oracle: the sentences."""
    with pytest.raises(TypeError, match=r"model is Linear; give a classifier that fastvit_triton.create_model returns"):
        as_hf(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="model is IPT; give a classifier"):
        as_hf(fastvit_triton.create_model("ipt_digits"))
    with pytest.raises(ValueError, match=r"model has no classifier; give it one by model.reset_classifier"):
        as_hf(fastvit_triton.create_model("vit_tiny_patch16_224", **SMALL | {"num_classes": 0}))
    with pytest.raises(ValueError, match="classes has 1 names, and the model 3 classes"):
        as_hf(model(), ["a"])
    assert FvtConfig("vit_tiny_patch16_224", {"num_classes": 7}).num_labels == 7
