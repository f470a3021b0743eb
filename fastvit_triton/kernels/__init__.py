"""What is computed. `OPS` is the list that tests, benchmarks and the doctor walk; an op is added by naming it here."""

from . import attention, fold, layer_norm, linear, mlp, patch_embed, rope

OPS = (
    attention.OP,
    attention.OP_VARLEN,
    layer_norm.OP,
    layer_norm.OP_ADD,
    fold.OP,
    linear.OP,
    mlp.OP,
    patch_embed.OP,
    rope.OP,
)
