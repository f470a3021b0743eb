"""Reads the headers of a tar file that may be damaged or hostile: ustar, GNU or pax format, not compressed.

`tarfile` takes a damaged header for the end of the archive, follows negative sizes, and keeps every header in memory;
so only its parser of one header is used.
"""

import tarfile
from collections.abc import Iterator
from os import SEEK_END
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

BLOCK = tarfile.BLOCKSIZE
MAX_MEMBERS, MAX_EXTENSION = 1_000_000, 16_384  # members of an archive; bytes of an extended header
MAX_PADDING = 2**26  # bytes of zeros at the end; a sparse file has any number of them
_PAX = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_EXTENDED = (*_PAX, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)


class Member(NamedTuple):
    """A regular file inside an archive: its name and byte range."""

    name: str
    offset: int
    size: int


def read_members(path: Path) -> Iterator[Member]:
    """The regular files of an archive, in order."""
    total = path.stat().st_size
    extension: dict[str, Any] = {}
    with open(path, "rb") as file:
        for _ in range(MAX_MEMBERS + 1):
            start = file.tell()
            block = file.read(BLOCK)
            if not block.strip(b"\0"):
                return _check_end(file, start)
            try:
                header = tarfile.TarInfo.frombuf(block, "utf-8", "backslashreplace")
            except tarfile.HeaderError as error:
                raise ValueError(f"byte {start:,} is no header: {error}") from error
            extended = header.type in _EXTENDED
            size = header.size if extended else extension.get("size", header.size)
            if not extended and header.type in tarfile.SUPPORTED_TYPES and not header.isreg():
                size = 0  # links, folders and devices
            if size < 0:
                raise ValueError(f"{header.name!r} has a negative size, {size:,}")
            if size > total - file.tell():
                raise ValueError(f"it is cut short: {header.name!r} has {size:,} bytes, more than the rest of the file")
            if extended and size > MAX_EXTENSION:
                raise ValueError(f"the extended header {header.name!r} has {size:,} bytes, more than {MAX_EXTENSION:,}")
            if header.type == tarfile.GNUTYPE_SPARSE or "sparse" in extension:
                raise ValueError(f"{header.name!r} is sparse; pack it again")
            if extended:
                extension |= _read_extension(header.type, file.read(size))
            else:
                if header.isreg():
                    yield Member(extension.get("path", header.name), start + BLOCK, size)
                extension = {}
            file.seek(start + BLOCK + -(-size // BLOCK) * BLOCK)
    raise ValueError(f"it has more than {MAX_MEMBERS:,} members")


def _read_extension(kind: bytes, content: bytes) -> dict[str, str | int]:
    """Path and size that an extended header gives the next member, and "sparse" if it is stored so."""
    if kind == tarfile.GNUTYPE_LONGNAME:
        return {"path": content.partition(b"\0")[0].decode("utf-8", "backslashreplace")}
    header: dict[str, str | int] = {}
    while kind in _PAX and content.strip(b"\0"):  # records: length in decimal, space, key, =, value, newline
        length, space, _ = content[:8].partition(b" ")
        if not space or not length.isdigit() or not len(length) < int(length) <= len(content):
            raise ValueError("an extended header is damaged")
        key, _, value = content[len(length) + 1 : int(length) - 1].partition(b"=")
        content = content[int(length) :]
        if key == b"path":
            header["path"] = value.decode("utf-8", "backslashreplace")
        elif key == b"size":
            if not value.isdigit() or len(value) > 18:
                raise ValueError("an extended header has a size that is no number")
            header["size"] = int(value)
        elif key.startswith(b"GNU.sparse."):
            header["sparse"] = 1
    return header


def _check_end(file: BinaryIO, start: int) -> None:
    """Raises ValueError unless the file has two blocks of zeros, or more, from here to its end, and nothing else."""
    count = 0
    if (rest := file.seek(0, SEEK_END) - start) > MAX_PADDING:
        raise ValueError(f"{rest:,} bytes follow its end, more than {MAX_PADDING:,}")
    file.seek(start)
    while chunk := file.read(2**20):
        if chunk.strip(b"\0"):
            raise ValueError(f"data follows its end at byte {start:,}")
        count += len(chunk)
    if count < 2 * BLOCK:
        raise ValueError("it is cut short: the two blocks of zeros that end a tar file are missing")
