"""Graphs that torch.compile captured, rewritten: PyTorch's calls become calls of the kernels' public functions.

An fx graph goes in and is changed in place; what was looked for and not fused is returned with reasons. Patterns go by
what operators compute, not by how they are spelled: `algebra` and `axes` follow formulas and axes.

Begin with `rewrite`, then `norm_patterns`, the shortest set of patterns.
"""
