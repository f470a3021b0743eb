"""LeViT — a vision transformer in ConvNet's clothing. Graham et al., arXiv:2104.01136 (facebookresearch/LeViT).

Differs from ViT:
  1. Four convolutions with stride 2 project the image; three stages, between which attention halves the map.
  2. Every linear layer has a BatchNorm instead of a bias, folded in inference after `freeze`; there is no LayerNorm.
  3. Keys are narrower than values; a learned bias per head, |Δrow| and |Δcolumn| instead of positions; no class token.
  4. An activation (hard swish) also between attention and its last layer.
  5. Two heads on the mean of the tokens; the second learns from a teacher.
"""

import re
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoints.renaming import CheckpointFormats, Layout
from ..checkpoints.tensors import State
from ..layers import Blocks, DropPath
from ..layers.drop_path import add
from ..layers.embed import sides
from ..layers.fusable import Fusable
from ..layers.normed import ConvNorm, LinearNorm, NormLinear
from ..layers.window import expand_table
from .config import Options, check_patches
from .distilled import Distilled
from .fit import fit_tables
from .pyramid import PyramidConfig, PyramidTransformer

Grid = tuple[int, int]


class DistanceAttention(Fusable):
    """Self-attention of the tokens of a grid, with a learned bias per head, |Δrow| and |Δcolumn| (eq. 2).

    The projection holds the queries, keys and values of the first head, then those of the second.
    """

    def __init__(self, dim: int, key_dim: int, num_heads: int, ratio: float, grid: Grid) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.key_dim = key_dim
        self.val_dim = int(ratio * key_dim)
        self.scale = key_dim**-0.5
        self.grid = grid
        self.qkv = LinearNorm(dim, num_heads * (2 * key_dim + self.val_dim))
        self.proj: Any = last_layer(num_heads * self.val_dim, dim, 0.0)
        self.attention_biases = nn.Parameter(torch.zeros(num_heads, grid[0] * grid[1]))

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, D] → [B, N, D]."""
        return self.proj(self.attend(self.qkv(x)))

    def attend(self, qkv: Tensor) -> Tensor:
        """Projections [B, N, H · (2 · D + Dv)] → [B, N, H · Dv]."""
        sizes: list[int] = [self.key_dim, self.key_dim, self.val_dim]
        q, k, v = qkv.unflatten(-1, (self.num_heads, -1)).transpose(1, 2).split(sizes, -1)
        return attended(q, k, v, self.get_attention_biases(), self.scale)

    def get_attention_biases(self, device: torch.device | None = None) -> Tensor:
        """The bias of every pair of tokens [H, N, N]."""
        return distance_table(self.attention_biases, self.grid)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, key_dim={self.key_dim}, val_dim={self.val_dim}"


class DistanceDownsample(Fusable):
    """Attention whose queries are every other row and column of the grid; it has no residual.

    Values have 4 times as many channels as keys.
    """

    def __init__(self, dim: int, out: int, key_dim: int, grid: Grid) -> None:
        super().__init__()
        self.num_heads = dim // key_dim
        self.key_dim = key_dim
        self.val_dim = 4 * key_dim
        self.scale = key_dim**-0.5
        self.grid = grid
        inner = self.num_heads * key_dim
        self.kv = LinearNorm(dim, inner + self.num_heads * self.val_dim)
        self.q: Any = nn.Sequential(OrderedDict(down=Subsample(grid), ln=LinearNorm(dim, inner)))
        self.proj: Any = last_layer(self.num_heads * self.val_dim, out, 1.0)
        self.attention_biases = nn.Parameter(torch.zeros(self.num_heads, grid[0] * grid[1]))

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, D] → [B, N', D']."""
        return self.proj(self.attend(self.q(x), self.kv(x)))

    def attend(self, q: Tensor, kv: Tensor) -> Tensor:
        """Queries [B, N', H · D], keys and values [B, N, H · (D + Dv)] → [B, N', H · Dv]."""
        q, kv = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, kv))
        k, v = kv.split([self.key_dim, self.val_dim], -1)
        return attended(q, k, v, self.get_attention_biases(), self.scale)

    def get_attention_biases(self, device: torch.device | None = None) -> Tensor:
        """The bias of every query and key [H, N', N]."""
        pairs = distance_table(self.attention_biases, self.grid).unflatten(1, self.grid)
        return pairs[:, ::2, ::2].flatten(1, 2)


class Subsample(nn.Module):
    """Every other row and column of a grid."""

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.grid = grid

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, D] → [B, N', D]."""
        return x.unflatten(1, self.grid)[:, ::2, ::2].flatten(1, 2)


class NormedMlp(Fusable):
    """Two linear layers with a BatchNorm each, and an activation between them."""

    def __init__(self, dim: int, hidden: int, drop: float = 0.0) -> None:
        super().__init__()
        self.ln1 = LinearNorm(dim, hidden)
        self.act = nn.Hardswish()
        self.drop = nn.Dropout(drop)
        self.ln2 = LinearNorm(hidden, dim, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, D] → [B, N, D]."""
        return self.ln2(self.drop(self.act(self.ln1(x))))


class NormedBlock(Fusable):
    """x + f(x) for f = attention, then MLP, whose norms are within them."""

    def __init__(self, attn: nn.Module, mlp: nn.Module, drop_path: float = 0.0) -> None:
        super().__init__()
        self.attn = attn
        self.drop_path1 = DropPath(drop_path)
        self.mlp = mlp
        self.drop_path2 = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, D] → [B, N, D]."""
        x = add(x, self.drop_path1, self.attn)
        return add(x, self.drop_path2, self.mlp)


class LevitDownsample(Fusable):
    """Attention that halves the grid, then an MLP with a residual."""

    def __init__(self, attn: DistanceDownsample, mlp: NormedMlp, drop_path: float = 0.0) -> None:
        super().__init__()
        self.attn_downsample = attn
        self.mlp = mlp
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, D] → [B, N', D']."""
        return add(self.attn_downsample(x), self.drop_path, self.mlp)


class LevitStage(nn.Module):
    """A downsampling, an Identity in the first stage, and blocks; the map that it returns has the size `grid`."""

    def __init__(self, downsample: nn.Module, blocks: Blocks, grid: Grid) -> None:
        super().__init__()
        self.downsample = downsample
        self.blocks = blocks
        self.grid = grid

    def forward(self, x: Tensor, recompute: bool = False) -> Tensor:
        """[B, H, W, D] → [B, H', W', D']."""
        return self.blocks(self.downsample(x.flatten(1, 2)), recompute=recompute).unflatten(1, self.grid)


def conv_stem(in_chans: int, dim: int, stride: int) -> nn.Sequential:
    """Convolutions with stride 2, 4 for a total stride of 16, whose channels double up to D; [B, C, H, W] → map."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    count = stride.bit_length() - 1
    widths = [in_chans, *(dim >> i for i in reversed(range(count)))]
    for i in range(count):
        layers[f"conv{i + 1}"] = ConvNorm(widths[i], widths[i + 1], 3, 2, 1)
        if i + 1 < count:
            layers[f"act{i + 1}"] = nn.Hardswish()
    return nn.Sequential(layers)


def last_layer(inputs: int, outputs: int, scale: float) -> nn.Sequential:
    """The activation and the layer after attention."""
    return nn.Sequential(OrderedDict(act=nn.Hardswish(), ln=LinearNorm(inputs, outputs, scale)))


def attended(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Attention of the heads [B, H, N', d] with the bias [H, N', N] added to the scores: [B, N', H · Dv]."""
    o = F.scaled_dot_product_attention(q, k, v, bias[None].to(q.dtype), scale=scale)
    return o.transpose(1, 2).flatten(2)


def distance_table(table: Tensor, grid: Grid) -> Tensor:
    """Biases of all distances [H, rows · columns] → those of all pairs of tokens [H, N, N]."""
    table = table.unflatten(1, grid)
    table = torch.cat((table[:, 1:].flip(1), table), 1)
    table = torch.cat((table[:, :, 1:].flip(2), table), 2)  # of all offsets, [H, 2 · rows − 1, 2 · columns − 1]
    return expand_table(table.permute(1, 2, 0).flatten(0, 1), grid)


@dataclass(frozen=True, kw_only=True)
class LevitConfig(PyramidConfig):
    """Options of LeViT, in addition to those of `PyramidConfig`; `patch_size` is the stride of the stem, 16 or 8.

    Attributes:
        embed_dim: channels of each stage.
        key_dim: channels of a key; between stages there are as many heads as fit in the channels.
        attn_ratio: channels of a value divided by those of a key; 4 between stages.
        mlp_ratio: hidden channels of the MLP divided by the channels; 2 between stages.
    """

    patch_size: int | tuple[int, int] = 16
    embed_dim: tuple[int, ...] = (128, 256, 384)
    key_dim: int = 16
    depths: tuple[int, ...] = (4, 4, 4)
    num_heads: tuple[int, ...] = (4, 8, 12)
    attn_ratio: float = 2.0
    mlp_ratio: float = 2.0
    final_norm: bool = False
    dynamic_img_size: bool = False
    only: ClassVar = dict(final_norm=False, dynamic_img_size=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.patch_size not in ((8, 8), (16, 16)):
            raise ValueError(f"patch_size is {self.patch_size}; use 8 or 16, the strides of LeViT's stems")
        check_patches(self.img_size, self.patch_size)

    def check_heads(self) -> None:
        """Heads have `key_dim` channels each, whatever the width of the stage."""


class Levit(Distilled, PyramidTransformer):
    """LeViT with two heads; its features are tokens [B, N, D]."""

    layout = "levit"
    head_names = ("head.linear", "head_dist.linear")
    undecayed = r"attention_biases$"
    layer_patterns = ((r"^stages\.(\d+)\.downsample", (0,)), (r"^stages\.(\d+)\.blocks\.(\d+)", None))

    def __init__(self, config: LevitConfig) -> None:
        super().__init__(config)
        height, width = sides(config.img_size)
        stride, _ = sides(config.patch_size)
        D = config.widths[0]
        grid = (height // stride, width // stride)
        self.stem = conv_stem(config.in_chans, D, stride)
        self.stages = nn.ModuleList()
        for i, (D, rates) in enumerate(zip(config.widths, self.drop_path_rates(), strict=True)):
            down: nn.Module = nn.Identity()
            if i:
                attn = DistanceDownsample(config.widths[i - 1], D, config.key_dim, grid)
                down = LevitDownsample(attn, NormedMlp(D, 2 * D), config.drop_path_rate)
                grid = (-(-grid[0] // 2), -(-grid[1] // 2))
            self.stages.append(LevitStage(down, Blocks(*(build_block(config, i, grid, p) for p in rates)), grid))
        self.build_head()

    def drop_path_rates(self) -> list[list[float]]:
        """Rates of the blocks of each stage, which are all the same."""
        return [[self.config.drop_path_rate] * depth for depth in self.config.depths]

    def stage(self, x: Tensor, i: int) -> Tensor:
        """Stage i: image [B, C, H, W] or map [B, H, W, D] → map [B, H', W', D']."""
        return self.stages[i](x if i else self.stem(x).permute(0, 2, 3, 1), self.recomputes)

    def build_head(self) -> None:
        """Creates the classifiers, which have the dropout within them, and initialises all weights."""
        super().build_head()
        self.head_drop = nn.Dropout(0.0)

    def stage_features(self, x: Tensor, stage: int) -> Tensor:
        """A map [B, H, W, D] as tokens."""
        return x.flatten(1, 2)

    def get_classifier(self) -> Any:
        return self.head, self.head_dist

    def make_head(self) -> nn.Module:
        """A classifier with its BatchNorm, an Identity for no classes."""
        classes = self.num_classes
        return NormLinear(self.num_features, classes, self.config.drop_rate) if classes else nn.Identity()

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replaces the heads by new ones, whose linear layers are zero; 0 removes them."""
        like = next(self.parameters())
        self.config = self.config.replace(num_classes=num_classes, global_pool=global_pool)
        self.num_classes = num_classes
        for name in ("head", "head_dist"):
            setattr(self, name, self.make_head().to(like).train(self.training))
            for parameter in getattr(getattr(self, name), "linear", nn.Identity()).parameters():
                nn.init.zeros_(parameter)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Keeps the layers' own initial values, as in timm."""


def build_block(config: LevitConfig, stage: int, grid: tuple[int, int], drop_path: float) -> NormedBlock:
    """Builds one block of a stage."""
    D = config.widths[stage]
    heads = config.num_heads[stage]
    attn = DistanceAttention(D, config.key_dim, heads, config.attn_ratio, grid)
    return NormedBlock(attn, NormedMlp(D, int(D * config.mlp_ratio), config.proj_drop_rate), drop_path)


CONFIG = LevitConfig
MODEL = Levit
VARIANTS: dict[str, Options] = {
    "levit_128s": dict(num_heads=(4, 6, 8), depths=(2, 3, 4)),
    "levit_128": {},
    "levit_192": dict(embed_dim=(192, 288, 384), key_dim=32, num_heads=(3, 5, 6)),
    "levit_256": dict(embed_dim=(256, 384, 512), key_dim=32, num_heads=(4, 6, 8)),
    "levit_384": dict(embed_dim=(384, 512, 768), key_dim=32, num_heads=(6, 9, 12)),
}


# Names in checkpoints, from timm 1.0.31, transformers 5.23 and the authors' levit.py.


def _flat(state: State) -> State:
    """Convolutions of 1 x 1 pixels, but in the stem, as linear layers."""
    return {k: t.flatten(1) if t.dim() == 4 and not k.startswith("stem.") else t for k, t in state.items()}


LAYER = re.compile(r"(?:encoder\.stages\.(\d+)\.layers|blocks)\.(\d+)\.(?:m\.|module\.)?(.+)")
INSIDE = {  # names of modules in a layer: the authors', then those of transformers
    "q.1": "q.ln",
    "proj.1": "proj.ln",
    "0": "ln1",
    "2": "ln2",
    "queries_keys_values": "qkv",
    "keys_values": "kv",
    "queries": "q.ln",
    "projection": "proj.ln",
    "linear_up": "ln1",
    "linear_down": "ln2",
}
LEAVES = {"c": "linear", "l": "linear", "convolution": "linear", "batch_norm": "bn"}
LEVIT_HEADS = {"classifier": "head", "classifier_distill": "head_dist"}


def _from_levit(key: str) -> str:
    """Names of a layer, of the stem and of the heads; the layers keep their numbers."""
    match = LAYER.fullmatch(key)
    head, inside = (key[: match.start(3)], match[3]) if match else ("", key)
    if inside.count(".") < 2:
        return key
    module, part, leaf = inside.rsplit(".", 2)
    if conv := re.fullmatch(r"(patch_embed\.|patch_embeddings\.embedding_layer_)(\d+)", module):
        number = int(conv[2])
        module = f"stem.conv{number // 2 + 1 if conv[1] == 'patch_embed.' else number}"
    module = (INSIDE if match else LEVIT_HEADS).get(module, module)
    return f"{head}{module}.{LEAVES.get(part, part)}.{leaf}"


def _read_levit(state: State) -> State:
    """Attentions and MLPs are one list of layers for the authors, and one per stage in transformers; each attention
    with a stride ends a stage there and begins the next one in timm, with the MLP after it."""
    layers: dict[tuple[int, int], dict[str, Any]] = {}
    read: State = {}
    for key, tensor in state.items():
        key = _from_levit(key)
        if match := LAYER.fullmatch(key):
            layers.setdefault((int(match[1] or 0), int(match[2])), {})[match[3]] = tensor
        else:
            read[key] = tensor
    stage, block = 0, -1
    for _, layer in sorted(layers.items()):
        if "kv.linear.weight" in layer:
            stage, block, home = stage + 1, -1, f"stages.{stage + 1}.downsample.attn_downsample"
        elif "qkv.linear.weight" in layer:
            block, home = block + 1, f"stages.{stage}.blocks.{block + 1}.attn"
        else:
            home = f"stages.{stage}.downsample.mlp" if block < 0 else f"stages.{stage}.blocks.{block}.mlp"
        read |= {f"{home}.{name}": tensor for name, tensor in layer.items()}
    return read


LEVIT: dict[str, Any] = dict(resize="bicubic", read=_read_levit)
TIMM_LEVIT = Layout(name="timm", mark="stem.conv1.linear.weight", resize="bicubic", read=_flat)
LEVIT_LAYOUTS = (
    Layout(name="transformers LeViT", mark="patch_embeddings.embedding_layer_1.convolution.weight", **LEVIT),
    Layout(name="LeViT", mark="patch_embed.0.c.weight", **LEVIT),
    TIMM_LEVIT,
)

CHECKPOINTS = CheckpointFormats("LeViT", LEVIT_LAYOUTS, fit_tables, {"timm": (TIMM_LEVIT,)})
