"""Distributed training: `World` is this rank with its collectives, `process_group` starts the process group.

torchrun --nproc-per-node 8 train.py

with process_group() as world:
    model = fsdp(model.to(world.device), world)  # or ddp
    loss = world.rescale_mean(F.cross_entropy(model(images), targets), len(images))
    loss.backward()
"""

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from random import Random
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

from ..batch import divide
from ..ranges import NonNegativeInt, Positive, PositiveInt, check_fields, checked

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class World:
    """This rank in its process group. With world size 1, the default, every method is a no-op.

    All ranks must make each collective call: the `all_*` methods, `broadcast`, `barrier` and `rescale_mean`.

    Attributes:
        rank: rank of this process; rank 0 logs and writes files.
        world_size: number of processes.
        device: device of this process.
    """

    rank: NonNegativeInt = 0
    world_size: PositiveInt = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def is_main(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    def shard(self, values: Any) -> Any:
        """This rank's slice of a tensor [B, ...] → [B_p, ...] or a list; sizes differ by at most one and may be 0."""
        return divide(values, self.world_size)[self.rank]

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def all_reduce_min(self, count: int) -> int:
        """Minimum over ranks."""
        if self.world_size == 1:
            return count
        box = torch.tensor(count, device=self.device)
        dist.all_reduce(box, dist.ReduceOp.MIN)
        return int(box)

    def rescale_mean(self, loss: Tensor, images: int) -> Tensor:
        """Rescales a local mean so that DDP/FSDP averaging gives the global mean.

        DDP and FSDP average gradients over P ranks; rank p computes the mean loss L_p of B_p of the batch's B images.
        With this scaling the average is the gradient of the whole batch, up to rounding and for any B_p:

            ∇ L = 1/P Σ_p ∇ (P B_p / B · L_p)

        Args:
            loss: L_p, a scalar.
            images: B_p; 0 if this rank has none.
        """
        if self.world_size == 1:
            return loss
        total = self.all_reduce_sum(torch.tensor(float(images), device=loss.device))
        return loss * (images * self.world_size / total)

    @contextmanager
    def rank_rng(self, key: int) -> Iterator[None]:
        """Seeds the global generator with `key` and the rank inside the `with`, and restores it afterwards.

        This keeps the generator that draws the data equal on all ranks, however many numbers the model draws.
        """
        if self.world_size == 1:
            yield
            return
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(Random(f"{key} {self.rank}").getrandbits(62))
            yield

    def barrier(self) -> None:
        """Waits until all ranks have called it."""
        if self.world_size > 1:
            dist.barrier()

    def broadcast(self, value: object) -> Any:
        """Rank 0's value, a picklable object, on all ranks."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, device=self.device if self.device.type == "cuda" else None)
        return box[0]

    def all_gather(self, value: object) -> list:
        """The values of all ranks, picklable objects, in rank order."""
        if self.world_size == 1:
            return [value]
        box = [None] * self.world_size
        dist.all_gather_object(box, value)
        return box


@checked
@contextmanager
def process_group(device: str = "auto", timeout: Positive = 10.0) -> Iterator[World]:
    """Joins the process group that torchrun started, one process per GPU or any number on the CPU; destroys it at exit.

    Args:
        device: "cuda", "cpu", or "auto": GPUs if there are any.
        timeout: minutes that a collective waits for another process.

    Raises:
        ValueError: torchrun did not start this process, or there are fewer GPUs than processes on this machine.
        OSError: another process terminated, or did not answer within the timeout.
    """
    if missing := [name for name in TORCHRUN if name not in os.environ]:
        raise ValueError(
            f"training on several processes needs torchrun, which sets {', '.join(missing)}; start the command with it"
        )
    rank, world_size, local_rank = (int(os.environ[name]) for name in TORCHRUN[:3])
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if kind not in ("cuda", "cpu"):
        raise ValueError(f"device is {device!r}; several processes train on 'cuda' or 'cpu'")
    if kind == "cuda" and local_rank >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ValueError(
            f"local rank {local_rank} has no GPU, because this machine has {count}; start {count} processes per machine"
        )
    rank_device = torch.device("cuda", local_rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(rank_device)
    wait = timedelta(minutes=timeout)
    # binds the collectives to this GPU from the first call on
    bound: dict[str, Any] = {"device_id": rank_device} if kind == "cuda" else {}
    backend = "nccl" if kind == "cuda" else "gloo"
    try:
        store = next(dist.rendezvous("env://", rank, world_size, timeout=wait))[0]
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = _fresh_store(store, rank, world_size, wait)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=wait, **bound)
        yield World(rank, world_size, rank_device)
        dist.barrier()  # no rank exits while another is still sending
    except RuntimeError as error:
        if "timed out" in str(error).lower() or "wait timeout" in str(error):
            raise OSError(f"another process did not answer for {timeout:g} minutes; see --timeout") from error
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise OSError(
                "the other processes were lost; the log of the first one that stopped has the cause"
            ) from error
        raise
    finally:
        gc.collect()  # unreferenced DDP/FSDP wrappers hold threads of the group, which must end before the process does
        if dist.is_initialized():
            dist.destroy_process_group()


def _fresh_store(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The part of torchrun's store that belongs to this start of the ranks.

    With `--max-restarts`, ranks that are started again find the addresses of the killed ones in the store, and would
    wait for them. Rank 0 draws a prefix, and tells it to each rank under a key that this start of that rank drew.
    """
    key = uuid4().hex
    end = time.monotonic() + timeout.total_seconds()
    if rank:
        store.set(f"start/{rank}", key)
        prefix = store.get(f"prefix/{key}").decode()
        store.set(f"{prefix}/{rank}", "")
        return dist.PrefixStore(prefix, store)
    missing = list(range(1, world_size))
    while missing and time.monotonic() < end:
        for other in missing:
            if store.check([f"start/{other}"]):  # may be an earlier start of that rank, which does not answer
                store.set(f"prefix/{store.get(f'start/{other}').decode()}", key)
        time.sleep(0.02)
        missing = [other for other in missing if not store.check([f"{key}/{other}"])]
    if missing:
        raise OSError(f"rank {missing[0]} did not start within {timeout}; see --timeout")
    return dist.PrefixStore(key, store)
