"""`read_program`: the tensors of a TorchScript file, without its program.

Such a file is a zip archive: the attributes of the modules as a pickle (`data.pkl`), the tensors' bytes (`data/…`),
and the program as text (`code/…`), which `torch.jit.load` compiles. `read_program` does not read the program, and
allows in the pickle only names that build tensors, lists and modules. A module becomes a record of its attributes.
"""

import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PROGRAM = "constants.pkl"  # archives of torch.save have no such file
MAX_MODULES = 65_536
STORAGES = {
    f"{name}Storage": getattr(torch, dtype)
    for name, dtype in {
        **dict(Float="float32", Half="float16", BFloat16="bfloat16", Double="float64", Bool="bool"),
        **dict(Long="int64", Int="int32", Short="int16", Char="int8", Byte="uint8"),
    }.items()
}


def is_program(path: Path) -> bool:
    """True for a file of torch.jit.save."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.partition("/")[2] == PROGRAM for name in archive.namelist())


def read_program(path: Path) -> dict[str, Tensor]:
    """Parameters, buffers and other tensors of the program's modules, by their names in it."""
    with zipfile.ZipFile(path) as archive:
        root = next(name.partition("/")[0] for name in archive.namelist() if name.endswith(f"/{PROGRAM}"))
        if f"{root}/byteorder" in archive.namelist() and archive.read(f"{root}/byteorder") != b"little":
            raise ValueError("its numbers are not little-endian")
        with archive.open(f"{root}/data.pkl") as stream:
            held = _Reader(stream, archive, root).load()
    found, modules = {}, 0
    for name, value in _walk("", held):
        modules += not isinstance(value, Tensor)
        if modules > MAX_MODULES:
            raise ValueError(f"it has more than {MAX_MODULES:,} modules")
        if isinstance(value, Tensor):
            found[name] = value
    return found


def _walk(path: str, record: Any) -> Iterator[tuple[str, Any]]:
    """Yields the tensors and modules in a module, by their paths."""
    for name, value in record.attributes.items():
        inner = f"{path}.{name}" if path else str(name)
        if isinstance(value, Tensor):
            yield inner, value
        elif hasattr(value, "attributes"):
            yield inner, value
            yield from _walk(inner, value)


class _Reader(pickle.Unpickler):
    """Reads `data.pkl`; all that its pickle can name is made for it, so that it can change nothing else."""

    def __init__(self, stream: Any, archive: zipfile.ZipFile, root: str) -> None:
        super().__init__(stream)
        self.archive, self.root = archive, root
        self.read: dict[str, Tensor] = {}

        class Record:
            """Stands for a module."""

            def __setstate__(self, state: Any) -> None:
                self.attributes = state if isinstance(state, dict) else {}

        self.record = Record

    def find_class(self, module: str, name: str) -> Any:
        """Replaces a class or function that the pickle names; raises UnpicklingError for names that are not listed."""
        if module == "__torch__" or module.startswith("__torch__."):
            return self.record
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, size, stride, *_: storage.as_strided(size, stride, offset)
        if module == "torch.jit._pickle":  # build_intlist and others of this kind, restore_type_tag
            return lambda value, *_: value
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")

    def persistent_load(self, given: Any) -> Tensor:
        """The values of a storage: ("storage", type, key, device, number of values)."""
        _, dtype, key, _, number = given
        if key not in self.read:
            values = bytearray(self.archive.read(f"{self.root}/data/{key}"))
            self.read[key] = torch.frombuffer(values, dtype=dtype) if values else torch.empty(0, dtype=dtype)
        if self.read[key].dtype != dtype or len(self.read[key]) < number:
            raise ValueError(f"its storage {key} is not of {number} values of {dtype}")
        return self.read[key]
