"""Tests of launch keys: whatever changes a binary changes its key; names, comments and file locations do not."""

import importlib.util
import itertools

import pytest
import torch

from benchmarks.fingerprint import checks, key, rules
from benchmarks.launch_recorder import Launch, Pointer

pytestmark = pytest.mark.fast

SOURCE = '''"""A kernel and its helper."""

import triton.language as tl
from triton import jit

LIMIT = tl.constexpr(4.0)


@jit
def scaled(x, low, by: tl.constexpr = 2, CAP: tl.constexpr = True):
    """Words."""
    if CAP:
        x = tl.minimum(x, LIMIT)
    return (x - low) * by


@jit
def kernel(x_ptr, y_ptr, n, eps, BLOCK: tl.constexpr):
    """Words."""
    i = tl.arange(0, BLOCK)
    half: tl.constexpr = BLOCK // 2
    x = tl.load(x_ptr + i, mask=i < n)
    y = tl.load(y_ptr + i, mask=i < half)
    tl.store(y_ptr + i, scaled(x, y, CAP=True) + eps, mask=i < n)
'''
COUNT = itertools.count()


def module(folder, text):
    """The text as a module imported from a new file."""
    path = folder / f"source_{next(COUNT)}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def launch(kernel, **changes) -> Launch:
    """A launch of a kernel with five arguments."""
    x, y = torch.empty(64), torch.empty(64)
    given = dict(x=Pointer(x), y=Pointer(y), n=64, eps=1e-6, BLOCK=64) | changes
    return Launch(kernel, (1,), dict(zip(kernel.arg_names, given.values(), strict=True)), dict(num_warps=4))


def key_of(folder, *edits: tuple[str, str]) -> str:
    """The key of the kernel above after text replacements."""
    text = SOURCE
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    (kernel,) = (v for n, v in vars(module(folder, text)).items() if n in ("kernel", "renamed"))
    return key(launch(kernel), "sm_90")


@pytest.mark.parametrize(
    "edits",
    [
        [('    """Words."""\n', "")],
        [("    if CAP:", "    # words\n\n    if (CAP):  # words")],
        [("def kernel", "def renamed"), ("scaled", "sized")],
        [("x_ptr", "from_ptr"), ("BLOCK", "WIDTH"), ("half", "middle"), ("LIMIT", "MOST")],
        [("CAP", "CLAMP"), ("low", "least"), ("by", "factor")],
        [("n, eps,", "n: 'rows', eps,")],
        [("import triton.language as tl", "import triton\nfrom triton import language as tl")],
    ],
)
def test_names_and_comments_do_not_change_the_key(tmp_path, edits):
    """Oracle: equal keys after edits of docstrings, comments, layout, names, annotations and imports."""
    assert key_of(tmp_path, *edits) == key_of(tmp_path)


def test_the_file_does_not_change_the_key(tmp_path, monkeypatch):
    """Oracle: the same key when the helper moves to another module, called by name or as a module attribute."""
    monkeypatch.syspath_prepend(tmp_path)
    head, helper, kernel = (
        SOURCE.partition("LIMIT")[0],
        *SOURCE[SOURCE.index("LIMIT") :].split("\n\n\n@jit\ndef kernel"),
    )
    (tmp_path / "moved_helper.py").write_text(head + helper)
    for line, name in (("from moved_helper import scaled", "scaled"), ("import moved_helper", "moved_helper.scaled")):
        text = f"{head}{line}\n\n\n@jit\ndef kernel{kernel}".replace("scaled(", f"{name}(")
        assert key(launch(module(tmp_path, text).kernel), "sm_90") == key_of(tmp_path)


@pytest.mark.parametrize(
    "edit",
    [
        ("BLOCK // 2", "BLOCK // 4"),
        ("+ eps", "- eps"),
        ("constexpr(4.0)", "constexpr(5.0)"),
        ("= 2,", "= 3,"),
        ("CAP=True)", "CAP=False)"),
        ("scaled(x, y,", "scaled(y, x,"),
        ("def scaled(x, low,", "def scaled(low, x,"),
        ("x_ptr, y_ptr, n", "y_ptr, x_ptr, n"),
        ("tl.minimum", "tl.maximum"),
        ("half: tl.constexpr", "half"),
        ("i < half", "i < n"),
        ("eps, BLOCK", "eps: tl.constexpr, BLOCK"),
        ("@jit\ndef scaled", "@jit(noinline=True)\ndef scaled"),
        ("@jit\ndef kernel", "@jit(do_not_specialize=['n'])\ndef kernel"),
    ],
)
def test_code_changes_the_key(tmp_path, edit):
    """Oracle: another key after an edit of a number, operator, constant, default, keyword, order or decorator."""
    assert key_of(tmp_path, edit) != key_of(tmp_path)


def test_a_shadowed_helper_changes_the_key(tmp_path):
    """Oracle: `scaled = scaled(x)` still depends on the code of `scaled`."""
    hiding = ("    y = tl.load", "    scaled = scaled(x, 0.0)\n    y = tl.load"), ("scaled(x, y, CAP=True)", "scaled")
    assert key_of(tmp_path, *hiding) != key_of(tmp_path, *hiding, ("= 2,", "= 3,"))


def test_arguments_change_the_key(tmp_path):
    """Oracle: another key for each dtype, size, alignment, identity, overlap, integer, option, grid, architecture."""
    kernel = module(tmp_path, SOURCE).kernel
    x, both = torch.empty(65), torch.empty(128)
    made = [
        key(launch(kernel, **changes), "sm_90")
        for changes in (
            {},
            dict(x=Pointer(torch.empty(64, dtype=torch.int32))),
            dict(x=Pointer(torch.empty(128))),
            dict(x=Pointer(x[1:])),
            dict(x=Pointer(x[:64]), y=Pointer(x[:64])),
            dict(x=Pointer(both[:64]), y=Pointer(both[60:124])),
            dict(x=None),
            dict(x=(Pointer(x[:64]),)),
            dict(n=65),
            dict(eps=1),
            dict(BLOCK=128),
        )
    ]
    first = launch(kernel)
    made += [key(Launch(kernel, (2,), first.values, first.options), "sm_90"), key(first, "sm_80")]
    made += [key(Launch(kernel, (1,), first.values, dict(num_warps=8)), "sm_90")]
    assert len(set(made)) == len(made)
    assert key(launch(kernel, eps=1e-5), "sm_90") == made[0]  # Triton does not specialise on floats
    assert key(launch(kernel, x=Pointer(both[:64]), y=Pointer(both[64:])), "sm_90") == made[0]


def test_unknown_globals_raise(tmp_path):
    """Oracle: an error for an object of an unsupported type and for an undefined name."""
    with pytest.raises(TypeError, match="scaled uses LIMIT, a dict"):
        key(
            launch(module(tmp_path, SOURCE.replace("tl.constexpr(4.0)", "{}")).kernel),
            "",
        )
    with pytest.raises(NameError, match="kernel uses nothing, which is not defined"):
        key(launch(module(tmp_path, SOURCE.replace("+ eps", "+ nothing")).kernel), "sm_90")


def test_checks_are_code_and_figures():
    """Oracle: docstrings, comments and other GPUs do not change the rules; code and this GPU do."""
    source = '"""Words."""\n\nGPUS = {"a": 1}\n\n\ndef rule(n):\n    """Words."""\n    return n > 2\n'
    for old, new in (('"""Words."""', '"""More."""'), ("return n", "# words\n    return  n"), ('{"a": 1}', '{"b": 2}')):
        assert rules(source.replace(old, new)) == rules(source)
    assert rules(source.replace("n > 2", "n > 3")) != rules(source)
    assert checks("sm_80") != checks("sm_90")
