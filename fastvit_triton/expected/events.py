"""What a trace of a call records: operators and launches, with the tensors that they read and write."""

from dataclasses import dataclass

FLASH = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
)
# operator → index of its first matrix
MATMULS = {"addmm": 1, "addmm_": 1, "_addmm_activation": 1, "mm": 0, "bmm": 0, "baddbmm": 1}


@dataclass(frozen=True)
class Count:
    """Cost of a call."""

    launches: int = 0  # number of kernels
    nbytes: int = 0  # bytes read and written
    flops: int = 0  # of matmuls and convolutions

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
    """A PyTorch operator, or a launch of one of our kernels."""

    name: str  # of the operator ("addmm") or the kernel ("linear._fwd_kernel")
    op: str  # our operator that contains it, or ""
    ours: bool  # True for our kernels; `reads` then holds both inputs and outputs
    launches: int  # number of kernels
    reads: tuple[Piece, ...]  # its operands, each once
    writes: tuple[Piece, ...]  # its results
    flops: int = 0  # of products
    size: tuple[int, int, int, int] = (0, 0, 0, 0)  # of a launch of ours, see `launched.size`
    region: int = 0  # number of the region of a captured graph, see `convert.region`; 0 outside of all
    launch_flops: int = 0  # of a launch of ours, also where `flops` are counted for the whole operator

    @property
    def nbytes(self) -> int:
        """Bytes read and written."""
        return sum(piece.nbytes for piece in (*self.reads, *self.writes))
