"""Bytes that a block saves for its backward pass: eager PyTorch, torch.compile, and converted. Nothing runs on a GPU.

    python -m benchmarks.saved --out benchmarks/results/saved.json

Counted from shapes for timm's models in bfloat16 training, as two blocks minus one. Eager PyTorch and ours: memory of
the tensors that autograd saves, without parameters, each once. torch.compile: results of the forward graph that
AOTAutograd's min-cut partitioner gives to the backward graph, which Inductor uses by default.
"""

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from fastvit_triton import optimize
from fastvit_triton.engine.values import without_weights
from fastvit_triton.expected.cuda_operators import as_on_cuda
from fastvit_triton.expected.trace import tracing
from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.kernels.launch import targeting
from fastvit_triton.measure.timing import saved_bytes

from .result_file import as_json, origin, write_text

COMMAND = "python -m benchmarks.saved --out benchmarks/results/saved.json"
MODELS = {"ViT-S/16": "vit_small_patch16_224", "ViT-B/16": "vit_base_patch16_224", "ViT-L/16": "vit_large_patch16_224"}
ARCH, IMAGES = "sm_90", 64


class _Counted(Exception):
    """Ends a compilation once its graphs are known."""


def saved_by_autograd(model: nn.Module, images: Tensor, arch: str | None) -> int:
    """Bytes that autograd saves in a call; with our kernels for an architecture."""
    with nullcontext() if arch is None else targeting(arch), using_backend("auto"), tracing(), as_on_cuda(None):
        return saved_bytes(lambda: model(images), list(model.parameters()))


def saved_by_compiler(model: nn.Module, images: Tensor) -> int:
    """Bytes that the forward graph of torch.compile gives to the backward graph, without its inputs."""
    found: list[int] = []

    def partition(*arguments: Any, **options: Any) -> None:
        forward, backward = min_cut_rematerialization_partition(*arguments, **options)
        found.append(_handed_over(forward.graph, backward.graph))
        raise _Counted

    backend = aot_autograd(fw_compiler=None, partition_fn=partition, decompositions=select_decomp_table())
    torch._dynamo.reset()
    try:
        torch.compile(model, backend=backend, fullgraph=True)(images)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        if not isinstance(error.inner_exception, _Counted):
            raise
    return found[0]


def _handed_over(forward: fx.Graph, backward: fx.Graph) -> int:
    read = {node.name for node in backward.find_nodes(op="placeholder")}
    (output,) = forward.find_nodes(op="output")
    saved = {n for n in output.all_input_nodes if n.name in read and n.op != "placeholder"}
    tensors = (n.meta["val"] for n in saved)
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


def of_block(name: str, count: Any) -> int:
    """What `count` gives for a model of two blocks, minus that of one."""
    one, two = (count(timm.create_model(name, depth=depth).bfloat16().train()) for depth in (1, 2))
    return two - one


def row(title: str) -> dict[str, object]:
    """Bytes of one block in each way."""
    images = torch.empty(IMAGES, 3, 224, 224, dtype=torch.bfloat16)

    def eager(model: nn.Module) -> int:
        return saved_by_autograd(without_weights(model), images, None)

    def ours(model: nn.Module) -> int:
        optimize(model)
        return saved_by_autograd(without_weights(model), images, ARCH)

    compiled = of_block(MODELS[title], lambda model: saved_by_compiler(model, images))
    return dict(model=title, name=MODELS[title], eager=of_block(MODELS[title], eager), compile=compiled,
                ours=of_block(MODELS[title], ours))  # fmt: skip


def main() -> None:
    """Counts and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file for the table")
    args = parser.parse_args()
    note = (
        f"bytes a block saves for its backward pass, bfloat16, {IMAGES} images, ours on {ARCH}; counted, not measured"
    )
    rows = [row(title) for title in MODELS]
    write_text(args.out, as_json(dict(note=note, **origin()), rows=rows))
    for one in rows:
        print(one)


if __name__ == "__main__":
    main()
