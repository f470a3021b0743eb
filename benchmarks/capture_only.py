"""What readers gain over captured blocks: both conversions of the same models, side by side.

    python -m benchmarks.coverage capture --out benchmarks/results [--only PATTERN]

Each model is converted as `optimize(model, example=…)` does, and again with no reader, so that every block is captured.
Compared: the share of the operations of linear layers and attention that run in our launches, fused attention
products, and launches of a call of the frozen model, counted from shapes on an assumed GPU with every module fused; the
Python calls of a frozen block, as in benchmarks/host.py, which also measures host time; the largest difference of an
output or gradient from the original's in float64, divided by the largest value; CPU seconds of the conversion. The
models are small, with random weights, and have two blocks, and six to count the calls of a block.
"""

import copy
import json
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import timm
import torch
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fastvit_triton import create_model, freeze, optimize, set_backend
from fastvit_triton.convert import captured, conversion
from fastvit_triton.convert.example import arguments
from fastvit_triton.expected.count import traced
from fastvit_triton.expected.gpus import gpus
from fastvit_triton.kernels.settings import forcing
from fastvit_triton.measure.timeout import one_line

from .host import calls_of
from .no_device import no_device
from .official import difference, randomise, results
from .result_file import as_json, origin, write_text
from .tables import capture_markdown

DEPTHS = (2, 6)
D = 32  # width
GPU = "h200"
ATTENTION = re.compile(r"attention|window|_softmax|_scaled_dot_product")  # in names of events


class Case(NamedTuple):
    """A model.

    Attributes:
        name: "package:model".
        build: number of blocks → the model.
        inputs: number of images → arguments of a call, a tensor or a dictionary.
    """

    name: str
    build: Callable[[int], nn.Module]
    inputs: Callable[[int], Any]


def images(batch: int, side: int = 32) -> Tensor:
    """Random images [B, 3, side, side]."""
    return torch.randn(batch, 3, side, side)


def ours(name: str, **options: Any) -> Case:
    """One of our models."""
    return Case(f"fastvit_triton:{name}", lambda depth: create_model(name, depth=depth, **options), images)


def by_timm(name: str, depths: Callable[[int], Any] = int, key: str = "depth", side: int = 32, **options: Any) -> Case:
    """A model of timm.

    Args:
        name: in timm.
        depths: number of blocks → value of the option `key`.
        key: option that states how many blocks there are.
        side: of the images.
        options: of the model.
    """

    def build(depth: int) -> nn.Module:
        return timm.create_model(name, num_classes=0, **{key: depths(depth)}, **options)

    return Case(f"timm:{name}", build, lambda batch: images(batch, side))


def hugging_face(
    name: str, key: str = "num_hidden_layers", inputs: Callable[[int], Any] | None = None, **options: Any
) -> Case:
    """A model of transformers, by the name of its class."""

    def build(depth: int) -> nn.Module:
        cls = getattr(transformers, name)
        return cls(cls.config_class(**{key: depth}, **options))

    return Case(f"transformers:{name}", build, inputs or (lambda batch: dict(pixel_values=images(batch))))


def packed(batch: int) -> dict[str, Tensor]:
    """Patches of images of 4 x 8, in one sequence."""
    return dict(hidden_states=torch.randn(32 * batch, 3 * 2 * 8 * 8), grid_thw=torch.tensor([[1, 4, 8]] * batch))


PLAIN = dict(img_size=32, patch_size=8, embed_dim=D, num_heads=2)
TOWER = dict(hidden_size=D, num_attention_heads=2, intermediate_size=2 * D, image_size=32, patch_size=8)
CASES = (
    ours("vit_tiny_patch16_224", num_classes=0, **PLAIN),
    by_timm("vit_tiny_patch16_224", **PLAIN),
    by_timm("deit3_small_patch16_224", **PLAIN),
    by_timm("beit_base_patch16_224", **PLAIN),
    by_timm("eva02_tiny_patch14_224", **PLAIN),
    by_timm("cait_xxs24_224", **PLAIN),
    by_timm(
        "swin_tiny_patch4_window7_224",
        lambda depth: (depth,),
        key="depths",
        img_size=32,
        window_size=4,
        embed_dim=D,
        num_heads=(2,),
    ),
    by_timm("convnext_tiny", lambda depth: (1, 1, depth, 1), key="depths", side=64, dims=(D,) * 4),
    hugging_face("ViTModel", **TOWER),
    hugging_face("CLIPVisionModel", **TOWER),
    hugging_face("SiglipVisionModel", **TOWER),
    hugging_face("Dinov2Model", **TOWER),
    hugging_face("DINOv3ViTModel", num_register_tokens=2, **TOWER),
    hugging_face("BeitModel", use_relative_position_bias=True, **TOWER),
    hugging_face(
        "SwinModel", "depths", image_size=32, patch_size=4, window_size=4, embed_dim=D, num_heads=[2]
    )._replace(
        build=lambda depth: transformers.SwinModel(
            transformers.SwinConfig(
                image_size=32, patch_size=4, window_size=4, embed_dim=D, depths=[depth], num_heads=[2]
            )
        )
    ),
    hugging_face(
        "Qwen2_5_VisionTransformerPretrainedModel",
        "depth",
        packed,
        hidden_size=D,
        num_heads=2,
        intermediate_size=2 * D,
        out_hidden_size=D,
        patch_size=8,
        window_size=32,
        fullatt_block_indexes=[1],
    ),
)


def without_forwards(model: nn.Module) -> None:
    """Leaves a model of ours the forwards of its classes."""
    for module in model.modules():
        for name in ("forward", *(name for name, _ in conversion.METHODS.values())):
            module.__dict__.pop(name, None)


def converted(model: nn.Module, example: Any, readers: bool) -> None:
    """Converts a model, with or without readers."""
    if readers:
        optimize(model, example=example)
        return
    without_forwards(model)
    with patch.object(conversion, "_rows", return_value=()):
        optimize(model, example=example)


def figures(case: Case, readers: bool) -> dict[str, Any]:
    """All but the host's time of one conversion of a model."""
    torch.manual_seed(0)
    model = case.build(DEPTHS[0]).double().eval()
    randomise(model)
    original = copy.deepcopy(model)
    without_forwards(original)
    example = in_dtype(case.inputs(2), torch.float64)
    captured._by_forward.clear()
    started = time.process_time()
    converted(model, example, readers)
    seconds = time.process_time() - started
    want = results(original, example, False)
    results(model, example, False)  # captures calls with gradients
    error = difference(results(model, example, False), want)
    half = case.build(DEPTHS[0]).bfloat16().eval()
    example = in_dtype(example, torch.bfloat16)
    converted(half, example, readers)
    freeze(half)
    positional, named = arguments(example)
    with forcing("fused"):
        events = traced(half, gpus()[GPU], False, positional, named, frozen=True).events
    products = [e for e in events if e.flops and "conv" not in e.name and "patch_embed" not in e.name]
    attention = [e.ours for e in events if e.launches and ATTENTION.match(e.name)]
    return dict(
        products=round(sum(e.flops for e in products if e.ours) / sum(e.flops for e in products), 4),
        attention=[sum(attention), len(attention)],
        launches=sum(e.launches for e in events),
        error=error,
        seconds=round(seconds, 1),
    )


def in_dtype(inputs: Any, dtype: torch.dtype) -> Any:
    """The inputs, with floating-point tensors in this dtype."""
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, inputs)


def calls(case: Case) -> list[float]:
    """Python calls of a block in a call of the frozen model, with readers and captured."""
    numbers = []
    with no_device(), forcing("fused"), torch.no_grad():
        for readers in (True, False):
            runs = [_call(case, depth, readers) for depth in DEPTHS]
            for run in runs * 5:  # fills caches of plans and compiled kernels
                run()
            shallow, deep = map(calls_of, runs)
            numbers.append((deep - shallow) / (DEPTHS[1] - DEPTHS[0]))
    return numbers


def _call(case: Case, depth: int, readers: bool) -> Callable[[], Any]:
    model, example = case.build(depth).eval(), case.inputs(1)
    converted(model, case.inputs(2), readers)
    freeze(model)
    return (lambda: model(**example)) if isinstance(example, dict) else (lambda: model(example))


def row_of(case: Case) -> dict[str, Any]:
    """The row of one model; with the error if it fails."""
    row: dict[str, Any] = dict(model=case.name)
    try:
        row |= dict(readers=figures(case, True), captured=figures(case, False))
        row["calls"] = calls(case)
    # Any error: the row states it, and the other models are tried.
    except Exception as error:
        row["error"] = one_line(error)
    return row


def main(only: str, out: Path | None) -> None:
    """Compares the models, prints a line for each, and writes coverage-capture.json and .md."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    set_backend("torch")
    rows = []
    for case in CASES:
        if re.search(only, case.name):
            rows.append(row_of(case))
            print(*(f"{name}={value}" for name, value in rows[-1].items()), flush=True)
    if out is not None:
        text = as_json(origin(), rows=rows)
        write_text(out / "coverage-capture.json", text)
        write_text(out / "coverage-capture.md", capture_markdown(json.loads(text)))
