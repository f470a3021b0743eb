"""Checkouts of research repositories: their modules on the path, and their commits."""

import contextlib
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path


class Hydra:
    """Stands in for `hydra.core.global_hydra.GlobalHydra`, which SAM 2 asks when it is imported."""

    @classmethod
    def instance(cls) -> "Hydra":
        """This class."""
        return cls()

    def is_initialized(self) -> bool:
        """True, so that nothing is configured."""
        return True


@contextlib.contextmanager
def sources(folder: Path) -> Iterator[None]:
    """Context in which a repository's modules can be imported; they are forgotten afterwards.

    Packages that only read files or tokenise text, which these models do not need, are replaced by empty modules.
    """
    before = dict(sys.modules)
    for name, attributes in {
        "iopath.common.file_io": {"g_pathmgr": None}, "iopath.common": {}, "iopath": {},
        "ftfy": {"fix_text": lambda text: text}, "hydra.core.global_hydra": {"GlobalHydra": Hydra}, "hydra.core": {},
        "hydra": {"initialize_config_module": None},
    }.items():  # fmt: skip
        sys.modules.setdefault(name, types.ModuleType(name)).__dict__.update(attributes)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        sys.modules.clear()
        sys.modules.update(before)


def without_init(name: str) -> None:
    """Makes the modules of a package importable without its `__init__`, which imports what these models do not need."""
    package = types.ModuleType(name)
    package.__path__ = [str(Path(sys.path[0], *name.split(".")))]
    sys.modules[name] = package


def commit(folder: Path, repository: str) -> str:
    """The commit of a repository's checkout, from its .git or a file COMMIT."""
    root = folder / repository.partition("/")[2]
    if (root / "COMMIT").exists():
        return (root / "COMMIT").read_text().strip()
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True).stdout.strip()
