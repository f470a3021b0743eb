"""NaFlex — one ViT for images of any size and shape, several in a batch. Tschannen et al., SigLIP 2, arXiv:2502.14786.

After Patch n' Pack (NaViT, Dehghani et al., arXiv:2307.06304) and FlexiViT; timm's NaFlexVit batches in the same way.
Differs from ViT:
  1. Its input is patches, not pixels: [B, L, 2 + P·P·C], each with its row and column, which are −1 for padding.
     `fastvit_triton.train.data.naflex` creates them.
  2. Positions are resampled to each image's grid, and keys of padding tokens are masked.
Adds nothing: the weights are those of the `VisionTransformer` with the same config.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ..checkpoints.tensors import State
from ..engine.body import normalize
from ..kernels.attention import attention
from ..kernels.linear import linear
from ..layers import Attention
from .config import Options, ViTConfig
from .transformer import VisionTransformer
from .vit import BASE, TIMM


class NaFlexAttention(Attention):
    """Attention with `kv_lens[b]` valid keys for image b; the model sets `kv_lens` before its blocks run."""

    kv_lens: Tensor | None = None

    def attend(self, qkv: Tensor) -> Tensor:
        """[B, N, 3·H·d] → [B, N, H·d], as `Attention`."""
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)  # [B, H, N, d]
        o = attention(self.q_norm(q), self.k_norm(k), v, None, self.scale, self.kv_lens)
        return o.transpose(1, 2).flatten(2)


class NaFlexVisionTransformer(VisionTransformer):
    """ViT on patches of images of any size; `img_size` of its config is the size of the position table."""

    feature_formats = ("NLC",)  # the images of a batch have different grids

    def __init__(self, config: ViTConfig) -> None:
        if config.pos_embed == "relative" or config.attn_drop_rate or config.patch_drop_rate:
            raise ValueError("relative positions, attention dropout and patch dropout need images of one size")
        if config.global_pool == "map":
            raise ValueError("global_pool is 'map'; images of several sizes need 'token', 'avg' or 'none'")
        super().__init__(config, attention=NaFlexAttention)
        self.lengths: Tensor | None = None  # [B], tokens of each image in the current batch

    def embed(self, image: Tensor) -> Tensor:
        """patches [B, L, 2 + P·P·C] → tokens [B, T + L, D] before the first block; padding tokens are undefined."""
        places = image[..., :2].long()
        patches = image[..., 2:]
        valid = places[..., 0] >= 0  # [B, L]
        projection = self.patch_embed.proj
        weight = projection.weight.permute(0, 2, 3, 1).flatten(1)  # [D, P·P·C], in the patches' order
        x = linear(patches, weight, projection.bias)
        tokens = self.prefix()
        prefix = torch.cat(tokens, 1).expand(x.shape[0], -1, -1) if tokens else x[:, :0]
        grids = [(int(rows) + 1, int(columns) + 1) for rows, columns in places.amax(1).tolist()]
        tables = [table for table in map(self.positions, grids) if table is not None]
        if tables:
            first = tables[0].shape[1] - grids[0][0] * grids[0][1]  # rows of the prefix tokens
            prefix = prefix + tables[0][:, :first] if first else prefix
            rows = [
                table[0, first:][place[:, 0].clamp(min=0) * grid[1] + place[:, 1].clamp(min=0)]
                for table, grid, place in zip(tables, grids, places, strict=True)
            ]
            x = x + torch.stack(rows)
        x = normalize(self.pos_drop(torch.cat((prefix.to(x.dtype), x), 1)), self.norm_pre)
        self.lengths = self.num_prefix_tokens + valid.sum(1)
        for block in self.blocks:
            block.attn.kv_lens = self.lengths
        return x

    def for_images(self, size: tuple[int, int]) -> VisionTransformer:
        """The plain ViT that computes the same for images [B, C, H, W] of this size, with copies of the weights."""
        plain = VisionTransformer(self.config.replace(img_size=size)).train(self.training)
        table = self.positions(plain.patch_embed.grid_size)
        plain.load_state_dict(self.state_dict() | ({} if self.pos_embed is None else {"pos_embed": table}))
        plain.variant = self.variant
        plain.pretrained_cfg = self.pretrained_cfg
        return plain

    def pool(self, x: Tensor) -> Tensor:
        """Tokens [B, T + L, D] → [B, D]: the class token, or the mean of the image's patches without padding."""
        if self.config.global_pool in ("token", "none"):
            return super().pool(x)
        assert self.lengths is not None, "forward_features sets the lengths"
        T = self.num_prefix_tokens
        valid = torch.arange(T, x.shape[1], device=x.device) < self.lengths[:, None]  # [B, L]
        return (x[:, T:] * valid[..., None]).sum(1) / valid.sum(1, keepdim=True)


SO150M2: Options = dict(embed_dim=832, depth=21, num_heads=13, mlp_ratio=34 / 13)
FLEX = dict(img_size=256, class_token=False, no_embed_class=True, global_pool="avg", init_values=1e-5)

CONFIG = ViTConfig
MODEL = NaFlexVisionTransformer
VARIANTS: dict[str, Options] = {
    "naflexvit_base_patch16_gap": dict(BASE, **FLEX, reg_tokens=4),
    "naflexvit_so150m2_patch16_reg1_gap": dict(SO150M2, **FLEX, qkv_bias=False, reg_tokens=1),
}


# Names in checkpoints, from timm 1.0.31.


def read_naflex(tensors: State) -> State:
    """Flattens positions [1, h, w, D] to [1, h·w, D]."""
    key = "embeds.pos_embed"
    return {**tensors, key: tensors[key].flatten(1, 2)} if tensors[key].dim() == 4 else tensors


TIMM_NAFLEX = replace(
    TIMM,
    name="timm NaFlexViT",
    mark="embeds.pos_embed",
    stem={
        "cls_token": "embeds.cls_token",
        "reg_token": "embeds.reg_token",
        "pos_embed": "embeds.pos_embed",
        "patch_embed.proj": "embeds.proj",
    },
    read=read_naflex,
)
