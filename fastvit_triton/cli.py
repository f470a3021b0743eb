"""The command line: a thin layer over `train`, `models` and `weights`. Only here does anything print."""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    import torch
    from torch import nn


# Options of `train` that make a run what it is: kept in its state, and not to be changed by --resume.
SETTINGS = ("data", "model", "epochs", "batch_size", "lr", "seed", "img_size", "skip_bad_images", "weights")


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
        return complain("the device is out of memory; lower --batch-size or take a smaller --model", 1)


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
    add("--data", help="'digits', or a folder with train/<class>/ and val/<class>/ (default: digits)")
    add("--out", type=Path, help="output folder (default: runs/<data>)")
    add("--resume", action="store_true", help="go on with the run that --out holds")
    add("--overwrite", action="store_true", help="replace the run that --out holds")
    add("--model", help="a name from list_models()")
    add("--weights", help="checkpoint to start from, in any known layout; a head of another size is replaced")
    add("--epochs", type=int, help="passes over the training images")
    add("--batch-size", type=int, help="images per step")
    add("--lr", type=float, help="peak learning rate")
    add("--img-size", type=int, help="image side in pixels")
    add("--seed", type=int, help="of weights, order and augmentation (default: 0)")
    shared(add)

    add = command(predict, "classify image files")
    add("images", nargs="+", type=Path, help="image files, or folders of them")
    add("--checkpoint", type=Path, required=True, help="output folder of a run, or its model.safetensors")
    add("--top", type=int, default=3, help="classes to name (default: 3)")
    add("--invert", action="store_true", help="swap dark and light: the digits are white on black")
    add("--device", default="auto", help="cpu, cuda, …; auto takes a GPU if there is one")

    add = command(evaluate, "repeat the test accuracy of a checkpoint")
    add("--checkpoint", type=Path, required=True, help="output folder of a run, or its model.safetensors")
    add("--data", help="another image folder, of which val/ is read (default: that of training)")
    shared(add)

    command(doctor, "say what runs on this machine")

    add = command(convert, "rewrite a checkpoint for another library")
    add("checkpoint", type=Path, help="a checkpoint of ours, or with --model of any known layout")
    add("out", type=Path, help="file to write, ending in .safetensors")
    add("--to", required=True, choices=("fastvit_triton", "timm", "transformers"), help="names of whom")
    add("--model", help="which model a foreign checkpoint holds")
    return top


def train(args: argparse.Namespace) -> int:
    """Trains a ViT and leaves weights, log and pictures in the output folder."""
    import torch

    from .models import create_model
    from .train.checkpoint import load_state
    from .train.data import load
    from .train.display import display
    from .train.job import FILES, STATE, run, settle, summary
    from .train.optim import redraw_positions
    from .train.recipes import Recipe
    from .weights import load_weights, save_weights

    out = args.out or Path("runs") / Path(args.data or "digits").resolve().name
    held = [name for name in FILES if (out / name).exists()]
    if args.resume and args.overwrite:
        raise ValueError("--resume goes on with a run and --overwrite replaces it; pass one of them")
    if args.resume and STATE not in held:
        raise ValueError(f"--resume finds no {STATE} in {out}; leave it out to start a run there")
    if held and not (args.resume or args.overwrite):
        raise ValueError(f"--out {out} already holds a run; pass --resume, --overwrite or another --out")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("train draws its curves with matplotlib; pip install matplotlib")
    state = load_state(out / STATE) if args.resume else None
    given = {name: getattr(args, name) for name in SETTINGS if getattr(args, name) is not None}
    settings = settle(given, state and state["settings"])
    recipe = Recipe(**{field.name: settings[field.name] for field in fields(Recipe)})
    device = choose(args.device)
    torch.manual_seed(settings["seed"])
    data = load(settings["data"], recipe, workers=args.workers, skip_bad_images=settings["skip_bad_images"])
    shape = {"img_size": recipe.img_size, "in_chans": len(data.transform.mean), "num_classes": len(data.classes)}
    model = create_model(recipe.model, drop_path_rate=recipe.drop_path_rate, **shape)
    if settings["weights"] and state is None:
        load_weights(model, settings["weights"])
    elif recipe.pos_std:
        redraw_positions(model, recipe.pos_std)

    out.mkdir(parents=True, exist_ok=True)
    for name in held if args.overwrite else ():
        (out / name).unlink()
    say(f"{recipe.model}, {sum(p.numel() for p in model.parameters()):,} parameters, on {device}")
    say(f"{settings['data']}: {len(data.classes)} classes; {recipe.epochs} epochs of {len(data.train)} steps")

    try:
        with display(Console(), recipe.epochs, len(data.train), len(state["history"]) if state else 0) as show:
            for progress in run(model.to(device), data, recipe, out, settings=settings, save=save_weights, state=state):
                show(progress)
    except KeyboardInterrupt:
        if not (out / STATE).exists():
            return complain("stopped before the first epoch was complete; nothing is kept", 130)
        again = f"fastvit-triton train --out {quote(str(out))} --resume"
        return complain(f"stopped; {out} holds everything up to the last complete epoch; go on with: {again}", 130)
    say(summary(out, data))
    return 0


def predict(args: argparse.Namespace) -> int:
    """Classifies image files; a picture that cannot be read gets one sentence, and exit code 2 at the end."""
    import torch
    from PIL import ImageOps

    from .train.folder import is_image
    from .train.image import defect, read

    model, about = trained(args.checkpoint)
    device = choose(args.device)
    model.to(device).eval()
    files = [
        file
        for path in args.images
        for file in (sorted(filter(is_image, path.rglob("*"))) if path.is_dir() else [path])
    ]
    if not files:
        raise ValueError(f"there is no image in {', '.join(map(str, args.images))}")
    code = 0
    for file in files:
        if why := defect(file, decode=True):
            code = complain(f"{file} cannot be read as an image: {why}", 2)
            continue
        picture = ImageOps.invert(read(file).convert("RGB")) if args.invert else read(file)
        with torch.no_grad():
            chances = model(about["transform"](picture)[None].to(device))[0].softmax(0)
        best = chances.topk(min(max(args.top, 1), len(chances)))
        answers = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        say(f"{file}: " + ", ".join(f"{about['classes'][i]} ({100 * chance:.1f} %)" for i, chance in answers))
    return code


def evaluate(args: argparse.Namespace) -> int:
    """Repeats the test accuracy of a checkpoint, and breaks it down by class."""
    from rich.table import Table

    from .train.data import load_test
    from .train.image import listing
    from .train.job import half
    from .train.loop import evaluate

    model, about = trained(args.checkpoint)
    name = args.data or about["data"]
    if name is None:
        raise ValueError(f"{args.checkpoint} does not say what it was trained on; give --data")
    skip = args.skip_bad_images or about["skip_bad_images"]
    options = {"workers": args.workers, "skip_bad_images": skip}
    test = load_test(name, about["classes"], about["transform"], about["batch_size"], **options)
    device = choose(args.device)
    score = evaluate(model.to(device), test, half(device))
    table = Table("class", "images", "right", "accuracy")
    for number, label in enumerate(about["classes"]):
        mine = score.targets == number
        images, right = int(mine.sum()), int((score.predictions[mine] == number).sum())
        table.add_row(label, f"{images:,}", f"{right:,}", f"{100 * right / images:.1f} %" if images else "-")
    Console().print(table)
    right, images = int((score.predictions == score.targets).sum()), len(score.targets)
    say(f"test accuracy {100 * score.accuracy:.2f} % ({right:,} of {images:,} images), loss {score.loss:.4f}")
    if test.bad:
        say(f"skipped {len(test.bad)} images that cannot be read: {listing([str(path) for path in sorted(test.bad)])}")
    return 0


def doctor(args: argparse.Namespace) -> int:
    """Says what runs on this machine: devices, versions, and for each op the kernel or why not."""
    import torch

    from .kernels import OPS
    from .kernels.op import backend, why_not

    device, dtypes = choose("auto"), (torch.float32, torch.float16, torch.bfloat16)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found = importlib.util.find_spec("triton") is not None
    facts = {
        "device": f"{device} ({', '.join(gpus) or f'{torch.get_num_threads()} threads'})",
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton") if found else "not installed",
        "python": f"{platform.python_version()} on {platform.platform()}",
        "backend": f"{backend()} (FASTVIT_TRITON_BACKEND)",
    }
    paths = {dtype: f"PyTorch path: {why}" if (why := why_not(device, dtype)) else "kernel" for dtype in dtypes}
    same = len(set(paths.values())) == 1
    for op in OPS:
        facts[op.name] = paths[dtypes[0]] if same else "; ".join(f"{dtype}: {path}" for dtype, path in paths.items())
    width = max(map(len, facts))
    for name, fact in facts.items():
        say(f"{name:{width}}  {fact}")
    return 0


def convert(args: argparse.Namespace) -> int:
    """Rewrites a checkpoint under the names of another library."""
    from .models import create_model
    from .weights import load_model, load_weights, save_weights

    if args.out.exists():
        raise ValueError(f"{args.out} exists already; name another file")
    if args.model is None:
        model, header = load_model(args.checkpoint)
    else:
        model, header = create_model(args.model), {}
        load_weights(model, args.checkpoint)
    save_weights(model, args.out, layout=args.to, metadata=header)
    say(f"{args.out} holds {model.variant} under the names of {args.to}")
    return 0


def trained(path: Path) -> tuple["nn.Module", dict]:
    """A model and what its file says of its training; what it does not say takes the usual values."""
    from .train.image import IMAGENET_MEAN, IMAGENET_STD, Transform
    from .weights import load_model

    model, header = load_model(path)
    about = {"data": None, "batch_size": 64, "skip_bad_images": False} | json.loads(header.get("training", "{}"))
    channels = model.config.in_chans
    usual = {"size": model.config.img_size, "mean": IMAGENET_MEAN[:channels], "std": IMAGENET_STD[:channels]}
    about["transform"] = Transform(**about.get("transform", usual))
    about["classes"] = tuple(about.get("classes", map(str, range(model.config.num_classes))))
    return model, about


def choose(name: str) -> "torch.device":
    """The device of that name, once it has been seen to work."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name} does not work here ({str(error).splitlines()[0]}); leave it out") from error


def say(text: str) -> None:
    """One line on stdout, never folded, coloured or parsed."""
    Console(soft_wrap=True).print(text, markup=False, highlight=False)


def complain(text: str, code: int) -> int:
    """One line on stderr; returns the exit code."""
    text = f"fastvit-triton: {'' if code == 130 else 'error: '}{text}"
    Console(stderr=True, soft_wrap=True).print(text, markup=False, highlight=False)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
