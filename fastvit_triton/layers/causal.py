"""The cache of keys and values of causal attention, for sampling one position after another."""

from torch import Tensor


class KeyValues:
    """Keys and values of the positions that one layer has computed, in memory for all positions.

    Args:
        length: N, the number of positions.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.count = 0  # positions that are stored
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores keys and values [B, H, n, d] of the next n positions; returns those of all positions so far."""
        if self.keys is None or self.values is None:
            self.keys = k.new_empty(*k.shape[:2], self.length, k.shape[3])
            self.values = v.new_empty(*v.shape[:2], self.length, v.shape[3])
        end = self.count + k.shape[2]
        self.keys[:, :, self.count : end] = k
        self.values[:, :, self.count : end] = v
        self.count = end
        return self.keys[:, :, :end], self.values[:, :, :end]
