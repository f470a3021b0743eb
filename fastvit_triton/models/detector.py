"""What DETR and Deformable DETR have in common: a backbone, box heads, outputs, and detections from them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoints.renaming import Layout
from ..checkpoints.tensors import State, variant
from ..layers.frozen_resnet import FrozenResNet
from ..layers.normed import ConvNorm
from ..layers.padded import pad_images
from ..layers.residual import ResidualBody
from .base import ImageModel
from .config import BaseConfig, Options, check_multiple
from .fit import supporting

Outputs = dict[str, Any]
Detections = dict[str, Tensor]
WIDTHS = (1, 2, 4, 4)  # channels of `ConvBody`, in units of the first convolution's
STRIDES = (2, 1, 2, 1)
FROZEN = ("frozen_bottleneck", "frozen_basic")  # blocks of ResNets that are not trained as a whole


@dataclass(frozen=True, kw_only=True)
class DetectorConfig(BaseConfig):
    """Options of detectors, in addition to those of `BaseConfig`; images of any size are taken.

    Attributes:
        depths: blocks of each stage of the ResNet; () for four convolutions instead, the backbone for small images.
        block: blocks of the ResNet, "bottleneck" of three convolutions, as from ResNet-50 on, or "basic" of two. With
            "frozen_" before, its BatchNorms, stem and first stage are not trained, as of pretrained weights in DETR;
            random weights need that all of it is trained.
        stem_dim: channels of the ResNet's stem, or of the first convolution.
        dilation: the last stage keeps the size of its map (DC5).
        hidden_dim: D, channels of the transformer.
        encoder_layers: layers of the encoder.
        decoder_layers: layers of the decoder.
        mlp_dim: hidden channels of the MLPs.
        num_queries: Q, the largest number of objects in an image.
        drop_rate: dropout after attention, in MLPs, and on the probabilities of attention.
    """

    img_size: int | tuple[int, int] = 800
    num_classes: int = 91
    depths: tuple[int, ...] = (3, 4, 6, 3)
    block: str = "frozen_bottleneck"
    stem_dim: int = 64
    dilation: bool = False
    hidden_dim: int = 256
    num_heads: int = 8
    encoder_layers: int = 6
    decoder_layers: int = 6
    mlp_dim: int = 2048
    num_queries: int = 100
    drop_rate: float = 0.1

    choices: ClassVar = dict(block=(*FROZEN, "bottleneck", "basic"))
    only: ClassVar = dict(drop_path_rate=0.0)
    zeros = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dilation and self.block != "frozen_bottleneck":
            raise ValueError(f"dilation is True and block {self.block!r}; only 'frozen_bottleneck' is dilated")
        if len(self.depths) not in (0, 4):
            raise ValueError(f"depths has {len(self.depths)} values; a ResNet has 4 stages")
        check_multiple(self, "hidden_dim", "num_heads")
        if self.hidden_dim % 4:
            raise ValueError(f"hidden_dim is {self.hidden_dim}; sines of rows and columns need a multiple of 4")

    @property
    def frozen(self) -> bool:
        """True if the backbone is a ResNet whose BatchNorms, stem and first stage are not trained."""
        return bool(self.depths) and self.block in FROZEN


class ConvBody(nn.Module):
    """Four 3 x 3 convolutions with BatchNorm and ReLU, for small images; its map has 1/4 of their sides, rounded up."""

    def __init__(self, in_chans: int, dim: int) -> None:
        super().__init__()
        self.channels = (dim * WIDTHS[-1],)
        self.reductions = (4,)
        outputs = [dim * width for width in WIDTHS]
        sizes = zip([in_chans, *outputs[:-1]], outputs, STRIDES, strict=True)
        self.layers = nn.ModuleList(ConvNorm(before, after, 3, stride, 1) for before, after, stride in sizes)

    def forward(self, image: Tensor) -> list[Tensor]:
        """[B, C, H, W] → the map [B, D, h, w], in a list."""
        x = image
        for layer in self.layers:
            x = F.relu(layer(x))
        return [x]


class BoxMlp(nn.Module):
    """Three linear layers with ReLU in between: D → 4 coordinates."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList((nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, 4)))

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] → [..., 4]."""
        return self.layers[2](F.relu(self.layers[1](F.relu(self.layers[0](x)))))


TRANSFORMER = (  # layers after the backbone, see `ImageModel.group_matcher`
    (r"^input_proj", (10_000,)),
    (r"^transformer\.encoder\.layers\.(\d+)", (20_000,)),
    (r"^transformer|^query_embed", (30_000,)),
)


class Detector(ImageModel):
    """Base of models that predict a set of objects for each image.

    A family implements `forward_features`, `forward_head` and `class_scores`.
    """

    task = "detect"
    # classes exclude each other and the last is "no object", or "focal" if they are independent; it decides the loss,
    # see `train.detection.SetCriterion`
    scoring = "softmax"
    position_resize = "bicubic"  # of tables, which detectors do not have
    stem_pattern = r"^backbone\.0\.body\.(conv1|bn1|layers|stem)"
    layer_patterns = ((r"^backbone\.0\.body\.layer(\d+)\.(\d+)", None), *TRANSFORMER)
    coarse_patterns = ((r"^backbone\.0\.body\.layer(\d+)", None), *TRANSFORMER)
    config: DetectorConfig

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__(config, config.hidden_dim)
        body: nn.Module = ConvBody(config.in_chans, config.stem_dim)
        sizes = (config.depths, config.stem_dim, config.block.endswith("bottleneck"))
        if config.frozen:
            body = FrozenResNet(config.in_chans, *sizes, config.dilation)
        elif config.depths:
            body = ResidualBody(config.in_chans, *sizes)
        self.backbone = nn.Sequential(nn.ModuleDict(dict(body=body)))  # the authors' names

    @property
    def body(self) -> FrozenResNet | ResidualBody | ConvBody:
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

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replaces the class heads by new ones with their initial values; boxes keep theirs. There is no pooling."""
        if global_pool is not None:
            raise ValueError(f"global_pool is {global_pool!r}; a detector does not pool")
        self.config = self.config.replace(num_classes=num_classes)
        self.num_classes = num_classes
        like = next(self.parameters())
        self.class_embed = self.class_heads().to(like).train(self.training)

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
# Names in checkpoints of transformers 5.23, and of 4.x with timm's or its own ResNet.

PARTS = {"conv{1,2,3}": "layer.{0,1,2}.convolution", "bn{1,2,3}": "layer.{0,1,2}.normalization"}
PARTS |= {"downsample.{0,1}": "shortcut.{convolution,normalization}"}
RESNET = {"conv1": "embedder.embedder.convolution", "bn1": "embedder.embedder.normalization"}
RESNET |= {
    f"layer{stage + 1}.{{}}.{ours}": f"encoder.stages.{stage}.layers.{{}}.{theirs}"
    for stage in range(4)
    for ours, theirs in PARTS.items()
}
BACKBONE: dict[str, object] = dict(block=FROZEN)  # `Layout.needs` of the authors and of transformers
ROOTS = ("model.backbone.model", "model.backbone.conv_encoder.model")
LAYER = {"self_attn.out_proj": "self_attn.o_proj self_attn.out_proj", "linear{1,2}": "mlp.fc{1,2} fc{1,2}"}
LAYERS = {  # ours → theirs, in a layer of the encoder, and of the decoder
    "encoder": LAYER | {"norm1": "self_attn_layer_norm", "norm2": "final_layer_norm"},
    "decoder": LAYER | {"norm3": "final_layer_norm"},
}
QKV = ("q_proj", "k_proj", "v_proj")


def pack_projections(state: State) -> State:
    """Joins q, k and v of attention under `….q_proj.weight` and so on to `….in_proj_weight`."""
    state = dict(state)
    for key in [key for key in state if ".q_proj." in key]:
        keys = [key.replace(".q_proj.", f".{part}.") for part in QKV]
        if all(k in state for k in keys):
            state[key.replace(".q_proj.", ".in_proj_")] = torch.cat([state.pop(k) for k in keys])
    return state


def unpack_projections(state: State) -> State:
    """The inverse of `pack_projections`."""
    out: State = {}
    for key, tensor in state.items():
        parts = zip(QKV, tensor.chunk(3), strict=True) if ".in_proj_" in key else ()
        out |= {key.replace(".in_proj_", f".{part}."): t.clone() for part, t in parts} or {key: tensor}
    return out


def transformers_layout(mark: str, names: dict[str, str], decoder: dict[str, str]) -> Layout:
    """The layout of a detector with a mark, names outside its backbone and layers, and those of its decoder layer."""
    stem = {"transformer": "model", "query_embed": "model.query_position_embeddings"} | names
    for ours, theirs in RESNET.items():
        stem[f"backbone.0.body.{ours}"] = " ".join(f"{root}.{path}" for path in (theirs, ours) for root in ROOTS)
    for half, table in (LAYERS | {"decoder": LAYERS["decoder"] | decoder}).items():
        for ours, theirs in table.items():
            paths = " ".join(f"model.{half}.layers.{{}}.{path}" for path in theirs.split())
            stem[f"transformer.{half}.layers.{{}}.{ours}"] = paths
    return Layout(
        name="transformers",
        mark=mark,
        resize="bicubic",
        stem=stem,
        read=pack_projections,
        write=unpack_projections,
        needs=BACKBONE,
    )


def choose(model: Any, layouts: tuple[Layout, ...]) -> Layout:
    """The layout, if it has names for the model's backbone."""
    block = model.config.block if model.config.depths else "convolutions"
    return supporting(layouts, dict(block=block), variant(model))


UNTRAINED = re.compile(r"(?<!\.bn)\.num_batches_tracked$")  # of frozen norms; `.bn` are trained
