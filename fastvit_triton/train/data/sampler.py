"""Which image comes when."""

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from .ranges import Count, Number, checked


class RepeatedAugmentation(Sampler[int]):
    """Each image several times in a row, dealt to the processes in turn: batches that hold one image's several looks.

    Berman et al., MultiGrain, arXiv:1902.05509, section 3.2 and Hoffer et al., arXiv:1901.09335; the numbers are those
    of facebookresearch/deit, samplers.py: the epoch's order is repeated, dealt out, and cut to one epoch's length, a
    multiple of 256 images, so an epoch sees about a third of the images three times. Set `epoch` before each epoch.

    Args:
        count: images in the data set.
        repeats: looks at each image.
        rank: this process.
        world_size: processes.

    Raises:
        ValueError: there is nothing to draw, or the rank is not among the processes.
    """

    @checked
    def __init__(self, count: Count, repeats: Count = 3, rank: Number = 0, world_size: Count = 1) -> None:
        if rank >= world_size:
            raise ValueError(f"rank is {rank} of {world_size} processes; it must be below them")
        self.count, self.repeats, self.rank, self.world_size, self.epoch = count, repeats, rank, world_size, 0

    def __len__(self) -> int:
        if self.count < 256:  # timm's rule for small sets, where DeiT's would leave nothing
            return -(-self.count // self.world_size)
        return self.count // 256 * 256 // self.world_size

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(self.epoch))
        order = order.repeat_interleave(self.repeats)
        mine = torch.arange(self.rank, self.rank + len(self) * self.world_size, self.world_size)
        return iter(order[mine % order.shape[0]].tolist())
