"""Compares changed models before and after `optimize`, for every change of every small model: tests/mutants.py.

    python -m benchmarks.mutants                    continues the committed file
    python -m benchmarks.mutants --again timm_      starts again with the models whose names contain this

Writes benchmarks/results/mutants.json: for each model the commit, and for each mutant the largest difference of its
outputs and gradients, divided by their largest value, or the exception. It takes an hour of one core.
"""

import argparse
import json
import sys
import time
import warnings

import torch
import transformers

from fastvit_triton.measure.machine import provenance

from .result_file import ROOT, as_json, write_text

RESULT = ROOT / "benchmarks/results/mutants.json"
sys.path.insert(0, str(ROOT / "tests"))


def main() -> None:
    """Judges all mutants of the models that the file lacks, and writes it after each model."""
    from mutants import judged, models

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--again", help="start again with the models whose names contain this")
    again = parser.parse_args().again
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    listed, commit = models(), provenance()["commit"]  # before the file changes
    rows = {name: row for name, row in rows.items() if name in listed}
    write_text(RESULT, as_json(rows))
    for name, model in listed.items():
        if name in rows and not (again and again in name):
            continue
        start = time.monotonic()
        verdicts = {f"{when} {' '.join(change).strip()}": verdict for change, when, verdict in judged(model)}
        silent = {key: verdict.what for key, verdict in verdicts.items() if not verdict.same}
        rows[name] = dict(
            commit=commit, mutants={key: verdict.what for key, verdict in verdicts.items()}, silent=silent
        )
        write_text(RESULT, as_json(rows))
        print(f"{name}: {len(verdicts)} mutants, {len(silent)} silent, {time.monotonic() - start:.0f} s", flush=True)
        for key, what in silent.items():
            print(f"    {key}: {what}", flush=True)


if __name__ == "__main__":
    main()
