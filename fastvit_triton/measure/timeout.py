"""Timeouts, and error capture."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

AGAIN = 5.0  # seconds between interrupts, as Python discards exceptions raised in destructors


class TimedOut(BaseException):
    """Raised when a deadline passes; a BaseException, so that libraries do not catch it."""


class Deadline:
    """A point in time. As a context manager in the main thread it raises `TimedOut` at that time."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        self._outer: list[tuple | None] = []  # the timer before each entry; re-entrant

    @property
    def left(self) -> float:
        """Seconds left, at least 0."""
        return max(self.end - time.monotonic(), 0.0)

    @property
    def over(self) -> bool:
        """True if the deadline has passed."""
        return not self.left

    def sooner(self, seconds: float) -> "Deadline":
        """The earlier of this deadline and `seconds` from now."""
        return Deadline(min(self.left, seconds))

    def __enter__(self) -> "Deadline":
        before = None
        if hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread():
            remaining = signal.getitimer(signal.ITIMER_REAL)[0]
            before = signal.signal(signal.SIGALRM, _late), remaining, time.monotonic()
            _alarm(min(self.left, remaining or self.left))
        self._outer.append(before)
        return self

    def __exit__(self, *_: object) -> None:
        before = self._outer.pop()
        if before is not None:
            handler, remaining, since = before
            _stop(handler)
            if remaining:  # an enclosing deadline
                _alarm(remaining - (time.monotonic() - since))


def _alarm(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), AGAIN)


def _stop(handler: Any) -> None:
    """Stops the timer, even if it expires during this call; otherwise it would repeat forever."""
    while True:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
            return
        except TimedOut:
            continue


def _late(*_: object) -> None:
    raise TimedOut("the deadline has passed")


def one_line(error: BaseException) -> str:
    """An error's type and the first line of its message, at most 300 characters."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no text'}"[:300]


def is_late(row: dict[str, Any]) -> bool:
    """True if the "error" of a row is that of `TimedOut`."""
    return row.get("error", "").startswith(TimedOut.__name__)


@contextlib.contextmanager
def capturing(errors: dict[str, Any], name: str) -> Iterator[None]:
    """Context that catches an exception and stores it as one line in `errors[name]`."""
    try:
        yield
    except (Exception, TimedOut) as error:
        errors[name] = one_line(error)
