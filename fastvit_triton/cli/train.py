"""`train`: trains a ViT on one process or, under torchrun, on several."""

import argparse
import importlib.util
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from rich.console import Console

from . import train_models
from .arguments import (
    DTYPES,
    add_shared,
    at_least,
    channels,
    check_checkpoint,
    check_data,
    check_transform,
    data_name,
    dtype_name,
    select_device,
)
from .console import print_error, print_line, print_warning
from .loading import follow_weights
from .model_by_name import absolute_other, check_weights
from .parser import Parser
from .recipe_options import add_recipe_options, recipes
from .tasks import task_by_loss

if TYPE_CHECKING:
    from ..train.distributed import World
    from ..train.run import Run
    from ..train.stopping import Request

HELP = "train a ViT, by default on handwritten digits"
EXAMPLES = (
    "fastvit-triton train                                # handwritten digits",
    "fastvit-triton train --data photos --val-split 0.2  # a folder for each class",
    "fastvit-triton train --data photos --weights vit_tiny_patch16_224.augreg_in21k",
    "fastvit-triton train --data photos --model timm:resnet18 --out runs/resnet",
    "fastvit-triton train --out runs/photos --resume     # goes on where it stopped",
    "fastvit-triton train --list-recipes",
)


def add_arguments(parser: Parser) -> None:
    """Adds the options of `train`."""
    group = parser.add_argument_group("data")
    add = group.add_argument
    text = "'digits'; 'shapes' or 'scenes', which have boxes; a folder with train/<class>/ and val/<class>/, or with "
    text += "<class>/ and --val-split, of images with boxes (COCO, Roboflow, YOLO), of shards, or of IDX files "
    text += "(MNIST); or hf:NAME or hf:FOLDER of the library datasets, with splits hf:NAME:TEST or "
    text += "hf:NAME:TRAIN,TEST (default: digits)"
    add("--data", check=check_data, metavar="DATA", help=text)
    text = "fraction of each class that is for testing, such as 0.2; for data without test images of their own"
    add("--val-split", type=float, check=_check_fraction, help=text)
    add_shared(group, "--levels", "--allow", "--quick", "--skip-bad-images", "--max-pixels")
    text = "your own transform of training images, as module:function or module:Class"
    add("--transform", check=check_transform, help=text)

    add_recipe_options(parser)

    group = parser.add_argument_group("weights to start from")
    add = group.add_argument
    text = "checkpoint to start from: NAME.TAG, timm/NAME or hf-hub:ORG/NAME of the Hub, or a file in any known "
    text += (
        "layout, or timm:NAME, hf:FOLDER or hf:NAME; model and preprocessing are its own unless given, and a head of "
    )
    text += "another size is reinitialised"
    add("--weights", check=check_weights, help=text)
    text = "checkpoint of a teacher for distillation; needs a deit_*_distilled_* model"
    add("--teacher", check=check_checkpoint, metavar="RUN", help=text)
    add("--distillation", choices=("hard", "soft"), help="kind of distillation (default: hard)")

    group = parser.add_argument_group("small or uneven data sets")
    add = group.add_argument
    text = "weights of the classes in the loss: 'balanced', or a JSON file of class names and weights"
    add("--class-weights", check=_check_class_weights, metavar="FILE", help=text)
    text = "stop after N evaluations in a row without a better one; the best weights are in best.safetensors"
    add("--patience", type=int, check=at_least(1), help=text)
    add("--freeze", choices=("backbone",), help="train the head alone (linear probe)")

    group = parser.add_argument_group("the run")
    add = group.add_argument
    add("--out", type=Path, metavar="FOLDER", help="output folder (default: runs/<data>)")
    about = "resume the run in --out; auto starts one if there is none, for commands that are restarted"
    add("--resume", nargs="?", const="yes", choices=("yes", "auto"), metavar="auto", help=about)
    add("--accept-changes", action="store_true", help="resume although options or images differ from those of the run")
    add("--overwrite", action="store_true", help="replace the run in --out")
    text = "steps between saved states within an epoch (default: only after epochs)"
    add("--save-every", type=int, check=at_least(1), help=text)
    text = "trackers that receive the log: tensorboard, wandb, trackio, mlflow, separated by commas"
    add("--log-to", check=_check_trackers, metavar="NAME,…", help=text)
    add("--seed", type=int, check=at_least(0), help="seed of weights, order and augmentation (default: 0)")
    add("--deterministic", action="store_true", default=None, help="same bits for any number of CPU threads; slower")

    group = parser.add_argument_group("memory, device and processes")
    add = group.add_argument
    add("--grad-accum-steps", type=int, check=at_least(1), help="micro-batches per step, to save memory")
    text = "autocast: auto, bfloat16, float16 or float32 (default: bfloat16 on a GPU)"
    add("--amp", type=dtype_name, choices=("auto", *DTYPES.values()), metavar="TYPE", help=text)
    add("--grad-checkpointing", action="store_true", default=None, help="recompute activations, to save memory")
    add_shared(group, "--device", "--workers")
    add("--parallel", choices=("ddp", "fsdp"), help="under torchrun: replicate the model, or shard it")
    add("--timeout", type=float, default=10.0, help="minutes to wait for another process (default: 10)")


def run(args: argparse.Namespace) -> int:
    """Trains a ViT and writes weights, log and plots to the output folder."""
    if args.list_recipes:
        print_line(recipes())
        return 0
    from ..train.distributed import World, process_group
    from ..train.stopping import listening

    processes = int(os.environ.get("WORLD_SIZE", 1))
    if args.parallel is None and processes > 1:
        raise ValueError(f"torchrun started {processes} processes; pass --parallel ddp or --parallel fsdp")
    if args.parallel is not None and "RANK" not in os.environ:
        raise ValueError(
            f"--parallel {args.parallel} needs several processes; start them with "
            f"torchrun --nproc-per-node 2 -m fastvit_triton.cli train --parallel {args.parallel} …"
        )
    with listening() as request:
        try:
            if args.parallel is None:
                return _train(args, World(device=select_device(args.device)), request)
            with process_group(args.device, args.timeout) as world:
                return _train(args, world, request)
        except KeyboardInterrupt:
            if not request.name:
                raise
            return print_error(f"stopped by {request.name} before the first step", request.code)


def _train(args: argparse.Namespace, world: "World", request: "Request") -> int:
    """Trains in the output folder, which rank 0 locks."""
    from ..train.checkpoint import newest_state
    from ..train.data.inspection import UnfitData
    from ..train.outputs import locked, remove_run
    from ..train.run import Run

    if importlib.util.find_spec("matplotlib") is None:
        digits = args.data in (None, "digits")  # which lie in scikit-learn
        advice = "pip install 'fastvit_triton[demo]'" if digits else "pip install 'fastvit_triton[train]'"
        raise ValueError(f"train draws its curves with matplotlib; {advice}")
    out = args.out or Path("runs") / data_name(args.data or "digits")
    with locked(out) if world.is_main else nullcontext():
        world.barrier()
        state, damage = newest_state(out) if _is_resumed(args, out) else (None, "")
        options = {
            name: getattr(args, name) for name in ("accept_changes", "parallel", "workers", "max_pixels", "quick")
        }
        try:
            built = Run.from_settings(_settings(args, state), out, train_models, state=state, world=world, **options)
        except UnfitData as error:
            if world.is_main:
                print_line(error.text)
            raise
        if world.is_main:
            if damage:
                print_line(damage)
            if args.overwrite:
                remove_run(out)
            _print_task(built, args.parallel)
        world.barrier()
        return _show(built, args.save_every, request)


def _settings(args: argparse.Namespace, state: dict | None) -> dict:
    """The complete settings of the run, from the options that were given and the run to resume."""
    from ..train.class_weights import read_class_weights
    from ..train.settings import RECIPE_FIELDS, SETTINGS, resolve_settings

    names = {"recipe", *SETTINGS, *RECIPE_FIELDS} & vars(args).keys()
    overrides = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if "allow" in overrides:
        overrides["allow"] = overrides["allow"].split(",")
    for name in {"mean", "std"} & overrides.keys():
        overrides[name] = channels(overrides[name]) * (3 if "," not in overrides[name] else 1)
    for name in {"model", "weights"} & overrides.keys():
        overrides[name] = absolute_other(overrides[name])
    if "class_weights" in overrides:
        overrides["class_weights"] = read_class_weights("--class-weights", overrides["class_weights"])
    if state is None and args.weights and args.data not in (None, "digits"):
        overrides = follow_weights(overrides["weights"], overrides)
    return resolve_settings(overrides, state, args.accept_changes)


def _check_class_weights(option: str, text: str) -> None:
    from ..train.class_weights import read_class_weights

    read_class_weights(option, text)


def _check_fraction(option: str, value: float) -> None:
    from ..train.ranges import OpenFraction, check

    check(option, value, OpenFraction)


def _check_trackers(option: str, text: str) -> None:
    from ..train.trackers import check_trackers

    check_trackers(option, text)


def _is_resumed(args: argparse.Namespace, out: Path) -> bool:
    """True if the run in the output folder is resumed; raises ValueError if the folder conflicts with the options."""
    from ..train.checkpoint import PREVIOUS, STATE
    from ..train.data.split import SPLIT
    from ..train.outputs import FILES, TABLE
    from ..train.settings import check_used, recipe_of

    early = (SPLIT, TABLE)  # a run that failed leaves them alone
    existing = [name for name in FILES if name not in early and (out / name).exists()]
    if args.resume and args.overwrite:
        raise ValueError("--resume continues a run and --overwrite replaces it; pass one of them")
    if args.resume and {STATE, PREVIOUS} & set(existing):
        return True
    if args.resume == "yes":
        raise ValueError(f"--resume finds no {STATE} in {out}; leave it out to start a run there")
    if existing and not args.overwrite:
        if args.weights is None or Path(args.weights).exists():  # else their description may be downloaded
            settings = _settings(args, None)  # a wrong option is named first
            train_models.check_settings(settings, recipe_of(settings))
            check_used(settings)
        raise ValueError(f"--out {out} already holds a run; pass --resume, --overwrite or another --out")
    return False


def _print_task(run: "Run", parallel: str | None) -> None:
    """Prints the model, the device, the size of the task, and images that are skipped."""
    from ..train.detection.load import COMPOSED
    from ..train.outputs import skipped

    if run.inspection is not None:
        print_line(run.inspection.text + "\n")
    trainer = run.trainer
    task = task_by_loss(trainer.recipe.loss)
    data = trainer.data
    world = trainer.step.world
    device = next(trainer.model.parameters()).device
    where = f"{world.world_size} processes, {parallel}, {device.type}" if parallel else device
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    side = trainer.recipe.img_size
    print_line(f"{trainer.recipe.model} at {side} x {side} pixels, {parameters:,} parameters, on {where}")
    count = len(data.train)
    steps = f"{trainer.epochs} {'epoch' if trainer.epochs == 1 else 'epochs'} of {count} step{'s' * (count != 1)}"
    start = f", from {run.settings['weights']}" if run.settings["weights"] else ", from random weights"
    print_line(f"recipe {run.settings['recipe']}{start}")
    if run.settings["freeze"] and not run.settings["weights"]:
        print_line("--freeze backbone trains the head alone, and the rest stays random; give pretrained --weights")
    if run.state is None and not run.settings["weights"] and run.settings["data"] not in COMPOSED:
        for line in task.notes(getattr(trainer.model, "module", trainer.model)):  # of DDP
            print_line(line)
    if data.loses_colours():
        print_line(f"images are read in grey, and some have colours; --recipe {task.in_colour} keeps them")
    images = f"{len(data.train.targets):,} training and {len(data.test.targets):,} test images"
    print_line(f"{run.settings['data']}: {len(data.classes)} classes, {images}; {steps}")
    if bad := data.train.bad | data.test.bad:
        print_line(skipped(bad))


def _show(run: "Run", save_every: int | None, request: "Request") -> int:
    """Trains with a progress display; returns the exit code."""
    from ..train.outputs import summary
    from ..train.progress import show_progress, with_estimate
    from ..train.stopping import Stopped

    trainer = run.trainer
    out = run.out
    is_main = trainer.step.world.is_main
    console = Console(quiet=not is_main)
    known = {*trainer.data.train.bad, *trainer.data.test.bad}  # of which _print_task has named those of this process
    steps_per_epoch = len(trainer.data.train)
    left = (trainer.epochs - run.finished_epochs) * steps_per_epoch
    request.deferred = True
    try:
        with (
            run.training(save_every, print_warning, request) as steps,
            show_progress(console, trainer.epochs, steps_per_epoch, run.finished_epochs) as show,
        ):
            for progress in with_estimate(steps, left, print_line) if is_main else steps:
                show(progress)
    except KeyboardInterrupt:
        return _stopped(run, "stopped", 130)
    except Stopped as stopped:
        code = request.code or 128 + signal.SIGTERM
        who = request.name or "a signal to another process"
        return _stopped(run, f"stopped by {who} {stopped}", code) if is_main else code
    if is_main:
        loss = trainer.recipe.loss
        explained = loss in task_by_loss(loss).labelled and _is_explained(out)
        print_line(summary(out, trainer.data, loss, trainer.epochs, explained, known))
    return 0


def _stopped(run: "Run", what: str, code: int) -> int:
    """Prints how to resume a run that was stopped; returns the exit code."""
    from ..train.checkpoint import PREVIOUS, STATE
    from ..train.settings import imported

    out = run.out
    if not any((out / name).exists() for name in (STATE, PREVIOUS)):
        return print_error(f"{what} before the first state was saved", code)
    again = [f" --{name} {quote(value)}" for name, value in imported(run.settings).items()]
    command = f"fastvit-triton train --out {quote(str(out))} --resume{''.join(again)}"
    return print_error(f"{what}; {out} holds everything up to the last saved state; resume with: {command}", code)


def _is_explained(out: Path) -> bool:
    """True if the command `explain` takes the classifier that was saved."""
    import torch

    from ..explain.report import can_explain
    from .loading import load_trained

    trained = load_trained(str(out))
    transform = trained.transform
    return can_explain(trained.model.eval(), torch.zeros(1, len(transform.mean), *transform.size))
