"""Makes generated files anew that are not of today's code.

    python -m benchmarks.regenerate                  lists every artefact of artefacts.json, and why it is stale
    python -m benchmarks.regenerate --stale          runs the commands of those that are stale
    python -m benchmarks.regenerate --only NAME ...  runs these commands

Commands that need nothing from each other run at the same time; their output is in build/regenerate/NAME.log, and
they replace their files as a whole. After a command that fails no other one starts, and what was finished stays.
`--thorough` compares more rows, as the full tests do, which takes minutes. Artefacts that need a GPU, an idle machine
or files that are not here run only by name; measurements are never stale, and are listed with their date and commit.
"""

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from . import artefacts
from .artefacts import Artefact
from .result_file import ROOT, as_json, write_text

LOGS = ROOT / "build" / "regenerate"
SHOWN = 3  # reasons of an artefact


class Failed(Exception):
    """A command failed; the message is one sentence."""


class Run(NamedTuple):
    """A command that runs."""

    artefact: Artefact
    process: subprocess.Popen
    hashes: dict[str, str]
    start: float

    @property
    def log(self) -> Path:
        """The file of its output."""
        return LOGS / f"{self.artefact.name}.log"


def state(artefact: Artefact, why: list[str]) -> str:
    """One line on an artefact."""
    if artefact.changes is None and not why:
        return f"{made(artefact)}; needs {artefact.needs}"
    if not why:
        return "fresh"
    more = f" and {len(why) - SHOWN} more" if len(why) > SHOWN else ""
    return f"stale, at most {artefact.minutes:g} CPU-minutes: {'; '.join(why[:SHOWN])}{more}"


def made(artefact: Artefact) -> str:
    """When its files were measured, and at which commits."""
    texts = [path.read_text() for path in artefact.files() if path.suffix == ".json"]
    dates = sorted(date for text in texts for date in re.findall(r'"date": *"(\d{4}-\d\d-\d\d)', text))
    commits = (re.search(r'"commit": *"([0-9a-f]{7,})', text) for text in texts)
    when = f"of {' to '.join(dict.fromkeys((dates[0], dates[-1])))}" if dates else "of no known date"
    return ", ".join([when, *dict.fromkeys(f"commit {commit[1]}" for commit in commits if commit)])


def start(artefact: Artefact) -> Run:
    """Starts the command of an artefact, after installing its package."""
    LOGS.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ)
    if artefact.package:
        path = [str(installed(artefact.package)), os.environ.get("PYTHONPATH")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    before = artefact.hashes()  # an input that is edited from here on makes it stale
    with open(LOGS / f"{artefact.name}.log", "w") as log:
        words = [sys.executable, *shlex.split(artefact.command)]
        process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
    return Run(artefact, process, before, time.monotonic())


def installed(package: str) -> Path:
    """The folder of a package, which is installed on first use; Failed if it cannot be."""
    folder = LOGS / package
    if folder.exists():
        return folder
    part = LOGS / f"{package}.part"
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", part, package]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"{package} cannot be installed: {last(done.stderr)}")
    return part.rename(folder)


def finish(run: Run, thorough: bool) -> None:
    """Records the inputs of a command that ended; Failed if it failed, or its artefact is still stale."""
    name, code = run.artefact.name, run.process.returncode
    if code:
        said = f"{last(run.log.read_text())} ({run.log.relative_to(ROOT)})"
        raise Failed(f"{name}: python {run.artefact.command} ended with code {code}: {said}")
    if run.hashes:
        recorded = artefacts.hashes() | {name: run.hashes}
        write_text(artefacts.HASHES, as_json(dict(sorted(recorded.items()))))
    if why := run.artefact.why(thorough):
        raise Failed(f"{name} is still stale after its command: {why[0]}")


def last(text: str) -> str:
    """The last line of a command's output."""
    return (text.strip().splitlines() or ["no message"])[-1]


def execute(chosen: Iterable[Artefact], jobs: int, thorough: bool = False, dependents: Iterable[Artefact] = ()) -> None:
    """Runs the commands of artefacts, each after those that write its inputs.

    `dependents` run as well if an input of theirs is written. If a command fails, those that ran at that time are
    waited for.
    """
    waiting, others, running, failure = list(chosen), list(dependents), list[Run](), None
    try:
        while running or (waiting and failure is None):
            pending = [*waiting, *(run.artefact for run in running)]
            for artefact in waiting.copy() if failure is None else ():
                if len(running) < jobs and not any(artefact.follows(other) for other in pending if other != artefact):
                    waiting.remove(artefact)
                    print(f"{artefact.name}: python {artefact.command}", flush=True)
                    try:
                        running.append(start(artefact))
                    except Failed as error:
                        failure = error
                        break
            time.sleep(0.05)
            for run in [run for run in running if run.process.poll() is not None]:
                running.remove(run)
                try:
                    finish(run, thorough)
                except Failed as error:
                    failure = failure or error
                    continue
                print(f"{run.artefact.name}: done in {time.monotonic() - run.start:.0f} s", flush=True)
                after = [other for other in others if other not in waiting and other.follows(run.artefact)]
                waiting += after
                others = [other for other in others if other not in after]
    finally:
        for run in running:
            run.process.terminate()
            run.process.wait()
    if failure is not None:
        raise failure


def main(words: list[str] | None = None) -> None:
    """Lists artefacts, or runs the commands of some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--stale", action="store_true", help="run the commands of what is stale")
    what.add_argument("--only", nargs="+", metavar="NAME", help="run the commands of these artefacts")
    parser.add_argument("--thorough", action="store_true", help="compare more rows, which takes minutes")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="commands at a time (default: all cores)")
    args = parser.parse_args(words)
    known = {artefact.name: artefact for artefact in artefacts.ARTEFACTS}
    if unknown := [name for name in args.only or () if name not in known]:
        parser.error(f"--only {' '.join(unknown)}: no such artefact; use {', '.join(known)}")
    if args.jobs < 1:
        parser.error(f"--jobs is {args.jobs}; use at least 1")
    for name in args.only or ():
        if re.search(r"\b(FOLDER|FILE|COMMAND|TRAINING)\b", known[name].command):
            parser.error(f"--only {name}: run python {known[name].command}; it needs {known[name].needs}")
    if args.stale and (other := artefacts.other_versions()):
        parser.error(f"--stale counts with the versions of constraints.txt, and {', '.join(other)}; install these")
    try:
        if args.only:
            execute([known[name] for name in args.only], args.jobs, args.thorough)
        else:
            listing(known.values(), args)
    except Failed as error:
        sys.exit(f"regenerate: {error}")


def listing(known: Iterable[Artefact], args: argparse.Namespace) -> None:
    """Prints the state of all artefacts; with --stale, runs what is stale."""
    stale, dependents = [], []
    for artefact in known:
        why = artefact.why(args.thorough)
        print(f"{artefact.name:18} {state(artefact, why)}", flush=True)
        if not artefact.needs:
            (stale if why else dependents).append(artefact)
    if not args.stale:
        return
    data = [artefact for artefact in stale if "fastvit_triton/" in artefact.outputs]
    execute(data or stale, args.jobs, args.thorough, () if data else dependents)
    if data:  # which this process has read, and the others are counted with
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.regenerate", *sys.argv[1:]])


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("regenerate: terminated"))  # and its commands
    main()
