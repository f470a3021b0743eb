"""Backward pass of `mlp`: that of `linear` for both layers.

Math      h = act(pre₁) is recomputed in the pass that computes the gradient of pre₁     (3)
          Equations (7) to (10) of `linear_backward` for each layer.
"""

import torch

from .linear_backward import all_grads, input_grad, parameter_grads, product_grad, weight_grad_like
from .op import register


def _bwd(
    dy, x, w1, cast1, b1, w2, cast2, b2, pre, h, layer_scale, sample_scale, mean, rstd, norm_weight, norm_bias,
    activation, norm, residual_is_input, dtype, needs,
):  # fmt: skip
    """(dx, dw1, db1, dnorm [2, D], dw2, db2, dlayer_scale); `needs`: gradients of x, fc1, fc2."""
    need_x, need_1, need_2 = needs
    has_bias = b2 is not None and need_2
    dpre2, _, sums2 = product_grad(dy, dtype, x.shape[0], None, layer_scale, sample_scale, None, False, has_bias)
    dh = input_grad(dpre2, w2 if cast2 is None else cast2, layer_scale)
    dpre1, h_again, sums1 = product_grad(dh, dtype, 1, pre, None, None, activation, h is None and need_2)  # (3)
    h = h_again if h is None else h.flatten(0, -2)
    grads2 = parameter_grads(dpre2, h, w2, b2, layer_scale, sums2) if need_2 else (None,) * 3
    norm = (mean, rstd, norm_weight, norm_bias, norm) if norm else None
    dsum = dy if residual_is_input else None
    needs = (need_x, need_1, need_1)
    dx, dw1, db1, _, dnorm = all_grads(dpre1, x, w1, cast1, b1, None, sums1, norm, dsum, needs)
    return tuple(x.new_empty(0) if t is None else t.contiguous() for t in (dx, dw1, db1, dnorm, *grads2))


def _bwd_fake(
    dy, x, w1, cast1, b1, w2, cast2, b2, pre, h, layer_scale, sample_scale, mean, rstd, norm_weight, norm_bias,
    activation, norm, residual_is_input, dtype, needs,
):  # fmt: skip
    need_x, need_1, need_2 = needs
    norm = (norm_weight, norm_bias) if norm else None
    dw1, db1, _, dnorm = weight_grad_like(x, w1, b1, None, norm, (need_1, need_1), True, dtype)
    summed = sample_scale is not None or dy.dtype != dtype
    dw2, db2, dlayer_scale, _ = weight_grad_like(x, w2, b2, layer_scale, None, (need_2, need_2), summed, dtype)
    grads = torch.empty_like(x) if need_x else None, dw1, db1, dnorm, dw2, db2, dlayer_scale
    return tuple(x.new_empty(0) if t is None else t.contiguous() for t in grads)


bwd_op = register(
    "mlp_bwd",
    "(Tensor dy, Tensor x, Tensor w1, Tensor? cast1, Tensor? b1, Tensor w2, Tensor? cast2, Tensor? b2, Tensor pre, "
    "Tensor? h, Tensor? layer_scale, Tensor? sample_scale, Tensor mean, Tensor rstd, Tensor? norm_weight, "
    "Tensor? norm_bias, str activation, str? norm, bool residual_is_input, ScalarType dtype, bool[] needs) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _bwd,
    _bwd_fake,
)
