"""Shows training progress: a progress bar on a terminal, else one line per epoch."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from .loop import Progress


@contextmanager
def show_progress(
    console: Console, epochs: int, steps_per_epoch: int, finished_epochs: int = 0
) -> Iterator[Callable[[Progress], None]]:
    """Yields a function to call with each `Progress` of `fit`.

    Args:
        console: console to print to.
        epochs: number of epochs of the whole run.
        steps_per_epoch: batches per epoch.
        finished_epochs: number of epochs finished before the run was resumed.
    """
    if not console.is_terminal:
        yield _Lines(console, epochs, finished_epochs)
        return
    width = min(24, max(4, console.width - 76))  # the whole line fits in 80 columns
    columns = (BarColumn(width), TextColumn("{task.description}"), TextColumn("ETA"), TimeRemainingColumn(compact=True))
    with Bar(*columns, console=console) as bar:
        yield _Bar(bar, epochs, steps_per_epoch, finished_epochs)


class _Lines:
    """Prints one line after each epoch; the time left is estimated from the mean time of an epoch."""

    def __init__(self, console: Console, epochs: int, finished_epochs: int) -> None:
        self.console = console
        self.epochs = epochs
        self.finished = finished_epochs
        self.start = time.perf_counter()

    def __call__(self, progress: Progress) -> None:
        if progress.done:
            mean = (time.perf_counter() - self.start) / (progress.epoch - self.finished)
            minutes, seconds = divmod(round(mean * (self.epochs - progress.epoch)), 60)
            test = None if progress.test is None else progress.test.mark
            text = f"{_line(progress, self.epochs, test)}  ETA {minutes}:{seconds:02d}"
            self.console.out(text, highlight=False)


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


def _line(progress: Progress, epochs: int, test: float | None) -> str:
    accuracy = progress.accuracy.item()
    speed = progress.images / progress.seconds
    words = [f"epoch {progress.epoch}/{epochs}", f"loss {progress.loss.item():.3f}"]
    words += [f"train {100 * accuracy:.1f} %"] if accuracy == accuracy else []  # NaN for self-supervised models
    words += [f"test {100 * test:.1f} %"] if test is not None else []
    return "  ".join([*words, f"{speed:,.0f} images/s"])
