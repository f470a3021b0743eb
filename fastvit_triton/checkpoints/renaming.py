"""Renames parameters between libraries: a table per layout of keys, with functions that convert shapes.

Our names are timm's and, where it lacks the model, the authors'; `tensors.PARTS` names tensors that other libraries
store separately. A table maps our names to theirs: a path stands for all names that begin with it, {} for a number,
{-1} for our number less 1, and other braces expand as in a shell. Names that differ between versions of a library are
separated by spaces: all are read, the first is written. Of several paths in a name the longest counts. The tables stand
with their models.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from .tensors import State, WeightsError

IRRELEVANT = re.compile(  # other parts of larger models, and training state
    r"(^|\.)(mask_token|position_ids|pooler|decoder\w*|text_model|text_projection|logit_scale|logit_bias|txt"
    r"|dino_head|ibot_head|student|opt|relative_position_index|attn_mask|attention_bias_idxs|outer_tokens"
    r"|n_averaged|total_ops|total_params)(\.|$)"
    r"|(^|\.)[tb]$"
)
NUMBER = re.compile(r"\{(-1)?\}")
Fitted = tuple[list[str], str]  # keys of a checkpoint that do not fit, and changes of its positions in words


def _same(tensors: State) -> State:
    return tensors


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Parameter names and shapes of an architecture in one library."""

    name: str  # name in reports and errors
    mark: str  # key that distinguishes this layout from those after it in `CheckpointFormats`; it may follow a prefix
    beside: str = ""  # second required key after the same prefix, if other architectures also have the mark
    resize: str  # interpolation of positions in this library: a mode of `resize_pos_embed`, or "dinov2"
    stem: dict[str, str] = field(default_factory=dict)  # our name → theirs, outside the blocks
    home: str = "blocks.{}"  # our path of a block; {} is its number, or those of its stage and in it
    blocks: str = "blocks.{}"  # their paths of a block
    block: dict[str, str] = field(default_factory=dict)  # our name → theirs, inside a block
    read: Callable[[State], State] = _same  # converts their tensors to our shapes, under their names
    write: Callable[[State], State] = _same  # the inverse of `read`
    base: str = ""  # prefix of all keys except the classifier's in the class with a classifier
    packed: bool = False  # their files hold q, k and v of blocks as one tensor; else they are written as three
    alone: bool = False  # the tower's keys have a prefix, and equal keys without it are of another tower
    # settings of the models that this library supports; a tuple lists alternatives
    needs: dict[str, object] = field(default_factory=dict)

    @cached_property
    def pairs(self) -> list[tuple[str, str]]:
        """(our path, their path) of the stem, of a block and of its parts."""
        rows = [*_rows(self.stem)]
        for path in self.blocks.split():
            rows += [(f"{self.home}.{our}", f"{path}.{their}") for our, their in _rows(self.block)]
            rows.append((self.home, path))
        return rows

    @cached_property
    def ours(self) -> Callable[[str], str]:
        """Converts their key, without prefix, to ours; keys that are in no table are unchanged."""
        return _renamer((their, our) for our, their in self.pairs)

    @cached_property
    def theirs(self) -> Callable[[str], str]:
        """Converts our key to theirs, without prefix; uses the first of several names."""
        return _renamer(self.pairs)

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


def write(model: Any, state: State, layout: Layout) -> State:
    """The tensors under the names of a layout, with its shapes."""
    return layout.convert(state, model.head_names, model.config.num_classes)


class CheckpointFormats(NamedTuple):
    """The layouts of an architecture's checkpoints, and functions that convert to and from them."""

    name: str  # of the architecture, in errors
    layouts: tuple[Layout, ...]  # layouts that can be read, in the order in which their marks are searched
    fit: Callable[..., Fitted]  # adapts renamed tensors to a model, see `models.fit.fit`
    saved: Mapping[str, tuple[Layout, ...]] = MappingProxyType({})  # layouts that can be written, by name
    # (model, layouts) → the first of the layouts under a name that supports the model
    choose: Callable[..., Layout] = first
    # (model, tensors, layout) → the tensors under the layout's names, with its shapes
    write: Callable[..., State] = write
    # matches keys under our names that are no part of the architecture and are dropped
    irrelevant: re.Pattern[str] = IRRELEVANT

    def convert(self, model: Any, state: State, name: str) -> State:
        """Converts a model's tensors to a layout of `saved`."""
        return self.write(model, state, self.choose(model, self.saved[name]))


def _renamer(pairs: Iterable[tuple[str, str]]) -> Callable[[str], str]:
    """A function that renames a key by the longest path that is its beginning; other keys stay."""
    rules = []
    for old, new in pairs:
        pattern = r"(\d{1,9})".join(map(re.escape, NUMBER.split(old)[::2])) + r"(?=\.|$)"
        before, after = ([int(step or 0) for step in NUMBER.findall(path)] for path in (old, new))
        # a path with fewer numbers has the last of them
        steps = [b - a for a, b in zip(before[len(before) - len(after) :], after, strict=True)]
        rules.append((re.compile(pattern), NUMBER.sub("{}", new), steps))
    rules.sort(key=lambda rule: -rule[0].pattern.count("."))

    def rename(key: str) -> str:
        for pattern, new, steps in rules:
            if match := pattern.match(key):
                numbers = match.groups()[pattern.groups - len(steps) :]
                return new.format(*map(_moved, numbers, steps)) + key[match.end() :]
        return key

    return rename


def _moved(number: str, step: int) -> str:
    return str(int(number) + step) if step else number


def _rows(table: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yields (our name, their name) for each of their names and each option in braces."""
    for our, names in table.items():
        for their in names.split():
            yield from zip(_expand(our), _expand(their), strict=True)


def _expand(name: str) -> list[str]:
    """Expands braces with commas: norm{1,2} → norm1, norm2."""
    if (braces := re.search(r"\{([^}]+,[^}]*)\}", name)) is None:
        return [name]
    return [f"{name[: braces.start()]}{option}{name[braces.end() :]}" for option in braces[1].split(",")]


# Models of timm as image towers of open_clip: `visual.trunk.…`, and the projection beside it, `visual.head.proj.…`.

TRUNK, PROJECTION = "trunk.", "head.proj."


def take_trunk(tensors: State, heads: tuple[str, ...]) -> tuple[State, list[str]]:
    """The tower under timm's names, with the projection as its classifier, and the keys of what is beside it."""
    prefix = next(
        (match[1] for key in tensors if (match := re.match(r"((?:module\.)?(?:visual\.)?)trunk\.", key))), None
    )
    if prefix is None:
        return tensors, []
    trunk, projection = prefix + TRUNK, prefix + PROJECTION
    taken = {key.removeprefix(trunk): tensor for key, tensor in tensors.items() if key.startswith(trunk)}
    own = (key for key in tensors if key.startswith(f"{prefix}head.") and not key.startswith(projection))
    if (other := next(own, None)) is not None:
        raise WeightsError(f"the checkpoint's {other} is no linear projection, which is the only head that is read")
    weight = tensors.get(f"{projection}weight")
    if weight is not None and heads:
        taken[f"{heads[0]}.weight"] = weight
        taken[f"{heads[0]}.bias"] = tensors.get(f"{projection}bias", torch.zeros(len(weight), dtype=weight.dtype))
    return taken, [key for key in tensors if not key.startswith((trunk, projection))]


def give_trunk(state: State, heads: tuple[str, ...]) -> State:
    """The inverse of `take_trunk`, with the prefix "visual."; a bias that is zero is left out, as most have none."""
    head = f"{heads[0]}." if heads else None
    given = {}
    for key, tensor in state.items():
        if head is None or not key.startswith(head):
            given[f"visual.{TRUNK}{key}"] = tensor
        elif key != f"{head}bias" or tensor.any():
            given[f"visual.{PROJECTION}{key.removeprefix(head)}"] = tensor
    return given
