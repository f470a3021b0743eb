"""Readers: what the modules of each library consist of; they register on import.

A reader takes a module and returns a `Body` or `MlpBody` of the engine, or a reason why its own forward must run. Types
whose forwards are more than one body have a fused forward instead; `two_branches` has that of most blocks.

Begin with `torch`, then `timm` or `transformers`.
"""

from . import ours, ours_maps, ours_tokens, timm, torch, torchvision, transformers, vit_pytorch  # noqa: F401
