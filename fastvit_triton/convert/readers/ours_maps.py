"""Fused forwards for this package's layers of maps and pyramids that no other library has, which register on import.

Layers with the attributes of timm's share timm's readers.
"""

from torch import Tensor

from ...engine.batch_norm import convolve, normed
from ...engine.leaves import Foreign, activation_of
from ...engine.mlp import MlpBody
from ..forwards import fused_body, fused_forward, original
from ..third_party import is_fusable


@fused_forward("convolution", "fastvit_triton.layers.normed.ConvNorm", needs="linear bn", takes="")
def conv_norm(self: Foreign, x: Tensor) -> Tensor:
    """A convolution with the BatchNorm after it; [B, C, H, W] → [B, C', H', W']."""
    return convolve(x, self, self.linear, self.bn) if is_fusable(self, x) else original(self, x)


@fused_forward("convolution", "fastvit_triton.layers.residual.ConvNormAct", needs="conv bn relu", takes="")
def conv_norm_act(self: Foreign, x: Tensor) -> Tensor:
    """A convolution with the BatchNorm and the ReLU after it; [B, C, H, W] → [B, C', H', W']."""
    if not is_fusable(self, x):
        return original(self, x)
    x = convolve(x, self, self.conv, self.bn)
    return x.relu() if self.relu else x


@fused_body("fastvit_triton.models.levit.NormedMlp", needs="ln1 act drop ln2", takes="")
def normed_mlp_parts(self: Foreign) -> MlpBody:
    """Parts of LeViT's MLP; a layer whose BatchNorm is not folded is called."""
    return MlpBody((normed(self.ln1),), activation_of(self.act), normed(self.ln2), (self.drop, None))
