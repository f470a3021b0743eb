"""Moments by which something must have ended, and what became of what did not work."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator

AGAIN = 5.0  # seconds between interrupts: where one falls into a destructor, Python drops it


class Late(BaseException):
    """The deadline came in the middle of something; no library that swallows errors swallows this one."""


class Deadline:
    """A moment. As a context it also interrupts, in the main thread, what has not ended by then.

    Args:
        seconds: from now.
    """

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        self._outer: list[tuple | None] = []  # what was set before each entry: a deadline may hold itself

    @property
    def left(self) -> float:
        """Seconds until then, never negative."""
        return max(self.end - time.monotonic(), 0.0)

    @property
    def over(self) -> bool:
        """Whether it has passed."""
        return not self.left

    def sooner(self, seconds: float) -> "Deadline":
        """The earlier of this one and so many seconds from now."""
        return Deadline(min(self.left, seconds))

    def __enter__(self) -> "Deadline":
        before = None
        if hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread():
            left = signal.getitimer(signal.ITIMER_REAL)[0]
            before = signal.signal(signal.SIGALRM, _late), left, time.monotonic()
            _alarm(min(self.left, left or self.left))
        self._outer.append(before)
        return self

    def __exit__(self, *_: object) -> None:
        before = self._outer.pop()
        if before is not None:
            handler, left, since = before
            _stop(handler)
            if left:  # somebody outside waits too
                _alarm(left - (time.monotonic() - since))


def _alarm(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), AGAIN)


def _stop(handler: object) -> None:
    """No alarm from now on, not even one that comes while this is done: left running, it would never end."""
    while True:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
            return
        except Late:
            continue


def _late(*_: object) -> None:
    raise Late("the time for this ended")


def told(error: BaseException) -> str:
    """An error as one short line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no text'}"[:300]


@contextlib.contextmanager
def noting(errors: dict[str, str], arm: str) -> Iterator[None]:
    """What an arm raises inside is its line in `errors` afterwards: most of it is other people's code."""
    try:
        yield
    except (Exception, Late) as error:
        errors[arm] = told(error)
