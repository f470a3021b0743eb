"""Layers with a BatchNorm, which `engine.batch_norm` folds in evaluation after `freeze`."""

from torch import Tensor, nn

from ..engine.batch_norm import NORMED, folded_taps
from ..engine.leaves import Foreign, Layer, Packed, activation_of
from ..engine.mlp import MlpBody, taps_of
from ..kernels.depthwise import depthwise

NORMED |= {
    "timm.models.levit.LinearNorm": ("linear", "bn"),
    "timm.models.levit.ConvNorm": ("linear", "bn"),
    "transformers.models.levit.modeling_levit.MLPLayerWithBN": ("linear", "batch_norm"),
}
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
