"""Tests that the comparisons of transformers' towers with their originals see wrong parts of attention and MLPs.

A fault changes what a reader found when it is used: fields of parts, norms of a branch, or arguments of an attention
kernel, which also parts with a function of their own call. Which faults a tower can have is what these contain.
"""

import re
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from inspect import signature
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from catalogue import COMMON, MODELS, build, inputs, outputs
from catalogue.comparison import SINGLE, distance, tolerance

from fastvit_triton import optimize
from fastvit_triton.engine import branch
from fastvit_triton.engine.body import Body
from fastvit_triton.engine.leaves import Packed, is_identity, is_readable
from fastvit_triton.engine.mlp import MlpBody
from fastvit_triton.kernels.activation import GATED
from fastvit_triton.kernels.attention import attention
from fastvit_triton.kernels.attention_qkv import attention_qkv
from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.kernels.window import window_attention

KINDS = Body, MlpBody
ENTERING, LEAVING = ("projections", "fc1", "q", "kv"), ("proj", "fc2")  # layers that read x, and those after them
KERNELS = attention, attention_qkv, window_attention
MORE = 1.1  # factor of a wrong scale
OTHER = {"relu": "silu"}  # activation → another; "relu" for the others


def field(parts: Any, name: str) -> Any:
    """A setting of a body, or of what runs between its layers; None if it has none of that name."""
    own = name in getattr(parts, "_fields", ())
    return getattr(parts if own else getattr(parts, "between", None), name, None)


def replaced(parts: Any, **changes: Any) -> Any:
    """The body, and what runs between its layers, with other settings."""
    between = getattr(parts, "between", None)
    inner = {n: v for n, v in changes.items() if is_dataclass(between) and hasattr(between, n)}
    own = {n: v for n, v in changes.items() if n in parts._fields}
    return parts._replace(**own, **({"between": replace(between, **inner)} if inner else {}))


def swapped(parts: Any) -> Any:
    """The norms of queries and keys exchanged."""
    norms = field(parts, "norms") if isinstance(parts, Body) else None
    return parts if norms is None else replaced(parts, norms=norms[::-1])


def activated(parts: Any) -> Any:
    """Another activation, gated if it was."""
    act = field(parts, "act")
    if not isinstance(act, str):
        return parts
    return replaced(parts, act=("geglu" if act != "geglu" else "swiglu") if act in GATED else OTHER.get(act, "relu"))


def exchanged(parts: Any) -> Any:
    """Gate and value exchanged, where they are two layers."""
    layers = getattr(parts, "fc1", ())
    return parts._replace(fc1=layers[::-1]) if type(layers) is tuple and len(layers) == 2 else parts


def without_biases(names: tuple[str, ...]) -> Callable[[Any], Any]:
    """A fault that drops the biases of these layers."""

    def bare(layer: Any) -> Any:
        if type(layer) is tuple:
            return tuple(map(bare, layer))
        known = layer is not None and is_readable(layer) and layer.bias is not None
        return Packed(layer.weight, None) if known else layer

    def fault(parts: Any) -> Any:
        return replaced(parts, **{name: bare(found) for name in names if (found := field(parts, name)) is not None})

    return fault


def without_norm(parts: Any) -> Any:
    """Without the norms inside a body, or before and after a branch's."""
    names = [name for name in ("first", "last", "norm", "post_norm") if field(parts, name) is not None]
    return replaced(parts, **{name: None for name in names if not is_identity(field(parts, name))})


def without_factors(parts: Any) -> Any:
    """Without the LayerScale, or the gate, of a branch."""
    if not isinstance(parts, branch.Branch):
        return parts
    identity = parts.scale is not None and is_identity(parts.scale)
    return parts._replace(scale=parts.scale if identity else None, layer_scale=None)


def scaled(given: dict[str, Any]) -> dict[str, Any]:
    """The softmax scale times `MORE`."""
    width = given["q"].shape[-1] if "q" in given else given["qkv"].shape[-1] // (3 * given["num_heads"])
    return {"scale": MORE * (width**-0.5 if given["scale"] is None else given["scale"])}


def unmasked(given: dict[str, Any]) -> dict[str, Any]:
    """Without the bias, or the mask, of the scores, if it has any effect."""
    found: dict[str, Any] = {"axis_bias": None} if given.get("axis_bias") is not None else {}
    found |= {"causal": False} if given.get("causal") else {}
    bias = given["bias"]
    empty = bias is None or bool((bias if bias.dtype == torch.bool else bias == 0).all())
    return found if empty else found | {"bias": None}


def rotated(given: dict[str, Any]) -> dict[str, Any]:
    """Other pairs of channels rotated."""
    rope = given.get("rope")
    return {} if rope is None else {"rope": (*rope[:2], not rope[2])}


PARTS = {
    "norms of heads": swapped,
    "activation": activated,
    "gate": exchanged,
    "biases before": without_biases(ENTERING),
    "biases after": without_biases(LEAVING),
    "norm": without_norm,
    "layer scale": without_factors,
}
ARGUMENTS = {"scale": scaled, "mask": unmasked, "rotation": rotated}


@contextmanager
def faulty(name: str):
    """Context with a fault; yields a list that is not empty after calls in which there was something to change."""
    changed: list[str] = []

    def broken(parts: Any) -> Any:
        found = PARTS[name](parts)
        if any(a is not b for a, b in zip(flat(found), flat(parts), strict=True)):
            changed.append(type(parts).__name__)
        return found

    def wrapped(function: Callable) -> Callable:
        def call(*inputs: Any, **named: Any) -> Any:
            bound = signature(function).bind(*inputs, **named)
            bound.apply_defaults()
            change = ARGUMENTS[name](bound.arguments)
            changed.extend(change)
            bound.arguments |= change
            return function(*bound.args, **bound.kwargs)

        return call

    add = branch._add
    with pytest.MonkeyPatch.context() as patch:
        for kind in KINDS if name in PARTS else ():
            run = kind.run
            patch.setattr(kind, "run", lambda self, *a, run=run, **k: run(broken(self), *a, **k))
        if name in ("norm", "layer scale"):
            patch.setattr(branch, "_add", lambda x, part, *rest: add(x, broken(part), *rest))
        for function in KERNELS if name in ARGUMENTS else ():
            other = wrapped(function)
            for path, module in list(sys.modules.items()):
                if re.match(r"fastvit_triton\.(convert|engine|layers)\.", path):
                    for key in [key for key, value in vars(module).items() if value is function]:
                        patch.setattr(module, key, other)
        yield changed


def flat(parts: tuple) -> list[Any]:
    """The values in nested tuples, and the settings of what runs between the layers of a body."""
    opened = [tuple(vars(part).values()) if is_dataclass(part) else part for part in parts]
    return [x for part in opened for x in (flat(part) if type(part) is tuple else [part])]


USUAL = {"activation", "biases before", "biases after", "norm", "scale"}
SAMPLE = {  # tower → the faults that it can have; the other towers run in the full test
    "hf_AltCLIPVisionModel": USUAL,
    "hf_GlmOcrVisionModel": USUAL | {"norms of heads", "gate", "rotation"},
    "hf_InternVLVisionModel": USUAL | {"layer scale"},
    "hf_Phi4MultimodalVisionModel": USUAL | {"mask"},
    "hf_swinv2": USUAL | {"mask"},
    "hf_sam.SamVisionEncoder": USUAL - {"norm"} | {"mask"},
}
NAMES = [name for name in MODELS if name.startswith("hf_") and not MODELS[name].batched]


@pytest.mark.few(3)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SAMPLE else pytest.mark.full) for n in NAMES])
def test_wrong_parts_are_seen(name):
    """Oracle: the original, without faults within the tolerance of the tower's own test, with each beyond it."""
    torch.manual_seed(1)
    model, given = build(name), inputs(name)
    most = SINGLE if name in COMMON else tolerance(name, True)

    def run() -> torch.Tensor:
        torch.manual_seed(2)
        with torch.no_grad():
            return outputs(model, given)

    model.train()  # as in their tests
    want = run()
    optimize(model)
    with using_backend("torch"):
        assert distance(run(), want) <= most
        found = {}
        for fault in (*PARTS, *ARGUMENTS):
            with faulty(fault) as changed:
                apart = distance(run(), want)
            if changed:
                found[fault] = apart
    assert found.keys() == SAMPLE.get(name, found.keys()) and found
    assert min(found.values()) > most, found


def test_sample_has_every_fault():
    """Oracle: the faults; so none is out of use after a change of the parts."""
    assert set().union(*SAMPLE.values()) == PARTS.keys() | ARGUMENTS.keys()
