"""Generated files are of today's code, and `benchmarks.regenerate` finds and makes those that are not."""

import json
import subprocess
import textwrap
from pathlib import Path

import pytest

from benchmarks import artefacts, fuzz, regenerate, survey
from benchmarks.artefacts import ARTEFACTS, COMMAND, ROOT, Artefact

REPORTS = ("static", "triton-3.6.0", "triton-3.9.0")  # which test_static.py compares, GPU by GPU
COMPARED = [one for one in ARTEFACTS if one.changes is not None and one.name not in REPORTS]
OTHER = artefacts.other_versions()


@pytest.mark.skipif(bool(OTHER), reason=f"other versions than those of constraints.txt: {', '.join(OTHER)}")
@pytest.mark.parametrize("artefact", COMPARED, ids=lambda one: one.name)
@pytest.mark.parametrize("thorough", [False, pytest.param(True, marks=pytest.mark.full)], ids=["quick", "thorough"])
def test_generated_files_are_of_todays_code(artefact, thorough):
    """Oracle: texts, keys, hashes of inputs and some rows, as the code gives them now."""
    why = artefact.why(thorough)
    assert not why, f"{artefact.name} is stale; run `{COMMAND}{' --thorough' * thorough}`\n" + "\n".join(why)


@pytest.mark.fast
def test_every_result_has_a_command():
    """Oracle: the files of benchmarks/results; each belongs to one artefact, and the modules of commands exist."""
    files = [path for path in artefacts.RESULTS.rglob("*") if path.is_file() and path != artefacts.HASHES]
    made = [path for one in ARTEFACTS for path in one.files()]
    assert len(set(made)) == len(made) and not {*files} - {*made}
    assert len({one.name for one in ARTEFACTS}) == len(ARTEFACTS)
    for one in ARTEFACTS:
        kind, module = one.command.split()[:2] if one.command.startswith("-m") else ("", one.command)
        path = module if not kind else f"{module.replace('.', '/')}.py"
        assert (ROOT / path).exists() or (ROOT / path.removesuffix(".py")).is_dir() or module == "pytest", one.name
        assert one.minutes or one.needs
        assert (one.changes is None) <= bool(one.needs)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A root without files."""
    for module, name, path in (
        (artefacts, "ROOT", tmp_path),
        (artefacts, "HASHES", tmp_path / "inputs.json"),
        (regenerate, "ROOT", tmp_path),
        (regenerate, "LOGS", tmp_path / "logs"),
    ):
        monkeypatch.setattr(module, name, path)
    artefacts.functions.cache_clear()
    yield tmp_path
    artefacts.functions.cache_clear()


def writes(name: str, code: str, **more) -> Artefact:
    """An artefact NAME.txt whose command is this code; by default never stale."""
    more = dict(changes=lambda thorough: ()) | more
    return Artefact(name, f"-c '{code}'", f"{name}.txt", 1, **more)


COPY = 'open("b.txt", "w").write(open("a.txt").read() + "b")'


@pytest.mark.fast
def test_commands_run_after_those_that_write_their_inputs(elsewhere, capsys):
    """Oracle: the text of both; a dependent runs though it was not asked for, and afterwards both are fresh."""
    first = writes("a", 'import time; time.sleep(0.2); open("a.txt", "w").write("a")')
    second = writes("b", COPY, inputs="a.txt")
    assert first.why(False) == ["a.txt does not exist"] and second.why(False) == ["b.txt does not exist"]
    regenerate.execute([second, first], jobs=2)
    assert (elsewhere / "b.txt").read_text() == "ab" and first.why(False) == second.why(False) == []
    (elsewhere / "a.txt").write_text("c")
    assert second.why(False) == ["a.txt changed"]
    regenerate.execute([first], jobs=2, dependents=[second])
    assert (elsewhere / "b.txt").read_text() == "ab" and second.why(False) == []
    names = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert names == [*"aabbaabb"]


def test_independent_commands_run_at_the_same_time(elsewhere):
    """Oracle: each of two commands waits for the other's file; with one job the first would wait for ever."""
    wait = 'import os, time; open("{0}.txt", "w"); ' + (
        '[time.sleep(0.01) for _ in range({2}) if not os.path.exists("{1}.txt")]; '
        'assert os.path.exists("{1}.txt"), "alone"'
    )
    pair = [writes(name, wait.format(name, other, 6000)) for name, other in ("ab", "ba")]
    regenerate.execute(pair, jobs=2)
    for path in elsewhere.glob("*.txt"):
        path.unlink()
    alone = [writes(name, wait.format(name, other, 10)) for name, other in ("ab", "ba")]
    with pytest.raises(regenerate.Failed, match=r"^a: .* ended with code 1: AssertionError: alone \(logs/a.log\)$"):
        regenerate.execute(alone, jobs=1)
    assert not (elsewhere / "b.txt").exists()


@pytest.mark.fast
def test_a_failure_keeps_what_is_finished(elsewhere):
    """Oracle: the file of a command that ends later, none of one that had not started, and one sentence; what is
    stale after its command is a failure as well."""
    good = writes("a", 'import time; time.sleep(0.5); open("a.txt", "w")')
    bad, late = writes("b", 'raise ValueError("why")'), writes("c", "0")
    with pytest.raises(regenerate.Failed) as error:
        regenerate.execute([good, bad, late], jobs=2)
    (line,) = str(error.value).splitlines()
    assert line.startswith("b: python -c ") and line.endswith("ended with code 1: ValueError: why (logs/b.log)")
    assert (elsewhere / "a.txt").exists() and not (elsewhere / "logs" / "c.log").exists()
    again = writes("a", "0", changes=lambda thorough: ["row 3 differs"])
    with pytest.raises(regenerate.Failed, match=r"^a is still stale after its command: row 3 differs$"):
        regenerate.execute([again], jobs=1)


@pytest.mark.fast
@pytest.mark.parametrize("code", [0, 1])
def test_a_command_may_need_another_release(elsewhere, monkeypatch, code):
    """Oracle: what the command imports from the folder that pip filled, once; or the last line of pip's error."""
    called = []

    def pip(words: list, **options) -> subprocess.CompletedProcess:
        called.append(words[-1])
        if not code:
            words[-2].mkdir()
            (words[-2] / "textwrap.py").write_text("name = 'another'")
        return subprocess.CompletedProcess(words, code, "", "first\nno network\n")

    monkeypatch.setattr(subprocess, "run", pip)
    one = writes("a", 'import textwrap; open("a.txt", "a").write(textwrap.name)', package="none==0")
    for _ in range(2):
        if code:
            with pytest.raises(regenerate.Failed, match=r"^none==0 cannot be installed: no network$"):
                regenerate.execute([one], jobs=1)
        else:
            regenerate.execute([one], jobs=1)
    assert called == ["none==0"] * (1 + code)
    assert code or (elsewhere / "a.txt").read_text() == "another" * 2


@pytest.mark.fast
def test_an_input_that_is_edited_meanwhile_makes_stale(elsewhere):
    """Oracle: the hash of what was there when the command began."""
    (elsewhere / "a.txt").write_text("a")
    one = writes("b", COPY + '; open("a.txt", "w").write("new")', inputs="a.txt")
    with pytest.raises(regenerate.Failed, match=r"^b is still stale after its command: a.txt changed$"):
        regenerate.execute([one], jobs=1)


@pytest.mark.fast
def test_functions_are_inputs_by_their_code(elsewhere):
    """Oracle: by hand; documentation, comments and other functions do not count."""
    source = 'def f():\n    """Text."""\n    return 1\n\ndef g():\n    return 1\n'
    one, path = writes("a", 'open("a.txt", "w")', inputs="code.py::f"), elsewhere / "code.py"
    path.write_text(source)
    regenerate.execute([one], jobs=1)
    for old, new, counts in (
        ("Text", "Other text", False),
        ("return 1\n\n", "return 1  # one\n\n\n", False),
        ("g():\n    return 1", "g():\n    return 2", False),
        ("return 1\n\n", "return 2\n\n", True),
    ):
        assert old in source
        path.write_text(source.replace(old, new))
        artefacts.functions.cache_clear()
        assert one.why(False) == ["code.py::f changed"] * counts, new


def damaged(name: str, edit, folder: Path) -> None:
    """Writes an edited copy of a result file."""
    held = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
    edit(held)
    (folder / name).write_text(json.dumps(held))


@pytest.mark.skipif(bool(OTHER), reason="as above")
def test_changed_rows_are_named(tmp_path, monkeypatch):
    """Oracle: the edits of copies of result files."""
    monkeypatch.setattr(artefacts, "RESULTS", tmp_path)
    damaged("launches.json", lambda held: held["rows"][0].update(launches=1, bytes=2), tmp_path)
    (why,) = artefacts.launches(False)
    assert why.startswith("Setting(model='timm:vit_tiny_patch16_224'") and why.endswith("has other launches, bytes")
    damaged("launches.json", lambda held: held["rows"].pop(), tmp_path)
    assert [*artefacts.launches(False)] == ["767 rows, not 768"]
    damaged("recompiles.json", lambda held: held["rows"][0].update(model="x"), tmp_path)
    missing, more = artefacts.recompiles(False)
    assert missing.endswith(" is missing") and more == "x is no longer listed"

    def of_another_vit(held: dict) -> None:
        del held["rows"][1:]
        held["rows"][0]["launches"] = held["rows"][0]["digits"]["side"] = 1

    damaged("survey.json", of_another_vit, tmp_path)
    monkeypatch.setattr(survey, "SYSTEMS", survey.SYSTEMS[:1])
    assert [*artefacts.survey(False)] == ["ViT was trained with other options", "ViT has other launches"]
    damaged("fuzz.json", lambda held: held["pytorch"]["fold"].update(ok=0), tmp_path)
    monkeypatch.setattr(fuzz, "RESULT", tmp_path / "fuzz.json")
    assert [*artefacts.fuzz(False)] == ["fold is drawn for another number of calls"]
    have = dict(a=dict(x=1, y=2), b=dict(x=[3]))
    count = dict(a=dict(x=1, y=4), b=dict(x=(3,)), c=dict(x=1)).get
    assert [*artefacts.recounted(have, "abc", count)] == ["a has other y"]


def test_the_command_line(elsewhere, monkeypatch, capsys):
    """Oracle: what is listed, what runs, and one sentence for each wrong word."""
    made = [
        writes("a", 'open("a.txt", "w").write("{}")', changes=None, needs="a GPU"),
        writes("b", 'open("b.txt", "w")'),
        writes("c", "FOLDER", changes=None, needs="files in FOLDER"),
    ]
    monkeypatch.setattr(artefacts, "ARTEFACTS", made)
    monkeypatch.setattr(artefacts, "other_versions", lambda: [])
    regenerate.main(["--stale", "--jobs", "1"])
    out = capsys.readouterr().out
    assert "b                  stale, at most 1 CPU-minutes: b.txt does not exist\n" in out and "b: done in" in out
    assert (elsewhere / "b.txt").exists() and not (elsewhere / "a.txt").exists()
    regenerate.main(["--only", "a"])
    (elsewhere / "c.txt").touch()
    capsys.readouterr()
    regenerate.main([])
    assert capsys.readouterr().out == textwrap.dedent(
        """\
        a                  of no known date; needs a GPU
        b                  fresh
        c                  of no known date; needs files in FOLDER
        """
    )
    monkeypatch.setattr(artefacts, "other_versions", lambda: ["timm is 0, not 1"])
    for words, sentence in {
        ("--only", "a", "x"): "--only x: no such artefact; use a, b, c",
        ("--only", "c"): "--only c: run python -c 'FOLDER'; it needs files in FOLDER",
        ("--jobs", "0"): "--jobs is 0; use at least 1",
        ("--stale",): "--stale counts with the versions of constraints.txt, and timm is 0, not 1; install these",
    }.items():
        with pytest.raises(SystemExit) as end:
            regenerate.main([*words])
        assert end.value.code == 2 and sentence in capsys.readouterr().err


@pytest.mark.fast
def test_measurements_state_when_they_were_made(elsewhere):
    """Oracle: the dates and commits of two files."""
    for name, date, commit in (("x", "2027-01-02 03:04 UTC", "a" * 12), ("y", "2027-01-03", "b" * 12)):
        rows = [dict(date=date, commit="c" * 12)]
        (elsewhere / f"{name}.json").write_text(json.dumps(dict(date=date, commit=commit, rows=rows)))
    one = Artefact("x", "", "x.json y.json", needs="a GPU")
    said = f"of 2027-01-02 to 2027-01-03, commit {'a' * 12}, commit {'b' * 12}; needs a GPU"
    assert regenerate.state(one, one.why(False)) == said
