"""What `optimize` gives models of other authors: README's picture and a table, of rows measured on a GPU alone.

Each model is shown in inference and in training, with the rows of the largest batch: of the whole model if there are
any, else of two of its blocks. Float32 weights train under autocast; in inference all is bfloat16. A model that
torch.compile runs faster is shown, too.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from fastvit_triton.expected.gpus import devices

from .lines import AUTOTUNED, MODELS
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
    """A model in inference or training.

    Attributes:
        model: its usual name.
        name: timm's; None if timm does not have the model.
        training: forward and backward pass, if the whole model is measured also the optimiser.
        whole: the model, not two of its blocks.
        batch: number of images.
        us: arm → microseconds.
        speed: arm → (speed relative to eager, quartiles or None).
        peak: arm → peak bytes.
        flops: of the products of the forward pass; None if not counted.
        facts: a row of the group, for provenance.
    """

    model: str
    name: str | None
    training: bool
    whole: bool
    batch: int
    us: dict[str, float]
    speed: dict[str, tuple[float, list[float] | None]]
    peak: dict[str, int]
    flops: float | None
    facts: dict[str, Any]

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
    heads = [f"{found[0].facts['gpu'].removeprefix('NVIDIA ')}, bfloat16", "eager, ms", *arms]
    lines = [f"| {' | '.join([*heads, 'memory of optimize', 'images/s', 'of the peak'])} |"]
    lines.append("|---" + "|--:" * (len(arms) + 4) + "|")
    for one in found:
        cells = [one.title, f"{one.us['eager'] / 1e3:.3g}", *(_speed(one.speed.get(arm)) for arm in arms)]
        cells += [f"{one.peak['optimize'] / one.peak['eager']:.2f}", f"{one.images:.0f}"]
        cells.append("" if one.utilisation is None else f"{one.utilisation:.0%}")
        lines.append(f"| {' | '.join(cells)} |")
    facts = {f"{name} {one.facts[name]}": None for one in found for name in ("torch", "triton")}
    runs = {f"{one.facts['date']} (commit {one.facts['commit']})": None for one in found}
    return "\n".join([*lines, "", f"{found[0].facts['gpu']}, {', '.join(facts)}; measured on {', '.join(runs)}."])


def _speed(pair: tuple[float, list[float] | None] | None) -> str:
    if pair is None:
        return ""
    speed, quartiles = pair
    return f"{speed:.2f}" + (f" ({quartiles[0]:.2f} to {quartiles[1]:.2f})" if quartiles else "")


def draw(rows: Iterable[dict], speeds: Any, memory: Any) -> bool:
    """Draws bars on two axes, speed and memory relative to eager PyTorch; False without rows."""
    found = measured(rows)
    rivals = any(one.rival in RIVALS for one in found)
    for y, one in enumerate(found):
        bars = {"optimize": ("optimize(model)", "#4c72b0" if one.gain >= 1 else "#c44e52")}
        if rivals and one.rival in RIVALS:
            bars = {one.rival: ("the faster of torch.compile's modes", "#8d8d8d")} | bars
        for i, (arm, (label, color)) in enumerate(bars.items()):
            at = y + 0.4 * i - 0.2 * (len(bars) - 1)
            values = one.speed[arm][0], one.peak[arm] / one.peak["eager"]
            for axis, value in zip((speeds, memory), values, strict=True):
                axis.barh(at, value, 0.38, color=color, label=label)
                axis.text(value, at, f" {value:.2f}", va="center", fontsize=8)
    for axis, what in ((speeds, "speed, more is better"), (memory, "peak memory, less is better")):
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_ylim(len(found) - 0.4, -0.6)
        axis.set_xlim(0, 1.2 * max([axis.get_xlim()[1] / 1.05, 1]))
        axis.set_xlabel(f"{what} (eager PyTorch = 1)", fontsize=8)
        axis.tick_params(labelsize=8)
    speeds.set_yticks(range(len(found)), [one.title for one in found], fontsize=8)
    memory.set_yticks([])
    if rivals:
        handles, labels = speeds.get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        speeds.legend(unique.values(), unique.keys(), fontsize=7)
    if found:
        gpu = found[0].facts["gpu"]
        speeds.figure.suptitle(f"optimize(model), models of timm, {gpu}, bfloat16, measured", fontsize=9)
    return bool(found)
