"""Tests of training on several processes: gradients, weights, checkpoints, resumption. Oracle: one process."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import parallel_job
import pytest
import torch
from budget import allowed
from commands import prints, refused
from patience import HANG, PATIENCE
from safetensors.torch import load_file
from torch import nn

from fastvit_triton.train.checkpoint import STATE, load_state
from fastvit_triton.train.distributed import World, checkpoint, process_group
from fastvit_triton.train.distributed.engine import parallelize
from fastvit_triton.train.distributed.parallel import find_blocks
from fastvit_triton.train.step import Step

EPS = torch.finfo(torch.float32).eps


def launch(size: int, *command: str) -> None:
    """Runs `python command` in `size` processes, with the environment of torchrun."""
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # on a free port
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "OMP_NUM_THREADS": "1"}
    root = str(Path(__file__).parents[1])
    shared["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    processes, deadline = [], time.monotonic() + HANG
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
    """Results of two processes, which also leave checkpoints in the folder."""
    launch(2, str(Path(parallel_job.__file__)), str(folder))
    return json.loads((folder / "report-2.json").read_text())


@pytest.fixture(scope="module")
def four(folder, two) -> dict:
    """Results of four processes, which read the checkpoints of the two."""
    launch(4, str(Path(parallel_job.__file__)), str(folder))
    return json.loads((folder / "report-4.json").read_text())


@pytest.fixture(params=["two", "four"])
def report(request) -> dict:
    """Results of two or of four processes."""
    return request.getfixturevalue(request.param)


def rank(number: int, port: int, file: Path) -> None:
    """One of two processes: DDP and FSDP2, each compared with one process."""
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ |= shared | {"RANK": str(number), "LOCAL_RANK": str(number)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    warnings.simplefilter("ignore")
    with process_group("cpu") as world:
        every = parallel_job.cases(world)
        found = parallel_job.compare({name: every[name] for name in ("ddp", "fsdp")}, world)
        if world.is_main:
            file.write_text(json.dumps(found))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forked processes need no imports")
def test_forked_processes_equal_one(tmp_path):
    """Oracle: as below, for a case of each engine."""
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    arguments = store.port, tmp_path / "errors.json"
    torch.multiprocessing.start_processes(rank, arguments, nprocs=2, start_method="fork")
    compare_with_one(json.loads(arguments[1].read_text()))


@pytest.mark.full
def test_gradients_and_weights_equal_one_process(report):
    """Oracle: float64 on one process; gradients, and weights after three clipped steps, with DDP and FSDP2.

    Ten images on four processes make uneven shares, three leave one process without an image; also with recomputed
    and optimised blocks, and with the kernels in the interpreter.
    """
    assert len(report["errors"]) == (10 if len(report["broadcast"]) == 2 else 5)
    compare_with_one(report["errors"])


@pytest.mark.full
@pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++")), reason="Inductor needs a C++ compiler")
def test_gradients_and_weights_of_compiled_models_equal_one_process(folder):
    """Oracle: as above; blocks compiled within FSDP2, and a whole model within DDP."""
    launch(2, str(Path(parallel_job.__file__)), str(folder), "compiled")
    table = json.loads((folder / "report-compiled.json").read_text())["errors"]
    assert len(table) == 2
    compare_with_one(table)


def compare_with_one(table: dict) -> None:
    """Asserts that every error is at most twice that of one process, and a rounding."""
    for case, found in table.items():
        assert sum(name.startswith("grad") for name in found) == len(found) / 2 > 10
        dtype = torch.bfloat16 if "bfloat16" in case else torch.float32
        for name, (error, plain, norm) in found.items():
            assert error <= allowed(plain, norm, dtype), (case, name)


@pytest.mark.full
def test_sharded_checkpoints_on_another_number_of_processes(folder, two, report):
    """Oracle: weights and optimiser of the two writing processes, number by number, on two, four and one."""
    found, size = report["checkpoints"], len(report["broadcast"])
    assert two["checkpoints"]["fsdp kept"] == ["step-000000006", "step-000000007"]
    assert found["fsdp own"] == ([0, 1] if size == 2 else [None] * 4) and report["broadcast"] == [0] * size
    for engine in ("ddp", "fsdp"):
        assert found[f"{engine} read"] == ["step-000000007", 0, {"step": 7}]
        assert found[f"{engine} sharded"] and found[f"{engine} whole"]
        for read in ("sharded", "whole"):
            model, optimizer = parallel_job.fresh(lambda model, world: model, World())
            if read == "sharded":
                extra, own = checkpoint.load_sharded(folder / engine / "step-000000007", model, optimizer, World())
                assert extra == {"step": 7} and own is None
            else:
                checkpoint.load_full_state(torch.load(folder / f"{engine}.pt"), model, optimizer)
            assert parallel_job.same(checkpoint.full_state(model, optimizer), folder / f"{engine}.pt")
            # the optimiser's own handling of the state in its own format
            again, other = parallel_job.fresh(lambda model, world: model, World())
            state = torch.load(folder / f"{engine}.pt")
            again.load_state_dict(state["model"])
            other.load_state_dict(state["optimizer"])
            assert parallel_job.same(checkpoint.full_state(again, other), folder / f"{engine}.pt")
        whole = checkpoint.consolidate(folder / engine / "step-000000007")
        assert parallel_job.same(whole, folder / f"{engine}.pt")


@pytest.mark.full
def test_runs_equal_one_process(folder, report, tmp_path):
    """Oracle: the run on one process in float64. Mixed images, accumulation, clipping, AdamW, EMA and the test score.

    Two processes train the whole run; four, and one, resume from a state that two saved within an epoch.
    """
    exact = parallel_job.run(tmp_path / "exact", World(), wrap=parallel_job.Double)
    plain = parallel_job.run(tmp_path / "plain", World())
    for engine in ("ddp", "fsdp"):
        shutil.copytree(folder / f"{engine}-part", tmp_path / engine)
        size = len(report["broadcast"])
        found = {size: torch.load(folder / f"{engine}-{size}.pt"), 1: parallel_job.run(tmp_path / engine, World())}
        for size, weights in found.items():
            assert near(weights, plain, exact), (engine, size)


def near(weights: dict, plain: dict, exact: dict) -> bool:
    """True if all weights and the test accuracy are as close to float64's as those of one process, up to rounding."""
    assert weights.keys() == plain.keys() and "accuracy" in plain
    norms = torch.zeros(3, dtype=torch.float64)
    for name in plain:
        want = exact[name if name == "accuracy" else f"model.{name}"].double()
        norms += torch.stack([(w.double() - want).norm() ** 2 for w in (weights[name], plain[name], 0 * want)])
    error, alone, size = norms.sqrt().tolist()
    return error <= allowed(alone, size, torch.float32)


@pytest.mark.full
def test_runs_on_image_files_equal_one_process(folder, two, tmp_path):
    """Oracle: as above, on an image folder of which each rank decodes its share and skips unreadable images."""
    exact = parallel_job.run(tmp_path / "exact", World(), wrap=parallel_job.Double, image_folder=folder / "images")
    plain = parallel_job.run(tmp_path / "plain", World(), image_folder=folder / "images")
    for engine in ("ddp", "fsdp"):
        assert near(torch.load(folder / f"{engine}-images.pt"), plain, exact), engine


@pytest.mark.full
def test_resumed_runs_are_bitwise_equal(two):
    """Oracle: an uninterrupted run on as many processes, bit by bit, with stochastic depth and dropout."""
    assert two["runs"]["ddp"] > 30 and two["runs"]["fsdp"] > 30


@pytest.mark.full
@pytest.mark.parametrize("damage", ["cut", "flip", "lost", "manifest"])
def test_the_newest_undamaged_checkpoint_is_loaded(damage, folder, two, tmp_path):
    """Oracle: the previous checkpoint and a report of the damage: a byte or file is missing, or a bit is flipped."""
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
    found, damaged = checkpoint.newest_sharded(tmp_path / "run", World())
    assert found == tmp_path / "run" / "step-000000006" and list(damaged) == [path]
    assert ("manifest" if damage == "manifest" else part.name) in damaged[path]
    shutil.rmtree(found)
    assert checkpoint.newest_sharded(tmp_path / "run", World())[0] is None


@pytest.mark.fast
def test_a_failed_write_leaves_the_checkpoints_before(tmp_path, monkeypatch):
    """Oracle: one sentence and no remaining files, if the disk is full at any point of the write."""
    model, optimizer = parallel_job.trained(lambda model, world: model, World())
    checkpoint.save_sharded(tmp_path, 1, model, optimizer, World())

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    for name in ("torch.distributed.checkpoint.save", "torch.save", "os.replace"):
        with monkeypatch.context() as patched:
            patched.setattr(name, full)
            with pytest.raises(OSError, match=r"^cannot write .*step-000000002: No space left on device; .* intact$"):
                checkpoint.save_sharded(tmp_path, 2, model, optimizer, World())
        assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"]
    assert checkpoint.newest_sharded(tmp_path, World()) == (tmp_path / "step-000000001", {})
    for step in (2, 3, 4):
        checkpoint.save_sharded(tmp_path, step, model, optimizer, World(), keep=3)
    assert [path.name[-1] for path in checkpoint.checkpoints(tmp_path)] == ["4", "3", "2"]


@pytest.mark.fast
def test_torchrun_is_required(monkeypatch):
    """Oracle: one sentence, without torchrun's environment and for a process without a GPU of its own."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="needs torchrun, which sets"), process_group("cpu"):
        pass
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with (
        pytest.raises(ValueError, match="local rank 3 has no GPU, because this machine has 2; start 2"),
        process_group("cuda"),
    ):
        pass
    with pytest.raises(ValueError, match="device is 'tpu'"), process_group("tpu"):
        pass


@pytest.mark.full
def test_a_lost_process_raises(monkeypatch):
    """Oracle: one sentence for the error of a collective after another process died; other errors pass unchanged."""
    names = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "localhost", "MASTER_PORT": 0}
    for name, value in names.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(OSError, match="the other processes were lost"), process_group("cpu"):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    assert not torch.distributed.is_initialized()
    with pytest.raises(RuntimeError, match="out of memory"), process_group("cpu"):
        raise RuntimeError("out of memory")
    assert not torch.distributed.is_initialized()


@pytest.mark.full
@pytest.mark.parametrize("agent", ["False", "True"])
def test_a_process_that_does_not_start_raises(agent, monkeypatch):
    """Oracle: one sentence for rank 1 without rank 0, and for rank 0 without rank 1."""
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    rank, port = (1, store.port) if agent == "True" else (0, 0)
    names = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    for name, value in (names | {"TORCHELASTIC_USE_AGENT_STORE": agent}).items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(OSError, match=r"another process did not answer for 0\.02 minutes"), process_group("cpu", 0.02):
        pass


@pytest.mark.fast
def test_lists_of_blocks_are_found():
    """Oracle: our list of blocks, and vit-pytorch's nested lists, of which only the outermost counts."""
    assert find_blocks(model := parallel_job.ours()) == list(model.blocks)
    pairs = nn.ModuleList(nn.ModuleList([nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))]) for _ in range(3))
    nested = nn.ModuleDict({"transformer": nn.ModuleDict({"layers": pairs}), "head": nn.Linear(2, 2)})
    assert find_blocks(nested) == [part for pair in pairs for part in pair]
    deep = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(1, 1)])})])})
    assert find_blocks(deep) == list(deep["blocks"])
    with pytest.raises(ValueError, match="no list of blocks"):
        find_blocks(nn.Linear(2, 2))


def train(*options: str, size: int = 2) -> tuple[int, str]:
    """Exit code and output of the command under torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(size), "--rdzv-backend", "c10d"]
    torchrun += ["--rdzv-endpoint", "localhost:0", "-m", "fastvit_triton.cli", "train", "--device", "cpu", *options]
    root = str(Path(__file__).parents[1])
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": root, "COLUMNS": "80"}
    done = subprocess.run([sys.executable, *torchrun], env=env, capture_output=True, text=True, timeout=HANG)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.full
def test_torchrun_trains_as_one_process_does(tmp_path, capsys):
    """Oracle: the same command without torchrun; for FSDP2 on the digits, one process resumes the state."""
    from fastvit_triton.cli import main

    log = {}
    for name in ("one", "two"):
        place = ["--out", str(tmp_path / name)]
        if name == "one":
            assert main(["train", "--device", "cpu", "--epochs", "1", *place]) == 0
        else:
            code, text = train("--parallel", "fsdp", "--epochs", "1", *place)
            assert code == 0 and "2 processes, fsdp" in text and text.count("epoch 1/1") == 1, text
        log[name] = [float(x) for x in (tmp_path / name / "log.csv").read_text().splitlines()[1].split(",")[:6]]
    files = {path.name for path in (tmp_path / "one").iterdir()}
    assert files == {path.name for path in (tmp_path / "two").iterdir()} >= {"model.safetensors", "predictions.png"}
    steps = 23  # each step may round differently
    for a, b in zip(log["one"], log["two"], strict=True):
        assert abs(a - b) <= steps * EPS * abs(a), log
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    capsys.readouterr()
    assert "after 1 epoch\n" in prints(capsys, "train", "--device", "cpu", "--resume", "--out", tmp_path / "two")


def interrupt(out: Path, number: int, *options: str) -> tuple[int, str]:
    """Sends a signal to a rank under torchrun, once there is a state: (exit code, output)."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1", "--rdzv-backend", "c10d"]
    torchrun += ["--rdzv-endpoint", "localhost:0", "-m", "fastvit_triton.cli", "train", "--device", "cpu"]
    torchrun += ["--parallel", "ddp", "--out", str(out), "--epochs", "6", "--save-every", "2", "--resume", "auto"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    with tempfile.TemporaryFile("w+") as log:
        agent = subprocess.Popen([sys.executable, *torchrun, *options], env=env, stdout=log, stderr=log)
        try:
            while not (out / STATE).exists():
                assert agent.poll() is None
                time.sleep(0.05)
            children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
            os.kill(int(children[-1]), number)
            code = agent.wait(timeout=HANG)
        finally:
            agent.kill()
        log.seek(0)
        return code, log.read()


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks in /proc")
def test_a_killed_rank_is_restarted(tmp_path):
    """Oracle: torchrun's restart resumes the run and ends it."""
    code, text = interrupt(tmp_path / "run", signal.SIGKILL)
    assert code == 0 and "after 6 epochs" in text, text
    assert len(load_state(tmp_path / "run" / STATE)["history"]) == 6


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks in /proc")
def test_a_stopped_rank_ends_the_run(tmp_path):
    """Oracle: the sentence after the timeout of half a minute, and a run that torchrun's restart resumes and ends."""
    minutes = f"{0.5 * PATIENCE:g}"
    code, text = interrupt(tmp_path / "run", signal.SIGSTOP, "--timeout", minutes)
    assert f"error: another process did not answer for {minutes} minutes; see --timeout" in text, text
    assert code == 0 and "after 6 epochs" in text, text


@pytest.mark.fast
def test_invalid_commands_raise(capsys, monkeypatch, tmp_path):
    """Oracle: one sentence: --parallel without torchrun, torchrun without --parallel, an unsupported dtype."""
    from fastvit_triton.cli import main

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert main(["train", "--parallel", "ddp", "--out", str(tmp_path)]) == 2
    assert "--parallel ddp needs several processes; start them with torchrun" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "torchrun started 2 processes; pass --parallel" in refused(capsys, "train", "--out", tmp_path)
    step = Step(amp=torch.float16)
    with pytest.raises(ValueError, match=r"amp is float16.*use bfloat16 with fsdp"):
        parallelize("fsdp", nn.Linear(1, 1), step, World(), False)
    with pytest.raises(ValueError, match="parallel is 'tp'; use 'ddp' or 'fsdp'"):
        parallelize("tp", nn.Linear(1, 1), step, World(), False)


def test_each_rank_draws_its_own_numbers():
    """Oracle: key and rank determine the numbers, and the global generator does not change."""
    before, drawn = torch.get_rng_state(), {}
    for rank, key in ((0, 1), (0, 2), (1, 1)):
        for count in (3, 4):
            with World(rank, 2).rank_rng(key):
                drawn.setdefault((rank, key), []).append(torch.rand(count)[:3])
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(*pair) for pair in drawn.values())
    assert len({tuple(pair[0].tolist()) for pair in drawn.values()}) == 3
    with World().rank_rng(1):  # unused with world size 1
        assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().set_state(before)))
