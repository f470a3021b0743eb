"""The turn of this tree: cases that take turns run by it."""

TURN = 1
