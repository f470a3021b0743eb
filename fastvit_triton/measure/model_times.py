"""Times a whole model, and its attention calls, against PyTorch."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..deploy.cuda_graph import can_capture, cuda_graph
from ..deploy.warm_up import run
from ..kernels import measured
from ..kernels.measured import Measured
from .model_parts import RecordedCall
from .timeout import Deadline, capturing
from .timing import Setup, add_times, repeated, samples_of, timing_columns
from .variants import compiled, with_backend

BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def time_attention(calls: list[RecordedCall], after: Measured, device: torch.device, deadline: Deadline) -> list[dict]:
    """Times distinct attention calls: our kernel, and each available backend of PyTorch's attention. Returns rows."""
    rows = []
    for call in (call for call in calls if call.op == "attention_fwd"):
        q, k, v, bias, kv_lens, cu_seqlens, _, scale, *rest = call.arguments
        columns = rest[0] if rest else 0
        causal = len(rest) > 1 and rest[1]
        own = causal and (bias is not None or q.shape[2] != k.shape[2])  # a mask that PyTorch's kernels do not have
        if kv_lens is not None or cu_seqlens is not None or columns or own:
            continue

        theirs = torch.no_grad()(partial(F.scaled_dot_product_attention, q, k, v, bias, is_causal=causal, scale=scale))
        steps = dict(ours=repeated(call, partial(measured.using, after)))
        steps |= {name: repeated(theirs, partial(sdpa_kernel, which)) for name, which in BACKENDS.items()}
        samples, errors = samples_of(steps, device, deadline, seconds=0.1, rounds=(3, 30))
        columns = {name: timing_columns(taken, None) for name, taken in samples.items()}
        rows.append(dict(sizes=[*q.shape, k.shape[2]], count=call.count, variants=columns, errors=errors))
    return rows


def time_model(
    models: tuple[nn.Module, nn.Module],
    inputs: tuple,
    named: dict,
    train: bool,
    tables: tuple[Measured, Measured],
    device: torch.device,
    deadline: Deadline,
) -> dict[str, dict]:
    """Times the whole model; returns rows by variant, with "speedup" over eager PyTorch."""

    def step(model: Any, table: Measured, backend: str) -> Setup:
        call = with_backend(backend, partial(run, model, inputs, named, train))
        return repeated(call, partial(measured.using, table))

    (ours, theirs), (before, after) = models, tables
    errors: dict[str, str] = {}
    steps = dict(eager=step(theirs, before, "torch"))
    steps |= dict(before=step(ours, before, "auto"), after=step(ours, after, "auto"))
    if not train and not named and all(isinstance(x, Tensor) and x.dim() and can_capture(x) for x in inputs):
        with capturing(errors, "after, CUDA graph"), deadline, measured.using(after):
            graphed = cuda_graph(ours, inputs, batch_sizes=(len(inputs[0]),), max_graphs=1)
            steps["after, CUDA graph"] = repeated(partial(graphed, *inputs))
    with capturing(errors, "torch.compile"):  # which compiles at the first call
        steps["torch.compile"] = step(compiled(theirs), before, "torch")
    samples, late = samples_of(steps, device, deadline, max(0.5 * deadline.left, 0.5), rounds=(3, 100), latency=True)
    rows: dict[str, dict] = {}
    add_times(rows, (samples, errors | late), "eager")
    return rows
