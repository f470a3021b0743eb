"""Makes random edits of lines of the package that changed since a commit, and lists those that no test sees.

    python -m benchmarks.random_mutants --since COMMIT [--count N] [--seed N] [--seconds N] [--out FILE]

An edit changes an operator, a constant or a flag, negates a condition, or drops a statement. Each is made in a copy of
the repository, where the default tests of the files that CONTRIBUTING.md names for the edited one run, see `affected`,
until one fails; it must pass without the edit. Edits that survive are listed, and are no error: some change nothing
that can be seen, and some show a test that is missing.
"""

import argparse
import ast
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

if __package__:
    from . import affected, claim_mutants
else:  # run as a script, see the end of this file
    import affected
    import claim_mutants

ROOT = Path(__file__).parents[1]
PACKAGE = "fastvit_triton"
SECONDS = 300  # of a test file
COMPARED = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}  # fmt: skip
COMPUTED = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"), ast.Pow: ("**", "*"),
}  # fmt: skip
TEXT = ast.JoinedStr, ast.Raise, ast.Import, ast.ImportFrom  # what they hold is text, or breaks every test


class Edit(NamedTuple):
    """An edit of a file."""

    file: str  # path from the root
    line: int  # number of its first line
    start: int  # of the replaced text in the file, in characters
    end: int  # of the replaced text
    new: str  # what replaces it

    def applied(self, source: str) -> str:
        """The source with the edit."""
        return source[: self.start] + self.new + source[self.end :]

    def shown(self, source: str) -> str:
        """The first line before and after the edit."""
        lines = [text.splitlines()[self.line - 1].strip() for text in (source, self.applied(source))]
        return " → ".join(lines)


def changed_lines(since: str, root: Path = ROOT) -> dict[str, set[int]]:
    """File of the package → numbers of its lines that differ from those of a commit, which git must know."""
    command = [
        "git",
        "diff",
        "--unified=0",
        "--find-renames",
        "--no-color",
        "--no-ext-diff",
        since,
        "--",
        f"{PACKAGE}/*.py",
    ]
    try:
        text = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    except subprocess.CalledProcessError as error:
        raise ValueError(f"since is {since!r}; git says: {error.stderr.strip()}") from error
    lines: dict[str, set[int]] = {}
    file = ""
    for row in text.splitlines():
        if row.startswith("+++ "):
            file = row.removeprefix("+++ b/")
        elif match := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", row):
            first = int(match[1])
            lines.setdefault(file, set()).update(range(first, first + int(match[2] or 1)))
    return {file: numbers for file, numbers in lines.items() if numbers}


def readable(node: ast.AST) -> Iterator[ast.AST]:
    """A node and those below it, without annotations and without what is inside of texts and imports."""
    yield node
    if isinstance(node, TEXT):
        return
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from readable(child)


def edits(file: str, source: str) -> Iterator[Edit]:
    """All edits of a file that can be drawn."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    lines = source.splitlines()

    def place(row: int, column: int) -> int:
        return starts[row - 1] + len(lines[row - 1].encode()[:column].decode())

    def span(node: Any) -> tuple[int, int]:
        return place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)

    def between(node: Any, left: Any, right: Any, old: str, new: str) -> Iterator[Edit]:
        start, end = span(left)[1], span(right)[0]
        if source[start:end].count(old) == 1:  # no comment with the operator
            yield Edit(file, node.lineno, start, end, source[start:end].replace(old, new))

    for node in readable(ast.parse(source)):
        new = None
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from between(node, node.left, node.comparators[0], *COMPARED[type(node.ops[0])])
        elif isinstance(node, ast.BinOp) and type(node.op) in COMPUTED:
            yield from between(node, node.left, node.right, *COMPUTED[type(node.op)])
        elif isinstance(node, ast.BoolOp):
            names = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            yield from between(node, *node.values[:2], *names)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            new = ast.get_source_segment(source, node.operand)
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            new = str(not node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            new = str(node.value + 1)
        elif isinstance(node, ast.Constant) and isinstance(node.value, float):
            new = repr(node.value * 2 or 1.0)
        elif isinstance(node, (ast.AugAssign, ast.Raise)) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        ):
            new = "pass"
        elif isinstance(node, (ast.If, ast.IfExp)) and isinstance(node.test, (ast.Name, ast.Attribute, ast.Call)):
            start, end = span(node.test)
            yield Edit(file, node.test.lineno, start, end, f"not {source[start:end]}")
        if new is not None:
            yield Edit(file, node.lineno, *span(node), new)  # type: ignore[attr-defined]


def parses(source: str) -> bool:
    """True for Python."""
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def draw(lines: dict[str, set[int]], count: int, seed: int, root: Path = ROOT) -> list[Edit]:
    """So many random edits, at most one of a line; lines are equally likely, and so are the edits of a line.

    The same seed draws the same edits of the same lines, which are numbers by file.
    """
    choices: dict[tuple[str, int], list[Edit]] = {}
    for file, numbers in sorted(lines.items()):
        source = (root / file).read_text(encoding="utf-8")
        for edit in edits(file, source):
            if edit.line in numbers and parses(edit.applied(source)):
                choices.setdefault((file, edit.line), []).append(edit)
    generator = random.Random(seed)
    places = generator.sample(sorted(choices), min(count, len(choices)))
    return [generator.choice(choices[place]) for place in places]


def default_marks() -> str:
    """The expression that selects the default tests, from pyproject.toml."""
    match = re.search(r"^addopts = .*-m '([^']+)'", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert match is not None
    return match[1]


def examine(edit: Edit, tests: dict[str, str | None], trials: claim_mutants.Trials) -> dict[str, Any]:
    """What tests see of an edit: the test, or file that cannot be imported, that `killed` it, or why that is unknown.

    `tests` has the `-k` expression or None of each file. Tests that fail without the edit, too, are left out.
    """
    text = edit.applied((trials.tree / edit.file).read_text(encoding="utf-8"))
    start, ran = claim_mutants.used(), 0
    killed, error = None, None if tests else "CONTRIBUTING.md names no tests"
    left = list(tests)
    while left and not killed and not error:
        file, expression = left[0], tests[left[0]]
        options = ["-m", default_marks(), *(["-k", expression] if expression else [])]
        options += [f"--deselect={name}" for name in sorted(trials.failing)]
        seen = trials.run_edited(edit.file, text, [file], options)
        ran += seen["ran"]
        killed, error = seen["failed"], seen["error"] if seen["error"] != "no test was found" else None
        if error == f"{file} cannot be imported":
            plain = trials.run([file], ["--collect-only"])
            killed, error = (None, error) if plain["error"] == error else (file, None)
        elif killed and not trials.passes(killed):
            killed = None
            continue  # the rest of the file
        left.pop(0)
    return {"killed": killed, "ran": ran, "error": error, "seconds": round(claim_mutants.used() - start, 1)}


def main() -> None:
    """Draws and examines the edits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", required=True, metavar="COMMIT", help="edit lines that changed after this commit")
    parser.add_argument("--count", type=int, default=30, help="number of edits (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="of the draws (default: from the commit that is checked out)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each test file (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="also write the rows to this file, as JSON")
    args = parser.parse_args()
    commit = claim_mutants.commit()
    seed = int(commit[:8], 16) if args.seed is None and commit else args.seed or 0
    try:
        chosen = draw(changed_lines(args.since), args.count, seed)
    except ValueError as error:
        parser.error(str(error))
    print(f"{len(chosen)} edits with seed {seed}", flush=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    rows: list[dict[str, Any]] = []
    head = {"command": "python -m benchmarks.random_mutants", "since": args.since, "commit": commit, "seed": seed}
    with tempfile.TemporaryDirectory(prefix="random-mutants-") as folder:
        tree = claim_mutants.copied(Path(folder))
        trials = claim_mutants.Trials(tree, args.seconds, claim_mutants.prepare())
        for edit in chosen:
            shown = edit.shown((tree / edit.file).read_text(encoding="utf-8"))
            row = examine(edit, affected.test_files([edit.file]), trials)
            rows.append({"file": edit.file, "line": edit.line, "edit": shown} | row)
            print(f"{edit.file}:{edit.line}  {shown}")
            print(f"    {row['error'] or row['killed'] or 'SURVIVED'}  {row['seconds']} s", flush=True)
            if args.out is not None:
                args.out.write_text(json.dumps(head | {"rows": rows}, indent=1, ensure_ascii=False) + "\n")
    left = [row for row in rows if not row["killed"] and not row["error"]]
    for name in sorted(trials.failing):
        print(f"{name} fails without edits and was left out")
    print(f"{len(left)} of {len(rows)} edits survived")
    for row in left:
        print(f"{row['file']}:{row['line']}  {row['edit']}")


if __name__ == "__main__":
    if __package__:  # `benchmarks` has imported the package, whose ops a forked process could not register again
        sys.exit(subprocess.call([sys.executable, __file__, *sys.argv[1:]]))
    sys.path[0] = str(ROOT)
    main()
