"""Measures models and ops against eager PyTorch, torch.compile and other libraries, in speed and in accuracy."""
