"""Fused forwards for transformers' CvT: queries, keys and values are projections of depthwise convolutions.

A depthwise convolution is one launch, into which its BatchNorm is folded as `engine.batch_norm` says.
"""

from functools import partial

import torch
from torch import Tensor

from ....engine.attention import heads_of, merged_heads
from ....engine.body import Body, project
from ....engine.branch import Branch, add_branches
from ....engine.hooks import is_plain_module
from ....engine.leaves import DROPOUTS, Foreign, activation_of, is_depthwise_conv, is_identity, is_inactive
from ....engine.mlp import MlpBody
from ....kernels.attention import attention
from ...batch_norm import convolve_depthwise
from ...forwards import INNER, fused_body, fused_forward
from .vit import classes

(CVT,) = classes("cvt.Cvt")
NAMES = ("query", "key", "value")
INNER.update(f"{CVT}SelfAttention{name}" for name in ("", "Projection", "ConvProjection", "LinearProjection"))
INNER.add(f"{CVT}SelfOutput")


def _reason(self: Foreign) -> str | None:
    """Why CvT's attention must run its own forward now, or None."""
    inner, outer = self.attention, self.output
    if not (is_plain_module(inner, (f"{CVT}SelfAttention",)) and is_plain_module(outer, (f"{CVT}SelfOutput",))):
        return "attention or output was replaced or has a hook"
    if is_inactive(inner.dropout):
        return None
    is_known = is_plain_module(inner.dropout, DROPOUTS)
    return f"attention dropout {inner.dropout.p}" if is_known else "attention dropout was replaced"


@fused_body(
    f"{CVT}Attention",
    needs="attention.scale attention.with_cls_token attention.num_heads attention.dropout output.dense output.dropout "
    + " ".join(f"attention.convolution_projection_{n} attention.projection_{n}" for n in NAMES),
    takes="height width",
    by_name=True,
)
def attention_parts(self: Foreign, height: int = 0, width: int = 0) -> Body | str:
    """Parts of CvT's attention; only its last layer is a linear layer of its own."""
    if (why := _reason(self)) is not None:
        return why
    inner, outer = self.attention, self.output
    between = partial(_attended, inner, grid=(height, width))
    return Body("attention", (), between, outer.dense, inner.num_heads, drops=(outer.dropout,))


def _attended(self: Foreign, x: Tensor, grid: tuple[int, int]) -> Tensor:
    """Attention of normalized tokens, without the output projection; [B, N, D] → [B, N, D]."""
    first = x[:, : int(self.with_cls_token)]
    image = x[:, first.shape[1] :].unflatten(1, grid)  # [B, H, W, D]
    heads: list[Tensor] = []
    for name in NAMES:
        y = _convolved(getattr(self, f"convolution_projection_{name}"), image)
        y = torch.cat((first, y), 1) if self.with_cls_token else y
        heads += heads_of(project(y, (getattr(self, f"projection_{name}"),)), self.num_heads, 1)
    q, k, v = heads
    return merged_heads(attention(q, k, v, scale=self.scale), x.shape[1:-1])


def _convolved(self: Foreign, image: Tensor) -> Tensor:
    """Depthwise convolution and BatchNorm of a map [B, H, W, D] → tokens [B, M, D]."""
    inner = self.convolution_projection
    last = self.linear_projection
    plain = all(
        is_plain_module(module, (f"{CVT}SelfAttention{kind}Projection",))
        for module, kind in ((self, ""), (inner, "Conv"), (last, "Linear"))
    )
    conv = inner.convolution
    if not plain or not is_depthwise_conv(conv, (1, 2)):
        return self(image.permute(0, 3, 1, 2))
    return convolve_depthwise(image, inner, conv, inner.normalization).flatten(1, 2)


def _layer_reason(self: Foreign) -> str | None:
    """Why CvT's block must run its own forward now, or None."""
    pairs = (self.intermediate, f"{CVT}Intermediate"), (self.output, f"{CVT}Output")
    plain = all(is_plain_module(module, (name,)) for module, name in pairs)
    return None if plain else "intermediate or output was replaced or has a hook"


@fused_forward(
    "pre-norm block",
    f"{CVT}Layer",
    needs="attention layernorm_before layernorm_after intermediate.dense intermediate.activation output.dense "
    "output.dropout drop_path",
    takes="height width",
    reason=_layer_reason,
    folds=lambda self: [(self.layernorm_before, self.attention), (self.layernorm_after, self.intermediate.dense)],
    by_name=True,
)
def layer(self: Foreign, hidden_state: Tensor, height: int, width: int) -> Tensor:
    """CvT's block, whose stochastic depth also drops the residual of the second branch; [B, N, D] → [B, N, D]."""
    inner = self.intermediate
    outer = self.output
    drop_path = self.drop_path
    mlp = MlpBody((inner.dense,), activation_of(inner.activation), outer.dense, (None, outer.dropout))
    attn = Branch(self.attention, self.layernorm_before, None, drop_path, call=dict(height=height, width=width))
    x = add_branches(hidden_state, attn, Branch(mlp, self.layernorm_after), block=self)
    return x if is_identity(drop_path) else drop_path(x)
