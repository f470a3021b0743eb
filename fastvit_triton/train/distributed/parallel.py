"""DDP, FSDP2 and activation checkpointing for any model, through PyTorch's own implementations."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn

from . import World

CONTAINERS = ("blocks", "layers", "layer", "resblocks", "h")  # attribute names of block lists in common models


def ddp(model: nn.Module, world: World, find_unused_parameters: bool = False) -> nn.Module:
    """Wraps a model in DistributedDataParallel: a full copy per rank, gradients averaged during the backward pass.

    Weights start as rank 0's. Source: Li et al., PyTorch Distributed, arXiv:2006.15704. Call `model.compile(…)` before
    wrapping; the optimiser may be created before or after. The wrapped module is `.module`: save that.

    Args:
        model: on `world.device`, with at least one trainable parameter.
        world: from `process_group`.
        find_unused_parameters: required if some parameters get no gradient in some steps.
    """
    devices = [world.device.index] if world.device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(
        model, device_ids=devices, gradient_as_bucket_view=True, find_unused_parameters=find_unused_parameters
    )


def fsdp(
    model: nn.Module,
    world: World,
    *,
    blocks: Sequence[nn.Module] | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Shards weights, gradients and optimiser state over all ranks with FSDP2; a block is gathered when it runs.

    Applies `torch.distributed.fsdp.fully_shard` in place, block by block (Zhao et al., arXiv:2304.11277; ZeRO stage 3,
    arXiv:1910.02054). Weights start as rank 0's. Create the optimiser afterwards: parameters are replaced. Call
    `block.compile(…)` before. Parameter names do not change; `train.distributed.checkpoint` saves the shards.

    Args:
        model: on `world.device`.
        world: from `process_group`.
        blocks: modules, each gathered as a unit; None means `find_blocks(model)`.
        dtype: of the gathered weights and activations, such as torch.bfloat16, instead of autocast; parameters,
            gradient reduction and outputs stay float32.

    Returns:
        The same module.

    Raises:
        ValueError: `blocks` is None and the model has no list of blocks.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    blocks = find_blocks(model) if blocks is None else blocks
    with torch.no_grad():
        for tensor in chain(model.parameters(), model.buffers()):
            dist.broadcast(tensor, 0)
    inner = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype and torch.float32)
    outer = MixedPrecisionPolicy(**vars(inner) | {"output_dtype": dtype and torch.float32})
    mesh = init_device_mesh(world.device.type, (world.world_size,))
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=inner)
    fully_shard(model, mesh=mesh, mp_policy=outer)
    return model


@contextmanager
def gradient_sync(model: nn.Module, enabled: bool) -> Iterator[None]:
    """Enables or disables the averaging of gradients over ranks for the backward passes inside."""
    if isinstance(model, nn.parallel.DistributedDataParallel) and not enabled:
        with model.no_sync():
            yield
        return
    if (switch := getattr(model, "set_requires_gradient_sync", None)) is not None:  # FSDP2
        switch(enabled)
    yield


def checkpoint_blocks(model: nn.Module, blocks: Sequence[nn.Module] | None = None) -> nn.Module:
    """Activation checkpointing: recomputes each block in the backward pass (Chen et al., arXiv:1604.06174).

    In place, for any model; call it before `ddp` or `fsdp`. Parameter names do not change.

    Args:
        model: any module.
        blocks: to recompute; None means `find_blocks(model)`.

    Returns:
        The same module.

    Raises:
        ValueError: `blocks` is None and the model has no list of blocks.
    """
    from torch.distributed._composable import checkpoint

    for block in find_blocks(model) if blocks is None else blocks:
        checkpoint(block)
    return model


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The Transformer blocks: entries of each outermost list named blocks, layers, layer, resblocks or h.

    Raises:
        ValueError: there is no such list.
    """
    blocks: list[nn.Module] = []
    prefixes: tuple[str, ...] = ()
    for name, module in model.named_modules():
        is_container = isinstance(module, (nn.ModuleList, nn.Sequential)) and name.rpartition(".")[2] in CONTAINERS
        if is_container and not name.startswith(prefixes):
            prefixes = (*prefixes, f"{name}.")
            blocks += module
    # vit-pytorch nests lists: only the entries of the inner list are called.
    blocks = [entry for block in blocks for entry in (block if isinstance(block, nn.ModuleList) else [block])]
    if not blocks:
        raise ValueError(f"the model has no list of blocks called {', '.join(CONTAINERS)}; give blocks=")
    return blocks
