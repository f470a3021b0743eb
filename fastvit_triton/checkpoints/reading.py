"""Reads checkpoint files, and checks that they hold what was written: checksums, dense tensors, finite values."""

import json
import pickle
import re
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from . import pickles
from .locations import SUFFIXES, Location, parts, reason
from .tensors import State, WeightsError
from .torchscript import is_program, read_program

DAMAGE: tuple[type[Exception], ...] = (
    OSError,
    EOFError,
    RuntimeError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    SafetensorError,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    SyntaxError,
    tokenize.TokenError,
    ArithmeticError,
    MemoryError,
)
# Names of the weights in files of training scripts, averaged weights first, as in timm; others are found by contents.
WRAPPERS = (
    *("state_dict_ema", "model_ema", "ema_state_dict", "ema_model", "ema", "teacher"),
    *("state_dict", "model_state_dict", "model"),
)
CHECKSUM = "checksum"  # metadata entry of our safetensors files
MAX_HEADER = 2**23  # bytes, of a safetensors file
MAX_KEYS = 65_536  # tensors of a safetensors file, which reads them in quadratic time
MAX_EXPANSION = 20  # contents of a compressed file, divided by its size
SMALL = 2**28  # bytes; contents of a compressed file that are small in any case


def read(path: Path, verify: bool) -> tuple[Mapping, dict[str, str]]:
    """Contents of a checkpoint file, or of the files that an index lists, and its metadata."""
    if names := parts(path):
        state: dict = {}
        for name in names:
            state |= dict(read(path.with_name(name), verify)[0])
        return state, {}
    try:
        if verify:
            check_proportions(path)
        kind = kind_of(path)
        if kind == "safetensors":
            with safe_open(path, "pt") as file:
                state = {key: file.get_tensor(key) for key in file.keys()}
                metadata = file.metadata() or {}
            if verify:
                check_safetensors(state, metadata)
            return state, metadata
        if kind == "npz":
            with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as file:
                return {key: file[key] for key in file.files}, {}
        if kind == "torch":
            if verify:
                check_zip(path)
            return (read_program(path) if is_program(path) else pickles.load(path)), {}
        with path.open("rb") as file:
            start = file.read(24)
        why = f"it begins with {start!r}" if start else "it is empty"
        if path.suffix in SUFFIXES or _is_exported(path):
            raise ValueError(why)
    except WeightsError:
        raise
    except DAMAGE as error:
        if _is_exported(path):
            source = "the checkpoint that it was exported from, such as a run's folder or its model.safetensors"
            raise WeightsError(f"{path} is an exported model, which other runtimes run; give {source}") from error
        if unsafe := _why_unsafe(str(error)):
            raise WeightsError(
                f"{path} was refused: {unsafe}, and it holds {pickles.outline(path, DAMAGE)}; "
                "use a safetensors file, or save only model.state_dict() at its source"
            ) from error
        why = reason(error)
        remedy = f"verify=False loads it, or {_again(path)}" if "checksum" in why else _again(path)
        raise WeightsError(f"{path} is damaged, cut short or no {path.suffix} file: {why}; {remedy}") from error
    raise WeightsError(f"{path} is no file of safetensors, torch.save, torch.jit.save or NumPy (.npz): {why}")


def _is_exported(path: Path) -> bool:
    """True for a file that `export` or another exporter wrote, by its suffix; .bin is OpenVINO's beside its .xml."""
    return path.suffix in (".onnx", ".xml", ".pt2") or (path.suffix == ".bin" and path.with_suffix(".xml").is_file())


def _why_unsafe(error: str) -> str:
    """What in a pickle would run code, from an error of PyTorch or NumPy; "" if the error is another."""
    if named := re.search(r"GLOBAL (\S+)|Object arrays|pickled data", error):
        return f"it names {named[1] or 'a pickled object'}, whose code would run"
    above = "its pickle_protocol is above 2, which PyTorch does not read without running code"
    return above if "Unsupported operand" in error else ""


def kind_of(path: Path) -> str:
    """What a file holds by its first bytes, whatever its suffix: "safetensors", "torch", "npz", or "" for all else."""
    with path.open("rb") as file:
        start = file.read(512)
    if 2 <= int.from_bytes(start[:8], "little") <= path.stat().st_size - 8 and start[8:9] == b"{":
        return "safetensors"
    if start.startswith(b"PK\3\4"):  # a zip archive, which begins with the name of its first record
        return "npz" if start[30 : 30 + int.from_bytes(start[26:28], "little")].endswith(b".npy") else "torch"
    return "torch" if start.startswith(b"\x80") else ""  # a pickle, of PyTorch's old format


def header_of(location: Location) -> dict[str, str]:
    """The metadata of a local safetensors file, without its tensors; {} of others, and of one that `read` refuses."""
    path = location.file or location.find("model.safetensors") if location.is_local else None
    try:
        if path is None or kind_of(path) != "safetensors":
            return {}
        with safe_open(path, "pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError):
        return {}


def _again(path: Path) -> str:
    """How to replace a damaged file; one in the Hub's cache is downloaded again only without its repository."""
    cached = next((folder for folder in path.parents if folder.name.startswith("models--")), None)
    return "copy or download it again" if cached is None else f"delete {cached} and load it again"


def unwrap(held: Mapping) -> tuple[State, str]:
    """The tensors of a checkpoint, and the entries in which they were nested, such as " (model)"."""
    path = ""
    for _ in range(4):
        if not isinstance(held, Mapping):
            raise WeightsError(f"the checkpoint holds {pickles.entries(held)}; expected a state dict of named tensors")
        inner = next((name for name in WRAPPERS if _is_state(held.get(name))), None)
        inner = inner or next((name for name in WRAPPERS if _is_mapping(held.get(name))), None)
        if inner is None and not any(map(_is_array, held.values())):
            states = [name for name, value in held.items() if _is_state(value)]
            states = states or [name for name, value in held.items() if _is_mapping(value) and _wraps(value)]
            if len(states) != 1 and held:
                which = f"several state dicts, {', '.join(map(str, states))}" if states else "no state dict"
                raise WeightsError(
                    f"the checkpoint holds {which}; its entries are {pickles.entries(held)}; give the one of the model"
                )
            inner = next(iter(states), None)
        if inner is None:
            break
        held = held[inner]
        path = f" ({inner})"
    arrays = {str(key): _tensor(value) if isinstance(value, np.ndarray) else value for key, value in held.items()}
    return {key: value.detach() for key, value in arrays.items() if isinstance(value, Tensor)}, path


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping) and bool(value)


def _wraps(held: Mapping) -> bool:
    """True for a dictionary with weights under a known name."""
    return any(_is_state(held.get(name)) for name in WRAPPERS)


def _is_array(value: object) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def _is_state(value: object) -> bool:
    """True for a dictionary of named tensors only."""
    return isinstance(value, Mapping) and bool(value) and all(map(_is_array, value.values()))


def _tensor(array: np.ndarray) -> Tensor | None:
    """Converts an array to a tensor; None if it is not floating-point. NumPy loads bfloat16 as 2-byte raw data."""
    if array.dtype.kind == "V" and array.dtype.itemsize == 2:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(array, np.float32)) if array.dtype.kind == "f" else None


def checksum(state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """CRC-32 of names, dtypes, shapes and values of all tensors, and of the metadata except the checksum itself."""
    total = 0
    for name, text in sorted(metadata.items()):
        if name != CHECKSUM:
            total = zlib.crc32(f"{name}\0{text}\0".encode(), total)
    for name in sorted(state):
        tensor = state[name].contiguous()
        total = zlib.crc32(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode(), total)
        total = zlib.crc32(tensor.flatten().view(torch.uint8).numpy().data, total)
    return f"crc32:{total:08x}"


def check_safetensors(state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Compares the checksum of a file of ours; files of other programs have none."""
    if CHECKSUM in metadata and checksum(state, metadata) != metadata[CHECKSUM]:
        raise ValueError("its checksum is wrong")


def check_proportions(path: Path) -> None:
    """Checks the sizes that a file states, before anything of these sizes is read."""
    size = path.stat().st_size
    if kind_of(path) == "safetensors":
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            keys = len(json.loads(file.read(length))) if length <= min(MAX_HEADER, size - 8) else 0
        if MAX_HEADER < length <= size - 8:
            raise WeightsError(f"{path} has a header of {length:,} bytes, over {MAX_HEADER:,}; verify=False loads it")
        if keys > MAX_KEYS:
            raise WeightsError(f"{path} has {keys:,} tensors, over {MAX_KEYS:,}; verify=False loads it")
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            contents = sum(record.file_size for record in archive.infolist())
        if contents > max(MAX_EXPANSION * size, SMALL):
            raise WeightsError(
                f"{path} expands from {_megabytes(size)} to {_megabytes(contents)}; verify=False loads it"
            )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB" if size < 1e9 else f"{size / 1e9:,.0f} GB"


def check_zip(path: Path) -> None:
    """Compares the checksums in a file of torch.save, which writes them but does not read them.

    Files in PyTorch's old format, which is not a zip archive, have no checksums.
    """
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        records = [record for record in archive.infolist() if record.file_size]
        if records and not any(record.CRC for record in records):
            raise ValueError("it was saved without checksums, after torch.serialization.set_crc32_options(False)")
        if bad := archive.testzip():
            raise ValueError(f"the checksum of {bad} is wrong")


def why_unusable(tensor: Tensor) -> str | None:
    """Why a tensor of a checkpoint cannot be copied into a parameter; None if it can."""
    if tensor.layout is not torch.strided:
        return f"is {tensor.layout}".replace("torch.", "")
    if tensor.is_meta:
        return "has no values"
    if type(tensor) is Tensor and tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        return "repeats its values"  # a few bytes may stand for any size
    return f"is {tensor.dtype}".replace("torch.", "") if tensor.is_complex() or tensor.is_quantized else None


def is_finite(tensor: Tensor) -> bool:
    """True if all values are finite."""
    wide = tensor.float() if tensor.element_size() == 1 else tensor  # isfinite knows no 8-bit types
    return not tensor.is_floating_point() or bool(torch.isfinite(wide).all())
