"""Tests of value ranges: every field, argument and command-line option rejects what its annotation excludes."""

import inspect
import math
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
import torch
from commands import refused

from fastvit_triton import train
from fastvit_triton.cli.recipe_options import RECIPE_OPTIONS
from fastvit_triton.train import Recipe, Step, Transform, ranges
from fastvit_triton.train.recipes import FOLDER, override_recipe
from fastvit_triton.train.settings import RECIPES

pytestmark = pytest.mark.fast

# Text without a fixed list of choices: names of `create_model`, `policy_by_name` and classes, and a source.
FREE = {"source", "reported", "duration", "model", "policy", "optimizer"}
HINTS = inspect.get_annotations(Recipe)
RECORDS = {"Data", "Progress", "Score"}  # results of training


def leaves(hint: Any) -> list[Any]:
    """Components of an annotation: types, literals, and types with a range."""
    if get_origin(hint) is Literal or (get_origin(hint) is Annotated and len(leaves(get_args(hint)[0])) == 1):
        return [hint]
    parts = get_args(hint)[:1] if get_origin(hint) is Annotated else get_args(hint)
    return [leaf for part in parts if part is not ... for leaf in leaves(part)] or [hint]


def excluded_values(hint: Any) -> list[Any]:
    """Values that an annotation excludes: other types, and beyond both ends of each range; NaN and infinity."""
    kinds, found = leaves(hint), [[object()], object()]
    if bool not in kinds:
        found += [True]
    if NoneType not in kinds:
        found += [None]
    if dict not in kinds:
        found += [{}]
    if str not in kinds:
        found += ["0.5", "no such choice"]
    numbers = [math.nan, math.inf, -math.inf]
    for kind, interval, *_ in (get_args(leaf) for leaf in kinds if get_origin(leaf) is Annotated):
        low, high = (float(end) if end != "2^63" else 2.0**63 for end in interval[1:-1].split(", "))
        numbers += [0.5] if kind is int else []
        numbers += [] if math.isinf(low) else [low - 1 if interval[0] == "[" else low]
        numbers += [] if math.isinf(high) else [high + 1 if interval[-1] == "]" else high]
    if get_origin(hint) is tuple:
        size = 1 if get_args(hint)[-1] is ... else len(get_args(hint))
        return found + [()] + [(allowed_value(get_args(hint)[0]),) * (size - 1) + (number,) for number in numbers]
    return found + numbers


def allowed_value(hint: Any) -> Any:
    """A value that an annotation includes."""
    if get_origin(hint) is Literal:
        return get_args(hint)[0]
    if get_origin(hint) is tuple:
        return tuple(allowed_value(part) for part in get_args(hint) if part is not ...)
    if get_origin(hint) is Annotated and isinstance(get_args(hint)[0], type):
        kind, interval = get_args(hint)
        return kind(1) if interval[1:].startswith(("0, inf", "1", "-inf", "0, 255", "0, 18", "0, 10", "0, 2")) else 0.5
    return next((value for kind, value in ((str, ""), (bool, False), (dict, {})) if leaves(hint)[0] is kind), None)


def unranged(hint: Any) -> list[Any]:
    """Numbers in an annotation that have no range, where one can be checked (not inside tensors or functions)."""
    return [leaf for leaf in leaves(hint) if ranges._is_checkable(hint) and leaf in (int, float)]


def functions() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Public functions of `train` and constructors of its classes, with the annotations of their arguments."""
    found = {}
    for name in train.__all__:
        thing = getattr(train, name)
        if inspect.isfunction(thing) or (inspect.isclass(thing) and not is_dataclass(thing)):
            made = thing if inspect.isfunction(thing) else thing.__init__
            hints = inspect.get_annotations(made)
            found[name] = thing, {argument: hint for argument, hint in hints.items() if argument != "return"}
    return found


def test_every_number_has_a_range():
    """Oracle: the annotations: every number has a range, and every text a list of choices."""
    for record in (getattr(train, name) for name in train.__all__):
        if is_dataclass(record) and isinstance(record, type) and record.__name__ not in RECORDS:
            for name, hint in inspect.get_annotations(record).items():
                assert not unranged(hint), f"{record.__name__}.{name} is {hint}; annotate it as ranges.py says"
    for name, (_, hints) in functions().items():
        for argument, hint in hints.items():
            assert not unranged(hint), f"{name}({argument}) is {hint}; annotate it as ranges.py says"
    assert {name for name, hint in HINTS.items() if str in leaves(hint)} == FREE
    assert all(ranges._is_checkable(hint) for hint in HINTS.values())


@pytest.mark.parametrize("name", HINTS)
def test_recipes_reject_excluded_values(name: str):
    """Oracle: the annotation; one sentence with the field's name and value, from both ways to make a recipe."""
    for value in excluded_values(HINTS[name]):
        for make in (replace, override_recipe):
            with pytest.raises(ValueError) as error:
                make(FOLDER, **{name: value})
            sentence = str(error.value)
            assert sentence.startswith(f"{name} is {value!r}; use ") and "\n" not in sentence


@pytest.mark.parametrize("record", [Step(), Transform((8, 8), (0.5,), (0.5,))], ids=lambda r: type(r).__name__)
def test_other_records_reject_excluded_values(record: Step | Transform):
    """Oracle: the annotations of `Step` and `Transform`, which custom loops build."""
    hints = inspect.get_annotations(type(record))
    held = {f.name: hints[f.name] for f in fields(record) if ranges._is_checkable(hints[f.name])}
    assert held.keys() == (
        {"grad_accum_steps", "clip", "per_rank_batches"} if isinstance(record, Step) else hints.keys()
    )
    for name, hint in held.items():
        for value in excluded_values(hint):
            with pytest.raises(ValueError, match=f"^{name} is .*; use "):
                replace(record, **{name: value})


@pytest.mark.parametrize("name", functions())
def test_functions_reject_excluded_values(name: str):
    """Oracle: the annotations; the sentence comes before the other arguments are used."""
    function, hints = functions()[name]
    for argument, hint in hints.items():
        if ranges._is_checkable(hint) and any(get_origin(leaf) in (Annotated, Literal) for leaf in leaves(hint)):
            for value in excluded_values(hint):
                given = {other: allowed_value(kind) for other, kind in hints.items()} | {argument: value}
                with pytest.raises(ValueError, match=rf"^{argument} is .*; use "):
                    function(**given)


@pytest.mark.parametrize("name", RECIPES)
def test_shipped_recipes_pass(name: str):
    """Oracle: each recipe passes the check when it is made, again here, and when it is restored from a state."""
    recipe = RECIPES[name]
    assert replace(recipe) == recipe and Recipe(**{f.name: getattr(recipe, f.name) for f in fields(recipe)}) == recipe


def test_ends_of_ranges():
    """Oracle: the brackets, by hand."""
    for name, allowed, refused_ in (
        ("clip", (1e-30, 1, None), (0, -1, math.inf, math.nan)),
        ("label_smoothing", (0, 0.999), (1, -1e-9)),
        ("layer_decay", (1, 1e-9), (0, 1.0001)),
        ("erasing", (0, 1), (-0.1, 1.1)),
        ("repeats", (1, 3), (0, 2.0, True, "3")),
        ("weight_decay", (0, 0.3), (-1, 1e9)),  # the last value negates every weight: lr · weight_decay above 1
        ("betas", ((0, 0.5), [0.9, 0.95]), ((0.9,), (0.9, 1.0), 0.9)),
        (
            "policy",
            ("", "timm", "three", "randaug(2,15)"),
            ("auto", "randaug(0,1)", "randaug(2,1.2.3)"),
        ),
        ("head_bias", (-6.9, 0), (math.nan, math.inf)),
        ("shift", (0, 224), (225,)),
        ("warmup", (0, 0.99), (1.0, -0.1)),  # fractions of this recipe's run
    ):
        for value in allowed:
            assert getattr(override_recipe(FOLDER, **{name: value}), name) == value
        for value in refused_:
            with pytest.raises(ValueError, match=f"^{name} is "):
                override_recipe(FOLDER, **{name: value})


def test_error_sentences():
    """Oracle: the sentences by hand, one of each kind."""
    for name, value, sentence in (
        ("clip", -1, "clip is -1; use a number above 0, or None for no clipping"),
        ("mixup", -1, "mixup is -1; use a number of at least 0"),
        ("ema_decay", 2, "ema_decay is 2; use a number in [0, 1), or None for no EMA"),
        ("repeats", 0.5, "repeats is 0.5; use an integer of at least 1"),
        ("decay", "cos", "decay is 'cos'; use 'cosine' or 'linear'"),
        ("optimizer", "adam", "optimizer is 'adam'; use 'adamw', 'sgd', 'lamb', 'muon', or module:Class"),
        ("betas", (1, 1), "betas is (1, 1); use 2 values, each a number in [0, 1)"),
        ("mean", (), "mean is (); use one or more values, each a number in [0, 1]"),
        ("flip", 1, "flip is 1; use True or False"),
        ("head_bias", math.inf, "head_bias is inf; use a finite number"),
        ("options", None, "options is None; use a dictionary"),
    ):
        with pytest.raises(ValueError) as error:
            override_recipe(FOLDER, **{name: value})
        assert str(error.value) == sentence


def test_a_negative_clip_raises():
    """Oracle: PyTorch, whose clip_grad_norm_ with norm −1 negates every gradient silently."""
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.tensor([1.0, 2.0, 3.0])
    torch.nn.utils.clip_grad_norm_([weight], -1.0)
    assert (weight.grad < 0).all()
    with pytest.raises(ValueError, match="clip is -1; use a number above 0"):
        Step(clip=-1)


WRONG = {float: "nan", int: "0", str: "no-such-choice"}
OPTIONS = {f"--{name}": WRONG[kind] for name, (kind, _) in RECIPE_OPTIONS.items() if name != "model"}
OPTIONS |= {"--epochs": "0", "--batch-size": "-1", "--lr": "inf", "--warmup": "1", "--img-size": "100000"}
OPTIONS |= {"--grad-accum-steps": "0", "--save-every": "0", "--workers": "-1", "--seed": "-1"}


@pytest.mark.parametrize("option", OPTIONS)
def test_the_command_rejects_excluded_values(option: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    """Oracle: exit code 2, one sentence that names the option and its value, no traceback, and no folder."""
    sentence = refused(capsys, "train", "--out", tmp_path / "out", option, OPTIONS[option])
    name = option.removeprefix("--")
    assert f"{name} is " in sentence.replace("_", "-") and "; " in sentence
    assert not (tmp_path / "out").exists()
