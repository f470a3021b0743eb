"""How fast a model is here beside eager PyTorch, torch.compile and installed peers, and whether its result is right."""
