"""Tests of the layers of systems that have no model here yet, composed of our ops, in float64.

Oracles are timm's or transformers' modules where they have the layer, else its equations with explicit maps.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import ImageGPTConfig
from transformers.models.imagegpt.modeling_imagegpt import ImageGPTBlock

from fastvit_triton import attention, linear, mlp
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
    """The module in evaluation mode and float64, with random weights."""
    module.double().eval()
    with torch.no_grad():
        for tensor in module.parameters():
            tensor.normal_(0.0, 0.4)
    return module


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
    dense = (D**-0.5 * q @ k.mT + torch.where(near.tril(), 0.0, -math.inf)).softmax(-1) @ v

    def blocks(x: Tensor) -> Tensor:  # [B, H, N, D] → [B·blocks, H, 4, D]
        return x.unflatten(2, (-1, block)).transpose(1, 2).flatten(0, 1)

    def with_previous(x: Tensor) -> Tensor:  # [B·blocks, H, 8, D], zeros before the first block
        return torch.cat((blocks(F.pad(x, (0, 0, block, 0))[:, :, :N]), blocks(x)), 2)

    causal = torch.ones(block, block, dtype=torch.bool).tril()
    mask = torch.stack([torch.cat((torch.full_like(causal, i > 0), causal), 1) for i in range(N // block)])
    y = attention(blocks(q), with_previous(k), with_previous(v), mask[:, None])  # group = block
    y = y.unflatten(0, (B, -1)).transpose(1, 2).flatten(2, 3)
    assert_same(y, dense, q, k, v)


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
