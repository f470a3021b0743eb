"""Result files as tables: the compile report, for the terminal and as markdown, and what `optimize` covers."""

from rich.table import Table

from .sass import GPUS


def operation_table(result: dict, arch: str) -> Table:
    """Predicted microseconds of operations on one GPU: the bound of the busiest pipe, and the expected time."""
    names = ("case", "op", "phase", "dtype", "bound µs", "expected µs", "floor µs", "bound / floor")
    table = Table(*names, title=f"{arch}, predicted")
    for row in result["operations"]:
        if row["arch"] == arch:
            times = [f"{row[name]:.1f}" for name in ("predicted_us", "expected_us", "floor_us")]
            numbers = (*times, f"{row['ratio']:.2f}")
            table.add_row(row["case"], row["op"], row["phase"], row["dtype"], *numbers)
    return table


def kernel_table(result: dict, arch: str) -> Table:
    """All launches on one GPU."""
    names = "kernel case phase dtype registers spill shared CTAs matrix pipe bound expected".split()
    table = Table(*names, title=f"{arch}, {GPUS[arch].name}")
    for row in result["rows"]:
        if row["arch"] == arch and "registers" in row:
            figures = [row[n] for n in ("registers", "spill_bytes", "shared_bytes", "ctas_per_sm")]
            numbers = [*figures, sum(row["mma"].values()), row["bound"]]
            numbers += [f"{row[name]:.1f}" for name in ("predicted_us", "expected_us")]
            table.add_row(row["kernel"], f"{row['case']} {row['op']}", row["phase"], row["dtype"], *map(str, numbers))
    return table


def violation_lines(result: dict) -> list[str]:
    """One line for each violation."""
    lines = [
        f"{r['arch']} {r['kernel']} ({r['case']} {r['op']} {r['phase']} {r['dtype']}; {r['config']}): {v}"
        for r in result["rows"]
        for v in r["violations"]
    ]
    return list(dict.fromkeys(lines))


def markdown(result: dict) -> str:
    """The report as markdown: times of operations on an H200, and resources of kernels on three GPUs."""
    lines = [
        "# Compile report",
        "",
        f"Written by `{result['command']}` on {result['date']} with triton {result['triton']}. Times are **predicted**",
        "from instruction counts; nothing here was measured. The bound is that of the busiest pipe. The expected time",
        "adds up the tensor and exp pipes of attention and limits L2's bandwidth, based on published measurements.",
        "",
        "| case | op | phase | bound µs | expected µs | floor µs | bound / floor |",
        "| --- | --- | --- | --: | --: | --: | --: |",
    ]
    for r in result["operations"]:
        if r["arch"] == "sm_90" and r["dtype"] == "bfloat16":
            times = [f"{r[name]:.1f}" for name in ("predicted_us", "expected_us", "floor_us")]
            numbers = " | ".join([*times, f"{r['ratio']:.2f}"])
            lines.append(f"| {r['case']} | {r['op']} | {r['phase']} | {numbers} |")
    lines += ["", "Registers / spilled bytes / blocks per unit, bfloat16.", ""]
    archs = [a for a in ("sm_80", "sm_90", "gfx942") if a in result["parts"]]
    lines += ["| kernel | case | " + " | ".join(archs) + " |", "| --- | --- |" + " --- |" * len(archs)]
    cells: dict[tuple, dict] = {}
    for r in result["rows"]:
        if r["dtype"] == "bfloat16" and "registers" in r:
            figures = f"{r['registers']} / {r['spill_bytes']} / {r['ctas_per_sm']}"
            key = r["kernel"], f"{r['case']} {r['op']}", r["phase"], r["config"]
            cells.setdefault(key, {}).setdefault(r["arch"], figures)
    lines += [
        f"| {k} | {case} {phase} | " + " | ".join(by_arch.get(a, "") for a in archs) + " |"
        for (k, case, phase, _), by_arch in cells.items()
    ]
    return "\n".join(lines) + "\n"


def coverage_markdown(result: dict) -> str:
    """The table of `benchmarks.coverage`, and why candidates are not fused."""
    counted = [r for r in result["rows"] if "error" not in r]
    lines = [
        f"Written by `{result['command']}` on {result['date']}: {result['note']}.",
        "Linear: share of the parameters of linear layers in fused modules. FLOPs: share of the arithmetic of",
        "GEMMs and convolutions in our kernels. Launches and GB of one call: eager PyTorch, then every module fused",
        "and frozen. Plan: the ways of branches by default on an H200, and the launches.",
        "",
        "| model | fused | linear | FLOPs | launches | GB | plan |",
        "| --- | --: | --: | --: | --: | --: | --- |",
    ]
    for r in counted:
        fused, candidates, norms = r["candidates"]
        (before, read), (after, moved) = r["eager"], r["fused"]
        plan = ", ".join(f"{n} {way}" for way, n in r["plan"].items()) or "no block"
        cells = [
            f"{fused}/{candidates}" + (f" + {norms} LayerNorm{'s' if norms > 1 else ''}" if norms else ""),
            f"{r['inside']:.0%}",
            f"{r['products']:.0%}",
            f"{before} → {after} ({before / after:.2f}×)",
            f"{read / 1e9:.2f} → {moved / 1e9:.2f} ({read / moved:.2f}×)",
            f"{plan}: {r['default'][0]}",
        ]
        lines.append(f"| {r['model']} | {' | '.join(cells)} |")
    unfused = [f"| {r['model']} | {'; '.join(f'{n} × {why}' for n, why in r['left'])} |" for r in counted if r["left"]]
    unfused += [f"| {r['model']} | {r['error']} |" for r in result["rows"] if "error" in r]
    lines += ["", "| model | not fused |", "| --- | --- |", *unfused] if unfused else []
    return "\n".join(lines) + "\n"


def towers_markdown(result: dict) -> str:
    """The table of `benchmarks.coverage towers`: how many models are covered, and each model's share and launches."""
    rows, dropped = result["rows"], result["excluded"]
    lines = [f"Written by `{result['command']}` on {result['date']}: {result['note']}.", ""]
    lines += ["| package | listed | excluded | eligible | ≥ 90 % fused |", "| --- | --: | --: | --: | --: |"]
    for package in sorted({r["model"].partition(":")[0] for r in rows}):
        mine = [r for r in rows if r["model"].startswith(f"{package}:")]
        eligible = [r for r in mine if r["model"] not in dropped]
        covered = sum(r.get("inside", 0) >= 0.9 for r in eligible)
        lines.append(f"| {package} | {len(mine)} | {len(mine) - len(eligible)} | {len(eligible)} | {covered} |")
    lines += ["", "| model | linear | launches | not fused |", "| --- | --: | --: | --- |"]
    for r in rows:
        why = r.get("error") or "; ".join(why for _, why in r.get("left", ()))
        why = f"excluded: {dropped[r['model']]}" if r["model"] in dropped else why
        launches = f"{r['eager'][0]} → {r['fused'][0]}" if "eager" in r else ""
        lines.append(f"| {r['model'].rpartition('.')[2]} | {r.get('inside', 0):.0%} | {launches} | {why} |")
    return "\n".join(lines) + "\n"


def capture_markdown(result: dict) -> str:
    """The table of `benchmarks.coverage capture`: each model with readers → with captured blocks alone."""
    lines = [
        f"Written by `{result['command']}` on {result['date']}: with readers → every block captured.",
        "Operations: share of those of linear layers and attention that run in our launches, counted from shapes.",
        "Attention: fused products. Launches: of a call of the frozen model, of two blocks. Calls: Python calls of a",
        "frozen block. Error: the largest difference of an output or gradient from the original's in float64, divided",
        "by the largest value. Seconds: CPU time of the conversion.",
        "",
        "| model | operations | attention | launches | calls | error | seconds |",
        "| --- | --: | --: | --: | --: | --: | --: |",
    ]
    for r in result["rows"]:
        if "error" in r:
            lines.append(f"| {r['model']} | {r['error']} | | | | | |")
            continue
        pair = (r["readers"], r["captured"])
        columns = [
            (f"{one['products']:.0%}" for one in pair),
            (f"{one['attention'][0]} of {one['attention'][1]}" for one in pair),
            (f"{one['launches']}" for one in pair),
            (f"{number:.0f}" for number in r["calls"]),
            (f"{one['error']:.0e}" if one["error"] else "0" for one in pair),
            (f"{one['seconds']:.1f}" for one in pair),
        ]
        lines.append(f"| {' | '.join([r['model'], *map(' → '.join, columns)])} |")
    return "\n".join(lines) + "\n"


def official_markdown(result: dict) -> str:
    """The table of `benchmarks.coverage official`: FLOPs, weights and GEMMs of attention that are fused; the errors."""
    lines = [
        f"Written by `{result['command']}` on {result['date']}.",
        "FLOPs: share of the model's that the kernels can replace; – if its calls cannot be traced. Linear: share of",
        "the weights of its linear layers in fused calls. Attention: GEMMs in them. Error: the largest difference of",
        "an output or gradient from the original's in float64, divided by the largest value, in evaluation and in",
        "training. In float32 are OpenAI's CLIP, DiT and U-ViT, and InternVL's norms of queries and keys.",
        "",
        "| repository | model | commit | FLOPs | linear | attention | error |",
        "| --- | --- | --- | --: | --: | --: | --: |",
    ]
    for r in result["rows"]:
        cells = [r["repository"], r["model"], r["commit"][:7]]
        if "error" in r:
            cells += [r["error"], "", "", ""]
        else:
            unfused = f", {len(r['attention_left'])} not" if r["attention_left"] else ""
            worst = max(r["eval"], r["train"])
            share = r["fused_weights"] / max(r["weights"], 1)
            cells += [
                "–" if r["flops"] is None else f"{r['flops']:.0%}",
                f"{share:.0%}",
                f"{r['attention']}{unfused}",
                f"{worst:.0e}" if worst else "0",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_official_speeds(result["speeds"])]) + "\n"


def _official_speeds(rows: list[dict]) -> list[str]:
    """The table of models of the usual size: predicted speeds, launches and bytes."""
    lines = [
        "At the usual size, 64 inputs in bfloat16 on an H100, blocks compiled. × torch.compile: predicted speed",
        "relative to torch.compile of the whole model, in brackets to its mode max-autotune; where that of `optimize`",
        'is below 1, "whole" is that of `torch.compile(model, backend="fastvit_triton")` if that is faster. Launches',
        "and GB: counted, of eager PyTorch, torch.compile (by a rule) and `optimize`. FLOPs: share that the kernels",
        "can replace. Training: a forward and backward pass.",
        "",
        "| repository | model | × torch.compile | launches | GB | training: × torch.compile | launches | GB | FLOPs |",
        "| --- | --- | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for r in rows:
        if "error" in r:
            lines.append(f"| {r['repository']} | {r['model']} | {r['error']} | | | | | | |")
            continue
        cells = [r["repository"], r["model"]]
        for phase in ("inference", "training"):
            _, compiled, ours, whole, *tuned = r["ms"][phase]
            speed = f"{compiled / ours:.2f}" + "".join(f" ({one / ours:.2f})" for one in tuned)
            if ours > max(compiled, 1.005 * whole):
                speed += f", whole {compiled / whole:.2f}"
            counts = r[phase][:3]
            cells += [speed, " → ".join(str(n) for n, _ in counts), " → ".join(f"{n / 1e9:.3g}" for _, n in counts)]
        cells.append("–" if r["flops"] is None else f"{r['flops']:.0%}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines
