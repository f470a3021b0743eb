"""What one does with a finished model: CUDA graphs, packed graphs, warm-up, prediction and export.

A model goes in; a callable or a file comes out. Begin with `cuda_graph` or `export`.
"""
