"""An mkdocs hook: replaces `{{ name }}` on a page by the text of PAGES[name], generated from code and results.

Images of benchmarks/results are added to the site under images/.
"""

import ast
import json
from pathlib import Path

import torch
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

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


def coverage() -> str:
    """How much of other packages' models `optimize` fuses."""
    return (RESULTS / "coverage.md").read_text(encoding="utf-8")


def towers() -> str:
    """How much of the vision towers of transformers and timm `optimize` fuses."""
    return (RESULTS / "coverage-towers.md").read_text(encoding="utf-8")


PAGES = dict(ways=ways, coverage=coverage, towers=towers, memory=memory, models=models, kernels=kernels, api=api)
PAGES |= dict(faults=faults, fashion_mnist=fashion_mnist)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Fills in the placeholders of a page."""
    for name, text in PAGES.items():
        if "{{ " + name + " }}" in markdown:
            markdown = markdown.replace("{{ " + name + " }}", text())
    return markdown


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the images."""
    for path in RESULTS.glob("*.png"):
        files.append(File.generated(config, f"images/{path.name}", abs_src_path=str(path)))
    return files
