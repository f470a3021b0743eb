"""Third-party modules: the types that a fused forward reads through, and the masks that they pass to attention."""

import torch
from torch import Tensor, nn

from ..kernels.backend import backend, kernels_available
from ..layers import module_parts as parts
from ..layers.hooks import are_plain_tensors, has_global_hooks, is_patched

MASKED = -1e30  # below it a score is a mask: it would swallow the logarithm of the sum of a row's exponentials
_HF = "transformers.models"

parts.LAYER_NORMS.update(("timm.layers.norm.LayerNorm", "timm.models.layers.norm.LayerNorm"))
parts.ACTIVATIONS.update(
    {
        "timm.layers.activations.GELU": "gelu",
        "timm.models.layers.activations.GELU": "gelu",
        "timm.layers.activations.GELUTanh": "gelu_tanh",
        "timm.layers.activations.QuickGELU": "quick_gelu",
        "transformers.activations.GELUActivation": "gelu",
        "transformers.activations.GELUTanh": "gelu_tanh",
        "transformers.activations.QuickGELUActivation": "quick_gelu",
        "transformers.activations.SiLUActivation": "silu",
    }
)
parts.LAYER_SCALES.update(
    {
        "timm.layers.layer_scale.LayerScale": "gamma",
        "timm.models.vision_transformer.LayerScale": "gamma",
        f"{_HF}.dinov2.modeling_dinov2.Dinov2LayerScale": "lambda1",
        f"{_HF}.dinov2_with_registers.modeling_dinov2_with_registers.Dinov2WithRegistersLayerScale": "lambda1",
        f"{_HF}.dinov3_vit.modeling_dinov3_vit.DINOv3ViTLayerScale": "lambda1",
    }
)
parts.DROP_PATHS.update(
    (
        "timm.layers.drop.DropPath",
        "timm.models.layers.drop.DropPath",
        f"{_HF}.dinov2.modeling_dinov2.Dinov2DropPath",
        f"{_HF}.dinov2_with_registers.modeling_dinov2_with_registers.Dinov2WithRegistersDropPath",
        f"{_HF}.dinov3_vit.modeling_dinov3_vit.Dinov3ViTDropPath",
    )
)


def can_run(x: Tensor) -> bool:
    """The kernels run for x, or the switch asks for the references, which torch.jit.trace is not shown."""
    if not are_plain_tensors(x) or x.is_nested:
        return False
    return kernels_available(x) or (backend() == "torch" and not torch.jit.is_tracing())


def is_fusable(module: nn.Module, x: Tensor) -> bool:
    """The fused forward of this module applies to x: no hook expects every module's call, and no patch its own."""
    return can_run(x) and not has_global_hooks() and not is_patched(type(module))


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
    return None if parts.is_identity(q_norm) and parts.is_identity(k_norm) else (q_norm, k_norm)
