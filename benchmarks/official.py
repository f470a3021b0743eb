"""How much of official ViT code, which no list names, `optimize(model, example=…)` fuses, how exactly, and its cost.

    python -m benchmarks.coverage official --sources FOLDER [--only PATTERN] [--out benchmarks/results]

FOLDER holds a checkout of each repository under its name, such as FOLDER/dinov2. official.json has the models, with
random weights. Those of a small width are compared. Counted: the FLOPs of operators that the kernels replace, of all of
the model's, as in the report, if its calls can be traced; the weights of linear layers in fused calls, of all of the
model's; and the attention products in them. Compared: outputs and all gradients in float64 with those of the original,
as the largest difference divided by the largest value, in evaluation and in training mode, where stochastic depth and
dropout are 0.

Those of the usual size are captured on the CPU from two images, or clips, and counted for BATCH of them in bfloat16 on
an H100 that need not be present: launches and bytes of inference, and of a forward and backward pass. torch.compile is
estimated by the rule of expected.inductor; times are predicted by expected.times. Nothing is measured.

ViT-5's rope.py calls `.cuda()`, which its checkout must not.
"""

import contextlib
import copy
import json
import re
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import MagicMock, patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fastvit_triton import optimize, set_backend
from fastvit_triton.convert.captured import captures_of, counting, is_bound
from fastvit_triton.convert.example import arguments
from fastvit_triton.convert.reporting import Report
from fastvit_triton.expected.count import Prediction, traced
from fastvit_triton.expected.events import Count
from fastvit_triton.expected.gpus import gpus
from fastvit_triton.expected.inductor import inductor_count
from fastvit_triton.expected.trace import Trace
from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.measure.timeout import one_line

from .data import made
from .result_file import origin, write_pair
from .tables import official_markdown

ATTENTION = ("scaled_dot_product_attention", "softmax", "multi_head_attention")
BATCH, GPU = 64, "h100"


class Official(NamedTuple):
    """A model of a repository, small with `inputs`, or of its usual size with a `shape`."""

    repository: str  # "owner/name" on GitHub
    model: str  # which one
    build: dict[str, Any]  # see `data.made`
    inputs: Any = None  # of a call, likewise; texts such as "2x3x64x64" are random numbers of this shape
    shape: tuple[int, ...] = ()  # of one input
    folder: str = ""  # of the sources, inside the repository
    bare: str = ""  # package whose __init__ is not run
    init: bool = False  # its method init_weights makes the weights
    single: bool = False  # its code rounds to float32, so that float64 does not run
    autocast: bool = False  # its code needs float32 weights, under autocast


MODELS = [Official(**row) for row in json.loads(Path(__file__).with_name("official.json").read_text())]


def built(entry: Official) -> tuple[nn.Module, Any]:
    """The model of an entry, and its inputs if it is small; its sources must be on the path."""
    if entry.bare:
        without_init(entry.bare)
    model = made(entry.build)
    if entry.init:
        model.init_weights()
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = False

    def tensor(given: Any) -> Any:
        if isinstance(given, str):
            return torch.randn([int(n) for n in given.split("x")])
        return torch.tensor(given) if isinstance(given, tuple) else given

    inputs = made(entry.inputs)
    if isinstance(inputs, dict):
        return model, {name: tensor(given) for name, given in inputs.items()}
    return model, inputs and tuple(map(tensor, inputs))


# What official.json names besides the classes of repositories.


def mae(**options: Any) -> nn.Module:
    """MAE's encoder and decoder."""
    import models_mae

    block = models_mae.Block  # of a release of timm, and NumPy's name of a release, which later ones do not have
    models_mae.Block = lambda *sizes, qk_scale, **named: block(*sizes, **named)
    with patch.object(np, "float", float, create=True):
        return models_mae.MaskedAutoencoderViT(**options)


def padded() -> Tensor:
    """A mask of two images of 5 x 6, of which the second one has two padded columns."""
    mask = torch.zeros(2, 5, 6, dtype=torch.bool)
    mask[1, :, 4:] = True
    return mask


class Views(nn.Module):
    """The features of some views that a tower of Depth Anything 3 hands to its heads."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, x: Tensor) -> Any:
        """Features of the last two blocks of [B, S, 3, H, W]."""
        depth = len(self.tower.blocks)
        return self.tower.get_intermediate_layers(x, [depth - 2, depth - 1])


class Decoder(nn.Module):
    """Pi3's blocks, called as its `decode` does, on two views of a grid of patches."""

    positions: Tensor

    def __init__(self, blocks: nn.ModuleList, rows: int, columns: int) -> None:
        super().__init__()
        self.blocks = blocks
        self.register_buffer("positions", torch.cartesian_prod(torch.arange(rows), torch.arange(columns)))

    def forward(self, x: Tensor) -> Tensor:
        """[B, 2, N, D] → [B, 2, N, D], within views and across them in turn."""
        batch, views, _, width = x.shape
        for i, block in enumerate(self.blocks):
            groups = batch * views if i % 2 == 0 else batch
            positions = self.positions.repeat(groups, batch * views // groups, 1)
            x = block(x.reshape(groups, -1, width), xpos=positions)
        return x.reshape(batch, views, -1, width)


def pi3(dim: int, depth: int, heads: int, rows: int, columns: int) -> nn.Module:
    """Pi3's decoder, with RoPE and norms on heads."""
    from pi3.models.dinov2.layers import Mlp
    from pi3.models.layers.attention import FlashAttentionRope
    from pi3.models.layers.block import BlockRope
    from pi3.models.layers.pos_embed import RoPE2D

    rope = RoPE2D(freq=100.0)
    block = dict(mlp_ratio=4, qkv_bias=True, proj_bias=True, ffn_bias=True, drop_path=0.0, act_layer=nn.GELU)
    block |= dict(ffn_layer=Mlp, init_values=0.01, qk_norm=True, attn_class=FlashAttentionRope, rope=rope)
    norm = partial(nn.LayerNorm, eps=1e-6)
    return Decoder(nn.ModuleList(BlockRope(dim, heads, norm_layer=norm, **block) for _ in range(depth)), rows, columns)


class Encoder(nn.Module):
    """CroCo's encoder of a whole image, as downstream models call it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """[B, 3, H, W] → [B, N, D]."""
        return self.model._encode_image(x)[0]


# Checkouts of the repositories.


# packages that only read files or tokenise text, which these models do not need; SAM 2 asks if Hydra is configured
ABSENT = "iopath iopath.common iopath.common.file_io ftfy hydra hydra.core hydra.core.global_hydra".split()


@contextlib.contextmanager
def sources(folder: Path) -> Iterator[None]:
    """Context in which a repository's modules can be imported; they are forgotten afterwards."""
    with patch.dict(sys.modules), patch.object(sys, "path", [str(folder), *sys.path]):
        for name in ABSENT:
            sys.modules.setdefault(name, MagicMock())
        yield


def without_init(name: str) -> None:
    """Makes the modules of a package importable without its `__init__`, which imports what these models do not need."""
    package = types.ModuleType(name)
    package.__path__ = [str(Path(sys.path[0], *name.split(".")))]
    sys.modules[name] = package


def commit(folder: Path, repository: str) -> str:
    """The commit of a repository's checkout, from its .git or a file COMMIT."""
    root = folder / repository.partition("/")[2]
    if (root / "COMMIT").exists():
        return (root / "COMMIT").read_text().strip()
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True).stdout.strip()


# Small models, compared.


def randomise(model: nn.Module) -> None:
    """Gives all floating-point parameters random values, so that none hides another."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
            base = 0.0 if parameter.dim() > 1 else 0.5
            with torch.no_grad():
                parameter.copy_(base + scale * torch.randn(parameter.shape, generator=generator))


def results(model: nn.Module, example: Any, train: bool) -> list[Tensor]:
    """Outputs of a call, and the gradients of all parameters and inputs for random cotangents."""
    model.train(train)
    example = tree_map_only(Tensor, lambda t: t.clone().requires_grad_(t.is_floating_point()), example)
    positional, named = arguments(example)
    torch.manual_seed(0)  # of MAE's masks
    outputs = [t for t in tree_leaves(model(*positional, **named)) if isinstance(t, Tensor) and t.requires_grad]
    leaves = [t for t in (*model.parameters(), *tree_leaves(example)) if isinstance(t, Tensor) and t.requires_grad]
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in outputs]
    grads = torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)
    return [*outputs, *(torch.zeros_like(t) if g is None else g for t, g in zip(leaves, grads, strict=True))]


def difference(got: list[Tensor], want: list[Tensor]) -> float:
    """Largest difference of any tensor, divided by its largest value.

    Some gradients are zero but for rounding, such as that of a key's bias: the divisor is at least 1e-6 of the largest
    value of all tensors.
    """
    floor = 1e-6 * max(float(b.abs().max()) for b in want)
    return max(float((a - b).abs().max()) / max(float(b.abs().max()), floor) for a, b in zip(got, want, strict=True))


def fused(model: nn.Module, report: Report) -> dict[str, Any]:
    """The share of FLOPs that the kernels replace; weights of linear layers, and those and attention in fused calls."""
    paths = {row.path for row in report.rows if row.became is not None and not row.bare}

    def inside(path: str, tops: set[str]) -> bool:
        return any(path == top or path.startswith(f"{top}.") or not top for top in tops)

    shares = report.shares()
    assert shares is not None  # as there is a model
    flops = None if shares.replaced is None else round(shares.replaced_share(""), 4)
    uncaptured: dict[str, None] = {}
    attention_left: list[str] = []
    attention = 0
    for path, module in model.named_modules():
        if is_bound(module):
            capture = captures_of(module)[0]
            prefix = f"{path}." if path else ""
            uncaptured |= {f"{prefix}{row.path}": None for row in capture.left if row.type == "linear"}
            attention_left += [f"{prefix}{row.path}: {row.why}" for row in capture.left if row.type in ATTENTION]
            attention += sum(n for name, n in capture.calls.items() if "attention" in name)
    attention += sum("attention" in (row.became or "") and "captured" not in row.became for row in report.rows)
    total = weights = 0
    unfused: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.MultiheadAttention)):
            size = sum(p.numel() for p in module.parameters(recurse=False) if p.dim() == 2)
            total += size
            if inside(path, paths) and path not in uncaptured:
                weights += size
            else:
                unfused.append(path)
    return dict(
        flops=flops, weights=total, fused_weights=weights, left=unfused,
        attention=attention, attention_left=attention_left,
    )  # fmt: skip


def compared(entry: Official) -> dict[str, Any]:
    """The figures of a small model."""
    model, example = built(entry)
    dtype = torch.float32 if entry.single else torch.float64
    model = model.to(dtype).eval()
    randomise(model)
    example = tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, example)
    original = copy.deepcopy(model)
    report = optimize(model, example=example)
    row = fused(model, report) | dict(why={f"{r.path} ({r.type})": r.why for r in report.rows if r.became is None})
    for mode in ("eval", "train"):
        want = results(original, example, mode == "train")
        results(model, example, mode == "train")  # captures calls with gradients
        row[mode] = difference(results(model, example, mode == "train"), want)
    return row


# Models of the usual size, counted.


def counted(entry: Official) -> dict[str, Any]:
    """The figures of a model of the usual size.

    `inference` and `training` have [launches, bytes] of eager PyTorch, torch.compile, `optimize`, and torch.compile
    with our backend; `ms` has their times by phase, those of inference also of mode max-autotune.
    """
    dtype = torch.float32 if entry.autocast else torch.bfloat16
    casting = torch.autocast("cpu", torch.bfloat16) if entry.autocast else contextlib.nullcontext()
    with casting, counting(), using_backend("auto"):
        model = built(entry)[0].to(dtype).eval()
        example = torch.randn(2, *entry.shape, dtype=dtype)
        report = optimize(model, example=example, compile=True)
        with torch.no_grad():
            model(example)  # fills what it caches by size, such as tables of rotations
        images = torch.empty(BATCH, *entry.shape, dtype=dtype, device="meta")
        shares = report.shares()
        row = dict(flops=None if shares is None or shares.replaced is None else round(shares.replaced_share(""), 4))
        eager, ours = _traces(model, images)
        row |= dict(inference=_counts(eager, ours), ms=dict(inference=_ms(eager, ours)))
        with torch.enable_grad():
            for _ in range(2):
                model.train()(example)  # captures calls with gradients
        eager, ours = _traces(model, images)
        row["training"] = _counts(eager, ours)
        row["ms"]["training"] = _ms(eager, ours)[:4]  # what templates compute in a backward pass is not known
    return row


def _traces(model: nn.Module, images: Tensor) -> tuple[Trace, Trace]:
    """Traces of a call of eager PyTorch and of ours, in the mode that the model is in."""
    return traced(model, None, model.training, (images,), {}), traced(model, gpus()[GPU], model.training, (images,), {})


def _counts(eager: Trace, ours: Trace) -> list[tuple[int, int]]:
    def pair(count: Count) -> tuple[int, int]:
        return count.launches, count.nbytes

    whole = inductor_count(ours.events)
    return [*map(pair, (eager.count, inductor_count(eager.events), ours.count, whole))]


def _ms(eager: Trace, ours: Trace) -> list[float]:
    counts = eager.count, inductor_count(eager.events), ours.count, None
    one = Prediction(*counts, choices=(), gpu=gpus()[GPU], training=False, traces=(eager, ours))
    us = one.eager_us(), one.compiled_us(), one.ours_us()[1], one.backend_us(), one.compiled_us("max-autotune")
    return [round(each / 1e3, 3) for each in us]


def row_of(number: int, folder: Path) -> dict[str, Any]:
    """The row of the model of this number; with the error if it fails."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    set_backend("torch")
    entry = MODELS[number]
    row = facts_of(entry, folder)
    with sources(folder / entry.repository.partition("/")[2] / entry.folder):
        try:
            torch.manual_seed(0)
            row |= counted(entry) if entry.shape else compared(entry)
        # Any error: the row states it, and the other models are tried.
        except Exception as error:
            row["error"] = one_line(error)
    return row


def facts_of(entry: Official, folder: Path) -> dict[str, Any]:
    """Columns of every row."""
    return dict(repository=entry.repository, model=entry.model, commit=commit(folder, entry.repository))


def main(folder: Path, only: str, out: Path | None) -> None:
    """Counts and compares the models that match, prints a line for each, and writes coverage-official.json and .md."""
    rows, speeds = [], []
    for number, entry in enumerate(MODELS):
        if not re.search(only, f"{entry.repository} {entry.model}"):
            continue
        # A process for each model: graphs of Dynamo and free memory that malloc keeps would add up.
        with ProcessPoolExecutor(1, mp_context=torch.multiprocessing.get_context("spawn")) as pool:
            try:
                row = pool.submit(row_of, number, folder).result()
            except BrokenProcessPool as error:  # killed, such as for memory
                row = facts_of(entry, folder) | dict(error=one_line(error))
        (speeds if entry.shape else rows).append(row)
        print(*(f"{name}={value}" for name, value in row.items() if name != "why"), flush=True)
    if out is not None:
        write_pair(out / "coverage-official", official_markdown, origin(), rows=rows, speeds=speeds)
