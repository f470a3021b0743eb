"""Shows training progress: how long a run will take, and a bar, or without a terminal lines."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from .loop import Progress

EVERY = 60.0  # seconds between lines within an epoch
MEASURED = 3  # steps after the first, whose mean time is that of a step
PATIENCE = 20.0  # seconds after which those so far have to do
SHORT = 60.0  # seconds of a run whose length is not worth a line


def with_estimate(steps: Iterable[Progress], total: int, say: Callable[[str], None]) -> Iterator[Progress]:
    """Yields each `Progress` of `fit`, and says once, after the first steps, how long the run will take."""
    start: float | None = time.perf_counter()
    times: list[float] = []
    for progress in steps:
        if start is not None and not progress.done:
            times.append(time.perf_counter())
            if len(times) > MEASURED or times[-1] - start > PATIENCE:
                step = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else times[0] - start
                start = None
                if (left := step * (total - len(times))) >= SHORT:
                    hours, minutes = divmod(round(left / 60), 60)
                    length = f"{hours} h {minutes} min" if hours else f"{minutes} min"
                    say(f"about {length} to go, at {step:.2g} s a step")
        yield progress


@contextmanager
def show_progress(
    console: Console, epochs: int, steps_per_epoch: int, finished_epochs: int = 0
) -> Iterator[Callable[[Progress], None]]:
    """Yields a function to call with each `Progress` of `fit`."""
    if not console.is_terminal:
        yield _Lines(console, epochs, steps_per_epoch)
        return
    width = min(24, max(4, console.width - 76))  # the whole line fits in 80 columns
    columns = (BarColumn(width), TextColumn("{task.description}"), TextColumn("ETA"), TimeRemainingColumn(compact=True))
    with Bar(*columns, console=console) as bar:
        yield _Bar(bar, epochs, steps_per_epoch, finished_epochs)


class _Lines:
    """Prints a line after each epoch, and in an epoch where none was printed for `EVERY` seconds."""

    def __init__(self, console: Console, epochs: int, steps: int) -> None:
        self.console = console
        self.epochs = epochs
        self.steps = steps
        self.start = self.shown = time.perf_counter()
        self.before: int | None = None  # steps before the first that is seen here

    def __call__(self, progress: Progress) -> None:
        completed = (progress.epoch - 1) * self.steps + (self.steps if progress.done else progress.step)
        if self.before is None:
            self.before = completed - 1
        now = time.perf_counter()
        if not progress.done and (now - self.shown < EVERY or progress.step == self.steps):
            return
        self.shown = now
        left = (now - self.start) / (completed - self.before) * (self.epochs * self.steps - completed)
        minutes, seconds = divmod(round(left), 60)
        hours, minutes = divmod(minutes, 60)
        ahead = f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
        test = None if progress.test is None else progress.test.mark
        words = _line(progress, self.epochs, test, None if progress.done else self.steps)
        self.console.out(f"{words}  ETA {ahead}", highlight=False)


class _Bar:
    """Updates the bar at most ten times a second, because reading the loss waits for the device."""

    def __init__(self, bar: Bar, epochs: int, steps: int, finished: int) -> None:
        self.bar = bar
        self.epochs = epochs
        self.steps = steps
        self.shown = 0.0
        self.test: float | None = None
        self.task = bar.add_task("", total=epochs * steps, completed=finished * steps)

    def __call__(self, progress: Progress) -> None:
        if progress.test is not None and progress.test.mark is not None:
            self.test = progress.test.mark
        elif not progress.done and time.perf_counter() - self.shown < 0.1:
            return
        self.shown = time.perf_counter()
        completed = (progress.epoch - 1) * self.steps + progress.step
        text = _line(progress, self.epochs, self.test).replace("  ", " ")
        self.bar.update(self.task, completed=completed, description=text)


def _line(progress: Progress, epochs: int, test: float | None, steps: int | None = None) -> str:
    accuracy = progress.accuracy.item()
    speed = progress.images / progress.seconds
    words = [f"epoch {progress.epoch}/{epochs}"] + ([f"step {progress.step}/{steps}"] if steps else [])
    words += [f"loss {progress.loss.item():.3f}"]
    words += [f"train {100 * accuracy:.1f} %"] if accuracy == accuracy else []  # NaN for self-supervised models
    words += [f"test {100 * test:.1f} %"] if test is not None else []
    return "  ".join([*words, f"{speed:,.0f} images/s"])
