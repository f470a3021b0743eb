"""How long a call takes, and what it keeps: arms in turn, a cold L2 cache, rotating inputs, medians with quartiles."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .timeout import Deadline, noting

HEAD_START = 1_000_000  # cycles, half a millisecond or more: an autograd engine needs 0.1 ms before its first launch

# i → the call that is timed, after whatever must come before it untimed; i says which of the rotating inputs to take
Step = Callable[[int], Callable[[], object]]


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: median, quartiles, and how many calls they come from."""

    us: float
    q1: float
    q3: float
    rounds: int

    @classmethod
    def of(cls, samples: list[float]) -> "Timing":
        """The summary of at least one sample."""
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0], 1)
        q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, q1, q3, len(samples))


class Clock:
    """Times single calls on one device: device events on a GPU, the host's clock elsewhere.

    Before each call on a GPU a buffer of four times the L2 cache is written, so that no input is there already. With
    `latency` the device is idle first: the time includes what the host needs to launch. Otherwise the device is kept
    busy for a while before, in which the host launches: the time is the device's alone, unless launching takes longer.
    """

    def __init__(self, device: torch.device, latency: bool = False) -> None:
        self.device, self.latency = device, latency
        self._pending: list[tuple] = []
        if device.type == "cuda":
            l2 = torch.cuda.get_device_properties(device).L2_cache_size
            self._buffer = torch.empty(max(4 * l2, 2**28), dtype=torch.int8, device=device)

    def time(self, arm: str, step: Step, copy: int) -> None:
        """Takes one sample; `samples` gives it."""
        call = step(copy)
        if self.device.type != "cuda":
            start = time.perf_counter()
            call()
            self._pending.append((arm, time.perf_counter() - start))
            return
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if not self.latency:
            torch.cuda._sleep(HEAD_START)
        self._buffer.fill_(copy)
        if self.latency:
            torch.cuda.synchronize(self.device)
        start.record()
        call()
        end.record()
        self._pending.append((arm, start, end))

    def samples(self) -> dict[str, list[float]]:
        """Microseconds by arm since the last call."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        found: dict[str, list[float]] = {}
        for arm, *taken in self._pending:
            us = taken[0] * 1e6 if len(taken) == 1 else taken[0].elapsed_time(taken[1]) * 1e3
            found.setdefault(arm, []).append(us)
        self._pending.clear()
        return found


def order(arms: list[str], turn: int) -> list[str]:
    """Who goes when: there and back again, so that each arm follows each neighbour and none is always first."""
    return arms if turn % 2 == 0 else arms[::-1]


def samples_of(
    steps: dict[str, Step],
    device: torch.device,
    deadline: Deadline,
    seconds: float = 1.0,
    rounds: tuple[int, int] = (5, 100),
    copies: int = 1,
    latency: bool = False,
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Times all arms in one process, in turn.

    Args:
        steps: one step by arm; each is warmed up three times first.
        device: where they run.
        deadline: no round starts after it, except the first.
        seconds: about how long to sample.
        rounds: fewest and most samples of an arm.
        copies: how many sets of inputs the steps can be asked for.
        latency: see `Clock`.

    Returns:
        Microseconds by arm, and for arms that failed the error.
    """
    errors, clock = {}, Clock(device, latency)
    for arm, step in steps.items():
        with noting(errors, arm), deadline:
            for copy in range(3):
                step(copy % copies)()
            wait(device)
    arms = [arm for arm in steps if arm not in errors]
    if not arms:
        return {}, errors
    samples: dict[str, list[float]] = {arm: [] for arm in arms}
    fewest, most = rounds
    turn, start = 0, time.perf_counter()
    while turn < most and (turn < 1 or not deadline.over):
        for arm in order(arms, turn):
            clock.time(arm, steps[arm], turn % copies)
        turn += 1
        if turn >= fewest:
            if turn % fewest == 0:  # reading the events waits for the device, so not each time
                _gather(samples, clock)
            if time.perf_counter() - start > seconds:
                break
    _gather(samples, clock)
    return samples, errors


def alternate(steps: dict[str, Step], *how: object, **named: object) -> tuple[dict[str, Timing], dict[str, str]]:
    """`samples_of`, summarised."""
    samples, errors = samples_of(steps, *how, **named)
    return {arm: Timing.of(taken) for arm, taken in samples.items()}, errors


def _gather(samples: dict[str, list[float]], clock: Clock) -> None:
    for arm, taken in clock.samples().items():
        samples[arm] += taken


def wait(device: torch.device) -> None:
    """Until the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Most device memory that a call holds beyond what was held before; None where nobody counts it."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def saved_bytes(call: Callable[[], object], held: list[torch.Tensor]) -> int:
    """Bytes that a forward pass keeps for its backward pass: each storage once, without those of `held`."""
    known = {t.untyped_storage().data_ptr() for t in held}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept.setdefault(storage.data_ptr(), storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        alive = call()
    total = sum(storage.nbytes() for at, storage in kept.items() if at not in known)
    del alive
    return total


def rate(amount: float, us: float) -> float:
    """Amount per second in units of 10¹²: TFLOP/s of flops, TB/s of bytes."""
    return amount / us / 1e6 if us else math.nan
