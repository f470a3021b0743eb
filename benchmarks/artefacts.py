"""Generated files: the command that writes each, listed in artefacts.json, and what in it is not of today's code.

A file that is computed from code is compared with what the code gives now: texts and keys as a whole, counted rows in
part, because all of them would take as long as the command. Pictures cannot be compared; hashes of what they are drawn
from are in results/inputs.json. What was measured does not become stale: its file states when and at which commit.
Data of the package, which the others are counted with, come first; what is measured, trained or made by hand last.
"""

import ast
import importlib
import importlib.util
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from .claim_mutants import short
from .result_file import ROOT

RESULTS = ROOT / "benchmarks" / "results"
HASHES = RESULTS / "inputs.json"
COMMAND = "python -m benchmarks.regenerate --stale"
COUNTED = "torch triton torchvision timm transformers vit-pytorch".split()  # packages that counted rows depend on

Changes = Callable[[bool], Iterable[str]]  # thorough → what is not of today's code, one sentence each


class Artefact(NamedTuple):
    """Files that one command writes."""

    name: str  # for `--only`
    command: str  # words after `python`; in capitals what a user must give
    outputs: str  # patterns of paths from the root, separated by spaces
    minutes: float = 0.0  # of one core, if everything is made anew
    changes: Changes | None = None  # what is not of today's code; None for measurements
    inputs: str = ""  # files whose hashes are recorded, as patterns or as "file::function", separated by spaces
    needs: str = ""  # what a run needs besides this environment; such an artefact is made only by name
    package: str = ""  # one more package of the environment, "name==version"

    def files(self) -> list[Path]:
        """The files that are there."""
        return found(self.outputs)

    def follows(self, other: "Artefact") -> bool:
        """Whether an output of the other is an input."""
        return any(fnmatch(path, pattern) for path in other.outputs.split() for pattern in self.inputs.split())

    def why(self, thorough: bool) -> list[str]:
        """Why it is stale, one sentence each; nothing if it is fresh or measured."""
        missing = [pattern for pattern in self.outputs.split() if not found(pattern)]
        if missing or self.changes is None:
            return [f"{pattern} does not exist" for pattern in missing]
        recorded, today = hashes().get(self.name, {}), self.hashes()
        paths = [path for path in {**recorded, **today} if recorded.get(path) != today.get(path)]
        return [f"{path} changed" for path in paths] + list(self.changes(thorough))

    def hashes(self) -> dict[str, str]:
        """Hashes of the inputs, by path or "path::function"."""
        values = {path.relative_to(ROOT).as_posix(): short([path.read_bytes().hex()]) for path in found(self.inputs)}
        code = (word.split("::") for word in self.inputs.split() if "::" in word)
        return values | {f"{path}::{name}": short([functions(ROOT / path)[name]]) for path, name in code}


def found(patterns: str) -> list[Path]:
    """The files that match, sorted; words with "::" are left out."""
    return sorted({path for word in patterns.split() if "::" not in word for path in ROOT.glob(word)})


def hashes() -> dict[str, dict[str, str]]:
    """The recorded hashes of inputs, by artefact."""
    return json.loads(HASHES.read_text()) if HASHES.exists() else {}


@cache
def functions(path: Path) -> dict[str, str]:
    """Function → its code without docstring, comments and layout, of a file."""
    nodes = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)]
    for node in nodes:
        node.body = node.body[ast.get_docstring(node) is not None :]
    return {node.name: ast.dump(node) for node in nodes}


def other_versions() -> list[str]:
    """Packages that are not of the versions in constraints.txt, with which counts may differ, one sentence each."""
    pinned = dict(re.findall(r"^([\w-]+)==([^;\s]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    have = {name: version(name) for name in COUNTED}
    return [f"{name} is {have[name]}, not {pinned[name]}" for name in COUNTED if have[name] != pinned[name]]


def version(package: str) -> str | None:
    """The installed version of a package, without what follows a plus."""
    try:
        return metadata.version(package).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None


def spread(items: Iterable[Any], count: int) -> list[Any]:
    """So many of the items, at even distances, the first among them."""
    items = list(items)
    return [items[i * len(items) // count] for i in range(min(count, len(items)))]


def rows(name: str, key: str = "model") -> dict[str, Any]:
    """The rows of a result file by the value of a column."""
    return {row[key]: row for row in json.loads((RESULTS / f"{name}.json").read_text())["rows"]}


def listed(have: Iterable[str], want: Iterable[str]) -> Iterator[str]:
    """Yields what a file lacks and what it has no longer to have."""
    have, want = list(have), list(want)
    yield from (f"{name} is missing" for name in want if name not in have)
    yield from (f"{name} is no longer listed" for name in have if name not in want)


def recounted(have: Mapping[str, Any], names: Iterable[str], count: Callable[[str], dict[str, Any]]) -> Iterator[str]:
    """Yields the columns of recorded rows that differ from what is counted now."""
    for name in names:
        now = json.loads(json.dumps(count(name)))
        if name in have and (columns := [column for column in now if have[name].get(column) != now[column]]):
            yield f"{name} has other {', '.join(columns)}"


def text(path: Path, now: str) -> Iterator[str]:
    """Yields the path of a file whose text is another."""
    if path.read_text(encoding="utf-8") != now:
        yield f"{path.relative_to(ROOT)} has another text"


@cache
def pages() -> ModuleType:
    """The module docs/generate.py."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# What is not of today's code; modules are imported here, because each takes seconds.


def known(thorough: bool) -> Iterator[str]:
    """Registered classes that the file lacks; fingerprints of one in twenty classes, or of all."""
    from . import recognition

    have = json.loads(recognition.KNOWN.read_text())
    names, classes = recognition.portable(), {name for row in have.values() for name in row["classes"]}
    quick = {*spread(names, len(names) // 20), *(name for name in names if name not in classes)}
    now = recognition.merged(have, recognition.fingerprints(names if thorough else quick))
    return (f"{row['as']} has another row" for digest, row in now.items() if have.get(digest) != row)


def cpu_gains(thorough: bool) -> Iterator[str]:
    """What was measured, and if thorough the sizes of the models, which takes seconds."""
    from . import cpu_gains as made

    held = json.loads(made.GAINS.read_text(encoding="utf-8"))["cpus"]
    kept = {cpu: [{key: row[key] for key in row if key != "products"} for row in rows] for cpu, rows in held.items()}
    if kept != made.measured_rows():
        yield f"{made.GAINS.name} has other rows than the results"
    elif thorough:
        yield from text(made.GAINS, made.table())


def pretrained(thorough: bool) -> Iterator[str]:
    """The tables of the installed timm."""
    from . import pretrained_table as made

    yield from text(made.TABLE, made.text_of(made.table()))
    lines = [line for line in made.CLASSES.read_text(encoding="utf-8").splitlines() if line[0] != "#"]
    if [tuple(line.split("\t")) for line in lines] != made.class_names():
        yield f"{made.CLASSES.name} has other names"


def figures(thorough: bool) -> Iterator[str]:
    """Models without a size."""
    from . import figures

    return (f"{name} is missing" for name in figures.list_models() if name not in figures.figures()["sizes"])


def compiled(folder: str, archs: Sequence[str] = ()) -> Changes:
    """Launches that a compile report lacks or no longer has; unless thorough, of ViT-B in bfloat16."""

    def changes(thorough: bool) -> Iterator[str]:
        from . import static

        report = static.load(RESULTS / folder / "static.json")
        yield from text(RESULTS / folder / "static.md", static.markdown(report))
        mine = dict(triton=static.triton.__version__, ptxas=static.ptxas_versions())
        kept = static.reusable(report | mine if archs else report).values()  # another Triton has compilers of its own
        for arch in archs or static.GPUS:
            if not any(row["arch"] == arch for row in kept):
                yield f"launches on {arch} were compiled or examined otherwise"
            have = {row["key"]: row["kernel"] for row in report["rows"] if row["arch"] == arch}
            now = launches_now(arch, not thorough)
            missing = [now[key] for key in now if key not in have]
            gone = [have[key] for key in have if key not in now and thorough]
            for names, what in ((missing, "changed or new"), (gone, "that no longer occur")):
                yield from (f"{n} launches of {name} on {arch} {what}" for name, n in Counter(names).items())

    return changes


@cache
def launches_now(arch: str, quick: bool) -> dict[str, str]:
    """Key → kernel of the launches of today's code."""
    from .fingerprint import key
    from .launch_cases import cases
    from .static import recorded

    return {key(launch, arch): launch.name for case in cases(quick) for _, launch in recorded(case, arch)}


def candidates(thorough: bool) -> Iterator[str]:
    """GPUs whose record is of other compilers or rules; if thorough, launches on one that it lacks or no longer has."""
    from . import candidates
    from .fingerprint import key
    from .static import GPUS

    held = {arch: candidates.record(arch) for arch in GPUS}
    yield from (f"launches on {arch} were compiled or examined otherwise" for arch in GPUS if not held[arch])
    if thorough:
        now = {key(launch, "sm_90") for launch in candidates.launches("sm_90")}
        if count := len(now ^ held["sm_90"].keys()):
            yield f"{count} launches on sm_90 changed"


def launches(thorough: bool) -> Iterator[str]:
    """Of 768 rows three, or twelve."""
    from .launches import row_of, settings

    have = json.loads((RESULTS / "launches.json").read_text())["rows"]
    of = {str(setting): setting for setting in settings()}
    if len(have) != len(of):
        return iter([f"{len(have)} rows, not {len(of)}"])
    chosen = spread(of, 12 if thorough else 3)
    return recounted(dict(zip(of, have, strict=True)), chosen, lambda name: row_of(of[name]))


def gains(thorough: bool) -> Iterator[str]:
    """The list of models; the smallest model's predictions if thorough."""
    from . import gains

    have: dict[str, dict[str, Any]] = {}
    for row in json.loads((RESULTS / "gains.json").read_text())["rows"]:
        have.setdefault(row["model"], {})[f"{row['gpu']}, {row['phase']}, {row['batch']} images"] = row
    yield from listed(have, gains.MODELS)

    def count(title: str) -> dict[str, Any]:
        found = gains.rows(title, *gains.MODELS[title])
        return {f"{row['gpu']}, {row['phase']}, {row['batch']} images": row for row in found}

    yield from recounted(have, ["ViT-S/16"] if thorough else [], count)


def saved(thorough: bool) -> Iterator[str]:
    """The list of models; the smallest one if thorough."""
    from . import saved

    have = rows("saved")
    yield from listed(have, saved.MODELS)
    yield from recounted(have, ["ViT-S/16"] if thorough else [], saved.row)


def backtest(thorough: bool, measured: bool = False) -> Iterator[str]:
    """The published or measured rows; predictions of one model, or of four, to their last digit."""
    from . import backtest, rows

    published = backtest.measured(rows.committed()) if measured else backtest.read(backtest.TABLE)
    file, have = RESULTS / f"backtest{'-measured' * measured}.json", dict[str, dict[str, Any]]()
    for *facts, predicted, excluded in json.loads(file.read_text())["predictions"]:
        have.setdefault(facts[2], {})[str(facts)] = predicted or excluded

    def count(model: str) -> dict[str, Any]:
        mine = [row for row in published if row.model == model]
        counts = {key: backtest.counted(key) for key in {row.key for row in mine}}
        found = ((str([*row[:2], *row[3:7]]), row.predicted) for row in backtest.predicted(mine, counts))
        return {facts: predicted and round(predicted, 1) for facts, predicted in found}

    names = list(dict.fromkeys(row.model for row in published))
    yield from listed(have, names)
    yield from recounted(have, ["vit_tiny_patch16_224", *spread(names, 3 if thorough else 0)], count)


def rates(thorough: bool) -> Iterator[str]:
    """The errors of the backtest."""
    from .fit_rates import RATES, tested_errors

    if json.loads(RATES.read_text())["error_of_gain"] != tested_errors():
        yield "error_of_gain is of another backtest"


def choices(thorough: bool) -> Iterator[str]:
    """The model of the tables; all rows of one GPU if thorough."""
    from . import choices

    for key, gpu in choices.gpus.gpus().items():
        path = choices.CHOICES / f"{key}.json"
        if not path.exists() or choices.model() not in path.read_text(encoding="utf-8"):
            yield f"{path.name} is of another model"
        elif thorough and key == "rtx3090" and json.loads(path.read_text())["rows"] != choices.table(gpu):
            yield f"{path.name} has other rows"


def choices_compared(thorough: bool) -> Iterator[str]:
    """The model of the tables."""
    from . import choices

    if json.loads((RESULTS / "choices.json").read_text())["model"] != choices.model():
        yield "choices.json is of another model"


def coverage(name: str, models: str, quick: int, most: int) -> Changes:
    """The list of models and the table; so many rows, at most if thorough."""

    def changes(thorough: bool) -> Iterator[str]:
        from . import coverage, tables

        result, file = json.loads((RESULTS / f"{name}.json").read_text()), getattr(coverage, models)
        entries = {entry.name: entry for entry in coverage.entries(file.read_text(encoding="utf-8"))}
        of_towers = models == "TOWERS"
        written = (tables.towers_markdown if of_towers else tables.coverage_markdown)(result)
        yield from text(RESULTS / f"{name}.md", written)
        if of_towers and result["excluded"] != coverage.excluded(coverage.EXCLUDED.read_text(encoding="utf-8")):
            yield f"{coverage.EXCLUDED.name} changed"
        have = {row["model"]: row for row in result["rows"]}
        yield from listed(have, entries)
        chosen = spread(entries, most if thorough else quick)
        yield from recounted(have, chosen, lambda model: coverage.guarded(entries[model], models == "DETECTION"))

    return changes


def capture(thorough: bool) -> Iterator[str]:
    """The list of models and the table."""
    from . import capture_only, tables

    result = json.loads((RESULTS / "coverage-capture.json").read_text())
    yield from text(RESULTS / "coverage-capture.md", tables.capture_markdown(result))
    yield from listed([row["model"] for row in result["rows"]], [case.name for case in capture_only.CASES])


def recognition(thorough: bool) -> Iterator[str]:
    """The list of towers; shares of three if thorough."""
    from . import recognition

    have = json.loads((RESULTS / "recognition.json").read_text())["rows"]
    of = {entry.model: entry for entry in recognition.towers()}
    yield from listed(have, of)
    chosen = spread(of, 3 if thorough else 0)
    rows = {name: dict(shares=shares) for name, shares in have.items()}
    yield from recounted(rows, chosen, lambda name: dict(shares=recognition.shares(of[name])))


def recompiles(thorough: bool) -> Iterator[str]:
    """The list of towers, whose graphs tests/test_recompiles.py counts."""
    from . import recompiles

    return listed(rows("recompiles"), [case.name for case in recompiles.cases()])


def fuzz(thorough: bool) -> Iterator[str]:
    """The number of calls of each op that are drawn."""
    from . import fuzz

    result = json.loads(fuzz.RESULT.read_text())
    for path, calls in (("pytorch", fuzz.CALLS), ("kernels", fuzz.KERNEL_CALLS)):
        now = Counter(fuzz.drawn(number)[0].name for number in range(calls))
        have = {op: sum(counts.values()) for op, counts in result[path].items()}
        yield from (f"{op} is drawn for another number of calls" for op in {**now, **have} if have.get(op) != now[op])


def mutants(thorough: bool) -> Iterator[str]:
    """Models whose mutants were not judged."""
    from .mutants import RESULT  # and makes tests/ importable

    models = importlib.import_module("mutants").models
    return listed(json.loads(RESULT.read_text()), models())


def claims(thorough: bool) -> Iterator[str]:
    """Edits whose lines or tests changed, or whose tests did not run."""
    from . import claim_mutants

    have = claim_mutants.rows()
    edits = claim_mutants.mutants()
    return (f"{one.name} was not run" for one in edits if not claim_mutants.is_current(one, have.get(one.name)))


def survey(thorough: bool) -> Iterator[str]:
    """Systems, small models and parameters; launches of a ViT, or of nine systems."""
    from . import survey

    systems = {system.name: system for system in survey.SYSTEMS if system.built}
    have = rows("survey", "system")
    yield from listed(have, systems)
    for name in [name for name in systems if name in have]:
        if not survey.has_run(have[name].get("digits"), systems[name]):
            yield f"{name} was trained with other options"

    def sizes(name: str) -> dict[str, Any]:
        return dict(model=systems[name].model, parameters=survey.parameters(systems[name]))

    yield from recounted(have, systems, sizes)
    yield from recounted(have, spread(systems, 9 if thorough else 1), lambda name: survey.counted(systems[name]))


def tables(thorough: bool) -> Iterator[str]:
    """Pages with other tables."""
    from . import plot

    results = plot.load()
    for page in plot.pages():
        yield from text(page, plot.fill(page.read_text(encoding="utf-8"), results))


def docs(thorough: bool) -> Iterator[str]:
    """Pages with other text."""
    for path, now in pages().pages().items():
        yield from text(path, now)


CHANGES: dict[str, Changes] = {
    "known": known,
    "cpu-gains": cpu_gains,
    "pretrained": pretrained,
    "rates": rates,
    "choices": choices,
    "choices-compared": choices_compared,
    "figures": figures,
    "static": compiled("."),
    "triton-3.6.0": compiled("triton-3.6.0", ["sm_90"]),
    "triton-3.9.0": compiled("triton-3.9.0", ["sm_90"]),
    "candidates": candidates,
    "launches": launches,
    "gains": gains,
    "saved": saved,
    "backtest": backtest,
    "backtest-measured": partial(backtest, measured=True),
    "coverage": coverage("coverage", "MODELS", 1, 3),
    "coverage-towers": coverage("coverage-towers", "TOWERS", 1, 6),
    "coverage-detection": coverage("coverage-detection", "DETECTION", 0, 1),
    "coverage-capture": capture,
    "recognition": recognition,
    "recompiles": recompiles,
    "fuzz": fuzz,
    "mutants": mutants,
    "claim-mutants": claims,
    "survey": survey,
    "tables": tables,
    "pages": docs,
}
LISTED = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
ARTEFACTS = [Artefact(**fields, changes=CHANGES.get(fields["name"])) for fields in LISTED]
