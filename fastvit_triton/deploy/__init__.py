"""Ways to run a model apart from its code: CUDA graphs, packed graphs, warm-up, prediction and export.

A model goes in; a callable or a file comes out. `cuda_graph` is for inference, `step_graph` for a training step.

Begin with `cuda_graph` or `export`.
"""
