"""Fused linear layers of timm's attention over channels: XCiT, EdgeNeXt, DaViT, CoaT; and of talking heads, also ours.

Their maps are small or mixed between heads, and are computed by PyTorch between the fused projections.
"""

from functools import partial

import torch.nn.functional as F
from torch import Tensor

from ....engine.attention import heads_of, merged_heads
from ....engine.leaves import Foreign
from ....layers.head_mixing import MixedAttention
from .attention import fused_heads


def _width(self: Foreign) -> int:
    """Channels of a head, which are the keys of attention over channels."""
    return getattr(self.proj, "in_features", 0) // getattr(self, "num_heads", getattr(self, "groups", 1))


channel_heads = partial(fused_heads, kind="channel attention", keys=_width)
undropped = partial(channel_heads, reason=None)  # for attention without dropout on its maps


@channel_heads(
    "timm.models.xcit.XCA",
    "timm.models.edgenext.CrossCovarianceAttn",
    needs="qkv num_heads temperature attn_drop proj proj_drop",
)
def cross_covariance(self: Foreign, qkv: Tensor) -> Tensor:
    """Cross-covariance attention; [B, N, 3 · H · D] → [B, N, H · D]."""
    q, k, v = (t.transpose(2, 3) for t in heads_of(qkv, self.num_heads))  # [B, H, D, N]
    scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(2, 3) * self.temperature
    return merged_heads((scores.softmax(-1).to(v.dtype) @ v).transpose(2, 3), qkv.shape[1:-1])


@undropped("timm.models.davit.ChannelAttention", needs="qkv num_heads scale proj")
def davit_heads(self: Foreign, qkv: Tensor) -> Tensor:
    """DaViT's attention over channels."""
    q, k, v = heads_of(qkv, self.num_heads)
    weights = ((k * self.scale).transpose(2, 3) @ v).softmax(-1)
    return merged_heads(q @ weights.transpose(2, 3), qkv.shape[1:-1])


@undropped("timm.models.davit.ChannelAttentionV2", needs="qkv groups head_dim dynamic_scale proj", heads="groups")
def davit_v2_heads(self: Foreign, qkv: Tensor) -> Tensor:
    """The attention over channels of DaViT as Florence-2 uses it."""
    q, k, v = heads_of(qkv, self.groups)
    scale = (q.shape[2] if self.dynamic_scale else self.head_dim) ** -0.5
    weights = ((q * scale).transpose(2, 3) @ k).softmax(-1)
    return merged_heads(v @ weights.transpose(2, 3), qkv.shape[1:-1])


@undropped("timm.models.coat.FactorAttnConvRelPosEnc", needs="qkv num_heads scale crpe proj proj_drop")
def coat_heads(self: Foreign, qkv: Tensor, size: tuple[int, int] | None = None) -> Tensor:
    """CoaT's factorised attention."""
    q, k, v = heads_of(qkv, self.num_heads)
    context = k.softmax(2).transpose(2, 3) @ v
    return merged_heads(self.scale * (q @ context) + self.crpe(q, v, size=size), qkv.shape[1:-1])


@fused_heads(
    "timm.models.cait.TalkingHeadAttn",
    "fastvit_triton.models.cait.TalkingHeads",
    "fastvit_triton.models.deepvit.ReAttention",
    needs="qkv num_heads scale attn_drop proj proj_l|attend proj_w|attend proj_drop",
    kind="projections of talking heads",
    reason=None,
)
def talking_heads(self: Foreign, qkv: Tensor) -> Tensor:
    """CaiT's and DeepViT's attention, whose heads mix their scores or their probabilities."""
    if isinstance(self, MixedAttention):
        return self.attend(qkv)
    q, k, v = heads_of(qkv, self.num_heads)
    scores = (q * self.scale) @ k.transpose(2, 3)
    scores = self.proj_l(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    maps = self.proj_w(scores.softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    return merged_heads(self.attn_drop(maps) @ v, qkv.shape[1:-1])
