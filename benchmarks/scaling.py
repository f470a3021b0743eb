"""Predicted cost of training on 8 and on 64 H200s: `python -m benchmarks.scaling`. Nothing here is measured.

A step computes 3 F B operations on each GPU (forward F, backward 2 F; B images per GPU) at an assumed fraction of peak,
and sends over the slowest link, per GPU and direction (Thakur et al., Optimization of Collective Communication
Operations in MPICH, 2005: a ring sends (P − 1)/P of a tensor for all-gather and for reduce-scatter, twice that for
all-reduce):

    DDP     all-reduce of float32 gradients             2 · 4 n · (P − 1)/P            n parameters
    FSDP2   all-gather of bfloat16 weights, twice       2 · 2 n · (P − 1)/P
            reduce-scatter of float32 gradients           + 4 n · (P − 1)/P
    TP      four all-reduces per block, of B T images   4 L · 2 · 2 B T N D · (T − 1)/T   T GPUs, Shoeybi et al.,
            and DDP of n/T between the groups                                         arXiv:1909.08053, section 3

DDP's communication overlaps with the backward pass, except for the last bucket. FSDP2's overlaps with both passes,
except for the first gather and the last scatter, of one block each. TP's does not: the next product depends on it.
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from fastvit_triton import create_model
from fastvit_triton.explain.costs import image_cost

from .result_file import write_text

PEAK = 989e12  # dense bfloat16, operations per second: NVIDIA H200 data sheet (1,979 with sparsity)
MFU = 0.40  # assumed fraction of the peak
MEMORY = 141e9  # bytes, same data sheet
NVLINK = 450e9  # bytes per second in one direction: NVLink 4, 900 GB/s in both directions, same data sheet
FABRIC = 50e9  # bytes per second in one direction: one 400 Gb/s adapter per GPU, as in a DGX H200
REACHED = 0.80  # assumed fraction of a link's bandwidth
NODE = 8
BUCKET = 25 * 2**20  # bytes: DistributedDataParallel's bucket_cap_mb
STATE = 16  # bytes per parameter: weight, gradient and AdamW's two moments, in float32

# model → images per GPU
MODELS = {
    "vit_base_patch16_224": 256,
    "vit_large_patch16_224": 128,
    "vit_huge_patch14_224": 64,
    "vit_giant_patch14_224": 64,
    "vit_gigantic_patch14_224": 32,
}
GPUS = (8, 64)
ENGINES = ("DDP", "FSDP2", "TP")

PAGE = f"""# Scaling plan

**Planned and predicted**: no run on more than one GPU was made. Computed from shapes by `python -m benchmarks.scaling`,
whose docstring has the formulas and their sources.

- Arithmetic at {MFU:.0%} of {PEAK / 1e12:.0f} TFLOP/s dense bfloat16 (NVIDIA H200 data sheet; the fraction is assumed).
- NVLink 4 in a node of 8: {NVLINK / 1e9:.0f} GB/s per direction (900 in both, same data sheet). Between nodes:
  one 400 Gb/s adapter per GPU, {FABRIC / 1e9:.0f} GB/s per direction. Links reach {REACHED:.0%} of either (assumed).
  DDP and FSDP2 run a ring over each of a node's {NODE} adapters, {FABRIC * NODE / 1e9:.0f} GB/s in total; a TP group
  uses one.
- Efficiency is arithmetic / step. Communication of DDP overlaps with the backward pass, that of FSDP2 with both
  passes, that of TP with neither. With fewer images per GPU than in the last column, the overlap is incomplete.
- Latency, stragglers and image loading are not counted, so the efficiency of small models is overestimated.
- A TP group has as many GPUs as the greatest common divisor of heads and 8 (ViT-B: 4), with DDP between groups.

| model | n, M | F, GFLOP | images per GPU | GPUs | engine | weights and optimiser per GPU, GB | \
sent per GPU and step, GB | arithmetic, ms | sending, ms | step, ms | images/s | efficiency | hidden from, images |
| --- | --: | --: | --: | --: | --- | --: | --: | --: | --: | --: | --: | --: | --: |
{{rows}}

Conclusions: the weights and optimiser states of all five models fit on one H200 ({MEMORY / 1e9:.0f} GB) with DDP. DDP
and FSDP2 send the same number of bytes (8 per parameter), so FSDP2 saves memory, not time, and TP only adds cost at
these sizes. The plan is `fastvit-triton train --parallel ddp`, and `fsdp` where memory runs out.
"""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model: n parameters, F operations per image, tokens, width, depth, heads."""

    name: str
    parameters: int
    flops: int
    tokens: int
    dim: int
    depth: int
    heads: int


@dataclass(frozen=True)
class StepEstimate:
    """Predicted training step on a number of GPUs; for TP, in groups of `width`.

    `sent` and `state` are bytes per GPU: communication, and weights with optimiser state. `compute`, `sending` and
    `exposed` (communication that does not overlap) are seconds. Below `hidden_from` images per GPU, more is exposed.
    """

    gpus: int
    engine: str
    width: int
    sent: float
    compute: float
    sending: float
    exposed: float
    state: float
    hidden_from: float = math.nan

    @property
    def efficiency(self) -> float:
        return self.compute / (self.compute + self.exposed)


def shape(name: str) -> Shape:
    """The sizes of a model by name; it is built without memory."""
    with torch.device("meta"):
        model = create_model(name)
    config = model.config
    patch, side = config.patch_size, config.img_size
    patch, side = (size if isinstance(size, int) else size[0] for size in (patch, side))
    cost = image_cost(
        side,
        patch,
        dim=config.embed_dim,
        depth=config.depth,
        num_heads=config.num_heads,
        head_dim=config.embed_dim // config.num_heads,
        hidden=int(config.embed_dim * config.mlp_ratio),
    )
    count = sum(parameter.numel() for parameter in model.parameters())
    flops = cost.linear_flops + cost.attention_flops
    return Shape(name, count, flops, cost.tokens, config.embed_dim, config.depth, config.num_heads)


def predict(model: Shape, images: int, gpus: int, engine: str) -> StepEstimate:
    """Predicts one training step.

    Args:
        model: from `shape`.
        images: images per GPU.
        gpus: 8, in one node, or a multiple of 8, in nodes of 8.
        engine: "DDP", "FSDP2" or "TP", which splits the heads within a node, with DDP between its groups.
    """
    compute = 3 * model.flops * images / (MFU * PEAK)
    rate = REACHED * (NVLINK if gpus <= NODE else min(NVLINK, FABRIC * NODE))  # one ring per adapter of a node
    ring, weights, width, state = (gpus - 1) / gpus, model.parameters, 1, STATE * model.parameters
    if engine == "DDP":
        sent = 2 * 4 * weights * ring
        sending = sent / rate
        exposed = max(sending - compute * 2 / 3, min(sent, 2 * BUCKET * ring) / rate)
        hidden = images * sending / (compute * 2 / 3)
    elif engine == "FSDP2":
        sent, state = (2 * 2 + 4) * weights * ring, state / gpus
        sending = sent / rate
        exposed = max(sending - compute, sending * (2 + 4) / 8 / model.depth)
        hidden = images * sending / compute
    else:
        width = math.gcd(model.heads, NODE)
        groups = gpus // width
        inside = 4 * model.depth * 2 * 2 * images * width * model.tokens * model.dim * (width - 1) / width
        between = 2 * 4 * weights / width * (groups - 1) / groups
        link = REACHED * (FABRIC if gpus > NODE else NVLINK)
        late = max(between / link - compute * 2 / 3, min(between, 2 * BUCKET) / link)
        sent, state = inside + between, state / width
        sending = inside / (REACHED * NVLINK) + between / link
        exposed, hidden = inside / (REACHED * NVLINK) + late, math.nan
    return StepEstimate(gpus, engine, width, sent, compute, sending, exposed, state, hidden)


def markdown() -> str:
    """The page: assumptions and table."""
    rows = []
    for name, images in MODELS.items():
        model = shape(name)
        for gpus in GPUS:
            for engine in ENGINES:
                step = predict(model, images, gpus, engine)
                total = step.compute + step.exposed
                label = f"TP {step.width} × DDP {gpus // step.width}" if engine == "TP" else engine
                cells = [name, f"{model.parameters / 1e6:.0f}", f"{model.flops / 1e9:.1f}", images, gpus, label]
                cells += [f"{step.state / 1e9:.2f}", f"{step.sent / 1e9:.2f}", f"{step.compute * 1e3:.1f}"]
                cells += [f"{step.sending * 1e3:.1f}", f"{total * 1e3:.1f}", f"{images * gpus / total:,.0f}"]
                cells += [f"{step.efficiency:.1%}", "" if engine == "TP" else math.ceil(step.hidden_from)]
                rows.append(f"| {' | '.join(map(str, cells))} |")
    return PAGE.format(rows="\n".join(rows))


def main(argv: list[str] | None = None) -> None:
    """Writes the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    default = Path(__file__).parent / "results" / "scaling.md"
    parser.add_argument("--out", type=Path, default=default, help="file (default: benchmarks/results/scaling.md)")
    write_text(parser.parse_args(argv).out, markdown())


if __name__ == "__main__":
    main()
