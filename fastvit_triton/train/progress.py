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
        yield _lines(console, epochs, steps_per_epoch)
        return
    width = min(24, max(4, console.width - 76))  # the whole line fits in 80 columns
    columns = (BarColumn(width), TextColumn("{task.description}"), TextColumn("ETA"), TimeRemainingColumn(compact=True))
    with Bar(*columns, console=console) as bar:
        yield _updates(bar, epochs, steps_per_epoch, finished_epochs)


def _lines(console: Console, epochs: int, steps: int) -> Callable[[Progress], None]:
    """Prints a line after each epoch, and in an epoch where none was printed for `EVERY` seconds."""
    start = shown = time.perf_counter()
    before: int | None = None  # steps before the first that is seen here

    def show(progress: Progress) -> None:
        nonlocal before, shown
        completed = (progress.epoch - 1) * steps + (steps if progress.done else progress.step)
        before = completed - 1 if before is None else before
        now = time.perf_counter()
        if not progress.done and (now - shown < EVERY or progress.step == steps):
            return
        shown = now
        minutes, seconds = divmod(round((now - start) / (completed - before) * (epochs * steps - completed)), 60)
        hours, minutes = divmod(minutes, 60)
        ahead = f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
        test = None if progress.test is None else progress.test.mark
        console.out(f"{_line(progress, epochs, test, None if progress.done else steps)}  ETA {ahead}", highlight=False)

    return show


def _updates(bar: Bar, epochs: int, steps: int, finished: int) -> Callable[[Progress], None]:
    """Updates the bar at most ten times a second, because reading the loss waits for the device."""
    task = bar.add_task("", total=epochs * steps, completed=finished * steps)
    shown = 0.0
    test: float | None = None

    def show(progress: Progress) -> None:
        nonlocal shown, test
        if progress.test is not None and progress.test.mark is not None:
            test = progress.test.mark
        elif not progress.done and time.perf_counter() - shown < 0.1:
            return
        shown = time.perf_counter()
        completed = (progress.epoch - 1) * steps + progress.step
        bar.update(task, completed=completed, description=_line(progress, epochs, test).replace("  ", " "))

    return show


def _line(progress: Progress, epochs: int, test: float | None, steps: int | None = None) -> str:
    accuracy = progress.accuracy.item()
    speed = progress.images / progress.seconds
    words = [f"epoch {progress.epoch}/{epochs}"] + ([f"step {progress.step}/{steps}"] if steps else [])
    words += [f"loss {progress.loss.item():.3f}"]
    words += [f"train {100 * accuracy:.1f} %"] if accuracy == accuracy else []  # NaN for self-supervised models
    words += [f"test {100 * test:.1f} %"] if test is not None else []
    return "  ".join([*words, f"{speed:,.0f} images/s"])
