"""Trains on the digits in five ways, and with the default recipe from twenty seeds.

    python -m benchmarks.train_digits               every way, seed 0; about ten minutes on one core
    python -m benchmarks.train_digits --seeds 20    the default recipe, twenty seeds; about half an hour on one core
    python -m benchmarks.train_digits --quick       every way for eight epochs, as tests/test_train_digits.py expects
    python -m benchmarks.train_digits --epochs 5    shorter runs, for a trial; prints, writes nothing

Each run trains on the training split and evaluates the test split once, after its last epoch; no choice depends on it.
The first three commands write results/learn.json.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.digits import provenance
from fastvit_triton.files import replacing
from fastvit_triton.models import create_model
from fastvit_triton.models.weights import load_weights
from fastvit_triton.train import extract_features, few_shot, sample_per_class
from fastvit_triton.train.build import build_masked_model, configure_model
from fastvit_triton.train.data import DIGITS_MEAN, DIGITS_STD, Data, TensorBatches, affine_augmentation, digits
from fastvit_triton.train.data.transform import Transform
from fastvit_triton.train.loop import Score
from fastvit_triton.train.recipes import DIGITS, Recipe
from fastvit_triton.train.trainer import build_trainer

RESULT = Path(__file__).parent / "results" / "learn.json"
TRANSFORM = Transform((8, 8), (DIGITS_MEAN,), (DIGITS_STD,))
SIZE = dict(embed_dim=64, depth=4, num_heads=2, patch_size=2, img_size=8, in_chans=1)
QUICK = 8  # few enough for a test
SHOTS = 10  # labelled images per class in the few-shot ways
PRETRAIN = replace(DIGITS, loss="colours", mask_ratio=0.5, label_smoothing=0.0, mixup=0.0)


def fit(model: nn.Module, recipe: Recipe, images: Tensor, targets: Tensor, **options: object) -> Score:
    """Trains with the recipe on these images and evaluates the test split once."""
    train = TensorBatches(images, targets, TRANSFORM, recipe.batch_size, affine_augmentation(recipe))
    test = TensorBatches(*digits("test"), TRANSFORM, 128)
    data = Data("digits", tuple("0123456789"), TRANSFORM, train, test, test_once=True)
    *_, last = build_trainer(model, data, recipe, **options).fit()
    return last.test


def build(name: str, **options: object) -> nn.Module:
    """A model for the digits, initialised as in the default recipe."""
    model = create_model(name, **SIZE | {"num_classes": 10} | options)
    configure_model(DIGITS, model)
    return model


def vit(epochs: int) -> dict:
    """The default recipe."""
    return {"accuracy": fit(build("vit_digits_patch2_8"), replace(DIGITS, epochs=epochs), *digits("train")).accuracy}


def distilled_deit(epochs: int) -> dict:
    """Hard distillation of a ViT into a DeiT of the same size."""
    recipe = replace(DIGITS, epochs=epochs)
    teacher, student = build("vit_digits_patch2_8"), build("deit_tiny_distilled_patch16_224")
    taught = fit(teacher, recipe, *digits("train")).accuracy
    student.set_distilled_training()
    options = dict(teacher=teacher.eval().requires_grad_(False), distillation="hard")
    return {"accuracy": fit(student, recipe, *digits("train"), **options).accuracy, "teacher_accuracy": taught}


def simplevit(epochs: int) -> dict:
    """SimpleViT: no class token, fixed positions, mean over tokens."""
    model = build("simplevit_small_patch16_224")
    return {"accuracy": fit(model, replace(DIGITS, epochs=epochs), *digits("train")).accuracy}


def masked(epochs: int) -> dict:
    """Masked patch prediction on all training images without labels, then fine-tuning with ten labels per class."""
    images, targets = digits("train")
    chosen = sample_per_class(targets, SHOTS)
    encoder = build("vit_digits_patch2_8")
    loss = fit(build_masked_model(PRETRAIN, encoder), replace(PRETRAIN, epochs=epochs), images, targets).loss
    tuned, scratch = build("vit_digits_patch2_8"), build("vit_digits_patch2_8")
    load_weights(tuned, {k: v for k, v in encoder.state_dict().items() if not k.startswith("head")})
    recipe = replace(DIGITS, epochs=epochs, batch_size=32)
    start = {"accuracy": fit(tuned, recipe, images[chosen], targets[chosen]).accuracy}
    plain = {"scratch_accuracy": fit(scratch, recipe, images[chosen], targets[chosen]).accuracy}
    return start | plain | {"masked_loss": loss, "labels": len(chosen)}


def ridge(epochs: int) -> dict:
    """Ridge regression with ten labels per class, on the patch tokens of a model pre-trained by masking.

    Using all tokens as features, instead of their mean, was chosen on part of the training split.
    """
    images, targets = digits("train")
    encoder = build("vit_digits_patch2_8")
    fit(build_masked_model(PRETRAIN, encoder), replace(PRETRAIN, epochs=epochs), images, targets)
    chosen = sample_per_class(targets, SHOTS)
    parts = (images[chosen], targets[chosen]), digits("test")

    def accuracy(features: Callable[[Tensor], Tensor]) -> float:
        (some, answers), (others, expected) = (
            extract_features(encoder, TensorBatches(*part, TRANSFORM, 128), features) for part in parts
        )
        return (few_shot(some, answers, others, 10).argmax(1) == expected).double().mean().item()

    tokens = accuracy(lambda x: encoder.forward_features(x)[:, 1:].flatten(1))
    return {"accuracy": tokens, "pixels_accuracy": accuracy(lambda x: x.flatten(1)), "labels": len(chosen)}


WAYS = {way.__name__: way for way in (vit, distilled_deit, simplevit, masked, ridge)}


def learn(name: str, epochs: int, seed: int = 0) -> dict:
    """Trains in one way from one seed, on one core; returns its results with "core_seconds"."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    began = time.process_time()
    result = {key: round(value, 5) for key, value in WAYS[name](epochs).items()}
    return result | {"epochs": epochs, "seed": seed, "core_seconds": round(time.process_time() - began, 1)}


def spread(seeds: int, epochs: int) -> dict:
    """Trains the default recipe from several seeds and returns the distribution of its results."""
    with ProcessPoolExecutor() as pool:
        rows = list(pool.map(learn, ["vit"] * seeds, [epochs] * seeds, range(seeds)))
    reached = [row["accuracy"] for row in rows]
    return {
        "mean": round(statistics.mean(reached), 5),
        "deviation": round(statistics.stdev(reached), 5) if seeds > 1 else None,
        "least": min(reached),
        "most": max(reached),
        "accuracy": reached,
        "epochs": epochs,
        "core_seconds": round(statistics.median(row["core_seconds"] for row in rows), 1),
    }


def main() -> None:
    """Runs one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, help="number of seeds for the default recipe")
    parser.add_argument("--epochs", type=int, help="number of epochs of a trial run; nothing is written")
    parser.add_argument("--only", choices=WAYS, help="run a single way; nothing is written")
    parser.add_argument("--quick", action="store_true", help="every way for eight epochs")
    args = parser.parse_args()
    epochs = QUICK if args.quick else args.epochs or DIGITS.epochs
    if args.seeds:
        part, accuracies = "seeds", spread(args.seeds, epochs)
    else:
        names = [args.only] if args.only else list(WAYS)
        part = "quick" if args.quick else "ways"
        with ProcessPoolExecutor() as pool:
            accuracies = dict(zip(names, pool.map(learn, names, [epochs] * len(names)), strict=True))
    print(json.dumps(accuracies, indent=2))
    if args.epochs is None and args.only is None:
        result = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        result[part] = provenance() | accuracies
        with replacing(RESULT) as temporary:
            temporary.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
