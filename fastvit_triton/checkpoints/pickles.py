"""Files of torch.save: the types that they may name, beside PyTorch's own, and the entries of one that is refused.

They are read with `weights_only=True`: a pickle that names anything else is refused before anything of it is called.
"""

import argparse
import datetime
import decimal
import fractions
import importlib
import pickle
import random
import types
import uuid
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import torch

from .tensors import some

_ARRAYS: Any = importlib.import_module(f"numpy.{'_core' if hasattr(np, '_core') else 'core'}.multiarray")
_PATHS = {"Posix": PurePosixPath, "Windows": PureWindowsPath}  # as no path of another system can be built here

# What training scripts save beside weights: arguments, metrics, states of random generators, paths, times. A type, or
# (what is called, the name that stands for it in files).
ALLOWED: list[Any] = [argparse.Namespace, types.SimpleNamespace, int, float, bytes, list, dict, range, frozenset]
ALLOWED += [decimal.Decimal, fractions.Fraction, uuid.UUID, random.Random, torch.torch_version.TorchVersion]
ALLOWED += [datetime.date, datetime.time, datetime.datetime, datetime.timedelta, datetime.timezone]
ALLOWED += [np.ndarray, np.dtype, *{type(np.dtype(code)) for code in np.typecodes["All"]}]
ALLOWED += [
    (getattr(_ARRAYS, name), f"numpy.{core}.multiarray.{name}")
    for core in ("_core", "core")
    for name in ("scalar", "_reconstruct")
]
ALLOWED += [
    (kind, f"{module}.{pure}{name}Path")
    for module in ("pathlib", "pathlib._local")
    for name, kind in _PATHS.items()
    for pure in ("", "Pure")
]
# PyTorch fills no other containers than lists and dictionaries.
ALLOWED += [
    (lambda factory=None: {}, "collections.defaultdict"),
    (lambda items=(), most=None: list(items), "collections.deque"),
]


def load(path: Path) -> Any:
    """What a file of torch.save holds, on the CPU; UnpicklingError if it names a type that is not allowed."""
    with torch.serialization.safe_globals(ALLOWED), warnings.catch_warnings(), path.open("rb") as file:
        warnings.filterwarnings("ignore", "Detected pickle protocol")  # what it does not read then raises
        # not by the path, whose suffix PyTorch would follow
        return torch.load(file, map_location="cpu", weights_only=True)


def entries(held: object) -> str:
    """The entries of a file, such as "epoch (int), model (dict of 150)"; its type if it has none."""
    if not isinstance(held, Mapping):
        return f"a {_kind(held)}"
    return some(tuple(f"{key} ({_kind(value)})" for key, value in held.items()), 12) or "none"


def outline(path: Path, errors: tuple[type[Exception], ...]) -> str:
    """The entries of a file that was refused; objects become empty ones, and nothing is imported or called."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                names = archive.namelist()
                pickled = next((name for name in names if name.endswith("data.pkl")), None)
                if pickled is None:  # of an .npz
                    return some(tuple(name.removesuffix(".npy") for name in names), 12)
                with archive.open(pickled) as stream:
                    return entries(_Outline(stream).load())
        held = None
        with path.open("rb") as stream:
            for _ in range(4):  # of PyTorch's old format: a number, a version, the system, the contents
                held = _Outline(stream).load()
                if isinstance(held, Mapping) and "little_endian" not in held:
                    break
        return entries(held)
    except errors:
        return "what cannot be read"


def _kind(value: object) -> str:
    name = getattr(value, "named", type(value).__name__)
    return f"{name} of {len(value)}" if isinstance(value, Mapping | list | tuple) and len(value) else name


class _Outline(pickle.Unpickler):
    """Reads a pickle without its objects."""

    def find_class(self, module: str, name: str) -> Any:
        """An empty class in place of the one that is named; dictionaries stay."""
        if (module, name) in (("collections", "OrderedDict"), ("collections", "defaultdict"), ("builtins", "dict")):
            return _Dictionary
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            module, name = "torch", "Tensor"
        return type("Object", (_Object,), {"named": name if module == "torch" else f"{module}.{name}"})

    def persistent_load(self, given: Any) -> None:
        """Tensors have no values."""


class _Dictionary(dict):
    named = "dict"

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        """Attributes are left out."""


class _Object:
    def __new__(cls, *_: Any, **__: Any) -> "_Object":
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        """Attributes are left out."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Items are left out."""

    def append(self, value: Any) -> None:
        """Items are left out."""

    extend = add = update = append
