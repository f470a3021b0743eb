"""Properties of a compiled kernel, read from its binary without a GPU.

NVIDIA binaries are disassembled by the `cuobjdump` that Triton ships; AMD's assembly states the figures itself. Spilled
bytes are counted in the binary, because running ptxas again by hand would not use Triton's flags.
"""

import math
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import triton

TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
# L2-to-unit bandwidth in bytes per cycle: 7.8 TB/s on an H200, which explains the 629 TFLOP/s published for Gluon's
# matmul with 128 × 256 tiles (fp16, K = 8192, H100); used for all GPUs, although no other GPU was checked
FILL = 7800 / 132 / 1.755
MATRIX = re.compile(r"HGMMA|QGMMA|HMMA|QMMA|OMMA|UTC\w*MMA")
STORES = {"ST", "STG", "RED", "REDG", "ATOM", "ATOMG", "UTMASTG", "UTMAREDG"}  # instructions that write global memory


@dataclass(frozen=True)
class Gpu:
    """One GPU of an architecture. Rates are data-sheet peaks (dense, 16-bit); those of the H200 were measured."""

    name: str  # product name
    units: int  # number of streaming multiprocessors or compute units
    ghz: float  # clock of one unit
    tflops: float  # 16-bit matrix product, TFLOP/s
    gbs: float  # memory bandwidth, GB/s
    block_kb: int  # largest shared memory of a block, KiB
    unit_kb: int  # shared memory of a unit, KiB
    warps: int  # largest number of resident warps per unit
    blocks: int  # largest number of resident blocks per unit

    @property
    def fill_gbs(self) -> float:
        """Bandwidth from L2 into all units, GB/s."""
        return FILL * self.units * self.ghz


GPUS = {
    "sm_80": Gpu("A100-80GB", 108, 1.41, 312, 2039, 163, 164, 64, 32),
    "sm_86": Gpu("A40", 84, 1.74, 150, 696, 99, 100, 48, 16),
    "sm_89": Gpu("L40S", 142, 2.52, 362, 864, 99, 100, 48, 24),
    "sm_90": Gpu("H200", 132, 1.755, 790, 4300, 227, 228, 64, 32),
    "sm_100": Gpu("B200", 148, 1.85, 2250, 8000, 227, 228, 64, 32),
    "sm_120": Gpu("RTX 5090", 170, 2.41, 209, 1792, 99, 100, 48, 24),
    "gfx942": Gpu("MI300X", 304, 2.1, 1307, 5300, 64, 64, 32, 16),
}


@dataclass(frozen=True)
class Instruction:
    """One line of SASS; `guard` is its predicate or ""."""

    address: int
    guard: str
    code: str
    operands: str


@dataclass(frozen=True)
class Pipes:
    """Cost of an instruction sequence for one block on one unit."""

    flops: float = 0.0  # flops of matrix instructions
    exp: float = 0.0  # cycles of the exp2 unit
    issue: float = 0.0  # issue cycles of the schedulers
    shared: float = 0.0  # cycles of shared memory
    fill: float = 0.0  # bytes loaded from L2

    def plus(self, other: "Pipes", times: float = 1.0) -> "Pipes":
        """self + times · other."""
        return Pipes(*(a + times * b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class Binary:
    """Figures of a compiled kernel: `loop` is one pass of its main loops, `once` the rest; both are empty for AMD."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    tensor_columns: int
    ctas_per_sm: int
    mma: dict[str, int]
    stores: int
    wide: int
    narrow: int
    mix: dict[str, int]
    loop: Pipes
    once: Pipes


def read(kernel: "triton.compiler.CompiledKernel") -> Binary:
    """The properties of one compiled kernel."""
    return _read_amd(kernel) if "amdgcn" in kernel.asm else _read_nvidia(kernel)


def _read_nvidia(kernel) -> Binary:
    meta, text = kernel.metadata, _dump(kernel.asm["cubin"])
    code = _instructions(text)
    inner, warps = _main_loops(code), meta.num_warps
    looped = [code[i] for i in sorted(inner)]
    registers = int(re.search(r"REG:(\d+)", text)[1])
    memory = [i.code for i in code if re.match(r"LDG|STG|LDGSTS|UTMALDG|UTMASTG", i.code)]
    wide = sum("128" in m or m.startswith("UTMA") for m in memory)
    return Binary(
        registers=registers,
        spill_bytes=sum(_bytes(i.code) for i in code if re.match("STL|LDL", i.code)),
        shared_bytes=meta.shared,
        tensor_columns=getattr(meta, "tmem_size", 0) or 0,
        ctas_per_sm=_resident(registers, warps, meta.shared, GPUS[f"sm_{meta.target.arch}"]),
        mma=dict(Counter(".".join(i.code.split(".")[:2]) for i in code if MATRIX.match(i.code))),
        stores=sum(i.code.split(".")[0] in STORES for i in code),
        wide=wide,
        narrow=len(memory) - wide,
        mix=_mix(looped or code),
        loop=_pipes(looped, warps),
        once=_pipes([i for n, i in enumerate(code) if n not in inner], warps),
    )


def _read_amd(kernel) -> Binary:
    text, meta = kernel.asm["amdgcn"], kernel.metadata

    def number(name: str) -> int:
        return int(re.findall(rf"\.{name}:\s+(\d+)", text)[-1])

    def count(pattern: str) -> int:
        return len(re.findall(pattern, text))

    registers, gpu = number("vgpr_count"), GPUS["gfx942"]  # vector and accumulation registers share 512 per lane
    by_registers = min(8, 512 // max(math.ceil(registers / 8) * 8, 1)) * 4 // meta.num_warps
    by_memory = gpu.unit_kb * 1024 // max(meta.shared, 1)
    wide = count(r"(?:global|buffer)_(?:load|store)_dwordx4")
    return Binary(
        registers=registers,
        spill_bytes=4 * number("vgpr_spill_count") + number("private_segment_fixed_size"),
        shared_bytes=meta.shared,
        tensor_columns=0,
        ctas_per_sm=min(by_registers, by_memory, gpu.warps // meta.num_warps, gpu.blocks),
        mma={"mfma": mfma} if (mfma := count(r"\bv_mfma")) else {},
        stores=count(r"(?:global|buffer|flat)_(?:store|atomic)_"),
        wide=wide,
        narrow=count(r"(?:global|buffer)_(?:load|store)_") - wide,
        mix={"mfma": mfma, "exp": count("v_exp_f32"), "ds_read": count("ds_read"), "barrier": count("s_barrier")},
        loop=Pipes(),
        once=Pipes(),
    )


def _dump(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([TOOL, "-sass", "-res-usage", file.name], capture_output=True, text=True, check=True)
    return done.stdout


def _instructions(text: str) -> list[Instruction]:
    pattern = r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);"
    return [
        # sm_120 dumps append scheduling notes such as "?trans5 &req=" to the operands
        Instruction(int(m[1], 16), m[2] or "", m[3], re.split(r"\s{2,}[?&]", m[4])[0].strip())
        for m in re.finditer(pattern, text, re.M)
    ]


def _bytes(code: str) -> int:
    """Bytes that one lane moves, from the width suffix of an opcode."""
    widths = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
    return next((widths[gpu] for gpu in code.split(".")[1:] if gpu in widths), 4)


def _resident(registers: int, warps: int, shared: int, gpu: Gpu) -> int:
    """Blocks that fit on a unit: 4 × 16,384 registers, given to warps in units of 256; each block reserves 1 KiB."""
    quarter = 16384 // (math.ceil(registers * 32 / 256) * 256)
    return min(quarter * 4 // warps, gpu.unit_kb * 1024 // (shared + 1024), gpu.warps // warps, gpu.blocks)


def _pipes(code: list[Instruction], warps: int) -> Pipes:
    """Cycles of one pass over `code`; a unit has 4 schedulers, 16 exp2 lanes and 128 B/cycle of shared memory."""
    flops = exp = shared = fill = 0.0
    for i in code:
        if m := re.match(r"[HQ]GMMA\.64x(\d+)x(\d+)", i.code):
            n, k = int(m[1]), int(m[2])
            flops += 64 * n * k * 2 * warps / 4  # one instruction per four warps
            from_registers = re.match(r"R\d+, R\d+", i.operands)
            shared += (n * 32 + (0 if from_registers else 64 * 32)) * warps / 4
        elif m := re.match(r"HMMA\.(16816|1688)", i.code):
            flops += {"16816": 4096, "1688": 2048}[m[1]] * warps
        elif i.code.startswith("MUFU"):
            exp += 2 * warps
        elif m := re.match(r"(?:LDSM|STSM).*?\.?([124])?$", i.code):
            shared += 128 * int(m[1] or 1) * warps
        elif re.match("LDS|STS", i.code):
            shared += 32 * _bytes(i.code) * warps
        elif i.code.startswith("LDG"):
            fill += 32 * _bytes(i.code) * warps
            shared += 32 * _bytes(i.code) * warps if i.code.startswith("LDGSTS") else 0
    return Pipes(flops, exp, len(code) * warps / 4, shared / 128, fill)


def _mix(code: list[Instruction]) -> dict[str, int]:
    """Number of instructions by kind."""
    kinds = dict(mma=MATRIX.pattern, mufu="MUFU", ffma="FFMA", fmul="FMUL", fadd="FADD", fmnmx="FMNMX", sel="F?SEL")
    kinds |= dict(convert="F2F", shuffle="SHFL", copy="LDGSTS|UTMALDG", load="LDG(?!STS)", ldsm="LDSM", barrier="BAR")
    counts = {name: sum(bool(re.match(p, i.code)) for i in code) for name, p in kinds.items()}
    return {"all": len(code)} | {name: n for name, n in counts.items() if n}


def _blocks(code: list[Instruction]) -> tuple[list[range], list[list[int]]]:
    """Basic blocks as ranges of instructions, and the successors of each."""
    at = {i.address: n for n, i in enumerate(code)}
    after, leaders = [], {0}
    for n, i in enumerate(code):
        following = [n + 1] if n + 1 < len(code) else []
        base, target = i.code.split(".")[0], re.search(r"(0x[0-9a-f]+)\)?$", i.operands)
        if base == "BRA" and target and int(target[1], 16) in at:
            goal = at[int(target[1], 16)]
            following = [goal] + (following if i.guard or "," in i.operands else [])
            leaders |= {goal, n + 1}
        elif base in ("EXIT", "RET", "BRX"):
            following = following if i.guard else []
            leaders.add(n + 1)
        after.append(following)
    starts = sorted(n for n in leaders if n < len(code))
    blocks = [range(a, b) for a, b in zip(starts, [*starts[1:], len(code)], strict=True)]
    owner = {n: b for b, block in enumerate(blocks) for n in block}
    return blocks, [[owner[n] for n in after[block[-1]]] for block in blocks]


def _main_loops(code: list[Instruction]) -> set[int]:
    """Instructions of the innermost natural loops that contain matrix instructions; without any, of the longest loop.

    Loops are found by dominators, because the retry blocks of barrier waits, placed after EXIT, also jump back.
    """
    blocks, after = _blocks(code)
    before: list[list[int]] = [[] for _ in blocks]
    for b, following in enumerate(after):
        for target in following:
            before[target].append(b)
    dominators = [{0}] + [set(range(len(blocks))) for _ in blocks[1:]]
    changed = True
    while changed:
        changed = False
        for b in range(1, len(blocks)):
            dominating = {b} | (set.intersection(*(dominators[p] for p in before[b])) if before[b] else set())
            changed |= dominating != dominators[b]
            dominators[b] = dominating
    loops: dict[int, set[int]] = {}
    for b, following in enumerate(after):
        for head in set(following) & dominators[b]:
            body, pending = loops.setdefault(head, {head}), [b]
            while pending:
                if (block := pending.pop()) not in body:
                    body.add(block)
                    pending += before[block]
    bodies = [{n for b in body for n in blocks[b]} for body in loops.values()]
    working = [body for body in bodies if any(MATRIX.match(code[n].code) for n in body)]
    inner = [body for body in working if not any(other < body for other in working)]
    if inner:
        return set.union(*inner)
    if any(MATRIX.match(i.code) for i in code):
        return set()
    bodies = [body for body in bodies if len(body) > 4]  # every kernel ends in an empty infinite loop
    return max(bodies, key=len, default=set())
