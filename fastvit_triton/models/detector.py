"""What DETR and Deformable DETR have in common: a backbone, box heads, outputs, and detections from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoints.tensors import State
from ..layers.conv_body import ConvBody
from ..layers.frozen_resnet import FrozenResNet
from ..layers.padded import pad_images
from .base import ImageModel
from .config import BaseConfig, Options, check_multiple, check_only, check_positive, check_types

Outputs = dict[str, Any]
Detections = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class DetectorConfig(BaseConfig):
    """Options of detectors, in addition to those of `BaseConfig`; images of any size are taken.

    Attributes:
        depths: blocks of each stage of the ResNet, whose BatchNorms are frozen; () for four convolutions instead, the
            backbone for small images.
        stem_dim: channels of the ResNet's stem, or of the first convolution.
        bottleneck: blocks of three convolutions, as from ResNet-50 on, instead of two.
        dilation: the last stage keeps the size of its map (DC5).
        hidden_dim: D, channels of the transformer.
        num_heads: H.
        encoder_layers: layers of the encoder.
        decoder_layers: layers of the decoder.
        mlp_dim: hidden channels of the MLPs.
        num_queries: Q, the largest number of objects in an image.
        drop_rate: dropout after attention, in MLPs, and on the probabilities of attention.
    """

    img_size: int | tuple[int, int] = 800
    num_classes: int = 91
    depths: tuple[int, ...] = (3, 4, 6, 3)
    stem_dim: int = 64
    bottleneck: bool = True
    dilation: bool = False
    hidden_dim: int = 256
    num_heads: int = 8
    encoder_layers: int = 6
    decoder_layers: int = 6
    mlp_dim: int = 2048
    num_queries: int = 100
    drop_rate: float = 0.1

    only: ClassVar[dict[str, Any]] = dict(drop_path_rate=0.0)

    def __post_init__(self) -> None:
        check_types(self)
        super().__post_init__()
        object.__setattr__(self, "depths", tuple(self.depths))
        check_positive(self, ())
        check_only(self, **self.only)
        if self.dilation and not self.bottleneck:
            raise ValueError("dilation is True and bottleneck False; blocks of two convolutions are not dilated")
        if len(self.depths) not in (0, 4):
            raise ValueError(f"depths has {len(self.depths)} values; a ResNet has 4 stages")
        check_multiple(self, "hidden_dim", "num_heads")
        if self.hidden_dim % 4:
            raise ValueError(f"hidden_dim is {self.hidden_dim}; sines of rows and columns need a multiple of 4")


class BoxMlp(nn.Module):
    """Three linear layers with ReLU in between: D → 4 coordinates.

    Args:
        dim: D.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList((nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, 4)))

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] → [..., 4]."""
        return self.layers[2](F.relu(self.layers[1](F.relu(self.layers[0](x)))))


class Detector(ImageModel):
    """Base of models that predict a set of objects for each image.

    A family implements `forward_features`, `predictions` and `class_scores`.

    Args:
        config: every option.

    Attributes:
        scoring: "softmax" if classes exclude each other and the last is "no object", or "focal" if they are
            independent; it decides the loss, see `train.detection.SetCriterion`.
    """

    task = "detect"
    scoring = "softmax"
    position_resize = "bicubic"  # of tables, which detectors do not have
    config: DetectorConfig

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__()
        self.config = config
        self.num_classes = config.num_classes
        self.num_features = config.hidden_dim
        self.grad_checkpointing = config.grad_checkpointing
        body: nn.Module = ConvBody(config.in_chans, config.stem_dim)
        if config.depths:
            sizes = (config.depths, config.stem_dim, config.bottleneck, config.dilation)
            body = FrozenResNet(config.in_chans, *sizes)
        self.backbone = nn.Sequential(nn.ModuleDict(dict(body=body)))  # the authors' names

    @property
    def body(self) -> FrozenResNet | ConvBody:
        """The backbone."""
        return self.get_submodule("backbone.0.body")  # type: ignore[return-value]

    def forward(self, image: Tensor | Sequence[Tensor], mask: Tensor | None = None) -> Any:
        """Predicts Q objects for each image.

        Args:
            image: [B, C, H, W], or a list of images [C, h, w], which are padded to the largest.
            mask: boolean [B, H, W], True at pixels of the image, False at padding below and right; None means that
                there is no padding.

        Returns:
            `logits` [B, Q, K + 1 or K]; `boxes` [B, Q, 4], centre and size in fractions of the image, without padding;
            in training `aux`, a list of the same for each decoder layer but the last; and, if the model has proposals,
            `proposals`, the same for each token.
        """
        if not isinstance(image, Tensor):
            if mask is not None:
                raise ValueError("mask is given with a list of images; it is for a batch, and a list makes its own")
            image, mask = pad_images(image)
        if image.dim() != 4 or image.shape[1] != self.config.in_chans:
            shape = list(image.shape)
            raise ValueError(f"image needs axes [B, {self.config.in_chans}, H, W], got shape {shape}")
        if mask is not None and (mask.shape != (len(image), *image.shape[2:]) or mask.dtype != torch.bool):
            wanted = [len(image), *image.shape[2:]]
            raise ValueError(f"mask is {mask.dtype} {list(mask.shape)}; it has to be torch.bool {wanted}")
        return self.forward_head(self.forward_features(image, mask))

    def forward_features(self, image: Tensor, mask: Tensor | None = None) -> Any:
        """image [B, C, H, W] and mask [B, H, W] → what `forward_head` takes: outputs of the decoder's layers."""
        raise NotImplementedError

    def forward_head(self, x: Any, pre_logits: bool = False) -> Any:
        """Outputs of the decoder's layers → predictions, or with `pre_logits` the last layer's [B, Q, D]."""
        raise NotImplementedError

    def class_scores(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [B, Q, ...] → scores, labels and queries of the candidates, each [B, n], best first or by query."""
        raise NotImplementedError

    @torch.no_grad()
    def detections(
        self, outputs: Outputs, sizes: Sequence[tuple[int, int]], threshold: float = 0.0
    ) -> list[Detections]:
        """Objects by the authors' rule, with torchvision's names.

        Args:
            outputs: of `forward`.
            sizes: (height, width) of each image in pixels, such as those of the files.
            threshold: least score.

        Returns:
            For each image `boxes` [n, 4] (left, top, right, bottom in pixels), `labels` [n] and `scores` [n].
        """
        if len(sizes) != len(outputs["logits"]):
            raise ValueError(f"sizes has {len(sizes)} entries for {len(outputs['logits'])} images")
        scores, labels, queries = self.class_scores(outputs["logits"].float())
        centre, extent = outputs["boxes"].float().split(2, -1)
        corners = torch.cat((centre - extent / 2, centre + extent / 2), -1)
        detections = []
        for i, (height, width) in enumerate(sizes):
            keep = scores[i] >= threshold
            boxes = corners[i, queries[i][keep]] * corners.new_tensor([width, height, width, height])
            detections.append(dict(boxes=boxes, labels=labels[i][keep], scores=scores[i][keep]))
        return detections

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Regular expressions that assign parameters to layers, for timm's layer-wise learning rates."""
        stages = r"^backbone\.0\.body\.layer(\d+)" + ("" if coarse else r"\.(\d+)")
        return dict(
            stem=r"^backbone\.0\.body\.(conv1|bn1|layers)",
            blocks=[
                (stages, None),
                (r"^input_proj", (10_000,)),
                (r"^transformer\.encoder\.layers\.(\d+)", (20_000,)),
                (r"^transformer|^query_embed", (30_000,)),
            ],
        )

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replaces the class heads by new ones with their initial values; boxes keep their heads.

        Args:
            num_classes: K, at least 1.
            global_pool: None; detectors do not pool.
        """
        if global_pool is not None:
            raise ValueError(f"global_pool is {global_pool!r}; a detector does not pool")
        self.config = self.config.replace(num_classes=num_classes)
        self.num_classes = num_classes
        like = next(self.parameters())
        heads = self.class_heads().to(like).train(self.training)
        self.class_embed = heads

    def class_heads(self) -> nn.Module:
        """New class heads, under the name `class_embed`."""
        raise NotImplementedError


DIGITS: Options = dict(  # of models for scenes of digits, which train in minutes on a CPU
    img_size=32,
    in_chans=1,
    num_classes=10,
    depths=(),
    stem_dim=16,
    hidden_dim=64,
    num_heads=4,
    encoder_layers=2,
    decoder_layers=2,
    mlp_dim=256,
    num_queries=8,
    drop_rate=0.0,
)
BACKBONE = [  # our path, and those of transformers: 5.23 in memory, 4.x with timm's or its own ResNet
    (
        f"backbone.0.body.{ours}",
        f"model.backbone.model.embedder.embedder.{theirs} model.backbone.conv_encoder.model.{ours}"
        f" model.backbone.conv_encoder.model.embedder.embedder.{theirs} model.backbone.model.{ours}",
    )
    for ours, theirs in (("conv1", "convolution"), ("bn1", "normalization"))
]
for _stage in range(4):
    _parts = {f"conv{k + 1}": f"layer.{k}.convolution" for k in range(3)}
    _parts |= {f"bn{k + 1}": f"layer.{k}.normalization" for k in range(3)}
    _parts |= {"downsample.0": "shortcut.convolution", "downsample.1": "shortcut.normalization"}
    for _ours, _theirs in _parts.items():
        _path = f"encoder.stages.{_stage}.layers.{{}}.{_theirs}"
        _own = f"layer{_stage + 1}.{{}}.{_ours}"
        _roots = ("model.backbone.model", "model.backbone.conv_encoder.model")
        _written = [f"{root}.{path}" for path in (_path, _own) for root in _roots]
        BACKBONE.append((f"backbone.0.body.{_own}", " ".join(_written)))


def pack_projections(state: State, parts: tuple[str, ...], attention: str) -> State:
    """Joins q, k and v of attention under `…{attention}.{part}.weight` to `…{attention}.in_proj_weight`."""
    state = dict(state)
    for key in [key for key in state if f".{attention}.{parts[0]}." in key]:
        keys = [key.replace(f".{parts[0]}.", f".{part}.") for part in parts]
        if all(k in state for k in keys):
            leaf = key.rpartition(".")[2]
            path = key.removesuffix(f".{parts[0]}.{leaf}")
            state[f"{path}.in_proj_{leaf}"] = torch.cat([state.pop(k) for k in keys])
    return state


def unpack_projections(state: State, parts: tuple[str, ...]) -> State:
    """The inverse of `pack_projections`, for all attention."""
    out: State = {}
    for key, tensor in state.items():
        path, packed, leaf = key.partition(".in_proj_")
        if packed:
            out |= {f"{path}.{part}.{leaf}": t.clone() for part, t in zip(parts, tensor.chunk(len(parts)), strict=True)}
        else:
            out[key] = tensor
    return out
