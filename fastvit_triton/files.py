"""Files appear whole or not at all: write beside the target, fsync, rename."""

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | os.PathLike, keep: str | os.PathLike | None = None) -> Iterator[Path]:
    """Yields a temporary path in the same folder; on success it becomes `path`, on any error it is removed.

    The old file, if any, stays complete until the new one is safely on disk; then it goes, or to `keep`. A process
    that dies between the two renames leaves it there. The folder must exist.
    """
    path = Path(path)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        temporary.chmod(0o666 & ~_umask())
        if keep is not None and path.exists():
            os.replace(path, keep)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _fsync_folder(path.parent)


def sweep(folder: str | os.PathLike, names: Iterable[str]) -> None:
    """Removes what a process that died while it was `replacing` these files of a folder has left behind."""
    for name in names:
        for left in Path(folder).glob(f".{name}.*{Path(name).suffix}"):
            left.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _fsync_folder(folder: Path) -> None:
    """Makes the rename itself durable, where the system can open a folder."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
