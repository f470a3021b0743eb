"""Vision Transformers on fused Triton kernels: drop-in, differentiable, and plain PyTorch wherever there is no GPU.

Axes, the same letters everywhere:
    B   images in a batch               C   image channels
    N   tokens (Nq queries, Nk keys)    P   patch side, pixels
    D   channels of a token, or of a head where H stands beside it (Dv: of a value)
    H   attention heads                 F   hidden channels of an MLP
    G   groups of an attention bias     M   rows, B·N

Apple's FastViT is another architecture, and no model here carries that name.
"""

import importlib
import sys
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# Public name → where it lives. Loaded on first use: importing the package costs nothing and needs no Triton.
_PUBLIC = {
    "attention": "kernels.attention",
    "attention_qkv": "kernels.attention_qkv",
    "varlen_attention": "kernels.attention",
    "layer_norm": "kernels.layer_norm",
    "add_layer_norm": "kernels.layer_norm",
    "fold": "kernels.fold",
    "freeze": "layers.freeze",
    "linear": "kernels.linear",
    "mlp": "kernels.mlp",
    "optimize": "convert",
    "patch_embed": "kernels.patch_embed",
    "ViTConfig": "models.config",
    "create_model": "models",
    "list_models": "models",
    "load_model": "weights",
    "load_weights": "weights",
    "revert": "convert",
    "save_weights": "weights",
    "unfreeze": "layers.freeze",
}

__all__ = [
    "ViTConfig",
    "__version__",
    "add_layer_norm",
    "attention",
    "attention_qkv",
    "create_model",
    "fold",
    "freeze",
    "layer_norm",
    "linear",
    "list_models",
    "load_model",
    "load_weights",
    "mlp",
    "optimize",
    "patch_embed",
    "revert",
    "save_weights",
    "unfreeze",
    "varlen_attention",
]

if TYPE_CHECKING:
    from .convert import optimize, revert
    from .kernels.attention import attention, varlen_attention
    from .kernels.attention_qkv import attention_qkv
    from .kernels.fold import fold
    from .kernels.layer_norm import add_layer_norm, layer_norm
    from .kernels.linear import linear
    from .kernels.mlp import mlp
    from .kernels.patch_embed import patch_embed
    from .layers.freeze import freeze, unfreeze
    from .models import create_model, list_models
    from .models.config import ViTConfig
    from .weights import load_model, load_weights, save_weights


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
    setattr(sys.modules[__name__], name, value)
    return value


def __dir__() -> list[str]:
    return __all__
