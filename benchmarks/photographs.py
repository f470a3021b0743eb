"""Trains IPT on tiles of one photograph and restores another: scikit-learn's two, which it installs.

    python -m benchmarks.photographs --run runs/photographs     6 minutes of one core; a run that was cut off goes on

Writes results/photographs.json: the recipe, steps, and for each task PSNR and SSIM of the whole photograph, restored
and as it was given (for x2 enlarged bicubically); and results/photographs.png, a part of it.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from benchmarks.digits import provenance
from fastvit_triton.cli import main as command
from fastvit_triton.cli.loading import load_trained
from fastvit_triton.files import replacing
from fastvit_triton.train.outputs import WEIGHTS
from fastvit_triton.train.recipes import RESTORATION
from fastvit_triton.train.restoration import degrade, psnr, ssim

RESULTS = Path(__file__).parent / "results"
TRAINING, TEST = "china.jpg", "flower.jpg"
SIDE, STRIDE = 48, 12  # of the tiles
PART = (slice(150, 310), slice(230, 390))  # of the test photograph, that is drawn


def photograph(name: str) -> Tensor:
    """Pixels 0 … 255 of a photograph of scikit-learn, [3, H, W]; sides are even."""
    from sklearn.datasets import load_sample_image

    pixels = torch.tensor(load_sample_image(name)).permute(2, 0, 1).float()
    return pixels[:, : pixels.shape[1] // 2 * 2, : pixels.shape[2] // 2 * 2]


def write_tiles(folder: Path) -> int:
    """Writes the tiles of the training photograph, and some of the other as test images; returns their number."""
    count = 0
    for split, name, stride in (("train", TRAINING, STRIDE), ("val", TEST, SIDE)):
        target = folder / split / "photo"
        target.mkdir(parents=True, exist_ok=True)
        pixels = photograph(name).permute(1, 2, 0).byte().numpy()
        for y in range(0, pixels.shape[0] - SIDE + 1, stride):
            for x in range(0, pixels.shape[1] - SIDE + 1, stride):
                Image.fromarray(pixels[y : y + SIDE, x : x + SIDE]).save(target / f"{y:04d}-{x:04d}.png")
                count += split == "train"
    return count


def restored(model: Any, task: str) -> dict[str, Tensor]:
    """The test photograph, what the model is given, and what it makes of it, all of the size of the photograph."""
    truth = photograph(TEST)
    torch.manual_seed(0)
    given = degrade(truth[None], task)[0]
    with torch.no_grad():
        output = model.restore(given, task)
    shown = given if given.shape == truth.shape else F.interpolate(given[None], truth.shape[1:], mode="bicubic")[0]
    return dict(given=shown.clamp(0, 255).round(), restored=output.round(), truth=truth)


def draw(pictures: dict[str, dict[str, Tensor]], path: Path) -> None:
    """Draws a part of the photograph for each task: given, restored, original."""
    from matplotlib.figure import Figure

    titles = {"x2": "half the size, enlarged bicubically", "denoise30": "noise of standard deviation 30"}
    figure = Figure(figsize=(9.3, 3.3 * len(pictures)), layout="constrained")
    axes = figure.subplots(len(pictures), 3)
    for row, (task, images) in zip(axes, pictures.items(), strict=True):
        for place, (name, image) in zip(row, images.items(), strict=True):
            title = titles[task] if name == "given" else name
            if name != "truth":
                title += f", {psnr(image[None], images['truth'][None]).item():.2f} dB"
            place.imshow(image[(slice(None), *PART)].byte().permute(1, 2, 0), interpolation="nearest")
            place.set_title(title.replace("truth", "original").replace("restored", "restored by IPT"), fontsize=9)
            place.set_axis_off()
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=130)


def main() -> None:
    """Trains, restores, and writes the result and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/photographs"), help="folder for tiles and run")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    args = parser.parse_args()
    tiles = write_tiles(args.run / "tiles")
    words = ["--model", RESTORATION.model, "--data", str(args.run / "tiles"), "--out", str(args.run / "run")]
    if command(["train", *words, "--resume", "auto", "--workers", "0"]):
        raise SystemExit(1)
    model: Any = load_trained(str(args.run / "run" / WEIGHTS)).model.eval()
    pictures = {task: restored(model, task) for task in model.config.tasks}
    rows = {}
    for task, images in pictures.items():
        truth = images["truth"][None]
        rows[task] = {
            f"{name}_{measure.__name__}": round(measure(images[name][None], truth).item(), 4)
            for name in ("given", "restored")
            for measure in (psnr, ssim)
        }
    steps = RESTORATION.epochs * -(-tiles // RESTORATION.batch_size)
    facts = dict(command="python -m benchmarks.photographs", training=TRAINING, test=TEST, tiles=tiles, steps=steps)
    result = facts | dict(tasks=rows, recipe=asdict(RESTORATION)) | provenance()
    with replacing(args.out / "photographs.json") as temporary:
        temporary.write_text(json.dumps(result, indent=1) + "\n")
    draw(pictures, args.out / "photographs.png")


if __name__ == "__main__":
    main()
