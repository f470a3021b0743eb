"""Measures models and ops against eager PyTorch, torch.compile and other libraries, in speed and in accuracy."""

from .verdict import Expected, expected

__all__ = ["Expected", "expected"]
