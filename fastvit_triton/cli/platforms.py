"""What to do next on a platform, so that the kernels run there; `doctor` prints it. The table is docs/platforms.md."""

import platform
from typing import NamedTuple


class Here(NamedTuple):
    """What `next_step` needs to know of a machine."""

    system: str  # this and the next two: of Python's `platform`
    release: str
    machine: str
    build: str  # what PyTorch was built for: "CUDA", "ROCm" or "" for neither
    gpu: bool  # PyTorch finds a GPU of CUDA or ROCm
    triton: bool  # Triton can be imported
    why: str | None  # why the kernels do not run; None if they do


def this_machine(triton: bool, why: str | None) -> Here:
    """The facts of this machine."""
    import torch

    build = "ROCm" if torch.version.hip else "CUDA" if torch.version.cuda else ""
    names = platform.system(), platform.release(), platform.machine()
    return Here(*names, build, torch.cuda.is_available(), triton, why)


def step_on_a_cpu() -> str:
    """What to do next on this machine's CPU: lower precision where it was measured to gain, else to measure."""
    import torch

    from ..convert import on_cpu
    from ..kernels import onednn
    from ..kernels.backend import backend

    if backend() == "torch":
        return "unset FASTVIT_TRITON_BACKEND, so that linear layers can run by oneDNN"
    gains = on_cpu.gains()
    limits = on_cpu.span(gains, "bf16")
    if limits is None or not on_cpu.pays(gains, "bf16") or onednn.why_not(torch.device("cpu"), torch.bfloat16):
        return "run `fastvit-triton check`, which measures on this CPU and says which to use"
    gain = f"{limits[0]:.2f} to {limits[1]:.2f} times as fast as in eager PyTorch and float32"
    calls = 'optimize(model), then freeze(model, "bf16") if bfloat16 is accurate enough'
    return f"{calls}: on such a CPU, models were {gain}"


def next_step(here: Here) -> str:
    """What to do next on a machine for a GPU, in one sentence."""
    wsl = here.system == "Linux" and "microsoft" in here.release.lower()
    jetson = here.system == "Linux" and "tegra" in here.release.lower()
    if here.gpu and here.why is None:
        return "run `fastvit-triton check`, which tests the kernels on this GPU, tunes a model and compares it"
    if here.gpu and not here.triton and here.system == "Windows":
        return "install triton-windows in the release for this PyTorch, or use WSL2; neither was tried yet"
    if here.gpu and not here.triton:
        return "install triton in the release for this PyTorch"
    if here.gpu:
        return f"nothing, PyTorch's operators run, as {here.why}"
    if here.system == "Darwin":
        return "nothing, PyTorch's operators run on a Mac, as Triton has no release for it"
    if jetson and not here.build:
        return "install NVIDIA's build of PyTorch for this JetPack"
    if not here.build:
        also = ", or work in WSL2" if here.system == "Windows" else ""
        return f"on a machine with a GPU, install the build of PyTorch for CUDA or ROCm{also}; this one has neither"
    if wsl:
        return "install NVIDIA's driver in Windows, not in WSL2; `nvidia-smi` in WSL2 then lists the GPU"
    tool = "rocminfo" if here.build == "ROCm" else "nvidia-smi"
    return f"run `{tool}`: PyTorch was built for {here.build} and finds no GPU, so its driver may not work"
