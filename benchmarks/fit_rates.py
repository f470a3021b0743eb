"""Fits the constants of expected times to published throughput, of models that `is_fitted` names only.

    python -m benchmarks.fit_rates --counts FILE           print the constants and the errors of the fitted rows
    python -m benchmarks.fit_rates --counts FILE --write   and write them to fastvit_triton/expected/rates.json
    python -m benchmarks.fit_rates --measured --write      fit the memory factor of the H200 to what was measured there
    python -m benchmarks.fit_rates --errors                fit nothing, and write the errors of the backtest there
    python -m benchmarks.fit_rates --counts FILE --hold-out-families
                                                           fit to half of the families, from constants that no row has
                                                           influenced; print the errors of these and of the others

Least squares of the logarithm of predicted ÷ published, with a loss that grows linearly for outliers (soft L1), from
the constants of the file, to which those that the rows say nothing of stay close. A family of n rows has the weight of
√n rows, because some families have hundreds.
"""

import argparse
import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from benchmarks.backtest import (
    MODES,
    TABLE,
    Row,
    counts,
    errors,
    excluded,
    family,
    gains,
    is_family_fitted,
    is_fitted,
    measured,
    predicted,
    read,
    work,
)
from benchmarks.result_file import as_json, write_text
from fastvit_triton.expected.gpus import RATES, Device, devices, gpus
from fastvit_triton.expected.times import constants, kernel_us, with_ours
from fastvit_triton.expected.work import UNMODELLED, GpuWork

from .rows import committed

BACKTEST = TABLE.parents[1] / "results" / "backtest.json"
OUTLIER = 0.1  # error in a logarithm from which the loss grows linearly
PRIOR = 0.3  # weight of a change of a constant by a factor of e, in rows that are wrong by a factor of e


class Fit:
    """The rows of models whose names `fits` accepts, and their residuals as a function of the constants."""

    def __init__(self, rows: Iterable[Row], known: Mapping[str, Any], fits: Callable[[str], bool] = is_fitted) -> None:
        rows = [row for row in rows if fits(row.model) and row.gpu in devices()]
        rows = [row for row in rows if "why" not in known[row.key]]
        self.rows = [
            row for row in rows if not any(one.kind in UNMODELLED for one, _ in work(known[row.key], row.mode))
        ]
        self.kernels: dict[str, list[tuple[int, int, GpuWork]]] = defaultdict(list)  # kind → (row, times, work)
        for n, row in enumerate(self.rows):
            for kernel, times in work(known[row.key], row.mode):
                self.kernels[kernel.kind.removeprefix("patch ")].append((n, times, kernel.at_batch(row.batch)))
        self.launches = np.array([sum(n for _, n in work(known[row.key], row.mode)) for row in self.rows])
        sizes = Counter(family(row.model) for row in self.rows)
        self.weights = np.array([sizes[family(row.model)] ** -0.25 for row in self.rows])
        self._known: dict[str, tuple[dict, np.ndarray]] = {}

    def log_errors(self, fitted: Mapping[str, float]) -> np.ndarray:
        """log(predicted ÷ published) time of each row."""
        gpu = sum(self._us(kind, fitted) for kind in self.kernels)
        host = np.array([fitted[f"host: {row.mode.removesuffix(' training')}"] for row in self.rows])
        published = np.array([row.batch / row.published * 1e6 for row in self.rows])
        return np.log(np.maximum(gpu, self.launches * host) / published)

    def _us(self, kind: str, fitted: Mapping[str, float]) -> np.ndarray:
        """Microseconds that kernels of this kind take in each row; computed again only if their constants change."""
        used = {name: value for name, value in fitted.items() if name.startswith((f"{kind}:", *SHARED))}
        before, us = self._known.get(kind, (None, None))
        if before != used:
            us = np.zeros(len(self.rows))
            sheets = fitted_devices(fitted)
            for n, times, kernel in self.kernels[kind]:
                us[n] += times * kernel_us(kernel, sheets[self.rows[n].gpu], fitted)
            self._known[kind] = used, us
        return us

    def run(self, first: Mapping[str, float] | None = None, only: str = "") -> dict[str, float]:
        """The constants of least loss; they start at `first`, or at those of rates.json.

        only: the beginning of the names of those that change.
        """
        first = current() if first is None else dict(first)
        names = [name for name in first if name.startswith(only)]
        start = np.log([first[name] for name in names])

        def residuals(logs: np.ndarray) -> np.ndarray:
            fitted = first | dict(zip(names, map(math.exp, logs), strict=True))
            return np.concatenate([self.weights * self.log_errors(fitted), PRIOR * (logs - start)])

        most = np.array([math.log(1.02) if name.endswith(": bandwidth") else math.inf for name in names])
        solution = least_squares(
            residuals, np.minimum(start, most - 1e-3), bounds=(-math.inf, most), loss="soft_l1", f_scale=OUTLIER
        )
        return first | dict(zip(names, map(math.exp, solution.x), strict=True))


def current() -> dict[str, float]:
    """The constants of rates.json, and the factors of its fitted devices."""
    return dict(constants()) | factors(FITTED_DEVICES)


def factors(keys: Iterable[str]) -> dict[str, float]:
    """The factors of these GPUs."""
    return {f"device {key}: {name}": getattr(devices()[key], name) for key in keys for name in ("clock", "memory")}


def neutral() -> dict[str, float]:
    """Constants that no row has influenced."""
    return {name: NEUTRAL.get(name, NEUTRAL.get(name.partition(": ")[2], 1.0)) for name in current()}


def fitted_devices(fitted: Mapping[str, float]) -> dict[str, Device]:
    """The GPUs with their fitted factors."""
    by_device: dict[str, dict[str, float]] = defaultdict(dict)
    for name, value in fitted.items():
        if name.startswith("device "):
            key, _, factor = name.removeprefix("device ").partition(": ")
            by_device[key][factor] = value
    return {key: device._replace(**by_device.get(key, {})) for key, device in devices().items()}


SHARED = ("product: depth", "device ")  # constants of several kinds
# constants, by name or by what they are, that were chosen by no measurement; see `neutral`
NEUTRAL = {"bandwidth": 0.8, "flops": 0.8, "depth": 32.0, "channels": 32.0, "host: eager": 5.0, "host: compile": 3.0}
FITTED_DEVICES = ("rtx5090",)  # whose factors are fitted; the RTX 4090's are 1
MEASURED_DEVICE = "h200"


def errors_of_gain(rows: Iterable[Row]) -> dict[str, float]:
    """Family → the error of the gain of torch.compile over eager that nine of ten of these rows do not exceed."""
    families: dict[str, list[Row]] = defaultdict(list)
    for row in gains(rows):
        families[family(row.model)].append(row)
    return {kind: errors(group)["p90"] for kind, group in sorted(families.items())}


def tested_errors() -> dict[str, float]:
    """The same of the committed backtest."""
    return {kind: one["p90"] for kind, one in json.loads(BACKTEST.read_text())["by"]["gain by family"].items()}


def main() -> None:
    """Prints, and with --write writes, the constants."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--counts", type=Path, help="file that keeps what models have a GPU do")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that count (default: all cores)")
    action = parser.add_mutually_exclusive_group()
    parser.add_argument("--write", action="store_true", help="write rates.json")
    action.add_argument("--measured", action="store_true", help="fit the H200's memory factor to measured models")
    action.add_argument("--errors", action="store_true", help="write the errors of the backtest to rates.json")
    action.add_argument(
        "--hold-out-families", action="store_true", help="hold out half of the families; writes nothing"
    )
    args = parser.parse_args()
    if args.write and (args.errors or args.hold_out_families):
        parser.error("--write goes with --counts or --measured, without --errors and --hold-out-families")
    if args.errors:
        write(json.loads(RATES.read_text()) | {"error_of_gain": tested_errors()})
        return
    if args.measured:
        fit_measured(args.jobs, args.write)
        return
    if args.counts is None:
        parser.error("give --counts FILE, --measured or --errors")
    model_counts = json.loads(args.counts.read_text()) if args.counts.exists() else {}
    rows = read(TABLE)
    model_counts = counts(rows, model_counts, args.jobs, args.counts)
    fits = is_family_fitted if args.hold_out_families else is_fitted
    fitted = Fit(rows, model_counts, fits).run(neutral() if args.hold_out_families else None)
    sheets = fitted_devices(fitted)
    if args.hold_out_families:
        every = predicted(rows, model_counts, fitted, sheets)
        for part in (True, False):
            some = [row for row in every if fits(row.model) == part]
            for title, group in (("eager and compile", some), ("gain", gains(some))):
                print("fitted families" if part else "held-out families", title, errors(group))
        return
    shown = predicted([row for row in rows if is_fitted(row.model)], model_counts, fitted, sheets)
    for name, value in fitted.items():
        print(f"{name:32} {constants().get(name, 1.0):8.3f} → {value:8.3f}")
    for gpu in dict.fromkeys(row.gpu for row in shown):
        for mode in ("eager", "compile"):
            print(gpu, mode, errors(row for row in shown if (row.gpu, row.mode) == (gpu, mode)))
    print("excluded", excluded(shown))
    if args.write:
        table = json.loads(RATES.read_text())
        table["constants"] = {name: {"value": round(fitted[name], 4)} for name in constants()}
        for key in FITTED_DEVICES:
            table["gpus"][key]["sheet"] |= {name: round(getattr(sheets[key], name), 4) for name in ("clock", "memory")}
        every = predicted(rows, model_counts, fitted, sheets)
        table["error_of_gain"] = errors_of_gain(every)
        table["note"] = (
            f"Constants fitted by benchmarks.fit_rates to {sum(row.predicted is not None for row in shown)} rows of "
            "benchmarks/published/timm.csv; see fastvit_triton/expected/times.py. Only factors of the H200 and H100 "
            "depend on measurements of this project."
        )
        write(table)


def fit_measured(jobs: int, writes: bool) -> None:
    """Prints, and writes if asked, the factor of MEASURED_DEVICE's memory, and the errors of the rows."""
    rows = [row for row in measured(committed()) if row.gpu == MEASURED_DEVICE and row.mode in MODES]
    known = counts(rows, {}, jobs, None)
    memory = f"device {MEASURED_DEVICE}: memory"
    first = with_ours(gpus()[MEASURED_DEVICE], 1) | factors([MEASURED_DEVICE]) | {memory: 1.0}
    fitted = Fit(rows, known, lambda name: True).run(first, memory)
    sheets = fitted_devices(fitted)
    for row in predicted(rows, known, None, sheets):
        assert row.predicted is not None
        print(f"{row.model:24} {row.mode:16} {row.published:8.0f} {row.predicted / row.published:6.2f}")
    found = round(sheets[MEASURED_DEVICE].memory, 3)
    print(f"{memory} {found}")
    if writes:
        table = json.loads(RATES.read_text())
        table["gpus"][MEASURED_DEVICE]["sheet"]["memory"] = found
        write(table)


def write(table: Mapping[str, Any]) -> None:
    """Writes rates.json."""
    write_text(RATES, as_json(table))


if __name__ == "__main__":
    main()
