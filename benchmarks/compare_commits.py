"""Measures this tree against another commit, alternating between them, with the benchmarks of this tree.

    python -m benchmarks.compare_commits REF [--only blocks,ops] [--rounds 2] [--seconds 240] [--dry-run]

REF is checked out as a git worktree in a temporary folder, with this tree's benchmarks in place of its own.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .result_file import ROOT

Times = dict[tuple[str, str, str], list[float]]


def collect(folder: Path, times: Times) -> None:
    """Adds the median of each (case, phase, variant) of all result files, in microseconds."""
    for path in sorted(folder.glob("*.json")):
        for row in json.loads(path.read_text())["rows"]:
            if row.get("us") is not None and row.get("match", True) and "phase" in row:
                times.setdefault((row["case"], row["phase"], row["arm"]), []).append(row["us"])


def ratios(before: Times, after: Times) -> dict[tuple[str, str, str], tuple[float, float]]:
    """Speedup of each variant, and eager PyTorch's, which shows the noise."""
    speedups = {}
    for key in before.keys() & after.keys():
        eager = (*key[:2], "eager")
        if key != eager and eager in before and eager in after:
            gained, noise = (statistics.median(before[k]) / statistics.median(after[k]) for k in (key, eager))
            speedups[key] = gained, noise
    return dict(sorted(speedups.items(), key=lambda item: item[1][0]))


def main(words: list[str] | None = None) -> dict[tuple[str, str, str], tuple[float, float]]:
    """Measures both trees in alternation and prints the speedups of our variants, smallest first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ref", help="the commit to compare with")
    parser.add_argument("--only", default="blocks,ops")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=240.0, help="for one tree in one round")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    arguments = parser.parse_args(words)
    times: dict[str, Times] = {"before": {}, "after": {}}
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", "--quiet", str(tree), arguments.ref], check=True)
        try:
            for folder in ("benchmarks", "tests"):  # a dry run takes the interpreter from tests
                shutil.copytree(ROOT / folder, tree / folder, dirs_exist_ok=True)
            for turn in range(arguments.rounds):
                sides = [("before", tree), ("after", ROOT)]
                for side, root in sides if turn % 2 == 0 else sides[::-1]:
                    out = Path(scratch) / f"{side}-{turn}"
                    options = ["--out", str(out), "--only", arguments.only, "--seconds", str(arguments.seconds)]
                    options += ["--quiet", "--again"] + ["--dry-run"] * arguments.dry_run
                    subprocess.run(
                        [sys.executable, "-m", "benchmarks.gpu", *options],
                        cwd=root,
                        env=os.environ | dict(PYTHONPATH=str(root)),
                        check=True,
                    )
                    collect(out, times[side])
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)
    speedups = {key: pair for key, pair in ratios(times["before"], times["after"]).items() if "our" in key[2]}
    table = Table(
        "case", "phase", "variant", "before / after", "eager before / after", title=f"against {arguments.ref}"
    )
    for key, (gained, noise) in speedups.items():
        table.add_row(*key, f"{gained:.3f}", f"{noise:.3f}")
    Console().print(table)
    return speedups


if __name__ == "__main__":
    main()
