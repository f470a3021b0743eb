"""Launch parameters for an architecture that is not here, predicted by compiling for it."""

from concurrent.futures import ThreadPoolExecutor

import torch

from fastvit_triton.kernels.launch import overriding
from fastvit_triton.measure.candidates import Target
from fastvit_triton.measure.timeout import one_line
from fastvit_triton.measure.tuning import arguments_of, candidates_of

from .launch_recorder import Launch, compiled, record
from .sass import GPUS, read
from .static import bounds, violations


def predict_candidates(target: Target, arch: str) -> dict:
    """Compiles all candidates; the best has the smallest bound of the compile report among those without violations.

    The parameters in use are the best unless another bound is 5 % lower. The result is that of `time_candidates`, with
    "predicted_us" and "faults" in place of measured times.
    """
    op, arguments = arguments_of(target, torch.bfloat16, torch.device("cpu"))
    phase = "backward" if target.backward else "inference"
    name, configs = candidates_of(target, lambda: record(arch, op.run, **arguments))
    tried = []
    with ThreadPoolExecutor(2) as pool:
        for config in configs:
            with overriding({name: config}):
                launches = [a for a in record(arch, op.run, **arguments)[phase] if _uses(a, name)]
            try:
                kernels = [compiled(launch, arch) for launch in launches]
            except Exception as error:
                tried.append(dict(config=config, error=one_line(error)))
                continue
            binaries = list(pool.map(read, kernels))
            faults = [
                f
                for a, b, k in zip(launches, binaries, kernels, strict=True)
                for f in violations(a, b, arch, k.asm["ttir"])
            ]
            us = sum(bounds(a, b, GPUS[arch])["together"] for a, b in zip(launches, binaries, strict=True))
            tried.append(dict(config=config, predicted_us=round(us, 2), faults=faults))
    right = [t for t in tried if not t.get("faults", ["error"])]
    best = min(right, key=lambda t: t["predicted_us"], default=None)
    if right and tried[0] in right and best["predicted_us"] > 0.95 * tried[0]["predicted_us"]:
        best = tried[0]
    return dict(row=name, op=target.op, shape=target.shape, best=best and best["config"], tried=tried)


def _uses(launch: Launch, row: str) -> bool:
    """True if the row has the launch parameters of this launch's kernel."""
    file, kernel = row.split(".")[:2]
    if row.startswith("attention.bwd."):  # it decides between one kernel and two
        return launch.name in ("attention._bwd_kernel", "attention._bwd_dq_kernel", "attention._bwd_dkdv_kernel")
    if row.startswith("mlp.fwd."):
        return launch.name in ("mlp._fwd_kernel", "linear._fwd_kernel", "layer_norm._stats_kernel")
    return launch.name == f"{file}._{'bwd_weight' if kernel == 'bwd' else kernel}_kernel"
