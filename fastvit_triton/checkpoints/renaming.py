"""Renames parameters between two libraries by pairs of paths, for models whose parts `Layout`'s tables cannot name."""

import re
from collections.abc import Callable, Iterable


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
