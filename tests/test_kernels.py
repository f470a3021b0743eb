"""Tests of the ops' PyTorch references. Oracles: equations written out in float64, gradcheck, and error sentences."""

import inspect
import itertools
import math
import os
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from agreement import close64, normal, one_sentence
from budget import leaves
from interpreter import interpreting
from sampling import marked
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastvit_triton import (
    add_layer_norm,
    attention,
    attention_qkv,
    batch_norm_act,
    create_model,
    depthwise,
    fold,
    layer_norm,
    linear,
    mlp,
    patch_embed,
    varlen_attention,
)
from fastvit_triton.kernels import OPS
from fastvit_triton.kernels.activation import ACTIVATIONS, GATED
from fastvit_triton.kernels.argument import Norm, can_read_values
from fastvit_triton.kernels.backend import backend, set_backend, using_backend, why_not
from fastvit_triton.kernels.layer_norm import row_stats

pytestmark = pytest.mark.fast

LONG = {"window_attention-large"}  # many seconds
EVERY = [
    pytest.param(op, case, id=id, marks=pytest.mark.full if id in LONG else ())
    for op in OPS
    for id, case in ((f"{op.name}-{name}", case) for name, case in op.cases.items())
]


@pytest.mark.few(17)
@pytest.mark.parametrize("op, case", EVERY)
def test_gradients_match_finite_differences(op, case):
    """Oracle: torch.autograd.gradcheck, float64, with respect to every floating argument."""
    arguments = op.inputs(case, torch.float64, "cpu")
    names = [n for n, v in arguments.items() if any(t.requires_grad for t in leaves(v))]
    flat = [t for n in names for t in leaves(arguments[n]) if t.requires_grad]

    def call(*tensors):
        pool = iter(tensors)

        def swap(value):
            if isinstance(value, torch.Tensor):
                return next(pool) if value.requires_grad else value
            return type(value)(swap(v) for v in value) if isinstance(value, (tuple, list)) else value

        return tuple(leaves(op.run(**arguments | {n: swap(arguments[n]) for n in names})))

    assert torch.autograd.gradcheck(call, flat)


@pytest.mark.parametrize("op, case", EVERY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_low_precision_follows_float64(op, case, dtype):
    """Oracle: the same numbers in float64. Budget: one rounding for each of at most 64 terms."""
    got = next(leaves(op.run(**op.inputs(case, dtype, "cpu"))))
    rounded = op.inputs(case, dtype, "cpu")
    truth = next(leaves(op.reference(**{n: _double(v) for n, v in rounded.items()})))
    assert got.dtype == dtype
    assert (got.double() - truth).abs().max() <= 64 * torch.finfo(dtype).eps * truth.abs().max()


@pytest.mark.parametrize("op, case", marked(EVERY, pytest.mark.full, lambda op, case: op.name != "patch_embed"))
def test_gradients_share_no_memory(op, case):
    """Oracle: addresses. Gradients of leaves that overlap are scaled twice by what clips or unscales them in place."""
    with interpreting():
        arguments = op.inputs(case, torch.float32, "cpu")
        outputs = [t for t in leaves(op.run(**arguments)) if t.requires_grad]
        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
    grads = [t.grad for t in leaves(tuple(arguments.values())) if t.is_leaf and t.grad is not None]
    places = sorted((g.data_ptr(), g.data_ptr() + g.numel() * g.element_size()) for g in grads if g.numel())
    assert places
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))


def _double(value):
    if isinstance(value, torch.Tensor):
        return value.detach().double() if value.is_floating_point() else value
    return tuple(_double(v) for v in value) if isinstance(value, tuple) else value


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def test_attention_equals_equations_1_and_2():
    """Oracle: softmax written with exp and sums; group b mod G is indexed by hand."""
    q, k, v, bias = randn(4, 2, 3, 6), randn(4, 2, 5, 6), randn(4, 2, 5, 7), randn(2, 2, 3, 5)
    o, lse = attention(q, k, v, bias, scale=0.3, return_lse=True)
    for b in range(4):
        for h in range(2):
            scores = 0.3 * q[b, h] @ k[b, h].T + bias[b % 2, h]
            weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
            assert close64(o[b, h], weights @ v[b, h])
            assert close64(attention(q, k, v, bias, scale=0.3)[b, h], weights @ v[b, h])
            assert (lse[b, h] - scores.exp().sum(-1).log()).abs().max() < 4 * torch.finfo(torch.float32).eps * 4


def test_attention_without_values_does_not_call_sdpa(monkeypatch):
    """Oracle: shapes; cuDNN's attention returns None for an empty batch (torch 2.11)."""
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *_, **__: None)
    for sizes in ((0, 2, 3, 4), (1, 2, 0, 4)):
        q, k, v = (torch.ones(sizes, requires_grad=True) for _ in "qkv")
        o = attention(q, k, v)
        assert o.shape == sizes and torch.autograd.grad(o.sum(), q)[0].shape == sizes


def test_attention_default_scale_is_inverse_square_root_of_head_dim():
    """Oracle: the same call with an explicit scale."""
    q, k, v = randn(1, 1, 4, 9), randn(1, 1, 4, 9), randn(1, 1, 4, 9)
    assert torch.equal(attention(q, k, v), attention(q, k, v, scale=1 / 3))


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("kind", ["bool", "float", "lens"])
def test_fully_masked_rows_give_zero_and_no_gradient(kind, return_lse):
    """Oracle: the definition; the results of the other image do not change."""
    q, k, v = (randn(2, 1, 3, 4).requires_grad_() for _ in range(3))
    keep = torch.tensor([False, True])[:, None, None, None].expand(2, 1, 3, 3)
    mask = {"bool": keep, "float": torch.zeros(2, 1, 3, 3).masked_fill(~keep, -math.inf), "lens": None}[kind]
    lens = torch.tensor([0, 3]) if kind == "lens" else None
    o = attention(q, k, v, mask, kv_lens=lens, return_lse=return_lse)
    o = o[0] if return_lse else o
    o.sum().backward()
    assert (o[0] == 0).all() and close64(o[1].detach(), attention(q, k, v)[1].detach())
    for t in (q, k, v):
        assert (t.grad[0] == 0).all() and t.grad.isfinite().all()


@pytest.mark.parametrize("size", [(3, 5), (200, 60)])  # the second is stored as one bias
def test_biases_of_rows_and_columns_equal_their_sum(size):
    """Oracle: the bias of every key, written out."""
    (h, w), B, H, N = size, 2, 2, 4
    q, k, v = (randn(B, H, n, 8) for n in (N, h * w, h * w))
    row, column = randn(B, H, N, h), randn(B, H, N, w)
    bias = torch.stack([row[..., n // w] + column[..., n % w] for n in range(h * w)], -1)
    wanted = attention(q, k, v, bias)
    torch.testing.assert_close(attention(q, k, v, axis_bias=(row, column)), wanted)
    o, lse = attention(q, k, v, axis_bias=(row, column), return_lse=True)
    torch.testing.assert_close(o, wanted)
    torch.testing.assert_close(lse, attention(q, k, v, bias, return_lse=True)[1])


def test_kv_lens_equals_cutting_the_keys():
    """Oracle: each image by itself, with its own keys."""
    q, k, v = randn(3, 2, 4, 5), randn(3, 2, 6, 5), randn(3, 2, 6, 5)
    o = attention(q, k, v, kv_lens=torch.tensor([6, 1, 4]))
    for b, n in enumerate((6, 1, 4)):
        assert close64(o[b], attention(q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n])[0])


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("sizes", [(4, 4), (3, 5), (5, 3), (1, 4)])
def test_causal_queries_see_the_keys_up_to_their_own(sizes, return_lse):
    """Oracle: each query alone, with the first m + Nk − Nq + 1 keys; the last one sees all, the first may see none."""
    Nq, Nk = sizes
    q, k, v = randn(2, 2, Nq, 4), randn(2, 2, Nk, 4), randn(2, 2, Nk, 3)
    bias = randn(1, 2, Nq, Nk)
    lens = torch.tensor([Nk, 2])
    for more in ({}, dict(bias=bias), dict(kv_lens=lens)):
        found = attention(q, k, v, causal=True, return_lse=return_lse, **more)
        o, lse = found if return_lse else (found, None)
        assert o.shape == (2, 2, Nq, 3)
        for b, m in itertools.product(range(2), range(Nq)):
            seen = max(m + Nk - Nq + 1, 0)
            seen = min(seen, int(lens[b])) if "kv_lens" in more else seen
            part = bias[:, :, m : m + 1, :seen] if "bias" in more else None
            cut = q[b : b + 1, :, m : m + 1], k[b : b + 1, :, :seen], v[b : b + 1, :, :seen], part
            want, want_lse = attention(*cut, return_lse=True)
            torch.testing.assert_close(o[b, :, m], want[0, :, 0])
            assert seen or (o[b, :, m] == 0).all()
            if lse is not None:
                torch.testing.assert_close(lse[b, :, m], want_lse[0, :, 0])


def test_attention_qkv_splits_as_three_separate_projections():
    """Oracle: q, k, v cut from the packed tensor by index, head by head."""
    qkv = randn(2, 5, 3 * 2 * 4)
    o = attention_qkv(qkv, 2)
    for h in range(2):
        q, k, v = (qkv[:, :, i * 8 + h * 4 : i * 8 + h * 4 + 4] for i in range(3))
        assert close64(o[:, :, h * 4 : h * 4 + 4], ((q @ k.mT) / 2).softmax(-1) @ v)


@pytest.mark.parametrize(
    "pairs, first, step", [(True, [0, 2, 4, 6], 1), (False, [0, 1, 2, 3], 4), (4, [0, 1, 4, 5], 2)]
)
def test_rope_rotates_pairs_and_keeps_the_prefix(pairs, first, step):
    """Oracle: complex multiplication of channel pairs by exp(i·angle)."""
    from fastvit_triton.kernels.attention_qkv import rotate

    x, angle = randn(1, 2, 5, 8), randn(4, 4)
    first, table, want = torch.tensor(first), torch.empty(4, 8).double(), torch.empty(1, 2, 4, 8).double()
    table[:, first] = table[:, first + step] = angle
    got = rotate(x, (table.cos(), table.sin(), pairs), 1)
    turned = torch.complex(x[..., first], x[..., first + step])[:, :, 1:] * torch.exp(1j * angle)
    want[..., first], want[..., first + step] = turned.real, turned.imag
    assert torch.equal(got[:, :, :1], x[:, :, :1]) and close64(got[:, :, 1:], want)


def test_varlen_equals_each_image_alone():
    """Oracle: dense attention per image."""
    lengths, H, D = (3, 1, 6), 2, 4
    q, k, v = (randn(sum(lengths), H, D) for _ in range(3))
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    o = varlen_attention(q, k, v, ends, max(lengths))
    for a, b in itertools.pairwise(ends):
        alone = attention(*(t[a:b].transpose(0, 1)[None] for t in (q, k, v)))
        assert close64(o[a:b], alone[0].transpose(0, 1))


def test_layer_norm_equals_equations_1_and_2():
    """Oracle: mean and variance written out."""
    x, weight, bias = randn(3, 7) + 30, randn(7), randn(7)
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
    assert close64(layer_norm(x, weight, bias, 1e-6), weight * (x - mean) / (variance + 1e-6).sqrt() + bias)


def test_add_layer_norm_equals_equation_3():
    """Oracle: the sum written out, then F.layer_norm."""
    x, residual, layer_scale, keep = (
        randn(2, 3, 7),
        randn(2, 3, 7),
        randn(7),
        torch.tensor([0.0, 2.0], dtype=torch.float64),
    )
    total, normed = add_layer_norm(x, residual, None, None, 1e-6, layer_scale, keep)
    want = residual + keep[:, None, None] * layer_scale * x
    assert close64(total, want) and close64(normed, F.layer_norm(want, (7,), eps=1e-6))


def test_activations_equal_their_published_formulas():
    """Oracle: arXiv:1606.08415, section 2, and arXiv:1905.02244, section 5.2, written out."""
    x = torch.linspace(-8, 8, 101, dtype=torch.float64)
    formulas = {
        "gelu": x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
        "gelu_tanh": 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        "quick_gelu": x / (1 + torch.exp(-1.702 * x)),
        "relu": x.clamp(min=0),
        "silu": x / (1 + torch.exp(-x)),
        "hardswish": x * (x + 3).clamp(0, 6) / 6,
        "relu6": x.clamp(0, 6),
    }
    assert formulas.keys() == ACTIVATIONS.keys()
    for name, want in formulas.items():
        assert close64(ACTIVATIONS[name](x), want), name


def test_linear_equals_equations_1_to_4():
    """Oracle: each step written out."""
    x, weight, bias, g, b = randn(2, 3, 5), randn(4, 5), randn(4), randn(5), randn(5)
    layer_scale, keep, residual = randn(4), torch.tensor([0.0, 2.0], dtype=torch.float64), randn(2, 3, 4)
    branch = dict(layer_scale=layer_scale, sample_scale=keep, residual=residual)
    y, stats = linear(x, weight, bias, norm=(g, b, 1e-5), activation="relu", **branch, return_stats=True)
    normed = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt() * g + b
    want = keep[:, None, None] * layer_scale * (normed @ weight.T + bias).clamp(min=0) + residual
    assert close64(y, want)
    rows = want.flatten(0, 1)
    assert stats.shape == (6, 1, 2) and stats.dtype == torch.float32
    torch.testing.assert_close(
        stats[:, 0].double(), torch.stack((rows.sum(-1), rows.var(-1, correction=0) * 4), -1), rtol=1e-5, atol=1e-5
    )
    assert not row_stats(y.requires_grad_()).requires_grad


@pytest.mark.parametrize("activation", GATED)
def test_gated_activations_equal_equation_2(activation):
    """Oracle: arXiv:2002.05202, equations 5 and 6, written out; the gate is the first half of the weight."""
    x, gate, up, bg, bu = randn(2, 5), randn(4, 5), randn(4, 5), randn(4), randn(4)
    want = ACTIVATIONS[GATED[activation]](x @ gate.T + bg) * (x @ up.T + bu)
    assert close64(linear(x, torch.cat((gate, up)), torch.cat((bg, bu)), activation=activation), want)


def test_rms_norm_before_a_matmul_equals_equation_1():
    """Oracle: arXiv:1910.07467, equation 4, written out; without a weight, too."""
    x, weight, bias, g = randn(2, 3, 5), randn(4, 5), randn(4), randn(5)
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert close64(linear(x, weight, bias, norm=Norm(g, None, 1e-5, "rms_norm")), normed * g @ weight.T + bias)
    assert close64(linear(x, weight, norm=Norm(None, None, 1e-5, "rms_norm")), normed @ weight.T)
    folded = fold((weight,), (bias,), g, None, x.dtype)
    assert close64(linear(x, folded, norm=Norm(None, None, 1e-5, "rms_norm")), normed * g @ weight.T + bias)


def test_swiglu_packed_equals_pair():
    """Oracle: arXiv:2002.05202, equation 6; the packed weight holds the gate first."""
    x, gate, up, bg, bu = randn(2, 3, 5), randn(4, 5), randn(4, 5), randn(4), randn(4)
    want = F.silu(x @ gate.T + bg) * (x @ up.T + bu)
    assert close64(linear(x, (gate, up), (bg, bu), activation="swiglu"), want)
    assert close64(linear(x, torch.cat((gate, up)), torch.cat((bg, bu)), activation="swiglu"), want)
    assert close64(linear(x, (gate, up), activation="swiglu"), F.silu(x @ gate.T) * (x @ up.T))


def test_mlp_equals_two_linears_whatever_is_saved():
    """Oracle: two calls of `linear`; whatever is saved the same bits, forward and backward."""
    x, fc1, fc2 = randn(2, 3, 5).requires_grad_(), (randn(9, 5), randn(9)), (randn(5, 9), randn(5))
    norm = (randn(5), randn(5), 1e-6)
    want = linear(linear(x, *fc1, norm=norm, activation="gelu"), *fc2, residual=x)
    (truth,) = torch.autograd.grad(want.sum(), x)
    for save in ("pre", "input", "hidden"):
        got = mlp(x, fc1, fc2, norm=norm, residual=x, save=save)
        assert torch.equal(got, want) and torch.equal(torch.autograd.grad(got.sum(), x)[0], truth)


def test_a_norm_equals_the_plain_tuple():
    """Oracle: the same calls with (weight, bias, eps), bit by bit; another kind of norm raises."""
    x, fc1, fc2, qkv = randn(2, 3, 4), (randn(9, 4), randn(9)), (randn(4, 9), randn(4)), randn(2, 3, 12)
    parameters = randn(4), randn(4), 1e-5
    calls = {
        "norm": [partial(linear, x, *fc1), partial(mlp, x, fc1, fc2)],
        "q_norm": [partial(attention_qkv, qkv, 1)],
        "k_norm": [partial(attention_qkv, qkv, 1)],
    }
    for name, functions in calls.items():
        for function in functions:
            want = function(**{name: parameters})
            assert torch.equal(function(**{name: Norm(*parameters)}), want)
            assert torch.equal(function(**{name: (*parameters, "layer_norm")}), want)
            with pytest.raises(ValueError, match=f"kind of {name} is 'batch_norm'; use 'layer_norm'"):
                function(**{name: Norm(*parameters, "batch_norm")})
            with pytest.raises(ValueError, match=r"is an RMSNorm with a bias|kind of norm is 'rms_norm'"):
                function(**{name: Norm(*parameters, "rms_norm")})


def test_patch_embed_equals_a_linear_map_of_flattened_patches():
    """Oracle: patches cut by slicing, flattened as (row, column, channel); positions by hand."""
    image, weight, bias = randn(2, 3, 4, 6), randn(5, 3, 2, 2), randn(5)
    pos, prefix = randn(1, 7, 5), randn(1, 1, 5)
    matrix = weight.permute(2, 3, 1, 0).reshape(12, 5)
    cut = [image[:, :, r : r + 2, c : c + 2].permute(0, 2, 3, 1).flatten(1) for r in (0, 2) for c in (0, 2, 4)]
    tokens = torch.stack(cut, 1) @ matrix + bias
    assert close64(patch_embed(image, weight, bias), tokens)
    assert close64(
        patch_embed(image, weight, bias, pos, prefix), torch.cat((prefix.expand(2, -1, -1), tokens), 1) + pos
    )
    before = torch.cat((prefix.expand(2, -1, -1), tokens + pos[:, 1:]), 1)
    assert close64(patch_embed(image, weight, bias, pos[:, 1:], prefix), before)


def test_patch_embed_folds_uint8_normalisation():
    """Oracle: the image normalised before the call."""
    image, weight = torch.randint(0, 256, (1, 3, 4, 4), dtype=torch.uint8), randn(5, 3, 2, 2)
    mean, std = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.3, 0.4])
    normal = (image / 255.0 - mean[:, None, None]) / std[:, None, None]
    got = patch_embed(image, weight, mean=mean, std=std)
    # the normalisation is float32 on one side: a few roundings of values below 5
    assert (got - patch_embed(normal.double(), weight)).abs().max() < 64 * torch.finfo(torch.float32).eps * 5


DEPTHWISE = {  # B, H, W, C, K and options; K > H, one row, both parities of a side with stride 2
    "residual": ((2, 5, 7, 6, 3), dict(residual=True)),
    "one row": ((1, 1, 9, 4, 3), dict(activation="gelu")),
    "narrow": ((2, 3, 4, 5, 7), dict(activation="relu", residual=True)),
    "stride 2": ((2, 5, 6, 3, 3), dict(stride=2, activation="silu")),
    "side 5, stride 2": ((1, 6, 5, 2, 5), dict(stride=2)),
}


@pytest.mark.parametrize("name", DEPTHWISE)
def test_depthwise_equals_equations_1_and_2(name):
    """Oracle: shifted products of an x padded with zeros, and nn.Conv2d; a class token is skipped."""
    (B, H, W, C, K), options = DEPTHWISE[name]
    stride, activation = options.get("stride", 1), ACTIVATIONS.get(options.get("activation"), lambda x: x)
    tokens, conv = randn(B, 1 + H * W, C), torch.nn.Conv2d(C, C, K, stride, K // 2, groups=C).double()
    x, weight, bias = tokens[:, 1:].unflatten(1, (H, W)), conv.weight.detach(), conv.bias.detach()
    y, without = depthwise(x, weight, bias, **options), depthwise(x, weight, **options)
    padded = F.pad(x, (0, 0, *[K // 2] * 4))
    shifted = [(u, v, padded[:, u : u + H : stride, v : v + W : stride]) for u in range(K) for v in range(K)]
    pre = sum(weight[:, 0, u, v] * part for u, v, part in shifted)
    kept = x if options.get("residual") else 0.0
    assert y.shape == (B, -(-H // stride), -(-W // stride), C) and y.is_contiguous()
    assert close64(y, activation(pre + bias) + kept) and close64(without, activation(pre) + kept)
    assert close64(y, activation(conv(x.permute(0, 3, 1, 2))).permute(0, 2, 3, 1).detach() + kept)


def test_depthwise_equals_the_modules_of_other_packages():
    """Oracle: timm's PosConv of Twins and CPVT, and the convolutions in the MLPs of SegFormer and PVT v2."""
    from timm.models.twins import PosConv
    from transformers.models.pvt_v2.modeling_pvt_v2 import PvtV2DepthWiseConv
    from transformers.models.segformer import modeling_segformer as segformer

    x, (H, W) = randn(2, 15, 6), (3, 5)
    grid = x.unflatten(1, (H, W))
    for stride in (1, 2):
        module = PosConv(6, 6, stride).double()
        got = depthwise(grid, module.proj[0].weight, module.proj[0].bias, stride=stride, residual=stride == 1)
        assert close64(got.flatten(1, 2), module(x, (H, W)))
    name = "SegformerDepthWiseConv" if hasattr(segformer, "SegformerDepthWiseConv") else "SegformerDWConv"
    for module in (getattr(segformer, name)(6).double(), PvtV2DepthWiseConv(None, 6).double()):
        got = depthwise(grid, module.dwconv.weight, module.dwconv.bias)
        assert close64(got.flatten(1, 2), module(x, H, W))


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels last"])
def test_batch_norm_act_equals_equations_1_and_2(order):
    """Oracle: the equations written out, and nn.BatchNorm2d in evaluation."""
    x, residual = (randn(2, 5, 3, 4).contiguous(memory_format=order) for _ in range(2))
    norm = torch.nn.BatchNorm2d(5, eps=1e-3).double().eval()
    for t in (norm.running_mean, norm.weight.detach(), norm.bias.detach()):
        t.copy_(randn(5))
    norm.running_var.copy_(randn(5).exp())
    vectors = norm.running_mean, norm.running_var, norm.weight.detach(), norm.bias.detach()
    mean, variance, weight, bias = (t[:, None, None] for t in vectors)
    pre = weight * (x - mean) / (variance + 1e-3).sqrt() + bias + residual
    y = batch_norm_act(x, *vectors, 1e-3, activation="silu", residual=residual)
    assert y.is_contiguous(memory_format=order)
    assert close64(y, pre * torch.sigmoid(pre)) and close64(y, F.silu(norm(x) + residual).detach())
    assert close64(batch_norm_act(x, *vectors, 1e-3), norm(x).detach())
    strided = norm.running_var.repeat_interleave(2)[::2]  # whose strides PyTorch's backward pass ignores
    leaf = x.clone().requires_grad_()
    grads = [
        torch.autograd.grad(batch_norm_act(leaf, vectors[0], v, None, None, 1e-3).sum(), leaf)[0]
        for v in (strided, norm.running_var)
    ]
    assert torch.equal(*grads)
    bare = (x - mean) / (variance + 1e-3).sqrt()
    assert close64(batch_norm_act(x, *vectors[:2], None, None, 1e-3, activation="relu"), bare.clamp(min=0))


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: attention(randn(1, 2, 3, 4), randn(1, 2, 3, 5), randn(1, 2, 3, 4)), "axis D of k must be 4, got 5"),
        (lambda: attention(randn(1, 2, 3, 4), randn(1, 2, 6, 4), randn(1, 2, 5, 4)), "axis Nk of v must be 6, got 5"),
        (lambda: attention(randn(2, 3, 4), randn(2, 3, 4), randn(2, 3, 4)), r"q must have axes \[B, H, Nq, D\]"),
        (lambda: attention(*[randn(1, 2, 3, 4)] * 3, bias=randn(3, 3)), r"bias must have axes \[G, H, Nq, Nk\]"),
        (lambda: attention(*[randn(1, 2, 3, 4)] * 3, bias=randn(1, 2, 3, 2)), "axis Nk of bias must be 3, got 2"),
        (lambda: attention(*[randn(1, 2, 3, 4)] * 3, kv_lens=torch.ones(2)), "axis B of kv_lens must be 1, got 2"),
        (
            lambda: attention(*[randn(1, 2, 6, 4)] * 3, causal=True, axis_bias=(randn(1, 2, 6, 2), randn(1, 2, 6, 3))),
            "causal is True, and axis_bias is given",
        ),
        (
            lambda: attention(*[randn(1, 2, 6, 4)] * 3, axis_bias=(randn(1, 2, 6, 2), randn(1, 2, 6, 2))),
            "axis_bias has 2 rows and 2 columns, and k has 6 keys",
        ),
        (
            lambda: attention(*[randn(1, 2, 6, 4)] * 3, axis_bias=(randn(1, 1, 6, 2), randn(1, 2, 6, 3))),
            "axis H of the row of axis_bias must be 2, got 1",
        ),
        (
            lambda: attention(
                *[randn(1, 2, 6, 4)] * 3, randn(1, 1, 1, 6), axis_bias=(randn(1, 2, 6, 2), randn(1, 2, 6, 3))
            ),
            "axis_bias is given with bias or kv_lens",
        ),
        (lambda: attention_qkv(randn(1, 2, 10), 2), "multiple of 3·num_heads = 6, got 10"),
        (lambda: attention_qkv(randn(2, 12), 2, varlen=(torch.tensor([0, 2]), 1)), "max_seqlen must be at least 2"),
        (lambda: attention_qkv(randn(2, 12), 2, varlen=(torch.tensor([0, 3]), 3)), "end with at most T = 2, got 3"),
        (
            lambda: attention_qkv(randn(2, 12), 2, varlen=(torch.tensor([0, 2]), 2), return_lse=True),
            "return_lse are not supported with varlen",
        ),
        (lambda: attention_qkv(randn(1, 2, 12), 2, varlen=(torch.tensor([0, 2]), 2)), "qkv must have axes"),
        (
            lambda: attention_qkv(randn(1, 4, 12), 2, rope=(*[randn(4, 2)] * 2, True), prefix_tokens=1),
            "axis N - prefix_tokens of cos must be 3, got 4",
        ),
        (lambda: attention_qkv(randn(1, 4, 12), 2, rope=(randn(4, 2), randn(2, 4, 2), True)), "sin must have axes"),
        (lambda: varlen_attention(*[randn(3, 2, 4)] * 2, randn(4, 2, 4), torch.zeros(2), 1), "axis T of v must be 3"),
        (lambda: layer_norm(randn(2, 4), randn(3), None, 1e-6), "axis D of weight must be 4, got 3"),
        (lambda: add_layer_norm(randn(2, 4), randn(2, 5), None, None, 1e-6), r"residual must have shape \[2, 4\]"),
        (lambda: linear(randn(2, 4), randn(3, 5)), "axis K of weight must be 4, got 5"),
        (lambda: linear(randn(2, 4), randn(3, 4), randn(4)), "axis F of bias must be 3, got 4"),
        (lambda: linear(randn(2, 4), randn(3, 4), residual=randn(2, 4)), r"residual must have shape \[2, 3\]"),
        (lambda: linear(randn(2, 4), randn(3, 4), activation="tanh"), "activation is 'tanh'; use one of gelu"),
        (lambda: linear(randn(2, 4), (randn(3, 4), randn(3, 4))), "only activation='swiglu' or .* takes"),
        (lambda: mlp(randn(2, 4), (randn(6, 4), None), (randn(4, 5), None)), "axis F of fc2 weight must be 6, got 5"),
        (lambda: mlp(randn(2, 4), (randn(6, 4), None), (randn(4, 6), randn(1))), "axis D of fc2 bias must be 4, got 1"),
        (
            lambda: mlp(randn(2, 4), (randn(6, 4), None), (randn(4, 6), None), residual=randn(1, 4)),
            r"residual must have shape \[2, 4\], got \[1, 4\]",
        ),
        (
            lambda: linear(randn(2, 4), randn(3, 4), norm=(randn(3), None, 1e-6)),
            "axis K of norm weight must be 4, got 3",
        ),
        (lambda: linear(randn(2, 4), randn(3, 4), stats=randn(3, 1, 2)), "axis M of stats must be 2, got 3"),
        (lambda: patch_embed(randn(1, 3, 5, 4), randn(2, 3, 2, 2)), "axis H of image must be a multiple .* 2, got 5"),
        (lambda: patch_embed(randn(1, 1, 4, 4), randn(2, 3, 2, 2)), "axis C of image must be 3, got 1"),
        (lambda: patch_embed(randn(1, 3, 4, 4), randn(2, 3, 2, 2), pos=randn(1, 3, 2)), "axis N of pos must be 4"),
        (
            lambda: patch_embed(torch.zeros(1, 3, 4, 4, dtype=torch.uint8), randn(2, 3, 2, 2)),
            "needs mean and std",
        ),
        (lambda: batch_norm_act(randn(2, 6, 4), *[randn(6)] * 4, 1e-5), r"x must have axes \[B, C, H, W\], got shape"),
        (lambda: batch_norm_act(randn(2, 6, 4, 4), *[randn(4)] * 4, 1e-5), "axis C of mean must be 6, got 4"),
        (lambda: batch_norm_act(randn(2, 6, 4, 4), *[randn(6)] * 4, -1.0), "eps must be"),
        (
            lambda: batch_norm_act(randn(2, 6, 4, 4), *[randn(6)] * 4, 1e-5, activation="swiglu"),
            "swiglu', which has a gate",
        ),
        (
            lambda: batch_norm_act(randn(2, 6, 4, 4), *[randn(6)] * 4, 1e-5, residual=randn(2, 6, 4, 3)),
            "axis W of residual must be 4, got 3",
        ),
        (lambda: depthwise(randn(2, 6, 4), randn(4, 1, 3, 3)), r"x must have axes \[B, H, W, C\], got shape"),
        (lambda: depthwise(randn(2, 0, 3, 4), randn(4, 1, 3, 3)), "axis H of x must be at least 1, got 0"),
        (lambda: depthwise(randn(2, 2, 3, 4), randn(5, 1, 3, 3)), "axis C of weight must be 4, got 5"),
        (lambda: depthwise(randn(2, 2, 3, 4), randn(4, 1, 2, 2)), "square kernel with an odd side, got shape"),
        (lambda: depthwise(randn(2, 2, 3, 4), randn(4, 1, 3, 5)), "square kernel with an odd side, got shape"),
        (lambda: depthwise(randn(2, 2, 3, 4), randn(4, 1, 3, 3), randn(3)), "axis C of bias must be 4, got 3"),
        (lambda: depthwise(randn(2, 2, 3, 4), randn(4, 1, 3, 3), stride=3), "stride must be between 1 and 2, got 3"),
        (
            lambda: depthwise(randn(2, 2, 3, 4), randn(4, 1, 3, 3), stride=2, residual=True),
            "residual is True with a stride of 2",
        ),
        (lambda: depthwise(randn(2, 2, 3, 4), randn(4, 1, 3, 3), activation="swiglu"), "swiglu', which has a gate"),
        (lambda: depthwise(randn(2, 2, 3, 4), randn(4, 1, 3, 3), activation="tanh"), "use one of gelu"),
    ],
)
def test_wrong_shapes_raise_one_sentence(call, words):
    """Oracle: the sentence names the argument, the axis and both sizes, on one line."""
    with one_sentence(words):
        call()


PACKED = [torch.randn(6, 2, 8)] * 3


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(
    "error, call, words",
    [
        (TypeError, lambda: attention([1.0], *PACKED[1:]), "q must be a dense tensor, got list"),
        (TypeError, lambda: linear(randn(2, 4), "w"), "weight must be a tensor or a tuple of two, got str"),
        (
            TypeError,
            lambda: layer_norm(torch.ones(2, 4).int(), None, None, 1e-6),
            "x must be float32, .* got torch.int32",
        ),
        (
            TypeError,
            lambda: linear(torch.ones(2, 4), randn(3, 4)),
            "weight is torch.float64, .* torch.float32; give both",
        ),
        (TypeError, lambda: attention(*[randn(1, 2, 3, 4)] * 3, causal=1), "causal must be True or False, got int"),
        (TypeError, lambda: attention_qkv(randn(1, 2, 24), 2, causal=None), "causal must be True or False, got None"),
        (TypeError, lambda: attention(*[randn(1, 2, 3, 4)] * 3, scale="x"), "scale must be a number, got str"),
        (
            ValueError,
            lambda: layer_norm(randn(2, 4), None, None, math.nan),
            "eps must be finite, at least 0 .* got nan",
        ),
        (
            ValueError,
            lambda: layer_norm(torch.tensor(1.0), None, None, 1e-6),
            r"x must have axes \[..., D\], got shape",
        ),
        (ValueError, lambda: linear(randn(2, 4), randn(3, 4).to("meta")), "weight is on meta, .* on cpu; move it"),
        (ValueError, lambda: linear(randn(2, 8), randn(5, 8), activation="swiglu"), "axis F of weight must be even"),
        (
            ValueError,
            lambda: linear(randn(2, 8), randn(5, 8), norm=(None, None)),
            "norm must be a Norm or a tuple .* got 2 values",
        ),
        (
            ValueError,
            lambda: linear(randn(2, 8), randn(5, 8), stats=torch.ones(2, 0, 2)),
            "axis tiles of stats must be",
        ),
        (TypeError, lambda: linear(randn(2, 8), randn(5, 8), stats=randn(2, 1, 2)), "stats must be float32, got"),
        (
            ValueError,
            lambda: mlp(randn(2, 4), (randn(6, 4), None), (randn(4, 6), None), save="all"),
            "save is 'all'; give 'pre', 'input' or 'hidden'",
        ),
        (ValueError, lambda: attention_qkv(randn(1, 2, 24), 0), "num_heads must be at least 1, got 0"),
        (TypeError, lambda: attention_qkv(randn(1, 2, 24), 2.0), "num_heads must be an int, got float"),
        (
            ValueError,
            lambda: attention_qkv(randn(1, 2, 24), 1, prefix_tokens=-3),
            "prefix_tokens must be between 0 and 2",
        ),
        (
            ValueError,
            lambda: attention_qkv(randn(1, 2, 24), 1, q_norm=(randn(3), None, 1e-6)),
            "axis D of q_norm weight",
        ),
        (ValueError, lambda: attention_qkv(randn(1, 2, 21), 1, rope=(randn(2, 7),) * 2 + (True,)), "D = 7 .* be even"),
        (
            ValueError,
            lambda: attention_qkv(randn(1, 2, 24), 1, rope=(randn(2, 8),) * 2 + (6,)),
            "pairs .* divides D = 8",
        ),
        (
            TypeError,
            lambda: attention(*[randn(1, 2, 3, 4)] * 3, kv_lens=torch.ones(1)),
            "kv_lens must be int64, .* got torch.float32",
        ),
        (
            ValueError,
            lambda: varlen_attention(*PACKED, torch.tensor([0]), 6),
            "must be at least 2, for one image, got 1",
        ),
        (ValueError, lambda: varlen_attention(*PACKED, torch.tensor([1, 6]), 6), "cu_seqlens must begin with 0, got 1"),
        (ValueError, lambda: varlen_attention(*PACKED, torch.tensor([0, 5, 3]), 6), r"must not decrease, got \[5, 3\]"),
        (ValueError, lambda: varlen_attention(*PACKED, torch.tensor([0, 7]), 9), "must end with at most T = 6, got 7"),
        (
            ValueError,
            lambda: varlen_attention(*PACKED, torch.tensor([0, 2, 6]), 3),
            "max_seqlen must be at least 4, .* 3",
        ),
        (
            TypeError,
            lambda: varlen_attention(*PACKED, torch.ones(2), 6),
            "cu_seqlens must be int64, .* got torch.float32",
        ),
        (ValueError, lambda: patch_embed(randn(1, 3, 4, 4), randn(2, 3, 0, 0)), "axis P of weight must be at least 1"),
        (
            TypeError,
            lambda: patch_embed(
                torch.ones(1, 3, 4, 4, dtype=torch.int16), randn(2, 3, 2, 2), mean=randn(3), std=randn(3)
            ),
            "image must be uint8 or of the weight's dtype torch.float64, got torch.int16",
        ),
        (
            ValueError,
            lambda: patch_embed(randn(1, 3, 4, 4), randn(2, 3, 2, 2), mean=randn(3), std=randn(3)),
            "mean and std are for uint8 images, image is torch.float64",
        ),
    ],
)
def test_wrong_kinds_and_values_raise_one_sentence(backend, error, call, words):
    """Oracle: one line that names the argument and what was given, raised before either path runs."""
    with using_backend(backend), one_sentence(words, error):
        call()


def pairs(value, path=()):
    """(where, pair) of each pair in an argument: itself, or inside tuples."""
    if isinstance(value, (tuple, list)):
        if len(value) == 2:
            yield path, value
        for i, item in enumerate(value):
            yield from pairs(item, (*path, i))


def replaced(value, path, new):
    """An argument with the value at one place in its nested tuples replaced."""
    return new if not path else (*value[: path[0]], replaced(value[path[0]], path[1:], new), *value[path[0] + 1 :])


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_pairs_of_every_op_have_two_parts(backend):
    """Oracle: one line that begins with the argument's name, for three parts, one in a list, and none."""
    found = set()
    for op in OPS:
        for given in (op.inputs(case, torch.float32, "cpu") for case in op.cases.values()):
            places = [(name, *place) for name, value in given.items() for place in pairs(value)]
            for name, path, pair in places:
                for wrong in ((*pair, pair[0]), [pair[0]], ()) if (op.name, name, path) not in found else ():
                    with using_backend(backend), pytest.raises((TypeError, ValueError)) as error:
                        op.run(**given | {name: replaced(given[name], path, wrong)})
                    assert re.match(f"{name} (must|have|is) [^\n]+$", str(error.value)), (op.name, str(error.value))
                found.add((op.name, name, path))
    arguments = {(op, name) for op, name, _ in found}
    assert arguments >= {("window_attention", "window_size"), ("window_attention", "shift_size"), ("linear", "weight")}
    assert arguments >= {("mlp", "fc1"), ("mlp", "fc2"), ("attention", "axis_bias"), ("attention_qkv", "varlen")}


def test_values_are_checked_unless_the_call_is_traced(monkeypatch):
    """Oracle: by hand: values cannot be read on the meta device, of fake tensors, in a mode, a transform or a trace."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    lengths = torch.tensor([0, 3])
    assert can_read_values(lengths) and not can_read_values(lengths.to("meta"))
    with FakeTensorMode() as mode:
        assert not can_read_values(mode.from_tensor(lengths))
    with FlopCounterMode(display=False):
        assert not can_read_values(lengths)
    seen = []
    torch.func.vmap(lambda x: seen.append(can_read_values(lengths)) or x)(torch.ones(2))
    assert seen == [False]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not can_read_values(lengths)


def test_switch_and_reasons(monkeypatch, switch):
    """Oracle: the values of FASTVIT_TRITON_BACKEND, read at import, and a reason wherever no kernel runs."""
    assert backend() == os.environ.get("FASTVIT_TRITON_BACKEND", "auto") and "GPU" in why_not(
        torch.device("cpu"), torch.float32
    )
    monkeypatch.setenv("FASTVIT_TRITON_BACKEND", "torch")
    set_backend(None)
    assert "is torch" in why_not(torch.device("cuda"), torch.float32)
    monkeypatch.setenv("FASTVIT_TRITON_BACKEND", "triton")
    set_backend(None)
    with pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1 for the interpreter"):
        layer_norm(torch.zeros(2, 4), None, None, 1e-6)
    monkeypatch.setenv("FASTVIT_TRITON_BACKEND", "cuda")
    set_backend(None)
    with pytest.raises(ValueError, match="use one of auto, triton, onednn, torch"):
        backend()


PATHS = pytest.mark.parametrize("path", [lambda: using_backend("torch"), interpreting], ids=["reference", "kernels"])


@pytest.mark.few(3)
@PATHS
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NumPy, for NaN
@pytest.mark.parametrize("part", range(3), ids="qkv")
def test_nan_stays_in_its_packed_image(part, path):
    """Oracle: the same batch without NaN, bitwise, for outputs and gradients of all other images."""
    T, H, D, ends = 12, 2, 8, torch.tensor([0, 5, 5, 8, 11])  # four images, one empty, and a token of none
    clean = torch.randn(T, 3, H, D)
    others = [*range(5), *range(8, 12)]
    for bad in (6, 11):  # in the third image, and in no image

        def run(values):
            leaf = values.clone().requires_grad_()
            with path():
                o = varlen_attention(*leaf.unbind(1), ends, 5).flatten(1)
                packed = attention_qkv(leaf.flatten(1), H, varlen=(ends, 5))
                (grad,) = torch.autograd.grad((o + 2 * packed)[others].sum(), leaf)
            return torch.cat((o, packed, grad.flatten(1)), 1)

        dirty = clean.clone()
        dirty[bad, part, 1, 3] = float("nan")
        want, got = run(clean), run(dirty)
        assert torch.equal(got[others], want[others]) and want[others].isfinite().all()
        assert got[5:8].isnan().any() == (bad == 6)


SCALED = [op for op in OPS if "sample_scale" in inspect.signature(op.run).parameters]


@PATHS
@pytest.mark.parametrize("op", SCALED, ids=lambda op: op.name)
def test_a_sample_scale_that_requires_a_gradient_is_refused(op, path):
    """Oracle: one sentence; without gradients, or detached, the op runs."""
    arguments = op.inputs(next(iter(op.cases.values())), torch.float32, "cpu")
    scale = torch.ones(arguments["x"].shape[0], requires_grad=True)
    with path():
        with pytest.raises(ValueError, match=r"sample_scale requires a gradient, .*; give sample_scale\.detach\(\)"):
            op.run(**arguments | {"sample_scale": scale})
        op.run(**arguments | {"sample_scale": scale.detach()})
        with torch.no_grad():
            op.run(**arguments | {"sample_scale": scale})


@pytest.mark.parametrize(
    "name, options",
    [
        ("vit_digits_patch2_8", dict(embed_dim=8, num_heads=2)),
        ("swin_tiny_patch4_window7_224", dict(embed_dim=8, num_heads=(2, 2), depths=(2, 1), window_size=2)),
    ],
)
def test_second_derivatives_of_models(name, options, references):
    """Oracle: finite differences of the gradients of images and biases, float64, on PyTorch's unfused attention."""
    side, channels = (8, 1) if "digits" in name else (16, 3)
    options |= dict(img_size=side, num_classes=2)
    model = normal(create_model(name, **options | ({"depth": 1} if "digits" in name else {})).double().eval())
    model.requires_grad_(False)
    image = torch.randn(1, channels, side, side, dtype=torch.float64, requires_grad=True)
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(model, image, fast_mode=True)
