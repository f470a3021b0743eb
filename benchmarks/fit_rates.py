"""Fits the constants of expected times to published throughput, of the families that `backtest.is_fitted` names only.

    python -m benchmarks.fit_rates --counts FILE           print the constants and the errors of the fitted rows
    python -m benchmarks.fit_rates --counts FILE --write   and write them to fastvit_triton/expected/rates.json

Least squares of the logarithm of predicted ÷ published, with a loss that grows linearly for outliers (soft L1), from
the constants of the file, to which those that the rows say nothing of stay close.
"""

import argparse
import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from benchmarks.backtest import TABLE, Row, counts, errors, excluded, is_fitted, predicted, read, work
from fastvit_triton.expected.times import RATES, constants, devices, kernel_us
from fastvit_triton.expected.work import Work
from fastvit_triton.files import replacing

OUTLIER = 0.1  # error in a logarithm from which the loss grows linearly
PRIOR = 0.3  # weight of a change of a constant by a factor of e, in rows that are wrong by a factor of e


class Fit:
    """The fitted rows, and their residuals as a function of the constants.

    Args:
        rows: published.
        known: counts of their models.
    """

    def __init__(self, rows: Iterable[Row], known: Mapping[str, Any]) -> None:
        self.rows = [
            row for row in rows if is_fitted(row.model) and row.gpu in devices() and "why" not in known[row.key]
        ]
        self.kernels: dict[str, list[tuple[int, int, Work]]] = defaultdict(list)  # kind → (row, times, work)
        for n, row in enumerate(self.rows):
            for kernel, times in work(known[row.key], row.mode):
                self.kernels[kernel.kind].append((n, times, kernel.at_batch(row.batch)))
        self._known: dict[str, tuple[dict, np.ndarray]] = {}

    def log_errors(self, fitted: Mapping[str, float]) -> np.ndarray:
        """log(predicted ÷ published) time of each row."""
        total = sum(self._us(kind, fitted) for kind in self.kernels)
        published = np.array([row.batch / row.published * 1e6 for row in self.rows])
        return np.log(total / published)

    def _us(self, kind: str, fitted: Mapping[str, float]) -> np.ndarray:
        """Microseconds that kernels of this kind take in each row; computed again only if their constants change."""
        own = {name: value for name, value in fitted.items() if name.startswith(f"{kind}:") or name in SHARED}
        before, found = self._known.get(kind, (None, None))
        if before != own:
            found = np.zeros(len(self.rows))
            for n, times, kernel in self.kernels[kind]:
                found[n] += times * kernel_us(kernel, devices()[self.rows[n].gpu], fitted)
            self._known[kind] = own, found
        return found

    def run(self) -> dict[str, float]:
        """The constants of least loss."""
        names = list(constants())
        start = np.log([constants()[name] for name in names])

        def residuals(logs: np.ndarray) -> np.ndarray:
            fitted = dict(zip(names, map(math.exp, logs), strict=True))
            return np.concatenate([self.log_errors(fitted), PRIOR * (logs - start)])

        most = np.array([math.log(1.02) if name.endswith(": bandwidth") else math.inf for name in names])
        found = least_squares(
            residuals, np.minimum(start, most - 1e-3), bounds=(-math.inf, most), loss="soft_l1", f_scale=OUTLIER
        )
        return dict(zip(names, map(math.exp, found.x), strict=True))


SHARED = ("launch", "product: depth")  # constants of several kinds


def main() -> None:
    """Prints, and with --write writes, the constants."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--counts", type=Path, required=True, help="file that keeps what models have a GPU do")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that count (default: all cores)")
    parser.add_argument("--write", action="store_true", help="write rates.json")
    given = parser.parse_args()
    known = json.loads(given.counts.read_text()) if given.counts.exists() else {}
    rows = read(TABLE)
    known = counts(rows, known, given.jobs, given.counts)
    fitted = Fit(rows, known).run()
    shown = predicted([row for row in rows if is_fitted(row.model)], known, fitted)
    for name, value in fitted.items():
        print(f"{name:32} {constants()[name]:8.3f} → {value:8.3f}")
    for gpu in dict.fromkeys(row.gpu for row in shown):
        for mode in ("eager", "compile"):
            print(gpu, mode, errors(row for row in shown if (row.gpu, row.mode) == (gpu, mode)))
    print("excluded", excluded(shown))
    if given.write:
        table = json.loads(RATES.read_text())
        table["constants"] = {name: {"value": round(value, 4)} for name, value in fitted.items()}
        table["note"] = (
            f"Constants fitted by benchmarks.fit_rates to {sum(row.predicted is not None for row in shown)} rows of "
            "benchmarks/published/timm.csv; see fastvit_triton/expected/times.py. Nothing was measured by this project."
        )
        with replacing(RATES) as temporary:
            temporary.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
