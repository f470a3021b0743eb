"""Checks and tabulates what users measured on their GPUs: the files in benchmarks/results/community.

    python -m benchmarks.community check FILE...

A file holds what `fastvit-triton benchmark --out`, `selftest` and, optionally, `tune --export` wrote on one GPU, as
schema.json there says. `fastvit-triton check` writes such a file, and so does examples/measure_on_your_gpu.ipynb.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from fastvit_triton.kernels import measured

from .result_file import ROOT
from .result_file import table as markdown

FOLDER = ROOT / "benchmarks" / "results" / "community"
SCHEMA = "schema.json"
NOTHING = "Nothing has been contributed yet."
# column of the table → variants of a row, of models of ours and of other libraries
COLUMNS = {
    "torch.compile": ("torch.compile",),
    "ours": ("ours eager", "optimized by us"),
    "ours, compiled": ("ours compiled", "optimized, compiled"),
}
OURS = {*COLUMNS["ours"], *COLUMNS["ours, compiled"], "our kernels", "our kernels, compiled", "compiled, our backend"}


def read(path: Path) -> object:
    """Parses a JSON file; ValueError if it is not valid, or has NaN or infinities."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not a number")

    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    except ValueError as error:  # also raised for text that is not UTF-8
        raise ValueError(f"{path} is not JSON: {error}") from error


def load(folder: Path = FOLDER) -> dict[str, dict]:
    """File name → content of all contributed files of a folder, without the schema."""
    return {path.name: read(path) for path in sorted(folder.glob("*.json")) if path.name != SCHEMA}


def problems(held: object) -> list[str]:
    """Errors in the content of a contributed file, one sentence each: schema violations, otherwise inconsistencies."""
    from jsonschema import Draft202012Validator

    if not isinstance(held, dict) or "format" not in held:
        return ["it is not a contributed file; fastvit-triton check makes one"]
    errors = Draft202012Validator(json.loads((FOLDER / SCHEMA).read_text())).iter_errors(held)
    violations = [_sentence(error) for error in errors]
    return violations or [*_wrong_parts(**held), *_wrong_times(held["benchmark"]["rows"])]


def _sentence(error: object) -> str:
    """A jsonschema error as a sentence."""
    place = error.json_path.removeprefix("$").removeprefix(".") or "the file"
    if error.validator in ("required", "dependentRequired", "additionalProperties"):
        return f"{place}: {error.message}"
    value = json.dumps(error.instance, ensure_ascii=False)
    value = value if len(value) <= 60 else f"{value[:57]}..."
    return f"{place} is {value}; it must be {error.schema['description']}"


def _wrong_parts(benchmark: dict, selftest: dict, tune: dict | None = None, **_: object) -> Iterator[str]:
    """Yields a sentence if the selftest failed or the parts differ in machine, versions or commit."""
    if selftest["failed"]:
        yield f"selftest: {len(selftest['failed'])} checks failed, the first is {selftest['failed'][0]}"
    if not selftest["passed"]:
        yield "selftest: no check passed; give it more --seconds"
    for name, part in dict(benchmark=benchmark, selftest=selftest).items():
        if part["commit"] is None and "fastvit_triton" not in part["packages"]:
            yield f"{name}: it names neither a commit nor a version of fastvit_triton"
        if part["cuda"] is None and part.get("hip") is None:
            yield f"{name}: torch was built without CUDA and HIP, so it ran on no GPU"
        if part["cuda"] is not None and "driver_version" not in part:
            yield f"{name}: the driver version is missing; nvidia-smi prints it"
    for name, theirs in dict(selftest=_machine(selftest), tune=tune and tune["facts"]).items():
        for what, value in _machine(benchmark).items() if theirs else ():
            if _public(theirs[what]) != _public(value):
                yield f"{name}: {what} is {theirs[what]}, that of benchmark is {value}; make all parts on one machine"
    ours, theirs = (part["commit"] and part["commit"].removesuffix("-dirty") for part in (benchmark, selftest))
    if ours != theirs:
        yield f"selftest: commit is {theirs}, that of benchmark is {ours}; use one of them"
    if tune is not None:
        try:
            measured.parse(json.dumps(tune))
        except ValueError as error:
            yield f"tune: {error}"


def _machine(part: dict) -> dict[str, str]:
    return dict(gpu=part["gpu"], torch=part["packages"]["torch"], triton=part["packages"]["triton"])


def _public(version: str) -> str:
    """A version without its local suffix, which package metadata may omit: 2.11.0+cu130 becomes 2.11.0."""
    return version.partition("+")[0]


def _wrong_times(rows: Sequence[dict]) -> Iterator[str]:
    """Yields a sentence for each inconsistency of a benchmark's rows, the first of which is the baseline."""
    first = rows[0]
    for name in ("model", "batch", "dtype", "phase"):
        if others := [row[name] for row in rows if row[name] != first[name]]:
            yield f"rows: {name} is {first[name]} and {others[0]}; all rows must agree"
    arms = [row["arm"] for row in rows]
    if twice := [arm for arm in dict.fromkeys(arms) if arms.count(arm) > 1]:
        yield f"rows: {twice[0]} appears more than once"
    timed = [row for row in rows if "us" in row]
    if not first["arm"].startswith("eager") or "us" not in first:
        yield f"rows: the first is {first['arm']}{' without a time' * ('us' not in first)}; it must be eager, with one"
        return
    if not any(row["arm"] in OURS for row in timed):
        yield "rows: no variant of fastvit_triton has a time"
    for row in timed:
        name, (low, high) = row["arm"], row["speedup_quartiles"]
        if not row["match"]:
            yield f"{name}: it has a time although its result is wrong"
        if not row["q1"] <= row["us"] <= row["q3"]:
            yield f"{name}: the quartiles {row['q1']:g} and {row['q3']:g} µs do not enclose the median {row['us']:g} µs"
        if not low <= row["speedup"] <= high:
            yield f"{name}: the quartiles {low:g} and {high:g} do not enclose the speedup {row['speedup']:g}"
        # at least 3/4 of each variant's samples lie above q1, so half of the pairs exceed `least`; likewise `most`
        least, most = first["q1"] / row["q3"], first["q3"] / row["q1"]
        if not 0.99 * least - 0.0005 <= row["speedup"] <= 1.01 * most + 0.0005:  # three digits; quartiles interpolate
            yield f"{name}: its speedup is {row['speedup']:g}, but its times imply {least:.3g} to {most:.3g}"


def table(held: dict[str, dict]) -> str:
    """Markdown table of milliseconds with quartiles, by GPU and computation; the fastest is bold."""
    if not held:
        return NOTHING
    lines = []
    for name, content in sorted(held.items(), key=lambda item: (item[1]["benchmark"]["gpu"], item[0])):
        benchmark, checks = content["benchmark"], content["selftest"]
        first, rows = benchmark["rows"][0], {row["arm"]: row for row in benchmark["rows"] if "us" in row}
        shown = [first, *(next((rows[arm] for arm in arms if arm in rows), None) for arms in COLUMNS.values())]
        best = min((row["us"] for row in shown if row), default=math.nan)
        phase = "training" if first["phase"] == "training" else "inference"
        what = f"{first['model']}, {phase}, {first['dtype']}, batch {first['batch']}"
        versions = f"torch {benchmark['packages']['torch']}, triton {benchmark['packages']['triton']}"
        # the GPU had been tuned before the benchmark ran
        tuned = ", tuned" if "tune" in content and content["tune"]["runs"][0]["date"] <= benchmark["date"] else ""
        link = f"[{benchmark['date'][:10]}](benchmarks/results/community/{name})"
        cells = [f"{benchmark['gpu']}: {what}; {versions}{tuned}, {link}", *(_cell(row, best) for row in shown)]
        lines.append([*cells, f"{checks['passed']} passed, {len(checks['not_reached'])} not reached"])
    return markdown(["ms on GPUs of users", "eager", *COLUMNS, "selftest"], lines)


def _cell(row: dict | None, best: float) -> str:
    if row is None:
        return ""
    text = f"{row['us'] / 1e3:.3g}"
    spread = f"{row['q1'] / 1e3:.3g} to {row['q3'] / 1e3:.3g}"
    return f"{f'**{text}**' if row['us'] == best else text} ({spread})"


def main(words: Sequence[str] | None = None) -> int:
    """Prints one line per problem, or one line for a valid file; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["check"])
    parser.add_argument("files", type=Path, nargs="+")
    wrong = 0
    for path in parser.parse_args(words).files:
        try:
            content = read(path)
            sentences = problems(content)
        except (OSError, ValueError) as error:
            sentences = [str(error)]
        for sentence in sentences:
            print(f"{path}: {sentence.removeprefix(f'{path} ')}")
        if not sentences:
            print(f"{path}: a valid measurement of {content['benchmark']['gpu']}")
        wrong += bool(sentences)
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
