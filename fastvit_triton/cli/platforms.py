"""What to do next on a platform, so that the kernels run there; `doctor` prints it. The table is docs/platforms.md."""

import platform
from typing import NamedTuple


class Here(NamedTuple):
    """What `next_step` needs to know of a machine.

    Attributes:
        system, release, machine: of Python's `platform`.
        build: what PyTorch was built for: "CUDA", "ROCm" or "" for neither.
        gpu: PyTorch finds a GPU of CUDA or ROCm.
        triton: Triton can be imported.
        why: why the kernels do not run; None if they do.
    """

    system: str
    release: str
    machine: str
    build: str
    gpu: bool
    triton: bool
    why: str | None


def this_machine(triton: bool, why: str | None) -> Here:
    """The facts of this machine."""
    import torch

    build = "ROCm" if torch.version.hip else "CUDA" if torch.version.cuda else ""
    names = platform.system(), platform.release(), platform.machine()
    return Here(*names, build, torch.cuda.is_available(), triton, why)


def next_step(here: Here) -> str:
    """What to do next on a machine, in one sentence."""
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
