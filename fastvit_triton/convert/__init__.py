"""Models that are not ours: fused forwards for their modules, and a compile backend for their graphs."""
