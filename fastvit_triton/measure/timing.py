"""Times calls, alternating between variants, with a cold L2 cache and rotating inputs; measures memory."""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .timeout import Deadline, capturing

WARM_UP = 3  # calls before the first timed one
HEAD_START = 1_000_000  # cycles, half a millisecond or more: an autograd engine needs 0.1 ms before its first launch

# index of a set of inputs → the call to time, after any untimed work before it
Setup = Callable[[int], Callable[[], object]]
Context = Callable[[], AbstractContextManager]


def repeated(function: Callable[[], object], context: Context = nullcontext, calls: int = 1) -> Setup:
    """Set-up of samples that each call a function some times in a context."""

    def timed() -> None:
        with context():
            for _ in range(calls):
                function()

    return lambda copy: timed


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: median, first and third quartile, and the number of samples."""

    us: float
    q1: float
    q3: float
    rounds: int

    @classmethod
    def of(cls, samples: list[float]) -> "Timing":
        """Summarises at least one sample."""
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0], 1)
        q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, q1, q3, len(samples))


class Clock:
    """Times single calls on one device: by device events on a GPU, else by the host's clock.

    Before each call on a GPU, writing a buffer of four times the L2 cache evicts the inputs from the cache. With
    `latency` the device is idle before the call, so the time includes the host's launches. Otherwise the device is kept
    busy while the host launches, so only device time is measured, unless launching takes longer.
    """

    def __init__(self, device: torch.device, latency: bool = False) -> None:
        self.device = device
        self.latency = latency
        self._pending: list[tuple] = []
        if device.type == "cuda":
            l2 = torch.cuda.get_device_properties(device).L2_cache_size
            self._buffer = torch.empty(max(4 * l2, 2**28), dtype=torch.int8, device=device)

    def time(self, variant: str, step: Setup, copy: int) -> None:
        """Takes one sample; `samples` returns it."""
        call = step(copy)
        if self.device.type != "cuda":
            began = time.perf_counter()
            call()
            self._pending.append((variant, time.perf_counter() - began))
            return
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        if not self.latency:
            torch.cuda._sleep(HEAD_START)
        self._buffer.fill_(copy)
        if self.latency:
            torch.cuda.synchronize(self.device)
        start.record()
        call()
        end.record()
        self._pending.append((variant, start, end))

    def samples(self) -> dict[str, list[float]]:
        """Microseconds by variant, of the samples since the last call."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        times: dict[str, list[float]] = {}
        for variant, *taken in self._pending:
            us = taken[0] * 1e6 if len(taken) == 1 else taken[0].elapsed_time(taken[1]) * 1e3
            times.setdefault(variant, []).append(us)
        self._pending.clear()
        return times


def order(variants: list[str], turn: int) -> list[str]:
    """Order of the variants in a round, reversed in every other round, so that none is always first."""
    return variants if turn % 2 == 0 else variants[::-1]


def samples_of(
    steps: Mapping[str, Setup],
    device: torch.device,
    deadline: Deadline,
    seconds: float = 1.0,
    rounds: tuple[int, int] = (5, 100),
    copies: int = 1,
    latency: bool = False,
    warm_up: int = WARM_UP,
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Times all variants in one process, alternating between them."""
    errors: dict[str, str] = {}
    clock = Clock(device, latency)
    for variant, step in steps.items():
        with capturing(errors, variant), deadline:
            began = time.perf_counter()
            for turn in range(warm_up):
                if turn >= WARM_UP and time.perf_counter() - began > seconds / len(steps):
                    break
                step(turn % copies)()
            wait(device)
    variants = [variant for variant in steps if variant not in errors]
    if not variants:
        return {}, errors
    samples: dict[str, list[float]] = {variant: [] for variant in variants}
    fewest, most = rounds
    turn = 0
    start = time.perf_counter()
    while turn < most and (turn < 1 or not deadline.over):
        for variant in order(variants, turn):
            clock.time(variant, steps[variant], turn % copies)
        turn += 1
        if turn >= fewest:
            if turn % fewest == 0:  # not each round, as reading events waits for the device
                _gather(samples, clock)
            if time.perf_counter() - start > seconds:
                break
    _gather(samples, clock)
    return samples, errors


def alternate(steps: Mapping[str, Setup], *how: Any, **named: Any) -> tuple[dict[str, Timing], dict[str, str]]:
    """As `samples_of`, but returns a `Timing` for each variant."""
    samples, errors = samples_of(steps, *how, **named)
    return {variant: Timing.of(taken) for variant, taken in samples.items()}, errors


def timing_columns(taken: list[float], baseline: list[float] | None, calls: int = 1) -> dict:
    """Columns of a row: microseconds per call, and speedup over the baseline, paired by round."""
    columns = asdict(Timing.of([us / calls for us in taken]))
    if baseline is not None:
        pairs = Timing.of([theirs / ours for theirs, ours in zip(baseline, taken, strict=True)])
        columns |= dict(speedup=round(pairs.us, 3), speedup_quartiles=[round(pairs.q1, 3), round(pairs.q3, 3)])
    return columns


def add_times(
    rows: dict[str, dict],
    found: tuple[dict[str, list[float]], dict[str, str]],
    baseline: str = "",
    calls: int = 1,
) -> dict[str, list[float]]:
    """Adds timing columns or errors of variants, from what `samples_of` found, to their rows; returns the samples."""
    samples, errors = found
    for variant, taken in samples.items():
        rows.setdefault(variant, {}).update(timing_columns(taken, samples.get(baseline), calls))
    for variant, why in errors.items():
        rows.setdefault(variant, {})["error"] = why
    return samples


def _gather(samples: dict[str, list[float]], clock: Clock) -> None:
    for variant, taken in clock.samples().items():
        samples[variant] += taken


def wait(device: torch.device) -> None:
    """Waits until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Peak device memory of a call in bytes, minus memory allocated before; None without a GPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def saved_bytes(call: Callable[[], object], held: list[torch.Tensor]) -> int:
    """Bytes that a forward pass saves for the backward pass; each storage counts once, those of `held` not."""
    excluded = {t.untyped_storage().data_ptr() for t in held}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept.setdefault(storage.data_ptr(), storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        alive = call()
    total = sum(storage.nbytes() for at, storage in kept.items() if at not in excluded)
    del alive
    return total


def rate(amount: float, us: float) -> float:
    """Amount per second in units of 10¹²: TFLOP/s of flops, TB/s of bytes."""
    return amount / us / 1e6 if us else math.nan
