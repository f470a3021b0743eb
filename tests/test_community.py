"""Tests of contributed files: valid ones pass, each error gives one sentence, and tables are generated from them.

All numbers here are invented.
"""

import json
import math
from functools import partial

import pytest

from benchmarks import community, plot, tune
from fastvit_triton.kernels import choose, launch

pytestmark = pytest.mark.fast

GPU = "Invented GPU 1000"
SOURCE = dict(command="c", date="2027-01-31 12:30 UTC", gpu=GPU, commit=None, cuda="13.0", hip=None)
SOURCE |= dict(driver_version="1.2", packages=dict(fastvit_triton="0.1.0", torch="2.13.0", triton="3.7.1"))
NEAR = "~attention C=32 F=96 H=2 N=8 B=2 + mlp C=32 F=128 N=8 B=2 inference"


def row(arm, us, speedup):
    """A variant with a time whose quartiles differ by a tenth."""
    found = dict(arm=arm, model="vit_invented", batch=4, dtype="bfloat16", phase="forward", match=True, within=0.5)
    times = dict(us=us, q1=0.9 * us, q3=1.1 * us, rounds=9)
    return found | times | dict(speedup=speedup, speedup_quartiles=[0.9 * speedup, 1.1 * speedup])


def parts():
    """(benchmark, selftest, exported file) as written by the commands on a GPU."""
    missing = {
        name: value for name, value in row("timm", 1.0, 1.0).items() if name in ("arm", "model", "batch", "dtype")
    }
    rows = [row("eager (timm)", 3e3, 1.0), row("torch.compile", 2e3, 1.5), row("ours eager", 1.5e3, 2.0)]
    rows.append(missing | dict(phase="forward", reason="there is none"))
    selftest = SOURCE | dict(passed=7, failed=[], not_reached=["slow"], rows=[dict(case="a")] * 7)
    facts = dict(
        gpu=GPU, architecture="sm_89", units=10, torch="2.13.0+cu130", cuda="13.0", triton="3.7.1", sources="s"
    )
    exported = dict(format=1, facts=facts, runs=[dict(date="2027-01-31 12:00 UTC", model="M")])
    exported["rows"] = {name: dict(config=dict(A=n)) for n, name in enumerate(("r.half 1000,30", "r.half ~1024,32"))}
    exported["ways"] = {NEAR[1:]: dict(way="plain"), NEAR: dict(way="fused"), "r inference ~8,4": dict(way="mixed")}
    return json.loads(json.dumps([SOURCE | dict(rows=rows), selftest, exported]))


def joined(benchmark, selftest, exported=None):
    """The content of a contributed file: what the commands wrote, without the selftest's rows."""
    summary = {name: value for name, value in selftest.items() if name != "rows"}
    return dict(format=1, benchmark=benchmark, selftest=summary) | ({} if exported is None else dict(tune=exported))


def good():
    return joined(*parts())


def checked(tmp_path, capsys, held):
    """(exit code, lines) of `check`."""
    path = tmp_path / "file.json"
    path.write_text(held if isinstance(held, str) else json.dumps(held))
    code = community.main(["check", str(path)])
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith(f"{path}: ") for line in lines)
    return code, [line.removeprefix(f"{path}: ") for line in lines]


def test_files_are_valid_with_and_without_tuning(tmp_path, capsys):
    """Oracle: the line."""
    for held in (good(), joined(*parts()[:2])):
        assert checked(tmp_path, capsys, held) == (0, [f"a valid measurement of {GPU}"])


ERRORS = [
    # the schema
    (("format",), 2, "format is 2; it must be 1"),
    (("extra",), 1, "the file: Additional properties are not allowed ('extra' was unexpected)"),
    (("selftest",), None, "the file: 'selftest' is a required property"),
    (("benchmark", "gpu"), "null", "benchmark.gpu is null; it must be the name of a GPU"),
    (("benchmark", "gpu"), math.nan, "NaN is not a number"),
    (("benchmark", "gpu"), "", "benchmark.gpu is \"\"; it must be the name of a GPU"),
    (("benchmark", "date"), "yesterday", "it must be a date such as"),
    (("benchmark", "packages", "torch"), None, "benchmark.packages: 'torch' is a required property"),
    (("selftest", "packages", "triton"), None, "selftest.packages: 'triton' is a required property"),
    (("benchmark", "dry_run"), True, "measure without --dry-run"),
    (("benchmark", "rows", 1, "us"), -1.0, "benchmark.rows[1].us is -1.0; it must be a positive number"),
    (("benchmark", "rows", 1, "us"), 1e999, "Infinity is not a number"),
    (("benchmark", "rows", 1, "q3"), None, "benchmark.rows[1]: 'q3' is a dependency of 'us'"),
    (("benchmark", "rows", 1, "dtype"), "int8", "it must be float32, bfloat16 or float16"),
    (("benchmark", "rows", 1, "batch"), 0, "it must be the number of images, 1 or more"),
    (("benchmark", "rows"), [], "it must be the variants, eager PyTorch first"),
    (("tune", "facts", "architecture"), "../sm_90", "an architecture such as sm_89"),
    (("tune", "facts", "units"), 0, "the number of multiprocessors"),
    (("tune", "ways", NEAR, "way"), "fast", "it must be plain, mixed or fused"),
    # machine and versions
    (("selftest", "failed"), ["linear"], "selftest: 1 checks failed, the first is linear"),
    (("selftest", "passed"), 0, "selftest: no check passed"),
    (("benchmark", "packages", "fastvit_triton"), None, "benchmark: it names neither a commit nor a version"),
    (("selftest", "cuda"), "null", "selftest: torch was built without CUDA and HIP"),
    (("benchmark", "driver_version"), None, "benchmark: the driver version is missing"),
    (("selftest", "gpu"), "Other", f"selftest: gpu is Other, that of benchmark is {GPU}"),
    (("selftest", "packages", "torch"), "2.12.0", "selftest: torch is 2.12.0, that of benchmark is 2.13.0"),
    (("tune", "facts", "gpu"), "cpu", f"tune: gpu is cpu, that of benchmark is {GPU}"),
    (("tune", "facts", "triton"), "3.6.0", "tune: triton is 3.6.0, that of benchmark is 3.7.1"),
    (("selftest", "commit"), "abc", "selftest: commit is abc, that of benchmark is None"),
    (("tune", "rows", "r.half ~1024,32", "config"), dict(A=5000), "tune: it is not a file of"),
    # times
    (("benchmark", "rows", 1, "batch"), 5, "rows: batch is 4 and 5"),
    (("benchmark", "rows", 1, "phase"), "training", "rows: phase is forward and training"),
    (("benchmark", "rows", 1, "arm"), "ours eager", "rows: ours eager appears more than once"),
    (("benchmark", "rows", 0, "arm"), "ours compiled", "rows: the first is ours compiled; it must be eager"),
    (("benchmark", "rows", 0, "us"), None, "rows: the first is eager (timm) without a time"),
    (("benchmark", "rows", 2, "us"), None, "rows: no variant of fastvit_triton has a time"),
    (("benchmark", "rows", 2, "match"), False, "ours eager: it has a time although its result is wrong"),
    (("benchmark", "rows", 1, "q1"), 2100.0, "torch.compile: the quartiles 2100 and 2200 µs do not enclose"),
    (("benchmark", "rows", 1, "q3"), 1900.0, "torch.compile: the quartiles 1800 and 1900 µs do not enclose"),
    (("benchmark", "rows", 2, "speedup_quartiles"), [2.1, 2.2], "ours eager: the quartiles 2.1 and 2.2 do not enclose"),
    (("benchmark", "rows", 2, "speedup_quartiles"), [2.5, 1.5], "ours eager: the quartiles 2.5 and 1.5 do not enclose"),
    (("benchmark", "rows", 2, "speedup"), 2.1, None),
    (("benchmark", "rows", 2, ("speedup", "speedup_quartiles")), (3.0, [2.9, 3.1]), "ours eager: its speedup is 3,"),
    (("benchmark", "rows", 2, ("speedup", "speedup_quartiles")), (1.5, [1.4, 1.6]), "ours eager: its speedup is 1.5,"),
]  # fmt: skip


@pytest.mark.parametrize("place, value, sentence", ERRORS, ids=[f"{i}" for i in range(len(ERRORS))])
def test_each_error_is_reported(place, value, sentence, tmp_path, capsys):
    """Oracle: one entry of a valid file is changed by hand (None removes it); only that is reported, if anything."""
    held = inner = good()
    *path, last = place
    for key in path:
        inner = inner[key]
    for name, new in zip(last, value, strict=True) if isinstance(last, tuple) else [(last, value)]:
        if new is None:
            del inner[name]
        else:
            inner[name] = None if new == "null" else new
    code, lines = checked(tmp_path, capsys, held)
    assert (code, len(lines)) == (int(sentence is not None), 1), lines
    assert (sentence or "a valid measurement") in lines[0]


@pytest.mark.parametrize(
    "text, sentence",
    [("{", "is not JSON"), ("[]", "it is not a contributed file"), ("{}", "it is not a contributed file")],
)
def test_other_files_are_rejected(text, sentence, tmp_path, capsys):
    """Oracle: the sentence, and the exit code."""
    code, (line,) = checked(tmp_path, capsys, text)
    assert code == 1 and sentence in line
    assert community.main(["check", str(tmp_path / "none.json")]) == 1
    assert "No such file" in capsys.readouterr().out


def test_every_rule_of_the_schema_has_a_sentence():
    """Oracle: every subschema that can fail by itself has a description, which `check` prints."""
    from jsonschema import Draft202012Validator

    schema = json.loads((community.FOLDER / community.SCHEMA).read_text())
    Draft202012Validator.check_schema(schema)

    def walk(node, place):
        if isinstance(node, dict) and node.keys() & {"type", "const", "enum"} and place[-1:] != ["properties"]:
            assert node.get("description"), place
        for key, value in node.items() if isinstance(node, dict) else ():
            walk(value, [*place, key])

    walk(schema, [])


def test_committed_files_are_valid():
    """Oracle: `check`; there may be no files yet."""
    for name, held in community.load().items():
        assert community.problems(held) == [], name


def test_table_is_generated_from_files(tmp_path):
    """Oracle: the invented numbers. Other libraries' models have their own variants; missing ones are empty cells."""
    assert plot.fill("<!-- measured: users --><!-- end -->", plot.load(tmp_path)).count(community.NOTHING) == 1
    folder = tmp_path / "community"
    folder.mkdir()
    (folder / "schema.json").write_text("{}")
    (folder / "b.json").write_text(json.dumps(good()))
    held = good()
    held["benchmark"]["rows"][2]["arm"] = "optimized by us"
    held["benchmark"]["gpu"], held["tune"]["runs"][0]["date"] = "A GPU", "2027-02-01 00:00 UTC"  # tuned afterwards
    (folder / "c.json").write_text(json.dumps(held))
    text = plot.fill("<!-- measured: users --><!-- end -->", plot.load(tmp_path))
    first, second = (line for line in text.splitlines() if "vit_invented" in line)
    cells = " | 3 (2.7 to 3.3) | 2 (1.8 to 2.2) | **1.5** (1.35 to 1.65) |  | 7 passed, 1 not reached |"
    versions = "vit_invented, inference, bfloat16, batch 4; torch 2.13.0, triton 3.7.1"
    link = "[2027-01-31](benchmarks/results/community/"
    assert first == f"| A GPU: {versions}, {link}c.json){cells}"
    assert second == f"| {GPU}: {versions}, tuned, {link}b.json){cells}"


def test_table_equals_the_one_in_the_docs():
    """Oracle: the table on the page."""
    page = (community.ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert f"<!-- measured: users -->\n{community.table(community.load())}\n<!-- end -->" in page


@pytest.mark.parametrize("contributed", [False, True])
def test_exported_classes_are_adopted(contributed, tmp_path, monkeypatch):
    """Oracle: the table, and the values looked up in it; exact sizes are omitted, other rows are kept."""
    (tmp_path / "sm_89.json").write_text('{"other": {"config": {"X": 1}, "provenance": "predicted"}}')
    (tmp_path / "t.json").write_text(json.dumps(good() if contributed else parts()[2]))
    names = ["r.half ~1024,32", NEAR, "r inference ~8,4"]
    assert tune.adopt(tmp_path / "t.json", tmp_path) == names
    facts = dict(gpu=GPU, source="t.json")
    want = {"other": dict(config={"X": 1}, provenance="predicted")}
    want[names[0]] = dict(config={"A": 1}, provenance="measured", **facts)
    want["ways"] = dict(measured={NEAR: "fused", names[2]: "mixed"}, facts={NEAR: facts, names[2]: facts})
    assert json.loads((tmp_path / "sm_89.json").read_text()) == want
    monkeypatch.setattr(launch, "TUNED", tmp_path)
    choose.forget()
    with launch.targeting("sm_89"):
        found = [launch.config("r.half", {"A": 9}, launch.torch.device("cpu"), 1000, n)["A"] for n in (31, 33)]
        assert found == [1, 9]
        found = choose.measured_way(launch.torch.device("cpu"), (NEAR[1:], NEAR))
        assert found == ("fused", f"measured in tuned/sm_89.json: {NEAR}")
    monkeypatch.undo()
    choose.forget()


@pytest.mark.parametrize(
    "change, sentence",
    [
        (lambda held: held["facts"].update(architecture="../sm_90"), "its architecture is ../sm_90"),
        (lambda held: held["facts"].pop("architecture"), "its architecture is None"),
        (lambda held: held["facts"].update(architecture="cpu"), "its architecture is cpu"),
        (lambda held: held["rows"]["r.half ~1024,32"].update(config=dict(A="7")), "it is not a file of"),
        (lambda held: held.update(rows={"r 1,2": dict(config={})}, ways={}), "it has no entry for a class of sizes"),
    ],
)
def test_bad_exported_files_are_rejected(change, sentence, tmp_path, monkeypatch, capsys):
    """Oracle: one sentence on stderr, exit code 2, and no table."""
    held = parts()[2]
    change(held)
    (tmp_path / "t.json").write_text(json.dumps(held))
    monkeypatch.setattr(tune, "adopt", partial(tune.adopt, folder=tmp_path))
    monkeypatch.setattr("sys.argv", ["tune", "--adopt", str(tmp_path / "t.json")])
    with pytest.raises(SystemExit, match="2"):
        tune.main()
    assert f"{tmp_path / 't.json'} cannot be adopted: {sentence}" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]
