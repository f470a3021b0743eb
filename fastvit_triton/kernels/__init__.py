"""Triton kernels with their PyTorch references: the products, attention and norms of a ViT with what lies between them.

Tensors go in and come out. A public function (`linear`, `attention`, `mlp`) checks its arguments, looks up a way in
`choose`, which decides for ops and blocks, and runs kernels or its reference. One file is one op: maths, public
function, reference, kernels, launchers, autograd, `Op`; `OPS` lists them for tests, benchmarks and `doctor`. Only
`launch` launches, and looks up launch parameters (`config`); `settings` holds what choices depend on; `tuned` holds
measured and predicted rows.

Begin with `rms_norm`, the shortest op, then read `linear` and `attention`.
"""

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
