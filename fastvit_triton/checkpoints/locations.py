"""Where checkpoints lie: a file, a folder, or a repository of the Hugging Face Hub, whose client downloads and caches.

Caching, tokens, offline mode, resumed downloads and revisions are those of huggingface_hub and its environment
variables (HF_HOME, HF_TOKEN, HF_HUB_OFFLINE, HF_ENDPOINT, …).
"""

import importlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from .tensors import WeightsError

# In this order, as in timm; an index lists the files of a checkpoint that was saved in parts.
WEIGHT_FILES: tuple[str, ...] = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.bin",
)
SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".bin", ".npz")  # of files; their contents decide
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
PART = re.compile(r"[\w-][\w.-]*\.(safetensors|bin)")
FORMS = "a file, a folder, hf-hub:org/name, or a name that list_models(pretrained=True) lists"


class Location:
    """A folder that holds a checkpoint."""

    is_local = True  # nothing is downloaded

    def __init__(self, text: str, folder: Path, file: Path | None = None) -> None:
        self.text = text  # how messages name it
        self.folder = folder
        self.file = file  # the weights, if a file was named
        self.cfg: dict[str, Any] = {}  # its configuration in a table of pretrained weights

    def __fspath__(self) -> str:
        return self.text

    def find(self, name: str) -> Path | None:
        """The path of one of its files; None if it has no such file."""
        return self.folder / name if (self.folder / name).is_file() else None

    def why_missing(self, what: str) -> str:
        """A sentence that says why `find` found nothing."""
        return f"there is no checkpoint in {self.text}: it has no {what}"

    def weights(self) -> Path:
        """The weights, or the index of their parts, which are then beside it."""
        if self.file is not None:
            return self.file
        for name in dict.fromkeys((self.cfg.get("hf_hub_filename") or WEIGHT_FILES[0], *WEIGHT_FILES)):
            if (path := self.find(name)) is not None:
                for part in parts(path):
                    if self.find(part) is None:
                        raise WeightsError(f"{self.why_missing(part)}, which its {name} lists; download it again")
                return path
        raise WeightsError(self.why_missing(" or ".join(name for name in WEIGHT_FILES if "index" not in name)))

    def config(self, name: str = "config.json") -> dict[str, Any] | None:
        """The object in a JSON file; None if there is no such file."""
        path = self.find(name)
        return None if path is None else read_json(path)


class Repository(Location):
    """A repository of the Hub; all its files are read from the commit of the first, also if it changes meanwhile."""

    is_local = False

    def __init__(self, text: str, options: dict[str, Any]) -> None:
        self.name, _, revision = text.partition("@")
        chosen = {key: value for key, value in options.items() if value is not None}
        self.options = {"revision": revision or None, **chosen}
        revision = self.options["revision"]
        super().__init__(f"hf-hub:{self.name}@{revision}" if revision else f"hf-hub:{self.name}", Path())
        self.unreachable = ""

    def find(self, name: str) -> Path | None:
        """The path of a file in the cache, downloaded if necessary; None if there is no such file."""
        from .. import __version__

        client = hub_client()
        text = self.text
        errors: Any = importlib.import_module("huggingface_hub.errors")
        library = dict(library_name="fastvit_triton", library_version=__version__)
        try:
            path = Path(client.hf_hub_download(self.name, name, **library, **self.options))
        except errors.LocalEntryNotFoundError as error:
            self.unreachable = self.unreachable or self._why_unreachable(error)
            self.options["local_files_only"] = True  # the client tries each file for half a minute
            return None
        except errors.EntryNotFoundError:
            return None
        except errors.HFValidationError as error:
            raise WeightsError(f"{text} is no name of the Hub: {reason(error)}") from error
        except errors.GatedRepoError as error:
            login = f"accept its terms at https://huggingface.co/{self.name}, and set HF_TOKEN or run hf auth login"
            raise WeightsError(f"{text} is gated; {login}") from error
        except errors.RevisionNotFoundError as error:
            raise WeightsError(f"there is no {text}; {self.name} has no such branch, tag or commit") from error
        except errors.RepositoryNotFoundError as error:
            login = "check the name, and if it is private, set HF_TOKEN or run hf auth login"
            raise WeightsError(f"there is no {text}; {login}") from error
        except (*errors.HfHubHTTPError.__bases__, OSError, RuntimeError, ValueError) as error:  # HTTP, size, disk
            raise WeightsError(f"{name} of {text} was not downloaded: {reason(error)}; try again") from error
        if commit := re.search(r"/snapshots/([0-9a-f]{40})/", path.as_posix()):
            self.options["revision"] = commit[1]
        return path

    def _why_unreachable(self, error: Exception) -> str:
        """Why the client did not download."""
        if importlib.import_module("huggingface_hub.constants").HF_HUB_OFFLINE:
            return "HF_HUB_OFFLINE is set"
        if self.options.get("local_files_only"):
            return "local_files_only is True"
        return f"{reason(error.__cause__ or error)}; without network, give the path of a copy"

    def why_missing(self, what: str) -> str:
        """A sentence that says why `find` found nothing."""
        if self.unreachable:
            return f"{self.text} is not in the cache and cannot be downloaded: {self.unreachable}"
        return super().why_missing(what)


def hub_client() -> ModuleType:
    """The module huggingface_hub."""
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise WeightsError("models of the Hub need huggingface_hub; pip install 'fastvit_triton[hub]'") from error


def find_location(
    source: str | os.PathLike, named: Callable[[str], Location | None], options: dict[str, Any]
) -> Location:
    """The location that a source names; downloads nothing."""
    if isinstance(source, Location):
        return source
    if not isinstance(source, str | os.PathLike):
        raise TypeError(f"the checkpoint is of type {type(source).__name__}; give {FORMS}")
    if not os.fspath(source):
        raise WeightsError(f"the checkpoint's name is empty; give {FORMS}")
    text = os.fspath(source)
    path = Path(source)
    scheme, _, rest = text.partition(":")
    if scheme in ("hf-hub", "hf_hub"):
        if not REPOSITORY.fullmatch(rest):
            raise WeightsError(f"{text} names no repository; use hf-hub:org/name or hf-hub:org/name@revision")
        return Repository(rest, options)
    if scheme == "local-dir":
        if not Path(rest).is_dir():
            raise WeightsError(f"there is no folder {rest}; local-dir: takes the path of a folder")
        return Location(rest, Path(rest))
    if path.is_file():
        return Location(text, path.parent, path)
    if path.is_dir():
        return Location(text, path)
    if "://" in text:
        hub = re.match(r"https://(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)", text)
        remedy = f"use hf-hub:{hub[1]}" if hub else f"download the file, or give {FORMS}"
        raise WeightsError(f"{text} is a URL, and checkpoints are not loaded from URLs; {remedy}")
    if path.suffix not in SUFFIXES:
        if (location := named(text)) is not None:
            return location
        if REPOSITORY.fullmatch(text) and not path.parent.exists():
            if text.startswith("timm/"):
                return Repository(text, options)
            # a folder with a typing error must not become a stranger's repository
            raise WeightsError(f"there is no folder or file {text}; for a repository of the Hub write hf-hub:{text}")
    raise WeightsError(f"there is no checkpoint {text}; give {FORMS}")


def parts(path: Path) -> list[str]:
    """The file names that an index lists; [] if the file is no index."""
    if not path.name.endswith(".index.json"):
        return []
    names = read_json(path).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise WeightsError(f"{path} is no index of a checkpoint: it has no weight_map; download it again")
    for name in names.values():
        if not isinstance(name, str) or not PART.fullmatch(name):
            raise WeightsError(f"{path} was refused: it names the file {name!r}; expected files in the same folder")
    return sorted(set(names.values()))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(f"{path} is not readable as JSON: {reason(error)}") from error
    if not isinstance(content, dict):
        raise WeightsError(f"{path} holds a {type(content).__name__}; expected a JSON object")
    return content


def reason(error: BaseException) -> str:
    """The first line of an error, shortened; the name of its type if it has no words, such as that of a KeyError."""
    text = next((line for line in str(error).splitlines() if re.search("[a-z]{2}", line)), type(error).__name__)
    return text[:300].rstrip(".")
