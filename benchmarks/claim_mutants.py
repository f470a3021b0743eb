"""Edits the line that each claim of docs/claims.txt stands on, and records which of the claim's tests fails then.

    python -m benchmarks.claim_mutants [--only ID ...] [--missing] [--out FILE] [--seconds N]

The edits are in claim_mutants.txt. They are made in a copy of the repository, where each claim's tests run in a process
that is forked after the libraries are imported. A test that fails must pass without the edit. The result file is
written after each row; `--missing` runs only the edits whose row is absent or not up to date: a row has hashes of the
edited lines and of the source of the claim's tests, not of their places.
"""

import argparse
import ast
import compileall
import functools
import gc
import hashlib
import importlib
import json
import os
import py_compile
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
LIST, RESULT = Path(__file__).with_name("claim_mutants.txt"), ROOT / "benchmarks" / "results" / "claim_mutants.json"
PARTS = "fastvit_triton", "tests", "benchmarks", "docs", "examples"  # of the copy, besides the files beside them
SECONDS = 900  # of one run of a claim's tests
LIBRARIES = """numpy scipy.ndimage sklearn.linear_model sklearn.datasets matplotlib.pyplot matplotlib.figure PIL.Image
einops.layers.torch triton triton.language torch.optim.swa_utils torch.distributions torch.utils.flop_counter
torch._dynamo torch.export torchvision timm nbclient nbformat safetensors.torch transformers.modeling_utils
transformers.models.vit_mae.modeling_vit_mae transformers.models.pvt.modeling_pvt
transformers.models.imagegpt.modeling_imagegpt pytest""".split()
OPTIONS = "-x -q --no-header -o addopts= -p no:cacheprovider".split()


class Mutant(NamedTuple):
    """An edit."""

    name: str  # number of the claim, with a letter if it has several edits
    file: str  # path of the file
    text: str  # what is replaced, once in the file
    mutated: str  # what replaces it

    @property
    def claim(self) -> str:
        """Number of the claim."""
        return self.name[:4]


def read(text: str) -> list[Mutant]:
    """The edits listed in a text; ValueError for an entry without a text or what replaces it, or with another line."""
    edits = []
    for entry in re.split(r"\n\s*\n", text):
        lines = [line for line in entry.splitlines() if line and not line.startswith("#")]
        if not lines:
            continue
        name, _, file = lines[0].partition(" ")
        old, new = ("\n".join(line[2:] for line in lines[1:] if line.startswith(mark)) for mark in ("- ", "+ "))
        if not (file and old and new and all(line.startswith(("- ", "+ ")) for line in lines[1:])):
            raise ValueError(f'entry {lines[0]!r} must be a number and a file, then lines "- text" and "+ text"')
        edits.append(Mutant(name, file, old, new))
    return edits


def mutants() -> list[Mutant]:
    """The edits of claim_mutants.txt."""
    return read(LIST.read_text(encoding="utf-8"))


@functools.cache
def tests() -> dict[str, list[str]]:
    """Claim → its tests, "tests/file.py::name" or "tests/file.py::name[case]"; claims without tests are left out."""
    lines = (ROOT / "docs" / "claims.txt").read_text(encoding="utf-8").splitlines()
    rows = [line.split(" | ") for line in lines if re.match(r"\d-\d\d \| ", line)]
    by_claim = {row[0]: [word for word in row[-1].split("; ") if "::" in word] for row in rows}
    return {claim: words for claim, words in by_claim.items() if words}


def edited(mutant: Mutant, root: Path = ROOT) -> tuple[str, str]:
    """The file's content before and after the edit; ValueError if the text is not in the file exactly once."""
    source = (root / mutant.file).read_text(encoding="utf-8")
    count = source.count(mutant.text)
    if count != 1:
        other = [str(path.relative_to(root)) for path in files(root) if mutant.text in path.read_text(encoding="utf-8")]
        where = f"; it is in {', '.join(other)}" if other and not count else ""
        raise ValueError(f"{LIST.name}: the text of {mutant.name} is {count} times in {mutant.file}, not once{where}")
    return source, source.replace(mutant.text, mutant.mutated)


def files(root: Path = ROOT) -> Iterator[Path]:
    """The Python files of the package and of the examples."""
    for part in ("fastvit_triton", "examples"):
        yield from sorted((root / part).rglob("*.py"))


@functools.cache
def functions(path: Path) -> dict[str, str]:
    """Function → source with its decorators, of a test file; marks that say when a test runs are left out."""
    text = path.read_text(encoding="utf-8")
    lines, sources = text.splitlines(), {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            text = "\n".join(lines[first - 1 : node.end_lineno])
            sources[node.name] = re.sub(r"^@pytest\.mark\.(fast|full|few)\b.*\n", "", text, flags=re.MULTILINE)
    return sources


def hashes(mutant: Mutant, root: Path = ROOT) -> dict[str, str]:
    """Hashes of the edited lines, before and after, and of the source of the claim's tests."""
    before, after = edited(mutant, root)
    at = before.index(mutant.text)
    start = before.rfind("\n", 0, at) + 1
    ends = before.find("\n", at + len(mutant.text)), after.find("\n", at + len(mutant.mutated))
    lines = [text[start:end] for text, end in zip((before, after), ends, strict=True)]
    sources = []
    for word in tests()[mutant.claim]:
        path, _, name = word.partition("::")
        sources += [functions(root / path)[name.partition("[")[0]], name]
    return {"line": short(lines), "tests": short(sources)}


def short(texts: Iterable[str]) -> str:
    """First 16 digits of the SHA-256 of some texts."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def rows(path: Path = RESULT) -> dict[str, dict[str, Any]]:
    """The rows of a result file by name; none if there is no file."""
    return {row["name"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}


def is_current(mutant: Mutant, row: dict[str, Any] | None) -> bool:
    """True if a row is of this edit and of these tests, which ran."""
    return row is not None and not row["error"] and {key: row[key] for key in ("line", "tests")} == hashes(mutant)


def commit() -> str | None:
    """The commit that is checked out, None without git."""
    try:
        completed = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return completed.stdout.strip()


def copied(folder: Path) -> Path:
    """A copy of the repository, without what git and builds leave in it; the package is compiled."""
    tree = folder / "tree"
    tree.mkdir()
    for path in ROOT.iterdir():
        if path.name in PARTS:
            shutil.copytree(path, tree / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif path.is_file() and not path.name.startswith("."):
            shutil.copy(path, tree)
    by_content = py_compile.PycInvalidationMode.CHECKED_HASH  # an edit may leave a file's size and time as they are
    compileall.compile_dir(tree / "fastvit_triton", quiet=1, invalidation_mode=by_content)
    return tree


def selected(item: Any, word: str) -> bool:
    """True if a collected test is of "file", "file::name", or "file::name[case]" with a parameter or an identifier."""
    function, _, case = word.partition("[")
    if "::" not in word:
        return item.nodeid.partition("::")[0] == word
    if item.nodeid == word or item.nodeid.partition("[")[0] != function:
        return item.nodeid == word
    return not case or case.removesuffix("]") in item.callspec.params.values()


class Recorder:
    """pytest plugin: runs the selected tests, and notes the first that fails, or the file that cannot be imported."""

    def __init__(self, words: list[str]) -> None:
        self.words = words
        self.seen: dict[str, Any] = {"ran": 0, "failed": None, "error": None}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Leaves the selected tests."""
        items[:] = [item for item in items if any(selected(item, word) for word in self.words)]

    def pytest_collectreport(self, report: Any) -> None:
        """Notes a file that cannot be imported."""
        if report.failed:
            self.seen["error"] = f"{report.nodeid} cannot be imported"

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Counts the tests that ran, and notes the first failure."""
        self.seen["ran"] += report.when == "call"
        if report.failed and self.seen["failed"] is None:
            self.seen["failed"] = report.nodeid


class Trials:
    """Runs tests of a copy of the repository, with and without edits, each time in a forked process."""

    def __init__(self, tree: Path, seconds: float, declared: list[Any]) -> None:
        self.tree = tree
        self.seconds = seconds  # after which a process is ended
        self.declared = declared  # what `prepare` returned
        self.passing: set[str] = set()  # tests without edits, as far as it is known
        self.failing: set[str] = set()

    def run(self, words: list[str], options: Iterable[str] = ()) -> dict[str, Any]:
        """Runs the `selected` tests: {"ran": number, "failed": test or None, "error": message or None}."""
        out, log = self.tree.parent / "seen.json", self.tree.parent / "log.txt"
        out.unlink(missing_ok=True)
        sys.stdout.flush()
        child = os.fork()
        if not child:
            try:
                os.setsid()
                with open(log, "w") as stream:
                    os.dup2(stream.fileno(), 1)
                    os.dup2(stream.fileno(), 2)
                gc.freeze()  # a collection would copy the memory of all that was imported
                enter(self.tree, self.declared)
                recorder = Recorder(words)
                paths = list(dict.fromkeys(re.sub(r"\[.*", "", word) for word in words))
                sys.modules["pytest"].main([*paths, *OPTIONS, *options], plugins=[recorder])
                out.write_text(json.dumps(recorder.seen))
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(0)
        seen: dict[str, Any] = {"ran": 0, "failed": None, "error": None}
        deadline = time.monotonic() + self.seconds
        while not os.waitpid(child, os.WNOHANG)[0]:
            if time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return seen | {"error": f"more than {self.seconds:g} seconds"}
            time.sleep(0.05)
        if not out.exists():
            last = (log.read_text().strip().splitlines() or ["no message"])[-1]
            return seen | {"error": f"the process ended: {last}"}
        seen = json.loads(out.read_text())
        if not seen["ran"] and seen["failed"] is None:
            seen["error"] = seen["error"] or "no test was found"
        return seen

    def run_edited(self, file: str, text: str, words: list[str], options: Iterable[str] = ()) -> dict[str, Any]:
        """The same with another text of a file, which is restored."""
        path = self.tree / file
        before = path.read_text(encoding="utf-8")
        path.write_text(text, encoding="utf-8")
        try:
            return self.run(words, options)
        finally:
            path.write_text(before, encoding="utf-8")

    def passes(self, test: str) -> bool:
        """True if a test that failed with an edit passes without it."""
        if test not in self.passing | self.failing:
            plain = self.run([test])
            (self.failing if plain["failed"] or plain["error"] else self.passing).add(test)
        return test in self.passing


def enter(tree: Path, declared: list[Any]) -> None:
    """Makes a forked process use the copy's modules."""
    os.chdir(tree)
    os.environ |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    sys.dont_write_bytecode = True
    sys.path[0] = str(tree)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("fastvit_triton", "benchmarks")]:
        del sys.modules[name]
    for library in declared:  # the copy declares them itself
        library._destroy()


def prepare() -> list[Any]:
    """Imports the libraries; returns the declarations that torchvision needs without CUDA, as in `benchmarks`."""
    import torch

    torch.set_num_threads(1)
    declared = []
    if torch.version.cuda is None and torch.version.hip is None:
        declared.append(torch.library.Library("torchvision", "DEF"))
        for name in ("nms", "qnms"):
            declared[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    for name in LIBRARIES:
        try:
            importlib.import_module(name)
        except ImportError:  # its tests are skipped, or say so
            print(f"{name} is not installed")
    return declared


def examine(mutant: Mutant, trials: Trials) -> dict[str, Any]:
    """What the tests of an edit show."""
    start = used()
    seen = trials.run_edited(mutant.file, edited(mutant, trials.tree)[1], tests()[mutant.claim])
    if seen["failed"] is not None and not trials.passes(seen["failed"]):
        seen["error"] = f"{seen['failed']} fails without the edit, too"
    killed = None if seen["error"] else seen["failed"]
    return {"killed": killed, "ran": seen["ran"], "error": seen["error"], "seconds": round(used() - start, 1)}


def used() -> float:
    """CPU seconds of the processes that ended."""
    spent = os.times()
    return spent.children_user + spent.children_system


def write(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Writes the result file, its rows in the order of the list."""
    from fastvit_triton.files import replacing

    kept = [found[mutant.name] for mutant in mutants() if mutant.name in found]
    head = {"command": "python -m benchmarks.claim_mutants", "killed": sum(bool(row["killed"]) for row in kept)}
    body = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in kept)
    with replacing(path) as temporary:
        temporary.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n{body}\n ]\n}}\n', encoding="utf-8")


def main() -> None:
    """Runs the edits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="numbers of claims, or names of edits")
    parser.add_argument("--missing", action="store_true", help="skip edits whose row is up to date")
    parser.add_argument("--out", type=Path, default=RESULT, help="result file (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for a claim's tests (default: %(default)s)")
    args = parser.parse_args()
    results, chosen = rows(args.out), mutants()
    if args.only is not None:
        names = {name for mutant in chosen for name in (mutant.name, mutant.claim)}
        if unknown := [name for name in args.only if name not in names]:
            parser.error(f"--only {' '.join(unknown)}: no such claim or edit in {LIST.name}")
        chosen = [mutant for mutant in chosen if mutant.name in args.only or mutant.claim in args.only]
    if args.missing:
        chosen = [mutant for mutant in chosen if not is_current(mutant, results.get(mutant.name))]
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="claim-mutants-") as folder:
        trials, facts = Trials(copied(Path(folder)), args.seconds, prepare()), {"commit": commit()}
        for mutant in chosen:
            row = examine(mutant, trials)
            results[mutant.name] = {"name": mutant.name} | hashes(mutant, trials.tree) | facts | row
            print(f"{mutant.name:6} {row['error'] or row['killed'] or 'SURVIVED'}  {row['seconds']} s", flush=True)
            write(results, args.out)


if __name__ == "__main__":
    if __package__:  # `benchmarks` has imported the package, whose ops a forked process could not register again
        sys.exit(subprocess.call([sys.executable, __file__, *sys.argv[1:]]))
    sys.path[0] = str(ROOT)
    main()
