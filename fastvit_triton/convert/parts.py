"""What a foreign module is made of: types known by name, and weights that may be read in its stead.

No package is imported to recognise its modules: a type is known by its module and name. A module is read through only
where that changes nothing: its type is exact (a LoRA, quantised, parametrised or wrapped layer has another), its
parameters are plain, and neither a hook nor another forward changes its call. Otherwise it is called, as its own
package would call it.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..kernels.argument import Norm
from ..kernels.backend import backend, kernels_available
from ..layers.calls import all_watched, patched


class Packed(NamedTuple):
    """A weight and a bias that their owner uses without a layer of their own."""

    weight: Tensor
    bias: Tensor | None
    sources: tuple[Tensor, ...] | None = None  # what the two were made from in this call; None: they are parameters


Layer = nn.Module | Packed


class Attention(NamedTuple):
    """A self-attention's parts and numbers.

    Attributes:
        projections: one projection packed as [3, H, D], or those of queries, keys and values.
        proj: output projection; None for none.
        num_heads: H.
        scale: softmax scale.
        bias: added to the scores, or boolean with True for "attend"; see `kernels.attention`.
        rope: (cos, sin, interleaved), tables that broadcast to [B, H, N − T, D] and leave the first T tokens alone.
        norms: norms of each head's queries and keys.
        first: norm inside the module, before the projections.
        last: norm before the output projection.
        drops: dropout after the output projection.
    """

    projections: tuple[Layer, ...]
    proj: nn.Module | None
    num_heads: int
    scale: float
    bias: Tensor | None = None
    rope: tuple[Tensor, Tensor, bool] | None = None
    norms: tuple[nn.Module, nn.Module] | None = None
    first: nn.Module | None = None
    last: nn.Module | None = None
    drops: tuple[nn.Module | None] = (None,)


class Mlp(NamedTuple):
    """An MLP's parts.

    Attributes:
        fc1: one layer, or the gate and value layers of a SwiGLU.
        act: a name in `kernels.linear.ACTIVATIONS`, "swiglu", or a module to call.
        fc2: last layer.
        drops: dropouts after the activation and after fc2.
        first: norm inside the module, before fc1.
        last: norm before fc2.
    """

    fc1: tuple[nn.Module, ...]
    act: str | nn.Module
    fc2: nn.Module
    drops: tuple[nn.Module | None, nn.Module | None] = (None, None)
    first: nn.Module | None = None
    last: nn.Module | None = None


MASKED = -1e30  # below it a score is a mask: it would swallow the logarithm of the sum of a row's exponentials
LAYER_NORMS = (
    "torch.nn.modules.normalization.LayerNorm",
    "timm.layers.norm.LayerNorm",
    "timm.models.layers.norm.LayerNorm",
)
LINEARS = ("torch.nn.modules.linear.Linear", "torch.nn.modules.linear.NonDynamicallyQuantizableLinear")
IDENTITY = ("torch.nn.modules.linear.Identity",)
DROPOUT = ("torch.nn.modules.dropout.Dropout",)
ACTIVATIONS = {
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.SiLU": "silu",
    "timm.layers.activations.GELU": "gelu",
    "timm.models.layers.activations.GELU": "gelu",
    "timm.layers.activations.GELUTanh": "gelu_tanh",
    "timm.layers.activations.QuickGELU": "quick_gelu",
    "transformers.activations.GELUActivation": "gelu",
    "transformers.activations.GELUTanh": "gelu_tanh",
    "transformers.activations.QuickGELUActivation": "quick_gelu",
    "transformers.activations.SiLUActivation": "silu",
}
LAYER_SCALES = {
    "timm.layers.layer_scale.LayerScale": "gamma",
    "timm.models.vision_transformer.LayerScale": "gamma",
    "transformers.models.dinov2.modeling_dinov2.Dinov2LayerScale": "lambda1",
    "transformers.models.dinov2_with_registers.modeling_dinov2_with_registers.Dinov2WithRegistersLayerScale": "lambda1",
    "transformers.models.dinov3_vit.modeling_dinov3_vit.DINOv3ViTLayerScale": "lambda1",
}
PASSIVE = "transformers.utils.output_capturing"  # its hooks stay for ever and look at outputs only while asked to
DROP_PATHS = (
    "timm.layers.drop.DropPath",
    "timm.models.layers.drop.DropPath",
    "transformers.models.dinov2.modeling_dinov2.Dinov2DropPath",
    "transformers.models.dinov2_with_registers.modeling_dinov2_with_registers.Dinov2WithRegistersDropPath",
    "transformers.models.dinov3_vit.modeling_dinov3_vit.Dinov3ViTDropPath",
)


def kind(module: nn.Module) -> str:
    """The module's exact type, as "package.module.Class"."""
    cls = type(module)
    return f"{cls.__module__}.{cls.__qualname__}"


def runs(x: Tensor) -> bool:
    """The kernels run for x, or the switch asks for the references, which torch.jit.trace is not shown."""
    return (
        own(x) and not x.is_nested and (kernels_available(x) or (backend() == "torch" and not torch.jit.is_tracing()))
    )


def fuses(module: nn.Module, x: Tensor) -> bool:
    """The fused forward of this module applies to x: no hook expects every module's call, and no patch its own."""
    return runs(x) and not all_watched() and not patched(type(module))


def ours(forward: object) -> bool:
    """This instance's forward is one that `optimize` put there."""
    return type(forward) is partial and str(getattr(forward.func, "__module__", "")).startswith(__package__)


def watched(module: nn.Module) -> bool:
    """A hook watches this module's calls, or another forward is in its place, its own or its class's."""
    facts = module.__dict__  # every call reads some twenty modules, and nn.Module's attributes are slow
    if facts["_forward_pre_hooks"] or facts["_backward_hooks"] or facts["_backward_pre_hooks"]:
        return True
    if facts["_forward_hooks"] and any(
        getattr(hook, "__module__", None) != PASSIVE for hook in facts["_forward_hooks"].values()
    ):
        return True
    return ("forward" in facts and not ours(facts["forward"])) or patched(type(module))


def own(*tensors: Tensor | None) -> bool:
    """Plain tensors and parameters: not quantised, sharded, traced or otherwise a class of their own."""
    for t in tensors:
        if t is not None and type(t) is not nn.Parameter and type(t) is not Tensor:
            return False
    return True


def readable(module: Layer, kinds: tuple[str, ...]) -> bool:
    """The module is exactly of these kinds, with plain parameters, and nobody watches its calls."""
    if type(module) is Packed:
        return own(module.weight, module.bias)
    return kind(module) in kinds and own(*module.__dict__["_parameters"].values()) and not watched(module)


def norm_weights(norm: nn.Module) -> Norm | None:
    """(weight, bias, eps) of a LayerNorm over the last axis; None where the module must be called."""
    return None if kind(norm) not in LAYER_NORMS or watched(norm) else last_axis_norm(norm)


def last_axis_norm(norm: nn.Module) -> Norm | None:
    """The same of a module known to be a LayerNorm, watched or not."""
    if not own(norm.weight, norm.bias) or len(norm.normalized_shape) != 1 or getattr(norm, "_fast_norm", False):
        return None
    return Norm(norm.weight, norm.bias, norm.eps)


def activation(module: nn.Module) -> str | nn.Module:
    """The kernels' name for this activation; the module itself where it has none or somebody watches it."""
    if watched(module):
        return module
    if kind(module) == "torch.nn.modules.activation.GELU":
        return "gelu" if module.approximate == "none" else "gelu_tanh"
    return ACTIVATIONS.get(kind(module), module)


def idle(drop: nn.Module | None) -> bool:
    """Nothing happens here now: no dropout, or one that would drop nothing."""
    if drop is None or readable(drop, IDENTITY):
        return True
    return readable(drop, DROPOUT) and not (drop.training and drop.p > 0)


def gain(scale: nn.Module | None) -> tuple[bool, Tensor | None]:
    """(known, layer_scale [D]) of a LayerScale; an identity has no layer_scale."""
    if scale is None or readable(scale, IDENTITY):
        return True, None
    layer_scale = scale._parameters.get(LAYER_SCALES.get(kind(scale)))
    return (True, layer_scale) if layer_scale is not None and readable(scale, (kind(scale),)) else (False, None)


def draws(drop_path: nn.Module | None) -> bool:
    """`sample_scale` knows this stochastic depth."""
    return drop_path is None or readable(drop_path, IDENTITY) or readable(drop_path, DROP_PATHS)


def sample_scale(drop_path: nn.Module | None, x: Tensor) -> Tensor | None:
    """The factor of each image [B] that this stochastic depth draws for x, from the same random numbers."""
    if drop_path is None or not drop_path.training or getattr(drop_path, "drop_prob", 0.0) == 0.0:
        return None
    keep = 1 - drop_path.drop_prob
    if hasattr(drop_path, "scale_by_keep"):  # timm's since 0.5
        kept = x.new_empty(x.shape[0]).bernoulli_(keep)
        return kept.div_(keep) if keep > 0 and drop_path.scale_by_keep else kept
    return torch.rand(x.shape[0], dtype=x.dtype, device=x.device).add(keep).floor().div(keep)


def four_axes(bias: Tensor | None) -> Tensor | None:
    """A bias that broadcasts to [B, H, Nq, Nk], with all four axes."""
    return bias if bias is None else bias[(None,) * (4 - bias.dim())]


def scores_mask(mask: Tensor | None) -> Tensor | None:
    """A mask with all four axes, and with finfo.min and the like as −inf.

    A query that may attend to nothing then gets 0 and no gradient.
    """
    if mask is None or mask.dtype == torch.bool:
        return four_axes(mask)
    return four_axes(mask.masked_fill(mask < MASKED, float("-inf")))


def head_norms(q_norm: nn.Module, k_norm: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    """The norms of queries and keys; None where both do nothing."""
    return None if readable(q_norm, IDENTITY) and readable(k_norm, IDENTITY) else (q_norm, k_norm)
