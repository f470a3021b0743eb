"""Tests of the modules that were moved in version 0.2."""

import importlib
import pickle

import pytest

from fastvit_triton.moved import MOVED

PACKAGES = [old for old in MOVED if any(other.startswith(f"{old}.") for other in MOVED)]  # whose modules were spread


@pytest.mark.fast
@pytest.mark.parametrize("old", sorted(MOVED))
def test_an_old_name_gives_the_new_one(old: str):
    """Oracle: importing the old name raises an ImportError of one sentence, and the new name can be imported.

    Python imports the package of a module first; the sentence of a package that was spread lists its modules.
    """
    with pytest.raises(ImportError) as caught:
        importlib.import_module(f"fastvit_triton.{old}")
    shown = next((package for package in PACKAGES if old.startswith(package)), old)
    start, _, listed = str(caught.value).partition(" (")
    assert start == f"fastvit_triton.{shown} was moved in version 0.2; import fastvit_triton.{MOVED[shown]}"
    inside = [f"{new} for {name}" for name, new in MOVED.items() if name.startswith(f"{shown}.")]
    assert listed.rstrip(")").split(", ") == (inside or [""])
    importlib.import_module(f"fastvit_triton.{MOVED[old]}")


def test_a_pickle_of_an_earlier_version_is_refused():
    """Oracle: a pickled reference to a class at its old place raises the same sentence."""
    with pytest.raises(ImportError, match=r"fastvit_triton.layers.freeze was moved in version 0.2"):
        pickle.loads(b"cfastvit_triton.layers.freeze\nFoldedNorm\n.")


def test_other_names_are_looked_up_as_usual():
    """Oracle: Python's own errors."""
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'fastvit_triton.nothing'"):
        importlib.import_module("fastvit_triton.nothing")
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec("from fastvit_triton.layers import nothing")
