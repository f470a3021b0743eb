"""Trains two designs of the same width on few images, with and without convolutions before the Transformer.

    python examples/small_data.py
    python examples/small_data.py --shots 5 20 80 --models vit_lite_4_4_32 cct_4_3x2_32 --epochs 60

The images are scikit-learn's handwritten digits, enlarged to 16 x 16, `--shots` of each class. The accuracy is that of
the 360 test digits, and of the same moved by one pixel of 16 down and right, which were not seen in training.
"""

import argparse
from functools import partial

import torch
import torch.nn.functional as F

import fastvit_triton
from fastvit_triton.train import Step, adamw, evaluate, fit, sample_per_class, warmup_cosine
from fastvit_triton.train.data import digits

BATCH = 32


def prepared(split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Images [N, 1, 16, 16] around 0, and classes [N]."""
    images, targets = digits(split)
    return F.interpolate(images, (16, 16), mode="bilinear") * 2 - 1, targets


def main() -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["vit_lite_2_4_32", "cct_2_3x2_32"], help="default: %(default)s")
    parser.add_argument(
        "--shots", nargs="+", type=int, default=[10, 40], help="images per class (default: %(default)s)"
    )
    parser.add_argument("--epochs", type=int, default=40, help="default: %(default)s")
    args = parser.parse_args()

    images, targets = prepared("train")
    unseen, answers = prepared("test")
    for shots in args.shots:
        for name in args.models:
            torch.manual_seed(0)
            model = fastvit_triton.create_model(name, img_size=16, in_chans=1, num_classes=10)
            chosen = sample_per_class(targets, shots)
            chosen = chosen[torch.randperm(len(chosen))]
            batches = list(zip(images[chosen].split(BATCH), targets[chosen].split(BATCH), strict=True))
            lr_at = partial(warmup_cosine, steps=args.epochs * len(batches), warmup=len(batches), peak=1e-3)
            settings = dict(epochs=args.epochs, step=Step(clip=1.0), test_once=True)
            test = partial(evaluate, batches=[(unseen, answers)])
            *_, last = fit(model, batches, adamw(model, 1e-3, 0.05), lr_at, test=test, **settings)
            moved = evaluate(model, [(unseen.roll((1, 1), (2, 3)), answers)])
            count = sum(p.numel() for p in model.parameters())
            accuracy = f"test accuracy {100 * last.test.accuracy:.1f} %, moved by a pixel {100 * moved.accuracy:.1f} %"
            print(f"{shots} images per class, {name}, {count:,} parameters: {accuracy}")


if __name__ == "__main__":
    main()
