"""What one does with a finished model: CUDA graphs, packed graphs, warm-up and export."""
