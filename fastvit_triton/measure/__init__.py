"""Measures models and ops against eager PyTorch, torch.compile and other libraries, in speed and in accuracy.

A model and the form of its input go in; times, errors and a verdict come out, and the user's file of measurements,
which `kernels.choose` reads. What runs is measured side by side, alternating, in one process.

Begin with `check`, which has the stages of the command, then `variants` and `tuning`.
"""

from .verdict import Expected, expected

__all__ = ["Expected", "expected"]
