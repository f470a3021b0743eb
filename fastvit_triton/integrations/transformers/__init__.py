"""Attention by name in transformers, a callback for its Trainer, and our classifiers as models of transformers.

Importing this registers `attn_implementation="fastvit_triton"`, and the models for the Auto classes.
"""

from ..host import need

need("transformers", "5.0")

from ...convert.readers.transformers.attention_interface import FLASH, NAME, register  # noqa: E402
from .classifier import FvtConfig, FvtForImageClassification, as_hf, register_classes  # noqa: E402
from .trainer import Optimize  # noqa: E402

__all__ = ["FLASH", "NAME", "FvtConfig", "FvtForImageClassification", "Optimize", "as_hf", "register"]

register()
register_classes()
