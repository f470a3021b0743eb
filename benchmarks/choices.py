"""Writes the tables by which blocks and ops are run, kernels/tuned/choices/<GPU>.json, from predicted times.

    python -m benchmarks.choices                              write the table of every GPU in expected/rates.json
    python -m benchmarks.choices --compare --out FOLDER       compare the tables with the times they are made from
    python -m benchmarks.choices --collect                    write choices_sizes.json from these models and ours

choices_sizes.json has the sizes of blocks and ops that models ask for. Each is predicted on each GPU for 18 numbers of
images, by `expected.blocks` and `expected.ops`. For each width, a row has the ways that lose least, of at most three
ranges of the number of rows (images times tokens); a way that may be slower than plain, by pessimistic rates of our
matmuls, counts as losing more. A way that moves more bytes or has more launches than plain for one
of the sizes in a range is not taken there.
"""

import argparse
import hashlib
import inspect
import itertools
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from fastvit_triton import create_model, list_models, optimize
from fastvit_triton.expected import blocks, gpus, ops
from fastvit_triton.expected.count import traced
from fastvit_triton.expected.gpus import Gpu
from fastvit_triton.expected.trace import assuming_true
from fastvit_triton.files import replacing
from fastvit_triton.kernels import choose, mixed, predicted
from fastvit_triton.kernels import sizes as sizes_of_kernels
from fastvit_triton.kernels.launch import TUNED
from fastvit_triton.kernels.settings import observing
from fastvit_triton.kernels.sizes import WAYS, Branch
from fastvit_triton.measure.machine import provenance
from fastvit_triton.measure.timeout import one_line
from fastvit_triton.models import model_config

from . import coverage
from .result_file import ROOT

CHOICES = TUNED / "choices"
SIZES = Path(__file__).with_name("choices_sizes.json")
IMAGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
RESULTS = ROOT / "benchmarks" / "results"
SHOWN = 60  # of the largest losses
COMPARED = (1, 8, 64, 256)  # images
HELD_OUT = (5, 20, 100)  # images that no row was made from
SLOWER = 10.0  # weight of what a way takes longer than plain at pessimistic rates
REFUSED = 5.0  # loss of a way that moves more than plain
GAIN = 0.02  # mean loss that another range of rows has to save
RANGES = 3  # of numbers of rows
MODES = ("replayed", "called", "compiled")
DTYPES = ("16-bit", "autocast", "TF32", "IEEE float32")
SCALES = {"": (0, 0), "drop path": (1, 0), "layer scale": (1, 1), "both": (2, 1)}  # (scales, layer_scale) of branches


class Point(NamedTuple):
    """A block or an op of one size on one GPU.

    Attributes:
        name: of its row.
        width: of the residual.
        rows: number of tokens of all images.
        us: way → expected microseconds.
        most_us: way → the same by pessimistic rates of our matmuls.
        refused: ways that move more than plain.
        images: number of images.
    """

    name: str
    width: int
    rows: int
    us: dict[str, float]
    most_us: dict[str, float]
    refused: frozenset[str]
    images: int

    def losses(self) -> dict[str, float]:
        """Way → by which part it takes longer than the fastest one that is not refused.

        What a way takes longer than plain by pessimistic rates counts `SLOWER` times in addition.
        """
        fastest = min(us for way, us in self.us.items() if way not in self.refused)
        return {
            way: us / fastest
            - 1
            + SLOWER * max(self.most_us[way] / self.us["plain"] - 1, 0.0)
            + REFUSED * (way in self.refused)
            for way, us in self.us.items()
        }


def collect() -> None:
    """Writes the sizes of blocks and ops that the models of `coverage` and ours ask for, for one image."""
    found: set[tuple] = set()
    asked: set[tuple] = set()

    def seen(choice: choose.Choice) -> None:
        if choice.branches and all(b.images * b.tokens * b.inner for b in choice.branches):
            bare = (b._replace(images=1, scales=0, layer_scale=0, itemsize=2, wide=0) for b in choice.branches)
            found.add(tuple(map(tuple, bare)))

    original = choose.op_row

    def recorded(op: str, dtype: torch.dtype, training: bool, sizes: tuple[int, ...]) -> tuple[str, int, int]:
        if all(sizes[:2]):
            asked.add((op, -(-sizes[0] // coverage.BATCH), *map(int, sizes[1:])))
        return original(op, dtype, training, sizes)

    choose.op_row = recorded
    for name, model, positional, named in itertools.chain(_models_of_others(), _our_models()):
        for key, training in (("h200", False), ("rtx4090", False), ("h200", True)):
            choose.forget()
            try:
                with assuming_true(), observing(seen):
                    traced(model, gpus.gpus()[key], training, positional, named)
            except TypeError as error:  # a model that refuses 16-bit weights in training
                print(f"{name}, {'training' if training else 'inference'}: {one_line(error)}")
    content = dict(blocks=sorted(found), ops=sorted(asked))
    lines = (
        f' "{kind}": [\n' + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n ]"
        for kind, rows in content.items()
    )
    with replacing(SIZES) as temporary:
        temporary.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _models_of_others() -> Iterator[tuple[str, nn.Module, tuple, dict]]:
    """(name, converted model, positional inputs, named inputs) of the models of `coverage`."""
    for listed in (coverage.MODELS, coverage.TOWERS):
        for entry in coverage.entries(listed.read_text(encoding="utf-8")):
            if entry.called:
                model = coverage.build(entry)
                optimize(model)
                yield entry.name, model, *coverage.inputs_of(entry, model)


def _our_models() -> Iterator[tuple[str, nn.Module, tuple, dict]]:
    """The same for one of our models of each kind and width, except NaFlex, which reads the values of its input."""
    configs = {name: model_config(name) for name in list_models()}
    kinds = {(type(c).__name__, str(getattr(c, "embed_dim", 0))): name for name, c in configs.items()}
    for name in kinds.values():
        if not name.startswith("naflex"):
            with torch.device("meta"):
                model = create_model(name).bfloat16()
            shape = coverage.BATCH, model.config.in_chans, *model.config.img_size
            yield name, model, (torch.empty(shape, dtype=torch.bfloat16, device="meta"),), {}


def sizes() -> tuple[list[tuple[Branch, ...]], list[tuple[str, tuple[int, ...]]]]:
    """The blocks of choices_sizes.json; its ops, fc1 of each block, and a grid with each combination of epilogues."""
    content = json.loads(SIZES.read_text())
    listed = [tuple(Branch(*fields) for fields in block) for block in content["blocks"]]
    mlps = [b for block in listed for b in block if b.kind == "mlp"]
    asked = [(op, tuple(rest)) for op, *rest in content["ops"] if op != "fc1"]
    asked += [("fc1", (b.tokens, b.channels, b.width, 1 + (b.width > b.inner))) for b in mlps]  # 2 passes if gated
    return listed, list(dict.fromkeys([*asked, *_grid()]))


def _grid() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Ops for one image."""
    flags = (0, 1)
    for N, C in itertools.product((50, 197, 1025), (96, 192, 384, 768, 1024, 1280)):
        for norm, act, *ends in itertools.product(flags, (0, 1, 2), flags, flags, flags):
            for K, F in ((C, 3 * C), (C, 4 * C), (C, C), (4 * C, C)):
                yield "linear", (N, K, F, norm, norm, act, *ends)
            yield "mlp", (N, C, 4 * C * max(act, 1), 4 * C, norm, norm, act, *ends)
        for pair in itertools.product(flags, flags):
            yield "add_layer_norm", (N, C, *pair)
            yield "batch_norm_act", (N, C, *pair)
            for K in (768, 8 * C):
                yield "patch_embed", (N, K, C, *pair)
            for window in (49, 64, 144, 256):
                yield "window_attention", (N, C, window, *pair)
        for K, stride, *ends in itertools.product((3, 5, 7), (1, 2), flags, flags, flags, flags):
            yield "depthwise", (N, C, K, stride, *ends)
        yield "deformable_attention", (N, C, max(C // 32, 1), 4, 4, 20000)
        yield "layer_norm", (N, C)
    for N, D, H, packed in itertools.product((50, 197, 577, 1025, 4096), (32, 64, 80, 128), (3, 12, 16), flags):
        yield "attention", (1, H, N, N, D, packed)


def block_points(gpu: Gpu, block: tuple[Branch, ...], images: Iterable[int]) -> Iterator[Point]:
    """The points of a block on a GPU: each phase, dtype and mode, for these numbers of images."""
    for training, dtype, ends in itertools.product((False, True), DTYPES, SCALES):
        if not training and ends not in ("", "layer scale"):  # inference drops no paths
            continue
        scales, layer_scale = SCALES[ends]
        one = tuple(
            b._replace(
                scales=scales, layer_scale=layer_scale, itemsize=2 + 2 * ("32" in dtype), wide=int(dtype == "autocast")
            )
            for b in block
        )
        for B in images:
            yield from _of_block(gpu, tuple(b._replace(images=B) for b in one), dtype, training, MODES[:2])
        fixed = tuple(b._replace(images=choose.TRACED[0], tokens=choose.TRACED[1]) for b in one)
        yield from _of_block(gpu, fixed, dtype, training, MODES[2:])


def _of_block(gpu: Gpu, block: tuple[Branch, ...], dtype: str, training: bool, modes: Iterable[str]) -> Iterator[Point]:
    exact = dtype == DTYPES[-1]
    if exact:  # as `refusal`, so that a mixed block has no matmul of ours
        gpu = gpu._replace(fused_product=blocks.NEVER)
    every = {way: blocks.launches(gpu, block, way, training, False) for way in WAYS}
    us, most_us = _times(gpu, every)
    refused = {w for w, launches in every.items() if blocks.refusal(launches, every["plain"], training, exact)}
    rows = block[0].images * block[0].tokens
    for mode in modes:
        name = _exactly(exact, predicted.block_row, block, _dtype(dtype), training, mode)
        if mode == "compiled":
            plain = min(us["plain"], blocks.compiled_us(gpu, block, training))
            pairs = ({"fused": times["fused"], "plain": plain} for times in (us, most_us))
            yield Point(name, block[0].channels, rows, *pairs, frozenset(refused & {"fused"}), 0)
            continue
        host = {way: blocks.host_us(way, len(block), training, mode == "replayed") for way in WAYS}
        both = ({way: max(time, host[way]) for way, time in times.items()} for times in (us, most_us))
        yield Point(name, block[0].channels, rows, *both, frozenset(refused), block[0].images)


def _times(gpu: Gpu, every: Mapping[str, list[blocks.Launch]]) -> tuple[dict[str, float], dict[str, float]]:
    """Microseconds of the launches of each way, by expected and by pessimistic rates of our matmuls."""
    expected, pessimistic = (
        {way: sum(blocks.launch_us(gpu, one, ratio) for one in launches) for way, launches in every.items()}
        for ratio in (1, 0)
    )
    return expected, pessimistic


def op_points(gpu: Gpu, op: str, one: tuple[int, ...], images: Iterable[int]) -> Iterator[Point]:
    """The points of an op on a GPU: each phase and dtype, for these numbers of images."""
    dtypes = DTYPES[:1] + DTYPES[-1 if op in predicted.KEEP_DTYPE else 2 :]
    phases = (False,) if op == "fc1" else (False, True)
    for training, dtype, B in itertools.product(phases, dtypes, images):
        exact = dtype == DTYPES[-1]
        given = (one[0] * B, *one[1:])
        ours, theirs = ops.OPS[op](4 if "32" in dtype else 2, training, *given)
        us, most_us = _times(gpu, dict(fused=ours, plain=theirs))
        refused = frozenset({"fused"} if blocks.refusal(ours, theirs, training, exact) else ())
        yield Point(*_exactly(exact, predicted.op_row, op, _dtype(dtype), training, given), us, most_us, refused, B)


def _dtype(name: str) -> torch.dtype:
    return torch.float32 if "32" in name else torch.bfloat16


def _exactly(exact: bool, name: Any, *arguments: Any) -> Any:
    """The name of a row, with TF32 allowed unless `exact`."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if exact else "high")
    try:
        return name(*arguments)
    finally:
        torch.set_float32_matmul_precision(before)


def points(gpu: Gpu, images: Iterable[int]) -> Iterator[Point]:
    """The points of all blocks and ops on a GPU."""
    images = tuple(images)
    listed, asked = sizes()
    for block in listed:
        yield from block_points(gpu, block, images)
    for op, one in asked:
        yield from op_points(gpu, op, one, images)


def steps(of_row: list[Point]) -> str:
    """The ways of a row by number of rows, as in "plain 1576 fused"."""
    ways = [way for way in WAYS if way in of_row[0].us]
    by_rows: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(len(ways)))
    for point in of_row:
        losses = point.losses()
        by_rows[point.rows] += [losses[way] for way in ways]
    rows = sorted(by_rows)
    total = np.concatenate([np.zeros((1, len(ways))), np.cumsum([by_rows[n] for n in rows], 0)])
    between = total[None] - total[:, None]  # of rows i to j, in each way
    least, way = between.min(-1), between.argmin(-1)
    n = len(rows)
    best, found = float(least[0, n]), [(n, int(way[0, n]))]
    enough = GAIN * len(of_row) / n
    two = least[0, :] + least[:, n]
    i = int(two.argmin())
    if two[i] < best - enough:
        best, found = float(two[i]), [(i, int(way[0, i])), (n, int(way[i, n]))]
    three = np.where(np.tri(n + 1, dtype=bool).T, least[0, :, None] + least + least[None, :, n], np.inf)
    i, j = np.unravel_index(int(three.argmin()), three.shape)
    if three[i, j] < best - enough:
        found = [(int(i), int(way[0, i])), (int(j), int(way[i, j])), (n, int(way[j, n]))]
    words: list[str] = []
    for end, choice in found:
        if words[-2:-1] == [ways[choice]]:
            del words[-2:]
        words += [ways[choice], str(rows[end - 1])]
    return " ".join(words[:-1])


def table(gpu: Gpu) -> dict[str, str | dict[str, str]]:
    """The rows of a GPU: name → widths, such as "384" or "384-768", → ways by number of rows; or the same for all."""
    by_row: dict[str, dict[int, list[Point]]] = defaultdict(lambda: defaultdict(list))
    for point in points(gpu, IMAGES):
        by_row[point.name][point.width].append(point)
    found: dict[str, str | dict[str, str]] = {}
    for name, widths in sorted(by_row.items()):
        cells = [(width, steps(of_row)) for width, of_row in sorted(widths.items())]
        runs = [(text, [width for width, _ in run]) for text, run in itertools.groupby(cells, lambda cell: cell[1])]
        spans = {"-".join(map(str, dict.fromkeys((of[0], of[-1])))): text for text, of in runs}
        found[name] = spans if len(runs) > 1 else runs[0][0]
    return found


def model() -> str:
    """Hash of what the tables are made from."""
    digest = hashlib.sha256()
    for path in (blocks.__file__, ops.__file__, sizes_of_kernels.__file__):
        digest.update(Path(path).read_bytes())
    for code in (Point, sizes, _grid, block_points, _of_block, _times, op_points, points, steps, table):
        digest.update(inspect.getsource(code).encode())
    digest.update(
        repr(
            [predicted.OPS, predicted.KEEP_DTYPE, mixed.FASTER_ON, IMAGES, SLOWER, REFUSED, GAIN, DTYPES, SCALES]
        ).encode()
    )
    rates = [{n: value for n, value in row.items() if n != "sheet"} for row in gpus.table()["gpus"].values()]
    digest.update(json.dumps([rates, gpus.table()["blocks"]], sort_keys=True).encode() + SIZES.read_bytes())
    return digest.hexdigest()[:12]


def write(key: str) -> None:
    """Writes the table of a GPU."""
    torch.set_num_threads(1)
    gpu = gpus.gpus()[key]
    rows = ",\n".join(
        f"  {json.dumps(name, ensure_ascii=False)}: {json.dumps(cells)}" for name, cells in table(gpu).items()
    )
    head = f' "gpu": {json.dumps(gpu.name)},\n "predicted_by": "benchmarks.choices, model {model()}",\n'
    with replacing(CHOICES / f"{key}.json") as temporary:
        temporary.write_text(f'{{\n{head} "rows": {{\n{rows}\n }}\n}}\n')


def write_all(jobs: int) -> None:
    """Writes the tables of all GPUs, and the list of them."""
    CHOICES.mkdir(exist_ok=True)
    listed = {key: dict(name=gpu.name, architecture=gpu.architecture) for key, gpu in gpus.gpus().items()}
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(facts)}" for key, facts in listed.items())
    with replacing(CHOICES / "gpus.json") as temporary:
        temporary.write_text("{\n" + lines + "\n}\n")
    with ProcessPoolExecutor(jobs) as pool:
        list(pool.map(write, listed))


def compared(key: str) -> list[tuple[str, str, float, bool, bool, bool]]:
    """For each size on a GPU: (part, row, loss, fastest way taken, moves more than plain, is slower than plain).

    The loss is the time of the way that the table says over that of the fastest way that is not refused, less 1.
    """
    torch.set_num_threads(1)
    found = []
    for point in points(gpus.gpus()[key], (*COMPARED, *HELD_OUT)):
        way = predicted.row_of(key, point.name, point.width, point.rows)[0] or "plain"
        fastest = min(us for one, us in point.us.items() if one not in point.refused)
        part = "blocks" if point.name.split("; ")[-1] in MODES else "ops"
        part += ", other numbers of images" * (point.images in HELD_OUT)
        where = f"{key}: {point.name}, width {point.width}, {point.rows} rows: {way}"
        loss = point.us[way] / fastest - 1
        slower = point.most_us[way] > point.us["plain"] * (1 + 1e-9)
        found.append((part, where, loss, loss <= 1e-9, way in point.refused, slower))
    return found


def compare(folder: Path, jobs: int) -> None:
    """Writes choices.json and choices.md: what the tables lose against the predicted times, in parts."""
    with ProcessPoolExecutor(jobs) as pool:
        every = [one for of_gpu in pool.map(compared, gpus.gpus()) for one in of_gpu]
    parts = {}
    for part in dict.fromkeys(one[0] for one in every):
        some = [one for one in every if one[0] == part]
        losses = np.array([max(one[2], 0.0) for one in some])
        parts[part] = dict(
            sizes=len(some),
            fastest=round(sum(one[3] for one in some) / len(some), 4),
            mean=round(float(losses.mean()), 5),
            p99=round(float(np.quantile(losses, 0.99)), 4),
            above_12_percent=int((losses > 0.12).sum()),
            most=round(float(losses.max()), 3),
            moves_more_than_plain=sum(one[4] for one in some),
            slower_than_plain=sum(one[5] for one in some),
        )
    worst = sorted(every, key=lambda one: -one[2])[:SHOWN]
    facts: dict[str, object] = {"note": "by the model's clock; nothing is measured", "model": model()}
    facts |= {k: v for k, v in provenance().items() if k in ("command", "date", "commit")}
    facts |= dict(parts=parts, worst=[dict(size=one[1], loss=round(one[2], 3)) for one in worst])
    columns = "sizes, fastest way, mean loss, 99th percentile, above 12 %, most, moves more than plain, "
    columns += "slower at pessimistic rates"
    head = f"| | {columns.replace(', ', ' | ')} |"
    lines = [
        f"| {part} | {n['sizes']} | {n['fastest']:.1%} | {n['mean']:.2%} | {n['p99']:.1%} | {n['above_12_percent']} "
        f"| {n['most']:.0%} | {n['moves_more_than_plain']} | {n['slower_than_plain']} |"
        for part, n in parts.items()
    ]
    text = f"What the tables of choices lose against the predicted times they are made from, on 11 GPUs.\n\n{head}\n"
    text += "|---|" + "--:|" * 8 + "\n" + "\n".join(lines) + "\n"
    for kind, content in (("json", json.dumps(facts, indent=1) + "\n"), ("md", text)):
        with replacing(folder / f"choices.{kind}") as temporary:
            temporary.write_text(content, encoding="utf-8")


def main() -> None:
    """Writes the tables, compares them, or collects sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collect", action="store_true", help="write choices_sizes.json")
    parser.add_argument("--compare", action="store_true", help="write choices.json and choices.md")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of these (default: benchmarks/results)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: all cores)")
    args = parser.parse_args()
    if args.collect:
        collect()
    elif args.compare:
        compare(args.out, args.jobs)
    else:
        write_all(args.jobs)


if __name__ == "__main__":
    main()
