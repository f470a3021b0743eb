"""Our attention by name in transformers, and a callback for its Trainer.

Importing this registers `attn_implementation="fastvit_triton"`.
"""

from ..host import need

need("transformers", "5.0")

from ...convert.readers.transformers.attention_interface import FLASH, NAME, register  # noqa: E402
from .trainer import Optimize  # noqa: E402

__all__ = ["FLASH", "NAME", "Optimize", "register"]

register()
