"""Cases of the compile report: the ops of ViT-Ti/S/B/L/H at batch 256, and shapes of other model families.

Those of other families are in launch_cases.json, a line for each: longer sequences, other head dimensions, bias,
padding, packed sequences; blocks of Qwen2.5-VL's tower; windows of Swin, Swin V2 and Twins; other arguments of linear,
mlp and patch_embed; depthwise convolutions of pyramids and positional encodings; deformable sampling of detectors, with
four points of a level; BatchNorm by stored statistics, residual and ReLU after a convolution.

Tensors are never written, so a batch of 256 takes address space but no memory.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fastvit_triton.convert.conversion import attach
from fastvit_triton.kernels.settings import forcing
from fastvit_triton.layers.attention import Attention
from fastvit_triton.layers.block import Block, Blocks
from fastvit_triton.layers.mlp import Mlp

from .data import made
from .op_cases import BATCH, BY_NAME, FULL, arguments, described

MODELS = {shape.name: shape for shape in FULL}


@dataclass(frozen=True)
class Case:
    """One call of a public function; `build` returns (function, arguments, options)."""

    name: str
    op: str
    dtype: str
    build: Callable[[], tuple[Callable, tuple, dict]]
    precision: str = "highest"


def cases(quick: bool = False) -> list[Case]:
    """All cases; with `quick`, only ViT-B in bfloat16, one long attention and one MLP in a single launch."""
    others = [*_listed(), *_blocks()]
    if quick:
        names = ("N=577 D=64", "recompute, D=128", "ViT-B/16, LayerScale and drop path")
        return [*_vit("ViT-B/16", "bfloat16"), *(c for c in others if c.name in names and c.dtype == "bfloat16")]
    every = [case for model in MODELS for case in _vit(model, "bfloat16")] + others
    return [*every, *_vit("ViT-B/16", "float16"), *_vit("ViT-B/16", "float32"), *_vit("ViT-B/16", "float32", "high")]


def empty(text: str, dtype: str) -> Any:
    """The tensor that a text such as "float32 8x197x64 permuted 021 fixed" describes; other texts are returned.

    Its dtype is `dtype` unless it is stated, and it learns unless it is fixed. Permuted are the axes of its memory.
    """
    found = re.fullmatch(r"(?:(\w+) )?([\dx]+)(?: permuted (\d+))?( fixed)?", text)
    if found is None:
        return text
    stated, sizes, axes, fixed = found.groups()
    t = torch.empty([int(n) for n in sizes.split("x")], dtype=getattr(torch, stated or dtype))
    t.requires_grad_(not fixed)
    return t.permute([int(axis) for axis in axes]) if axes else t


def after_class_token(tokens: torch.Tensor, side: int) -> torch.Tensor:
    """The tokens of patches as a map, as CPVT's positional encoding takes them."""
    return tokens[:, 1:].unflatten(1, (side, side))


def _listed() -> Iterator[Case]:
    """The cases of launch_cases.json: the public function is that of the op, unless "call" names another."""

    def build(call: str, given: dict[str, Any], dtype: str) -> tuple[Callable, tuple, dict]:
        return BY_NAME[call].run, (), made(given, partial(empty, dtype=dtype))

    for row in json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")):
        dtype = row.get("dtype", "bfloat16")
        yield Case(row["name"], row["op"], dtype, partial(build, row.get("call", row["op"]), row["given"], dtype))


def _vit(model: str, dtype: str, precision: str = "highest") -> Iterator[Case]:
    """The ops of one block and the patch embedding; the residual of the MLP is its input."""

    def new(*shape: int, scale: float = 1.0, learns: bool = True) -> torch.Tensor:
        return torch.empty(*shape, dtype=getattr(torch, dtype)).requires_grad_(learns)

    def build(name: str, has_stats: bool) -> tuple[Callable, tuple, dict]:
        s = MODELS[model]
        op, fixed, *_ = described(name, s)
        given = arguments(name, s, new) | fixed
        given |= dict(stats=torch.empty(s.B * s.N, s.D // 128, 2)) if has_stats else {}
        given |= dict(residual=given["x"]) if name == "mlp" else {}
        return BY_NAME[op].run, (), given

    name = model if precision == "highest" else f"{model} {precision}"
    ops = ("linear qkv", "linear qkv, given statistics", "attention", "linear proj", "mlp", "layer_norm")
    for op in (*ops, "add_layer_norm", "patch_embed"):
        what, comma, _ = op.partition(",")
        yield Case(name, op.removeprefix("linear "), dtype, partial(build, what, bool(comma)), precision)


def _blocks() -> Iterator[Case]:
    """Two consecutive blocks, which hand on row statistics, or three mixed ones, which lend their outputs."""

    def build(
        model: str, dtype: str, autocast: bool, way: str = "fused", **options: float
    ) -> tuple[Callable, tuple, dict]:
        D, H, N = MODELS[model].D, MODELS[model].H, MODELS[model].N
        depth = 3 if way == "mixed" else 2
        blocks = Blocks(*(Block(D, Attention(D, H), Mlp(D, 4 * D), **options) for _ in range(depth)))
        attach(blocks)
        blocks.to(getattr(torch, dtype))

        def call(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast), forcing(way):
                return blocks(x)

        return call, (empty(f"{BATCH}x{N}x{D}", dtype), *blocks.parameters()), {}

    scaled = dict(init_values=1e-5, drop_path=0.1)
    for model in ("ViT-Ti/16", "ViT-B/16"):
        yield Case(model, "blocks", "bfloat16", partial(build, model, "bfloat16", False))
        yield Case(f"{model}, mixed", "blocks", "bfloat16", partial(build, model, "bfloat16", False, "mixed"))
    for dtype, autocast, kind in (("bfloat16", False, ""), ("float16", False, ""), ("float32", True, ", autocast")):
        for options, ends in (({}, ""), (scaled, ", LayerScale and drop path")):
            if ends or autocast or dtype == "float16":
                name = f"ViT-B/16{ends}{kind}"
                yield Case(name, "blocks", dtype, partial(build, "ViT-B/16", dtype, autocast, **options))
            if dtype != "float16" and (ends or autocast):
                build_mixed = partial(build, "ViT-B/16", dtype, autocast, "mixed", **options)
                yield Case(f"ViT-B/16{ends}{kind}, mixed", "blocks", dtype, build_mixed)
