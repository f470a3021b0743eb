"""Triton kernels with their PyTorch references. `OPS` lists the ops for tests, benchmarks and `doctor`."""

from . import (
    attention,
    attention_qkv,
    batch_norm,
    deformable,
    depthwise,
    fold,
    layer_norm,
    linear,
    mlp,
    patch_embed,
    rms_norm,
    window,
)

OPS = (
    attention.OP,
    attention.OP_VARLEN,
    layer_norm.OP,
    layer_norm.OP_ADD,
    rms_norm.OP,
    rms_norm.OP_ADD,
    fold.OP,
    linear.OP,
    mlp.OP,
    patch_embed.OP,
    depthwise.OP,
    attention_qkv.OP,
    window.OP,
    deformable.OP,
    batch_norm.OP,
)
