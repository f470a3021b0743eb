"""Rules for compiled launches. Each fault is a sentence.

`violations` refuses what makes a kernel slow or keeps it from running: spilled registers, more memory than a GPU has,
products without matrix instructions; a binary that stores nothing, which is what a compiler may make of a kernel that
it cannot translate; and the accesses that `races` finds.

`races` reads TTGIR, the last form of a kernel in which an access has a layout, which says what thread takes what
element. Within a warp accesses are in order; between warps only a barrier orders them. So a load and a store of the
same tensor, or of tensors that overlap, are refused if some path from one to the other has no barrier, unless they use
the same addresses in the same layout, and the layout gives each element to one warp. A copy by a descriptor goes on
after its instruction, and no barrier of threads ends it: no later access of the other kind may meet it. Not
covered: two stores, and addresses of a loop that meet those of another pass.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from .launch_recorder import Launch
from .sass import GPUS, Binary

READS = {"tt.load", "ttg.async_copy_global_to_local", "amdg.buffer_load", "amdg.buffer_load_to_local"}
WRITES = {"tt.store", "amdg.buffer_store"}
# copies by descriptors → whether they store
COPIES = {"ttng.async_tma_copy_global_to_local": False, "ttng.async_tma_copy_local_to_global": True}
ADDRESSES = {"tt.addptr", "tt.splat", "tt.broadcast", "tt.expand_dims", "ttg.convert_layout", "tt.bitcast"}
ADDRESSES |= {"cf.br", "cf.cond_br"}
BARRIER = r"gpu\.barrier|ttg\.barrier .*(all|global)"  # others order shared memory only
BODIES = {"module", "tt.func", "tt.reduce", "tt.scan"}  # besides loops and branches
VALUE = r"%[\w$.-]+(?:#\d+)?"
TENSOR = r"tensor<((?:\d+x)+)(?:!tt\.ptr<\w+>|\w+), (?:(#\w+)|#ttg\.slice<\{dim = (\d), parent = (#\w+)\}>)>"


def violations(launch: Launch, binary: Binary, arch: str, asm: Mapping[str, str]) -> list[str]:
    """Faults of a compiled launch; `asm` has its Triton IR ("ttir") and its TTGIR ("ttgir")."""
    sentences, gpu = [], GPUS[arch]
    if binary.spill_bytes:
        sentences.append(f"{binary.spill_bytes} bytes spilled")
    if binary.shared_bytes > gpu.block_kb * 1024:
        sentences.append(f"{binary.shared_bytes} bytes of shared memory, {gpu.name} has {gpu.block_kb * 1024}")
    if binary.tensor_columns > 512:
        sentences.append(f"{binary.tensor_columns} columns of tensor memory, there are 512")
    if not binary.ctas_per_sm:
        sentences.append("no block fits")
    if not binary.stores:
        sentences.append("nothing is stored")
    products = re.findall(r"tt\.dot .*-> tensor<(\d+)x(\d+)xf32", asm["ttir"])
    if products and launch.values.get("PRECISION") != "ieee":
        if not binary.mma:
            sentences.append("no matrix instruction")
        elif arch == "sm_90" and max(int(rows) for rows, _ in products) >= 64 and not _warpgroup(binary):
            sentences.append("no wgmma")
    return sentences + races(asm["ttgir"], launch)


def _warpgroup(binary: Binary) -> bool:
    return any(name.startswith("HGMMA") for name in binary.mma)


def races(ttgir: str, launch: Launch) -> list[str]:
    """Loads and stores of the same memory that no barrier orders."""
    if '"ttg.num-warps" = 1 ' in ttgir:
        return []
    header = next(line for line in ttgir.splitlines() if "tt.func public" in line)
    names = re.findall(rf"({VALUE}): !tt\.(?:ptr|tensordesc)", header)
    if len(names) != len(launch.tensors):
        return [f"TTGIR has {len(names)} pointers and descriptors for {len(launch.tensors)} tensors"]
    walk = _Walk(names, launch, dict(re.findall(r"^(#\w+) = (#\w+\.\w+<.*>)$", ttgir, re.M)))
    walk.run(_operations(ttgir))
    return sorted(set(walk.found))


@dataclass(eq=False)
class _Operation:
    """One operation: its text without results and location, the names of its results, and its regions."""

    text: str
    results: list[str] = field(default_factory=list)
    regions: list[list["_Operation"]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return re.match(r'"?([\w.]*)', self.text)[1]

    @property
    def values(self) -> list[str]:
        return re.findall(VALUE, self.text)


def _operations(ttgir: str) -> list[_Operation]:
    """The operations of a module, nested."""
    enclosing = [_Operation("", regions=[[]])]
    for line in ttgir.splitlines():
        text = re.sub(r" loc\(.*", "", line.strip())
        if text.startswith("}"):
            if line.endswith("{"):  # "} else {"
                enclosing[-1].regions.append([])
            else:
                enclosing.pop()
        elif text and not text.startswith("#"):
            results, count, text = re.fullmatch(r"(?:(%[\w$.-]+)(?::(\d+))? = )?(.*)", text).groups()
            names = [f"{results}#{i}" for i in range(int(count))] if count else [results] if results else []
            enclosing[-1].regions[-1].append(_Operation(text, names))
            if line.endswith("{"):
                enclosing.append(enclosing[-1].regions[-1][-1])
                enclosing[-1].regions.append([])
    return enclosing[0].regions[0]


class _Access(NamedTuple):
    """A load or store: of which tensor, at which addresses, and in which layout."""

    stores: bool
    parameter: str
    addresses: str
    layout: str | None  # None if one element may belong to several warps
    lasts: bool = False  # no barrier ends it


class _Walk:
    """Goes through operations in order and collects races in `found`.

    `names` are those of the parameters that are tensors, and `layouts` has the text of each layout by its name.
    """

    def __init__(self, names: list[str], launch: Launch, layouts: dict[str, str]) -> None:
        self.layouts = layouts
        self.overlaps = {frozenset(names[i] for i in pair) for pair in launch.overlaps}
        self.found: list[str] = []
        self.origins = {name: frozenset([name]) for name in names}  # value → parameters it may point into
        # value → its number; values of one number are equal in one pass of a loop
        self.numbers = {name: str(tensor.data_ptr()) for name, tensor in zip(names, launch.tensors, strict=True)}
        self.sources: dict[object, str] = {}  # an expression of numbers, a loop or a branch; and place → number
        self.since: set[_Access] = set()  # accesses since the last barrier, on any path
        self.left: set[_Access] = set()  # those of blocks that were left by a jump
        self.yielded: list[frozenset[str]] = []

    def run(self, operations: list[_Operation]) -> None:
        for each in operations:
            if each.name == "scf.for":
                self.loop(each)
            elif each.name == "scf.if":
                self.branch(each)
            elif each.regions:
                if each.name not in BODIES:
                    self.found.append(f"there is no rule for {each.name}")
                self.number(each, each.results)
                for region in each.regions:
                    self.run(region)
            else:
                self.step(each)

    def loop(self, loop: _Operation) -> None:
        """Runs the body twice, so that accesses meet those of the pass before; a loop may also have no pass."""
        carried = re.findall(rf"({VALUE}) = ({VALUE})", loop.text.partition("iter_args")[2])
        self.number(loop, [loop.values[0], *(name for name, _ in carried), *loop.results])
        origins = [self.origin(start) for _, start in carried]
        for _ in range(2):
            before = self.since.copy()
            self.origins |= zip((name for name, _ in carried), origins, strict=True)
            self.run(loop.regions[0])
            self.since |= before
            origins = [a | b for a, b in zip(origins, self.yielded if carried else [], strict=True)]
        self.origins |= zip(loop.results, origins, strict=True)

    def branch(self, branch: _Operation) -> None:
        before, after, origins = self.since.copy(), set(), [frozenset[str]()] * len(branch.results)
        for region in [*branch.regions, []][:2]:  # without else the second one is empty
            self.since = before.copy()
            self.run(region)
            after |= self.since
            origins = [a | b for a, b in zip(origins, self.yielded if origins else [], strict=True)]
        self.since = after
        self.number(branch, branch.results)
        self.origins |= zip(branch.results, origins, strict=True)

    def step(self, step: _Operation) -> None:
        origins = frozenset[str]().union(*map(self.origin, step.values))
        if step.text.startswith("^"):
            self.since |= self.left
        elif re.match(BARRIER, step.text):
            self.since = {each for each in self.since if each.lasts}
        elif step.name == "scf.yield":
            self.yielded = [self.origin(value) for value in step.values]
        elif step.name in READS | WRITES | COPIES.keys():
            for parameter in sorted(origins):
                self.access(step, parameter)
            if not origins:
                self.found.append(f"the address in {step.text} is that of no parameter")
            origins = frozenset()  # of what was loaded
        elif origins and step.name not in ADDRESSES:
            self.found.append(f"{step.name} has an address, and there is no rule for it")
        self.origins |= dict.fromkeys(step.results, origins)
        if step.name.startswith("cf."):
            self.left |= self.since
        self.number(self.numbered(step.text), step.results)

    def number(self, source: object, values: list[str]) -> None:
        """Numbers values that come from one source."""
        for place, value in enumerate(values):
            self.numbers[value] = self.sources.setdefault((source, place), f"#{len(self.sources)}")

    def numbered(self, text: str) -> str:
        return re.sub(VALUE, lambda value: self.numbers.get(value[0], value[0]), text)

    def origin(self, value: str) -> frozenset[str]:
        return self.origins.get(value, frozenset())

    def access(self, step: _Operation, parameter: str) -> None:
        indexed = re.search(rf"({VALUE})\[({VALUE})\]", step.text)  # AMD's buffer operations
        addresses = indexed[0] if indexed else step.values[0]
        copies = "to_local" in step.name or step.name in COPIES  # they end later
        layout = None if copies else self.layout(step.text)
        stores = COPIES.get(step.name, step.name in WRITES)
        new = _Access(stores, parameter, self.numbered(addresses), layout, step.name in COPIES)
        for old in self.since:
            meets = old.parameter == parameter or {old.parameter, parameter} in self.overlaps
            own = layout is not None and (old.addresses, old.layout) == (new.addresses, layout)
            if meets and old.stores != new.stores and not own:
                kinds = ("stored", "loaded") if old.stores else ("loaded", "stored")
                before, after = f"{old.parameter[1:]} is {kinds[0]}", f"{parameter[1:]} is {kinds[1]}"
                self.found.append(f"{before}, {after}, and no barrier is between")
        self.since.add(new)

    def layout(self, text: str) -> str | None:
        """The layout of the first tensor in an operation, or None if one element may belong to several warps."""
        if not (found := re.search(TENSOR, text)):
            return None  # a scalar
        shape, whole, dropped, parent = found.groups()
        lists = {n: v.split(", ") for n, v in re.findall(r"(\w+) = \[([\d, ]+)\]", self.layouts[whole or parent])}
        if not lists.keys() >= {"sizePerThread", "threadsPerWarp", "warpsPerCTA"}:
            return None  # of a matrix unit
        spans = [
            math.prod(map(int, axis)) for axis in zip(lists["sizePerThread"], lists["threadsPerWarp"], strict=True)
        ]
        warps = [int(n) for n in lists["warpsPerCTA"]]
        if dropped:
            del spans[int(dropped)]
            if warps.pop(int(dropped)) > 1:
                return None
        sizes = [int(n) for n in shape.split("x")[:-1]]
        apart = all(w == 1 or size >= span * w for size, span, w in zip(sizes, spans, warps, strict=True))
        return found[0] if apart else None
