"""Measurements. Importing this package makes timm and torchvision importable beside a CPU-only torch."""

import torch

if torch.version.cuda is None and torch.version.hip is None:
    # torchvision's wheels carry CUDA operators; without CUDA its import needs the schemas of these two.
    _TORCHVISION = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _TORCHVISION.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
