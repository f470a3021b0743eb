"""The job of each process of a test in `tests/test_capture.py`: captured blocks inside DDP and FSDP2, by gloo.

Each process sees one half of a batch; gradients must be those of the original on the whole batch, in float64. A
repeated call reads no structure, though FSDP2 changes its own state in each call.
"""

import copy
import sys
from pathlib import Path
from unittest.mock import patch

import research
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from fastvit_triton import optimize, set_backend
from fastvit_triton.convert import captured


def main(folder: Path) -> None:
    """Compares the gradients, and writes a file for this rank."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    set_backend("torch")
    entry = research.MODELS["dino"]
    torch.manual_seed(3)
    (x,) = entry.inputs(4, 5)
    original = entry.build()
    original(x).square().mean().backward()
    want = {name: p.grad for name, p in original.named_parameters()}
    ran = []
    for engine in ("ddp", "fsdp2"):
        model = copy.deepcopy(entry.build())
        optimize(model, example=x[:2])
        if engine == "ddp":
            wrapped = DistributedDataParallel(model)
        else:
            for block in model.blocks:
                fully_shard(block)
            wrapped = fully_shard(model)
        for _ in range(2):  # the first call captures
            model.zero_grad()
            wrapped(x[2 * rank : 2 * rank + 2]).square().mean().backward()
        for name, parameter in model.named_parameters():
            grad = parameter.grad.full_tensor() if engine == "fsdp2" else parameter.grad
            assert_close(grad, want[name], msg=lambda text, name=name, engine=engine: f"{engine} {name}: {text}")
        with torch.no_grad():
            wrapped(x)  # captures it
            with patch.object(captured, "_capture", side_effect=AssertionError("it is captured again")):
                wrapped(x)
        ran.append([len(captured.captures_of(block)) or captured.why_none(block) for block in model.blocks])
    assert all(isinstance(number, int) for numbers in ran for number in numbers), ran
    (folder / f"{rank}").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
