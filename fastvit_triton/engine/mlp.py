"""Bodies of MLPs: two linear layers with an activation between them, gated, or with a depthwise convolution."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..kernels import linear as linear_file
from ..kernels import mixed, settings
from ..kernels import mlp as mlp_file
from ..kernels.activation import ACTIVATIONS, GATED
from ..kernels.depthwise import depthwise
from ..kernels.linear import linear
from ..kernels.mlp import mlp
from ..kernels.sizes import Branch
from .attention import as_map, as_tokens
from .body import (
    Before,
    Body,
    Drop,
    Given,
    Output,
    activate,
    called,
    finish_with_stats,
    fold_or_normalize,
    operands_of,
    project,
)
from .freeze import PROGRAMS, derived
from .leaves import Foreign, Layer, activation_of, is_depthwise_conv, is_identity, is_inactive, is_readable, width_of

# keys in a module's __dict__, see `mark`
EXACT = "_fastvit_triton_exact_gelu"  # GELU is that of erf everywhere
HIDDEN = "_fastvit_triton_save_hidden"  # the hidden layer of an MLP is saved for its backward pass


class MlpBody(NamedTuple):
    """Submodules of an MLP."""

    fc1: tuple[Layer, ...]  # one layer, or the gate and value layers of a SwiGLU
    act: str | nn.Module  # a name in `kernels.activation.NAMES`, or a module to call
    fc2: Layer  # last layer
    drops: tuple[Drop | None, Drop | None] = (None, None)  # dropouts after the activation and after fc2
    first: nn.Module | None = None  # norm inside the module, before fc1
    last: nn.Module | None = None  # norm before fc2

    @property
    def name(self) -> str:
        """What it is, in reports."""
        return f"MLP, {act_name(self.act)}"

    def layers(self) -> tuple[Layer, ...]:
        """All linear layers."""
        return (*self.fc1, self.fc2)

    def norms(self) -> tuple[nn.Module | None, ...]:
        """The norms before linear layers."""
        return self.first, self.last

    def entering(self) -> tuple[Layer, ...]:
        """The linear layers that read x."""
        return self.fc1

    def sizes(self) -> Branch:
        """See `engine.body.Body`."""
        width, channels = width_of(self.fc1)
        return Branch("mlp", 0, 0, channels, width, width // 2 if self.act in GATED else width)

    def __call__(self, x: Tensor, way: str = "reference", *, residual: Tensor | None = None) -> Tensor:
        """The MLP of x [..., D] plus the residual, see `engine.body.Body`."""
        return self.run(x, way=way, residual=residual)[0]

    def run(
        self,
        x: Tensor,
        norm: Before | None = None,
        stats: Given | None = None,
        way: str = "reference",
        **end: Any,
    ) -> Output:
        """(the MLP of x after the norm, its statistics), see `engine.body.Body.run`."""
        if self.first is not None and norm is None:
            x, norm = fold_or_normalize(x, self.first, self.fc1, way)
        inner, outer = self.drops
        if not (isinstance(self.act, str) and all(is_readable(fc) for fc in self.fc1)):
            hs = [project(x, (fc,)) for fc in self.fc1] if norm is None else [project(x, self.fc1, norm, stats, way)]
            h = activate(hs[0], self.act, *hs[1:])
        else:
            weight, bias, before = operands_of(self.fc1, x, norm, way)
            bare = self.last is None or is_identity(self.last)
            call = dict(norm=before, stats=stats, activation=self._computed(x, bias) if way == "mixed" else self.act)
            if bare and is_readable(self.fc2) and is_inactive(inner) and is_inactive(outer):
                fc2 = operands_of((self.fc2,), x, None, way, end.get("layer_scale"))[:2]
                if HIDDEN in getattr(self.fc2, "__dict__", ()) and way in ("fused", "mixed"):
                    end["save"] = "hidden"
                return called(mlp, mlp_file.run, way, x, (weight, bias), fc2, **call, **end)
            h, _ = called(linear, linear_file.run, way, x, weight, bias, **call)
        return finish_with_stats(h if inner is None else inner(h), self.fc2, self.last, outer, way=way, **end)

    def _computed(self, x: Tensor, bias: object) -> str:
        """The activation that a mixed call computes: for GELU its tanh form where `kernels.mixed` allows it."""
        fc1 = self.fc1[0]
        allowed = (
            self.act == "gelu" and bias is not None and isinstance(fc1, nn.Module) and not asks_for_exact_gelu(fc1)
        )
        return "gelu_tanh" if allowed and mixed.takes_tanh_for_erf(x) else str(self.act)


def asks_for_exact_gelu(module: nn.Module) -> bool:
    """True if GELU is erf's for this module: by `optimize(..., exact_gelu=True)` or FASTVIT_TRITON_EXACT."""
    return settings.exact or EXACT in module.__dict__


def mark(model: nn.Module, **marks: bool) -> None:
    """Sets or removes marks of the modules of a model, by key; copies and pickles keep them."""
    wanted = {key: True for key, mark in marks.items() if mark}
    for module in model.modules():
        for key in (PROGRAMS, EXACT, HIDDEN):  # PROGRAMS: recorded calls
            module.__dict__.pop(key, None)
        module.__dict__.update(wanted)


def act_name(act: str | nn.Module) -> str:
    """The name of an activation, in reports."""
    return act if isinstance(act, str) else type(act).__name__


def gated_mlp_body(
    layers: tuple[Layer, ...],
    act: nn.Module,
    last: Layer,
    drops: tuple[nn.Module | None, nn.Module | None] = (None, None),
    first: nn.Module | None = None,
    last_norm: nn.Module | None = None,
) -> MlpBody | Body:
    """The body of a gated MLP, last(last_norm(drop(act(gate) · value))), where (gate, value) = layers(first(x)).

    Args:
        layers: gate and value, or one layer with both, gate first.
        act: activation of the gate; if the kernels lack it, PyTorch multiplies gate and value.
        last: last layer.
        drops: dropouts after the product and after the last layer.
        first: norm before the first layers.
        last_norm: norm before the last layer.
    """
    activation = activation_of(act)
    name = next((name for name, gate in GATED.items() if gate == activation), None)
    if name is not None:
        return MlpBody(layers, name, last, drops, first, last_norm)

    def between(h: Tensor) -> Tensor:
        gate, value = h.chunk(2, -1)
        h = activate(gate, activation) * value
        return h if drops[0] is None else drops[0](h)

    return Body("gated MLP", layers, between, last, first=first, last=last_norm, drops=drops[1:])


@dataclass(frozen=True, eq=False)
class DepthwiseActivation:
    """What runs between the layers of an MLP with a depthwise convolution: drop(act(conv(h)))."""

    conv: Foreign  # depthwise convolution that keeps the size of the map
    act: str | nn.Module  # a name in `kernels.activation.ACTIVATIONS`, or a module to call
    drop: nn.Module | None = None  # dropout after the activation
    relu: bool = False  # True for a ReLU before the convolution, too (PVT v2 with linear attention)
    grid: tuple[int, int] | None = None  # (H, W) if h is tokens [B, H·W, D]; None for a map

    def sizes(self, body: Body) -> Branch:
        """See `engine.body.Body`."""
        width, channels = width_of(body.projections)
        return Branch("depthwise_mlp", 0, 0, channels, width, width)

    def __call__(self, h: Tensor) -> Tensor:
        """[B, H, W, F] → [B, H, W, F], or tokens [B, H·W, F]."""
        h = as_map(h, self.grid)
        h = h.relu() if self.relu else h
        name = self.act if isinstance(self.act, str) else None
        if is_depthwise_conv(self.conv):
            h = depthwise(h, taps_of(self.conv), self.conv.bias, activation=name)
        else:
            h = self.conv(h.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
            h = h if name is None else ACTIVATIONS[name](h)
        h = as_tokens(h, self.grid)
        h = h if name is not None else activate(h, self.act)
        return h if self.drop is None else self.drop(h)


def depthwise_mlp_body(
    fc1: Layer,
    conv: Foreign,
    act: str | nn.Module,
    fc2: Layer,
    drops: tuple[nn.Module | None, nn.Module | None] = (None, None),
    relu: bool = False,
    grid: tuple[int, int] | None = None,
) -> Body:
    """The body of an MLP with a depthwise convolution between its layers (PVT v2, SegFormer): fc2(act(conv(fc1 x))).

    `drops` follow the activation and fc2; for the other arguments see `DepthwiseActivation`.
    """
    between = DepthwiseActivation(conv, act, drops[0], relu, grid)
    return Body(f"MLP with a convolution, {act_name(act)}", (fc1,), between, fc2, drops=drops)


def taps_of(conv: Foreign) -> Tensor:
    """Weight [C, 1, K, K] of a depthwise convolution, in the memory layout that `depthwise` reads without a copy."""
    weight = conv.weight
    taps = derived(conv, "taps", (weight,), lambda: weight.flatten(1).t().contiguous())
    return taps.t().unflatten(1, weight.shape[2:]).unsqueeze(1)
