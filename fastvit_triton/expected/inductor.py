"""Estimates the launches of torch.compile from the operators of an eager call; nothing is compiled.

Matmuls, convolutions and attention remain PyTorch's kernels (EXTERN), and our operators remain ours. Operators between
two of them that are connected form one kernel, which reads its external inputs once and writes the outputs used
elsewhere. A sum over rows (COLUMN: gradients of biases, γ and β) starts a new kernel, because it reduces along the
other axis. This models Inductor's defaults: no horizontal fusion, and no recomputation in the backward pass.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from .events import FLASH, MATMULS, Count, Event, Piece

PRODUCTS = (*MATMULS, "convolution", "convolution_backward", *FLASH)
EXTERN = {*PRODUCTS, *(f"{name}_backward" for name in FLASH)}
COLUMN = "sum"


@dataclass(frozen=True)
class Kernel:
    """A kernel of the compiled graph."""

    events: tuple[Event, ...]  # the operators that it computes, in order
    reads: tuple[Piece, ...]  # tensors from outside, each once
    writes: tuple[Piece, ...]  # its results that other kernels read, or that leave the graph

    @property
    def count(self) -> Count:
        """Launches and bytes."""
        return Count(max(e.launches for e in self.events), sum(piece.nbytes for piece in (*self.reads, *self.writes)))


def counted(events: Iterable[Event]) -> Count:
    """Launches, bytes and flops of a call whose regions are compiled."""
    events = list(events)
    total = Count(flops=sum(event.flops for event in events))
    for one in kernels(events):
        total += one.count if isinstance(one, Kernel) else Count(one.launches, one.nbytes)
    return total


def kernels(events: Iterable[Event]) -> Iterator[Event | Kernel]:
    """Yields the events outside of regions, and the kernels of each region."""
    events = list(events)
    regions = defaultdict(list)
    readers = defaultdict(set)  # storage → regions that read it
    for event in events:
        for piece in event.reads:
            readers[piece.storage].add(event.region)
        if event.region:
            regions[event.region].append(event)
        else:
            yield event
    for region, inside in regions.items():
        yield from grouped(inside, {storage for storage, others in readers.items() if others - {region}})


def inductor_count(events: Iterable[Event]) -> Count:
    """Launches and bytes of the kernels into which the rule groups an eager call's operators."""
    return sum((kernel.count for kernel in grouped(events)), Count())


def grouped(events: Iterable[Event], kept: Collection[int] = ()) -> list[Kernel]:
    """The kernels into which the rule groups an eager call's operators, in the order of their first operators."""
    events = [part for event in events for part in _parts(event)]
    groups = _groups(events)
    readers = defaultdict(set)  # storage → groups that read it
    for event, group in zip(events, groups, strict=True):
        for piece in event.reads:
            readers[piece.storage].add(group)
    members = defaultdict(list)
    for event, group in zip(events, groups, strict=True):
        members[group].append(event)
    return [_kernel(part, group, readers, kept) for group, part in members.items()]


def _parts(event: Event) -> list[Event]:
    """Splits the gradient of a LayerNorm into two kernels: dx by rows, and dγ and dβ by columns."""
    if event.name != "native_layer_norm_backward":
        return [event]
    columns = replace(event, name=COLUMN, launches=1, writes=event.writes[1:])
    return [replace(event, launches=1, writes=event.writes[:1]), columns]


def is_extern(event: Event) -> bool:
    """True for what Inductor calls: library products, and our operators with all that they contain."""
    return event.name in EXTERN or event.ours or event.op != ""


def _groups(events: list[Event]) -> list[int]:
    """For each event, the index of the first event in its kernel."""
    groups: list[int] = []
    written: dict[int, tuple[int, int]] = {}  # storage → (its last writer, number of EXTERN ops up to there)
    for n, event in enumerate(events):
        sources = [written[piece.storage] for piece in event.reads if piece.storage in written]
        products = max((count for _, count in sources), default=0) + is_extern(event)
        group = n
        if not is_extern(event) and event.name != COLUMN:
            near = {groups[m] for m, count in sources if count == products and not is_extern(events[m])}
            group = min(near, default=n)
            groups = [group if g in near else g for g in groups]
        groups.append(group)
        for piece in event.writes:
            written[piece.storage] = n, products
    return groups


def _kernel(events: list[Event], group: int, readers: dict[int, set[int]], kept: Collection[int]) -> Kernel:
    """One kernel: it reads external inputs, and writes what other kernels read or what is a result."""
    written: dict[int, Piece] = {piece.storage: piece for event in events for piece in event.writes}
    reads = {piece for event in events for piece in event.reads if piece.storage not in written}
    writes = [piece for storage, piece in written.items() if readers[storage] != {group} or storage in kept]
    return Kernel(tuple(events), tuple(reads), tuple(writes))
