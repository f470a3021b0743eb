"""Layers of other libraries that have a BatchNorm, which `engine.batch_norm` folds in evaluation after `freeze`."""

from torch import nn

from ..engine.batch_norm import NORMED
from ..engine.leaves import Layer, Packed, activation_of
from ..engine.mlp import MlpBody

NORMED |= {
    "timm.models.levit.LinearNorm": ("linear", "bn"),
    "timm.models.levit.ConvNorm": ("linear", "bn"),
    "transformers.models.levit.modeling_levit.MLPLayerWithBN": ("linear", "batch_norm"),
}
UNFOLDED = "it runs fused in evaluation after `freeze`, which folds its BatchNorms, if no layer was replaced"


def folded_mlp(
    fc1: Layer, act: nn.Module, fc2: Layer, drops: tuple[nn.Module | None, nn.Module | None]
) -> MlpBody | str:
    """Parts of an MLP whose BatchNorms are folded into its layers; a reason (str) if they are not."""
    is_folded = type(fc1) is Packed and type(fc2) is Packed
    return MlpBody((fc1,), activation_of(act), fc2, drops) if is_folded else UNFOLDED
