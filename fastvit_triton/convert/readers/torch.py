"""Fused forwards for torch.nn's attention and Transformer layers, torchvision's encoder, and MLPs in a Sequential.

nn.MultiheadAttention stores its output [B, N, D] as [N, B, D], and dropout draws numbers in the order of memory: a
dropout of it runs on a tensor stored so, and therefore drops the same elements as the original with the same seed.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...engine.attention import attention_body
from ...engine.body import Body, Drop, finish, project
from ...engine.branch import Branch, add_branches
from ...engine.hooks import PACKAGE, are_plain_tensors, has_hooks, type_name
from ...engine.leaves import (
    CONVOLUTIONS,
    DROPOUTS,
    LAYER_NORMS,
    RMS_FORWARDS,
    RMS_NORMS,
    VOLUME_CONVOLUTIONS,
    Foreign,
    Packed,
    activation_of,
    is_inactive,
    is_patch_conv,
    is_readable,
    last_axis_norm,
    last_axis_rms_norm,
)
from ...engine.mlp import MlpBody
from ...kernels.attention import attention
from ...kernels.layer_norm import layer_norm
from ...kernels.patch_embed import patch_embed
from ...kernels.rms_norm import rms_norm
from ..forwards import Forward, forward_for, fused_body, fused_forward
from ..third_party import four_axes, is_fusable

MULTIHEAD = "torch.nn.modules.activation.MultiheadAttention"
OTHER_NORMS = {"vit_pytorch.na_vit.LayerNorm"}  # which are called
KEEPS_LAYOUT = "_fastvit_triton_keeps_layout"  # mark of a convolution in unknown code
STEMS = {"torchvision.models.vision_transformer.VisionTransformer": "conv_proj"}  # type → its patch convolution


@fused_body(
    "torch.nn.modules.container.Sequential",
    "torchvision.ops.misc.MLP",
    "torchvision.models.vision_transformer.MLPBlock",
)
def sequential_parts(self: nn.Sequential) -> MlpBody | str:
    """Parts of an MLP: [LayerNorm,] Linear, activation, [Dropout,] Linear, [Dropout]."""
    layers = list(self._modules.values())
    first = layers.pop(0) if layers and type_name(layers[0]) in (*LAYER_NORMS, *OTHER_NORMS) else None
    outer = layers.pop() if layers and type_name(layers[-1]) in DROPOUTS else None
    inner = layers.pop(2) if len(layers) == 4 and type_name(layers[2]) in DROPOUTS else None
    if len(layers) != 3 or not (isinstance(layers[0], nn.Linear) and isinstance(layers[2], nn.Linear)):
        return "not an MLP"
    act = activation_of(layers[1])
    if not isinstance(act, str):
        return f"activation {type(act).__name__}"
    return MlpBody((layers[0],), act, layers[2], (inner, outer), first)


def packed_attention(
    self: nn.MultiheadAttention,
    attn_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Body:
    """Parts of a self-attention by an nn.MultiheadAttention without `multihead_reason`; masks as in its forward."""
    bias, causal = _masks(self, attn_mask, key_padding_mask, is_causal)
    qkv = Packed(self.in_proj_weight, self.in_proj_bias)
    return attention_body((qkv,), self.out_proj, self.num_heads, None, bias, causal=causal)


def multihead_reason(self: nn.MultiheadAttention) -> str | None:
    """Why this nn.MultiheadAttention must run its own forward now, or None."""
    if type_name(self) != MULTIHEAD:
        return f"{type(self).__name__} is not PyTorch's"
    if self.in_proj_weight is None:
        return "keys or values of another width"
    if self.bias_k is not None or self.bias_v is not None or self.add_zero_attn:
        return "added keys"
    if self.training and self.dropout > 0:
        return f"attention dropout {self.dropout}"
    if not is_readable(self.out_proj):  # PyTorch reads its weights without calling it
        return "its output projection was replaced or has a hook"
    return None if are_plain_tensors(self.in_proj_weight, self.in_proj_bias) else "in_proj_weight is not a parameter"


@fused_forward("attention if its weights are not requested", MULTIHEAD, reason=multihead_reason, checked=False)
def multihead(
    self: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention of queries [B, N, D] to keys and values; runs the original if attention weights are requested."""
    usual = query.dim() == 3 and not need_weights and not (is_causal and attn_mask is None)
    if usual and is_causal:  # with fewer queries than keys PyTorch's are the first positions, the kernels' the last
        usual = query is key or query.shape[self.batch_first] == key.shape[self.batch_first]
    if not usual or not is_fusable(self, query) or key.is_nested or multihead_reason(self) is not None:
        return NotImplemented
    turn = (lambda t: t) if self.batch_first else (lambda t: t.transpose(0, 1))
    if query is key and key is value:
        y = packed_attention(self, attn_mask, key_padding_mask, is_causal)(turn(query))
    else:
        masks = _masks(self, attn_mask, key_padding_mask, is_causal)
        y = cross_attend(self, turn(query), turn(key), turn(value), *masks)
    return turn(_tokens_first(y) if self.training else y), None  # its caller may apply dropout


def _tokens_first(y: Tensor) -> Tensor:
    """y [B, N, D], stored as [N, B, D]."""
    return y.transpose(0, 1).contiguous().transpose(0, 1)


def drawn_tokens_first(drop: Drop) -> Drop:
    """The dropout, with random numbers of [B, N, D] drawn in the order [N, B, D]; the module itself if inactive."""
    return drop if is_inactive(drop) else lambda y: drop(_tokens_first(y))


def cross_attend(
    self: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Queries [B, Nq, D] of one sequence attend to keys and values [B, Nk, D] of another."""
    q, k, v = projected(self, query, key, value)
    q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, k, v))
    return finish(attention(q, k, v, bias, causal=causal).transpose(1, 2).flatten(2), self.out_proj)


def projected(self: nn.MultiheadAttention, *inputs: Tensor) -> Iterator[Tensor]:
    """Queries, keys and values of three inputs."""
    biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
    for x, weight, bias in zip(inputs, self.in_proj_weight.chunk(3), biases, strict=True):
        yield project(x, (Packed(weight, bias),))


def _masks(
    self: nn.MultiheadAttention, mask: Tensor | None, padding: Tensor | None, is_causal: bool
) -> tuple[Tensor | None, bool]:
    """(bias, causal) of the kernels: with `is_causal` and without padding PyTorch, too, does not read the mask."""
    if is_causal and mask is not None and padding is None:
        return None, True
    return _allowed(self, mask, padding), False


def _allowed(self: nn.MultiheadAttention, mask: Tensor | None, padding: Tensor | None) -> Tensor | None:
    """Combines both masks into one [1 or B, 1 or H, Nq, Nk]: boolean with True for "attend", or added to the scores."""
    if mask is not None and mask.dim() == 3:
        mask = mask.unflatten(0, (-1, self.num_heads))
    mask = four_axes(mask)
    padding = four_axes(None if padding is None else padding[:, None, None])
    mask, padding = (~m if m is not None and m.dtype == torch.bool else m for m in (mask, padding))
    if mask is None or padding is None:
        return padding if mask is None else mask
    if mask.dtype == torch.bool and padding.dtype == torch.bool:
        return mask & padding
    if mask.dtype == torch.bool:
        mask, padding = padding, mask
    return mask.masked_fill(~padding, float("-inf")) if padding.dtype == torch.bool else mask + padding


UNREADABLE = "several axes, fast norm, or parameters of a tensor subclass"


@fused_forward(
    "LayerNorm", *LAYER_NORMS, reason=lambda self: UNREADABLE if last_axis_norm(self) is None else None, products=False
)
def layer_norm_forward(self: Foreign, input: Tensor) -> Tensor:
    """LayerNorm over the last axis, in float32 under autocast on a GPU; [..., D] → [..., D]."""
    return layer_norm(_wide(input), self.weight, self.bias, self.eps)


def _wide(x: Tensor) -> Tensor:
    """x in float32 if autocast is on for a GPU, which casts the inputs of norms."""
    device = x.device.type
    return x.float() if device != "cpu" and torch.is_autocast_enabled(device) and x.dtype != torch.float64 else x


def _rms_norm_reason(self: Foreign) -> str | None:
    if last_axis_rms_norm(self) is not None:
        return None
    return "its ε is None" if self.eps is None else UNREADABLE


@fused_forward("RMSNorm", *RMS_NORMS, reason=_rms_norm_reason, products=False)
def rms_norm_forward(self: Foreign, x: Tensor) -> Tensor:
    """RMSNorm over the last axis, in float32 under autocast on a GPU; [..., D] → [..., D]."""
    wide = _wide(x)
    if self.weight is not None and self.weight.dtype != wide.dtype:
        return NotImplemented
    return rms_norm(wide, self.weight, self.eps)


@fused_forward("RMSNorm", "timm.layers.norm.RmsNormFp32", reason=_rms_norm_reason, products=False)
def float32_rms_norm(self: Foreign, x: Tensor) -> Tensor:
    """RMSNorm over the last axis in float32, also under autocast in the dtype of x; [..., D] → [..., D]."""
    weight = x if self.weight is None else self.weight
    widened = _wide(x).dtype != x.dtype  # our op's result would stay float32
    if widened or x.dtype == torch.float64 or weight.dtype not in (x.dtype, torch.float32):
        return NotImplemented
    return rms_norm(x, self.weight, self.eps)


RMS_FORWARDS[float32_rms_norm] = "eps"


@fused_forward(
    "block",
    "torch.nn.modules.transformer.TransformerEncoderLayer",
    reason=lambda self: multihead_reason(self.self_attn),
    folds=lambda self: [(self.norm1, self.self_attn), (self.norm2, self.linear1)] if self.norm_first else [],
)
def encoder_layer(
    self: nn.TransformerEncoderLayer,
    src: Tensor,
    src_mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Pre-norm or post-norm layer; [B, N, D] → [B, N, D], or [N, B, D] where the batch is not first."""
    if src.dim() != 3 or (is_causal and src_mask is None) or has_hooks(self.self_attn):
        return NotImplemented
    parts = packed_attention(self.self_attn, src_mask, src_key_padding_mask, is_causal)
    parts = parts._replace(drops=(drawn_tokens_first(self.dropout1),))
    act: Any = self.activation
    act = activation_of(act) if isinstance(act, nn.Module) else {F.relu: "relu", F.gelu: "gelu"}.get(act, act)
    drops: tuple[Drop, Drop] = self.dropout, self.dropout2
    if not self.self_attn.batch_first:  # src is [N, B, D], and so are the values that the original drops
        drops = drawn_tokens_first(self.dropout), drawn_tokens_first(self.dropout2)
    hidden = MlpBody((self.linear1,), act, self.linear2, drops)
    x = src if self.self_attn.batch_first else src.transpose(0, 1)
    if self.norm_first:
        x = add_branches(x, Branch(parts, self.norm1), Branch(hidden, self.norm2), block=self)
    else:
        x = self.norm1(parts(x, residual=x))
        x = self.norm2(hidden(x, residual=x))
    return x if self.self_attn.batch_first else x.transpose(0, 1)


@fused_forward(
    "pre-norm block",
    "torchvision.models.vision_transformer.EncoderBlock",
    reason=lambda self: (
        multihead_reason(self.self_attention)
        if getattr(self.self_attention, "batch_first", True)
        else "batch_first is False"
    ),
    folds=lambda self: [(self.ln_1, self.self_attention), (self.ln_2, self.mlp)],
)
def encoder_block(self: Foreign, input: Tensor) -> Tensor:
    """torchvision's pre-norm block; [B, N, D] → [B, N, D]."""
    if has_hooks(self.self_attention):
        return NotImplemented
    parts = packed_attention(self.self_attention)._replace(drops=(drawn_tokens_first(self.dropout),))
    return add_branches(input, Branch(parts, self.ln_1), Branch(self.mlp, self.ln_2), block=self)


@fused_forward(
    "patch projection",
    *CONVOLUTIONS,
    reason=lambda self: None if is_patch_conv(self) else "not a projection of patches",
    products=False,
)
def patches(self: nn.Conv2d, input: Tensor) -> Tensor:
    """[B, C, H, W] → [B, D, h, w], stored as tokens [B, h·w, D] unless unknown code reads it."""
    if input.dim() != 4 or any(n % side for n, side in zip(input.shape[2:], self.kernel_size, strict=True)):
        return NotImplemented
    tokens = patch_embed(input, self.weight, self.bias)
    return _laid_out(self, input, tokens.transpose(1, 2).unflatten(2, (input.shape[2] // self.kernel_size[0], -1)))


@fused_forward(
    "patch projection",
    *VOLUME_CONVOLUTIONS,
    reason=lambda self: None if is_patch_conv(self, VOLUME_CONVOLUTIONS) else "not a projection of patches",
    products=False,
)
def volumes(self: nn.Conv3d, input: Tensor) -> Tensor:
    """[B, C, T, H, W] → [B, D, t, h, w], stored as tokens [B, t·h·w, D].

    The frames of a patch are channels of one image: no copy if `input` is a transposed video [B, T, C, H, W].
    """
    if input.dim() != 5 or any(n % side for n, side in zip(input.shape[2:], self.kernel_size, strict=True)):
        return NotImplemented
    frames, height, _ = (n // side for n, side in zip(input.shape[2:], self.kernel_size, strict=True))
    images = input.transpose(1, 2).unflatten(1, (frames, -1)).flatten(2, 3).flatten(0, 1)  # [B·t, side·C, H, W]
    tokens = patch_embed(images, self.weight.transpose(1, 2).flatten(1, 2), self.bias)  # [B·t, h·w, D]
    return _laid_out(self, input, tokens.unflatten(0, (-1, frames)).unflatten(2, (height, -1)).permute(0, 4, 1, 2, 3))


def _laid_out(conv: Any, x: Tensor, y: Tensor) -> Tensor:
    """y, whose channels are last in memory; for unknown code in the layout that the convolution gives it."""
    if KEEPS_LAYOUT not in conv.__dict__:
        return y
    last = torch.channels_last if y.dim() == 4 else torch.channels_last_3d
    given = any(t.is_contiguous(memory_format=last) and not t.is_contiguous() for t in (x, conv.weight))
    return y if given else y.contiguous()


def stems_of(module: nn.Module) -> list[nn.Module]:
    """Patch convolutions that this module of a known package calls on images or videos, and that are converted."""
    if (name := type_name(module)) in STEMS:
        return [getattr(module, STEMS[name], module)]
    if not name.startswith(("transformers.", "timm.")):
        return []
    embeds = "embed" in type(module).__name__.lower()
    return [conv for child, conv in _image_convolutions(module) if embeds or "patch" in child]


def unknown_stems_of(module: nn.Module) -> list[nn.Module]:
    """The same of a module of any other package, whose code may depend on how their results lie in memory."""
    name = type_name(module)
    known = name in STEMS or name.startswith(("transformers.", "timm.", "torch.", "torchvision.", f"{PACKAGE}."))
    return [] if known else [conv for _, conv in _image_convolutions(module) if min(conv.kernel_size) > 1]


def _image_convolutions(module: nn.Module) -> list[tuple[str, Any]]:
    forward = forward_for(module)
    if isinstance(forward, Forward) and forward.became:  # it projects the convolution itself
        return []
    convs = [(name, conv) for name, conv in module.named_children() if isinstance(conv, (nn.Conv2d, nn.Conv3d))]
    kinds = CONVOLUTIONS, VOLUME_CONVOLUTIONS
    return [(n, conv) for n, conv in convs if conv.in_channels <= 4 and any(is_patch_conv(conv, k) for k in kinds)]
