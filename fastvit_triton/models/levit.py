"""LeViT — a vision transformer in ConvNet's clothing. Graham et al., arXiv:2104.01136 (facebookresearch/LeViT).

Differs from ViT:
  1. Four convolutions with stride 2 project the image; three stages, between which attention halves the map.
  2. Every linear layer has a BatchNorm instead of a bias, folded in inference after `freeze`; there is no LayerNorm.
  3. Keys are narrower than values; a learned bias per head, |Δrow| and |Δcolumn| instead of positions; no class token.
  4. An activation (hard swish) also between attention and its last layer.
  5. Two heads on the mean of the tokens; the second learns from a teacher.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from ..checkpoints.layout import Layout, Spelling
from ..checkpoints.tensors import State
from ..layers import Blocks
from ..layers import levit as layers
from ..layers.embed import sides
from .config import Options, check_patches
from .distilled import Distilled, NormedHead
from .pyramid import PyramidConfig


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
    only: ClassVar[dict[str, Any]] = dict(final_norm=False, dynamic_img_size=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.patch_size not in ((8, 8), (16, 16)):
            raise ValueError(f"patch_size is {self.patch_size}; use 8 or 16, the strides of LeViT's stems")
        check_patches(self)

    @property
    def widths(self) -> tuple[int, ...]:
        return self.embed_dim

    def check_heads(self) -> None:
        """Heads have `key_dim` channels each, whatever the width of the stage."""


class Levit(NormedHead):
    """LeViT with one head; its features are tokens [B, N, D]."""

    layout = "levit"
    undecayed = r"attention_biases$"

    def __init__(self, config: LevitConfig) -> None:
        super().__init__(config)
        height, width = sides(config.img_size)
        stride, _ = sides(config.patch_size)
        D = config.widths[0]
        grid = (height // stride, width // stride)
        stages = nn.ModuleList()
        self.stem = layers.stem(config.in_chans, D, stride)
        for i, (D, rates) in enumerate(zip(config.widths, self.drop_path_rates(), strict=True)):
            down: nn.Module = nn.Identity()
            if i:
                attn = layers.DistanceDownsample(config.widths[i - 1], D, config.key_dim, grid)
                down = layers.LevitDownsample(attn, layers.NormedMlp(D, 2 * D), config.drop_path_rate)
                grid = (-(-grid[0] // 2), -(-grid[1] // 2))
            stages.append(layers.LevitStage(down, Blocks(*(build_block(config, i, grid, p) for p in rates)), grid))
        self._modules["stages"] = stages
        self.build_head()

    def drop_path_rates(self) -> list[list[float]]:
        """Rates of the blocks of each stage, which are all the same."""
        return [[self.config.drop_path_rate] * depth for depth in self.config.depths]

    def stage(self, x: Tensor, i: int) -> Tensor:
        """Stage i: image [B, C, H, W] or map [B, H, W, D] → map [B, H', W', D']."""
        return self.stages[i](x if i else self.stem(x).permute(0, 2, 3, 1), self.recomputes)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Regular expressions that assign parameters to layers, for timm's layer-wise learning rates."""
        fine = [(r"^stages\.(\d+)\.downsample", (0,)), (r"^stages\.(\d+)\.blocks\.(\d+)", None)]
        return dict(stem=r"^stem", blocks=r"^stages\.(\d+)" if coarse else fine)


class LevitDistilled(Distilled, Levit):
    """LeViT with a second head, which reads the same features."""

    head_names = ("head.linear", "head_dist.linear")


def build_block(config: LevitConfig, stage: int, grid: tuple[int, int], drop_path: float) -> layers.NormedBlock:
    """Builds one block of a stage."""
    D, heads = config.widths[stage], config.num_heads[stage]
    attn = layers.DistanceAttention(D, config.key_dim, heads, config.attn_ratio, grid)
    return layers.NormedBlock(attn, layers.NormedMlp(D, int(D * config.mlp_ratio), config.proj_drop_rate), drop_path)


CONFIG = LevitConfig
MODEL = LevitDistilled
VARIANTS: dict[str, Options] = {
    "levit_128s": dict(num_heads=(4, 6, 8), depths=(2, 3, 4)),
    "levit_128": {},
    "levit_192": dict(embed_dim=(192, 288, 384), key_dim=32, num_heads=(3, 5, 6)),
    "levit_256": dict(embed_dim=(256, 384, 512), key_dim=32, num_heads=(4, 6, 8)),
    "levit_384": dict(embed_dim=(384, 512, 768), key_dim=32, num_heads=(6, 9, 12)),
}
ORACLE = dict.fromkeys(VARIANTS, "timm")

# Counted by timm 1.0.31.
PARAMS = dict(zip(VARIANTS, (7_777_058, 9_213_936, 10_947_069, 18_893_876, 39_128_836), strict=True))

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
    found = LAYER.fullmatch(key)
    head, inside = (key[: found.start(3)], found[3]) if found else ("", key)
    if inside.count(".") < 2:
        return key
    module, part, leaf = inside.rsplit(".", 2)
    if conv := re.fullmatch(r"(patch_embed\.|patch_embeddings\.embedding_layer_)(\d+)", module):
        number = int(conv[2])
        module = f"stem.conv{number // 2 + 1 if conv[1] == 'patch_embed.' else number}"
    module = (INSIDE if found else LEVIT_HEADS).get(module, module)
    return f"{head}{module}.{LEAVES.get(part, part)}.{leaf}"


def _read_levit(state: State) -> State:
    """Attentions and MLPs are one list of layers for the authors, and one per stage in transformers; each attention
    with a stride ends a stage there and begins the next one in timm, with the MLP after it."""
    layers: dict[tuple[int, int], dict[str, Any]] = {}
    read: State = {}
    for key, tensor in state.items():
        key = _from_levit(key)
        if found := LAYER.fullmatch(key):
            layers.setdefault((int(found[1] or 0), int(found[2])), {})[found[3]] = tensor
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


def fit_levit(model: Any, target: State, state: State, metadata: Mapping[str, str], mode: str) -> tuple[list[str], str]:
    """Drops heads that the model has not, and tables of indices; for the arguments see `fit.fit`."""
    absent = [key for key in state if key.startswith(("head.", "head_dist.")) and key not in target]
    useless = [key for key in state if key.endswith("attention_bias_idxs")] + absent
    for key in useless:
        del state[key]
    return useless, ""


CHECKPOINTS = Spelling("LeViT", LEVIT_LAYOUTS, fit_levit, {"timm": (TIMM_LEVIT,)})
