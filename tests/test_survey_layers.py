"""Tests of the layers of systems that have no model here yet, composed of our ops, in float64.

Oracles are timm's or transformers' modules where they have the layer, else its equations with explicit maps.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from timm.layers.bottleneck_attn import BottleneckAttn
from torch import Tensor, nn
from transformers import ImageGPTConfig
from transformers.models.cvt.modeling_cvt import CvtSelfAttention
from transformers.models.imagegpt.modeling_imagegpt import ImageGPTBlock

from fastvit_triton import attention, depthwise, linear, mlp
from fastvit_triton.kernels.argument import Norm

EPS64 = torch.finfo(torch.float64).eps
ROUNDINGS = 84  # sums in another order, as in test_models.py


def assert_same(ours: Tensor, theirs: Tensor, *inputs: Tensor) -> None:
    """Asserts equal values, and equal gradients of the inputs for random weights of the output."""
    weights = torch.randn_like(theirs)
    wanted, found = (torch.autograd.grad((y * weights).sum(), inputs, retain_graph=True) for y in (theirs, ours))
    for a, b in zip((ours.detach(), *found), (theirs.detach(), *wanted), strict=True):
        assert a.shape == b.shape and float((a - b).norm()) <= ROUNDINGS * EPS64 * float(b.norm())


def drawn(*shape: int) -> Tensor:
    """Normal random numbers that need a gradient."""
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def redrawn(module: nn.Module) -> nn.Module:
    """The module in evaluation mode and float64, with random weights and statistics."""
    module.double().eval()
    with torch.no_grad():
        for tensor in module.parameters():
            tensor.normal_(0.0, 0.4)
        for name, tensor in module.named_buffers():
            if name.endswith("running_var"):
                tensor.uniform_(0.5, 2.0)
            elif name.endswith("running_mean"):
                tensor.normal_()
    return module


def explicit(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float = 0.0, scale: float = 1.0) -> Tensor:
    """softmax(scale · q kᵀ + bias) v with the map written out."""
    return (scale * q @ k.mT + bias).softmax(-1) @ v


def split(x: Tensor, heads: int) -> Tensor:
    """[B, N, H·D] → [B, H, N, D]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    """[B, H, N, D] → [B, N, H·D]."""
    return x.transpose(1, 2).flatten(2)


def test_image_transformer_attends_to_two_blocks():
    """Oracle: a dense causal map of all pixels, restricted to the own block and the one before (arXiv:1802.05751, 3.3,
    local 1-D attention). Ours is one call on blocks of 4 queries and 8 keys."""
    B, H, N, D, block = 2, 3, 12, 5, 4
    q, k, v = (drawn(B, H, N, D) for _ in range(3))
    at = torch.arange(N)
    near = (at[:, None] // block - at // block).abs() <= 1
    dense = explicit(q, k, v, torch.where(near.tril(), 0.0, -math.inf), D**-0.5)

    def blocks(x: Tensor) -> Tensor:  # [B, H, N, D] → [B·blocks, H, 4, D]
        return x.unflatten(2, (-1, block)).transpose(1, 2).flatten(0, 1)

    def with_previous(x: Tensor) -> Tensor:  # [B·blocks, H, 8, D], zeros before the first block
        return torch.cat((blocks(F.pad(x, (0, 0, block, 0))[:, :, :N]), blocks(x)), 2)

    causal = torch.ones(block, block, dtype=torch.bool).tril()
    mask = torch.stack([torch.cat((torch.full_like(causal, i > 0), causal), 1) for i in range(N // block)])
    y = attention(blocks(q), with_previous(k), with_previous(v), mask[:, None])  # group = block
    y = y.unflatten(0, (B, -1)).transpose(1, 2).flatten(2, 3)
    assert_same(y, dense, q, k, v)


@pytest.mark.parametrize("K", [1, 3])
def test_heads_by_position_compute_a_convolution(K):
    """Oracle: torch's convolution, on the pixels whose neighbours are in the image (arXiv:1911.03584, theorem 1).

    K² heads have scores −α |δ − Δ_h|² of the offset δ of two pixels, with the centre Δ_h at one of the K × K offsets;
    for α = 200 a softmax differs from one pixel by e^−200.
    """
    B, side, width, out = 2, 6, 5, 4
    image, kernel = drawn(B, width, side, side), drawn(out, width, K, K)
    at = torch.cartesian_prod(torch.arange(side), torch.arange(side)).double()
    offsets = at[None] - at[:, None]  # [query, key, 2]
    centres = torch.cartesian_prod(torch.arange(K), torch.arange(K)).double() - K // 2
    scores = -200.0 * (offsets[None] - centres[:, None, None]).square().sum(-1)  # [K², N, N]
    pixels = image.flatten(2).mT[:, None].expand(-1, K * K, -1, -1)  # every head has all channels
    none = torch.zeros(B, K * K, side * side, 1, dtype=torch.float64)
    heads = attention(none, none, pixels, scores[None])
    y = linear(merged(heads), kernel.permute(0, 2, 3, 1).flatten(1)).mT.unflatten(2, (side, side))
    inside = slice(K // 2, side - K // 2)
    assert_same(y[..., inside, inside], F.conv2d(image, kernel), image, kernel)


def test_igpt_block_equals_transformers():
    """Oracle: transformers' block with random weights: a norm without mean, causal attention, QuickGELU."""
    config = ImageGPTConfig(n_positions=7, n_embd=24, n_layer=1, n_head=3, attn_pdrop=0, resid_pdrop=0)
    theirs = redrawn(ImageGPTBlock(config, layer_idx=0))
    x, state = drawn(2, 7, 24), {name: t.detach() for name, t in theirs.state_dict().items()}

    def layer(name: str) -> tuple[Tensor, Tensor]:
        return state[f"{name}.weight"].T, state[f"{name}.bias"]

    norms = [Norm(state[f"ln_{i}.weight"], None, config.layer_norm_epsilon, "rms_norm") for i in (1, 2)]
    q, k, v = (split(part, 3) for part in linear(x, *layer("attn.c_attn"), norm=norms[0]).chunk(3, -1))
    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    y = linear(merged(attention(q, k, v, causal[None, None])), *layer("attn.c_proj"), residual=x)
    y = mlp(y, layer("mlp.c_fc"), layer("mlp.c_proj"), norm=norms[1], activation="quick_gelu", residual=y)
    assert_same(y, theirs(x)[0], x)


def test_visual_tokens():
    """Oracle: the equations with einsum (VT, arXiv:2006.03677, 3.1 and 3.3): filters and recurrent tokens pool the
    pixels, and the projector returns the tokens to the map."""
    B, pixels, tokens, D = 2, 20, 4, 6
    x, filters, recurrent, query, key = drawn(B, pixels, D), drawn(D, tokens), drawn(D, D), drawn(D, D), drawn(D, D)

    def pooled(scores: Tensor) -> Tensor:  # softmax over the pixels of [B, pixels, tokens]
        return torch.einsum("bpl,bpd->bld", scores.softmax(1), x)

    def one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q[:, None], k[:, None], v[:, None], scale=1.0)[:, 0]

    wanted = pooled(torch.einsum("bpd,dl->bpl", x, filters))
    found = one(filters.T.expand(B, -1, -1), x, x)
    assert_same(found, wanted, x, filters)
    wanted = pooled(torch.einsum("bpd,bld->bpl", x, wanted @ recurrent))
    found = one(found @ recurrent, x, x)
    assert_same(found, wanted, x, filters, recurrent)
    shares = torch.einsum("bpd,bld->bpl", x @ query, wanted @ key).softmax(-1)
    assert_same(x + one(x @ query, found @ key, found), x + torch.einsum("bpl,bld->bpd", shares, wanted), x, query, key)


@pytest.mark.parametrize("size", [(4, 4), (3, 5)])
def test_bottleneck_attention_equals_timms(size):
    """Oracle: timm's module. Ours has q · (r_height + r_width) as the bias of each image, by indices of offsets."""
    heads, d, (h, w) = 2, 8, size
    theirs = redrawn(BottleneckAttn(16, feat_size=size, num_heads=heads, scale_pos_embed=True))
    x = drawn(2, 16, h, w)
    q, k, v = (split(part, heads) for part in linear(x.flatten(2).mT, theirs.qkv.weight.flatten(1)).chunk(3, -1))
    row, column = torch.cartesian_prod(torch.arange(h), torch.arange(w)).unbind(1)
    tables = theirs.pos_embed.height_rel, theirs.pos_embed.width_rel
    places = [at[None] - at[:, None] + n - 1 for at, n in ((row, h), (column, w))]
    bias = sum(torch.einsum("bhnd,nmd->bhnm", q, table[place]) for table, place in zip(tables, places, strict=True))
    y = merged(attention(q, k, v, bias * d**-0.5)).mT.unflatten(2, size)
    assert_same(y, theirs(x), x, *tables)


@pytest.mark.parametrize("stride", [1, 2])
def test_convolutional_attention_equals_transformers(stride):
    """Oracle: transformers' module in evaluation mode: depthwise convolutions with BatchNorm make queries, and keys
    and values of a smaller map; the class token joins after them; the scale is that of the whole width."""
    D, heads, (h, w) = 12, 3, (5, 6)
    theirs = redrawn(CvtSelfAttention(heads, D, 3, 1, 1, 1, stride, "dw_bn", True, 0.0, with_cls_token=True))
    x = drawn(2, 1 + h * w, D)

    def projected(name: str, stride: int) -> Tensor:
        conv = getattr(theirs, f"convolution_projection_{name}").convolution_projection
        norm, last = conv.normalization, getattr(theirs, f"projection_{name}")
        factor = norm.weight / (norm.running_var + norm.eps).sqrt()  # the norm is folded into the convolution
        shift = norm.bias - norm.running_mean * factor
        kernel = conv.convolution.weight * factor[:, None, None, None]
        tokens = depthwise(x[:, 1:].unflatten(1, (h, w)), kernel, shift, stride=stride).flatten(1, 2)
        return split(linear(torch.cat((x[:, :1], tokens), 1), last.weight, last.bias), heads)

    y = attention(projected("query", 1), projected("key", stride), projected("value", stride), scale=D**-0.5)
    assert_same(merged(y), theirs(x, h, w), x)
