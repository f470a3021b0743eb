"""What a trace of a call records: operators and launches, with the tensors that they read and write."""

from dataclasses import dataclass

FLASH = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
)


@dataclass(frozen=True)
class Count:
    """Cost of a call.

    Attributes:
        launches: number of kernels.
        nbytes: bytes read and written.
        flops: of matmuls and convolutions.
    """

    launches: int = 0
    nbytes: int = 0
    flops: int = 0

    def __add__(self, other: "Count") -> "Count":
        """The cost of both calls."""
        return Count(self.launches + other.launches, self.nbytes + other.nbytes, self.flops + other.flops)


@dataclass(frozen=True)
class Piece:
    """A tensor that is read or written: `nbytes` bytes of storage number `storage`, from element `offset`."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Event:
    """A PyTorch operator, or a launch of one of our kernels.

    Attributes:
        name: of the operator ("addmm") or the kernel ("linear._fwd_kernel").
        op: our operator that contains it, or "".
        ours: True for our kernels; `reads` then holds both inputs and outputs.
        launches: number of kernels.
        reads: its operands, each once.
        writes: its results.
        flops: of products.
        size: of a launch of ours, see `launched.size`.
        launch_flops: of a launch of ours, also where `flops` are counted for the whole operator.
        region: number of the region of a captured graph that it belongs to, see `convert.region`; 0 if to none.
    """

    name: str
    op: str
    ours: bool
    launches: int
    reads: tuple[Piece, ...]
    writes: tuple[Piece, ...]
    flops: int = 0
    size: tuple[int, int, int, int] = (0, 0, 0, 0)
    region: int = 0
    launch_flops: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes read and written."""
        return sum(piece.nbytes for piece in (*self.reads, *self.writes))
