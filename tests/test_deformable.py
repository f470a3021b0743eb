"""Tests of deformable sampling: special points, dtypes, repeatability. Oracle: transformers' module in float64."""

import itertools
import re

import pytest
import torch
from agreement import close64
from budget import converted, outside, results, telling
from interpreter import interpreting, poisoned
from transformers.models.deformable_detr.modeling_deformable_detr import MultiScaleDeformableAttention

import benchmarks  # noqa: F401 (declares torchvision's operators)
from fastvit_triton import deformable_attention
from fastvit_triton.kernels import deformable

pytestmark = pytest.mark.fast

SHAPES = ((3, 4), (2, 2), (1, 1))
N = sum(h * w for h, w in SHAPES)


def made(Nq=5, dtype=torch.float64, **changed):
    """Arguments for two heads of four channels and two points of each level, some of them outside."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    given = dict(
        value=randn(2, N, 2, 4), shapes=SHAPES, locations=randn(2, Nq, 2, 3, 2, 2), weights=randn(2, Nq, 2, 3, 2)
    )
    return given | changed


def by_transformers(value, shapes, locations, weights):
    return MultiScaleDeformableAttention()(value, None, shapes, None, locations, weights, 64)


@pytest.mark.parametrize("form", ["locations", "offsets", "boxes"])
def test_equals_transformers(form):
    """Oracle: transformers' module; with a reference, its locations written out as `DeformableDetr` has them."""
    given, oracle = made(), by_transformers
    if form != "locations":
        sides = 2 if form == "offsets" else 4
        given["reference"] = torch.rand(2, 5, 3, sides, dtype=torch.float64, requires_grad=True)

        def oracle(value, shapes, locations, weights, reference):
            around = reference[:, :, None, :, None]
            if sides == 2:
                cells = torch.tensor([[w, h] for h, w in shapes])
                locations = around + locations / cells[None, None, None, :, None]
            else:
                locations = around[..., :2] + locations / 2 * around[..., 2:] * 0.5
            weights = weights.flatten(3).softmax(-1).view_as(weights)
            return by_transformers(value, shapes, locations, weights)

    got, want = results(deformable_attention, given), results(oracle, given)
    assert got.keys() == want.keys() and all(close64(got[name], want[name]) for name in want)


FAR = [-1e30, -1e6, -0.5, 1.5, 1e6, 1e30, float("inf"), -float("inf")]
# of a map of 4 columns: cell centres, the border, and places −1 and w of the first cells outside
EDGES = [0.125, 0.375, 0.875, 0.0, 1.0, -0.125, 1.125, 0.25]


@pytest.mark.parametrize("places", [FAR, EDGES], ids=["far", "edges"])
def test_special_points_equal_pytorch(places):
    """Oracle: the reference in float32, whose gradient of a location on a cell centre is that to the right of it."""
    given = made(Nq=len(places) ** 2, dtype=torch.float32, value=torch.randn(2, 16, 2, 4, requires_grad=True))
    points = torch.tensor(list(itertools.product(places, places)))[None, :, None, None, None]
    given |= dict(shapes=((4, 4),), locations=points.repeat(2, 1, 2, 1, 2, 1).requires_grad_())
    given["weights"] = torch.rand(2, len(places) ** 2, 2, 1, 2, requires_grad=True)
    finite = converted(tuple(given.values()), torch.float64)
    finite = dict(zip(given, finite, strict=True))
    finite["locations"] = finite["locations"].detach().clamp(-1e3, 1e3).requires_grad_()
    want = results(by_transformers, finite)
    with interpreting(), poisoned():
        got = results(deformable_attention, given)
    plain = results(deformable_attention, given)
    for name, truth in want.items():
        for found in (got[name], plain[name]):
            assert found.isfinite().all(), name
            assert (found - truth).abs().max() <= 16 * torch.finfo(torch.float32).eps * truth.abs().max().clamp(
                min=1
            ), name
    assert (want["output 0"] != 0).any() == (places is EDGES)


def test_locations_and_weights_stay_float32():
    """Oracle: the same numbers in float64, with locations that bfloat16 does not represent; also under autocast."""
    op, case = deformable.OP, deformable.OP.cases["offsets"]
    narrow = op.inputs(case, torch.float32, "cpu")
    narrow["value"] = narrow["value"].detach().bfloat16().requires_grad_()
    wide = {name: converted(t, torch.float64) for name, t in narrow.items()}
    truth = results(op.reference, wide)
    for switch in (interpreting, lambda: torch.autocast("cpu", torch.bfloat16)):
        with switch():
            got = results(op.run, narrow)
            y = op.run(**narrow)
        assert y.dtype == torch.bfloat16
        for name, want in truth.items():
            eps = torch.finfo(torch.bfloat16 if "output" in name or "value" in name else torch.float32).eps
            # the cotangent of a bfloat16 output is rounded to bfloat16 in both
            rounded = results(op.reference, wide, lambda t: t.bfloat16().double())[name]
            assert (got[name] - rounded).abs().max() <= 32 * eps * want.abs().max(), name


def test_gradients_have_the_same_bits_in_each_run():
    """Oracle: another run, whose new memory has other values."""
    op, case = deformable.OP, deformable.OP.ragged["crowded"]
    arguments = op.inputs(case, torch.float32, "cpu")
    with interpreting():
        first = results(op.run, arguments)
        with poisoned():
            again = results(op.run, arguments)
    assert all(torch.equal(telling(first[name]), again[name]) for name in first)


@pytest.mark.parametrize("sizes", [dict(D=1, P=1, H=3), dict(D=33, P=5, H=1), dict(D=70, P=1, H=1, sides=4)], ids=str)
def test_odd_sizes_equal_float64(sizes):
    """Oracle: the reference in float64, within the budget of the op."""
    case = dict(B=1, Nq=3, H=1, D=4, P=2, h0=2, w0=3, h1=1, w1=1) | sizes
    assert outside(deformable.OP, case, torch.float32) == []


def test_more_points_than_the_kernels_take_run_on_pytorch():
    """Oracle: the reference."""
    given = made(dtype=torch.float32, locations=torch.rand(2, 5, 2, 3, 30, 2), weights=torch.rand(2, 5, 2, 3, 30))
    with interpreting():
        assert torch.equal(deformable_attention(**given), deformable.reference(**given))


WRONG = [
    (dict(shapes=()), TypeError, r"shapes must be a tuple of \(rows, columns\), one of each map, got \(\)"),
    (dict(shapes=((3, 4), (2, 2), 1)), TypeError, "one of each map, got 1 in it"),
    (dict(shapes=((3, 4), (2, 2), (0, 1))), ValueError, "a side in shapes must be between 1 and 16777216, got 0"),
    (dict(shapes=((3, 4), (2, 2), (2, 1))), ValueError, "shapes have 18 cells, and axis N of value is 17"),
    (dict(value=torch.ones(2, N, 2)), ValueError, r"value must have axes \[B, N, H, D\], got shape"),
    (dict(value=torch.ones(2, N, 2, 4).long()), TypeError, "value must be float32, bfloat16, float16 or float64"),
    (dict(locations=torch.ones(2, 5, 2, 3, 2, 3)), ValueError, "axis 2 of locations must be 2, got 3"),
    (dict(locations=torch.ones(2, 5, 2, 2, 2, 2)), ValueError, "axis L of locations must be 3, got 2"),
    (
        dict(locations=torch.ones(2, 5, 2, 3, 0, 2).double()),
        ValueError,
        "axis P of locations must be at least 1, got 0",
    ),
    (dict(locations=torch.ones(2, 5, 2, 3, 2, 2)), TypeError, "locations is torch.float32, x is torch.float64"),
    (dict(weights=torch.ones(2, 5, 2, 3, 1)), ValueError, "axis P of weights must be 2, got 1"),
    (dict(reference=torch.ones(2, 5, 3, 3).double()), ValueError, "axis 2 or 4 of reference must be 2 or 4, got 3"),
    (dict(reference=torch.ones(2, 4, 3, 2).double()), ValueError, "axis Nq of reference must be 5, got 4"),
]


@pytest.mark.parametrize("changed, kind, message", WRONG, ids=[message[:40] for *_, message in WRONG])
def test_errors_name_the_argument(changed, kind, message):
    """Oracle: the sentence."""
    with pytest.raises(kind, match=message) as error:
        deformable_attention(**made() | changed)
    assert not re.search(r"\. ", str(error.value))
