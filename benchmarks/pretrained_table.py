"""`python -m benchmarks.pretrained_table`: writes the table of pretrained weights, and the names of ImageNet's classes.

Both come from the installed timm: its configurations of every name of our catalogue, and its list of classes.
"""

import json
import re
from collections import Counter

import timm
from timm.data import ImageNetInfo
from timm.models._registry import _model_default_cfgs

from fastvit_triton.models import CATALOGUE
from fastvit_triton.models.weights.pretrained import CLASSES, TABLE

from .result_file import write_text

FIELDS = """hf_hub_id hf_hub_filename input_size fixed_input_size interpolation crop_pct crop_mode mean std num_classes
license""".split()
SAFE = "model.safetensors"  # in every repository of timm's; its loader prefers it


def table() -> dict[str, dict[str, dict]]:
    """Name → tag → configuration, with timm's order of tags: the first is the default. A tag "" is none."""
    names = [name for name in sorted(CATALOGUE) if name in _model_default_cfgs]
    return {name: {tag: _row(name, tag) for tag in _model_default_cfgs[name].tags} for name in names}


def _row(name: str, tag: str) -> dict:
    row = {field: getattr(_model_default_cfgs[name].cfgs[tag], field) for field in FIELDS}
    if row["hf_hub_id"] == "timm/":  # timm's short form
        row["hf_hub_id"] += f"{name}.{tag}" if tag else name
    row["hf_hub_filename"] = (row["hf_hub_filename"] or SAFE) if row["hf_hub_id"] else None
    return row


def class_names() -> list[tuple[str, str]]:
    """The synset and a name of each class of ImageNet-1k; names are unique."""
    info = ImageNetInfo()
    synsets = [info.index_to_label_name(i) for i in range(1000)]
    names = [info.index_to_description(i).split(", ") for i in range(1000)]
    uses = Counter(first for first, *_ in names)
    chosen = [
        next((n for n in words if uses[n] < 2), f"{words[0]} ({s})") for s, words in zip(synsets, names, strict=True)
    ]
    return list(zip(synsets, chosen, strict=True))


def text_of(found: dict[str, dict[str, dict]]) -> str:
    """The table as JSON with one row per line."""
    blocks = []
    for name, rows in found.items():
        lines = ",\n".join(f"    {json.dumps(tag)}: {json.dumps(row)}" for tag, row in rows.items())
        blocks.append(f"  {json.dumps(name)}: {{\n{lines}\n  }}")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def main() -> None:
    """Writes both files."""
    head = "".join(line for line in CLASSES.open(encoding="utf-8") if line.startswith("#"))  # with WordNet's licence
    head = re.sub(r"timm \S+ \(", f"timm {timm.__version__} (", head)
    rows = "".join(f"{synset}\t{name}\n" for synset, name in class_names())
    for path, text in ((TABLE, text_of(table())), (CLASSES, head + rows)):
        write_text(path, text)


if __name__ == "__main__":
    main()
