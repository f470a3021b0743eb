"""Describes the machine and software of a measurement."""

import contextlib
import datetime
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
OTHERS = ("timm", "transformers", "torchvision", "vit-pytorch", "flash-attn", "xformers")
PACKAGES = ("fastvit_triton", "torch", "triton", *OTHERS)


def gpu_name() -> str:
    """Name of the GPU, or the processor's architecture if there is no GPU."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"


def device_answers(device: torch.device | str = "cuda") -> bool:
    """False if this process can no longer use the GPU, as after an illegal memory access; True without a GPU."""
    if not torch.cuda.is_available():
        return True
    try:
        return torch.ones(1, device=device).item() == 1
    except RuntimeError:
        return False


def busy_machine() -> str | None:
    """A note that other processes want more than half of the processors, in a clause; None if not, or if unknown."""
    if not hasattr(os, "getloadavg"):
        return None
    load, processors, threads = os.getloadavg()[0], os.cpu_count() or 1, torch.get_num_threads()
    if load - threads <= processors / 2:
        return None
    load_text = f"the machine was busy (load {load:.0f} on {processors} processors); measure again when it is idle"
    return load_text if threads == 1 else f"{load_text}, or with OMP_NUM_THREADS=1, which suffers less"


def provenance() -> dict:
    """GPU, driver, clocks, versions, commit, date, command."""
    spec = sys.modules["__main__"].__spec__  # set if the program was started with -m
    program = f"python -m {spec.name.removesuffix('.__main__')}" if spec else Path(sys.argv[0]).name
    facts: dict = dict(
        command=" ".join([program, *sys.argv[1:]]),
        date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        cpu=platform.processor() or platform.machine(),
        python=platform.python_version(),
        commit=_commit(),
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        threads=torch.get_num_threads(),
    )
    facts["packages"] = {name: release for name in PACKAGES if (release := installed(name))}
    return facts | driver()


def _commit() -> str | None:
    """Commit of the source tree, with suffix "-dirty" if files differ from it; None outside git."""
    if not (ROOT / ".git").exists():  # an installed package may be inside another repository
        return None
    commit = _output("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    return commit.strip() or None


def driver() -> dict:
    """Driver version, clocks (MHz), power limit (W) and temperature (°C) from nvidia-smi; empty without it."""
    fields = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"
    row = _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits").split("\n")[0]
    return dict(zip(fields.split(","), row.split(", "), strict=True)) if row.count(",") == fields.count(",") else {}


def _output(tool: str, *arguments: str) -> str:
    """Output of a program; "" if it is not installed, fails or takes more than 20 s."""
    if shutil.which(tool) is None:
        return ""
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=20)
        return done.stdout if done.returncode == 0 else ""
    return ""


def installed(package: str) -> str | None:
    """Version of a package; None if it is not installed."""
    with contextlib.suppress(PackageNotFoundError):
        return version(package)
    return None
