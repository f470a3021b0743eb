"""What a call would launch on a GPU that need not be here: operators and kernels, their bytes and flops. Nothing runs.

An operator of PyTorch that writes memory is one launch, or as many as LAUNCHES says that CUDA makes of it. It reads
each operand once and writes each result once; views and fresh memory are free, and caches, which may save bytes, are
left out. Our operators are entered: their Triton launches count, each moving every tensor that it is given once, and so
do PyTorch's operators between them. Flops are those of products and convolutions, 2 for a multiply-add.

Tensors are on the CPU, so that autocast and scaled_dot_product_attention see them, but their memory is never accessed:
results are memory that is only reserved. Inside `kernels.launch.targeting` they count as those of a GPU.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from ..kernels import launch, linear_backward, tile
from ..kernels.op import REGISTERED
from ..layers.replay.recorder import ALLOCATE, READERS

FLASH = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu")
# kernels that CUDA launches for an operator of PyTorch, where it is not one, from the sources of torch 2.13:
# flash_bwd_launch_template.h (Δ; dq, dk and dv; dq from its fp32 sums), layer_norm_kernel.cu (dx; dγ and dβ, up to
# 65,536 rows), Convolution.cpp (the bias is added to cuDNN's result, and its gradient is a sum)
LAUNCHES = {f"{name}_backward": 3 for name in FLASH} | {"native_layer_norm_backward": 2}

_storages = itertools.count()


@dataclass(frozen=True)
class Count:
    """What a call costs.

    Attributes:
        launches: kernels.
        nbytes: read and written.
        flops: of products.
    """

    launches: int = 0
    nbytes: int = 0
    flops: int = 0

    def __add__(self, other: "Count") -> "Count":
        """Both calls."""
        return Count(self.launches + other.launches, self.nbytes + other.nbytes, self.flops + other.flops)


@dataclass(frozen=True)
class Piece:
    """A tensor that is read or written: bytes `nbytes` of storage number `storage`, from element `offset` on."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Event:
    """An operator of PyTorch, or a launch of ours.

    Attributes:
        name: of the operator, "addmm", or of the kernel, "linear._fwd_kernel".
        op: name of our operator that it is part of, or "".
        ours: it is a launch of ours; what it reads and writes both stands under `reads`.
        launches: kernels.
        reads: its operands, each once.
        writes: its results.
        flops: of products.
    """

    name: str
    op: str
    ours: bool
    launches: int
    reads: tuple[Piece, ...]
    writes: tuple[Piece, ...]
    flops: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes read and written."""
        return sum(piece.nbytes for piece in (*self.reads, *self.writes))


@dataclass
class Trace:
    """What a call does.

    Attributes:
        events: operators and launches, in order.
        findings: where the host waits for a value or copies values of its own, which waits, too, and where one of our
            operators does not give what its fake says.
    """

    events: list[Event] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)

    @property
    def count(self) -> Count:
        """Sum over the events."""
        return sum((Count(e.launches, e.nbytes, e.flops) for e in self.events), Count())


class _Tracer(TorchDispatchMode):
    """Adds to a trace what runs, and runs views alone."""

    def __init__(self, enters: bool) -> None:
        super().__init__()
        self.trace, self.enters, self.op = Trace(), enters, ""

    def __torch_dispatch__(self, function: OpOverload, kinds: object, arguments: tuple = (), named: dict | None = None):
        named, name = named or {}, function.name().split("::")[1].split(".")[0]
        if function.namespace == "fastvit_triton":
            return self._enter(name, arguments)
        if name in READERS or (name == "index" and any(t is not None and t.dtype == torch.bool for t in arguments[1])):
            self.read(name)
        if name == "lift_fresh" and arguments[0].dim():  # torch.tensor; numbers that are assigned are filled in
            self.trace.findings.append(f"host copies values for {name}{f' in {self.op}' if self.op else ''}")
        if _is_composite(function):  # such as F.linear within one of our operators, where autograd is done
            with self:
                return function.decompose(*arguments, **named)
        if function.is_view or name in ALLOCATE or not _gives_tensors(function):
            return function(*arguments, **named)
        described = {k: torch.device("meta") if k == "device" and v is not None else v for k, v in named.items()}
        given, described = tree_map_only(Tensor, _described, (arguments, described))
        results = function(*given, **described)
        memory = {t.untyped_storage()._cdata for t in _tensors((given, described))}
        written = _tensors(results)
        if function._schema.is_mutable:
            outputs = _written_arguments(function, arguments, named, results)
        elif written and all(t.untyped_storage()._cdata in memory for t in written):  # such as _unsafe_view
            return function(*arguments, **named)
        else:
            outputs = tree_map_only(Tensor, reserved, results)
        flops = self._flops(function, arguments, named, outputs)
        self._add(name, _tensors((arguments, named)), _tensors(outputs), flops)
        return outputs

    def _enter(self, name: str, arguments: tuple) -> object:
        """Launches one of our operators, and compares what it returns with its fake."""
        body, fake = REGISTERED[name]
        expected = fake(*tree_map_only(Tensor, _described, arguments))
        flops = OUR_FLOPS[name](*arguments) if name in OUR_FLOPS else 0
        if not self.enters:
            outputs = tree_map_only(Tensor, reserved, expected)
            self._add(name, _tensors(arguments), _tensors(outputs), flops, ours=True)
            return outputs
        outer, self.op = self.op, name
        try:
            with self:
                outputs = body(*arguments)
        finally:
            self.op = outer
        self.trace.events.append(Event(name, name, True, 0, (), (), flops))
        found, wanted = ([_facts(t) for t in tree_leaves(part)] for part in (outputs, expected))
        if found != wanted:
            self.trace.findings.append(f"{name} gives {found}, its fake {wanted}")
        return outputs

    def read(self, name: str) -> None:
        """Notes that the host waits for a value, and raises RuntimeError."""
        self.trace.findings.append(f"host waits for {name}{f' in {self.op}' if self.op else ''}")
        raise RuntimeError(f"{name} reads a value: the tensors that are counted have none")

    def launched(self, kernel: object, grid: object, arguments: tuple, fixed: dict[str, object]) -> None:
        """Stands for `kernels.launch.run`."""
        tensors = {(t.data_ptr(), t.shape): t for t in _tensors(arguments)}
        module = kernel.fn.__module__.rsplit(".", 1)[-1].removesuffix("_backward")
        self._add(f"{module}.{kernel.fn.__name__}", tensors.values(), (), 0, ours=True)

    def _add(self, name: str, read: Iterable, written: Iterable, flops: int, ours: bool = False) -> None:
        reads, writes = (tuple(map(self._piece, tensors)) for tensors in (read, written))
        launches = 1 if ours else _launches(name, reads, writes)
        self.trace.events.append(Event(name, self.op, ours, launches, reads, writes, flops))

    def _piece(self, t: Tensor) -> Piece:
        storage = t.untyped_storage()  # one Python object as long as the storage lives
        if not hasattr(storage, "number"):
            storage.number = next(_storages)
        return Piece(storage.number, t.storage_offset(), tuple(t.shape), _nbytes(t))

    def _flops(self, function: OpOverload, arguments: tuple, named: dict, outputs: object) -> int:
        if self.op in OUR_FLOPS:
            return 0  # counted once for the whole operator
        packet = function.overloadpacket
        if packet in flop_registry:
            return flop_registry[packet](*arguments, **named, out_val=outputs)
        return _products(*arguments[:3]) if packet.__name__ in FLASH else 0


@contextlib.contextmanager
def tracing() -> Iterator[Trace]:
    """In this context nothing runs, and what would run is written down.

    Where Triton is not installed, each operator of ours is one launch. RuntimeError is raised where a value is read.
    """
    tracer = _Tracer(enters=tile.MISSING is None)
    stand_ins = [
        (launch, "run", tracer.launched),
        (linear_backward, "matmul_fp32", functools.partial(torch.mm, out_dtype=torch.float32)),  # as on NVIDIA GPUs
        (Tensor, "tolist", lambda *_: tracer.read("tolist")),
        (Tensor, "numpy", lambda *_, **__: tracer.read("numpy")),
    ]
    before = [owner.__dict__.get(name) for owner, name, _ in stand_ins]
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # one operator for a whole encoder layer, which has no description
    for stand_in in stand_ins:
        setattr(*stand_in)
    try:
        with tracer:
            yield tracer.trace
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for (owner, name, _), own in zip(stand_ins, before, strict=True):
            delattr(owner, name) if own is None else setattr(owner, name, own)


def _tensors(held: object) -> list[Tensor]:
    """The tensors in a structure, each once."""
    return list({id(t): t for t in tree_leaves(held) if isinstance(t, Tensor)}.values())


def _described(t: Tensor) -> Tensor:
    """The same sizes and strides on the meta device."""
    return t if t.is_meta else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def reserved(t: Tensor) -> Tensor:
    """An uninitialised CPU tensor with the same sizes and strides."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu")


@functools.cache
def _is_composite(function: OpOverload) -> bool:
    """It consists of other operators."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CompositeImplicitAutograd")


@functools.cache
def _gives_tensors(function: OpOverload) -> bool:
    return any("Tensor" in str(result.type) for result in function._schema.returns) or function._schema.is_mutable


def _written_arguments(function: OpOverload, arguments: tuple, named: dict, results: object) -> object:
    """The results of an operator that writes to its arguments: those arguments, and fresh memory for other results."""
    schema = function._schema
    given = dict(zip((a.name for a in schema.arguments), arguments, strict=False)) | named
    owners = {frozenset(a.alias_info.before_set): given.get(a.name) for a in schema.arguments if a.alias_info}
    several = results if isinstance(results, (tuple, list)) else (results,)
    pairs = zip(schema.returns, several, strict=False)
    outputs = tuple(
        owners[frozenset(r.alias_info.before_set)] if r.alias_info else tree_map_only(Tensor, reserved, fresh)
        for r, fresh in pairs
    )
    return outputs if isinstance(results, (tuple, list)) else outputs[0] if outputs else None


def _facts(t: object) -> object:
    """What our operator and its fake must agree on; axes of one element may have any stride."""
    if not isinstance(t, Tensor):
        return t
    return t.dtype, tuple(t.shape), tuple(step for n, step in zip(t.shape, t.stride(), strict=True) if n > 1)


def _launches(name: str, reads: tuple[Piece, ...], writes: tuple[Piece, ...]) -> int:
    """Kernels that CUDA launches for an operator of PyTorch."""
    if name == "convolution":
        return 1 + (len(reads) > 2)  # image, weight, and a bias that is added
    if name == "convolution_backward":
        return sum(bool(piece.shape) for piece in writes)
    return LAUNCHES.get(name, 1)


def _products(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Flops of q kᵀ and of the probabilities' product with v."""
    return 2 * q.numel() // q.shape[-1] * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def _nbytes(t: Tensor) -> int:
    """Bytes of the memory that a tensor stands on: an expanded axis is read once."""
    return t.element_size() * math.prod(n for n, step in zip(t.shape, t.stride(), strict=True) if step)


OUR_FLOPS = {
    "attention_fwd": lambda q, k, v, *_: _products(q, k, v),
    "linear_fwd": lambda x, weight, *_: 2 * x.numel() * len(weight),
    "mlp_fwd": lambda x, weight, *_: 4 * x.numel() * len(weight),  # both products, of x's width on both ends
    "patch_embed_fwd": lambda image, weight, *_: 2 * image.numel() * len(weight),  # patches cover the image
}
