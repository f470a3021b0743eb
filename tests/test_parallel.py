"""Training on several processes: the batch's gradients and weights, checkpoints that change the number of processes."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import parallel_job
import pytest
import torch
from torch import nn

from fastvit_triton.train.parallel import World, find_blocks, join
from fastvit_triton.train.sharded import (
    checkpoints,
    consolidate,
    full_state,
    load_full_state,
    load_sharded,
    newest,
    save_sharded,
)

EPS = torch.finfo(torch.float32).eps


def launch(size: int, *command: str, timeout: int = 300) -> None:
    """Runs `python command` in `size` processes, with what torchrun would set."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    root = str(Path(__file__).parents[1])
    shared["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    processes, deadline = [], time.monotonic() + timeout
    with tempfile.TemporaryFile("w+") as log:
        try:
            for rank in range(size):
                mine = os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(subprocess.Popen([sys.executable, *command], env=mine, stdout=log, stderr=log))
            while (codes := {process.poll() for process in processes}) != {0}:
                if codes - {0, None} or time.monotonic() > deadline:
                    log.seek(0)
                    raise AssertionError(f"exit codes {codes}: {log.read()[-4000:]}")
                time.sleep(0.1)
        finally:
            for process in processes:
                process.kill()
                process.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("parallel")


@pytest.fixture(scope="module")
def two(folder) -> dict:
    """What two processes measured; they also leave checkpoints in the folder."""
    launch(2, str(Path(parallel_job.__file__)), str(folder))
    return json.loads((folder / "report-2.json").read_text())


@pytest.fixture(scope="module")
def four(folder, two) -> dict:
    """What four measured, who read the two's checkpoints."""
    launch(4, str(Path(parallel_job.__file__)), str(folder))
    return json.loads((folder / "report-4.json").read_text())


@pytest.mark.parametrize("size", ["two", "four"])
def test_a_batch_on_several_processes_is_the_batch_on_one(size, request):
    """Oracle: float64 on one process; gradients, and weights after three clipped steps, DDP and FSDP2.

    Ten images on four processes are uneven shares, three leave one without; blocks recomputed, optimised and compiled,
    and the kernels in the interpreter.
    """
    table = request.getfixturevalue(size)["errors"]
    assert len(table) >= (9 if size == "two" else 4)
    for case, found in table.items():
        assert sum(name.startswith("grad") for name in found) == len(found) / 2 > 10
        for name, (error, plain, norm) in found.items():
            assert error <= 2 * (plain + EPS * norm), (case, name)


def test_sharded_checkpoints_on_another_number_of_processes(folder, two, four):
    """Oracle: weights and optimiser of the two processes that wrote, number by number, on two, four and one."""
    for report in (two, four):
        found = report["checkpoints"]
        for engine in ("ddp", "fsdp"):
            assert found[f"{engine} read"] == ["step-000000007", 0, {"step": 7}]
            assert found[f"{engine} sharded"] and found[f"{engine} whole"]
    assert two["checkpoints"]["fsdp kept"] == ["step-000000006", "step-000000007"]
    assert two["checkpoints"]["fsdp own"] == [0, 1] and four["checkpoints"]["fsdp own"] == [None] * 4
    for engine in ("ddp", "fsdp"):
        for read in ("sharded", "whole"):
            model, optimizer = parallel_job.fresh(lambda model, world: model, World())
            if read == "sharded":
                extra, own = load_sharded(folder / engine / "step-000000007", model, optimizer, World())
                assert extra == {"step": 7} and own is None
            else:
                load_full_state(torch.load(folder / f"{engine}.pt"), model, optimizer)
            assert parallel_job.same(full_state(model, optimizer), folder / f"{engine}.pt")
            # what the optimiser itself makes of the state in its own format
            again, other = parallel_job.fresh(lambda model, world: model, World())
            state = torch.load(folder / f"{engine}.pt")
            again.load_state_dict(state["model"])
            other.load_state_dict(state["optimizer"])
            assert parallel_job.same(full_state(again, other), folder / f"{engine}.pt")
        whole = consolidate(folder / engine / "step-000000007")
        assert parallel_job.same(whole, folder / f"{engine}.pt")
    assert two["told"] == [0, 0] and four["told"] == [0] * 4


@pytest.mark.parametrize("damage", ["cut", "flip", "lost", "manifest"])
def test_the_newest_whole_checkpoint_is_taken(damage, folder, two, tmp_path):
    """One byte less, one bit changed, a part lost, or no list of parts: the one before is taken, and it is said why."""
    shutil.copytree(folder / "fsdp", tmp_path / "run")
    path = tmp_path / "run" / "step-000000007"
    part = sorted(path.glob("__1_*"))[0]
    content = part.read_bytes()
    if damage == "cut":
        part.write_bytes(content[:-1])
    elif damage == "flip":
        part.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    elif damage == "lost":
        part.unlink()
    else:
        (path / "manifest.json").write_text("{")
    found, damaged = newest(tmp_path / "run", World())
    assert found == tmp_path / "run" / "step-000000006" and list(damaged) == [path]
    assert ("manifest" if damage == "manifest" else part.name) in damaged[path]
    shutil.rmtree(found)
    assert newest(tmp_path / "run", World())[0] is None


def test_a_failed_write_leaves_the_checkpoints_before(tmp_path, monkeypatch):
    """A disk that is full, anywhere on the way: one sentence, and no trace."""
    model, optimizer = parallel_job.trained(lambda model, world: model, World())
    save_sharded(tmp_path, 1, model, optimizer, World())

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    for name in ("torch.distributed.checkpoint.save", "torch.save", "os.replace"):
        with monkeypatch.context() as patched:
            patched.setattr(name, full)
            with pytest.raises(OSError, match=r"^cannot write .*step-000000002: No space left on device; .* intact$"):
                save_sharded(tmp_path, 2, model, optimizer, World())
        assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"]
    assert newest(tmp_path, World()) == (tmp_path / "step-000000001", {})
    for step in (2, 3, 4):
        save_sharded(tmp_path, step, model, optimizer, World(), keep=3)
    assert [path.name[-1] for path in checkpoints(tmp_path)] == ["4", "3", "2"]


def test_torchrun_is_asked_for(monkeypatch):
    """One sentence without its environment, and for a process without a GPU of its own."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="started by torchrun"), join("cpu"):
        pass
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="process 3 of this machine has no GPU, it has 2; start 2"), join("cuda"):
        pass
    with pytest.raises(ValueError, match="device is 'tpu'"), join("tpu"):
        pass


def test_blocks_are_found():
    """Ours, and lists of lists as vit-pytorch has them; only the outermost list counts."""
    assert find_blocks(model := parallel_job.ours()) == list(model.blocks)
    pairs = nn.ModuleList(nn.ModuleList([nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))]) for _ in range(3))
    nested = nn.ModuleDict({"transformer": nn.ModuleDict({"layers": pairs}), "head": nn.Linear(2, 2)})
    assert find_blocks(nested) == [part for pair in pairs for part in pair]
    deep = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(1, 1)])})])})
    assert find_blocks(deep) == list(deep["blocks"])
    with pytest.raises(ValueError, match="no list of blocks"):
        find_blocks(nn.Linear(2, 2))
