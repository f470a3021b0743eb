"""`train`: trains a ViT on one process or, under torchrun, on several."""

import argparse
import importlib.util
import os
import uuid
from contextlib import nullcontext
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from rich.console import Console

from .checks import at_least, channels, check_checkpoint, check_data, check_transform, data_name
from .console import (
    add_device_option,
    add_max_pixels_option,
    add_skip_option,
    add_workers_option,
    print_error,
    print_line,
    print_warning,
    select_device,
    show_warmup,
)
from .loading import follow_weights
from .parser import Parser
from .recipe_options import add_recipe_options
from .train_models import build_model, load_teacher

if TYPE_CHECKING:
    from ..train.distributed import World
    from ..train.trainer import Trainer

HELP = "train a ViT, by default on handwritten digits"


def add_arguments(parser: Parser) -> None:
    """Adds the options of `train`."""
    add = parser.add_argument
    text = "'digits'; a folder with train/<class>/ and val/<class>/, of shards, or of IDX files (MNIST); or hf:NAME or "
    text += "hf:FOLDER of the library datasets, with splits hf:NAME:TEST or hf:NAME:TRAIN,TEST (default: digits)"
    add("--data", check=check_data, help=text)
    add("--out", type=Path, help="output folder (default: runs/<data>)")
    about = "resume the run in --out; auto starts one if there is none, for commands that are restarted"
    add("--resume", nargs="?", const="yes", choices=("yes", "auto"), metavar="auto", help=about)
    add("--accept-changes", action="store_true", help="resume although options or images differ from those of the run")
    add("--overwrite", action="store_true", help="replace the run in --out")
    add_recipe_options(parser)
    text = "your own transform of training images, as module:function or module:Class"
    add("--transform", check=check_transform, help=text)
    text = "trackers that receive the log: tensorboard, wandb, trackio, mlflow, separated by commas"
    add("--log-to", check=_check_trackers, metavar="TRACKER,…", help=text)
    text = "checkpoint to start from: NAME.TAG, timm/NAME or another repository of the Hub, or a file in any known "
    text += "layout; model and preprocessing are its own unless given, and a head of another size is reinitialised"
    add("--weights", check=check_checkpoint, help=text)
    add("--grad-accum-steps", type=int, check=at_least(1), help="micro-batches per step, to save memory")
    add("--amp", choices=("auto", "bfloat16", "float16", "float32"), help="autocast (default: bfloat16 on a GPU)")
    add("--grad-checkpointing", action="store_true", default=None, help="recompute activations, to save memory")
    text = "checkpoint of a teacher for distillation; needs a deit_*_distilled_* model"
    add("--teacher", check=check_checkpoint, help=text)
    add("--distillation", choices=("hard", "soft"), help="kind of distillation (default: hard)")
    add("--parallel", choices=("ddp", "fsdp"), help="under torchrun: replicate the model, or shard it")
    add("--timeout", type=float, default=10.0, help="minutes to wait for another process (default: 10)")
    text = "steps between saved states within an epoch (default: only after epochs)"
    add("--save-every", type=int, check=at_least(1), help=text)
    add("--seed", type=int, check=at_least(0), help="seed of weights, order and augmentation (default: 0)")
    add("--deterministic", action="store_true", default=None, help="same bits for any number of CPU threads; slower")
    add_device_option(parser)
    add_workers_option(parser)
    add_skip_option(parser)
    add_max_pixels_option(parser)


def run(args: argparse.Namespace) -> int:
    """Trains a ViT and writes weights, log and plots to the output folder."""
    from ..train.distributed import World, process_group

    processes = int(os.environ.get("WORLD_SIZE", 1))
    if args.parallel is None and processes > 1:
        raise ValueError(f"torchrun started {processes} processes; pass --parallel ddp or --parallel fsdp")
    if args.parallel is not None and "RANK" not in os.environ:
        raise ValueError(
            f"--parallel {args.parallel} needs several processes; start them with "
            f"torchrun --nproc-per-node 2 -m fastvit_triton.cli train --parallel {args.parallel} …"
        )
    if args.parallel is None:
        return _train(args, World(device=select_device(args.device)))
    with process_group(args.device, args.timeout) as world:
        return _train(args, world)


def _train(args: argparse.Namespace, world: "World") -> int:
    from ..train.outputs import locked

    if importlib.util.find_spec("matplotlib") is None:
        digits = args.data in (None, "digits")  # which lie in scikit-learn
        advice = "pip install 'fastvit_triton[demo]'" if digits else "pip install 'fastvit_triton[train]'"
        raise ValueError(f"train draws its curves with matplotlib; {advice}")
    out = args.out or Path("runs") / data_name(args.data or "digits")
    with locked(out) if world.is_main else nullcontext():
        world.barrier()
        return _train_in(out, args, world)


def _train_in(out: Path, args: argparse.Namespace, world: "World") -> int:
    """Trains in an output folder that rank 0 has locked."""
    import torch

    from ..models.weights.rebuild import skeleton
    from ..train.checkpoint import newest_state
    from ..train.data import load
    from ..train.rng import use_deterministic_algorithms
    from ..train.settings import RECIPE_FIELDS, SETTINGS, check_unchanged, recipe_of, resolve_settings
    from ..train.step import autocast_dtype
    from ..train.trainer import build_trainer

    state, damage = newest_state(out) if _is_resumed(args, out) else (None, "")
    names = {"recipe", *SETTINGS, *RECIPE_FIELDS} & vars(args).keys()
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    for name in {"mean", "std"} & given.keys():
        given[name] = channels(given[name]) * (3 if "," not in given[name] else 1)
    if state is None and args.weights and args.data not in (None, "digits"):
        given = follow_weights(args.weights, given)
    settings = resolve_settings(given, state, args.accept_changes)
    recipe = recipe_of(settings)
    if settings["deterministic"]:
        use_deterministic_algorithms()
    # errors of the model come before images are listed, which may take minutes
    student = skeleton(recipe.model, **recipe.options | dict(img_size=recipe.img_size))
    if settings["distillation"] != "hard" and not settings["teacher"]:
        raise ValueError(f"--distillation {settings['distillation']} needs a --teacher to learn from")
    if settings["teacher"] and not hasattr(student, "set_distilled_training"):
        raise ValueError("--teacher needs a --model with a distillation token, such as deit_tiny_distilled_patch16_224")
    torch.manual_seed(settings["seed"])
    if settings["log_to"]:
        _check_trackers("--log-to", settings["log_to"])
    options = {"workers": args.workers, "skip_bad_images": settings["skip_bad_images"], "max_pixels": args.max_pixels}
    data = load(settings["data"], recipe, custom=settings["transform"], world=world, **options)
    if state is not None:
        check_unchanged(data, state, args.accept_changes)
    model = build_model(settings, recipe, data, resumed=state is not None)
    teacher = load_teacher(settings["teacher"], model, len(data.classes), world.device)
    model = model.to(world.device)
    amp = autocast_dtype(world.device, settings["amp"])
    if world.device.type == "cuda" and not recipe.mask_ratio:
        images = recipe.batch_size // world.world_size // settings["grad_accum_steps"]
        shape = max(images, 1), len(data.transform.mean), recipe.img_size, recipe.img_size
        with torch.autocast("cuda", amp, enabled=amp is not None):
            show_warmup(model, torch.zeros(shape, device=world.device), train=True, quiet=not world.is_main)
    trainer = build_trainer(
        model,
        data,
        recipe,
        grad_accum_steps=settings["grad_accum_steps"],
        amp=amp,
        teacher=teacher,
        distillation=settings["distillation"],
        parallel=args.parallel,
        world=world,
    )
    if world.is_main:
        if damage:
            print_line(damage)
        _prepare_output(out, args.overwrite)
        _print_task(trainer, settings, args.parallel)
    world.barrier()
    return _run(trainer, out, settings, state, args.save_every)


def _check_trackers(option: str, text: str) -> None:
    from ..train.trackers import check_trackers

    check_trackers(option, text)


def _is_resumed(args: argparse.Namespace, out: Path) -> bool:
    """True if the run in the output folder is resumed; raises ValueError if the folder conflicts with the options."""
    from ..train.checkpoint import PREVIOUS, STATE
    from ..train.outputs import FILES

    existing = [name for name in FILES if (out / name).exists()]
    if args.resume and args.overwrite:
        raise ValueError("--resume continues a run and --overwrite replaces it; pass one of them")
    if args.resume and {STATE, PREVIOUS} & set(existing):
        return True
    if args.resume == "yes":
        raise ValueError(f"--resume finds no {STATE} in {out}; leave it out to start a run there")
    if existing and not args.overwrite:
        raise ValueError(f"--out {out} already holds a run; pass --resume, --overwrite or another --out")
    return False


def _prepare_output(out: Path, overwrite: bool) -> None:
    """Creates the output folder; removes temporary files and, if `overwrite`, the previous run."""
    from ..files import sweep
    from ..train.outputs import FILES

    out.mkdir(parents=True, exist_ok=True)
    if overwrite:
        for name in FILES:
            (out / name).unlink(missing_ok=True)
    sweep(out, FILES)


def _print_task(trainer: "Trainer", settings: dict, parallel: str | None) -> None:
    """Prints the model, the device, and the size of the task."""
    data, world = trainer.data, trainer.step.world
    where = f"{world.world_size} processes, {parallel}, {world.device.type}" if parallel else world.device
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    print_line(f"{trainer.recipe.model}, {parameters:,} parameters, on {where}")
    steps = f"{trainer.epochs} {'epoch' if trainer.epochs == 1 else 'epochs'} of {len(data.train)} steps"
    print_line(f"{settings['data']}: {len(data.classes)} classes; {steps}")


def _run(trainer: "Trainer", out: Path, settings: dict, state: dict | None, save_every: int | None) -> int:
    """Trains with a progress display; returns the exit code."""
    from ..models.weights.load import save_weights
    from ..train.checkpoint import PREVIOUS, STATE
    from ..train.outputs import log_row, summary
    from ..train.progress import show_progress
    from ..train.settings import imported
    from ..train.trackers import Run, tracking
    from ..train.trainer import run

    world = trainer.step.world
    finished = len(state["history"]) if state else 0
    steps = len(trainer.data.train)
    tracked = settings["log_to"] if world.is_main else None
    if tracked and not settings["run_key"]:
        settings = settings | {"run_key": uuid.uuid4().hex}
    start = (state["progress"]["epoch"] - 1) * steps + state["progress"]["step"] if state else 0
    options: dict[str, Any] = {"settings": settings, "save": save_weights, "state": state, "save_every": save_every}
    try:
        console = Console(quiet=not world.is_main)
        with (
            tracking(tracked, Run(out, settings["run_key"], settings, start)) as log,
            show_progress(console, trainer.epochs, steps, finished) as show,
        ):
            for progress in run(trainer, out, **options, warn=print_warning):
                show(progress)
                if progress.done:
                    log(log_row(progress), progress.epoch * steps)
    except KeyboardInterrupt:
        if not any((out / name).exists() for name in (STATE, PREVIOUS)):
            return print_error("stopped before the first state was saved", 130)
        again = [f" --{name} {quote(value)}" for name, value in imported(settings).items()]
        command = f"fastvit-triton train --out {quote(str(out))} --resume{''.join(again)}"
        return print_error(f"stopped; {out} holds everything up to the last saved state; resume with: {command}", 130)
    if world.is_main:
        print_line(summary(out, trainer.data))
    return 0
