"""What all batches have in common; samplers: repeated augmentation, and the seeded batches of an image folder."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Sampler

from ..distributed import World
from ..ranges import NonNegativeInt, PositiveInt, checked
from .findings import Findings


class RepeatedAugmentation(Sampler[int]):
    """Repeated augmentation: each image several times in a row, distributed over the ranks in turn.

    Berman et al., MultiGrain, arXiv:1902.05509, section 3.2; Hoffer et al., arXiv:1901.09335. Indices equal those of
    facebookresearch/deit, samplers.py: the epoch's order is repeated, distributed, and cut to the length of one epoch
    rounded down to a multiple of 256 images, so about a third of the images occur, three times each. Set `epoch` before
    each epoch.

    Args:
        count: images in the data set.
        repeats: copies of each image.
        rank: rank of this process.
        world_size: number of processes.

    Raises:
        ValueError: `count` is 0, or the rank is not below the world size.
    """

    @checked
    def __init__(
        self, count: PositiveInt, repeats: PositiveInt = 3, rank: NonNegativeInt = 0, world_size: PositiveInt = 1
    ) -> None:
        if rank >= world_size:
            raise ValueError(f"rank is {rank}, but there are {world_size} processes; use 0 to {world_size - 1}")
        self.count = count
        self.repeats = repeats
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0

    def __len__(self) -> int:
        if self.count < 256:  # timm's rule for small data sets; DeiT's rule returns 0 for them
            return -(-self.count // self.world_size)
        return self.count // 256 * 256 // self.world_size

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(self.epoch))
        order = order.repeat_interleave(self.repeats)
        mine = torch.arange(self.rank, self.rank + len(self) * self.world_size, self.world_size)
        return iter(order[mine % order.shape[0]].tolist())


class Batches:
    """Batches for `fit` and `evaluate`: images [B, C, H, W] and class numbers [B]."""

    per_rank = False  # each rank gets its own part of a batch; if False all ranks get the whole batch
    fewest = 1  # a last batch of fewer images, after others, is left out
    targets: Any  # class numbers of all images

    def __init__(self, findings: Findings | None = None) -> None:
        self.findings = findings or Findings()  # what the reader left out
        self.bad: dict[Path, str] = {}  # skipped files, with the reason
        self.indices: list[int] = []  # of the images in the last batch

    def __len__(self) -> int:
        raise NotImplementedError

    def __iter__(self) -> Iterator[tuple[Tensor, Any]]:
        return self.iter_from(0)

    def iter_from(self, count: int) -> Iterator[tuple[Tensor, Any]]:
        """Iterates without the first `count` batches, with the same random draws as a whole epoch."""
        raise NotImplementedError

    def leave_out_single(self) -> None:
        """Leaves a last batch of one image out of each epoch: BatchNorm has no statistics of it."""
        self.fewest = 2

    def display_image(self, i: int) -> Tensor:
        """Image i for display, [C, H, W] in [0, 1]."""
        raise NotImplementedError

    def digest(self) -> str:
        """The number of images and a checksum, which changes with the data."""
        raise NotImplementedError


class SampleKey(NamedTuple):
    """Index and crop seed of one image."""

    index: int  # type: ignore[assignment]  # hides tuple.index
    seed: int | None  # seed of its random crop; None takes the centre crop


def batch_count(images: int, batch_size: int, fewest: int) -> int:
    """Number of batches in an epoch; a last one of fewer than `fewest` images, after others, does not count."""
    full, rest = divmod(images, batch_size)
    return full + (0 < rest and (rest >= fewest or not full))


class SeededBatches(Sampler[list[SampleKey]]):
    """Batches of image indices, each with its own augmentation seed, drawn when an epoch starts.

    All ranks draw the same epoch, and each yields its slice of every batch.
    """

    fewest = Batches.fewest

    def __init__(
        self, count: int, order: Callable[[], Tensor] | None, repeats: int, batch_size: int, world: World
    ) -> None:
        self.count = count
        self.order = order
        self.batch_size = batch_size
        self.world = world
        self.repeated = RepeatedAugmentation(count, repeats) if repeats > 1 else None
        self.keys: list[SampleKey] = []

    def __len__(self) -> int:
        return batch_count(self.count if self.repeated is None else len(self.repeated), self.batch_size, self.fewest)

    def start_epoch(self, skip: int) -> None:
        """Draws an epoch from PyTorch's global generator and drops its first `skip` batches."""
        if self.order is None:
            self.keys = [SampleKey(i, None) for i in range(self.count)]
        else:
            if self.repeated is None:
                order = self.order().tolist()
            else:
                self.repeated.epoch = int(torch.randint(2**62, ()).item())
                order = list(self.repeated)
            seeds = torch.randint(2**62, (len(order),)).tolist()
            self.keys = list(map(SampleKey, order, seeds))
        self.keys = self.keys[skip * self.batch_size : len(self) * self.batch_size]

    def __iter__(self) -> Iterator[list[SampleKey]]:
        for start in range(0, len(self.keys), self.batch_size):
            batch = self.keys[start : start + self.batch_size]
            yield [batch[i] for i in self.world.shard(torch.arange(len(batch))).tolist()]
