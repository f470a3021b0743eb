"""Writes pages of docs/ that are generated from code and results.

    python docs/generate.py

writes what is in the repository: claims.md (from claims.txt, reported.txt and results), survey.md (from
benchmarks/survey_systems.txt and results), and in other pages the tables of TABLES, each between
`<!-- table: name -->` and `<!-- end -->`.

    python docs/generate.py --site

fills build/pages, from which the site is built: the pages of docs/, whose links to long tables are replaced by those of
LINKED, one page of API for each task under api/, and the images of benchmarks/results under images/.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import shutil
import sys
from collections.abc import Collection
from pathlib import Path

import torch

from fastvit_triton.files import replacing

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

BLOCK = re.compile(r"<!-- table: (\w+) -->\n(.*?)\n<!-- end -->", re.DOTALL)
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
    """Values that a block saves per token for its backward pass, from the equations of expected/blocks.py."""
    from fastvit_triton.expected.blocks import saved_values
    from fastvit_triton.kernels.sizes import Branch

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


def saved() -> str:
    """Memory that a block saves in eager PyTorch, torch.compile and ours, from results/saved.json."""
    lines = [["model", "eager PyTorch, MiB a block", "torch.compile", "ours", "of eager", "of torch.compile"]]
    for row in json.loads((RESULTS / "saved.json").read_text())["rows"]:
        eager, compiled, ours = (row[key] / 2**20 for key in ("eager", "compile", "ours"))
        numbers = [f"{eager:.0f}", f"{compiled:.0f}", f"{ours:.0f}", f"{ours / eager:.2f}", f"{ours / compiled:.2f}"]
        lines.append([row["model"], *numbers])
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


def task(name: str) -> dict[str, list[tuple[str, str]]]:
    """The names of a task's page of API, as (name, module that defines it), by heading.

    Raises:
        KeyError: API names what is not public, or PARTS a module that is not imported.
    """
    if name not in API:
        module = importlib.import_module(f"fastvit_triton.{name}")
        found: dict[str, list[tuple[str, str]]] = {}
        for path, names in imported(Path(module.__file__), module.__name__).items():
            listed = [(word, path) for word in names if word in module.__all__]
            found.setdefault(path.removeprefix(f"{module.__name__}.").split(".")[0], []).extend(listed)
        return {head: [n for part in parts.split() for n in found.pop(part)] for head, parts in PARTS[name].items()}
    where = {
        n: path for path, ns in imported(ROOT / "fastvit_triton/__init__.pyi", "fastvit_triton").items() for n in ns
    }
    late = {"optimize": "conversion", "revert": "conversion", "report": "backend"}  # convert imports them on first use
    where |= {n: f"fastvit_triton.convert.{module}" for n, module in late.items()}
    return {heading: [(n, where[n]) for n in names.split()] for heading, names in API[name].items()}


def imported(path: Path, package: str) -> dict[str, list[str]]:
    """The names that a file of a package imports from its modules, by module."""
    found: dict[str, list[str]] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            found.setdefault(f"{package}.{node.module}", []).extend(alias.name for alias in node.names)
    return found


def api_page(name: str) -> str:
    """The page of API of a task: a mkdocstrings entry for each name."""
    title, package = TASKS[name]
    lines = [f"# {title}", f"Imported from `{package}`."]
    for heading, names in task(name).items():
        lines.append(f"## {heading}")
        lines += [f"::: {module}.{n}" for n, module in names]
    return "\n\n".join(lines)


def api() -> str:
    """A table for each task: its public names, linked to their entries, with the first lines of their docstrings."""
    parts = []
    for name, (title, package) in TASKS.items():
        rows = [["name", "what it is"]]
        for n, module in (pair for names in task(name).values() for pair in names):
            value = getattr(importlib.import_module(module), n)
            is_code = inspect.isclass(value) or callable(value)
            text = (inspect.getdoc(value) or "").partition("\n")[0] if is_code else type(value).__name__
            rows.append([f"[`{n}`](api/{name}.md#{module}.{n})", text.replace("|", "\\|")])
        parts.append(f"## {title}\n\nImported from `{package}`.\n\n{_table(*rows)}")
    return "\n\n".join(parts)


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
    from benchmarks.trainings import compared, rows_of

    runs = rows_of("fashion-mnist")
    found, seeds = compared(runs), sorted({row["seed"] for row in runs})
    rows = []
    for name in ("fastvit_triton", "timm"):
        spread = f"{100 * found[name]['mean']:.2f} ± {100 * found[name]['deviation']:.2f} %"
        rows.append([name, *(f"{100 * row['accuracy']:.2f} %" for row in runs if row["name"] == name), spread])
    table = _table(["test accuracy", *(f"seed {seed}" for seed in seeds), "mean and standard deviation"], *rows)
    apart = f"The means differ by {100 * abs(found['difference']):.2f} points, their standard error is"
    seconds = sum(row["core_seconds"] for row in runs) / len(runs)
    text = f"{apart} {100 * found['standard_error']:.2f}. A run takes {seconds / 60:.1f} minutes of one core."
    return f"{table}\n\n{text} Source: `benchmarks/results/trainings.json`, {runs[-1]['date']}."


def official() -> str:
    """What `optimize` captures of official code."""
    return (RESULTS / "coverage-official.md").read_text(encoding="utf-8")


def capture() -> str:
    """What readers gain over captured blocks."""
    return (RESULTS / "coverage-capture.md").read_text(encoding="utf-8")


def coverage() -> str:
    """How much of other packages' models `optimize` fuses."""
    return (RESULTS / "coverage.md").read_text(encoding="utf-8")


def detection() -> str:
    """What `optimize` with an example fuses of detectors, and their launches and bytes."""
    return (RESULTS / "coverage-detection.md").read_text(encoding="utf-8")


def towers() -> str:
    """How much of the vision towers of transformers and timm `optimize` fuses."""
    return (RESULTS / "coverage-towers.md").read_text(encoding="utf-8")


def choices() -> str:
    """What the tables of choices lose against the times they are made from."""
    return (RESULTS / "choices.md").read_text(encoding="utf-8")


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
    from benchmarks.trainings import compared, rows_of

    (seeds,) = (row for row in rows_of("learn") if row["name"] == "vit seeds")
    fashion = compared(rows_of("fashion-mnist"))
    systems = {row["system"]: row for row in json.loads((RESULTS / "survey.json").read_text())["rows"]}
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
            page = "detect" if "detr" in row["model"] else "pixels"
            found = [f"[another task]({page}.md)", *["–"] * 4]
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
counted; of detectors a block is a layer of the encoder.

The digits are scikit-learn's, enlarged: test accuracy of a small model after 2, 4 and {EPOCHS} epochs on 1,437 images
without augmentation, the mean of {SEEDS} seeds, and their range after the last epoch. The training is the same for all
(AdamW, peak rate 0.002, batch 32). Nothing was tuned, so these figures say how fast a design learns from little data,
not how good it is: with its own recipe a ViT reaches {facts()["digits"]} ([train](train.md)). With 360
test images, the standard error of one run is 0.8 points at 97.5 % and 2.6 at 50 %; seeds differ by more than that.

{_table(*numbers)}

{len(rows)} of the {len(SYSTEMS)} systems have every column that applies to them. Missing: {missing or "none"}.
`python -m benchmarks.survey --missing` fills in those that are built.

![Mean test accuracy against the number of parameters, with the range of the seeds](../benchmarks/results/survey.png)

Source: `benchmarks/results/survey.json`, {" to ".join(sorted({dates[0], dates[-1]}))}, one core.
"""


# Task → title and package of its page of API.
TASKS = {
    "optimize": ("Optimize a model", "fastvit_triton"),
    "models": ("Create and load models", "fastvit_triton"),
    "deploy": ("Deploy", "fastvit_triton"),
    "kernels": ("Kernels", "fastvit_triton"),
    "train": ("Train", "fastvit_triton.train"),
    "explain": ("Explain", "fastvit_triton.explain"),
}
# Task → heading → public names of fastvit_triton.
API = {
    "optimize": {
        "Convert": "optimize revert report",
        "Choose how it runs": "tune backend set_backend using_backend",
        "Freeze weights": "freeze unfreeze",
    },
    "models": {
        "Create": "create_model list_models ViTConfig",
        "Load and save": "load_model load_weights save_weights",
        "Images": "predict transforms read_image data_config",
    },
    "deploy": {"CUDA graphs": "cuda_graph cuda_graph_packed cuda_graph_step warmup", "Export": "export_model"},
    "kernels": {
        "Attention": "attention attention_qkv varlen_attention window_attention deformable_attention",
        "Linear layers": "linear mlp patch_embed fold depthwise",
        "Norms": "layer_norm add_layer_norm rms_norm add_rms_norm batch_norm_act",
    },
}
# Task → heading → modules of its package, of whose names those in `__all__` are listed.
PARTS = {
    "train": {
        "Loop": "loop step run stopping trainer settings",
        "Recipes": "recipes",
        "Data": "data sources",
        "Augmentation": "augment",
        "Losses and objectives": "loss objective",
        "Optimisers, schedules, averages": "optim muon schedule ema",
        "Stochastic depth": "drop_path",
        "States of training": "checkpoint",
        "Several GPUs": "distributed",
        "Masked pre-training": "masked",
        "Features and few images": "fewshot",
    },
    "explain": {
        "Capture": "recording layer",
        "Attention maps": "maps",
        "Contributions of patches": "gradients",
        "Queries of detectors": "queries",
        "Tokens, positions, filters": "tokens",
        "Costs": "costs",
        "Report": "report page",
    },
}
REPORTED = "What the papers report, and what this package shows"
GENERATED = "Written by `python docs/generate.py` from {}."
# Tables in pages of the repository, and those that are too long for it, to which a page has a link.
TABLES = dict(
    ways=ways,
    memory=memory,
    saved=saved,
    choices=choices,
    faults=faults,
    fashion_mnist=fashion_mnist,
    recompiles=recompiles,
)
LINKED = dict(
    coverage=coverage,
    official=official,
    capture=capture,
    towers=towers,
    detection=detection,
    models=models,
    kernels=kernels,
    api=api,
)
WRITTEN = dict(claims=claims, survey=survey)


def filled(markdown: str, tables: Collection[str]) -> str:
    """A page in which the blocks of these names hold their tables.

    Raises:
        KeyError: a block has no known name.
    """

    def block(found: re.Match) -> str:
        name, held = found.groups()
        table = (TABLES | LINKED)[name]
        return f"<!-- table: {name} -->\n{table() if name in tables else held}\n<!-- end -->"

    return BLOCK.sub(block, markdown)


def pages() -> dict[Path, str]:
    """The pages of docs/ that are written here, as they should be."""
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")}
    found = {path: filled(text, TABLES) for path, text in texts.items() if BLOCK.search(text)}
    return found | {ROOT / "docs" / f"{name}.md": text() for name, text in WRITTEN.items()}


def of_site(markdown: str) -> str:
    """A page as the site has it: with all tables, and with images that lie beside it."""
    markdown = re.sub(r"\]\(((?:\.\./)*)\.\./benchmarks/results/([^)/]+\.(?:png|jpg))\)", r"](\1images/\2)", markdown)
    return filled(markdown, LINKED)


def write_site(folder: Path) -> None:
    """Fills a folder with what the site is built from; what it held before is removed."""
    shutil.rmtree(folder, ignore_errors=True)
    texts = {path.relative_to(ROOT / "docs"): path for path in (ROOT / "docs").rglob("*.md")}
    written = {name: of_site(path.read_text(encoding="utf-8")) for name, path in texts.items()}
    written |= {Path("api") / f"{name}.md": api_page(name) for name in TASKS}
    for name, text in written.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "images").mkdir()
    for path in [*RESULTS.glob("*.png"), *RESULTS.glob("*.jpg")]:
        shutil.copy(path, folder / "images")
    for path in (ROOT / "docs").glob("*.css"):
        shutil.copy(path, folder)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # for benchmarks
    if sys.argv[1:] == ["--site"]:
        write_site(ROOT / "build" / "pages")
    else:
        for path, text in pages().items():
            with replacing(path) as temporary:
                temporary.write_text(text, encoding="utf-8")
