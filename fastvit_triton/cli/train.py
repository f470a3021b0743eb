"""`train` and `evaluate`."""

import argparse
import importlib.util
import os
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from rich.console import Console

from .console import choose, complain, say, trained

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..train.parallel import World


def train(args: argparse.Namespace) -> int:
    """Trains a ViT and leaves weights, log and pictures in the output folder."""
    from ..train.parallel import World, join

    size = int(os.environ.get("WORLD_SIZE", 1))
    if args.parallel is None:
        if size > 1:
            raise ValueError(f"torchrun started {size} processes; pass --parallel ddp or --parallel fsdp")
        return _train(args, World(device=choose(args.device)))
    if "RANK" not in os.environ:
        raise ValueError(
            f"--parallel {args.parallel} needs several processes; start them with "
            f"torchrun --nproc-per-node 2 -m fastvit_triton.cli train --parallel {args.parallel} …"
        )
    with join(args.device) as world:
        return _train(args, world)


def _train(args: argparse.Namespace, world: "World") -> int:
    import torch

    from ..files import sweep
    from ..models import create_model
    from ..train.checkpoint import PREVIOUS, STATE, newest_state
    from ..train.data import load
    from ..train.display import display
    from ..train.job import FILES, SETTINGS, plan, run, settle, summary
    from ..train.plan import masked_for, prepare
    from ..train.ranges import Count, Number, check
    from ..train.recipes import Recipe
    from ..train.step import half
    from ..weights import load_weights, save_weights

    check("--save-every", args.save_every, Count | None)
    check("--workers", args.workers, Number)
    out = args.out or Path("runs") / Path(args.data or "digits").resolve().name
    held = [name for name in FILES if (out / name).exists()]
    if args.resume and args.overwrite:
        raise ValueError("--resume goes on with a run and --overwrite replaces it; pass one of them")
    if args.resume and not {STATE, PREVIOUS} & set(held):
        raise ValueError(f"--resume finds no {STATE} in {out}; leave it out to start a run there")
    if held and not (args.resume or args.overwrite):
        raise ValueError(f"--out {out} already holds a run; pass --resume, --overwrite or another --out")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("train draws its curves with matplotlib; pip install matplotlib")
    state, damage = newest_state(out) if args.resume else (None, "")
    names = {"recipe", *SETTINGS, *Recipe.__dataclass_fields__} & vars(args).keys()
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    settings = settle(given, state and state["settings"])
    recipe = Recipe(**{name: settings[name] for name in Recipe.__dataclass_fields__})
    device = world.device
    torch.manual_seed(settings["seed"])
    options = {"workers": args.workers, "skip_bad_images": settings["skip_bad_images"], "world": world}
    data = load(settings["data"], recipe, **options)
    shape = {"img_size": recipe.img_size, "in_chans": len(data.transform.mean), "num_classes": len(data.classes)}
    shape |= {"drop_path_rate": recipe.drop_path_rate, "grad_checkpointing": settings["grad_checkpointing"]}
    model = create_model(recipe.model, **shape | recipe.options)
    prepare(recipe, model, fresh=not settings["weights"])
    if settings["weights"] and state is None:
        load_weights(model, settings["weights"])
    if recipe.mask_ratio:
        decoder = create_model(recipe.model, **shape | recipe.options | recipe.decoder).blocks
        model = masked_for(recipe, model, decoder)
    teacher = _teacher(settings, model, len(data.classes), device)
    how = {"parts": settings["parts"], "amp": half(device, settings["amp"])}
    how |= {"teacher": teacher, "distillation": settings["distillation"], "parallel": args.parallel, "world": world}
    whole = plan(model.to(device), data, recipe, **how)

    epochs = recipe.epochs_of(len(data.train))
    if world.first:
        if damage:
            say(damage)
        out.mkdir(parents=True, exist_ok=True)
        for name in held if args.overwrite else ():
            (out / name).unlink()
        sweep(out, FILES)
        where = f"{world.size} processes, {args.parallel}, {device.type}" if args.parallel else device
        say(f"{recipe.model}, {sum(p.numel() for p in model.parameters()):,} parameters, on {where}")
        say(f"{settings['data']}: {len(data.classes)} classes; {epochs} epochs of {len(data.train)} steps")
    world.wait()

    options = {"settings": settings, "save": save_weights, "state": state, "save_every": args.save_every}
    try:
        console = Console(quiet=not world.first)
        with display(console, epochs, len(data.train), len(state["history"]) if state else 0) as show:
            for progress in run(whole, out, **options):
                show(progress)
    except KeyboardInterrupt:
        if not (out / STATE).exists():
            return complain("stopped before the first epoch was complete; nothing is kept", 130)
        again = f"fastvit-triton train --out {quote(str(out))} --resume"
        return complain(f"stopped; {out} holds everything up to the last saved state; go on with: {again}", 130)
    if world.first:
        say(summary(out, data))
    return 0


def _teacher(settings: dict, student: "nn.Module", classes: int, device: "torch.device") -> "nn.Module | None":
    """The model to learn from, on its device, and a student that answers twice."""
    if settings["teacher"] is None:
        return None
    model, about = trained(Path(settings["teacher"]))
    if len(about["classes"]) != classes:
        raise ValueError(f"--teacher knows {len(about['classes'])} classes, the data has {classes}; train one on them")
    if not hasattr(student, "set_distilled_training"):
        raise ValueError("--teacher needs a --model with a distillation token, such as deit_tiny_distilled_patch16_224")
    student.set_distilled_training()
    return model.to(device).eval().requires_grad_(False)


def evaluate(args: argparse.Namespace) -> int:
    """Repeats the test accuracy of a checkpoint, and breaks it down by class."""
    from rich.table import Table

    from ..train.data import load_test
    from ..train.image import listing
    from ..train.loop import evaluate
    from ..train.step import half

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
