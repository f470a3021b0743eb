"""PyTorch implementations of registered ops (SDPA, cuBLAS, cuDNN), with the same outputs as the kernels.

`dispatch` chooses between them and the kernels. Layouts, dtypes, row statistics and L are the same; equation numbers
refer to the files that are named.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from . import layer_norm
from .activation import ACTIVATIONS
from .argument import Epilogue
from .launch import cdiv, power_of_2

LN_2 = math.log(2)


def last_axis_contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors with a contiguous last axis; copied only if necessary, None stays None."""
    return [t if t is None or t.stride(-1) == 1 else t.contiguous() for t in tensors]


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(o [B, H, Nq, D] stored as [B, Nq, H, D], L [B, H, Nq] in base 2) by kernels of SDPA that return L.

    On a GPU FlashAttention for 16-bit dtypes and the memory-efficient kernel for float32; on a CPU FlashAttention.
    """
    q, k, v = last_axis_contiguous(q, k, v)
    aten = torch.ops.aten
    if q.device.type != "cuda":
        o, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=scale)
    elif q.dtype == torch.float32:
        o, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, scale=scale)
    else:
        o, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)
    o = o.transpose(1, 2).contiguous().transpose(1, 2)  # on GPUs it is stored so already
    return o, (lse.narrow(-1, 0, q.shape[2]).float() / LN_2).contiguous()


def attention_grads(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, packed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), or dqkv [B, N, 3, H, D] and two empty tensors, by the backward kernels of SDPA."""
    do, q, k, v = last_axis_contiguous(do, q, k, v)
    aten, lse = torch.ops.aten, (lse * LN_2).contiguous()
    if q.device.type != "cuda":
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(do, q, k, v, o, lse, 0.0, False, scale=scale)
    elif q.dtype == torch.float32:
        rows = F.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)  # the kernel reads L in blocks of 32 rows
        none = lse.new_empty((), dtype=torch.int64)
        grads = aten._scaled_dot_product_efficient_attention_backward(
            do, q, k, v, None, o, rows, none, none, 0.0, [True, True, True, False], scale=scale
        )[:3]
    else:
        state, unused = (
            lse.new_empty(shape, dtype=torch.uint64) for shape in (2, ())
        )  # random state of dropout, which is off
        grads = aten._scaled_dot_product_flash_attention_backward(
            do, q, k, v, o, lse, None, None, q.shape[2], k.shape[2], 0.0, False, state, unused, scale=scale
        )
    if packed:
        return torch.stack([t.transpose(1, 2) for t in grads], 2), q.new_empty(0), q.new_empty(0)
    return tuple(t.contiguous() for t in grads)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    colsum: Tensor | None,
    eps: float,
    epilogue: Epilogue,
    outputs: tuple[Tensor, ...],
) -> tuple[Tensor, ...]:
    """Equations (1) to (4) of `linear`, with W' of (5).

    Args:
        x: [..., K].
        weight: [F, K], or [2F, K] for "swiglu", with the LayerNorm's weight folded in if there is a norm.
        bias: [F], or None.
        colsum: column sums [F]; not None if x is to be normalised.
        eps: of the LayerNorm.
        epilogue: what follows the product.
        outputs: (y, pre, mean, rstd, stats) with the shapes and dtypes to return; empty ones are not needed.

    Returns:
        (y, pre, mean, rstd, stats) as the op gives them.
    """
    activation, layer_scale, sample_scale, residual, _ = epilogue
    y, pre, mean, rstd, stats = outputs
    normed = x
    if colsum is not None:
        normed, *norm_stats = torch.native_layer_norm(x, x.shape[-1:], None, None, eps)
        if mean.numel():
            mean, rstd = (t.reshape(-1).float() for t in norm_stats)
    h = F.linear(normed, weight, None if bias is None else bias.to(x.dtype))
    pre = h.view(pre.shape) if pre.numel() else pre
    if activation == "swiglu":
        gate, up = h.chunk(2, -1)
        h = F.silu(gate) * up
    elif activation is not None:
        h = ACTIVATIONS[activation](h)
    if layer_scale is not None:
        h = h * layer_scale
    if sample_scale is not None:
        h = h * sample_scale.to(h.dtype).view(-1, *[1] * (h.dim() - 1))
    y = (h if residual is None else h + residual).to(y.dtype)
    stats = _tile_stats(y, stats.shape[1]) if stats.dim() == 3 else stats
    return y, pre, mean, rstd, stats


def _tile_stats(y: Tensor, tiles: int) -> Tensor:
    """Row statistics [M, tiles, 2] fp32 from one pass over y; each tile has the mean and variance of its row.

    Merged over tiles they give the same mean and variance as equation (4) of `linear`.
    """
    rows = y.flatten(0, -2)
    M, F_ = rows.shape
    mean, rstd = (y.new_empty(M, dtype=torch.float32) for _ in range(2))
    if M:
        layer_norm.write_stats(rows, mean, rstd, torch.finfo(torch.float32).tiny)
    width = power_of_2(cdiv(F_, tiles))
    count = (F_ - width * torch.arange(tiles, device=y.device)).clamp(0, width)
    return torch.stack((mean, rstd**-2), 1)[:, None] * count[:, None]


def patch_embed(image: Tensor, weight: Tensor, bias: Tensor | None, mean: Tensor | None, std: Tensor | None) -> Tensor:
    """Equations (1), (2) and (4) of `patch_embed`: [B, N, D]."""
    image = _pixels(image, weight, mean, std)
    bias = None if bias is None else bias.to(weight.dtype)
    return F.conv2d(image, weight, bias, stride=weight.shape[2:]).flatten(2).transpose(1, 2)


def patch_weight_grad(dt: Tensor, image: Tensor, weight: Tensor, mean: Tensor | None, std: Tensor | None) -> Tensor:
    """Equation (5) of `patch_embed`: dE in fp32 from dt [B, N, D]."""
    image, patch = _pixels(image, weight, mean, std), weight.shape[2:]
    sides = [side // length for side, length in zip(image.shape[2:], patch, strict=True)]
    dt = dt.to(weight.dtype).transpose(1, 2).unflatten(2, sides)
    inside = [side * length for side, length in zip(sides, patch, strict=True)]
    image = image[:, :, : inside[0], : inside[1]]
    grads = torch.ops.aten.convolution_backward(
        dt.contiguous(), image, weight, None, patch, [0, 0], [1, 1], False, [0, 0], 1, [False, True, False]
    )
    return grads[1].float()


def _pixels(image: Tensor, weight: Tensor, mean: Tensor | None, std: Tensor | None) -> Tensor:
    """Equation (4), in the weight's dtype."""
    if image.dtype != torch.uint8:
        return image.to(weight.dtype)
    mean, std = (t.to(weight.dtype)[:, None, None] for t in (mean, std))
    return (image.to(weight.dtype) / 255 - mean) / std
