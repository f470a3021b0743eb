"""Layers of transformers; blocks of two branches, each with a norm and a residual: tables have their parts' names."""

from collections.abc import Callable
from functools import partial, wraps
from inspect import unwrap
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...engine.branch import Branch, add_branches
from ...engine.leaves import Foreign
from ..forwards import Forward, arguments, declared, fused_forward, known_type, register


class Names(NamedTuple):
    """Names of a block's parts; "" for none, and of two the first is that of the attention's branch."""

    norm1: str  # before the attention
    attn: str
    norm2: str  # before the MLP
    mlp: str
    # arguments after the first, which the block passes on to its attention with all others that it is given
    takes: str = "attention_mask position_embeddings"
    layer_scales: tuple[str, str] = ("", "")  # modules that scale the branches
    scales: tuple[str, str] = ("", "")  # parameters [D] that scale the branches
    gates: tuple[str, str] = ("", "")  # parameters [1] whose tanh scales the branches of a block that `is_gated`
    drops: tuple[str, str] = ("", "")  # dropouts after the branches
    drop_paths: tuple[str, str] = ("", "")  # stochastic depth
    further: str = ""  # attributes that tell the release of which these names are
    post_norms: bool = False  # True if the norms come after the attention and the MLP

    def needs(self) -> str:
        """The attributes, as `Forward.needs`."""
        parts = self.norm1, self.attn, self.norm2, self.mlp, "is_gated" if any(self.gates) else "", self.further
        return " ".join(filter(None, (*parts, *self.layer_scales, *self.scales, *self.drops, *self.drop_paths)))


TIMM = Names("norm1", "attn", "norm2", "mlp", "", drop_paths=("drop_path1", "drop_path2"))
_names: dict[str, list[Names]] = {}  # type → names of its parts, those of the newest release first


def register_blocks(blocks: dict[str, Names]) -> None:
    """Registers blocks by the full names of their types, with the names of their parts."""
    for name, names in blocks.items():
        _names.setdefault(name, []).append(names)
        became, folds = ("post-norm block", None) if names.post_norms else ("pre-norm block", _folds)
        register((name,), Forward(two_branches, names.needs(), names.takes, None, became, folds=folds))


def checkpointed(self: Foreign, forward: Any, *inputs: Any, **named: Any) -> Any:
    """Runs a layer's forward with its class's activation checkpointing (in older releases part of `__call__`)."""
    active = getattr(self, "gradient_checkpointing", False) and self.training
    if active and type(self).__call__ is nn.Module.__call__:
        return self._gradient_checkpointing_func(partial(forward, self, **named), *inputs)
    return forward(self, *inputs, **named)


def fused_layer(became: str, *names: str, takes: str | None = None, **options: Any) -> Callable[[Callable], Callable]:
    """Decorator: as `fused_forward`, for a layer of which the function computes the output.

    That may run with activation checkpointing, and is returned in a tuple where attention weights may be requested.
    """

    def decorate(run: Callable[..., Tensor]) -> Callable:
        @wraps(run)
        def layer(self: Foreign, hidden_states: Tensor, *inputs: Any, **named: Any) -> Tensor | tuple[Tensor]:
            taken = arguments(type(self))
            call = dict(zip(taken, inputs, strict=False)) | named
            if "attention_mask" in taken:
                call.setdefault("attention_mask", None)  # the attention of a copy may require it
            tupled = "output_attentions" in taken
            if tupled and call.pop("output_attentions", False):
                return NotImplemented
            checks = self.training and getattr(self, "gradient_checkpointing", False)
            y = checkpointed(self, run, hidden_states, **call) if checks else run(self, hidden_states, **call)
            return (y,) if tupled and y is not NotImplemented else y

        return fused_forward(became, *names, takes=declared(run, 2) if takes is None else takes, **options)(layer)

    return decorate


@fused_layer("pre-norm block")
def two_branches(self: Foreign, x: Tensor, names: Names | None = None, **call: Any) -> Tensor:
    """x [B, ..., D] plus the branches of a block whose parts have these names, by default those of its type."""
    names = names or _names_of(self)
    branches = []
    gated = any(names.gates) and self.is_gated
    for i, (norm, body) in enumerate(((names.norm1, names.attn), (names.norm2, names.mlp))):
        layer_scale = getattr(self, names.layer_scales[i]) if names.layer_scales[i] else None
        drop_path = getattr(self, names.drop_paths[i]) if names.drop_paths[i] else None
        drop = getattr(self, names.drops[i]) if names.drops[i] else None
        scale = getattr(self, names.scales[i]) if names.scales[i] else None
        scale = getattr(self, names.gates[i]).tanh().expand(x.shape[-1]) if gated else scale
        before, after = (None, getattr(self, norm)) if names.post_norms else (getattr(self, norm), None)
        body_call = None if i else call
        branches.append(Branch(getattr(self, body), before, layer_scale, drop_path, scale, drop, body_call, after))
    return add_branches(x, *branches, block=self)


added: Callable[..., Tensor] = unwrap(two_branches)  # without the checks


def _names_of(self: Foreign) -> Names:
    names = _names[known_type(self)]  # of one release, or of two
    return names[0] if hasattr(self, names[0].norm1) else names[-1]


def _folds(self: Foreign) -> list[tuple[nn.Module, nn.Module]]:
    norm1, attn, norm2, mlp = (getattr(self, name) for name in _names_of(self)[:4])
    return [(norm1, attn), (norm2, mlp)]
