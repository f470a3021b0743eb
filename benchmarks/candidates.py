"""The record of candidate launch parameters: which of their launches compile without a fault, by architecture.

    python -m benchmarks.candidates [--arch sm_80,sm_90] [--all]

Writes results/candidates.json: for each architecture the versions of Triton and ptxas, a hash of the rules (see
`fingerprint.checks`), and the faults of every launch by its key (see fingerprint.py). Only launches that are not in the
record with the same versions and rules are compiled. Launch parameters in use are in the compile report instead.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import triton
from rich.progress import track
from triton.errors import TritonError

from .fingerprint import checks, key
from .launch_recorder import Launch, compiled
from .predict import record_candidates
from .result_file import as_json, write_text
from .sass import GPUS
from .static import RESULTS, examined, ptxas_versions
from .targets import targets

FILE = RESULTS / "candidates.json"
TARGETS = [replace(target, shape=target.shape | dict(B=16)) for target in targets()]  # binaries as for larger batches


def faults(arch: str, known: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """The faults of every launch of a candidate by its key; launches whose key is not in `known` are compiled."""
    found: dict[str, list[str]] = {}
    for launch in launches(arch):
        name = key(launch, arch)
        if name not in found:
            found[name] = known[name] if name in known else compile_launch(launch, arch)
    return found


def launches(arch: str) -> Iterator[Launch]:
    """Launches of all candidates, in inference and training."""
    for target in track(TARGETS, arch, transient=True):
        for _, recorded in record_candidates(target, arch, start=1)[1]:
            yield from (launch for _, launch in recorded)


def compile_launch(launch: Launch, arch: str) -> list[str]:
    """The faults of one launch."""
    try:
        return examined(launch, compiled(launch, arch), arch)[1]
    except (TritonError, RuntimeError) as error:
        return [f"does not compile: {str(error)[:200]}"]


def made_by(arch: str) -> dict:
    """What a record of an architecture depends on besides its keys."""
    return dict(triton=triton.__version__, ptxas=ptxas_versions(), checks=checks(arch))


def record(arch: str, path: Path = FILE) -> dict[str, list[str]]:
    """The faults in the file by key; empty if it was made with another Triton, ptxas or other rules."""
    held = json.loads(path.read_text()).get(arch, {}) if path.exists() else {}
    return held["faults"] if made_by(arch).items() <= held.items() else {}


def main() -> None:
    """Writes the record and prints the faults."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default=",".join(GPUS), help="comma-separated architectures; others stay as they are")
    parser.add_argument("--all", action="store_true", help="also compile launches that are in the record")
    arguments = parser.parse_args()
    for arch in arguments.arch.split(","):
        found = faults(arch, {} if arguments.all else record(arch))
        held = json.loads(FILE.read_text()) if FILE.exists() else {}
        held[arch] = made_by(arch) | dict(faults=dict(sorted(found.items())))
        write_text(FILE, as_json(held))
        wrong = {name: said for name, said in found.items() if said}
        print(
            f"{arch}: {len(found)} launches", *(f"{name}: {', '.join(said)}" for name, said in wrong.items()), sep="\n"
        )


if __name__ == "__main__":
    main()
