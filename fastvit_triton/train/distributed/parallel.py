"""One model on several processes, by PyTorch's own engines: DDP keeps a copy on each, FSDP2 a part of every weight.

    torchrun --nproc-per-node 8 train.py

    with join() as world:
        model = fsdp(model.to(world.device), world)  # or ddp
        loss = world.mean_of(F.cross_entropy(model(images), targets), len(images))
        loss.backward()

Both engines average gradients over the P processes, each of which has seen B_p of the batch's B images. A loss that is
a mean over images therefore has the gradient of the whole batch, to rounding, whatever the B_p, when it is scaled:

    ∇ L = 1/P Σ_p ∇ (P B_p / B · L_p)
"""

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from random import Random

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .ranges import Count, Number, check_fields

CONTAINERS = ("blocks", "layers", "layer", "resblocks", "h")  # what models call the list of their blocks
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class World:
    """This process among its like. Alone, which is the default, every method returns what it is given.

    Attributes:
        rank: number of this process; 0 draws, logs and writes for all.
        size: how many there are.
        device: where this process computes.
    """

    rank: Number = 0
    size: Count = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def first(self) -> bool:
        """The process that speaks for all."""
        return self.rank == 0

    def part(self, values: Tensor) -> Tensor:
        """This process's part of the first axis, which may be empty; parts differ by one at most."""
        return values.tensor_split(self.size)[self.rank]

    def sum(self, values: Tensor) -> Tensor:
        """The sum over processes, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def mean_of(self, loss: Tensor, images: int) -> Tensor:
        """A mean over this process's images, scaled so that the engines' average is the mean over everybody's.

        Args:
            loss: a scalar.
            images: that it is the mean of; 0 where this process only keeps the others company.
        """
        if self.size == 1:
            return loss
        total = self.sum(torch.tensor(float(images), device=loss.device))
        return loss * (images * self.size / total)

    def least(self, count: int) -> int:
        """The smallest of everybody's counts."""
        if self.size == 1:
            return count
        box = torch.tensor(count, device=self.device)
        dist.all_reduce(box, dist.ReduceOp.MIN)
        return int(box)

    @contextmanager
    def own(self, key: int) -> Iterator[None]:
        """Random numbers of this process's own, for what its images go through, which `key` fixes.

        The generator outside, which deals the data, stays the same on all processes however many images each has.
        """
        if self.size == 1:
            yield
            return
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(Random(f"{key} {self.rank}").getrandbits(62))
            yield

    def wait(self) -> None:
        """Until everybody is here."""
        if self.size > 1:
            dist.barrier()

    def tell(self, value: object) -> object:
        """The first process's value, on all."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, device=self.device if self.device.type == "cuda" else None)
        return box[0]

    def gather(self, value: object) -> list:
        """Everybody's values, by rank, on all."""
        if self.size == 1:
            return [value]
        box = [None] * self.size
        dist.all_gather_object(box, value)
        return box


@contextmanager
def join(device: str = "auto") -> Iterator[World]:
    """Joins the processes that torchrun started, one to a GPU, or any number on the CPU, and leaves them at the end.

    Args:
        device: "cuda", "cpu", or "auto", which takes the GPUs if there are any.

    Raises:
        ValueError: torchrun did not start this process, or a process has no GPU to itself.
        OSError: another process has stopped.
    """
    if lacking := [name for name in TORCHRUN if name not in os.environ]:
        raise ValueError(f"several processes are started by torchrun, which sets {', '.join(lacking)}; start with it")
    rank, size, local = (int(os.environ[name]) for name in TORCHRUN[:3])
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if kind not in ("cuda", "cpu"):
        raise ValueError(f"device is {device!r}; several processes train on 'cuda' or 'cpu'")
    if kind == "cuda" and local >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ValueError(f"process {local} of this machine has no GPU, it has {count}; start {count} per machine")
    here = torch.device("cuda", local) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(here)
    bound = {"device_id": here} if kind == "cuda" else {}  # collectives know their GPU from the first call on
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", rank=rank, world_size=size, **bound)
    try:
        yield World(rank, size, here)
        dist.barrier()  # nobody leaves while another still sends
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise OSError("the other processes are gone; the first of them to stop says why") from error
        raise
    finally:
        gc.collect()  # engines that are garbage hold the group's threads, which must end before the process does
        dist.destroy_process_group()


def ddp(model: nn.Module, world: World, unused: bool = False) -> nn.Module:
    """A copy of the model on every process, which begins as the first one's; gradients are averaged as they appear.

    Source: Li et al., PyTorch Distributed, arXiv:2006.15704. Compile the model before (`model.compile(…)`), and make
    the optimiser in any order. The module inside keeps its names; save `wrapped.module`.

    Args:
        model: on `world.device`, with at least one trainable parameter.
        world: from `join`.
        unused: some parameters take no part in some steps.
    """
    devices = [world.device.index] if world.device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(
        model, device_ids=devices, gradient_as_bucket_view=True, find_unused_parameters=unused
    )


def fsdp(
    model: nn.Module,
    world: World,
    *,
    blocks: Sequence[nn.Module] | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Every weight, gradient and optimiser state in P parts; a block's weights are whole only while it computes.

    FSDP2, `torch.distributed.fsdp.fully_shard`, in place, block by block (Zhao et al., arXiv:2304.11277; ZeRO stage 3,
    arXiv:1910.02054). Begins with the first process's weights. Make the optimiser afterwards: parameters are new.
    Compile the blocks before (`block.compile(…)`). Names stay; `train.sharded` saves.

    Args:
        model: on `world.device`.
        world: from `join`.
        blocks: modules whose weights travel together; None finds them.
        dtype: compute with weights of this dtype, such as torch.bfloat16, in place of autocast; parameters, reduction
            of gradients, and outputs stay float32.

    Returns:
        The same module.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    blocks = find_blocks(model) if blocks is None else blocks
    with torch.no_grad():
        for tensor in chain(model.parameters(), model.buffers()):
            dist.broadcast(tensor, 0)
    inner = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype and torch.float32)
    outer = MixedPrecisionPolicy(**vars(inner) | {"output_dtype": dtype and torch.float32})
    mesh = init_device_mesh(world.device.type, (world.size,))
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=inner)
    return fully_shard(model, mesh=mesh, mp_policy=outer)


@contextmanager
def reducing(model: nn.Module, now: bool) -> Iterator[None]:
    """Whether gradients of the backward pass inside are averaged over processes now, or kept until they are.

    Args:
        model: from `ddp`, `fsdp`, or plain.
        now: False for all but the last part of a batch.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel) and not now:
        with model.no_sync():
            yield
        return
    if hasattr(model, "set_requires_gradient_sync"):  # FSDP2
        model.set_requires_gradient_sync(now)
    yield


def checkpoint_blocks(model: nn.Module, blocks: Sequence[nn.Module] | None = None) -> nn.Module:
    """Recomputes each block in the backward pass instead of keeping its activations (Chen et al., arXiv:1604.06174).

    In place, for any model; call it before `ddp` or `fsdp`. Parameters keep their names.

    Args:
        model: any module.
        blocks: what to recompute; None finds them.

    Returns:
        The same module.
    """
    from torch.distributed._composable import checkpoint

    for block in find_blocks(model) if blocks is None else blocks:
        checkpoint(block)
    return model


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The Transformer blocks: the entries of each outermost list called blocks, layers, layer, resblocks or h.

    Raises:
        ValueError: there is no such list.
    """
    found, inside = [], ()
    for name, module in model.named_modules():
        container = isinstance(module, (nn.ModuleList, nn.Sequential)) and name.rpartition(".")[2] in CONTAINERS
        if container and not name.startswith(inside):
            inside = (*inside, f"{name}.")
            found += module
    # An entry that is itself a list, as in vit-pytorch, is never called: its parts are.
    found = [part for block in found for part in (block if isinstance(block, nn.ModuleList) else [block])]
    if not found:
        raise ValueError(f"the model has no list of blocks called {', '.join(CONTAINERS)}; give blocks=")
    return found
