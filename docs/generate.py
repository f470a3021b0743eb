"""An mkdocs hook: replaces `{{ name }}` on a page by the text of PAGES[name], generated from code and results.

    python docs/generate.py

writes the pages that are in the repository, claims.md (from claims.txt, reported.txt and results) and survey.md (from
benchmarks/survey_systems.txt and results). Images of benchmarks/results are added to the site under images/.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
GPUS = {
    "sm_80": "A100",
    "sm_86": "RTX 3090",
    "sm_89": "RTX 4090",
    "sm_90": "H200",
    "sm_100": "B200",
    "gfx942": "MI300X",
}

SIZES = (("ViT-Ti/16", 192, 3), ("ViT-S/16", 384, 6), ("ViT-B/16", 768, 12), ("ViT-L/16", 1024, 16))


def _table(*rows: list[object]) -> str:
    """A markdown table whose first row is the header."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def ways() -> str:
    """The way that is chosen by default, without measurements, for timm's models after `optimize`."""
    rows = json.loads((RESULTS / "launches.json").read_text())["rows"]
    found = {}
    for row in rows:
        if not row["ours"] and not row["frozen"]:
            chosen = {row["ways"]["attention"], row["ways"]["mlp"]}
            key = row["model"].removeprefix("timm:"), row["phase"], row["batch"]
            found.setdefault(key, {})[row["arch"]] = " and ".join(sorted(chosen))
    archs = [arch for arch in GPUS if any(arch in row for row in found.values())]
    head = ["model", "phase", "batch", *[GPUS[arch] for arch in archs]]
    return _table(head, *[[*key, *[row.get(arch, "") for arch in archs]] for key, row in found.items()])


def memory() -> str:
    """Values that a block saves per token for its backward pass, from the equations of kernels/cost.py."""
    from fastvit_triton.kernels.cost import Branch, saved_values

    lines = [["model", "channels C", "plain, MiB a block", "mixed or fused, MiB a block", "saved"]]
    for name, C, heads in SIZES:
        size = dict(images=64, tokens=197, channels=C)
        block = (
            Branch("attention", **size, width=3 * C, inner=C, heads=heads),
            Branch("mlp", **size, width=4 * C, inner=4 * C),
        )
        plain, fused = (sum(saved_values(b, way) for b in block) * 64 * 197 * 2 / 2**20 for way in ("plain", "fused"))
        lines.append([name, C, f"{plain:.0f}", f"{fused:.0f}", f"{1 - fused / plain:.0%}"])
    return _table(*lines)


def models() -> str:
    """Every name of `create_model`, with its number of parameters counted on the meta device."""
    from fastvit_triton import create_model, list_models

    rows = []
    for name in list_models():
        with torch.device("meta"):
            model = create_model(name)
        size = " × ".join(map(str, model.config.img_size))
        rows.append([f"`{name}`", f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M", size])
    return _table(["name", "parameters", "image"], *rows)


def kernels() -> str:
    """The docstrings of the files of `OPS`, which contain their mathematics."""
    found = []
    for path in sorted((ROOT / "fastvit_triton" / "kernels").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "\nOP = Op(" in text:
            found.append(f"## {path.stem}\n\n```text\n{ast.get_docstring(ast.parse(text))}\n```")
    return "\n\n".join(found)


def api() -> str:
    """A mkdocstrings entry for each public name."""
    tree = ast.parse((ROOT / "fastvit_triton" / "__init__.pyi").read_text(encoding="utf-8"))
    nodes = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module]
    names = sorted((a.name, node.module) for node in nodes for a in node.names)
    where = {"optimize": "convert.modules", "revert": "convert.modules", "report": "convert.backend"}
    return "\n\n".join(f"::: fastvit_triton.{where.get(name, module)}.{name}" for name, module in names)


def faults() -> str:
    """What the last campaign of faults tried and found."""
    result = json.loads((RESULTS / "faults.json").read_text())
    rows = [[row["fault"], row["tried"], row["survived"], len(row["lost"])] for row in result["rows"]]
    tried, survived, lost = (sum(column) for column in zip(*[row[1:] for row in rows], strict=True))
    table = _table(["fault", "tried", "survived", "lost"], *rows, ["**all**", tried, survived, lost])
    grown = result["memory"]
    text = f"Memory grew by {grown['mib']} MiB over the second half of {grown['steps']:,} training steps."
    return f"{table}\n\n{text} Source: `benchmarks/results/faults.json`, {result['date']}, seed {result['seed']}."


def fashion_mnist() -> str:
    """Accuracies of ours and timm's on Fashion-MNIST, by seed."""
    result = json.loads((RESULTS / "fashion-mnist.json").read_text())
    seeds = [row["seed"] for row in result["runs"]["timm"]]
    rows, found = [], result["summary"]
    for name, runs in result["runs"].items():
        spread = f"{100 * found[name]['mean']:.2f} ± {100 * found[name]['deviation']:.2f} %"
        rows.append([name, *(f"{100 * row['accuracy']:.2f} %" for row in runs), spread])
    table = _table(["test accuracy", *(f"seed {seed}" for seed in seeds), "mean and standard deviation"], *rows)
    apart = f"The means differ by {100 * abs(found['difference']):.2f} points, their standard error is"
    seconds = sum(row["core_seconds"] for runs in result["runs"].values() for row in runs) / (2 * len(seeds))
    text = f"{apart} {100 * found['standard_error']:.2f}. A run takes {seconds / 60:.1f} minutes of one core."
    return f"{table}\n\n{text} Source: `benchmarks/results/fashion-mnist.json`, {result['date']}."


def official() -> str:
    """What `optimize` captures of official code."""
    return (RESULTS / "coverage-official.md").read_text(encoding="utf-8")


def coverage() -> str:
    """How much of other packages' models `optimize` fuses."""
    return (RESULTS / "coverage.md").read_text(encoding="utf-8")


def towers() -> str:
    """How much of the vision towers of transformers and timm `optimize` fuses."""
    return (RESULTS / "coverage-towers.md").read_text(encoding="utf-8")


def recompiles() -> str:
    """Graphs and breaks of compiled towers, original and converted."""
    result = json.loads((RESULTS / "recompiles.json").read_text())
    kinds = "original", "converted"
    lines = [["tower", "calls: graphs, breaks", "converted", "captured: graphs", "converted", "with kernels"]]
    for row in result["rows"]:
        calls = [row[kind].get("calls") for kind in kinds]
        cells = ["" if found is None else f"{found['graphs']}, {found['breaks']}" for found in calls]
        whole = [row[kind]["captured"] for kind in (*kinds, "kernels")]
        cells += ["no" if "error" in found else found["graphs"] for found in whole]
        lines.append([f"`{row['model'].rpartition('.')[2]}`", *cells])
    return f"Written by `{result['command']}` on {result['date']}.\n\n{_table(*lines)}"


def fields(name: str) -> list[list[str]]:
    """The lines of a text file of this folder, as lists of four fields, which " | " separates.

    Raises:
        ValueError: a line has another number of fields.
    """
    lines = (ROOT / "docs" / name).read_text(encoding="utf-8").splitlines()
    found = [[word.strip() for word in f"{line} ".split(" | ")] for line in lines if line and line[0] != "#"]
    for words in found:
        if len(words) != 4:
            raise ValueError(f"line {words[0]} of {name} has {len(words)} fields; give 4")
    return found


def covering(text: str) -> str:
    """What covers a claim, as markdown."""
    found = []
    for word in text.split("; "):
        if word == "reported":
            found.append(f"[below](#{REPORTED.lower().replace(',', '').replace(' ', '-')})")
        elif word.startswith("docs/"):
            found.append(f"[{Path(word.partition('#')[0]).stem}]({word.removeprefix('docs/')})")
        else:
            found.append(f"`{word}`" if word.startswith(("tests/", "examples/", "benchmarks/")) else word)
    return ", ".join(found)


def facts() -> dict[str, str]:
    """Measured and counted results, by the names that reported.txt uses."""
    from benchmarks.survey import reached

    held = {n: json.loads((RESULTS / f"{n}.json").read_text()) for n in ("learn", "fashion-mnist", "survey")}
    seeds, fashion = held["learn"]["seeds"], held["fashion-mnist"]["summary"]
    systems = {row["system"]: row for row in held["survey"]["rows"]}
    ends = {name: f"{reached(row)[0]:.1f} %" for name, row in systems.items() if "digits" in row}
    before, after = systems["ViT"]["launches"]
    return dict(
        digits=f"{100 * seeds['mean']:.1f} ± {100 * seeds['deviation']:.1f} %",
        seconds=f"{seeds['core_seconds']:.0f} s",
        fashion="ours reaches {:.1f} %, timm's {:.1f} %".format(
            *(100 * fashion[n]["mean"] for n in ("fastvit_triton", "timm"))
        ),
        small=", ".join(f"{name} {ends[name]}" for name in ("ViT", "CPVT", "Twins") if name in ends),
        launches=f"{before:g} → {after:g}",
    )


def claims() -> str:
    """The page of claims."""
    table = [["id", "claim", "source", "covered by"]]
    table += [[key, claim, source, covering(covered)] for key, claim, source, covered in fields("claims.txt")]
    known, numbers = fields("reported.txt"), facts()
    reported = [["the paper reports", "source", "this package", "claim"]]
    reported += [[text, source, shown.format_map(numbers), key] for key, text, source, shown in known]
    return f"""# Claims

What introductions to Vision Transformers and the papers of the [survey](survey.md) state, in our words, and the test,
figure or page that covers it. The first digit of an id is that of an introduction: the code of ViT (0), its equations
(1), two notes on its paper (2, 3), and a survey (4); misprints are corrected. ViT is
[arXiv:2010.11929](https://arxiv.org/abs/2010.11929). {GENERATED.format("docs/claims.txt and docs/reported.txt")}

{_table(*table)}

## {REPORTED}

No figure of a paper was measured here, because none of their data sets and weights was used.

{_table(*reported)}
"""


def survey() -> str:
    """The page of the survey's systems."""
    from benchmarks.survey import EPOCHS, SEEDS, SYSTEMS, reached

    result = json.loads((RESULTS / "survey.json").read_text())
    rows = {row["system"]: row for row in result["rows"]}
    words = [["system", "idea", "our names", "oracle", "what differs"]]
    numbers = [
        ["system", "model", "parameters", "launches of a block", "digits: parameters", "epoch 2", "4", "8", "range"]
    ]
    for system in SYSTEMS:
        link = system.paper if "//" in system.paper else f"https://arxiv.org/abs/{system.paper}"
        names = ", ".join(f"`{pattern}`" for pattern in system.names.split()) + f" ({len(system.ours)})"
        ours = "every ViT" if system.built and not system.names else names if system.built else system.model
        words.append([f"[{system.name}]({link})", f"{system.idea}.", ours, system.oracle, system.differs])
        if row := rows.get(system.name):
            before, after = row["launches"]
            figures = [f"{row['parameters'] / 1e6:.2f} M", f"{before:.3g} → {after:.3g}"]
            found = ["[another task](pixels.md)", *["–"] * 4]
            if "digits" in row:
                found = [f"{row['digits']['parameters']:,}"]
                found += [f"{reached(row, epoch)[0]:.1f} %" for epoch in (2, 4, 8)]
                found.append("{1:.1f}–{2:.1f} %".format(*reached(row)))
            numbers.append([system.name, f"`{row['model']}`", *figures, *found])
        else:
            numbers.append([system.name, "not run yet" if system.built else "not trained yet", *[""] * 7])
    built = sum(system.built for system in SYSTEMS)
    missing = ", ".join(system.name for system in SYSTEMS if system.name not in rows)
    dates = sorted({row["digits"]["date"] for row in rows.values() if "digits" in row})
    return f"""# The survey

The {len(SYSTEMS)} systems of a survey of Vision Transformers, of which {built} can be created.
{GENERATED.format("benchmarks/survey_systems.txt and `python -m benchmarks.survey`")}

{_table(*words)}

## Figures

Parameters are those of the named model, of classifiers with 1000 classes. Launches are those of one block in bfloat16
inference, batch 8, eager PyTorch → fused and frozen, counted and not measured: models with four blocks (per stage)
minus models with two, so those of a pyramid are means over its stages with attention, and outside of blocks nothing is
counted.

The digits are scikit-learn's, enlarged: test accuracy of a small model after 2, 4 and {EPOCHS} epochs on 1,437 images
without augmentation, the mean of {SEEDS} seeds, and their range after the last epoch. The training is the same for all
(AdamW, peak rate 0.002, batch 32). Nothing was tuned, so these figures say how fast a design learns from little data,
not how good it is: with its own recipe a ViT reaches {facts()["digits"]} ([train](train.md)). With 360
test images, the standard error of one run is 0.8 points at 97.5 % and 2.6 at 50 %; seeds differ by more than that.

{_table(*numbers)}

{len(rows)} of the {len(SYSTEMS)} systems have every column that applies to them. Missing: {missing or "none"}.
`python -m benchmarks.survey --missing` fills in those that are built.

![Mean test accuracy against the number of parameters, with the range of the seeds](images/survey.png)

Source: `benchmarks/results/survey.json`, {" to ".join(sorted({dates[0], dates[-1]}))}, one core.
"""


REPORTED = "What the papers report, and what this package shows"
GENERATED = "Written by `python docs/generate.py` from {}."
PAGES = dict(
    ways=ways,
    coverage=coverage,
    official=official,
    towers=towers,
    memory=memory,
    models=models,
    kernels=kernels,
    api=api,
)
PAGES |= dict(faults=faults, fashion_mnist=fashion_mnist, recompiles=recompiles)
WRITTEN = dict(claims=claims, survey=survey)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Fills in the placeholders of a page."""
    for name, text in PAGES.items():
        if "{{ " + name + " }}" in markdown:
            markdown = markdown.replace("{{ " + name + " }}", text())
    return markdown


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the images."""
    from mkdocs.structure.files import File

    for path in RESULTS.glob("*.png"):
        files.append(File.generated(config, f"images/{path.name}", abs_src_path=str(path)))
    return files


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # for benchmarks
    for name, text in WRITTEN.items():
        (ROOT / "docs" / f"{name}.md").write_text(text(), encoding="utf-8")
