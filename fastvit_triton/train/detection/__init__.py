"""Training of detectors: matching, losses, average precision, data with boxes.

A target is a dict of an image's objects: `labels` [n] and `boxes` [n, 4], centre and size in fractions of the image.
"""

from .augment import augment
from .average_precision import average_precision
from .boxes import from_corners, generalized_iou, intersection_over_union, to_corners
from .coco import load_coco
from .criterion import DEFORMABLE, DETR, Costs, SetCriterion, criterion_of, detected, match
from .evaluate import evaluate_detector
from .load import has_boxes, load_detection_test, scan_detection
from .objects import DetectionFiles, fractions
from .scenes import scenes
from .shapes import shapes
from .yolo import load_yolo

__all__ = [
    "DEFORMABLE",
    "DETR",
    "Costs",
    "DetectionFiles",
    "SetCriterion",
    "augment",
    "average_precision",
    "criterion_of",
    "detected",
    "evaluate_detector",
    "fractions",
    "from_corners",
    "generalized_iou",
    "has_boxes",
    "intersection_over_union",
    "load_coco",
    "load_detection_test",
    "load_yolo",
    "match",
    "scan_detection",
    "scenes",
    "shapes",
    "to_corners",
]
