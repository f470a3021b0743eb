"""Training of detectors: matching, losses, average precision, data with boxes.

A target is a dict of an image's objects: `labels` [n] and `boxes` [n, 4], centre and size in fractions of the image.
"""

import types as _types

from .augment import augment as augment
from .average_precision import average_precision as average_precision
from .boxes import from_corners as from_corners
from .boxes import generalized_iou as generalized_iou
from .boxes import intersection_over_union as intersection_over_union
from .boxes import to_corners as to_corners
from .coco import load_coco as load_coco
from .criterion import DEFORMABLE as DEFORMABLE
from .criterion import DETR as DETR
from .criterion import Costs as Costs
from .criterion import SetCriterion as SetCriterion
from .criterion import criterion_of as criterion_of
from .criterion import detected as detected
from .criterion import match as match
from .evaluate import evaluate_detector as evaluate_detector
from .load import has_boxes as has_boxes
from .load import load_detection_test as load_detection_test
from .load import scan_detection as scan_detection
from .objects import DetectionFiles as DetectionFiles
from .objects import fractions as fractions
from .scenes import scenes as scenes
from .shapes import shapes as shapes
from .yolo import load_yolo as load_yolo

__all__ = sorted(n for n, value in globals().items() if n[0] != "_" and not isinstance(value, _types.ModuleType))
