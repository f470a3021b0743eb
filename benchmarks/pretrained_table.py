"""`python -m benchmarks.pretrained_table`: writes the table of pretrained weights, and the names of ImageNet's classes.

Both come from the installed timm: its configurations of every name of our catalogue, and its list of classes.
"""

import json
from collections import Counter

import timm
from timm.data import ImageNetInfo
from timm.models._registry import _model_default_cfgs

from fastvit_triton.files import replacing
from fastvit_triton.models import CATALOGUE
from fastvit_triton.models.weights.pretrained import CLASSES, TABLE

FIELDS = """hf_hub_id hf_hub_filename input_size fixed_input_size interpolation crop_pct crop_mode mean std num_classes
license""".split()
SAFE = "model.safetensors"  # in every repository of timm's; its loader prefers it

HEAD = """\
The 1000 classes of ImageNet-1k (ILSVRC 2012) in the order of the logits: WordNet synset, and a name from WordNet.
Written by `python -m benchmarks.pretrained_table` from timm {version} (Apache-2.0), timm/data/_info; the names are
those of WordNet 3.0, under its licence:

This software and database is being provided to you, the LICENSEE, by Princeton University under the following license.
By obtaining, using and/or copying this software and database, you agree that you have read, understood, and will comply
with these terms and conditions.: Permission to use, copy, modify and distribute this software and database and its
documentation for any purpose and without fee or royalty is hereby granted, provided that you agree to comply with the
following copyright notice and statements, including the disclaimer, and that the same appear on ALL copies of the
software, database and documentation, including modifications that you make for internal use or for distribution.
WordNet 3.0 Copyright 2006 by Princeton University. All rights reserved. THIS SOFTWARE AND DATABASE IS PROVIDED "AS IS"
AND PRINCETON UNIVERSITY MAKES NO REPRESENTATIONS OR WARRANTIES, EXPRESS OR IMPLIED. BY WAY OF EXAMPLE, BUT NOT
LIMITATION, PRINCETON UNIVERSITY MAKES NO REPRESENTATIONS OR WARRANTIES OF MERCHANT- ABILITY OR FITNESS FOR ANY
PARTICULAR PURPOSE OR THAT THE USE OF THE LICENSED SOFTWARE, DATABASE OR DOCUMENTATION WILL NOT INFRINGE ANY THIRD PARTY
PATENTS, COPYRIGHTS, TRADEMARKS OR OTHER RIGHTS. The name of Princeton University or Princeton may not be used in
advertising or publicity pertaining to distribution of the software and/or database. Title to copyright in this
software, database and any associated documentation shall at all times remain with Princeton University and LICENSEE
agrees to preserve same."""


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
    head = "".join(f"# {line}".rstrip() + "\n" for line in HEAD.format(version=timm.__version__).splitlines())
    rows = "".join(f"{synset}\t{name}\n" for synset, name in class_names())
    for path, text in ((TABLE, text_of(table())), (CLASSES, head + rows)):
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
