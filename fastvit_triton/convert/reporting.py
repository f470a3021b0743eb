"""Reports of `optimize` and the compile backend, as data and as a table."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One candidate: a module, or a call in a compiled graph.

    Attributes:
        path: path in the model of the module, or of the module that makes the call; "" for the model itself.
        type: the module's class, or the function that is called, such as "layer_norm".
        became: what replaces it; None if it is unchanged.
        within: path of the innermost fused module that contains it, or None.
        why: why it is unchanged, or when its original code runs; or None.
        bare: True for a LayerNorm that is not folded: our kernel replaces PyTorch's without saving a launch.
    """

    path: str
    type: str
    became: str | None = None
    within: str | None = None
    why: str | None = None
    bare: bool = False


@dataclass(frozen=True)
class Report:
    """All candidates in the order of `model.named_modules()`, or of their calls; prints as a table.

    Attributes:
        rows: one for each candidate.
        device: why the kernels do not run on the parameters' device; None if they do.
        unfused: what runs for unchanged candidates.
    """

    rows: tuple[Row, ...] = ()
    device: str | None = None
    unfused: str = "own forward"

    @property
    def fused(self) -> tuple[Row, ...]:
        """Candidates that run fused."""
        return tuple(row for row in self.rows if row.became is not None and not row.bare)

    @property
    def norms(self) -> tuple[Row, ...]:
        """Norms that run our kernel as separate launches; a LayerNorm saves none by that."""
        return tuple(row for row in self.rows if row.bare)

    @property
    def left(self) -> tuple[Row, ...]:
        """Candidates that are unchanged."""
        return tuple(row for row in self.rows if row.became is None)

    def __str__(self) -> str:
        """The table; modules whose paths differ only in numbers share a line, with a count."""
        lines: dict[tuple[str, ...], int] = {}
        for row in self.rows:
            inside = "" if row.within is None else f" (inside {_numbered(row.within) or 'the model'})"
            note = " · ".join(t for t in (row.became or self.unfused, row.why) if t is not None)
            key = _numbered(row.path) or "(model)", row.type, note + inside
            lines[key] = lines.get(key, 0) + 1
        table = [("module", "type", "runs"), *((f"{p} ×{n}" if n > 1 else p, t, r) for (p, t, r), n in lines.items())]
        wide = [max(len(line[i]) for line in table) for i in (0, 1)]
        text = [f"{path:<{wide[0]}}  {name:<{wide[1]}}  {runs}".rstrip() for path, name, runs in table]
        text = text if lines else ["no candidates found"]
        total = f"{len(self.fused)} of {len(self.fused) + len(self.left)} candidates are fused"
        several = f"{len(self.norms)} norms run our kernel, each" if len(self.norms) > 1 else "1 norm runs our kernel"
        total += f"; {several} in a launch of its own" if self.norms else ""
        return "\n".join([*text, f"{total}. {self.device}; {self.unfused}s run here." if self.device else f"{total}."])


def _numbered(path: str) -> str:
    """The path with each number replaced by *, which groups the blocks of a model."""
    return re.sub(r"(?<![^._])\d+(?![^._])", "*", path)
