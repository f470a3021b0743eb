"""Deformable DETR — Deformable transformers for end-to-end object detection. Zhu et al., arXiv:2010.04159.

Differs from DETR:
  1. Tokens are those of four maps of the ResNet: 1/8, 1/16, 1/32 and 1/64 of the image's sides. Positions are centres
     of pixels, and each map has a learned embedding.
  2. Instead of all tokens, a query sees P points per map and head around a reference point, at learned offsets: the
     token's own place in the encoder, a place that the query says in the decoder.
  3. Boxes are relative to the reference points; in `_refine` each layer corrects those of the one before, and in
     `_two_stage` the best tokens of the encoder are the first boxes and make the queries.
  4. Classes are independent (sigmoid), without "no object".
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoints.renaming import CheckpointFormats, Fitted, Layout
from ..checkpoints.tensors import State, WeightsError
from ..kernels.deformable import Maps, deformable_attention, sides_of
from ..layers.fusable import Fusable
from ..layers.packed_attention import PackedAttention
from ..layers.padded import resize_mask, sine_positions, sines
from ..layers.recompute import recomputed
from .config import Options
from .detector import BACKBONE, DIGITS, UNTRAINED, BoxMlp, Detector, DetectorConfig, choose, transformers_layout

SMALLEST_BOX = 0.05  # side of a proposal on the first map, in fractions of the image
BORDER = 0.01  # proposals nearer to the border are no candidates
CANDIDATES = 100  # best pairs of query and class in an image


class DeformableAttention(Fusable):
    """Attention to P points per head and map, whose offsets and weights are linear in the query."""

    def __init__(self, dim: int, num_heads: int, levels: int, points: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.levels = levels
        self.points = points
        self.sampling_offsets = nn.Linear(dim, num_heads * levels * points * 2)
        self.attention_weights = nn.Linear(dim, num_heads * levels * points)
        self.value_proj = nn.Linear(dim, dim)
        self.output_proj = nn.Linear(dim, dim)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Points of head h lie in direction 2π h / H, at distances 1 to P in the maximum norm; weights are equal."""
        nn.init.zeros_(self.sampling_offsets.weight)
        angles = torch.arange(self.num_heads) * (2 * math.pi / self.num_heads)
        directions = torch.stack((angles.cos(), angles.sin()), -1)
        directions /= directions.abs().amax(-1, keepdim=True)
        distances = torch.arange(1, self.points + 1)[:, None]
        grid = (directions[:, None, None] * distances).expand(-1, self.levels, -1, -1)
        self.sampling_offsets.bias.copy_(grid.flatten())
        nn.init.zeros_(self.attention_weights.weight)
        nn.init.zeros_(self.attention_weights.bias)
        for layer in (self.value_proj, self.output_proj):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, q: Tensor, reference: Tensor, memory: Tensor, shapes: Maps, mask: Tensor | None) -> Tensor:
        """Queries [B, M, D], which see points of the maps → [B, M, D].

        `reference` is [B, M, L, 2 or 4], see `kernels.deformable`, `memory` the tokens [B, N, D] of all maps, of which
        `shapes` are the rows and columns. The mask [B, N] is False at padding, whose values are 0.
        """
        value = self.value_proj(memory)
        if mask is not None:
            value = value.masked_fill(~mask[..., None], 0)
        heads = (self.num_heads, self.levels, self.points)
        offsets = self.sampling_offsets(q).unflatten(-1, (*heads, 2))
        weights = self.attention_weights(q).unflatten(-1, heads)
        value = value.unflatten(-1, (self.num_heads, -1))
        return self.output_proj(deformable_attention(value, shapes, offsets, weights, reference))

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, levels={self.levels}, points={self.points}"


class DeformableEncoderLayer(Fusable):
    """Deformable self-attention and an MLP, each followed by a residual sum and a LayerNorm."""

    def __init__(self, config: "DeformableDetrConfig") -> None:
        super().__init__()
        dim = config.hidden_dim
        drop = config.drop_rate
        self.self_attn = DeformableAttention(dim, config.num_heads, config.num_levels, config.encoder_points)
        self.dropout1 = nn.Dropout(drop)
        self.norm1 = nn.LayerNorm(dim)
        self.linear1 = nn.Linear(dim, config.mlp_dim)
        self.dropout2 = nn.Dropout(drop)
        self.linear2 = nn.Linear(config.mlp_dim, dim)
        self.dropout3 = nn.Dropout(drop)
        self.norm2 = nn.LayerNorm(dim)

    def forward(self, x: Tensor, pos: Tensor, reference: Tensor, shapes: Maps, mask: Tensor | None) -> Tensor:
        """Tokens [B, N, D], positions, reference points [B, N, L, 2], maps, mask [B, N] → [B, N, D]."""
        x = self.norm1(x + self.dropout1(self.self_attn(x + pos, reference, x, shapes, mask)))
        return self.norm2(x + self.dropout3(self.linear2(self.dropout2(F.relu(self.linear1(x))))))


class DeformableDecoderLayer(Fusable):
    """Self-attention of the queries, deformable attention to the tokens, and an MLP; sums and norms follow.

    The authors number the norms in the order of their code: `norm2` follows self-attention, `norm1` cross-attention.
    """

    def __init__(self, config: "DeformableDetrConfig") -> None:
        super().__init__()
        dim = config.hidden_dim
        drop = config.drop_rate
        self.cross_attn = DeformableAttention(dim, config.num_heads, config.num_levels, config.decoder_points)
        self.dropout1 = nn.Dropout(drop)
        self.norm1 = nn.LayerNorm(dim)
        self.self_attn = PackedAttention(dim, config.num_heads, drop)
        self.dropout2 = nn.Dropout(drop)
        self.norm2 = nn.LayerNorm(dim)
        self.linear1 = nn.Linear(dim, config.mlp_dim)
        self.dropout3 = nn.Dropout(drop)
        self.linear2 = nn.Linear(config.mlp_dim, dim)
        self.dropout4 = nn.Dropout(drop)
        self.norm3 = nn.LayerNorm(dim)

    def forward(
        self, x: Tensor, query: Tensor, reference: Tensor, memory: Tensor, shapes: Maps, mask: Tensor | None
    ) -> Tensor:
        """Objects [B, Q, D], their embedding, reference [B, Q, L, 2 or 4], tokens, maps, mask → [B, Q, D]."""
        q = x + query
        x = self.norm2(x + self.dropout2(self.self_attn(q, q, x)))
        x = self.norm1(x + self.dropout1(self.cross_attn(x + query, reference, memory, shapes, mask)))
        return self.norm3(x + self.dropout4(self.linear2(self.dropout3(F.relu(self.linear1(x))))))


@dataclass(frozen=True, kw_only=True)
class DeformableDetrConfig(DetectorConfig):
    """Options of Deformable DETR, in addition to those of `DetectorConfig`.

    Attributes:
        num_levels: L, maps: 1 for the last of the backbone, or its last three, if it has as many, and smaller ones.
        encoder_points: P, points of a query of the encoder per map and head.
        decoder_points: the same for the decoder.
        refine: each layer has its own heads and corrects the boxes of the one before.
        two_stage: the encoder proposes the first boxes; needs `refine`.
    """

    mlp_dim: int = 1024
    num_queries: int = 300
    num_levels: int = 4
    encoder_points: int = 4
    decoder_points: int = 4
    refine: bool = False
    two_stage: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_levels == 2 and self.depths:
            raise ValueError("num_levels is 2; use 1 for the last map, or 3 and more")
        if self.two_stage and not self.refine:
            raise ValueError("two_stage is True and refine False; proposals are boxes that the decoder refines")
        if self.hidden_dim % 32:
            raise ValueError(f"hidden_dim is {self.hidden_dim}; GroupNorm has 32 groups, so use a multiple of 32")


class DeformableTransformer(nn.Module):
    """Encoder, decoder, and what makes the first reference points; `DeformableDetr` runs them."""

    def __init__(self, config: DeformableDetrConfig) -> None:
        super().__init__()
        dim = config.hidden_dim
        encoder = nn.ModuleList(DeformableEncoderLayer(config) for _ in range(config.encoder_layers))
        decoder = nn.ModuleList(DeformableDecoderLayer(config) for _ in range(config.decoder_layers))
        self.encoder = nn.ModuleDict(dict(layers=encoder))
        self.decoder = nn.ModuleDict(dict(layers=decoder))
        self.level_embed = nn.Parameter(torch.empty(config.num_levels, dim))
        if config.two_stage:
            self.enc_output = nn.Linear(dim, dim)
            self.enc_output_norm = nn.LayerNorm(dim)
            self.pos_trans = nn.Linear(2 * dim, 2 * dim)
            self.pos_trans_norm = nn.LayerNorm(2 * dim)
        else:
            self.reference_points = nn.Linear(dim, 2)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        for module in self.modules():
            if isinstance(module, DeformableAttention):
                module.reset_parameters()
        nn.init.normal_(self.level_embed)
        if not config.two_stage:
            nn.init.zeros_(self.reference_points.bias)


class DeformableDetr(Detector):
    """Deformable DETR: image [B, C, H, W] → logits [B, Q, K] of independent classes, and boxes [B, Q, 4]."""

    layout = "deformable_detr"
    scoring = "focal"
    config: DeformableDetrConfig

    def __init__(self, config: DeformableDetrConfig) -> None:
        super().__init__(config)
        dim = config.hidden_dim
        channels = self.body.channels[-3:] if config.num_levels > 1 else self.body.channels[-1:]
        projections = [nn.Conv2d(width, dim, 1) for width in channels]
        for _ in range(config.num_levels - len(channels)):
            projections.append(nn.Conv2d(channels[-1] if len(projections) == len(channels) else dim, dim, 3, 2, 1))
        self.input_proj = nn.ModuleList(nn.Sequential(conv, nn.GroupNorm(32, dim)) for conv in projections)
        for conv in projections:
            nn.init.xavier_uniform_(conv.weight)
            nn.init.constant_(conv.bias, 0)  # type: ignore[arg-type]
        self.transformer = DeformableTransformer(config)
        heads = config.decoder_layers + config.two_stage if config.refine else 1
        self.head_names = tuple(f"class_embed.{i}" for i in range(heads))
        self.class_embed = self.class_heads()
        self.bbox_embed = nn.ModuleList(BoxMlp(dim) for _ in range(heads))
        for name, parameter in self.bbox_embed.named_parameters():
            if ".layers.2." in name:
                nn.init.zeros_(parameter)
        if not config.two_stage:
            nn.init.constant_(self.get_parameter("bbox_embed.0.layers.2.bias")[2:], -2.0)
        if not config.two_stage:
            self.query_embed = nn.Embedding(config.num_queries, 2 * dim)

    def class_heads(self) -> nn.Module:
        """A linear layer for each head, which first gives every class the probability 1 %."""
        heads = nn.ModuleList(nn.Linear(self.num_features, self.num_classes) for _ in self.head_names)
        for head in heads:
            nn.init.constant_(head.bias, -math.log(99))  # type: ignore[arg-type]
        return heads

    def head(self, heads: nn.Module, layer: int, x: Tensor) -> Tensor:
        """The output of a layer's head, which is the same for all layers without `refine`; −1 is the encoder's."""
        return heads.get_submodule(str(layer % len(self.head_names) if self.config.refine else 0))(x)

    def forward_features(self, image: Tensor, mask: Tensor | None = None) -> Any:
        """image [B, C, H, W] and mask [B, H, W] → ([(objects [B, Q, D], boxes [B, Q, 4]) of each layer], proposals)."""
        tokens = Tokens(self.maps(image), mask, self.transformer.level_embed)
        reference = tokens.centres
        x = tokens.x
        for layer in self.transformer.encoder["layers"].children():
            x = self.run(layer, x, tokens.pos, reference, tokens.shapes, tokens.mask)
        proposals = None
        if self.config.two_stage:
            query, x, reference, proposals = self.propose(x, tokens)
            memory = proposals.pop("memory")
        else:
            memory = x
            query, start = self.query_embed.weight.chunk(2, -1)
            x = start.expand(len(memory), -1, -1)
            reference = self.transformer.reference_points(query).sigmoid().expand(len(memory), -1, -1)
        layers = []
        for i, layer in enumerate(self.transformer.decoder["layers"].children()):
            scale = tokens.ratios.repeat(1, 1, reference.shape[-1] // 2)
            places = reference[:, :, None] * scale[:, None]
            x = self.run(layer, x, query, places, memory, tokens.shapes, tokens.mask)
            delta = self.head(self.bbox_embed, i, x)
            boxes = shifted(delta, reference)
            layers.append((x, boxes))
            if self.config.refine:
                reference = boxes.detach()
        return layers, proposals

    def maps(self, image: Tensor) -> list[Tensor]:
        """image [B, C, H, W] → L projected maps [B, D, h, w]."""
        stages = self.body(image)
        count = min(len(stages), 3 if self.config.num_levels > 1 else 1)
        maps: list[Tensor] = []
        for i, project in enumerate(self.input_proj):
            source = stages[i - count] if i < count else stages[-1] if i == count else maps[-1]
            maps.append(project(source))
        return maps

    def propose(self, memory: Tensor, tokens: "Tokens") -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Makes queries of the tokens whose first class has the largest logits (section 4.2 and appendix A.4).

        They are embeddings [B, Q, D], objects [B, Q, D] and boxes [B, Q, 4]; all tokens have `logits` and `boxes`.
        """
        transformer = self.transformer
        start, valid = tokens.proposals()
        seen = memory.masked_fill(~valid, 0)
        features = transformer.enc_output_norm(transformer.enc_output(seen))
        logits = self.head(self.class_embed, -1, features)
        boxes = self.head(self.bbox_embed, -1, features) + start
        most = min(self.config.num_queries, boxes.shape[1])
        best = logits[..., 0].topk(most, 1).indices
        chosen = boxes.gather(1, best[..., None].expand(-1, -1, 4)).detach().sigmoid()
        embedding = sines(chosen.to(torch.promote_types(chosen.dtype, torch.float32)), self.num_features // 2)
        query, x = transformer.pos_trans_norm(transformer.pos_trans(embedding.flatten(2).to(memory.dtype))).chunk(2, -1)
        return query, x, chosen, dict(logits=logits, boxes=boxes.sigmoid(), memory=memory)

    def run(self, layer: nn.Module, *inputs: Any) -> Tensor:
        """The output of a layer, which is computed again in the backward pass if asked."""
        return recomputed(layer, *inputs) if self.recomputes else layer(*inputs)

    def forward_head(self, x: Any, pre_logits: bool = False) -> Any:
        """What `forward_features` returns → predictions, see `Detector.forward`."""
        layers, proposals = x
        last = len(layers) - 1
        if pre_logits:
            return layers[last][0]
        first = 0 if self.training else last
        *aux, outputs = [
            dict(logits=self.head(self.class_embed, i, layers[i][0]), boxes=layers[i][1])
            for i in range(first, last + 1)
        ]
        if self.training:
            outputs["aux"] = aux
        return outputs if proposals is None else {**outputs, "proposals": proposals}

    def class_scores(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The best 100 pairs of query and class."""
        flat = logits.sigmoid().flatten(1)
        scores, pairs = flat.topk(min(CANDIDATES, flat.shape[1]), 1)
        return scores, pairs % logits.shape[-1], pairs // logits.shape[-1]


class Tokens:
    """Tokens x [B, N, D] of L maps [B, D, h, w], their positions [B or 1, N, D], and where they are in the image.

    The mask of the image [B, H, W] is True where it is no padding; that of the tokens is [B, N]. `ratios` [B, L, 2] are
    the parts of the width and height of each map that are no padding.
    """

    def __init__(self, maps: list[Tensor], mask: Tensor | None, level_embed: Tensor) -> None:
        like = maps[0]
        self.shapes: Maps = tuple((x.shape[2], x.shape[3]) for x in maps)
        self.x = torch.cat([x.flatten(2).mT for x in maps], 1)
        if mask is None:
            masks = [torch.ones(1, *shape, dtype=torch.bool, device=like.device) for shape in self.shapes]
            self.mask = None
        else:
            masks = [resize_mask(mask, shape) for shape in self.shapes]
            self.mask = torch.cat([m.flatten(1) for m in masks], 1)
        pos = [sine_positions(m, like.shape[1], -0.5, like.dtype) for m in masks]
        self.pos = torch.cat([p + level for p, level in zip(pos, level_embed, strict=True)], 1)
        self.dtype = torch.promote_types(like.dtype, torch.float32)
        self.counts = torch.stack([torch.stack((m[:, 0].sum(1), m[:, :, 0].sum(1)), -1) for m in masks], 1).to(
            self.dtype
        )
        self.ratios = (self.counts / sides_of(self.shapes, self.counts)).expand(len(like), -1, -1)

    def grid(self) -> list[Tensor]:
        """Centres of the cells of each map in cells, (x, y) [N_l, 2]."""
        grids = []
        for h, w in self.shapes:
            rows = torch.arange(h, dtype=self.dtype, device=self.x.device) + 0.5
            columns = torch.arange(w, dtype=self.dtype, device=self.x.device) + 0.5
            y, x = torch.meshgrid(rows, columns, indexing="ij")
            grids.append(torch.stack((x, y), -1).flatten(0, 1))
        return grids

    def fractions(self) -> list[Tensor]:
        """The same in fractions of the part that is no padding, [B or 1, N_l, 2]."""
        counts = self.counts.clamp_min(1)  # a map may be all padding for a small image
        return [grid / counts[:, i, None] for i, grid in enumerate(self.grid())]

    @property
    def centres(self) -> Tensor:
        """The place of each token on each map, [B, N, L, 2], in fractions of the map with its padding."""
        return torch.cat(self.fractions(), 1)[:, :, None] * self.ratios[:, None]

    def proposals(self) -> tuple[Tensor, Tensor]:
        """(logits of a box around each token [B, N, 4], which are ∞ where there is none; where there is [B, N, 1])."""
        boxes = [F.pad(f, (0, 2), value=SMALLEST_BOX * 2.0**level) for level, f in enumerate(self.fractions())]
        box = torch.cat(boxes, 1)
        valid = ((box > BORDER) & (box < 1 - BORDER)).all(-1, keepdim=True)
        if self.mask is not None:
            valid = valid & self.mask[..., None]
        return (box / (1 - box)).log().masked_fill(~valid, math.inf).to(self.x.dtype), valid


def shifted(delta: Tensor, reference: Tensor) -> Tensor:
    """σ(delta + logit(reference)), where the reference has 2 or all 4 coordinates; [B, Q, 4]."""
    clamped = reference.clamp(0, 1)
    logit = (clamped.clamp(min=1e-5) / (1 - clamped).clamp(min=1e-5)).log()
    return (delta + F.pad(logit, (0, 4 - logit.shape[-1]))).sigmoid()


TINY: Options = dict(  # trains from random weights on a CPU; the maps are 1/8, 1/16 and 1/32 of the image's sides
    img_size=256,
    depths=(1, 1, 1, 1),
    block="basic",
    stem_dim=16,
    hidden_dim=96,
    num_heads=4,
    encoder_layers=1,
    decoder_layers=2,
    mlp_dim=192,
    num_queries=30,
    drop_rate=0.0,
    num_levels=3,
    encoder_points=2,
    refine=True,
    two_stage=True,
)
CONFIG = DeformableDetrConfig
MODEL = DeformableDetr
VARIANTS: dict[str, Options] = {
    "deformable_detr_resnet50": {},
    "deformable_detr_resnet50_single_scale": dict(num_levels=1),
    "deformable_detr_resnet50_single_scale_dc5": dict(num_levels=1, dilation=True),
    "deformable_detr_resnet50_refine": dict(refine=True),
    "deformable_detr_resnet50_two_stage": dict(refine=True, two_stage=True),
    "deformable_detr_digits": dict(**DIGITS, num_levels=2, refine=True),  # for scenes of 32 x 32 pixels
    "deformable_detr_tiny": TINY,
}

# Names in checkpoints: the authors', and those of transformers.

AUTHORS = Layout(
    name="fundamentalvision",
    mark="transformer.decoder.layers.0.cross_attn.sampling_offsets.weight",
    resize="bicubic",
    needs=BACKBONE,
)
TRANSFORMERS = transformers_layout(
    "model.decoder.layers.0.encoder_attn.sampling_offsets.weight",
    {"input_proj": "model.input_proj"},
    {"cross_attn": "encoder_attn", "norm{1,2}": "{encoder_attn,self_attn}_layer_norm"},
)
HEAD = re.compile(r"(?:transformer\.decoder\.)?(class_embed|bbox_embed)\.(\d+)\.(.+)")


def fit_heads(model: Any, target: State, state: State, metadata: Mapping[str, str], mode: str) -> Fitted:
    """Removes heads that a file has under several names; for the arguments see `fit.fit`."""
    for key in list(state):
        if (match := HEAD.fullmatch(key)) is None:
            continue
        kind, number, rest = match.groups()
        original = f"{kind}.{number if model.config.refine else 0}.{rest}"
        if original == key:
            continue
        if not torch.equal(state[key], state.setdefault(original, state[key])):  # a file may have one name of several
            raise WeightsError(
                f"{key} of the checkpoint differs from {original}, and the model has one tensor for both; create it "
                "with refine=True"
            )
        del state[key]
    return [], ""


def write(model: Any, state: State, layout: Layout) -> State:
    """Converts our tensors to the names of a layout, in which heads have several names."""
    config = model.config
    state = dict(state)
    for key in list(state):
        if (match := HEAD.fullmatch(key)) is None:
            continue
        kind, _, rest = match.groups()
        if not config.refine:
            state |= {f"{kind}.{i}.{rest}": state[key].clone() for i in range(1, config.decoder_layers)}
        elif kind == "bbox_embed" or config.two_stage:
            state[f"transformer.decoder.{key}"] = state[key].clone()
    return layout.convert(state, model.head_names, config.num_classes)


CHECKPOINTS = CheckpointFormats(
    "Deformable DETR",
    (AUTHORS, TRANSFORMERS),
    fit_heads,
    {"fundamentalvision": (AUTHORS,), "transformers": (TRANSFORMERS,)},
    write=write,
    choose=choose,
    irrelevant=UNTRAINED,
)
