"""Predicted cost of training on 8 and on 64 H200s: `python -m benchmarks.scaling`. Nothing here is measured.

A step computes 3 F B operations on each GPU (forward F, backward 2 F; B images per GPU) at a stated share of the peak,
and sends over the slowest link, per GPU and one way (Thakur et al., Optimization of collective communication operations
in MPICH, 2005: a ring sends (P − 1)/P of a tensor for all-gather and for reduce-scatter, twice that for all-reduce):

    DDP     all-reduce of float32 gradients             2 · 4 n · (P − 1)/P            n parameters
    FSDP2   all-gather of bfloat16 weights, twice       2 · 2 n · (P − 1)/P
            reduce-scatter of float32 gradients           + 4 n · (P − 1)/P
    TP      four all-reduces a block, of B T images     4 L · 2 · 2 B T N D · (T − 1)/T   T GPUs, Shoeybi et al.,
            and DDP of n/T between the groups                                         arXiv:1909.08053, section 3

DDP's communication overlaps with the backward pass, except for the last bucket, and FSDP2's with both passes, except
for the first gather and the last scatter, of one block each. TP's does not overlap: the next product depends on it.
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from fastvit_triton import create_model
from fastvit_triton.explain.costs import image_cost

PEAK = 989e12  # dense bfloat16, operations a second: NVIDIA H200 datasheet, 1,979 with sparsity
MFU = 0.40  # assumed share of it
MEMORY = 141e9  # bytes, the same datasheet
NVLINK = 450e9  # bytes a second one way: NVLink 4, 900 GB/s both ways together, the same datasheet
FABRIC = 50e9  # bytes a second one way: one 400 Gb/s adapter a GPU, as in a DGX H200
REACHED = 0.80  # assumed share of a link's rate
NODE = 8
BUCKET = 25 * 2**20  # bytes: DistributedDataParallel's bucket_cap_mb
STATE = 16  # bytes a parameter: weight, gradient and AdamW's two, float32

# model → images a GPU
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

**Planned and predicted**: no run on more than one GPU was made. Written by `python -m benchmarks.scaling` from shapes;
its docstring has the formulas and their sources.

- Arithmetic at {MFU:.0%} of {PEAK / 1e12:.0f} TFLOP/s dense bfloat16 (NVIDIA H200 datasheet; the share is assumed).
- NVLink 4 in a node of 8: {NVLINK / 1e9:.0f} GB/s one way (900 both ways, the same datasheet). Between nodes: one
  400 Gb/s adapter a GPU, {FABRIC / 1e9:.0f} GB/s one way. {REACHED:.0%} of either is reached (assumed). DDP and FSDP2
  run a ring over each of a node's {NODE} adapters, {FABRIC * NODE / 1e9:.0f} GB/s together; TP's groups have one each.
- Efficiency is arithmetic / step. Communication of DDP overlaps with the backward pass, that of FSDP2 with both
  passes, that of TP with none. With fewer images a GPU than in the last column it does not overlap completely.
- Latency, stragglers and reading images are not counted, so the efficiency of small models is overestimated.
- TP is as wide as the largest common divisor of heads and 8 (ViT-B: 4), with DDP between its groups.

| model | n, M | F, GFLOP | images a GPU | GPUs | engine | weights and optimiser a GPU, GB | \
sent a GPU and step, GB | arithmetic, ms | sending, ms | step, ms | images a second | efficiency | hidden from, images |
| --- | --: | --: | --: | --: | --- | --: | --: | --: | --: | --: | --: | --: | --: |
{{rows}}

What follows from it: all five fit one H200 ({MEMORY / 1e9:.0f} GB) with DDP as far as weights and optimiser go, and
DDP and FSDP2 send the same bytes (8 a parameter), so FSDP2 buys memory, not speed, and TP only costs at these sizes.
`fastvit-triton train --parallel ddp` is the plan; `fsdp` where it runs out of memory.
"""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model: n parameters, F operations an image, tokens, width, depth, heads."""

    name: str
    parameters: int
    flops: int
    tokens: int
    dim: int
    depth: int
    heads: int


@dataclass(frozen=True)
class StepEstimate:
    """A predicted step of so many GPUs, in groups of `width` for TP.

    `sent` and `state` are bytes: communication of a GPU, and its weights and optimiser state. `compute`, `sending` and
    `exposed`, the communication that does not overlap, are seconds. Below `hidden_from` images a GPU more is exposed.
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
    """One training step.

    Args:
        model: from `shape`.
        images: a GPU.
        gpus: 8 in one node, or nodes of 8.
        engine: "DDP", "FSDP2" or "TP", which is as wide as the heads allow in a node, with DDP around it.
    """
    compute = 3 * model.flops * images / (MFU * PEAK)
    rate = REACHED * (NVLINK if gpus <= NODE else min(NVLINK, FABRIC * NODE))  # a ring for each adapter of a node
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
    parser.parse_args(argv).out.write_text(markdown(), encoding="utf-8")


if __name__ == "__main__":
    main()
