"""Boxes as centre and size, or as corners: conversion, intersection over union, and its generalised form.

A box is (x, y, width, height) of its centre, or its corners (left, top, right, bottom); the models and losses use the
first in fractions of the image, files and detections the second in pixels.
"""

import torch
from torch import Tensor


def to_corners(boxes: Tensor) -> Tensor:
    """[..., (x, y, w, h)] → [..., (left, top, right, bottom)]."""
    centre, size = boxes.split(2, -1)
    return torch.cat((centre - size / 2, centre + size / 2), -1)


def from_corners(boxes: Tensor) -> Tensor:
    """[..., (left, top, right, bottom)] → [..., (x, y, w, h)]."""
    low, high = boxes.split(2, -1)
    return torch.cat(((low + high) / 2, high - low), -1)


def intersection_over_union(a: Tensor, b: Tensor) -> Tensor:
    """Common area divided by the area of both together; corners [..., 4] and [..., 4], which broadcast, → [...]."""
    common, union = _areas(a, b)
    return common / union


def generalized_iou(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union, less the empty part of the smallest box around both (arXiv:1902.09630, algorithm 1)."""
    common, union = _areas(a, b)
    low = torch.minimum(a[..., :2], b[..., :2])
    high = torch.maximum(a[..., 2:], b[..., 2:])
    around = (high - low).prod(-1)
    return common / union - (around - union) / around


def _areas(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """(common area, area of both together)."""
    low = torch.maximum(a[..., :2], b[..., :2])
    high = torch.minimum(a[..., 2:], b[..., 2:])
    common = (high - low).clamp(min=0).prod(-1)
    return common, (a[..., 2:] - a[..., :2]).prod(-1) + (b[..., 2:] - b[..., :2]).prod(-1) - common
