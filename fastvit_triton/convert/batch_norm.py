"""Layers with a BatchNorm, which `engine.batch_norm` folds in evaluation after `freeze`, and frozen BatchNorms."""

from typing import Any

import torch
from torch import Tensor, nn

from ..engine.batch_norm import (
    FROZEN_BATCH_NORMS,
    NORMED,
    Shifted,
    convolve,
    convolve_act,
    convolve_merged,
    convolve_shifted,
    folded_taps,
    is_constant,
    is_frozen_norm,
    normalize_frozen,
)
from ..engine.hooks import has_hooks
from ..engine.leaves import Foreign, Layer, Packed, activation_of, is_identity
from ..engine.mlp import MlpBody, taps_of
from ..kernels.depthwise import depthwise
from .forwards import fused_forward, known_type
from .third_party import classes, is_fusable

NORMED |= {
    "timm.models.levit.LinearNorm": ("linear", "bn"),
    "timm.models.levit.ConvNorm": ("linear", "bn"),
    "transformers.models.levit.modeling_levit.MLPLayerWithBN": ("linear", "batch_norm"),
}
FROZEN_BATCH_NORMS |= dict.fromkeys(
    classes(
        "conditional_detr.ConditionalDetrFrozenBatchNorm2d",
        "d_fine.DFineFrozenBatchNorm2d",
        "dab_detr.DabDetrFrozenBatchNorm2d",
        "deformable_detr.DeformableDetrFrozenBatchNorm2d",
        "deimv2.Deimv2FrozenBatchNorm2d",
        "detr.DetrFrozenBatchNorm2d",
        "grounding_dino.GroundingDinoFrozenBatchNorm2d",
        "mm_grounding_dino.MMGroundingDinoFrozenBatchNorm2d",
        "pp_doclayout_v2.PPDocLayoutV2FrozenBatchNorm2d",
        "pp_doclayout_v3.PPDocLayoutV3FrozenBatchNorm2d",
        "pp_doclayout_v4.PPDocLayoutV4FrozenBatchNorm2d",
        "rt_detr.RTDetrFrozenBatchNorm2d",
        "rt_detr_v2.RTDetrV2FrozenBatchNorm2d",
        "table_transformer.TableTransformerFrozenBatchNorm2d",
    ),
    1e-5,
)  # all with the same code
FROZEN_BATCH_NORMS["torchvision.ops.misc.FrozenBatchNorm2d"] = None
RESNETS = classes("resnet.ResNet", "rt_detr.rt_detr_resnet.RTDetrResNet")
CSP = classes("rt_detr.RTDetr", "d_fine.DFine")  # detectors with these layers in their encoders; others are recognised
CONV_LAYERS = {f"{name}ConvLayer" for name in RESNETS} | {f"{name}ConvNormLayer" for name in CSP}
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


@fused_forward("frozen BatchNorm", *FROZEN_BATCH_NORMS, needs="weight bias running_mean running_var")
def frozen_norm(self: Foreign, x: Tensor) -> Tensor:
    """BatchNorm by stored statistics in one operator instead of seven; [B, C, H, W] → [B, C, H, W]."""
    fits = x.dim() == 4 and torch.promote_types(x.dtype, self.weight.dtype) == self.running_mean.dtype
    if not fits or not is_frozen_norm(self):
        return NotImplemented
    return normalize_frozen(x, self)


@fused_forward(
    "convolution, BatchNorm and activation",
    *sorted(CONV_LAYERS),
    needs="convolution|conv normalization|norm activation",
)
def convolution_layer(self: Foreign, x: Tensor) -> Tensor:
    """The BatchNorm is folded in evaluation after `freeze`; [B, C, H, W] → [B, C', H', W']."""
    return convolve_act(x, self, *_conv_and_norm(self), self.activation)


def _conv_and_norm(self: Foreign) -> tuple[Foreign, Foreign]:
    return (self.convolution, self.normalization) if hasattr(self, "convolution") else (self.conv, self.norm)


@fused_forward("convolution and BatchNorm", *(f"{name}ShortCut" for name in RESNETS), needs="convolution normalization")
def shortcut(self: Foreign, x: Tensor) -> Tensor:
    """As `convolution_layer`, without an activation; [B, C, H, W] → [B, C', H', W']."""
    return convolve(x, self, self.convolution, self.normalization)


@fused_forward(
    "",
    "timm.models.resnet.BasicBlock",
    "timm.models.resnet.Bottleneck",
    needs="conv1 bn1 act1 conv2 bn2 act2 drop_block aa se drop_path downsample",
)
def timm_residual_block(self: Foreign, x: Tensor) -> Tensor:
    """BatchNorm, addition and activation are one launch after each convolution; [B, C, H, W] → [B, C', H', W']."""
    if hasattr(self, "conv3"):
        y = convolve_act(x, self, self.conv1, self.bn1, self.act1)
        y = self.aa(_dropped(y, self, self.conv2, self.bn2, self.act2))
        conv, norm, act = self.conv3, self.bn3, self.act3
    else:
        y = self.aa(_dropped(x, self, self.conv1, self.bn1, self.act1))
        conv, norm, act = self.conv2, self.bn2, self.act2
    if self.se is None and self.drop_path is None:
        return convolve_act(y, self, conv, norm, act, _downsampled(self, x))
    y = convolve(y, self, conv, norm)
    y = y if self.se is None else self.se(y)
    y = y if self.drop_path is None else self.drop_path(y)
    shortcut = _downsampled(self, x)
    y += shortcut if isinstance(shortcut, Tensor) else shortcut.map + shortcut.shift[:, None, None]
    return act(y)


@fused_forward("", "timm.models._features.FeatureListNet", needs="return_layers grad_checkpointing concat _collect")
def feature_maps(self: Foreign, x: Tensor) -> list[Tensor]:
    """As `timm_residual_block`, for a convolution, a BatchNorm and an activation in the list of layers; → maps."""
    if self.grad_checkpointing:
        return NotImplemented
    maps = {}
    layers = list(self.items())
    while layers:
        if _is_normed_convolution(layers, self.return_layers):
            x = convolve_act(x, self, *(layer for _, layer in layers[:3]))
            layers = layers[2:]
        else:
            x = layers[0][1](x)
        name = self.return_layers.get(layers.pop(0)[0])
        if name is not None:
            maps[name] = x if isinstance(x, Tensor) else torch.cat(x, 1) if self.concat else x[0]
    return list(maps.values())


def _is_normed_convolution(layers: list[tuple[str, nn.Module]], returned: dict[str, str]) -> bool:
    """True if these layers begin with a convolution, a BatchNorm that may be read, and one whose output is needed."""
    if len(layers) < 3 or any(name in returned for name, _ in layers[:2]):
        return False
    (_, conv), (_, norm), _ = layers[:3]
    return isinstance(conv, nn.Conv2d) and (is_frozen_norm(norm) or is_constant(norm))


def _dropped(x: Tensor, self: Foreign, conv: Foreign, norm: Foreign, act: nn.Module) -> Tensor:
    """A convolution, its BatchNorm, the module that may drop blocks of the map, and the activation."""
    if is_identity(self.drop_block):
        return convolve_act(x, self, conv, norm, act)
    return act(self.drop_block(convolve(x, self, conv, norm)))


@fused_forward(
    "",
    "torchvision.models.resnet.BasicBlock",
    "torchvision.models.resnet.Bottleneck",
    "fastvit_triton.layers.frozen_resnet.FrozenBasicBlock",
    "fastvit_triton.layers.frozen_resnet.FrozenBottleneck",
    needs="conv1 bn1 conv2 bn2 downsample",
)
def residual_block(self: Foreign, x: Tensor) -> Tensor:
    """As `timm_residual_block`; ours have no module for the activation."""
    act = getattr(self, "relu", "relu")
    y = convolve_act(x, self, self.conv1, self.bn1, act)
    conv, norm = self.conv2, self.bn2
    if hasattr(self, "conv3"):
        y = convolve_act(y, self, conv, norm, act)
        conv, norm = self.conv3, self.bn3
    return convolve_act(y, self, conv, norm, act, _downsampled(self, x))


@fused_forward(
    "",
    *(f"{name}{kind}Layer" for name in RESNETS for kind in ("Basic", "BottleNeck")),
    needs="layer shortcut activation",
)
def transformers_residual_block(self: Foreign, x: Tensor) -> Tensor:
    """As `timm_residual_block`; the last convolution layer has no activation of its own."""
    parts: list[Any] = list(self.layer) if type(self.layer) is nn.Sequential and not has_hooks(self.layer) else []
    if not parts or not _is_layer_without_activation(parts[-1], x):
        y = self.layer(x)
        y += self.shortcut(x)
        return self.activation(y)
    *before, last = parts
    y = x
    for layer in before:
        y = layer(y)
    return convolve_act(y, last, *_conv_and_norm(last), self.activation, self.shortcut(x))


def _is_layer_without_activation(layer: Foreign, x: Tensor) -> bool:
    """True for one of `convolution_layer` that may be read and has no activation."""
    known = known_type(layer) in CONV_LAYERS
    return known and not has_hooks(layer) and is_fusable(layer, x) and is_identity(layer.activation)


@fused_forward("", *(f"{name}RepVggBlock" for name in CSP), needs="conv1 conv2 activation")
def rep_vgg_block(self: Foreign, x: Tensor) -> Tensor:
    """activation(conv1(x) + conv2(x)); after `freeze` the two are one convolution; [B, C, H, W] → [B, C, H, W]."""
    if not _is_layer_without_activation(self.conv1, x):
        return self.activation(self.conv1(x) + self.conv2(x))
    large = _conv_and_norm(self.conv1)
    if _is_layer_without_activation(self.conv2, x):
        y = convolve_merged(x, self, large, _conv_and_norm(self.conv2), self.activation)
        if y is not None:
            return y
    return convolve_act(x, self.conv1, *large, self.activation, self.conv2(x))


def _downsampled(self: Foreign, x: Tensor) -> Tensor | Shifted:
    """The shortcut of a residual block: x, or its convolution and BatchNorm, perhaps after pooling."""
    layers: nn.Module | None = self.downsample
    if layers is None:
        return x
    if type(layers) is not nn.Sequential or has_hooks(layers) or len(layers) < 2:
        return layers(x)
    parts: list[Any] = list(layers)
    *before, conv, norm = parts
    for layer in before:
        x = layer(x)
    return convolve_shifted(x, layers, conv, norm)
