"""Fused forwards for vit-pytorch's models of tokens, whose attention and MLP contain their norms.

ViT, SimpleViT and the models that copy their code (T2T, MAE, PiT, ...), DeepViT, CaiT, CrossViT, CCT and NaViT. Maps of
attention that heads mix are computed by PyTorch between the fused projections.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....engine.attention import attention_body, heads_of, merged_heads
from ....engine.body import Body, normalize, project
from ....engine.branch import Branch, add_branches, runs_plain
from ....engine.hooks import has_hooks, is_plain_module
from ....engine.leaves import Foreign, Layer, softmax_reason
from ....engine.mlp import MlpBody
from ....engine.replay import call_block, call_branches
from ....kernels.attention import attention
from ...forwards import fused_body, fused_forward
from ...third_party import dropout_reason, four_axes
from ..torch import sequential_parts

FILES = (
    "vit simple_vit ats_vit cait cross_vit deepvit jet_vit learnable_memory_vit looped_vit mobile_vit mp3 "
    "parallel_vit pit simple_flash_attn_vit simple_flash_attn_vit_3d simple_vit_1d simple_vit_3d "
    "simple_vit_with_fft simple_vit_attn_residual simple_vit_orthog_residual_update "
    "simple_vit_with_hyper_connections simple_vit_with_patch_dropout simple_vit_with_qk_norm "
    "simple_vit_with_register_tokens simple_vit_with_sparse_gating simple_vit_with_relative_proj_pos_bias vat "
    "vit_1d vit_3d vit_detpool vit_for_small_dataset vit_nd vit_nd_pope vit_nd_rotary vit_with_keel_post_ln "
    "vit_with_patch_dropout vit_with_patch_merger vivit vivit_with_moss xcit"
).split()  # whose FeedForward is a Sequential of linear layers
Projection = tuple[Layer | None, nn.Module | None]


def _projection(self: Foreign) -> Projection | str:
    """The output projection and its dropout; a reason (str) why it cannot be read."""
    proj, drop = self.to_out, None
    if has_hooks(proj):
        return "to_out has a hook"
    if isinstance(proj, nn.Sequential):
        proj, drop = proj
    return None if type(proj) is nn.Identity else proj, drop


def _end(self: Foreign) -> Projection | str:
    """As `_projection`, for attention whose maps are not needed: without dropout, by a softmax without hooks."""
    why = dropout_reason(getattr(self, "dropout", None), "dropout was replaced")
    return why or softmax_reason(self.attend) or _projection(self)


@fused_body(
    *(f"vit_pytorch.{file}.Attention" for file in ("vit", "simple_vit", "pit")),
    needs="norm to_qkv attend to_out heads scale",
)
def attention_parts(self: Foreign) -> Body | str:
    """Parts of an attention: norm, packed qkv, and a projection with optional dropout."""
    if isinstance(end := _end(self), str):
        return end
    return attention_body((self.to_qkv,), end[0], self.heads, self.scale, first=self.norm, drops=end[1:])


@fused_body("vit_pytorch.deepvit.Attention", needs="norm to_qkv dropout reattn_weights reattn_norm to_out")
def deepvit_parts(self: Foreign) -> Body | str:
    """Parts of DeepViT's attention, whose heads mix their probabilities (re-attention)."""
    if isinstance(end := _projection(self), str):
        return end

    def between(qkv: Tensor) -> Tensor:
        q, k, v = heads_of(qkv, self.heads)
        maps = self.dropout((q @ k.transpose(2, 3) * self.scale).softmax(-1))
        maps = self.reattn_norm(torch.einsum("b h i j, h g -> b g i j", maps, self.reattn_weights))
        return merged_heads(maps @ v, qkv.shape[1:-1])

    name = "projections of re-attention"
    return Body(name, (self.to_qkv,), between, end[0], self.heads, first=self.norm, drops=end[1:])


@fused_body("vit_pytorch.cait.Attention", needs="norm to_q to_kv attend mix_heads_pre_attn to_out")
def cait_parts(self: Foreign, context: Tensor | None = None) -> Body | str:
    """Parts of CaiT's attention, whose heads mix scores and probabilities; to itself, or to itself and a context."""
    if isinstance(end := _projection(self), str):
        return end
    layers = (self.to_q, self.to_kv) if context is None else ()

    def between(x: Tensor) -> Tensor:
        q, k, v = heads_of(x, self.heads) if context is None else _cross_heads(self, x, context, True)
        scores = torch.einsum("b h i j, h g -> b g i j", q @ k.transpose(2, 3) * self.scale, self.mix_heads_pre_attn)
        maps = torch.einsum("b h i j, h g -> b g i j", self.dropout(self.attend(scores)), self.mix_heads_post_attn)
        return merged_heads(maps @ v, x.shape[1:-1])

    name = "projections of talking heads"
    return Body(name, layers, between, end[0], self.heads, first=self.norm, drops=end[1:])


def _cross_heads(self: Foreign, x: Tensor, context: Tensor, both: bool) -> tuple[Tensor, ...]:
    """Queries of x, keys and values of the context, or of x and the context; [B, H, N, d]."""
    q = project(x, (self.to_q,))
    kv = project(torch.cat((x, context), 1) if both else context, (self.to_kv,))
    return *heads_of(q, self.heads, 1), *heads_of(kv, self.heads, 2)


@fused_body("vit_pytorch.cross_vit.Attention", needs="norm to_q to_kv attend dropout to_out heads scale")
def crossvit_parts(self: Foreign, context: Tensor | None = None, kv_include_self: bool = False) -> Body | str:
    """Parts of CrossViT's attention; to itself, to a context, or to both."""
    if isinstance(end := _end(self), str):
        return end
    if context is None and not kv_include_self:
        layers = self.to_q, self.to_kv
        return attention_body(layers, end[0], self.heads, self.scale, first=self.norm, drops=end[1:])

    def between(x: Tensor) -> Tensor:
        q, k, v = _cross_heads(self, x, x if context is None else context, kv_include_self)
        return merged_heads(attention(q, k, v, scale=self.scale), x.shape[1:-1])

    return Body("attention", (), between, end[0], self.heads, first=self.norm, drops=end[1:])


@fused_body("vit_pytorch.na_vit.Attention", needs="norm q_norm k_norm dropout_p to_q to_kv to_out heads")
def navit_parts(
    self: Foreign, context: Tensor | None = None, mask: Tensor | None = None, attn_mask: Tensor | None = None
) -> Body | str:
    """Parts of NaViT's attention with norms of queries and keys; masks are boolean, True for "attend"."""
    if self.training and self.dropout_p > 0:
        return f"attention dropout {self.dropout_p}"
    if isinstance(end := _projection(self), str):
        return end
    bias = None if mask is None else mask[:, None, None]
    bias = attn_mask if bias is None else bias if attn_mask is None else bias & attn_mask
    bias = four_axes(bias)
    norms = (self.q_norm, self.k_norm)
    if context is None:
        layers = self.to_q, self.to_kv
        return attention_body(layers, end[0], self.heads, 1.0, bias, norms=norms, first=self.norm, drops=end[1:])

    def between(x: Tensor) -> Tensor:
        q, k, v = _cross_heads(self, x, context, False)
        return merged_heads(attention(self.q_norm(q), self.k_norm(k), v, bias, 1.0), x.shape[1:-1])

    return Body("attention", (), between, end[0], self.heads, first=self.norm, drops=end[1:])


@fused_body(*(f"vit_pytorch.{file}.FeedForward" for file in FILES), needs="net", by_name=True)
def feed_forward_parts(self: Foreign) -> MlpBody | str:
    """Parts of an MLP: LayerNorm, Linear, GELU, Linear in a Sequential."""
    if type(self.net) is not nn.Sequential:
        return f"its layers are in a {type(self.net).__name__}"
    return "net has a hook" if has_hooks(self.net) else sequential_parts(self.net)


@fused_forward(
    "blocks and last norm", "vit_pytorch.vit.Transformer", "vit_pytorch.simple_vit.Transformer", needs="layers norm"
)
def transformer(self: Foreign, x: Tensor) -> Tensor:
    """Runs all blocks and the final norm; [B, N, D] → [B, N, D]."""
    return self.norm(_blocks(self, x))


@fused_forward("blocks", "vit_pytorch.deepvit.Transformer", "vit_pytorch.pit.Transformer", needs="layers")
def blocks(self: Foreign, x: Tensor) -> Tensor:
    """Runs all blocks; [B, N, D] → [B, N, D]."""
    return _blocks(self, x)


def _blocks(self: Foreign, x: Tensor) -> Tensor:
    """All blocks of two bodies."""
    return _add(self.layers, x, lambda pair: tuple(map(Branch, pair)))


def _add(
    layers: Iterable[nn.ModuleList], x: Tensor, branches: Callable[..., tuple[Branch, ...]], *inputs: object
) -> Tensor:
    """Adds branches(pair, *inputs) of all pairs; each pair for itself where only its replay is faster than plain."""
    every = [branch for pair in layers for branch in branches(pair, *inputs)]
    if not runs_plain(x, *every[:2]):
        return add_branches(x, *every)

    def block(pair: nn.ModuleList, x: Tensor, *inputs: object) -> Tensor:
        return add_branches(x, *branches(pair, *inputs), block=pair)

    for pair in layers:
        x = call_block(block, pair, x, *inputs)
    return x


@fused_forward("blocks and last norm", "vit_pytorch.na_vit.Transformer", needs="layers norm")
def navit_transformer(self: Foreign, x: Tensor, mask: Tensor | None = None, attn_mask: Tensor | None = None) -> Tensor:
    """Runs all blocks of NaViT with masks, and the final norm; [B, N, D] → [B, N, D]."""
    return self.norm(_add(self.layers, x, _navit_branches, mask, attn_mask))


def _navit_branches(pair: nn.ModuleList, mask: Tensor | None, attn_mask: Tensor | None) -> tuple[Branch, ...]:
    attn, mlp = pair
    return Branch(attn, call=dict(mask=mask, attn_mask=attn_mask)), Branch(mlp)


def _cait_reason(self: Foreign) -> str | None:
    """Why blocks of CaiT must run their own forward now, or None."""
    if self.layer_dropout > 0:
        return f"layer dropout {self.layer_dropout}"
    scales = [scale for pair in self.layers for scale in pair]
    plain = all(is_plain_module(scale, ("vit_pytorch.cait.LayerScale",)) for scale in scales)
    return None if plain else "a LayerScale is of another type or has a hook"


@fused_forward("blocks", "vit_pytorch.cait.Transformer", needs="layers layer_dropout", reason=_cait_reason)
def cait_transformer(self: Foreign, x: Tensor, context: Tensor | None = None) -> Tensor:
    """Runs all blocks of CaiT, with a context for attention or not; [B, N, D] → [B, N, D]."""
    return _add(self.layers, x, _cait_branches, context)


def _cait_branches(pair: Iterable[Foreign], context: Tensor | None) -> tuple[Branch, ...]:
    attn, mlp = pair
    call = None if context is None else {"context": context}
    first = Branch(attn.fn, layer_scale=attn.scale.flatten(), call=call)
    return first, Branch(mlp.fn, layer_scale=mlp.scale.flatten())


@fused_body("vit_pytorch.cct.Attention", needs="qkv attn_drop proj proj_drop heads scale")
def cct_parts(self: Foreign) -> Body | str:
    """Parts of CCT's attention, which contains no norm."""
    parts = attention_body((self.qkv,), self.proj, self.heads, self.scale, drops=(self.proj_drop,))
    return dropout_reason(self.attn_drop, "dropout was replaced") or parts


@fused_forward(
    "block with a norm of the residual",
    "vit_pytorch.cct.TransformerEncoderLayer",
    needs="pre_norm self_attn linear1 dropout1 norm1 linear2 dropout2 drop_path activation",
    takes="",
    reason=lambda self: None if self.activation is F.gelu else "its activation is not GELU",
    folds=lambda self: [(self.pre_norm, self.self_attn)],
    by_name=True,
)
def cct_layer(self: Foreign, src: Tensor, *inputs: object, **named: object) -> Tensor:
    """CCT's block, whose second branch is added to the normalized residual; [B, N, D] → [B, N, D]."""
    drop_path = self.drop_path
    if is_plain_module(drop_path, ("vit_pytorch.cct.DropPath",)) and not (drop_path.training and drop_path.drop_prob):
        drop_path = None
    x = normalize(call_branches(attend, self.self_attn, src, self.pre_norm, drop_path), self.norm1)
    return call_branches(add_mlp, self.linear1, x, self.dropout1, self.linear2, self.dropout2, drop_path)


def attend(attn: nn.Module, x: Tensor, norm: nn.Module, drop_path: nn.Module | None) -> Tensor:
    """x [B, N, D] plus attention after a norm."""
    return add_branches(x, Branch(attn, norm, drop_path=drop_path), block=attn)


def add_mlp(fc1: Foreign, x: Tensor, *layers: Any) -> Tensor:
    """x [B, N, D] plus an MLP without norm, see `mlp_branch`."""
    return add_branches(x, mlp_branch(fc1, *layers), block=fc1)


def mlp_branch(fc1: Layer, drop1: nn.Module, fc2: Layer, drop2: nn.Module, drop_path: nn.Module | None) -> Branch:
    """An MLP with GELU whose layers are modules of a block."""
    return Branch(MlpBody((fc1,), "gelu", fc2, (drop1, drop2)), drop_path=drop_path)
