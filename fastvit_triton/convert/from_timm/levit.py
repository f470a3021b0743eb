"""Fused forwards for timm's LeViT, EfficientFormer and TinyViT: keys narrower than values, and a table of biases."""

from functools import partial

from torch import Tensor

from ...kernels.attention import attention
from ...layers.body import MlpParts, finish, project
from ...layers.branch import Branch, add_branches
from ...layers.composed import ComposedParts, merged_heads
from ...layers.freeze import derived
from ...layers.hooks import has_hooks
from ...layers.module_parts import Foreign, Packed, activation_of
from ...layers.normed import folded_linear
from ..forwards import fused_body, fused_forward, original
from ..third_party import is_fusable


def distance_bias(attn: Foreign) -> Tensor:
    """The bias [1, H, Nq, Nk] from a table [H, distances] and an index of pairs."""
    table, index = attn.attention_biases, attn.attention_bias_idxs
    return derived(attn, "bias", (table, index), lambda: table[:, index])[None]


def _heads(self: Foreign, qkv: Tensor) -> Tensor:
    """Projections [B, N, H · (2 · D + Dv)], packed for each head, → [B, N, H · Dv]."""
    sizes: list[int] = [self.key_dim, self.key_dim, self.val_dim]
    q, k, v = qkv.unflatten(-1, (self.num_heads, -1)).transpose(1, 2).split(sizes, -1)
    return merged_heads(attention(q, k, v, distance_bias(self), self.scale), qkv.shape[1:-1])


@fused_body(
    "timm.models.efficientformer.Attention",
    needs="qkv proj num_heads scale key_dim val_dim attention_biases attention_bias_idxs",
    takes="",
)
def efficientformer_parts(self: Foreign) -> ComposedParts:
    """Parts of EfficientFormer's attention."""
    return ComposedParts("attention", (self.qkv,), partial(_heads, self), self.proj, self.num_heads)


@fused_forward(
    "pre-norm block",
    "timm.models.efficientformer.MetaBlock1d",
    needs="norm1 token_mixer ls1 drop_path1 norm2 mlp ls2 drop_path2",
    takes="",
    folds=lambda self: [(self.norm1, self.token_mixer), (self.norm2, self.mlp)],
)
def efficientformer_block(self: Foreign, x: Tensor) -> Tensor:
    """EfficientFormer's pre-norm block of tokens; [B, N, D] → [B, N, D]."""
    if not is_fusable(self, x):
        return original(self, x)
    mixer = Branch(self.token_mixer, self.norm1, self.ls1, self.drop_path1)
    return add_branches(x, mixer, Branch(self.mlp, self.norm2, self.ls2, self.drop_path2), block=self)


@fused_body(
    "timm.models.tiny_vit.Attention",
    needs="norm qkv proj num_heads scale key_dim val_dim attention_biases attention_bias_idxs",
    takes="",
)
def tiny_vit_parts(self: Foreign) -> ComposedParts:
    """Parts of TinyViT's attention in windows [B · windows, N, D], with its norm."""
    between = partial(_heads, self)
    return ComposedParts("attention", (self.qkv,), between, self.proj, self.num_heads, first=self.norm)


@fused_body("timm.models.tiny_vit.NormMlp", needs="norm fc1 act drop1 fc2 drop2", takes="")
def tiny_vit_mlp_parts(self: Foreign) -> MlpParts:
    """Parts of TinyViT's MLP with its norm."""
    return MlpParts((self.fc1,), activation_of(self.act), self.fc2, (self.drop1, self.drop2), first=self.norm)


def _levit_reason(self: Foreign) -> str | None:
    """Why LeViT's attention must run its own forward now, or None."""
    if self.use_conv:
        return "its projections are convolutions"
    hooked = has_hooks(self.proj) or (hasattr(self, "q") and has_hooks(self.q))
    return "q or proj has a hook" if hooked else None


def _activated(self: Foreign, qkv: Tensor) -> Tensor:
    return self.proj.act(_heads(self, qkv))


@fused_body(
    "timm.models.levit.Attention",
    needs="qkv proj.act proj.ln num_heads scale key_dim val_dim attention_biases attention_bias_idxs use_conv",
    takes="",
)
def levit_parts(self: Foreign) -> ComposedParts | str:
    """Parts of LeViT's attention, with an activation before the last layer."""
    between, layers = partial(_activated, self), (folded_linear(self.qkv), folded_linear(self.proj.ln))
    return _levit_reason(self) or ComposedParts("attention", layers[:1], between, layers[1], self.num_heads)


@fused_forward(
    "attention with fewer queries",
    "timm.models.levit.AttentionDownsample",
    needs="q.down q.ln kv proj.act proj.ln num_heads scale key_dim val_dim attention_biases attention_bias_idxs "
    "use_conv",
    takes="",
    reason=_levit_reason,
)
def levit_downsample(self: Foreign, x: Tensor) -> Tensor:
    """LeViT's attention between stages; [B, N, D] → [B, N', D']."""
    if not is_fusable(self, x) or _levit_reason(self) is not None:
        return original(self, x)
    q, kv = project(self.q.down(x), (folded_linear(self.q.ln),)), project(x, (folded_linear(self.kv),))
    q, kv = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, kv))
    k, v = kv.split([self.key_dim, self.val_dim], -1)
    o = attention(q, k, v, distance_bias(self), self.scale).transpose(1, 2).flatten(2)
    return finish(self.proj.act(o), folded_linear(self.proj.ln))


@fused_body("timm.models.levit.LevitMlp", needs="ln1 act drop ln2", takes="")
def levit_mlp_parts(self: Foreign) -> MlpParts | str:
    """Parts of LeViT's MLP, with the BatchNorms folded into its layers."""
    fc1, fc2 = folded_linear(self.ln1), folded_linear(self.ln2)
    if type(fc1) is not Packed or type(fc2) is not Packed:
        return "its layers are convolutions, or have a BatchNorm in training mode, or were replaced"
    return MlpParts((fc1,), activation_of(self.act), fc2, (self.drop, None))
