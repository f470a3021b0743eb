"""Reports of `optimize` and the compile backend, as data and as a table."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from .flop_shares import CountedModel, Shares, enclosing

OURS = "it calls the kernels itself"  # why a module of ours is not converted
UNKNOWN = "unknown type"
VERBS = {"converted": "are converted", "fused": "run fused", "mixed": "run mixed", "plain": "run plain"}
OF_ONE = {"converted": "is converted", "fused": "runs fused", "mixed": "runs mixed", "plain": "runs plain"}
NOTHING = "has no Transformer blocks and no other module that the kernels replace"


@dataclass(frozen=True)
class Row:
    """One candidate: a module, or a call in a compiled graph.

    Attributes:
        path: path in the model of the module, or of the module that makes the call; "" for the model itself.
        type: the module's class, or the function that is called, such as "layer_norm".
        became: what replaces it; None if it is unchanged.
        within: path of the innermost fused module that contains it, or None.
        why: why it is unchanged, why it runs in its way, or when its original code runs; or None.
        bare: True for a LayerNorm that is not folded: our kernel replaces PyTorch's without saving a launch.
        way: "fused", "mixed" or "plain", where it is known for a call; else None, as each call chooses.
        other: True for a module that is no candidate but has linear layers of its own, which stay PyTorch's.
    """

    path: str
    type: str
    became: str | None = None
    within: str | None = None
    why: str | None = None
    bare: bool = False
    way: str | None = None
    other: bool = False


@dataclass(frozen=True)
class Report:
    """All candidates in the order of `model.named_modules()`, or of their calls; prints as a headline and a table.

    `text(verbose=True)` also lists norms that are converted without a share of the work.

    Attributes:
        rows: one for each candidate.
        device: why the kernels do not run on the parameters' device; None if they do.
        on_cpu: says how a model on a CPU, where oneDNN may run its products, runs now and frozen; None elsewhere.
        unfused: the way of unchanged candidates.
        compiled: the number of graphs of captured blocks that Inductor compiled, and the seconds that it took; or None.
        subject: the model, from which the shares are counted; None for a graph, whose table has no shares.
        tanh_gelu: True if inference may compute the tanh form of GELU, see `optimize`.
        verified: the number of converted modules whose outputs were compared with the originals' and kept, and their
            largest relative difference in float64; None if none were.
    """

    rows: tuple[Row, ...] = ()
    device: str | None = None
    on_cpu: Callable[[CountedModel], str] | None = field(default=None, compare=False, repr=False)
    unfused: str = "original"
    compiled: tuple[int, float] | None = None
    subject: CountedModel | None = field(default=None, compare=False, repr=False)
    tanh_gelu: bool = False
    verified: tuple[int, float] | None = None

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Raises TypeError: `optimize` works in place, and what it returns is no model."""
        raise TypeError("this is the report of optimize, which changed the model in place; call the model itself")

    @property
    def fused(self) -> tuple[Row, ...]:
        """Candidates that were converted, without norms in launches of their own; each call chooses their way."""
        return tuple(row for row in self.rows if row.became is not None and not row.bare)

    @property
    def norms(self) -> tuple[Row, ...]:
        """Norms that run our kernel as separate launches; a LayerNorm saves none by that."""
        return tuple(row for row in self.rows if row.bare)

    @property
    def left(self) -> tuple[Row, ...]:
        """Candidates that are unchanged."""
        return tuple(row for row in self.rows if row.became is None and not row.other)

    def shares(self) -> Shares | None:
        """The work of each module: FLOPs if an example was given or the model states its input size, else weights.

        FLOPs are counted on the first call, on fake tensors, and then kept (a second for the largest models); weights
        also count if FLOPs cannot be counted or the model was deleted. None for a graph.
        """
        return None if self.subject is None else self.subject.shares()

    @property
    def is_empty(self) -> bool:
        """True if the model has nothing for the kernels: no candidate, or only some of unknown types."""
        return all(row.became is None and row.why == UNKNOWN for row in self.rows)

    def headline(self) -> str:
        """One sentence: how many blocks, or else modules, are converted or run in which way, and their share."""
        if self.is_empty:
            return f"The model {NOTHING}." if self.subject else "The graph has no call that the kernels replace."
        if all(row.why == OURS for row in self.rows):
            return "The model calls the kernels itself; nothing needs to be converted."
        ours = sum(row.why == OURS for row in self.rows)
        fuse = f"fuse{'s' * (ours == 1)}"
        more = f" {_several(ours, 'module')} of this package {fuse} without conversion." if ours else ""
        noun, counted = self.counted()
        if ours and not counted:
            return more.strip()
        numbers = Counter(_way(row) for row in counted if row.became is not None)
        if not numbers:
            return f"0 of {_several(len(counted), noun)} are converted.{more}"
        parts: list[str] = []
        for way in (way for way in VERBS if way in numbers):
            of = "" if parts else f" of {_several(len(counted), noun)}"
            verb = (OF_ONE if numbers[way] == 1 else VERBS)[way]
            parts.append(f"{numbers[way]}{of} {verb}{self._share(way, counted)}")
        return f"{'; '.join(parts)}.{more}"

    def counted(self) -> tuple[str, list[Row]]:
        """("block", "module" or "call", those that the headline counts): blocks, or outer modules if none converts."""
        blocks = [row for row in self.rows if _is_block(row) and row.why != OURS]
        if any(row.became for row in blocks):
            return "call" if self.subject is None else "block", blocks
        outer = [row for row in self.rows if not (row.within is not None or "Norm" in row.type or row.other)]
        return "call" if self.subject is None else "module", [row for row in outer if row.why != OURS]

    def __str__(self) -> str:
        """`text()`."""
        return self.text()

    def text(self, verbose: bool = False) -> str:
        """The headline and the table; modules whose paths differ only in numbers share a line, with a count.

        Lines of modules inside a converted one are indented; their shares are parts of its share.
        """
        if self.is_empty or all(row.why == OURS for row in self.rows):
            return "\n".join(filter(None, (self.headline(), self._here())))
        shares = self.shares()
        norms = [] if verbose or shares is None else [row for row in self.rows if self._is_silent_norm(row)]
        lines = dict[tuple[str, ...], list[Row]]()
        depths: dict[str, int] = {}
        for row in self.rows:
            depths[row.path] = 0 if row.within is None else depths.get(row.within, 0) + 1
            path = "  " * depths[row.path] + (_numbered(row.path) or "(model)")
            if row in norms:
                continue
            reason = " · ".join(t for t in (_kind(row), row.why) if t)
            lines.setdefault((path, row.type, self._shown(row), reason), []).append(row)
        table = [("module", "way", *([f"share of {shares.of}"] if shares else []), "reason")]
        for (path, name, way, reason), rows in lines.items():
            number = f" ×{len(rows)}" if len(rows) > 1 else ""
            share = [_percent(sum(self._part(row) for row in rows))] if shares else []
            table.append((f"{path}{number} ({name})", way, *share, reason))
        if norms:
            ways = ", ".join(dict.fromkeys(map(self._shown, norms)))
            bare = sum(row.bare for row in norms)
            alone = f"{bare} in {'a launch of its own' if bare == 1 else 'launches of their own'} · " if bare else ""
            table.append((_several(len(norms), "norm"), ways, "", f"{alone}report.text(verbose=True) lists them"))
        wide = [max(len(line[i]) for line in table) for i in range(len(table[0]) - 1)]
        aligned = [[*map(str.ljust, line[:2], wide), *map(str.rjust, line[2:-1], wide[2:]), line[-1]] for line in table]
        head = " ".join(t for t in (self.headline(), self._verifying(), self._compiling()) if t)
        return "\n".join([*filter(None, (head, self._here())), "", *("  ".join(line).rstrip() for line in aligned)])

    def _verifying(self) -> str:
        if self.verified is None:
            return ""
        number, error = self.verified
        difference = f"within {error:.0e} of" if error else "equal to"
        return f"Verified in float64: the outputs of {_several(number, 'module')} are {difference} the original's."

    def _compiling(self) -> str:
        """How long Inductor compiled captured blocks, which is said as it makes the first call slow."""
        if self.compiled is None:
            return ""
        number, seconds = self.compiled
        graphs = f"{_several(number, 'graph')} of captured blocks took {seconds:.0f} s to compile"
        return f"{graphs}; other dtypes and modes, such as training, are compiled in their first call."

    def _here(self) -> str:
        """What the headline's "converted" means for the calls to come."""
        later = (row for row in self.rows if (row.became is not None or row.why == OURS) and row.way is None)
        if self.subject is None or not any(later):
            return ""
        if self.on_cpu is not None:
            return self.on_cpu(self.subject)
        if self.device is not None:
            return f"{self.device}, so the original code runs."
        gelu = "; GELU may be its tanh form, ten times or more below bfloat16's rounding" if self.tanh_gelu else ""
        return f"Each call chooses how they run: fused, mixed or plain; `fastvit-triton doctor` predicts which{gelu}."

    def _shown(self, row: Row) -> str:
        """The way of a row in the table."""
        if row.became is None:
            return "ours" if row.why == OURS else self.unfused
        shares = self.shares()
        if shares is not None and row.way is None and self._part(row) < shares.share(row.path) * (1 - 1e-9):
            return "in part"
        return "own kernel" if row.bare and row.way == "fused" else _way(row)

    def _is_silent_norm(self, row: Row) -> bool:
        """True for a converted norm that does no matrix product, and of which there is nothing to say."""
        return "Norm" in row.type and row.became is not None and row.why is None and not self._part(row)

    def _part(self, row: Row) -> float:
        """The share of a row: of what the kernels can replace in a converted module, else of the whole module."""
        shares = self.shares()
        if shares is None:
            return 0.0
        known = row.became is not None and row.way is None and shares.replaced is not None
        return shares.replaced_share(row.path) if known else shares.share(row.path)

    def _share(self, way: str, counted: list[Row]) -> str:
        """The share of those of these rows with this way, and of all rows with this way if it differs, in words.

        A row counts without the rows inside it, so an unchanged module in a converted one is not part of the share. Of
        converted modules only the FLOPs of operators count that the kernels can replace.
        """
        if (shares := self.shares()) is None:
            return ""
        unit = "FLOPs" if shares.of == "FLOPs" else "weights of linear and convolution layers"
        if shares.replaced is not None and way == "converted":
            tops = {row.path for row in counted if row.became}
            outer = (path for path in tops if tops.isdisjoint([*enclosing(path)][1:]))
            return _shares_text(way, unit, sum(map(shares.replaced_share, outer)), shares.replaced_share(""))
        rows = {row.path: row for row in reversed(self.rows)}
        tops = {row.path for row in counted if row.became}
        counted_share = way_share = 0.0
        for path, row in rows.items():
            outside = next((rows[p] for p in enclosing(path) if p != path and p in rows), None)
            for part, sign in ((row, 1), (outside, -1)):
                if part is not None and part.became is not None and _way(part) == way:
                    way_share += sign * shares.share(path)
                    counted_share += sign * shares.share(path) * (not tops.isdisjoint(enclosing(part.path)))
        return _shares_text(way, unit, counted_share, way_share)


def _shares_text(way: str, unit: str, counted: float, every: float) -> str:
    """The share of some modules, and of all with this way if it is larger by one percent or more."""
    text = f", {_rounded(counted)} of the {unit}"
    return text if every - counted < 0.01 else f"{text} ({_rounded(every)} with the other modules that {VERBS[way]})"


def _way(row: Row) -> str:
    """The way of a converted candidate."""
    return row.way or "converted"


def _is_block(row: Row) -> bool:
    """True for a block of a Transformer: by what it became, else by the name of its class."""
    if row.became is not None:
        return re.search(r"\bblock\b", row.became) is not None
    return re.search(r"Block|Layer(?!Norm|Scale)", row.type) is not None


def _kind(row: Row) -> str:
    """What a converted module is: what it became, without the way."""
    kind = (row.became or "").removeprefix("fused ")
    return f"{kind.removesuffix(' kernel')}, in a launch of its own" if row.bare else kind


def _several(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _percent(share: float) -> str:
    """One decimal; nothing for what computes no products."""
    return f"{share:.1%}".replace("%", " %") if share else ""


def _rounded(share: float) -> str:
    """Whole percents; the ends of the range only if they are exact."""
    whole = round(100 * share)
    if whole == 100 and share < 1 - 1e-9:
        return "over 99 %"
    return "under 1 %" if whole == 0 and share > 0 else f"{whole} %"


def _numbered(path: str) -> str:
    """The path with each number replaced by *, which groups the blocks of a model."""
    return re.sub(r"(?<![^._])\d+(?![^._])", "*", path)
