"""Rewriting of graphs captured by torch.compile."""
