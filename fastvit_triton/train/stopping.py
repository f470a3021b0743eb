"""SIGTERM and SIGUSR1, by which schedulers announce the end of a job: a run saves at its next step, and ends."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from .distributed import World

if TYPE_CHECKING:
    from .loop import Progress

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))  # not on Windows
GRACE = 20  # seconds that a process of images outlives SIGTERM, which many schedulers send to all processes of a job
AGREEMENT = 10  # steps of an epoch after which several processes ask whether one was asked, which waits for the device


class Stopped(Exception):
    """A run ended because it was asked to, after it had saved its state; the message says where."""


class Request:
    """Whether this process was asked to end."""

    def __init__(self) -> None:
        self.name = ""  # of the signal; "" if there was none
        self.code = 0  # exit code that shells expect of a process that a signal ended, 128 + its number
        # True while a run trains, which asks at each step; else a signal raises KeyboardInterrupt at once
        self.deferred = False

    def at(self, progress: "Progress", world: World) -> bool:
        """True if this process was asked, of several processes any of them; all must call it, at the same steps."""
        if world.world_size == 1:
            return bool(self.name)
        due = progress.done or progress.step % AGREEMENT == 0
        return due and not world.all_reduce_min(not self.name)


@contextmanager
def listening() -> Iterator[Request]:
    """Context in which the signals are noted in the request that it yields; only in the main thread."""
    request, owner = Request(), os.getpid()
    if threading.current_thread() is not threading.main_thread():  # which alone may set handlers
        yield request
        return

    def note(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a process that was forked, and that ends with this one
            return
        request.name, request.code = signal.Signals(number).name, 128 + number
        if not request.deferred:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def outlive(worker: int) -> None:
    """Lets a worker of a DataLoader live for `GRACE` after SIGTERM, so that its run can take the next step."""
    if hasattr(signal, "SIGALRM"):  # whose default ends the process
        signal.signal(signal.SIGTERM, lambda *_: signal.alarm(GRACE))
