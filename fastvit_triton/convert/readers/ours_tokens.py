"""Fused forwards of this package's Refiner, LV-ViT, T2T-ViT, CeiT, CCT, iGPT, Image Transformer and IPT."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...engine.attention import attention_body
from ...engine.batch_norm import folded
from ...engine.body import Before, Body, finish, fold_or_normalize, normalize, project
from ...engine.branch import Branch, add_branches, runs_plain
from ...engine.hooks import PACKAGE, can_fuse, has_hooks, type_name
from ...engine.leaves import (
    CONVOLUTIONS,
    Foreign,
    Layer,
    Packed,
    activation_of,
    is_depthwise_conv,
    is_patch_conv,
    is_plain_module,
    is_readable,
)
from ...engine.mlp import MlpBody
from ...engine.replay import call_branches
from ...engine.ways import plainly
from ...kernels import fold
from ...kernels.attention import attention
from ...kernels.attention_qkv import attention_qkv
from ...kernels.backend import kernels_available
from ...kernels.depthwise import depthwise
from ...kernels.linear import linear
from ...kernels.patch_embed import patch_embed, whole_patches
from ..forwards import fused_body, fused_forward, fused_method
from .vit_pytorch import tokens as compact

MODELS = f"{PACKAGE}.models"


@fused_forward(
    "pre-norm block",
    f"{MODELS}.refiner.RefinedBlock",
    needs="norm1 attn drop_path1 norm2 mlp drop_path2 factor",
    folds=lambda self: [(self.norm1, self.attn), (self.norm2, self.mlp)],
)
def refined_block(self: Foreign, x: Tensor, previous: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """[B, N, D] and the map [B, H, N, N] of the block before, or None → [B, N, D], map."""
    attn = self.attn
    passed: list[Tensor] = []
    called = Branch(
        attn, self.norm1, None, self.drop_path1, self.scale(x, None), call=dict(previous=previous, passed=passed)
    )
    mlp = Branch(self.mlp, self.norm2, None, self.drop_path2, self.scale(x, self.mlp.scale_channel))
    first = called
    if type_name(attn) == f"{MODELS}.refiner.RefinedAttention" and not has_hooks(attn):
        between = partial(attn.attend_with, previous, passed)
        body = Body("attention", (attn.qkv,), between, attn.proj, attn.num_heads, drops=(attn.proj_drop,))
        first = called._replace(body=body, call=None)
    if runs_plain(x, first, mlp, block=self):
        return plainly(add_branches, x, called, mlp), passed[-1]
    return add_branches(x, first, mlp, block=self), passed[-1]


@fused_forward("attention of tokens", f"{MODELS}.t2t.NarrowAttention", needs="qkv proj scale")
def narrow_attention(self: Foreign, x: Tensor) -> Tensor:
    """Attention of one head, narrower than its input; [B, N, K] → [B, N, D]."""
    return _narrow(self, x, None)


def _narrow(attn: Foreign, x: Tensor, norm: Before | None) -> Tensor:
    q, k, v = project(x, (attn.qkv,), norm).chunk(3, -1)
    o = attention(q[:, None], k[:, None], v[:, None], scale=attn.scale)
    return finish(o.squeeze(1), attn.proj, residual=v)


def _entering(x: Tensor, norm: nn.Module, layer: Layer) -> tuple[Tensor, Before | None]:
    """(x, norm to fold into the layer), or (norm(x), None) with gradients, where folding takes one more launch."""
    return (normalize(x, norm), None) if torch.is_grad_enabled() else fold_or_normalize(x, norm, (layer,))


@fused_forward("block of tokens", f"{MODELS}.t2t.TokenTransformer", needs="norm1 attn norm2 mlp")
def token_transformer(self: Foreign, x: Tensor) -> Tensor:
    """Attention and MLP of one head; [B, N, K] → [B, N, D]."""
    if type_name(self.attn) != f"{MODELS}.t2t.NarrowAttention" or has_hooks(self.attn):
        x = self.attn(self.norm1(x))
    else:
        x, norm = _entering(x, self.norm1, self.attn.qkv)
        x = _narrow(self.attn, x, norm)
    return add_branches(x, Branch(self.mlp, self.norm2))


@fused_forward("block of tokens", f"{MODELS}.t2t.TokenPerformer", needs="norm1 kqv proj dp norm2 mlp")
def token_performer(self: Foreign, x: Tensor) -> Tensor:
    """Linear attention and MLP of one head; [B, N, K] → [B, N, D]."""
    x, norm = _entering(x, self.norm1, self.kqv)
    y, v = self.attend(project(x, (self.kqv,), norm))
    y = finish(y, self.proj, drop=self.dp, residual=v)
    if has_hooks(self.mlp):
        return y + self.mlp(self.norm2(y))
    mlp = MlpBody((self.mlp[0],), activation_of(self.mlp[1]), self.mlp[2], (None, self.mlp[3]))
    return add_branches(y, Branch(mlp, self.norm2))


@fused_forward("tokens of soft splits", f"{MODELS}.t2t.TokensToToken", needs="project")
def tokens_to_token(self: Foreign, image: Tensor) -> Tensor:
    """Soft splits and a projection; [B, C, H, W] → [B, N, D]."""
    return project(self.tokens(image), (self.project,))


@fused_forward(
    "pre-norm block",
    f"{MODELS}.ceit.EnhancedBlock",
    needs="norm1 attn drop_path norm2 leff",
    folds=lambda self: [(self.norm1, self.attn)],
)
def enhanced_block(self: Foreign, x: Tensor) -> Tensor:
    """CeiT's pre-norm block; [B, 1 + N, D] → [B, 1 + N, D]."""
    attn = Branch(self.attn, self.norm1, None, self.drop_path)
    return add_branches(x, attn, Branch(self.leff, self.norm2, None, self.drop_path), block=self)


@fused_method("convolve", f"{MODELS}.ceit.EnhancedFeedForward")
def convolve(self: Foreign, x: Tensor) -> Tensor:
    """The patches [B, N, D] after all layers, with their BatchNorms folded after `freeze`; → [B, N, D]."""
    pairs = (self.conv1, self.bn1), (self.conv2, self.bn2), (self.conv3, self.bn3)
    plain = not all(is_plain_module(conv, CONVOLUTIONS) for conv, _ in pairs) or not is_depthwise_conv(self.conv2)
    if not can_fuse(x) or plain or activation_of(self.act) != "gelu":
        return type(self).convolve(self, x)
    folds = [folded(conv, conv, norm) for conv, norm in pairs]
    if not (folds[0] and folds[1] and folds[2]):
        return type(self).convolve(self, x)
    h = linear(x, folds[0].weight.flatten(1), folds[0].bias, activation="gelu")
    h = depthwise(h.unflatten(1, self.grid), folds[1].weight, folds[1].bias, activation="gelu").flatten(1, 2)
    return linear(h, folds[2].weight.flatten(1), folds[2].bias)


@fused_forward(
    "block of class tokens",
    f"{MODELS}.ceit.LayerAttention",
    needs="norm1 attn norm2 feedforward",
    folds=lambda self: [(self.norm1, self.attn), (self.norm2, self.feedforward)],
)
def layer_attention(self: Foreign, x: Tensor) -> Tensor:
    """Attention and MLP of the class tokens of all layers; [B, layers, D] → [B, 1, D]."""
    return add_branches(x, Branch(self.attn, self.norm1), Branch(self.feedforward, self.norm2), block=self)[:, -1:]


@fused_forward(
    "block with a norm of the residual",
    f"{MODELS}.cct.CompactBlock",
    needs="pre_norm self_attn norm1 linear1 dropout1 linear2 dropout2 drop_path",
    folds=lambda self: [(self.pre_norm, self.self_attn)],
)
def compact_block(self: Foreign, x: Tensor) -> Tensor:
    """CCT's block; [B, N, D] → [B, N, D]."""
    x = normalize(call_branches(compact.attend, self.self_attn, x, self.pre_norm, self.drop_path), self.norm1)
    layers = self.dropout1, self.linear2, self.dropout2, self.drop_path
    if not runs_plain(x, compact.mlp_branch(self.linear1, *layers), block=self.linear1):
        return call_branches(compact.add_mlp, self.linear1, x, *layers)
    h = self.dropout1(nn.functional.gelu(self.linear1(x)))
    return x + self.drop_path(self.dropout2(self.linear2(h)))


@fused_forward("tokenizer", f"{MODELS}.cct.ConvTokenizer", needs="conv_layers")
def tokenizer(self: Foreign, image: Tensor, pos: Tensor | None = None, prefix: Tensor | None = None) -> Tensor:
    """Patches as tokens, if the tokenizer is one patch projection; [B, C, H, W] → [B, T + N, D]."""
    conv = self.conv_layers[0][0]
    if not is_patch_conv(conv):
        return NotImplemented
    return patch_embed(whole_patches(image, conv.kernel_size), conv.weight, conv.bias, pos, prefix)


@fused_method("sequence_pool", f"{MODELS}.cct.CompactTransformer")
def sequence_pool(self: Foreign, x: Tensor) -> Tensor:
    """Sequence pooling as attention of one query to x [B, N, D], in which the bias of `score` has no effect; → [B, D].

    With gradients it is composed: that of the query is a difference of nearly equal sums, which PyTorch's softmax
    gives with a smaller error.
    """
    score = self.classifier.attention_pool
    runs = can_fuse(x) and kernels_available(x, x.shape[-1]) and is_readable(score)
    if torch.is_grad_enabled() or not runs:
        return type(self).sequence_pool(self, x)
    return attend_to_all(x, score)


def attend_to_all(x: Tensor, score: Layer) -> Tensor:
    """Attention of the weights of `score` to x [B, N, D], [B, D]."""
    query = score.weight.to(x.dtype)[None, None].expand(x.shape[0], 1, 1, -1)
    return attention(query, x[:, None], x[:, None], scale=1.0)[:, 0, 0]


@fused_forward(
    "pre-norm block",
    f"{MODELS}.igpt.ColourBlock",
    needs="ln_1 attn ln_2 mlp",
    folds=lambda self: [(self.ln_1, self.attn), (self.ln_2, self.mlp)],
)
def colour_block(self: Foreign, x: Tensor, past: object = None) -> Tensor:
    """iGPT's block; [B, n, D] → [B, n, D]."""
    attn = Branch(self.attn, self.ln_1, call={"past": past})
    return add_branches(x, attn, Branch(self.mlp, self.ln_2), block=self)


@fused_body(f"{MODELS}.igpt.CausalAttention", needs="c_attn num_heads c_proj")
def causal_parts(self: Foreign, past: object = None) -> Body:
    """The body of iGPT's attention; with a cache it is not replayed, see `replay.call`."""
    return Body("attention", (self.c_attn,), partial(self.attend, past=past), self.c_proj, self.num_heads)


@fused_body(f"{MODELS}.igpt.ColourMlp", needs="c_fc c_proj")
def colour_mlp_parts(self: Foreign) -> MlpBody:
    """Parts of iGPT's MLP."""
    return MlpBody((self.c_fc,), "quick_gelu", self.c_proj)


@fused_forward("post-norm block", f"{MODELS}.image_transformer.LocalBlock", needs="attn norm1 mlp norm2")
def local_block(self: Foreign, x: Tensor, past: object = None) -> Tensor:
    """Image Transformer's block; [B, n, D] → [B, n, D]."""
    x = normalize(add_branches(x, Branch(self.attn, call={"past": past})), self.norm1)
    return normalize(add_branches(x, Branch(self.mlp)), self.norm2)


@fused_body(f"{MODELS}.image_transformer.LocalAttention", needs="wq wk wv num_heads wo drop")
def local_parts(self: Foreign, past: object = None) -> Body:
    """The body of Image Transformer's attention; with a cache it is not replayed, see `replay.call`."""
    attend = partial(self.attend, past=past)
    return Body("attention", (self.wq, self.wk, self.wv), attend, self.wo, self.num_heads, drops=(self.drop,))


@fused_forward(
    "pre-norm block",
    f"{MODELS}.ipt.RestorationEncoderLayer",
    needs="self_attn linear1 dropout linear2 norm1 norm2 dropout1 dropout2",
    folds=lambda self: [(self.norm2, self.linear1)],
)
def restoration_layer(self: Foreign, x: Tensor) -> Tensor:
    """IPT's encoder layer; [B, N, D] → [B, N, D]."""
    attn = self.self_attn
    if has_hooks(attn):
        return NotImplemented
    parts = attention_body(
        (Packed(attn.in_proj_weight, None),), attn.out_proj, attn.num_heads, None, drops=(self.dropout1,)
    )
    hidden = MlpBody((self.linear1,), "relu", self.linear2, (self.dropout, self.dropout2))
    return add_branches(x, Branch(parts, self.norm1), Branch(hidden, self.norm2), block=self)


@fused_forward(
    "pre-norm block",
    f"{MODELS}.ipt.RestorationDecoderLayer",
    needs="self_attn multihead_attn linear1 dropout linear2 norm1 norm2 norm3 dropout1 dropout2 dropout3",
)
def restoration_decoder_layer(self: Foreign, x: Tensor, memory: Tensor, task: Tensor) -> Tensor:
    """IPT's decoder layer; (y + t) W is y W + t W. [B, N, D], the encoder's output and the task [N, D] → [B, N, D]."""
    attn, cross = self.self_attn, self.multihead_attn
    if has_hooks(attn) or has_hooks(cross):
        return NotImplemented
    D, H = x.shape[-1], attn.num_heads
    own, weight = attn.in_proj_weight, cross.in_proj_weight

    def attended(qkv: Tensor) -> Tensor:
        """Attention of packed projections [B, N, 3·D], to whose queries and keys the projected task is added."""
        added = F.pad(F.linear(task, own[: 2 * D]), (0, D))
        return attention_qkv(qkv + added.to(qkv.dtype), H, None)

    def crossed(q: Tensor) -> Tensor:
        """Attention of queries [B, N, D], to which the projected task is added, to the encoder's output."""
        q = q + F.linear(task, weight[:D]).to(q.dtype)
        parts = (q, *linear(memory, weight[D:]).chunk(2, -1))
        q, k, v = (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in parts)
        return attention(q, k, v).transpose(1, 2).flatten(2)

    query = Packed(weight[:D], None, (weight,))
    self_attention = Body("attention", (Packed(own, None),), attended, attn.out_proj, H, drops=(self.dropout1,))
    cross_attention = Body("attention", (query,), crossed, cross.out_proj, H, drops=(self.dropout2,))
    hidden = MlpBody((self.linear1,), "relu", self.linear2, (self.dropout, self.dropout3))
    branches = (Branch(self_attention, self.norm1), Branch(cross_attention, self.norm2), Branch(hidden, self.norm3))
    # few rows: products of the task read more than the sums that they save; gradients of parts of a weight are padded
    few = kernels_available(x) and (torch.is_grad_enabled() or not fold.pays(x, 3 * D))
    if few or runs_plain(x, *branches, block=self):
        return NotImplemented
    return add_branches(x, *branches, block=self)
