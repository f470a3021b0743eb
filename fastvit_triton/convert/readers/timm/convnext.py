"""Fused linear layers of timm's MLPs with a global response normalization: ConvNeXt V2 and CSATv2."""

from functools import partial

import torch.nn.functional as F
from torch import Tensor

from ....engine.body import Body
from ....engine.leaves import Foreign, is_readable
from ...forwards import fused_body, fused_forward


@fused_body(
    "timm.layers.mlp.GlobalResponseNormMlp",
    needs="fc1 act drop1 grn fc2 drop2",
    takes="",
)
def response_parts(self: Foreign) -> Body | str:
    """Parts of ConvNeXt V2's MLP of a map [B, H, W, D]: fc1, activation, dropout, normalization, fc2."""
    if not (is_readable(self.fc1) or is_readable(self.fc2)):
        return "its layers are convolutions, were replaced or have a hook"
    return Body("MLP", (self.fc1,), partial(_normalized, self), self.fc2, drops=(self.drop2,))


def _normalized(self: Foreign, h: Tensor) -> Tensor:
    h = self.act(h)
    return self.grn(self.drop1(h) if hasattr(self, "drop1") else h)


@fused_forward(
    "convolution and MLP",
    "timm.models.csatv2.Block",
    needs="dwconv norm pwconv1 act grn pwconv2 ls drop_path attn",
    takes="",
    folds=lambda self: [(self.norm, self.pwconv1)],
)
def csat_block(self: Foreign, x: Tensor) -> Tensor:
    """CSATv2's block: depthwise convolution, MLP, and a map of weights; [B, D, H, W] → [B, D, H, W]."""
    mlp = Body("MLP", (self.pwconv1,), partial(_normalized, self), self.pwconv2, first=self.norm)
    y = mlp(self.dwconv(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    weights = F.interpolate(self.attn(y), size=y.shape[2:], mode="bilinear", align_corners=True)
    return x + self.drop_path(self.ls(y * weights))
