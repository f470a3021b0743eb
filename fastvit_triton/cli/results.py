"""Files of `--out`: rows of a table as CSV, JSON or Parquet, by suffix."""

import argparse
import csv
import importlib
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..files import replacing
from .arguments import check_output

SUFFIXES = (".csv", ".json", ".parquet")


def add_out_option(parser: argparse.ArgumentParser, what: str) -> None:
    """Adds --out, which `write_rows` takes; `what` says what the file will hold."""
    text = f"file for {what}: {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
    parser.add_argument("--out", type=Path, check=check_results, help=text)


def check_results(option: str, path: Path) -> None:
    """Raises ValueError if `write_rows` cannot write a file of this suffix here."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"{option} is {path}; use a file name that ends in .csv, .json or .parquet")
    if suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise ValueError(f"{option} {path} needs the package pyarrow; pip install 'fastvit_triton[parquet]'")
    check_output(option, path)


def write_json(path: Path, content: object) -> None:
    """Writes JSON atomically."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def write_rows(path: Path, rows: list[dict[str, Any]], whole: Any = None, columns: Sequence[str] = ()) -> None:
    """Writes a table atomically: the file is complete, or as it was before."""
    suffix = path.suffix.lower()
    with replacing(path) as temporary:
        if suffix == ".parquet":
            arrow = importlib.import_module("pyarrow")
            table = arrow.Table.from_pylist(rows) if rows else arrow.table({name: [] for name in columns})
            importlib.import_module("pyarrow.parquet").write_table(table, temporary)
        elif suffix == ".json":
            text = json.dumps(rows if whole is None else whole, indent=1, ensure_ascii=False)
            temporary.write_text(text + "\n", encoding="utf-8")
        else:
            with temporary.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, columns or rows[0].keys())
                writer.writeheader()
                writer.writerows(rows)


def cell(text: object) -> str:
    """Text for a table; bytes of a file name that are not UTF-8 are escaped."""
    return str(text).encode("utf-8", "backslashreplace").decode("utf-8")
