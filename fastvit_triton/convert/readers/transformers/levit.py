"""Fused forwards for transformers' LeViT, with the functions of timm's: see convert/readers/timm/levit.py."""

from functools import partial

from torch import Tensor

from ....engine.batch_norm import normed
from ....engine.body import Body, finish, project
from ....engine.branch import Branch, add_branches
from ....engine.leaves import Foreign
from ....engine.mlp import MlpBody
from ...batch_norm import folded_mlp
from ...forwards import INNER, fused_body, fused_forward
from ..timm.levit import attend_fewer, attend_narrow
from .vit import classes

(LEVIT,) = classes("levit.Levit")
INNER.update(classes("levit.MLPLayerWithBN"))
SETTINGS = (
    "num_attention_heads scale key_dim attention_ratio attention_biases attention_bias_idxs activation projection"
)


def _value_dim(self: Foreign) -> int:
    """Channels of the values of a head."""
    return self.attention_ratio * self.key_dim


@fused_body(f"{LEVIT}Attention", needs=f"queries_keys_values {SETTINGS}", takes="", by_name=True)
def attention_parts(self: Foreign) -> Body:
    """Parts of LeViT's attention, with an activation before the last layer."""
    heads = self.num_attention_heads
    layers = (normed(self.queries_keys_values),)
    return Body("attention", layers, partial(_activated, self), normed(self.projection), heads)


def _activated(self: Foreign, qkv: Tensor) -> Tensor:
    return self.activation(attend_narrow(self, qkv, self.num_attention_heads, _value_dim(self)))


@fused_forward(
    "attention with fewer queries",
    f"{LEVIT}AttentionSubsample",
    needs=f"keys_values queries_subsample queries {SETTINGS}",
    takes="",
    by_name=True,
)
def subsample(self: Foreign, hidden_state: Tensor) -> Tensor:
    """LeViT's attention between stages; [B, N, D] → [B, N', D']."""
    kv = project(hidden_state, (normed(self.keys_values),))
    q = project(self.queries_subsample(hidden_state), (normed(self.queries),))
    o = attend_fewer(self, q, kv, self.num_attention_heads, _value_dim(self))
    return finish(self.activation(o), normed(self.projection))


@fused_body(f"{LEVIT}MLPLayer", needs="linear_up activation linear_down", takes="", by_name=True)
def mlp_parts(self: Foreign) -> MlpBody | str:
    """Parts of LeViT's MLP, with the BatchNorms folded into its layers."""
    return folded_mlp(normed(self.linear_up), self.activation, normed(self.linear_down), (None, None))


def _residual_reason(self: Foreign) -> str | None:
    return f"stochastic depth {self.drop_rate}" if self.training and self.drop_rate > 0 else None


@fused_forward("residual", f"{LEVIT}ResidualLayer", needs="module drop_rate", takes="", reason=_residual_reason)
def residual(self: Foreign, hidden_state: Tensor) -> Tensor:
    """x + module(x); [B, N, D] → [B, N, D]."""
    return add_branches(hidden_state, Branch(self.module), block=self)
