"""`train` and `evaluate`."""

import argparse
import importlib.util
from dataclasses import fields
from pathlib import Path
from shlex import quote

from rich.console import Console

from .console import choose, complain, say, trained

# Options of `train` that make a run what it is: kept in its state, and not to be changed by --resume.
SETTINGS = ("data", "model", "epochs", "batch_size", "lr", "seed", "img_size", "skip_bad_images", "weights")


def train(args: argparse.Namespace) -> int:
    """Trains a ViT and leaves weights, log and pictures in the output folder."""
    import torch

    from ..models import create_model
    from ..train.checkpoint import load_state
    from ..train.data import load
    from ..train.display import display
    from ..train.job import FILES, STATE, run, settle, summary
    from ..train.optim import redraw_positions
    from ..train.recipes import Recipe
    from ..weights import load_weights, save_weights

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


def evaluate(args: argparse.Namespace) -> int:
    """Repeats the test accuracy of a checkpoint, and breaks it down by class."""
    from rich.table import Table

    from ..train.data import load_test
    from ..train.image import listing
    from ..train.job import half
    from ..train.loop import evaluate

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
