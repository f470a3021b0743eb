"""Fused forwards for this package's layers of maps and pyramids that no other library has, which register on import.

Layers with the attributes of timm's share timm's readers.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...engine.attention import attend, heads_of
from ...engine.batch_norm import convolve
from ...engine.body import Body, finish, normalize, project
from ...engine.branch import Branch, add_branches
from ...engine.freeze import derived
from ...engine.hooks import has_hooks
from ...engine.leaves import CONVOLUTIONS, Foreign, Layer, Packed, is_patch_conv, is_plain_module
from ...kernels.attention import attention
from ...kernels.patch_embed import assemble, patch_embed, whole_patches
from ...kernels.sizes import Branch as Sizes
from ...layers.embed import PatchEmbed
from ..batch_norm import convolve_depthwise
from ..forwards import fused_body, fused_forward


@fused_forward("convolution", "fastvit_triton.layers.normed.ConvNorm", needs="linear bn")
def conv_norm(self: Foreign, x: Tensor) -> Tensor:
    """A convolution with the BatchNorm after it; [B, C, H, W] → [B, C', H', W']."""
    return convolve(x, self, self.linear, self.bn)


@fused_forward("convolution", "fastvit_triton.layers.residual.ConvNormAct", needs="conv bn relu")
def conv_norm_act(self: Foreign, x: Tensor) -> Tensor:
    """A convolution with the BatchNorm and the ReLU after it; [B, C, H, W] → [B, C', H', W']."""
    x = convolve(x, self, self.conv, self.bn)
    return x.relu() if self.relu else x


@fused_forward(
    "attention with decomposed positions",
    "fastvit_triton.models.botnet.BottleneckAttention",
    needs="qkv pos_embed num_heads grid scale pool",
)
def bottleneck_attention(self: Foreign, x: Tensor) -> Tensor:
    """BoTNet's attention on a map; [B, D, H, W] → [B, D, H', W']."""
    if tuple(x.shape[2:]) != self.grid:
        return NotImplemented
    if is_plain_module(self.qkv, CONVOLUTIONS):
        packed = project(x.flatten(2).mT.contiguous(), (Packed(self.qkv.weight.flatten(1), None),))
    else:
        packed = self.qkv(x).flatten(2).mT
    q, k, v = heads_of(packed, self.num_heads)
    return self.merge(attention(q, k, v, scale=self.scale, axis_bias=self.pos_embed.axes(self.scale * q)))


VT = "fastvit_triton.models.vt"


@fused_forward("attention of tokens", f"{VT}.Tokenizer", f"{VT}.TokenAttention", f"{VT}.Projector")
def one_head(self: Foreign, x: Tensor, tokens: Any = None) -> Tensor:
    """Attention between a map [B, N, C] and tokens [B, L, D] → [B, Nq, e]."""
    if hasattr(self, "filters"):
        filters = self.filters
        q = _linear(self.recur, tokens) if filters is None else filters.expand(x.shape[0], -1, -1)
        q = q.to(x.dtype)
        k = x
        v = _linear(self.value, x)
    elif hasattr(self, "value"):
        q = _linear(self.query, x)
        k = _linear(self.key, tokens)
        v = _linear(self.value, tokens)
    else:
        q = _linear(self.key, tokens)
        k = _linear(self.query, tokens)
        v = tokens
    return attention(q[:, None], k[:, None], v[:, None], scale=1.0)[:, 0]


def _linear(layer: nn.Module, x: Any) -> Tensor:
    """A linear layer, or an Identity, of x."""
    return project(x, (layer,)) if type(layer) is nn.Linear else layer(x)


@fused_forward("visual transformer", f"{VT}.VisualTransformer", needs="tokenizer attn mlp projector drop_path")
def visual_transformer(self: Foreign, x: Tensor, tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Map [B, N, C], and the tokens [B, L, D] of the module before → the same."""
    t = self.tokenizer(x, tokens)
    t = t + self.drop_path(self.attn(x, t))
    t = add_branches(t, Branch(self.mlp, None, None, self.drop_path))
    return x if self.projector is None else x + self.drop_path(self.projector(x, t)), t


@dataclass(frozen=True, eq=False)
class _PositionalHeads:
    """Attention by relative position alone, and the linear layer that joins its heads."""

    attn: Foreign  # a `QuadraticAttention`
    takes_input: ClassVar[bool] = True

    @property
    def layers(self) -> tuple[nn.Module]:
        """The layer that joins the heads."""
        return (self.attn.value,)

    def sizes(self, body: Body) -> Sizes:
        """See `engine.body.Body`."""
        inner = self.attn.value.in_features
        channels = self.attn.proj.out_features
        return Sizes("mlp", 0, 0, channels, inner, inner)

    def __call__(self, h: Tensor, x: Tensor, way: str) -> Tensor:
        """[B, N, D] → [B, N, D]; the maps are kept while the model is frozen."""
        attn = self.attn
        maps = derived(attn, "maps", (attn.attention_centers, attn.attention_spreads), attn.maps)
        return finish(attn.attend(x, maps), attn.value, way=way)


@fused_body(
    "fastvit_triton.models.attention_conv.QuadraticAttention",
    needs="attention_centers attention_spreads value proj proj_drop",
)
def positional_parts(self: Foreign) -> Body:
    """Parts of an attention by relative position alone."""
    return Body("attention by position", (), _PositionalHeads(self), self.proj, drops=(self.proj_drop,))


@dataclass(frozen=True, eq=False)
class _ConvolvedHeads:
    """Attention of convolved queries, keys and values."""

    attn: Foreign  # a `ConvAttention`
    grid: tuple[int, int]  # (H, W) of the tokens
    takes_input: ClassVar[bool] = True

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The projections."""
        return self.attn.proj_q, self.attn.proj_k, self.attn.proj_v

    def sizes(self, body: Body) -> Sizes:
        """See `engine.body.Body`."""
        C = self.attn.proj.in_features
        keys = max(self.attn.stride, 1) ** 2
        return Sizes("reduced_attention", 0, 0, C, C + 2 * C // keys, C, self.attn.num_heads, keys=keys)

    def __call__(self, h: Tensor, x: Tensor, way: str) -> Tensor:
        """Tokens [B, T + H · W, D] → [B, T + H · W, D]."""
        attn = self.attn
        heads = []
        T = x.shape[1] - self.grid[0] * self.grid[1]
        image = x[:, T:].unflatten(1, self.grid)
        for convolution, layer in zip((attn.conv_proj_q, attn.conv_proj_k, attn.conv_proj_v), self.layers, strict=True):
            tokens = _convolved(convolution, image).flatten(1, 2)
            tokens = torch.cat((x[:, :T], tokens), 1) if T else tokens
            tokens = project(tokens, (layer,), None, None, way)
            heads.append(tokens.unflatten(-1, (attn.num_heads, -1)).transpose(1, 2))
        q, k, v = heads
        return attend(q, k, v, attn.scale, attn.attn_drop, fused=True)


def _convolved(module: Foreign, x: Tensor) -> Tensor:
    """`ConvProjection` by one kernel; in training BatchNorm follows it."""
    conv = module.conv
    if has_hooks(module) or not is_plain_module(conv, CONVOLUTIONS):
        return module(x)
    return convolve_depthwise(x, module, conv, module.bn)


@fused_body(
    "fastvit_triton.models.cvt.ConvAttention",
    needs="conv_proj_q conv_proj_k conv_proj_v proj_q proj_k proj_v num_heads stride scale attn_drop proj proj_drop",
    by_call=True,
)
def convolved_parts(self: Foreign, size: tuple[int, int]) -> Body:
    """Parts of an attention of convolved queries, keys and values."""
    heads = _ConvolvedHeads(self, size)
    return Body("convolved attention", (), heads, self.proj, self.num_heads, drops=(self.proj_drop,))


@fused_forward("patch projection", "fastvit_triton.layers.stems.ConvStem", needs="widths proj", products=False)
def conv_stem(self: Foreign, image: Tensor, pos: Tensor | None = None, prefix: Tensor | None = None) -> Tensor:
    """Convolutions, and patches of their map; [B, C, H, W] → [B, T + N, D]."""
    if not is_patch_conv(self.proj):
        return NotImplemented
    self.grid_of(image)
    return patch_embed(self.convolve(image), self.proj.weight, self.proj.bias, pos, prefix)


@fused_forward("patch projection", "fastvit_triton.layers.embed.NormedPatchEmbed", needs="proj norm", products=False)
def normed_patch_embed(self: Foreign, image: Tensor, pos: Tensor | None = None, prefix: Tensor | None = None) -> Tensor:
    """Patches with a LayerNorm of their tokens; [B, C, H, W] → [B, T + N, D]."""
    tokens = PatchEmbed.forward(self, whole_patches(image, self.patch_size))  # type: ignore[arg-type]  # a subclass
    x = normalize(tokens, self.norm)
    return x if pos is None and prefix is None else assemble(x, pos, prefix)
