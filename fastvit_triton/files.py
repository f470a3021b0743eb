"""Atomic file writes (write a temporary file in the same folder, fsync, rename), and text about files."""

import errno
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: str | os.PathLike, keep: str | os.PathLike | None = None) -> Iterator[Path]:
    """Yields a temporary path in the same folder; on success it is renamed to `path`, on any error it is removed.

    An existing file at `path` is replaced, or renamed to `keep`, only after the new file is on disk. If the process
    dies between these two renames, the old file is at `keep`; Ctrl-C there completes them. The folder must exist.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{path.suffix}")
    temporary.touch(exist_ok=False)  # with the umask's mode, which cannot be read without being set for all threads
    complete = False
    try:
        yield temporary
        with open(temporary, "r+b") as written:  # Windows flushes only what may be written
            os.fsync(written.fileno())
        complete = True
        if keep is not None and path.exists():
            os.replace(path, keep)
        os.replace(temporary, path)
    except BaseException:
        if complete and temporary.exists() and not path.exists():  # between the renames, of which this is the second
            with suppress(OSError):  # the error may be that of this rename
                os.replace(temporary, path)
        temporary.unlink(missing_ok=True)
        raise
    _fsync_folder(path.parent)


def sweep(folder: str | os.PathLike, names: Iterable[str]) -> None:
    """Removes temporary files that a killed process left behind while it was `replacing` these files of a folder."""
    for name in names:
        for left in Path(folder).glob(f".{name}.*{Path(name).suffix}"):
            left.unlink(missing_ok=True)


def write_failure(error: BaseException) -> str:
    """Why a file could not be written, in a few words; libraries wrap the operating system's error in their own."""
    chain: list[BaseException] = [error]
    while cause := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(cause)
    numbers = {getattr(cause, "errno", None) for cause in chain}
    if numbers & {errno.ENOSPC, errno.EDQUOT} or "(os error 28)" in str(error):
        return "the disk is full"
    named = [cause.strerror for cause in chain if isinstance(cause, OSError) and cause.strerror]
    return (named or str(error).splitlines() or [type(error).__name__])[0]


def reason(error: BaseException) -> str:
    """The first line of an exception's text; the name of its type if it has no words, such as that of a KeyError."""
    return next((line for line in str(error).splitlines() if re.search("[a-z]{2}", line)), type(error).__name__)


def printable(text: str) -> str:
    """Text for a terminal or a plot: control characters, and bytes of file names that are not UTF-8, are escaped."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode("ascii") for c in text)


def _fsync_folder(folder: Path) -> None:
    """Makes the rename durable, if the operating system can open folders."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
