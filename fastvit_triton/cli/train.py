"""`train`: trains a ViT on one process or, under torchrun, on several."""

import argparse
import importlib.util
import os
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from rich.console import Console

from .console import (
    add_device_option,
    add_skip_option,
    add_workers_option,
    print_error,
    print_line,
    select_device,
    show_warmup,
)
from .loading import load_trained

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..train.data import Data
    from ..train.distributed import World
    from ..train.recipes import Recipe
    from ..train.trainer import Trainer

HELP = "train a ViT, by default on handwritten digits"

# Options that override a field of the recipe: type and help; `help(fastvit_triton.train.Recipe)` has the details.
RECIPE_OPTIONS = {
    "model": (str, "a name from list_models()"),
    "epochs": (int, "passes over the training images"),
    "batch-size": (int, "images per step, over all processes"),
    "lr": (float, "peak learning rate"),
    "warmup": (float, "fraction of the run before the peak"),
    "img-size": (int, "image side in pixels"),
    "ema-decay": (float, "test and save a moving average of the weights with this decay, such as 0.999"),
    "optimizer": (str, "adamw, sgd or lamb"),
    "schedule": (str, "own, vit, deit or mae"),
    "loss": (str, "softmax, sigmoid or bce"),
    "weight-decay": (float, "of matrices"),
    "layer-decay": (float, "learning rate of a block divided by that of the next"),
    "clip": (float, "maximum gradient norm"),
    "label-smoothing": (float, "probability spread evenly over all classes"),
    "mixup": (float, "alpha; 0 is off"),
    "cutmix": (float, "alpha; 0 is off"),
    "mixtoken": (float, "alpha; excludes mixup and cutmix"),
    "erasing": (float, "probability of random erasing"),
    "policy": (str, "augmentation of crops: timm, three or randaug(2,15)"),
    "repeats": (int, "of each image, by repeated augmentation"),
    "min-area": (float, "smallest fraction of the area in a random crop"),
    "drop-path-rate": (float, "stochastic-depth rate of the last block"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `train`."""
    add = parser.add_argument
    add("--data", help="'digits', or a folder with train/<class>/ and val/<class>/, or of shards (default: digits)")
    add("--out", type=Path, help="output folder (default: runs/<data>)")
    add("--resume", action="store_true", help="resume the run in --out")
    add("--overwrite", action="store_true", help="replace the run in --out")
    add("--recipe", help="digits, folder, vit-i1k, vit-finetune, augreg, simplevit, deit, deit3, mae-pretrain, …")
    add("--weights", help="checkpoint to start from, in any known layout; a head of another size is reinitialised")
    for name, (kind, about) in RECIPE_OPTIONS.items():
        add(f"--{name}", type=kind, help=about)
    add("--grad-accum-steps", type=int, help="micro-batches per step, to save memory")
    add("--amp", choices=("auto", "bfloat16", "float16", "float32"), help="autocast (default: bfloat16 on a GPU)")
    add("--grad-checkpointing", action="store_true", default=None, help="recompute activations, to save memory")
    add("--teacher", help="checkpoint of a teacher for distillation; needs a deit_*_distilled_* model")
    add("--distillation", choices=("hard", "soft"), help="kind of distillation (default: hard)")
    add("--parallel", choices=("ddp", "fsdp"), help="under torchrun: replicate the model, or shard it")
    add("--save-every", type=int, help="steps between states within an epoch (default: after epochs only)")
    add("--seed", type=int, help="of weights, order and augmentation (default: 0)")
    add_device_option(parser)
    add_workers_option(parser)
    add_skip_option(parser)


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
    with process_group(args.device) as world:
        return _train(args, world)


def _train(args: argparse.Namespace, world: "World") -> int:
    import torch

    from ..train.checkpoint import newest_state
    from ..train.data import load
    from ..train.ranges import NonNegativeInt, PositiveInt, check
    from ..train.recipes import Recipe
    from ..train.step import autocast_dtype
    from ..train.trainer import SETTINGS, build_trainer, resolve_settings

    check("--save-every", args.save_every, PositiveInt | None)
    check("--workers", args.workers, NonNegativeInt)
    out = args.out or Path("runs") / Path(args.data or "digits").resolve().name
    _check_output(args, out)
    state, damage = newest_state(out) if args.resume else (None, "")
    names = {"recipe", *SETTINGS, *Recipe.__dataclass_fields__} & vars(args).keys()
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    settings = resolve_settings(given, state and state["settings"])
    recipe = Recipe(**{name: settings[name] for name in Recipe.__dataclass_fields__})
    torch.manual_seed(settings["seed"])
    skip = settings["skip_bad_images"]
    data = load(settings["data"], recipe, workers=args.workers, skip_bad_images=skip, world=world)
    model = _build_model(settings, recipe, data, resumed=state is not None)
    teacher = _load_teacher(settings["teacher"], model, len(data.classes), world.device)
    model, amp = model.to(world.device), autocast_dtype(world.device, settings["amp"])
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


def _check_output(args: argparse.Namespace, out: Path) -> None:
    """Raises ValueError if the output folder conflicts with the options, or matplotlib is missing."""
    from ..train.checkpoint import PREVIOUS, STATE
    from ..train.outputs import FILES

    existing = [name for name in FILES if (out / name).exists()]
    if args.resume and args.overwrite:
        raise ValueError("--resume continues a run and --overwrite replaces it; pass one of them")
    if args.resume and not {STATE, PREVIOUS} & set(existing):
        raise ValueError(f"--resume finds no {STATE} in {out}; leave it out to start a run there")
    if existing and not (args.resume or args.overwrite):
        raise ValueError(f"--out {out} already holds a run; pass --resume, --overwrite or another --out")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("train draws its curves with matplotlib; pip install matplotlib")


def _prepare_output(out: Path, overwrite: bool) -> None:
    """Creates the output folder; removes temporary files and, if `overwrite`, the previous run."""
    from ..files import sweep
    from ..train.outputs import FILES

    out.mkdir(parents=True, exist_ok=True)
    if overwrite:
        for name in FILES:
            (out / name).unlink(missing_ok=True)
    sweep(out, FILES)


def _build_model(settings: dict, recipe: "Recipe", data: "Data", resumed: bool) -> "nn.Module":
    """The model to train, on the CPU, with its initial weights."""
    from ..models import create_model
    from ..train.build import build_masked_model, configure_model
    from ..weights import load_weights

    options: dict[str, Any] = {
        "img_size": recipe.img_size,
        "in_chans": len(data.transform.mean),
        "num_classes": len(data.classes),
    }
    options |= {"drop_path_rate": recipe.drop_path_rate, "grad_checkpointing": settings["grad_checkpointing"]}
    options |= recipe.options
    model: nn.Module = create_model(recipe.model, **options)
    configure_model(recipe, model, fresh=not settings["weights"])
    if settings["weights"] and not resumed:
        load_weights(model, settings["weights"])
    if recipe.mask_ratio:
        decoder = create_model(recipe.model, **options | recipe.decoder).blocks
        model = build_masked_model(recipe, model, decoder)
    return model


def _load_teacher(path: str | None, student: Any, classes: int, device: "torch.device") -> "nn.Module | None":
    """Loads the teacher, if any, and sets the student to return class-token and distillation-token logits."""
    if path is None:
        return None
    teacher = load_trained(Path(path))
    if len(teacher.classes) != classes:
        raise ValueError(
            f"--teacher has {len(teacher.classes)} classes, the data has {classes}; train one on this data"
        )
    if not hasattr(student, "set_distilled_training"):
        raise ValueError("--teacher needs a --model with a distillation token, such as deit_tiny_distilled_patch16_224")
    student.set_distilled_training()
    return teacher.model.to(device).eval().requires_grad_(False)


def _print_task(trainer: "Trainer", settings: dict, parallel: str | None) -> None:
    """Prints the model, the device, and the size of the task."""
    data, world = trainer.data, trainer.step.world
    where = f"{world.world_size} processes, {parallel}, {world.device.type}" if parallel else world.device
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    print_line(f"{trainer.recipe.model}, {parameters:,} parameters, on {where}")
    steps = f"{trainer.epochs} epochs of {len(data.train)} steps"
    print_line(f"{settings['data']}: {len(data.classes)} classes; {steps}")


def _run(trainer: "Trainer", out: Path, settings: dict, state: dict | None, save_every: int | None) -> int:
    """Trains with a progress display; returns the exit code."""
    from ..train.checkpoint import STATE
    from ..train.outputs import summary
    from ..train.progress import show_progress
    from ..train.trainer import run
    from ..weights import save_weights

    world, finished = trainer.step.world, len(state["history"]) if state else 0
    try:
        console = Console(quiet=not world.is_main)
        with show_progress(console, trainer.epochs, len(trainer.data.train), finished) as show:
            for progress in run(trainer, out, settings=settings, save=save_weights, state=state, save_every=save_every):
                show(progress)
    except KeyboardInterrupt:
        if not (out / STATE).exists():
            return print_error("stopped before the first epoch was complete; nothing was saved", 130)
        command = f"fastvit-triton train --out {quote(str(out))} --resume"
        return print_error(f"stopped; {out} holds everything up to the last saved state; resume with: {command}", 130)
    if world.is_main:
        print_line(summary(out, trainer.data))
    return 0
