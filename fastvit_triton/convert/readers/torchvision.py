"""Fused forwards for torchvision's Swin and Swin V2; its VisionTransformer is in `readers.torch`."""

import torch
from torch import Tensor

from ...engine.attention import window_body
from ...engine.body import Body, normalize, project
from ...engine.freeze import derived
from ...engine.leaves import Foreign, Packed, is_readable
from ...kernels.argument import Window
from ..forwards import fused_body, fused_forward
from ..windows import continuous_bias, cosine_scale, hooked, merge, merged, table_bias
from .two_branches import TIMM, register_blocks

_FILE = "torchvision.models.swin_transformer"
ATTENTION = "qkv num_heads window_size shift_size attention_dropout dropout relative_position_index proj"
BLOCK = TIMM._replace(drop_paths=("stochastic_depth", "stochastic_depth"))


def _reason(attn: Foreign) -> str | None:
    """Why the attention must run its own forward now, or None; that reads the layers' weights and calls no layer."""
    if attn.training and attn.attention_dropout > 0:
        return f"attention dropout {attn.attention_dropout}"
    if attn.training and attn.dropout > 0:
        return f"dropout {attn.dropout} within windows"
    return None if is_readable(attn.qkv) and is_readable(attn.proj) else "qkv or proj was replaced or has a hook"


def _window(attn: Foreign) -> Window:
    return Window(tuple(attn.window_size), tuple(attn.shift_size), still=True)


@fused_body(f"{_FILE}.ShiftedWindowAttention", needs=f"{ATTENTION} relative_position_bias_table")
def swin_parts(self: Foreign) -> Body | str:
    """Parts of an attention in shifted windows, with a table of relative positions."""
    scale = (self.qkv.weight.shape[-1] // self.num_heads) ** -0.5
    return _reason(self) or window_body((self.qkv,), self.proj, self.num_heads, scale, _window(self), table_bias(self))


@fused_body(f"{_FILE}.ShiftedWindowAttentionV2", needs=f"{ATTENTION} logit_scale cpb_mlp relative_coords_table")
def swin_v2_parts(self: Foreign) -> Body | str:
    """Parts of a cosine attention in shifted windows, with positions from an MLP and keys without a bias."""
    why = _reason(self) or hooked(self.cpb_mlp.modules())
    if why is not None:
        return why
    weight, bias = self.qkv.weight, self.qkv.bias
    qkv = self.qkv
    if bias is not None:

        def without_keys() -> Tensor:
            q, k, v = bias.chunk(3)
            return torch.cat((q, torch.zeros_like(k), v))

        qkv = Packed(weight, derived(self, "qkv_bias", (bias,), without_keys), (weight, bias))
    scale = cosine_scale(self)
    positions = continuous_bias(self)
    return window_body((qkv,), self.proj, self.num_heads, scale, _window(self), positions)


register_blocks(
    {f"{_FILE}.SwinTransformerBlock": BLOCK, f"{_FILE}.SwinTransformerBlockV2": BLOCK._replace(post_norms=True)}
)


@fused_forward(
    "patch merging", f"{_FILE}.PatchMerging", needs="norm reduction", folds=lambda self: [(self.norm, self.reduction)]
)
def merging(self: Foreign, x: Tensor) -> Tensor:
    """Swin's patch merging; [B, H, W, D] → [B, ⌈H/2⌉, ⌈W/2⌉, 2·D]."""
    return merge(x, self.norm, self.reduction) if x.dim() == 4 else NotImplemented


@fused_forward("patch merging", f"{_FILE}.PatchMergingV2", needs="norm reduction")
def merging_v2(self: Foreign, x: Tensor) -> Tensor:
    """Swin V2's patch merging; [B, H, W, D] → [B, ⌈H/2⌉, ⌈W/2⌉, 2·D]."""
    if x.dim() != 4:
        return NotImplemented
    return normalize(project(merged(x), (self.reduction,)), self.norm)
