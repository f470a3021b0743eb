"""Third-party modules: whether a fused forward may run now, types whose weights may be read, attention masks."""

import itertools
from functools import cache
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from ..engine import leaves as parts
from ..engine.hooks import PACKAGE, are_plain_tensors, has_global_hooks, replaces, type_name
from ..engine.source import ALWAYS, Code, code_of
from ..kernels import choose
from ..kernels.backend import backend, constant, kernels_available
from .recognition import recognised

FUSED: set[str] = set()  # types that have a fused forward; `forwards.register` adds them


def classes(*names: str) -> list[str]:
    """Full names of transformers' classes from "model.Class", or "folder.model.Class" where the names differ."""
    split = (name.split(".") for name in names)
    return [f"transformers.models.{m[0]}.modeling_{m[-1]}.{c}" for *m, c in split]


parts.LAYER_NORMS.update(("timm.layers.norm.LayerNorm", "timm.models.layers.norm.LayerNorm"))
parts.RMS_NORMS["timm.layers.norm.RmsNorm"] = "eps"
parts.ACTIVATIONS.update(
    {
        "timm.layers.activations.GELU": "gelu",
        "timm.models.layers.activations.GELU": "gelu",
        "timm.layers.activations.GELUTanh": "gelu_tanh",
        "timm.layers.activations.QuickGELU": "quick_gelu",
        "timm.layers.activations.HardSwish": "hardswish",
        "timm.layers.activations_me.HardSwishMe": "hardswish",
        "transformers.activations.GELUActivation": "gelu",
        "transformers.activations.GELUTanh": "gelu_tanh",
        "transformers.activations.QuickGELUActivation": "quick_gelu",
        "transformers.activations.SiLUActivation": "silu",
    }
)
parts.LAYER_SCALES.update(
    {"timm.layers.layer_scale.LayerScale": "gamma", "timm.models.vision_transformer.LayerScale": "gamma"}
)
parts.DROP_PATHS.update(
    (
        "timm.layers.drop.DropPath",
        "timm.models.layers.drop.DropPath",
        "torchvision.ops.stochastic_depth.StochasticDepth",
        *classes(
            "beit.BeitDropPath",
            "clap.ClapDropPath",
            "cvt.CvtDropPath",
            "data2vec.data2vec_vision.Data2VecVisionDropPath",
            "dinov2.Dinov2DropPath",
            "dinov2_with_registers.Dinov2WithRegistersDropPath",
            "dinov3_vit.Dinov3ViTDropPath",
            "donut.donut_swin.DonutDropPath",
            "donut.donut_swin.DonutSwinDropPath",
            "glpn.GLPNDropPath",
            "glpn.GlpnDropPath",
            "maskformer.maskformer_swin.MaskFormerDropPath",
            "maskformer.maskformer_swin.MaskFormerSwinDropPath",
            "pvt.PvtDropPath",
            "pvt_v2.PvtV2DropPath",
            "rf_detr.RfDetrDinov2DropPath",
            "segformer.SegformerDropPath",
            "swin.SwinDropPath",
            "swin2sr.Swin2SRDropPath",
            "swinv2.Swinv2DropPath",
        ),  # in some release or another
    )
)


def can_run(x: Tensor, module: nn.Module | None = None, products: bool = True) -> bool:
    """True if the kernels or oneDNN run for x, or the backend is "torch" (references) without torch.jit.trace.

    For a module of this package the kernels must run: its own forward is the reference. Without products oneDNN
    does not count.
    """
    if not are_plain_tensors(x) or x.is_nested:
        return False
    if choose.has_ways(x) if products else kernels_available(x):
        return True
    ours = module is not None and type_name(module).startswith(f"{PACKAGE}.")
    return backend() == "torch" and not torch.jit.is_tracing() and not ours


def is_fusable(module: nn.Module, x: Tensor) -> bool:
    """True if this module's fused forward may run on x: no global hooks, and its own code is what that replaces."""
    return can_run(x, module) and not has_global_hooks() and runs_original(module) and not gives_proxies(module)


def gives_proxies(module: nn.Module) -> bool:
    """True under torch.fx.symbolic_trace, in which parameters are read as proxies although an input may be a tensor."""
    if torch.compiler.is_compiling() or not torch.fx._symbolic_trace._is_fx_tracing_flag:
        return False
    named = ((owner, name) for owner in module.modules() for name, p in owner._parameters.items() if p is not None)
    return any(isinstance(getattr(owner, name), torch.fx.Proxy) for owner, name in itertools.islice(named, 1))


def runs_original(module: nn.Module) -> bool:
    """True if a call of the module would run the code of a type that has a fused forward, as its source defines it."""
    methods = _replaced_methods(type(module))
    return methods is not None and not (methods and replaces(module.__dict__, methods))


@constant
def _replaced_methods(cls: type[nn.Module]) -> tuple[str, ...] | None:
    """As `source.methods_of`; None also if the code of the class is not that of a type that has a fused forward."""
    code = code_of(cls)
    return code.shadowed if code.why is None and _has_fused_forward(code) else None


@cache
def _has_fused_forward(code: Code) -> bool:
    """True if this code is that of a type with a fused forward: by name, or by what it computes."""
    by_name = any(f"{cls.__module__}.{cls.__qualname__}" in FUSED for cls in (code.cls, code.base))
    return by_name or inherited(code.cls) is not None or recognised(code.cls) is not None


def inherited(cls: type[nn.Module]) -> str | None:
    """Name of the type of this package with a fused forward whose own forward the class inherits; else None.

    Methods that the class overrides, such as `Attention.attend`, are called by that fused forward.
    """
    for base in cls.__mro__[1:]:
        name = f"{base.__module__}.{base.__qualname__}"
        if name in FUSED and name.startswith(f"{PACKAGE}."):
            same = all(getattr(cls, method) is getattr(base, method) for method in ALWAYS)
            return name if same else None
    return None


def four_axes(bias: Tensor | None) -> Tensor | None:
    """Adds leading axes to a bias that broadcasts to [B, H, Nq, Nk], so that it has four."""
    return bias if bias is None else bias[(None,) * (4 - bias.dim())]


def head_norms(attention: parts.Foreign) -> tuple[nn.Module, nn.Module] | None:
    """The norms of queries and keys; None in releases without them, and if both are identities."""
    if not hasattr(attention, "q_norm"):
        return None
    norms = attention.q_norm, attention.k_norm
    return None if parts.is_identity(norms[0]) and parts.is_identity(norms[1]) else norms


def dropout_reason(drop: Any, replaced: str = "attention dropout was replaced") -> str | None:
    """Why an attention with this dropout on its weights must run its own forward now, or None."""
    if parts.is_inactive(drop):
        return None
    return f"attention dropout {drop.p}" if type_name(drop) in parts.DROPOUTS else replaced


def is_rate(name: str, value: Any) -> bool:
    """True for a probability of dropping, such as that of stochastic depth: an input of the graph, not a constant.

    Blocks of a class differ in it. Of those that it is 0 for, nothing is dropped.
    """
    return type(value) is float and 0 < value < 1 and "drop" in name.rpartition(".")[2]
