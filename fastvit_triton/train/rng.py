"""State of PyTorch's global random generators, to save and restore, and deterministic algorithms."""

import os

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


def use_deterministic_algorithms() -> None:
    """Makes sums independent of the number of CPU threads, by using one, and GPU operations deterministic.

    Call it before the first operation on a GPU. The number of processes still changes the order of sums.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
