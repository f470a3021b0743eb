"""What `fastvit-triton tune` measured on this machine: launch parameters and ways, a file per processor and software.

The file is in $FASTVIT_TRITON_CACHE, or in the platform's cache folder, and takes precedence over the committed tables
in tuned/. It has the tables' row names; names with exact sizes take precedence over names with sizes rounded up to
powers of two. A file that is damaged, or of another processor or software, is ignored with one warning. A file of a CPU
has only ways, "plain" or "onednn".
"""

import contextlib
import functools
import hashlib
import json
import os
import platform
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import tile
from .sizes import Branch

FORMAT = 1
WAYS = {"gpu": ("plain", "mixed", "fused"), "cpu": ("plain", "onednn")}  # by the fact that names the processor


@dataclass(frozen=True, eq=False)
class Measured:
    """Content of one file."""

    # name of a row, with or without sizes → launch parameters
    rows: dict[str, dict[str, int]] = field(default_factory=dict)
    # name of a block's or an op's shape → "plain", "mixed", "fused" or "onednn"
    ways: dict[str, str] = field(default_factory=dict)

    def with_ways(self, ways: dict[str, str]) -> "Measured":
        """A copy with these ways in addition."""
        return Measured(self.rows, self.ways | ways)


NOTHING = Measured()
_override: Measured | None = None  # used instead of all files, see `using`
_files: object = object()  # a new object after each `forget`
in_use: object = _files  # one of these: part of the cache key of every choice


def of(device: torch.device, pretended: bool = False) -> Measured:
    """Measurements on this GPU or CPU; empty for other devices, without a file, or if another GPU is `pretended`."""
    if _override is not None:
        return _override
    return NOTHING if pretended or device.type not in ("cuda", "cpu") else _read(device.type, device.index)


def forget() -> None:
    """Clears cached files, which are read again when needed."""
    global _files
    _files = object()
    _read.cache_clear()
    _set(_override)


@contextlib.contextmanager
def using(measured: Measured) -> Iterator[None]:
    """Context in which `measured` is used instead of the file of every device, in all threads."""
    before = _override
    _set(measured)
    try:
        yield
    finally:
        _set(before)


def _set(override: Measured | None) -> None:
    global _override, in_use
    _override = override
    in_use = _files if override is None else override


def folder() -> Path:
    """$FASTVIT_TRITON_CACHE, or the platform's cache folder."""
    if path := os.environ.get("FASTVIT_TRITON_CACHE"):
        return Path(path).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("fastvit_triton", appauthor=False))


def path_of(facts: dict[str, object]) -> Path:
    """Path of the file for these facts; it does not depend on the version of this package's sources."""
    identity = {name: value for name, value in facts.items() if name != "sources"}
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
    name = str(facts[kind_of(facts)]).lower()
    return folder() / f"{re.sub('[^a-z0-9]+', '-', name).strip('-')}-{digest}.json"


def kind_of(facts: dict[str, object]) -> str:
    """The fact that names the processor, "gpu" or "cpu"."""
    return "cpu" if "cpu" in facts else "gpu"


def facts_of(device: torch.device, pretended: bool = False) -> dict[str, object]:
    """GPU or CPU, and software, for which a measurement is valid; that of a `pretended` GPU has the name "cpu"."""
    if device.type == "cpu" and not pretended:
        threads = torch.get_num_threads()  # when the file is written or first read
        return dict(cpu=cpu_name(), cores=os.cpu_count(), threads=threads, torch=torch.__version__, sources=sources())
    gpu = device.type == "cuda"
    properties: Any = torch.cuda.get_device_properties(device) if gpu else None
    return dict(
        gpu=properties.name if gpu else "cpu",
        architecture=architecture_of(properties) if gpu else "cpu",
        units=properties.multi_processor_count if gpu else 0,
        driver=getattr(torch._C, "_cuda_getDriverVersion", lambda: None)() if gpu else None,
        torch=torch.__version__,
        cuda=torch.version.cuda or torch.version.hip,
        cudnn=torch.backends.cudnn.version() if gpu else None,
        triton=getattr(tile, "__version__", None),
        sources=sources(),
    )


@functools.cache
def cpu_name() -> str:
    """Vendor, family and instruction sets of this machine's CPU, as in "AuthenticAMD 25 AVX512" or "… AVX512 AMX"."""
    facts = _cpu_facts()
    amx = " AMX" if "amx_tile" in facts.get("flags", "").split() else ""  # on matrix tiles products differ most
    return f"{_cpu_model(facts)} {torch.backends.cpu.get_cpu_capability()}{amx}"


def _cpu_facts() -> dict[str, str]:
    """Lines of /proc/cpuinfo by their names; empty on systems that have no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _cpu_model(facts: dict[str, str]) -> str:
    """Vendor and family of the CPU; on systems without /proc/cpuinfo what Python calls it."""
    if not facts:
        return platform.processor() or platform.machine()
    if "vendor_id" in facts:
        return f"{facts['vendor_id']} {facts.get('cpu family', '?')}"
    return f"{platform.machine()} {facts.get('CPU implementer', '?')} {facts.get('CPU part', '?')}"


def architecture_of(properties: Any) -> str:
    """Architecture of a GPU with these properties, such as "sm_90" or "gfx942"."""
    if torch.version.hip is not None:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


@functools.cache
def sources() -> str:
    """Hash of the kernels' source files."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def parse(text: str) -> dict:
    """Parses the text of a file.

    Raises:
        ValueError: it is damaged or has another format.
    """
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    try:
        valid = content["format"] == FORMAT and isinstance(content["facts"], dict)
        ways = WAYS[kind_of(content["facts"])] if valid else ()
        valid = valid and all(entry["way"] in ways for entry in content["ways"].values())
        numbers = [n for entry in content["rows"].values() for n in entry["config"].values()]
        valid = valid and all(type(n) is int and 0 <= n <= 4096 for n in numbers)
    except (KeyError, TypeError, AttributeError):
        valid = False
    if not valid:
        raise ValueError("it is not a file of `fastvit-triton tune`")
    return content


def difference(content: dict, facts: dict[str, object]) -> str | None:
    """How a file's facts differ from these, as text; None if they are the same."""
    differences = [
        f"{n} {content['facts'].get(n)}, here {value}" for n, value in facts.items() if content["facts"].get(n) != value
    ]
    return "it was measured with " + "; ".join(differences) if differences else None


@functools.cache
def _read(kind: str, index: int | None) -> Measured:
    facts = facts_of(torch.device(kind) if index is None else torch.device(kind, index))
    path = path_of(facts)
    try:
        content = parse(path.read_text(encoding="utf-8"))
        if (why := difference(content, facts)) is not None:
            raise ValueError(why)
    except FileNotFoundError:
        return NOTHING
    except (OSError, ValueError) as error:
        warnings.warn(f"ignoring {path}: {error}; run `fastvit-triton tune` again or remove it", stacklevel=2)
        return NOTHING
    return measured_in(content)


def measured_in(content: dict) -> Measured:
    """The rows and ways of a file's content."""
    rows = {name: entry["config"] for name, entry in content["rows"].items()}
    return Measured(rows, {name: entry["way"] for name, entry in content["ways"].items()})


def names(name: str, sizes: tuple[int, ...]) -> tuple[str, ...]:
    """Names under which a row or op is looked up, in order: with exact sizes, with rounded sizes, without sizes."""
    if not sizes:
        return (name,)
    near = (1 << max(n - 1, 0).bit_length() for n in sizes)
    return f"{name} {','.join(map(str, sizes))}", f"{name} ~{','.join(map(str, near))}", name


def block_names(branches: tuple[Branch, ...], phase: str) -> tuple[str, str]:
    """Names of a block's shape in a phase (on a CPU one of `onednn.PHASES`): with exact and with rounded sizes."""
    pair = branches, [branch.rounded for branch in branches]
    exact, near = (f"{' + '.join(branch.name for branch in sizes)} {phase}" for sizes in pair)
    return exact, f"~{near}"


def op_names(op: str, size: int, training: bool, sizes: tuple[int, ...]) -> tuple[str, str]:
    """As `block_names`, for an op with arguments of `size` bytes per value."""
    phase = f"{'training' if training else 'inference'}{' fp32' if size == 4 else ''}"
    exact, near, *_ = names(f"{op} {phase}", tuple(map(int, sizes)))
    return exact, near
