"""What `optimize` gives models of other authors: README's picture, and a table of rows measured on a GPU alone.

Each model is shown in inference and in training, with the rows of the largest batch: of the whole model if there are
any, else of two of its blocks. Float32 weights train under autocast; in inference all is bfloat16. A model that
torch.compile runs faster is shown, too.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from fastvit_triton.expected.gpus import devices

from .lines import AUTOTUNED, MODELS
from .result_file import table as markdown
from .rows import is_result

# arm of a row → what it is called here
ARMS = {
    "eager": "eager",
    "torch.compile": "torch.compile",
    f"torch.compile {AUTOTUNED}": "max-autotune",
    "optimize": "optimize",
}
RIVALS = ("torch.compile", "max-autotune")
UNKEYED = {"timm": "eager", "optimized by us": "optimize"}  # arms of rows without keys, which have another baseline
TITLES = {name: title for title, (name, _) in MODELS.items()} | {"vit_tiny_patch16_224": "ViT-Ti"}


class Measured(NamedTuple):
    """A model in inference or training."""

    model: str  # its usual name
    name: str | None  # timm's; None if timm does not have the model
    training: bool  # forward and backward pass, if the whole model is measured also the optimiser
    whole: bool  # the model, not two of its blocks
    batch: int  # number of images
    us: dict[str, float]  # arm → microseconds
    speed: dict[str, tuple[float, list[float] | None]]  # arm → (speed relative to eager, quartiles or None)
    peak: dict[str, int]  # arm → peak bytes
    flops: float | None  # of the products of the forward pass; None if not counted
    facts: dict[str, Any]  # a row of the group, for provenance

    @property
    def title(self) -> str:
        """Model, phase and batch."""
        what = f"{'' if self.whole else 'two blocks of '}{self.model}"
        return f"{what}, {'training' if self.training else 'inference'}, {self.batch} images"

    @property
    def rival(self) -> str:
        """The fastest arm that is not ours."""
        return max((arm for arm in self.speed if arm != "optimize"), key=lambda arm: self.speed[arm][0])

    @property
    def gain(self) -> float:
        """Speed of `optimize` relative to the rival."""
        return self.speed["optimize"][0] / self.speed[self.rival][0]

    @property
    def images(self) -> float:
        """Images per second with `optimize`."""
        return self.batch / self.us["optimize"] * 1e6

    @property
    def utilisation(self) -> float | None:
        """Share of the GPU's bfloat16 peak that the products reach with `optimize`, in training three times as many."""
        if self.flops is None or self.gpu is None:
            return None
        return self.flops * (3 if self.training else 1) / self.us["optimize"] / 1e6 / devices()[self.gpu].tflops

    @property
    def gpu(self) -> str | None:
        """Short name of the GPU, if its rates are known."""
        return next((key for key, device in devices().items() if self.facts["gpu"].endswith(device.name)), None)


def models(rows: Iterable[dict]) -> list[Measured]:
    """The models of all GPUs; later rows replace earlier ones."""
    groups: dict[tuple, dict[str, dict]] = defaultdict(dict)
    for row in rows:
        arm = ARMS.get(row.get("arm", "")) if "kernels" in row else UNKEYED.get(row.get("arm", ""))
        if arm and is_result(row) and row.get("match") and row.get("us") and "model" in row and _is_shown(row):
            groups[row["gpu"], row["case"], row["phase"], "kernels" in row][arm] = row
    found = [_measured(arms) for arms in groups.values() if {"eager", "optimize"} <= arms.keys()]
    found.sort(key=lambda one: (one.whole, "kernels" in one.facts, one.batch))
    return list({(one.facts["gpu"], one.model, one.training): one for one in found}.values())


def measured(rows: Iterable[dict]) -> list[Measured]:
    """The models of the GPU that has most of them, the largest gain first."""
    found = models(rows)
    gpus = [one.facts["gpu"] for one in found]
    shown = max(gpus, key=gpus.count, default="")
    return sorted((one for one in found if one.facts["gpu"] == shown), key=lambda one: -one.gain)


def _is_shown(row: dict) -> bool:
    """True for throughput in the usual precision of its phase."""
    if "kernels" not in row:
        return not row["options"]
    return not row["case"].endswith("latency") and row["autocast"] == (row["phase"] != "forward")


def _measured(arms: dict[str, dict]) -> Measured:
    row = arms["optimize"]
    keyed, training = "kernels" in row, row["phase"] != "forward"
    us = {arm: each["us"] for arm, each in arms.items()}
    base = us["eager"]  # arms without keys were timed in turns with each other, the others with the baseline
    return Measured(
        row["model"] if keyed else TITLES.get(row["model"], row["model"]),
        MODELS[row["model"]][0] if keyed else row["model"],
        training,
        row.get("whole", True),
        row["batch"],
        us,
        {a: (r["speedup"], r["speedup_quartiles"]) if keyed else (base / r["us"], None) for a, r in arms.items()},
        {arm: each["peak_bytes"] for arm, each in arms.items()},
        row.get("flops"),
        row,
    )


def table(rows: Iterable[dict]) -> str:
    """Table of speeds relative to eager PyTorch with quartiles, memory, images per second and use of the GPU's peak."""
    found = measured(rows)
    if not found:
        return ""
    arms = [arm for arm in (*RIVALS, "optimize") if any(arm in one.speed for one in found)]
    head = [f"{found[0].facts['gpu'].removeprefix('NVIDIA ')}, bfloat16", "eager, ms", *arms]
    lines = []
    for one in found:
        cells = [one.title, f"{one.us['eager'] / 1e3:.3g}", *(_speed(one.speed.get(arm)) for arm in arms)]
        cells += [f"{one.peak['optimize'] / one.peak['eager']:.2f}", f"{one.images:.0f}"]
        lines.append([*cells, "" if one.utilisation is None else f"{one.utilisation:.0%}"])
    facts = dict.fromkeys(f"{name} {one.facts[name]}" for one in found for name in ("torch", "triton"))
    runs = dict.fromkeys(f"{one.facts['date']} (commit {one.facts['commit']})" for one in found)
    said = f"{found[0].facts['gpu']}, {', '.join(facts)}; measured on {', '.join(runs)}."
    return markdown([*head, "memory of optimize", "images/s", "of the peak"], lines, "lr", said)


def _speed(pair: tuple[float, list[float] | None] | None) -> str:
    if pair is None:
        return ""
    speed, quartiles = pair
    return f"{speed:.2f}" + (f" ({quartiles[0]:.2f} to {quartiles[1]:.2f})" if quartiles else "")


class Bars(NamedTuple):
    """Speeds of a model in one phase, relative to eager PyTorch."""

    title: str  # model, phase if it trains, and number of images
    measured: bool  # False if they are predicted
    compiled: float | None  # of the fastest mode of torch.compile; None if it was not measured
    optimized: float  # of `optimize`

    @property
    def speeds(self) -> dict[str, float]:
        """Those that are known, by the names of `LOOKS`."""
        known = {"fastest torch.compile": self.compiled, "optimize(model)": self.optimized}
        return {name: speed for name, speed in known.items() if speed is not None}


LOOKS = {"fastest torch.compile": "#8d8d8d", "optimize(model)": "#4c72b0"}  # name → colour


def bars(rows: Iterable[dict], predicted: Iterable[dict]) -> list[Bars]:
    """What was measured on the GPU that has most models, then what is predicted for it, the largest gain first.

    Of the predicted rows, of `benchmarks.gains`, the first one of a model in a phase is shown.
    """
    found = measured(rows)
    shown, expected = [], {}
    for one in found:
        compiled = [speed for arm, (speed, _) in one.speed.items() if arm in RIVALS]
        title = one.title.replace(", inference", "")
        shown.append(Bars(title, True, max(compiled, default=None), one.speed["optimize"][0]))
    for row in predicted:
        key = row["model"], row["phase"]
        if found and row["gpu"] == found[0].gpu and key not in expected:
            what = row["model"].replace("/16", "") + (", training" if row["phase"] == "training" else "")
            ms = [row[name] for name in ("compile_ms", "autotune_ms") if name in row]
            speeds = row["eager_ms"] / min(ms), row["eager_ms"] / row["ours_ms"]
            expected[key] = Bars(f"{what}, {row['batch']} images", False, *speeds)
    return shown + sorted(expected.values(), key=lambda one: -one.optimized)


def described(found: Iterable[Bars]) -> str:
    """The numbers of the picture in words, for those who do not see it."""
    parts = {True: [], False: []}
    for one in found:
        parts[one.measured].append(f"{one.title}: {' and '.join(f'{speed:.2f}' for speed in one.speeds.values())}")
    return (
        f"Speed relative to eager PyTorch. Measured, optimize(model): {'; '.join(parts[True])}. "
        f"Predicted, fastest torch.compile and optimize(model): {'; '.join(parts[False])}"
    )


def draw(found: list[Bars], title: str, axis: Any) -> None:
    """Draws a bar from 0 for each speed, solid if measured, hatched if predicted; a line is eager PyTorch."""
    from matplotlib.patches import Patch

    ticks, y, kind = [], 0.0, None
    for one in found:
        if one.measured != kind:
            kind, y = one.measured, y + 0.4
            axis.text(0, y, "measured" if kind else "predicted for this version", fontsize=8, style="italic")
            y += 0.4
        ticks.append(y + 0.2 * (len(one.speeds) - 1))
        for name, speed in one.speeds.items():
            fill = dict(color=LOOKS[name]) if one.measured else dict(fill=False, edgecolor=LOOKS[name], hatch="//////")
            axis.barh(y, speed, 0.36, linewidth=0.8, **fill)
            axis.text(speed, y, f" {speed:.2f}", va="center", fontsize=8)
            y += 0.4
        y += 0.3
    axis.axvline(1, color="black", linewidth=0.8)
    legend = [Patch(color=color, label=name) for name, color in LOOKS.items()]
    axis.legend(handles=legend, fontsize=8, frameon=False, loc="lower right")
    axis.set_ylim(y, 0)
    axis.set_yticks(ticks, [one.title for one in found], fontsize=8)
    axis.tick_params(length=0, labelsize=8)
    axis.set_xlim(0)
    axis.set_xlabel("speed; eager PyTorch is 1, the line", fontsize=8)
    axis.spines[:].set_visible(False)
    axis.spines["bottom"].set_visible(True)
    axis.set_title(title, fontsize=9, loc="left")
