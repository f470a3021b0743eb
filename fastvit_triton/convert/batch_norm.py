"""Layers with a BatchNorm, which `engine.batch_norm` folds in evaluation after `freeze`, and frozen BatchNorms."""

import torch
from torch import Tensor, nn

from ..engine.batch_norm import FROZEN_BATCH_NORMS, NORMED, convolve, folded_taps, is_frozen_norm, normalize_frozen
from ..engine.leaves import Foreign, Layer, Packed, activation_of
from ..engine.mlp import MlpBody, taps_of
from ..kernels.depthwise import depthwise
from .forwards import fused_forward, original
from .third_party import is_fusable

NORMED |= {
    "timm.models.levit.LinearNorm": ("linear", "bn"),
    "timm.models.levit.ConvNorm": ("linear", "bn"),
    "transformers.models.levit.modeling_levit.MLPLayerWithBN": ("linear", "batch_norm"),
}
TRANSFORMERS = {  # folder → prefix of the class; all with the same code
    "conditional_detr": "ConditionalDetr",
    "d_fine": "DFine",
    "dab_detr": "DabDetr",
    "deformable_detr": "DeformableDetr",
    "deimv2": "Deimv2",
    "detr": "Detr",
    "grounding_dino": "GroundingDino",
    "mm_grounding_dino": "MMGroundingDino",
    "pp_doclayout_v2": "PPDocLayoutV2",
    "pp_doclayout_v3": "PPDocLayoutV3",
    "pp_doclayout_v4": "PPDocLayoutV4",
    "rt_detr": "RTDetr",
    "rt_detr_v2": "RTDetrV2",
    "table_transformer": "TableTransformer",
}
FROZEN_BATCH_NORMS |= {
    f"transformers.models.{folder}.modeling_{folder}.{prefix}FrozenBatchNorm2d": 1e-5
    for folder, prefix in TRANSFORMERS.items()
}
FROZEN_BATCH_NORMS["torchvision.ops.misc.FrozenBatchNorm2d"] = None
RESNETS = [
    f"transformers.models.{name}.{prefix}ResNet"
    for name, prefix in (
        ("resnet.modeling_resnet", ""),
        ("rt_detr.modeling_rt_detr_resnet", "RTDetr"),
    )
]
UNFOLDED = "it runs fused in evaluation after `freeze`, which folds its BatchNorms, if no layer was replaced"


def convolve_depthwise(x: Tensor, owner: nn.Module, conv: Foreign, norm: Foreign) -> Tensor:
    """A depthwise convolution of a map and the BatchNorm after it, both in `owner`; [B, H, W, C] → [B, H', W', C]."""
    taps = folded_taps(owner, conv, norm)
    if taps is not None:
        return depthwise(x, *taps, stride=conv.stride[0])
    y = depthwise(x, taps_of(conv), conv.bias, stride=conv.stride[0])
    return norm(y.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


def folded_mlp(
    fc1: Layer, act: nn.Module, fc2: Layer, drops: tuple[nn.Module | None, nn.Module | None]
) -> MlpBody | str:
    """Parts of an MLP whose BatchNorms are folded into its layers; a reason (str) if they are not."""
    is_folded = type(fc1) is Packed and type(fc2) is Packed
    return MlpBody((fc1,), activation_of(act), fc2, drops) if is_folded else UNFOLDED


@fused_forward("frozen BatchNorm", *FROZEN_BATCH_NORMS, needs="weight bias running_mean running_var", takes="")
def frozen_norm(self: Foreign, x: Tensor) -> Tensor:
    """BatchNorm by stored statistics in one operator instead of seven; [B, C, H, W] → [B, C, H, W]."""
    fits = x.dim() == 4 and torch.promote_types(x.dtype, self.weight.dtype) == self.running_mean.dtype
    if not is_fusable(self, x) or not fits or not is_frozen_norm(self):
        return original(self, x)
    return normalize_frozen(x, self)


@fused_forward(
    "convolution, BatchNorm and activation",
    *(f"{name}ConvLayer" for name in RESNETS),
    needs="convolution normalization activation",
    takes="",
)
def convolution_layer(self: Foreign, x: Tensor) -> Tensor:
    """The BatchNorm is folded in evaluation after `freeze`; [B, C, H, W] → [B, C', H', W']."""
    if not is_fusable(self, x):
        return original(self, x)
    return self.activation(convolve(x, self, self.convolution, self.normalization))


@fused_forward(
    "convolution and BatchNorm",
    *(f"{name}ShortCut" for name in RESNETS),
    needs="convolution normalization",
    takes="",
)
def shortcut(self: Foreign, x: Tensor) -> Tensor:
    """As `convolution_layer`, without an activation; [B, C, H, W] → [B, C', H', W']."""
    if not is_fusable(self, x):
        return original(self, x)
    return convolve(x, self, self.convolution, self.normalization)
