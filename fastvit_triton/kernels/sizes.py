"""Sizes of residual branches and of attention, by which ways are chosen and work is counted."""

from typing import NamedTuple

WAYS = ("plain", "mixed", "fused")  # of a block; ties are resolved in this order
LONG = 640  # keys of a query from which attention is most of a block


class Branch(NamedTuple):
    """Sizes of a residual branch that determine its cost."""

    kind: str  # "attention", "window_attention", "reduced_attention", "mlp" or "depthwise_mlp"
    images: int  # B
    tokens: int  # N of an image
    channels: int  # C of the residual stream
    width: int  # outputs of the first matmul: queries, keys and values, or the hidden layer (twice if gated)
    inner: int  # inputs of the last matmul
    heads: int = 0  # H of attention, else 0
    scales: int = 0  # number of LayerScale and stochastic depth present (0 to 2)
    itemsize: int = 2  # bytes per value
    keys: int = 0  # of attention in windows: tokens of a window; of reduced attention: tokens per key; else 0
    # 1 if scores have a bias by row plus one by column, whose sum PyTorch stores for every key; else 0
    decomposed: int = 0
    wide: int = 0  # 1 if the residual is float32 and the matmuls are 16-bit, as under autocast; else 0
    layer_scale: int = 0  # 1 if one of the scales is LayerScale, else 0

    @property
    def stream(self) -> int:
        """Size of a value of the residual, in values of the matmuls."""
        return 2 if self.wide else 1

    @property
    def attends(self) -> bool:
        """True for the kinds of attention."""
        return self.kind.endswith("attention")

    @property
    def keys_per_query(self) -> int:
        """Number of keys of each query."""
        if self.kind == "reduced_attention":
            return max(self.tokens // self.keys, 1)
        return min(self.keys or self.tokens, self.tokens)

    @property
    def name(self) -> str:
        """Name of its shape in tables of measurements."""
        heads = f" H={self.heads}" if self.heads else ""
        heads += f" K={self.keys}" if self.keys else ""
        heads += " decomposed bias" * self.decomposed + " layer scale" * self.layer_scale
        wide = " fp32" if self.itemsize == 4 else " autocast" if self.wide else ""
        return f"{self.kind} C={self.channels} F={self.width}{heads} N={self.tokens} B={self.images}{wide}"

    @property
    def rounded(self) -> "Branch":
        """A copy with images and tokens rounded up to powers of two, so that one measurement covers many sizes."""
        tokens, images = (1 << max(n - 1, 0).bit_length() for n in (self.tokens, self.images))
        return self._replace(tokens=tokens, images=images)


def kind_of_block(branches: tuple[Branch, ...]) -> str:
    """What the branches of a block are, as in the tables of choices: "attention + mlp, gated, long"."""
    gated = any(not b.attends and b.width != b.inner for b in branches)
    long = max((b.keys_per_query for b in branches if b.attends), default=0) > LONG
    facts = ["gated"] * gated + ["decomposed bias"] * any(b.decomposed for b in branches) + ["long"] * long
    return ", ".join([" + ".join(b.kind for b in branches), *facts])


def seen_pairs(queries: int, keys: int, causal: bool) -> int:
    """Pairs of a query and a key that it sees; if causal, query m sees keys n ≤ m + keys − queries."""
    if not causal:
        return queries * keys
    rows = min(queries, keys)  # the last ones, which see a key; each sees one more than the one before
    return rows * keys - rows * (rows - 1) // 2
