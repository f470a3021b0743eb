"""Renames parameters between libraries: a table per layout of keys, with functions that convert shapes.

Our names are timm's and, where it lacks the model, the authors'; `tensors.PARTS` names tensors that other libraries
store separately. A table maps our names to theirs; module names stand for their .weight and .bias, and braces expand
as in a shell. Names that differ between versions of a library are separated by spaces: all are read, the first is
written. `Renaming` serves models whose parts the tables cannot name. The tables stand with their models.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from .tensors import State

IRRELEVANT = re.compile(  # other parts of larger models, and training state
    r"(^|\.)(mask_token|position_ids|pooler|decoder\w*|text_model|text_projection|logit_scale|logit_bias|txt"
    r"|dino_head|ibot_head|student|opt|relative_position_index|attn_mask)(\.|$)|(^|\.)[tb]$"
)


def _same(tensors: State) -> State:
    return tensors


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Parameter names and shapes of an architecture in one library.

    Attributes:
        name: name in reports and errors.
        mark: key that distinguishes this layout from those after it in `CheckpointFormats`; it may follow a prefix.
        beside: second required key after the same prefix, if other architectures also have the mark.
        resize: interpolation of positions in this library: a mode of `resize_pos_embed`, or "dinov2".
        number: changes their key first, where stages are numbered in another way than ours.
        stem: our name → theirs, outside the blocks.
        home: our path of a block; {} is its number, or those of its stage and in it.
        blocks: their paths of a block.
        block: our name → theirs, inside a block.
        read: converts their tensors to our shapes, under their names.
        write: the inverse of `read` and `number`.
        base: prefix of all keys except the classifier's in the class with a classifier.
        packed: their files hold q, k and v of blocks as one tensor; else they are written as three.
        alone: the tower's keys have a prefix, and equal keys without it are of another tower.
        needs: settings of the models that this library supports; a tuple lists alternatives.
    """

    name: str
    mark: str
    beside: str = ""
    resize: str
    number: Callable[[str], str] = str
    stem: dict[str, str] = field(default_factory=dict)
    home: str = "blocks.{}"
    blocks: str = "blocks.{}"
    block: dict[str, str] = field(default_factory=dict)
    read: Callable[[State], State] = _same
    write: Callable[[State], State] = _same
    base: str = ""
    packed: bool = False
    alone: bool = False
    needs: dict[str, object] = field(default_factory=dict)

    def ours(self, key: str) -> str:
        """Converts their key, without prefix, to ours; keys that are in no table are unchanged."""
        key = self.number(key)
        for path in self.blocks.split():
            pattern = re.escape(path).replace(r"\{\}", r"(\d+)") + r"\.(.+)"
            if match := re.fullmatch(pattern, key):
                *numbers, rest = match.groups()
                home = self.home.format(*numbers[-self.home.count("{}") :])
                return f"{home}.{_look_up({their: our for our, their in _rows(self.block)}, rest)}"
        return _look_up({their: our for our, their in _rows(self.stem)}, key)

    def theirs(self, key: str) -> str:
        """Converts our key to theirs, without prefix; uses the first of several names."""
        if match := re.fullmatch(re.escape(self.home).replace(r"\{\}", r"(\d+)") + r"\.(.+)", key):
            *numbers, rest = match.groups()
            path = self.blocks.split()[0].format(*numbers)
            return f"{path}.{_look_up(dict(reversed([*_rows(self.block)])), rest)}"
        return _look_up(dict(reversed([*_rows(self.stem)])), key)

    def convert(self, state: State, heads: tuple[str, ...], classes: int) -> State:
        """Converts the tensors of a model with these heads to theirs, in the class with a classifier if it has one."""
        tensors = self.write({self.theirs(key): tensor for key, tensor in state.items()})
        outside = tuple(self.theirs(f"{head}.") for head in heads)
        base = self.base if classes else ""
        return {key if base and key.startswith(outside) else base + key: tensor for key, tensor in tensors.items()}

    def unmet(self, facts: dict[str, object]) -> list[str]:
        """Descriptions of the entries of `needs` that a model does not satisfy."""
        needs = {key: need if isinstance(need, tuple) else (need,) for key, need in self.needs.items()}
        wrong = {key: need for key, need in needs.items() if facts[key] not in need}
        return [f"{key}={' or '.join(map(repr, need))}, not {facts[key]!r}" for key, need in wrong.items()]


def first(model: Any, layouts: tuple[Layout, ...]) -> Layout:
    """The first layout, for models that have no other."""
    return layouts[0]


def unchanged(model: Any, state: State, layout: Layout) -> State:
    """The tensors as they are, for layouts with our names and shapes."""
    return state


class CheckpointFormats(NamedTuple):
    """The layouts of an architecture's checkpoints, and functions that convert to and from them.

    Attributes:
        name: of the architecture, in errors.
        layouts: layouts that can be read, in the order in which their marks are searched.
        fit: adapts renamed tensors to a model, see `models.fit.fit`.
        saved: layouts that can be written, by name.
        choose: (model, layouts) → the first of the layouts under a name that supports the model.
        write: (model, tensors, layout) → the tensors under the layout's names, with its shapes.
        irrelevant: matches keys under our names that are no part of the architecture and are dropped.
    """

    name: str
    layouts: tuple[Layout, ...]
    fit: Callable[..., tuple[list[str], str]]
    saved: Mapping[str, tuple[Layout, ...]] = MappingProxyType({})
    choose: Callable[..., Layout] = first
    write: Callable[..., State] = unchanged
    irrelevant: re.Pattern[str] = IRRELEVANT

    def convert(self, model: Any, state: State, name: str) -> State:
        """Converts a model's tensors to a layout of `saved`.

        Raises:
            WeightsError: no layout of this name supports the model.
        """
        return self.write(model, state, self.choose(model, self.saved[name]))


class Renaming:
    """Pairs of paths of modules or tensors, ours and theirs; {} stands for a number, and the rest of a key is kept.

    Args:
        pairs: (our path, their paths separated by spaces). All of theirs are read, the first is written; of two pairs
            that match a key the first is taken.
    """

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        rows = [(ours, their) for ours, theirs in pairs for their in theirs.split()]
        self.ours = _renamer((their, ours) for ours, their in rows)
        self.theirs = _renamer(rows)


def _renamer(pairs: Iterable[tuple[str, str]]) -> Callable[[str], str]:
    """A function that renames a key by the first path that is its beginning; other keys stay."""
    rules = [(re.compile(re.escape(old).replace(r"\{\}", r"(\d+)") + r"(?=\.|$)"), new) for old, new in pairs]

    def rename(key: str) -> str:
        for pattern, new in rules:
            if match := pattern.match(key):
                return new.format(*match.groups()) + key[match.end() :]
        return key

    return rename


def _rows(table: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yields (our name, their name) for each of their names and each option in braces."""
    for our, names in table.items():
        for their in names.split():
            yield from zip(_expand(our), _expand(their), strict=True)


def _expand(name: str) -> list[str]:
    """Expands braces: norm{1,2} → norm1, norm2."""
    head, _, rest = name.partition("{")
    options, _, tail = rest.partition("}")
    return [f"{head}{option}{tail}" for option in options.split(",")]


def _look_up(table: dict[str, str], key: str) -> str:
    """Looks up the whole key, else its module, and keeps the last component; unknown keys are unchanged."""
    if key in table:
        return table[key]
    module, _, leaf = key.rpartition(".")
    return f"{table[module]}.{leaf}" if module in table else key
