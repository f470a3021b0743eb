"""Launches and bytes of whole models on GPUs that need not be present: our default, eager PyTorch and torch.compile.

    python -m benchmarks.launches --model timm:vit_base_patch16_224 --arch sm_90 --batch 8 --phase inference --json
    python -m benchmarks.launches --table --out benchmarks/results/launches.json

Counted from shapes by fastvit_triton.expected; nothing runs and nothing is measured. Phases: inference,
training (forward and backward of one batch, new gradient tensors), autocast (training of float32 weights in bfloat16).
Figures are those of the whole model and, under "block", of one block: two blocks minus one. The peak is of the memory
that a call allocates, without weights and workspaces of libraries. torch.compile is estimated by the rule of
fastvit_triton.expected.inductor.
"""

import argparse
import functools
import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch
from torch import nn

import fastvit_triton
from fastvit_triton.cli.arguments import at_least, check_size, image_size
from fastvit_triton.cli.model_by_name import check_name
from fastvit_triton.expected.count import traced
from fastvit_triton.expected.events import Count
from fastvit_triton.expected.inductor import inductor_count
from fastvit_triton.expected.trace import Trace
from fastvit_triton.kernels.choose import Choice
from fastvit_triton.kernels.launch import targeting
from fastvit_triton.kernels.settings import observing
from fastvit_triton.layers.embed import sides

from .result_file import as_json, write_text

COMMAND = "python -m benchmarks.launches --table --out benchmarks/results/launches.json"
NOTE = "of one block, and of the rest; counted from shapes, not measured; inductor_* are estimated by a rule"
ARCHS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
MODELS = tuple(f"timm:vit_{size}_patch16_224" for size in ("tiny", "small", "base", "large"))
BATCHES = (1, 8, 64, 256)
PHASES = ("inference", "training", "autocast")


@dataclass(frozen=True)
class Setting:
    """A model and how it is run."""

    model: str  # "timm:NAME", or NAME for one of our models
    batch: int  # number of images
    phase: str = "inference"  # one of PHASES
    arch: str | None = None  # the GPU's architecture; None for eager PyTorch, whose launches do not depend on it
    ours: bool = False  # use our model of that name instead of timm's optimised model
    frozen: bool = False  # keep folded weights between calls
    depth: int | None = None  # number of blocks; None for the model's default
    size: tuple[int, int] | None = None  # height and width of images in pixels; None for the model's own


def build(setting: Setting) -> nn.Module:
    """The model of a setting on the meta device."""
    name = setting.model.removeprefix("timm:")
    options: dict = {} if setting.depth is None else {"depth": setting.depth}
    with torch.device("meta"):
        if setting.ours or name == setting.model:
            options |= {} if setting.size is None else {"img_size": setting.size}
            model = fastvit_triton.create_model(name, **options)
        else:
            import timm

            model = timm.create_model(name, **options)
            if setting.size is not None and hasattr(model, "set_input_size"):
                model.set_input_size(img_size=setting.size)
    return model.to(torch.float32 if setting.phase == "autocast" else torch.bfloat16)


def image_shape(setting: Setting, model: nn.Module) -> tuple[int, int, int]:
    """[C, H, W] of the images of a setting, for the model that `build` made: the model's own size unless one is set."""
    if hasattr(model, "config"):
        return model.config.in_chans, *(setting.size or sides(model.config.img_size))
    channels, *model_sides = model.pretrained_cfg["input_size"]
    return channels, *(setting.size or model_sides)


def trace(setting: Setting) -> tuple[Trace, dict[str, str]]:
    """Operators and launches of one call (in training also of its backward pass), and the way of each branch.

    The second result maps "attention", "mlp" and "stem" to "fused", "mixed" or "plain"; it is empty for eager PyTorch.
    """
    model, gpu = build(setting), nullcontext() if setting.arch is None else targeting(setting.arch)
    if setting.arch is not None and model.__class__.__module__.partition(".")[0] != "fastvit_triton":
        fastvit_triton.optimize(model)
    dtype, training = next(model.parameters()).dtype, setting.phase != "inference"
    images = torch.empty(setting.batch, *image_shape(setting, model), dtype=dtype, device="meta")
    ways = {} if setting.arch is None else dict.fromkeys(("stem", "attention", "mlp"), "plain")

    def chosen(choice: Choice) -> None:
        ways.update(dict.fromkeys((branch.kind for branch in choice.branches), choice.way))

    with gpu, observing(chosen), torch.autocast("cpu", torch.bfloat16, enabled=setting.phase == "autocast"):
        found = traced(model, None, training, (images,), {}, setting.frozen)
    if any(event.name.startswith("patch_embed.") for event in found.events):
        ways["stem"] = "fused"
    return found, ways


@functools.lru_cache(maxsize=64)
def _eager(setting: Setting) -> tuple[Count, Count, int]:
    """Counts for eager PyTorch, and for torch.compile as estimated by the rule; and eager PyTorch's peak memory."""
    eager, _ = trace(replace(setting, arch=None))
    return eager.count, inductor_count(eager.events), eager.peak


def figures(setting: Setting) -> dict[str, object]:
    """Ways, launches, bytes and peak memory of a model: ours, eager PyTorch's and, without memory, Inductor's."""
    traced, ways = trace(setting)
    eager, inductor, eager_peak = _eager(replace(setting, arch=None, ours=False, frozen=False))
    counts = {"": traced.count, "eager_": eager, "inductor_": inductor}
    numbers = {f"{who}{n}": v for who, c in counts.items() for n, v in (("launches", c.launches), ("bytes", c.nbytes))}
    return (
        {"ways": ways}
        | numbers
        | {"peak": traced.peak, "eager_peak": eager_peak}
        | ({"findings": traced.findings} if traced.findings else {})
    )


def parts(setting: Setting) -> tuple[dict[str, object], dict[str, object]]:
    """Figures of one block (two blocks minus one), and of everything outside the blocks."""
    one, two = (figures(replace(setting, depth=depth)) for depth in (1, 2))
    block = {k: v - one[k] if isinstance(v, int) else v for k, v in two.items()}
    return block, {k: v - block[k] for k, v in one.items() if isinstance(v, int)}


def violations(setting: Setting, block: dict[str, object], rest: dict[str, object]) -> list[str]:
    """Limits that a model exceeds, one sentence each."""
    sentences, inference = [], setting.phase == "inference"
    launches, eager_bytes = block["launches"], block["eager_bytes"]
    chosen = {block["ways"][branch] for branch in ("attention", "mlp")}

    def limit(what: str, value: float, most: float) -> None:
        if value > most:
            sentences.append(f"{value:.10g} {what}, at most {most:.10g}")

    whole = {name: 12 * value + rest[name] for name, value in block.items() if name in rest}
    weights = [0, 0]
    if setting.phase == "autocast":
        models = (build(replace(setting, depth=depth)) for depth in (1, 2, 12))
        one, two, twelve = (sum(parameter.numel() for parameter in model.parameters()) for model in models)
        weights = [two - one, twelve]
    for where, part, count in (("a block", block, weights[0]), ("a model of 12 blocks", whole, weights[1])):
        # under autocast our backward pass casts each weight again, 6 bytes, where eager PyTorch keeps its 16-bit copy;
        # it writes the gradient in float32, 4 bytes, where eager PyTorch writes 16 bits and casts them, 8 bytes
        limit(f"bytes in {where}", part["bytes"], part["eager_bytes"] + (6 + 4 - 8) * count)
        limit(f"launches in {where}", part["launches"], part["eager_launches"] * (1 if inference else 1.1))
    if setting.batch >= 8:  # for one image most memory is gradients of weights, which every way keeps
        blocks = 2 if inference else 12  # in inference a block takes the memory of the one before
        peak, eager_peak = (blocks * block[name] + rest[name] for name in ("peak", "eager_peak"))
        limit(f"bytes at the peak of a model of {blocks} blocks", peak, eager_peak)
    if inference and chosen == {"fused"}:
        limit("launches in a fused block", launches, 6 - setting.ours + (0 if setting.frozen else 2))
        if setting.frozen and setting.batch >= 64:
            limit("bytes in a fused block", block["bytes"], 0.65 * eager_bytes)
    if inference and "mixed" in chosen and "fused" not in chosen:
        limit("launches in a mixed block", launches, 9)
        if setting.batch >= 8:  # for one image most bytes are weights, which every way reads
            limit("bytes in a mixed block", block["bytes"], 0.95 * eager_bytes)
    return sentences + list(block.get("findings", []))


def settings() -> Iterator[Setting]:
    """All settings of the table, ordered so that those with the same eager figures are adjacent."""
    for model, batch, phase in product(MODELS, BATCHES, PHASES):
        for arch, ours in product(ARCHS, (True, False)):
            for frozen in (False, True) if phase == "inference" else (False,):
                yield Setting(model, batch, phase, arch, ours, frozen)


def table() -> list[dict[str, object]]:
    """One row per setting."""
    return [row_of(setting) for setting in settings()]


def row_of(setting: Setting) -> dict[str, object]:
    """Figures of one block and of the rest, and the violated limits."""
    block, rest = parts(setting)
    facts = {k: getattr(setting, k) for k in ("model", "arch", "batch", "phase", "ours", "frozen")}
    return facts | block | {"rest": rest, "violations": violations(setting, block, rest)}


def main() -> None:
    """Prints the figures of one model, or writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="timm:vit_base_patch16_224", help="timm:NAME, or NAME for our model")
    parser.add_argument("--arch", default="sm_90", choices=ARCHS)
    parser.add_argument("--batch", type=int, default=8, help="number of images (default: 8)")
    parser.add_argument("--phase", default="inference", choices=PHASES)
    parser.add_argument("--depth", type=int, help="number of blocks (default: the model's)")
    text = "image side in pixels, or HEIGHTxWIDTH (default: the model's)"
    parser.add_argument("--img-size", "--image-size", type=image_size, metavar="SIZE", help=text)
    parser.add_argument("--ours", action="store_true", help="our model of that name, not timm's optimised model")
    parser.add_argument("--frozen", action="store_true", help="after fastvit_triton.freeze")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--table", action="store_true", help="all models, batches, phases and architectures")
    parser.add_argument("--out", type=Path, help="file for the table")
    args = parser.parse_args()
    if args.table:
        rows = table()
        if args.out:
            write_text(args.out, as_json(dict(command=COMMAND, note=NOTE), rows=rows))
        print(f"{len(rows)} rows, {sum(bool(row['violations']) for row in rows)} of them violate a limit")
        return
    size = args.img_size
    setting = Setting(args.model, args.batch, args.phase, args.arch, args.ours, args.frozen, args.depth, size)
    try:
        check_size("--img-size", size or (1, 1))
        check_name("--model", args.model.removeprefix("timm:") if args.ours else args.model)
        at_least(1)("--batch", args.batch)
        if args.depth is not None:
            at_least(1)("--depth", args.depth)
        if not hasattr(build(replace(setting, depth=None)), "blocks"):
            raise ValueError(f"--model is {args.model}, which has stages; use a ViT, or fastvit-triton doctor --model")
        block, rest = parts(setting)
    except ValueError as error:
        parser.error(str(error))
    result = figures(setting) | {"block": block, "violations": violations(setting, block, rest)}
    if args.json:
        print(json.dumps(result, indent=1))
        return
    for who, numbers in (("model", result), ("block", block)):
        for arm in ("", "eager_", "inductor_"):
            launches, mb = numbers[f"{arm}launches"], numbers[f"{arm}bytes"] / 1e6
            peak = f"  {numbers[f'{arm}peak'] / 1e6:8.1f} MB at the peak" if f"{arm}peak" in numbers else ""
            print(f"{who}  {arm.rstrip('_') or 'default':8}  {launches:6g} launches  {mb:10.1f} MB{peak}")
    print(*(f"{branch}: {way}" for branch, way in result["ways"].items()), *result["violations"], sep="\n")


if __name__ == "__main__":
    main()
