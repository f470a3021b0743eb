"""The command line: a thin layer over `train`, `explain`, `measure` and `weights`. Only here does anything print."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from .console import complain
from .measuring import DTYPES, benchmark
from .pictures import explain, predict
from .training import evaluate, train
from .upkeep import convert, doctor, pack


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns 0, 1 (the machine failed), 2 (the input will not do) or 130 (stopped by Ctrl-C)."""
    args = parser().parse_args(argv)
    # Idle threads sleep instead of spinning: on busy cores a small model trains up to 20 times faster.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        return args.run(args)
    except KeyboardInterrupt:
        return complain("stopped", 130)
    except OSError as error:
        return complain(str(error), 1)
    except ValueError as error:
        return complain(str(error), 2)
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":
            raise
        return complain("the device is out of memory; lower the batch size or take a smaller --model", 1)


# The rest of a recipe that a run may change; `help(fastvit_triton.train.Recipe)` says more.
NUMBERS = {
    "optimizer": (str, "adamw, sgd or lamb"),
    "schedule": (str, "own, vit, deit or mae"),
    "loss": (str, "softmax, sigmoid or bce"),
    "weight-decay": (float, "of matrices"),
    "layer-decay": (float, "rate of a block over that of the next"),
    "clip": (float, "largest gradient norm"),
    "label-smoothing": (float, "probability spread over all classes"),
    "mixup": (float, "alpha; 0 is off"),
    "cutmix": (float, "alpha; 0 is off"),
    "mixtoken": (float, "alpha, in place of the other two"),
    "erasing": (float, "probability of random erasing"),
    "policy": (str, "timm, three, randaug(2,15): what changes a crop"),
    "repeats": (int, "looks at each image of repeated augmentation"),
    "min-area": (float, "smallest part of a picture in a random crop"),
    "drop-path-rate": (float, "stochastic depth of the last block"),
}


def parser() -> argparse.ArgumentParser:
    """Every command and option."""
    top = argparse.ArgumentParser(prog="fastvit-triton", description="Vision Transformers on fused Triton kernels.")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def command(run, text: str) -> Callable[..., argparse.Action]:
        added = commands.add_parser(run.__name__, help=text, description=run.__doc__)
        added.set_defaults(run=run)
        return added.add_argument

    def shared(add: Callable[..., argparse.Action]) -> None:
        add("--device", default="auto", help="cpu, cuda, …; auto takes a GPU if there is one")
        add("--workers", type=int, default=min(8, os.cpu_count() or 1), help="processes that decode images")
        add("--skip-bad-images", action="store_true", default=None, help="leave out images that cannot be read")

    add = command(train, "train a ViT, by default on handwritten digits")
    add("--data", help="'digits', or a folder with train/<class>/ and val/<class>/, or of shards (default: digits)")
    add("--out", type=Path, help="output folder (default: runs/<data>)")
    add("--resume", action="store_true", help="go on with the run that --out holds")
    add("--overwrite", action="store_true", help="replace the run that --out holds")
    add("--recipe", help="digits, folder, vit-i1k, vit-finetune, augreg, simplevit, deit, deit3, mae-pretrain, …")
    add("--model", help="a name from list_models()")
    add("--weights", help="checkpoint to start from, in any known layout; a head of another size is replaced")
    add("--epochs", type=int, help="passes over the training images")
    add("--batch-size", type=int, help="images per step")
    add("--lr", type=float, help="peak learning rate")
    add("--warmup", type=float, help="part of the run before the peak")
    add("--img-size", type=int, help="image side in pixels")
    add("--average", type=float, help="keep, test and save a moving average of the weights, such as 0.999")
    add("--parts", type=int, help="take a batch's gradient in so many pieces, to save memory")
    for name, (kind, about) in NUMBERS.items():
        add(f"--{name}", type=kind, help=about)
    add("--amp", choices=("auto", "bfloat16", "float16", "float32"), help="autocast (default: bfloat16 on a GPU)")
    add("--grad-checkpointing", action="store_true", default=None, help="recompute activations, to save memory")
    add("--teacher", help="checkpoint to learn from as well; takes a deit_*_distilled_* model")
    add("--distillation", choices=("hard", "soft"), help="what is learned from the teacher (default: hard)")
    add("--parallel", choices=("ddp", "fsdp"), help="under torchrun: a copy of the model on each process, or a part")
    add("--save-every", type=int, help="steps between states within an epoch (default: after epochs only)")
    add("--seed", type=int, help="of weights, order and augmentation (default: 0)")
    shared(add)

    add = command(predict, "classify image files")
    add("images", nargs="+", type=Path, help="image files, or folders of them")
    add("--checkpoint", type=Path, required=True, help="output folder of a run, or its model.safetensors")
    add("--top", type=int, default=3, help="classes to name (default: 3)")
    add("--invert", action="store_true", help="swap dark and light: the digits are white on black")
    add("--device", default="auto", help="cpu, cuda, …; auto takes a GPU if there is one")

    add = command(explain, "show what a model sees in pictures")
    add("--checkpoint", type=Path, required=True, help="output folder of a run, or its model.safetensors")
    add("--image", type=Path, required=True, help="an image file, or a folder of them")
    add("--out", type=Path, default=Path("report"), help="folder for report.html and its pictures (default: report)")
    add("--query", type=int, help="token whose attention is shown (default: the class token)")
    add("--most", type=int, default=8, help="images of a folder to show (default: 8)")
    add("--no-test", action="store_true", help="leave out the confusion matrix, which reads all test images")
    add("--device", default="auto", help="cpu, cuda, …; auto takes a GPU if there is one")
    add("--workers", type=int, default=min(8, os.cpu_count() or 1), help="processes that decode images")

    add = command(evaluate, "repeat the test accuracy of a checkpoint")
    add("--checkpoint", type=Path, required=True, help="output folder of a run, or its model.safetensors")
    add("--data", help="another image folder, of which val/ is read (default: that of training)")
    shared(add)

    add = command(benchmark, "measure a model on this machine")
    add("--model", help="a name from list_models(), or of timm (default: ViT-B on a GPU, ViT-Ti elsewhere)")
    add("--batch", type=int, help="images at once (default: 64 on a GPU, 2 elsewhere)")
    add("--dtype", choices=DTYPES, help="of weights and images (default: bfloat16 on a GPU, float32 elsewhere)")
    add("--train", action="store_true", help="forward and backward instead of inference")
    add("--out", type=Path, help="file for the rows as JSON")
    add("--device", default="auto", help="cpu, cuda, …; auto takes a GPU if there is one")

    add = command(doctor, "say what runs on this machine, or what would be fused of a model")
    add("--model", help="timm:NAME, torchvision:NAME, hf-config:PATH_OR_CLASS, or a name from list_models()")
    add("--img-size", type=int, help="image side in pixels (default: the model's)")
    add("--batch-size", type=int, default=64, help="images that share a launch (default: 64)")

    add = command(convert, "rewrite a checkpoint for another library")
    add("checkpoint", type=Path, help="a checkpoint of ours, or with --model of any known layout")
    add("out", type=Path, help="file to write, ending in .safetensors")
    add("--to", required=True, choices=("fastvit_triton", "timm", "transformers"), help="names of whom")
    add("--model", help="which model a foreign checkpoint holds")

    add = command(pack, "write an image folder as webdataset shards")
    add("folder", type=Path, help="holds train/<class>/ and val/<class>/")
    add("out", type=Path, help="a new folder")
    add("--per-shard", type=int, default=1000, help="images in a shard (default: 1000)")
    return top
