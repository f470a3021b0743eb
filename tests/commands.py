"""The command line in this process, and in one of its own; other code in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import HANG

from fastvit_triton.cli import main
from fastvit_triton.train.outputs import LOG


def prints(capsys: pytest.CaptureFixture, *argv: object, code: int = 0) -> str:
    """What was printed until a command ended, which must be with this exit code."""
    assert main([str(word) for word in argv]) == code
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture, *argv: object, code: int = 2) -> str:
    """The single sentence on stderr of a command that must fail with exit code `code`."""
    capsys.readouterr()
    assert main([str(word) for word in argv]) == code
    (line,) = capsys.readouterr().err.splitlines(keepends=True)
    assert line.startswith("fastvit-triton: ") and line.endswith("\n")
    return line.rstrip("\n")


def start(*argv: str, variables: dict[str, str] | None = None, **options) -> subprocess.Popen:
    """Starts the command in a process of its own."""
    command = [sys.executable, "-m", "fastvit_triton.cli", *argv]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | (variables or {})
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **options
    )


def run_python(*words: object, cwd: Path | None = None, **variables: str) -> str:
    """What Python prints in a process of its own, which must succeed."""
    command, options = [sys.executable, *map(str, words)], dict(capture_output=True, text=True, timeout=HANG)
    done = subprocess.run(command, cwd=cwd, env=os.environ | variables, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def accuracy(out: Path) -> float:
    """The test accuracy in the last row of a run's log."""
    header, *_, last = (out / LOG).read_text().splitlines()
    return float(last.split(",")[header.split(",").index("test_accuracy")])
