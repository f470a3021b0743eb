"""Writes convert/cpu_gains.json: what whole models gained after `freeze` on the CPUs of results/cpu*.json.

    python -m benchmarks.cpu_gains

Each row is of a model in float32 inference: its speed relative to eager PyTorch with quartiles, by precision of
`freeze`; and the mean product of its blocks, by which `freeze` finds the nearest model. Errors are left out, as the
models had random weights.
"""

import json
from typing import Any

import timm
import torch

from fastvit_triton import optimize
from fastvit_triton.convert.on_cpu import GAINS, blocks_of, products

from .cpu import DIGITS, MODELS
from .result_file import ROOT, write_text

FILES = ("cpu.json", "cpu_amx.json", "cpu_amx_more.json")
COLUMNS = {"frozen": "float32", "bf16": "bf16", "int8": "int8"}  # of `benchmarks.cpu` → precision of `freeze`
NOTE = (
    "What models gained in float32 inference after freeze in each precision, relative to eager PyTorch: median, first "
    "and third quartile; written by python -m benchmarks.cpu_gains from benchmarks/results/cpu*.json."
)


def measured_rows() -> dict[str, list[dict[str, Any]]]:
    """CPU → rows without the size of products, from the results."""
    cpus: dict[str, list[dict[str, Any]]] = {}
    for name in FILES:
        held = json.loads((ROOT / "benchmarks/results" / name).read_text(encoding="utf-8"))
        for row in held["rows"]:
            columns = {to: row["columns"].get(of, {}) for of, to in COLUMNS.items()}
            columns = {precision: column for precision, column in columns.items() if "ratio" in column}
            if (row["phase"], row["dtype"]) != ("inference", "float32") or not columns:
                continue
            speeds = {precision: [c["ratio"], c["q1"], c["q3"]] for precision, c in columns.items()}
            facts = {key: row[key] for key in ("model", "batch", "threads")}
            cpus.setdefault(held["processor"], []).append(facts | dict(speeds=speeds))
    return cpus


def mean_products(name: str) -> float:
    """Multiplications of the mean product of a model's blocks for one image."""
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224" if name == DIGITS else name, **MODELS[name])
    report = optimize(model)
    assert report.subject is not None
    blocks = blocks_of(model, report.subject.example())
    assert blocks
    return products(blocks)


def table() -> str:
    """The content of the file."""
    cpus = measured_rows()
    sizes = {name: mean_products(name) for name in {row["model"] for rows in cpus.values() for row in rows}}
    for rows in cpus.values():
        rows[:] = [row | dict(products=round(row["batch"] * sizes[row["model"]])) for row in rows]
    lines = {cpu: ",\n".join(f"   {json.dumps(row)}" for row in rows) for cpu, rows in cpus.items()}
    body = ",\n".join(f"  {json.dumps(cpu)}: [\n{rows}\n  ]" for cpu, rows in lines.items())
    return f'{{\n "note": {json.dumps(NOTE)},\n "cpus": {{\n{body}\n }}\n}}\n'


def main() -> None:
    """Writes the file."""
    write_text(GAINS, table())


if __name__ == "__main__":
    main()
