"""DETR — End-to-end object detection with transformers. Carion et al., arXiv:2005.12872.

Differs from ViT:
  1. Tokens are the last map of a ResNet, whose BatchNorms are frozen; images of different sizes are padded, and no
     query sees padding.
  2. Fixed sines of row and column are added to the queries and keys of every layer, not to the values.
  3. A decoder turns Q learned queries into Q objects: self-attention, attention to the encoder's tokens, MLP. Each
     object has a class, or none, and a box. Norms follow the residual sums, and the activation is ReLU.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints.renaming import CheckpointFormats, Layout
from ..layers.packed_attention import PackedLayer
from ..layers.padded import resize_mask, sine_positions
from ..layers.recompute import recomputed
from .config import Options
from .detector import (
    BACKBONE,
    DIGITS,
    UNTRAINED,
    BoxMlp,
    Detector,
    DetectorConfig,
    Outputs,
    choose,
    transformers_layout,
)
from .fit import fit_tables


class EncoderLayer(PackedLayer):
    """Self-attention and an MLP, each followed by a residual sum and a LayerNorm."""

    def forward(self, x: Tensor, pos: Tensor, mask: Tensor | None) -> Tensor:
        """Tokens [B, N, D], positions [B or 1, N, D], mask [B, 1, 1, N] of tokens that are seen → [B, N, D]."""
        q = x + pos
        x = self.norm1(x + self.dropout1(self.self_attn(q, q, x, mask)))
        return self.norm2(x + self.dropout2(self.mlp(x)))


class DecoderLayer(PackedLayer):
    """Self-attention of the queries, attention to the tokens, and an MLP, each followed by a sum and a LayerNorm."""

    def forward(self, x: Tensor, query: Tensor, memory: Tensor, pos: Tensor, mask: Tensor | None) -> Tensor:
        """Objects [B, Q, D], embedding of the queries [Q, D], tokens, positions and mask of the encoder → [B, Q, D]."""
        q = x + query
        x = self.norm1(x + self.dropout1(self.self_attn(q, q, x)))
        x = self.norm2(x + self.dropout2(self.multihead_attn(x + query, memory + pos, memory, mask)))
        return self.norm3(x + self.dropout3(self.mlp(x)))


class Transformer(nn.Module):
    """Encoder and decoder."""

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__()
        sizes = (config.hidden_dim, config.num_heads, config.mlp_dim, config.drop_rate, config.drop_rate)
        encoder = nn.ModuleList(EncoderLayer(*sizes) for _ in range(config.encoder_layers))
        decoder = nn.ModuleList(DecoderLayer(*sizes, cross=True) for _ in range(config.decoder_layers))
        self.encoder = nn.ModuleDict(dict(layers=encoder))
        self.decoder = nn.ModuleDict(dict(layers=decoder, norm=nn.LayerNorm(config.hidden_dim)))
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(
        self, x: Tensor, pos: Tensor, mask: Tensor | None, query: Tensor, recompute: bool = False
    ) -> list[Tensor]:
        """Tokens [B, N, D], positions, mask and queries [Q, D] → normalised objects [B, Q, D] after each layer."""
        for layer in self.encoder["layers"].children():
            x = recomputed(layer, x, pos, mask) if recompute else layer(x, pos, mask)
        memory = x
        x = torch.zeros_like(query).expand(len(memory), -1, -1)
        outputs = []
        for layer in self.decoder["layers"].children():
            inputs = (x, query, memory, pos, mask)
            x = recomputed(layer, *inputs) if recompute else layer(*inputs)
            outputs.append(self.decoder["norm"](x))
        return outputs


class Detr(Detector):
    """DETR: image [B, C, H, W] → logits [B, Q, K + 1], whose last class is "no object", and boxes [B, Q, 4]."""

    layout = "detr"
    head_names = ("class_embed",)

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__(config)
        dim = config.hidden_dim
        self.transformer = Transformer(config)
        self.class_embed = self.class_heads()
        self.bbox_embed = BoxMlp(dim)
        self.query_embed = nn.Embedding(config.num_queries, dim)
        self.input_proj = nn.Conv2d(self.body.channels[-1], dim, 1)

    def forward_features(self, image: Tensor, mask: Tensor | None = None) -> Any:
        """image [B, C, H, W] and mask [B, H, W] → normalised objects [B, Q, D] after each decoder layer."""
        x = self.input_proj(self.body(image)[-1])
        size = x.shape[2:]
        if mask is None:
            pos = sine_positions(mask_of(x), self.num_features, dtype=x.dtype)
        else:
            mask = resize_mask(mask, size)
            pos = sine_positions(mask, self.num_features, dtype=x.dtype)
            mask = mask.flatten(1)[:, None, None]
        return self.transformer(x.flatten(2).mT, pos, mask, self.query_embed.weight, self.recomputes)

    def forward_head(self, x: Any, pre_logits: bool = False) -> Any:
        """Objects [B, Q, D] after each decoder layer → predictions, see `Detector.forward`."""
        if pre_logits:
            return x[-1]
        layers = x if self.training else x[-1:]
        *aux, outputs = [self.predict(layer) for layer in layers]
        return {**outputs, "aux": aux} if self.training else outputs

    def predict(self, x: Tensor) -> Outputs:
        """Objects [B, Q, D] → their classes and boxes."""
        return dict(logits=self.class_embed(x), boxes=self.bbox_embed(x).sigmoid())

    def class_scores(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The best class of each query, "no object" left out."""
        scores, labels = logits.softmax(-1)[..., :-1].max(-1)
        return scores, labels, torch.arange(scores.shape[1], device=scores.device).expand_as(scores)

    def class_heads(self) -> nn.Module:
        """A linear layer to K + 1 classes."""
        return nn.Linear(self.config.hidden_dim, self.config.num_classes + 1)


def mask_of(x: Tensor) -> Tensor:
    """The mask [1, h, w] of a map [B, D, h, w] without padding."""
    return torch.ones(1, *x.shape[2:], dtype=torch.bool, device=x.device)


CONFIG = DetectorConfig
MODEL = Detr
VARIANTS: dict[str, Options] = {
    "detr_resnet50": {},
    "detr_resnet101": dict(depths=(3, 4, 23, 3)),
    "detr_resnet50_dc5": dict(dilation=True),
    "detr_resnet101_dc5": dict(depths=(3, 4, 23, 3), dilation=True),
    "detr_digits": DIGITS,  # for scenes of 32 x 32 pixels
}

# Names in checkpoints: the authors', which are ours, and those of transformers.

AUTHORS = Layout(
    name="facebookresearch",
    mark="transformer.decoder.layers.0.multihead_attn.in_proj_weight",
    beside="query_embed.weight",
    resize="bicubic",
    needs=BACKBONE,
)
TRANSFORMERS = transformers_layout(
    "model.decoder.layers.0.encoder_attn.q_proj.weight",
    {
        "input_proj": "model.input_projection",
        "class_embed": "class_labels_classifier",
        "bbox_embed": "bbox_predictor",
        "transformer.decoder.norm": "model.decoder.layernorm",
    },
    {
        "multihead_attn": "encoder_attn",
        "multihead_attn.out_proj": "encoder_attn.o_proj encoder_attn.out_proj",
        "norm{1,2}": "{self_attn,encoder_attn}_layer_norm",
    },
)
CHECKPOINTS = CheckpointFormats(
    "DETR",
    (AUTHORS, TRANSFORMERS),
    fit_tables,
    {"facebookresearch": (AUTHORS,), "transformers": (TRANSFORMERS,)},
    choose=choose,
    irrelevant=UNTRAINED,
)
