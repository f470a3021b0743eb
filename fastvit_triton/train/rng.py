"""State of PyTorch's global random generators, to save and restore."""

import torch


def get_rng_state() -> dict:
    """States of the CPU generator ("cpu", a uint8 tensor) and of all GPUs if CUDA is initialised ("cuda", a list)."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {"cpu": torch.get_rng_state(), "cuda": gpus}


def set_rng_state(states: dict) -> None:
    """Restores states from `get_rng_state`; GPU states are skipped if the number of GPUs differs."""
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])
