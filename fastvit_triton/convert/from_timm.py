"""timm's modules: VisionTransformer and its kin, BEiT, EVA and DINOv3, NaFlexViT, Swin, CaiT."""

import torch
from torch import Tensor, nn

from ..kernels.attention import attention
from ..kernels.patch_embed import patch_embed
from .forwards import original, whole
from .from_torch import patch_conv
from .fused import Branch, add, body, finish, fuses, project
from .parts import (
    DROPOUT,
    IDENTITY,
    LINEARS,
    Attention,
    Mlp,
    Packed,
    activation,
    four_axes,
    head_norms,
    idle,
    kind,
    own,
    readable,
    scores_mask,
    watched,
)


def _dropped(module: nn.Module) -> str | None:
    """Why the probabilities of this attention cannot stay on the chip."""
    drop = module.attn_drop
    return None if idle(drop) else f"attention dropout {drop.p}" if kind(drop) in DROPOUT else "attn_drop is watched"


@body("timm.layers.attention.Attention")
def attention_parts(self: nn.Module, attn_mask: Tensor | None = None, is_causal: bool = False) -> Attention | str:
    """Packed qkv, with optional norms of queries and keys and of the output."""
    why = "causal mask" if is_causal else "gated attention" if self.gate is not None else _dropped(self)
    if why is not None:
        return why
    return Attention(
        (self.qkv,),
        self.proj,
        self.num_heads,
        self.scale,
        bias=scores_mask(attn_mask),
        norms=head_norms(self.q_norm, self.k_norm),
        last=_present(self.norm),
        drops=(self.proj_drop,),
    )


@body("timm.layers.attention.AttentionRope", "timm.models.eva.EvaAttention")
def rope_parts(
    self: nn.Module, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Attention | str:
    """Packed or separate projections and rotary positions that leave prefix tokens alone."""
    why = "causal mask" if is_causal else "gated attention" if self.gate is not None else _dropped(self)
    if why is None and getattr(self, "num_kv_groups", 1) > 1:
        why = "grouped-query attention"
    qkv = self.qkv if self.qkv is None else _packed(self)
    if why is not None or isinstance(qkv, str):
        return why or qkv
    table = None
    if rope is not None:
        sin, cos = rope.chunk(2, -1)
        table = cos, sin, not self.rotate_half
    return Attention(
        (self.q_proj, self.k_proj, self.v_proj) if qkv is None else (qkv,),
        self.proj,
        self.num_heads,
        self.scale,
        bias=scores_mask(attn_mask),
        rope=table,
        norms=head_norms(self.q_norm, self.k_norm),
        last=_present(self.norm),
        drops=(self.proj_drop,),
    )


@body("timm.models.beit.Attention")
def beit_parts(self: nn.Module, shared_rel_pos_bias: Tensor | None = None) -> Attention | str:
    """Packed qkv and learned relative positions, its own or the model's."""
    why, qkv = _dropped(self), _packed(self)
    if why is not None or isinstance(qkv, str):
        return why or qkv
    table = None if self.relative_position_bias_table is None else self._get_rel_pos_bias()  # [1, H, N, N]
    if shared_rel_pos_bias is not None:
        table = shared_rel_pos_bias if table is None else table + shared_rel_pos_bias
    return Attention((qkv,), self.proj, self.num_heads, self.scale, four_axes(table), drops=(self.proj_drop,))


@body("timm.models.swin_transformer.WindowAttention")
def window_parts(self: nn.Module, mask: Tensor | None = None) -> Attention | str:
    """Attention in windows: group g of the bias is window g, with the mask of the shift added."""
    why = _dropped(self) or ("softmax is watched" if watched(self.softmax) else None)
    if why is not None:
        return why
    bias = self._get_rel_pos_bias()  # [1, H, N, N]
    bias = bias if mask is None else bias + mask[:, None]  # [windows, H, N, N]
    return Attention((self.qkv,), self.proj, self.num_heads, self.scale, bias, drops=(self.proj_drop,))


@body("timm.layers.mlp.Mlp")
def mlp_parts(self: nn.Module) -> Mlp | str:
    """fc1, activation, fc2, with an optional norm between."""
    act, drops = activation(self.act), (self.drop1, self.drop2)
    return Mlp((self.fc1,), act, self.fc2, drops, last=_present(self.norm))


@body("timm.layers.mlp.GluMlp")
def glu_parts(self: nn.Module) -> Mlp | str:
    """SwiGLU with gate and value in one layer, gate first."""
    if activation(self.act) != "silu" or self.gate_last or self.chunk_dim != -1:
        return f"gated by {type(self.act).__name__}" + (" on the last half" if self.gate_last else "")
    return Mlp((self.fc1,), "swiglu", self.fc2, (self.drop1, self.drop2), last=_present(self.norm))


@body("timm.layers.mlp.SwiGLU")
def swiglu_parts(self: nn.Module) -> Mlp | str:
    """SwiGLU with gate and value in two layers, and an optional norm before the last layer."""
    if activation(self.act) != "silu":
        return f"gated by {type(self.act).__name__}"
    return Mlp((self.fc1_g, self.fc1_x), "swiglu", self.fc2, (self.drop1, self.drop2), last=_present(self.norm))


@whole("pre-norm block", "timm.models.vision_transformer.Block")
def block(self: nn.Module, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """Pre-norm block; [B, N, D] → [B, N, D]."""
    if not fuses(x):
        return original(self, x, attn_mask, is_causal)
    call = dict(attn_mask=attn_mask, is_causal=is_causal)
    attn = Branch(self.attn, self.norm1, self.ls1, self.drop_path1, call=call)
    return add(x, attn, Branch(self.mlp, self.norm2, self.ls2, self.drop_path2))


@whole("pre-norm block", "timm.models.eva.EvaBlock")
def eva_block(
    self: nn.Module,
    x: Tensor,
    rope: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Pre-norm block with rotary positions; [B, N, D] → [B, N, D]."""
    if not fuses(x):
        return original(self, x, rope, attn_mask, is_causal)
    call = dict(rope=rope, attn_mask=attn_mask, is_causal=is_causal)
    attn = Branch(self.attn, self.norm1, None, self.drop_path1, self.gamma_1, call=call)
    return add(x, attn, Branch(self.mlp, self.norm2, None, self.drop_path2, self.gamma_2))


@whole("pre-norm block", "timm.models.beit.Block")
def beit_block(self: nn.Module, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
    """Pre-norm block with relative positions; [B, N, D] → [B, N, D]."""
    if not fuses(x):
        return original(self, x, shared_rel_pos_bias)
    call = dict(shared_rel_pos_bias=shared_rel_pos_bias)
    attn = Branch(self.attn, self.norm1, None, self.drop_path1, self.gamma_1, call=call)
    return add(x, attn, Branch(self.mlp, self.norm2, None, self.drop_path2, self.gamma_2))


@whole("block around its talking heads", "timm.models.cait.LayerScaleBlock")
def cait_block(self: nn.Module, x: Tensor) -> Tensor:
    """CaiT's block around its talking heads; [B, N, D] → [B, N, D]."""
    if not fuses(x):
        return original(self, x)
    attn = Branch(self.attn, self.norm1, None, self.drop_path, self.gamma_1)
    return add(x, attn, Branch(self.mlp, self.norm2, None, self.drop_path, self.gamma_2))


@whole("class-token block", "timm.models.cait.LayerScaleBlockClassAttn")
def cait_class_block(self: nn.Module, x: Tensor, x_cls: Tensor) -> Tensor:
    """CaiT's class-token block; [B, N, D] and [B, 1, D] → [B, 1, D]."""
    if not fuses(x):
        return original(self, x, x_cls)
    attended = self.attn(self.norm1(torch.cat((x_cls, x), 1)))
    x_cls = x_cls + self.drop_path(self.gamma_1 * attended)
    return add(x_cls, Branch(self.mlp, self.norm2, None, self.drop_path, self.gamma_2))


@whole("block around its own windows", "timm.models.swin_transformer.SwinTransformerBlock")
def swin_block(self: nn.Module, x: Tensor) -> Tensor:
    """Swin's block around its own windows; [B, H, W, D] → [B, H, W, D]."""
    if not fuses(x):
        return original(self, x)
    x = x + self.drop_path1(self._attn(self.norm1(x)))
    return add(x, Branch(self.mlp, self.norm2, None, self.drop_path2))


@whole("class attention", "timm.models.cait.ClassAttn", reason=_dropped)
def class_attention(self: nn.Module, x: Tensor) -> Tensor:
    """The class token attends to all tokens; [B, N, D] → [B, 1, D]."""
    if not fuses(x) or _dropped(self) is not None:
        return original(self, x)
    q = project(x[:, :1], (self.q,))
    k, v = project(x, (self.k, self.v)).chunk(2, -1)
    q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, k, v))
    o = attention(q, k, v, scale=self.scale).transpose(1, 2).flatten(2)
    return finish(o, self.proj, drop=self.proj_drop)


@whole("attention pooling", "timm.layers.attention_pool.AttentionPoolLatent")
def attention_pool(self: nn.Module, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    """Learned queries attend to all tokens, then an MLP; [B, N, D] → [B, D]."""
    if not fuses(x):
        return original(self, x, attn_mask)
    x = x if self.pos_embed is None else x + self.pos_embed[None].to(x.dtype)
    q = self.q(self.latent.expand(x.shape[0], -1, -1)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
    k, v = project(x, (self.kv,)).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    q, k = self.q_norm(q), self.k_norm(k)
    o = attention(q, k, v, scores_mask(attn_mask), self.scale).transpose(1, 2).flatten(2)
    x = finish(o, self.proj, drop=self.proj_drop)
    x = x if self.mlp is None else add(x, Branch(self.mlp, self.norm))
    return x[:, 0] if self.pool == "token" else x.mean(1) if self.pool == "avg" else x


def _patch_reason(self: nn.Module) -> str | None:
    if not self.flatten and self.output_fmt != "NHWC":
        return f"its output is {self.output_fmt}, not tokens"
    return None if patch_conv(self.proj) else "its projection was replaced or is watched"


@whole("patch projection", "timm.layers.patch_embed.PatchEmbed", reason=_patch_reason)
def patches(self: nn.Module, x: Tensor) -> Tensor:
    """Patch projection; image [B, C, H, W] → tokens [B, N, D], or [B, h, w, D] where timm asks for NHWC."""
    conv, even = self.proj, x.dim() == 4 and all(s % p == 0 for s, p in zip(x.shape[2:], self.patch_size, strict=True))
    strict = self.img_size is not None and self.strict_img_size
    fits = even and not (strict and tuple(x.shape[2:]) != tuple(self.img_size))
    if not (fits and fuses(x) and _patch_reason(self) is None):
        return original(self, x)
    tokens = patch_embed(x, conv.weight, conv.bias)
    return self.norm(tokens if self.flatten else tokens.unflatten(1, (x.shape[2] // self.patch_size[0], -1)))


def _present(norm: nn.Module) -> nn.Module | None:
    return None if readable(norm, IDENTITY) else norm


def _packed(self: nn.Module) -> nn.Module | Packed | str:
    """The packed projection, whose bias may be kept as q_bias, k_bias (zeros) and v_bias."""
    if getattr(self, "q_bias", None) is None:
        return self.qkv
    if not readable(self.qkv, LINEARS) or not own(self.q_bias, self.k_bias, self.v_bias):
        return "qkv was replaced or is watched"
    return Packed(self.qkv.weight, torch.cat((self.q_bias, self.k_bias, self.v_bias)))
