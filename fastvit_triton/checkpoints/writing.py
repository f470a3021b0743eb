"""Writes tensors as safetensors, with the same bytes for the same contents."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def write_tensors(state: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Writes tensors, and metadata in the order of its sorted keys; the library's order changes from call to call."""
    save_file(dict(state), path, dict(metadata))
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")  # of the header, which is padded with spaces
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(metadata.items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
        if len(text) <= length:  # else characters that this encoder escapes; the order stays as it is
            file.seek(8)
            file.write(text.ljust(length))
