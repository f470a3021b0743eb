"""Image Transformer. Parmar et al., ICML 2018, arXiv:1802.05751. Official: tensor2tensor, models/image_transformer.py.

Differs from ViT:
  1. A token is one channel of a pixel, 3072 for 32 pixels; the model predicts its level, of 256, from those before.
  2. Attention is causal and local: a block of 256 tokens reads itself and the block before it, or (`_2d`) a rectangle
     of the map reads itself, and the flanges at its left and above it (section 3.3).
  3. Blocks are post-norm, projections have no biases, positions are fixed sines of row and column.
  4. `_dmol`: a token is a pixel, whose three channels have a mixture of ten discretized logistics (PixelCNN++,
     arXiv:1701.05517, equations 1-3).
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoints.renaming import CheckpointFormats, Layout
from ..kernels.attention import attention
from ..layers import Mlp
from ..layers.embed import sides
from ..layers.fusable import Fusable
from . import fit
from .base import LAST
from .config import BaseConfig, Options, check_multiple
from .pixel import KeyValues, PixelModel


class Blocks1d(nn.Module):
    """Causal attention of blocks of tokens to themselves and to the block before (local 1-D attention)."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Queries [B, H, n, d] of the first n tokens, or of the last one of them → [B, H, n, d] or [B, H, 1, d]."""
        L = self.length
        n = k.shape[2]
        if q.shape[2] < n:
            first = max(0, (n - 1) // L - 1) * L
            return attention(q, k[:, :, first:], v[:, :, first:], causal=True)
        if n <= L:
            return attention(q, k, v, causal=True)
        padding = (0, 0, 0, -n % L)
        q, k, v = (F.pad(t, padding).unflatten(2, (-1, L)) for t in (q, k, v))  # [B, H, blocks, L, d]
        first_block = attention(q[:, :, 0], k[:, :, 0], v[:, :, 0], causal=True)
        k, v = (torch.cat((t[:, :, :-1], t[:, :, 1:]), 3) for t in (k, v))  # the block before, and its own
        q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q[:, :, 1:], k, v))  # [B·(blocks − 1), H, L or 2·L, d]
        others = attention(q, k, v, causal=True).unflatten(0, (first_block.shape[0], -1)).transpose(1, 2).flatten(2, 3)
        return torch.cat((first_block, others), 2)[:, :, :n]


class Blocks2d(nn.Module):
    """Causal attention of rectangles of a map to themselves, and to the flanges at their left and above them.

    A flange is (rows above, columns at the left and right): that above is wider than the rectangle by that at the left
    on both sides. Tokens are in the order of rectangles, and of rows within each (local 2-D attention; tensor2tensor's
    masked_local_attention_2d).
    """

    order: Tensor
    memory: Tensor
    valid: Tensor

    def __init__(self, grid: tuple[int, int], block: tuple[int, int], flange: tuple[int, int]) -> None:
        super().__init__()
        rows, columns = grid
        self.grid = grid
        self.block = block
        self.flange = flange
        self.length = block[0] * block[1]
        at = torch.arange(rows * columns).reshape(rows, columns)
        tiles = at.unflatten(0, (-1, block[0])).unflatten(2, (-1, block[1])).transpose(1, 2)
        order = tiles.flatten()  # the place in the map of each token
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        wide = torch.full((rows + flange[0], columns + 2 * flange[1]), -1)
        wide[flange[0] :, flange[1] : flange[1] + columns] = place.reshape(rows, columns)
        memory = []
        for y in range(0, rows, block[0]):
            for x in range(0, columns, block[1]):
                above = wide[y : y + flange[0], x : x + block[1] + 2 * flange[1]]
                left = wide[y + flange[0] : y + flange[0] + block[0], x : x + flange[1]]
                query_block = place.reshape(rows, columns)[y : y + block[0], x : x + block[1]]
                memory.append(torch.cat((above.flatten(), left.flatten(), query_block.flatten())))
        table = torch.stack(memory)  # [blocks, M], the tokens that a block reads; −1 outside the map
        self.register_buffer("order", order, persistent=False)
        self.register_buffer("memory", table.clamp_min(0), persistent=False)
        self.register_buffer("valid", table >= 0, persistent=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Queries [B, H, n, d] of the first n tokens, or of the last one of them → [B, H, n, d] or [B, H, 1, d]."""
        L = self.length
        n = k.shape[2]
        if q.shape[2] < n:
            block = (n - 1) // L
            memory = self.memory[block]
            visible = self.valid[block] & (memory < n)
            memory = memory.clamp_max(n - 1)
            return F.scaled_dot_product_attention(q, k[:, :, memory], v[:, :, memory], visible[None])
        blocks = -(-n // L)
        causal = torch.ones(L, L, dtype=torch.bool, device=q.device).tril()
        flanges = self.valid[:blocks, None, :-L].expand(-1, L, -1)
        visible = torch.cat((flanges, causal.expand(blocks, L, L)), 2)[:, None]  # [blocks, 1, L, M]
        q = F.pad(q, (0, 0, 0, blocks * L - n)).unflatten(2, (blocks, L)).transpose(1, 2)  # [B, blocks, H, L, d]
        k, v = (self.regions(t)[:, :, :blocks].transpose(1, 2) for t in (k, v))  # [B, blocks, H, M, d]
        o = F.scaled_dot_product_attention(q, k, v, visible)
        return o.transpose(1, 2).flatten(2, 3)[:, :, :n]

    def regions(self, x: Tensor) -> Tensor:
        """Keys or values [B, H, n, d] → those that each block reads, [B, H, blocks, M, d], in the order of `memory`.

        They are windows of the map, as the gradient of indices that repeat has not the same bits in every run.
        """
        (rows, columns), (h, w), (above, beside) = self.grid, self.block, self.flange
        x = F.pad(x, (0, 0, 0, rows * columns - x.shape[2])).unflatten(2, (rows // h, columns // w, h, w))
        query_blocks = x.flatten(4, 5)
        wide = x.transpose(3, 4).flatten(4, 5).flatten(2, 3)  # [B, H, rows, columns, d]
        wide = F.pad(wide, (0, 0, beside, beside, above, 0))
        parts = [query_blocks]
        if beside:
            left = wide[:, :, above:, : columns - w + beside].unfold(2, h, h).unfold(3, beside, w)
            parts.insert(0, left.flatten(5).mT)
        if above:
            over = wide[:, :, : rows - h + above].unfold(2, above, h).unfold(3, w + 2 * beside, w)
            parts.insert(0, over.flatten(5).mT)
        return torch.cat(parts, 4).flatten(2, 3)


@dataclass(frozen=True, kw_only=True)
class ImageTransformerConfig(BaseConfig):
    """Options of the Image Transformer, in addition to those of `BaseConfig`; images may depend on num_classes classes.

    Attributes:
        levels: of a channel; 256 in the paper.
        mlp_dim: channels within the MLP.
        block_length: tokens of a block of local 1-D attention.
        block_shape: (rows, columns) of a block of local 2-D attention; None for 1-D.
        flange: (rows above, columns at both sides) that such a block also reads.
        mixtures: logistics of a pixel; 0 for a categorical distribution of each channel.
        pos_embed: "timing" (sines) or "learned" (a table of rows and one of columns).
        drop_rate: dropout of the embedding and after each branch.
    """

    img_size: int | tuple[int, int] = 32
    num_classes: int = 0
    levels: int = 256
    embed_dim: int = 512
    depth: int = 12
    num_heads: int = 4
    head_dim: int | None = None
    mlp_dim: int = 2048
    block_length: int = 256
    block_shape: tuple[int, int] | None = None
    flange: tuple[int, int] = (16, 32)
    mixtures: int = 0
    pos_embed: str = "timing"
    eps: float = 1e-6
    drop_rate: float = 0.3
    zeros = ("num_classes", "mixtures", "flange")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim is None:
            check_multiple(self, "embed_dim", "num_heads")
        if self.pos_embed not in ("timing", "learned"):
            raise ValueError(f"pos_embed is {self.pos_embed!r}; use 'timing' or 'learned'")
        if self.pos_embed == "timing" and (self.embed_dim % 4 or self.embed_dim < 8):
            raise ValueError(f"embed_dim is {self.embed_dim}; sines of rows and columns need a multiple of 4 from 8")
        blocks = self.block_shape or (1, 1)
        if any(side % block for side, block in zip(self.grid, blocks, strict=True)):
            raise ValueError(f"block_shape {blocks} does not divide the {self.grid} tokens of an image")
        if self.drop_path_rate:
            raise ValueError(f"drop_path_rate is {self.drop_path_rate}; this model has no stochastic depth")

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tokens."""
        height, width = sides(self.img_size)
        return height, width * (1 if self.mixtures else self.in_chans)


class LocalAttention(Fusable):
    """Self-attention without biases, within a region, which maps queries, keys and values [B, H, n, d] to outputs."""

    def __init__(self, config: ImageTransformerConfig, region: nn.Module) -> None:
        super().__init__()
        dim = config.embed_dim
        self.num_heads = config.num_heads
        inner = config.num_heads * (config.head_dim or dim // config.num_heads)
        self.wq = nn.Linear(dim, inner, bias=False)
        self.wk = nn.Linear(dim, inner, bias=False)
        self.wv = nn.Linear(dim, inner, bias=False)
        self.wo = nn.Linear(inner, dim, bias=False)
        self.drop = nn.Dropout(config.drop_rate)
        self.region = region

    def forward(self, x: Tensor, past: KeyValues | None = None) -> Tensor:
        """The next n tokens [B, n, D] → [B, n, D]; `past` holds those before them."""
        return self.drop(self.wo(self.attend(torch.cat((self.wq(x), self.wk(x), self.wv(x)), -1), past)))

    def attend(self, qkv: Tensor, past: KeyValues | None = None) -> Tensor:
        """Projections [B, n, 3·H·d] → the heads' outputs [B, n, H·d]."""
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        if past is not None:
            k, v = past.append(k, v)
        return self.region(q, k, v).transpose(1, 2).flatten(2)


class LocalBlock(Fusable):
    """norm(x + drop(attention(x))), then norm(x + drop(MLP(x))), with ReLU in the MLP."""

    def __init__(self, config: ImageTransformerConfig, region: nn.Module) -> None:
        super().__init__()
        self.attn = LocalAttention(config, region)
        self.norm1 = nn.LayerNorm(config.embed_dim, config.eps)
        self.mlp = Mlp(config.embed_dim, config.mlp_dim, "relu", drop=config.drop_rate)
        self.mlp.drop1.p = 0.0
        self.norm2 = nn.LayerNorm(config.embed_dim, config.eps)

    def forward(self, x: Tensor, past: KeyValues | None = None) -> Tensor:
        """The next n tokens [B, n, D] → [B, n, D]; `past` holds those before them."""
        x = self.norm1(x + self.attn(x, past))
        return self.norm2(x + self.mlp(x))


class ImageTransformer(PixelModel):
    """Image Transformer; a position is a channel of a pixel or, with mixtures, a pixel. Features are [B, N, D]."""

    config: ImageTransformerConfig
    layout = "image_transformer"
    blocks_path = "layers"
    stem_pattern = r"^embed|^class_embed|^rows|^columns"
    layer_patterns = ((r"^layers\.(\d+)", None), (r"^head", LAST))

    def __init__(self, config: ImageTransformerConfig) -> None:
        super().__init__(config, config.embed_dim)
        if config.mixtures and config.in_chans != 3:
            raise ValueError(f"in_chans is {config.in_chans}; mixtures of logistics are of pixels of 3 channels")
        D = config.embed_dim
        rows, columns = config.grid
        self.num_positions = rows * columns
        region: Any
        if config.block_shape is None:
            short = self.num_positions < 2 * config.block_length  # then all are one block, as in tensor2tensor
            region = Blocks1d(self.num_positions if short else config.block_length)
            self.period = self.num_positions
        else:
            region = Blocks2d(config.grid, config.block_shape, config.flange)
            self.period = region.length  # each block starts with zeros, as in tensor2tensor
        self.embed = nn.Linear(3, D) if config.mixtures else nn.Embedding(config.in_chans * config.levels, D)
        self.class_embed = nn.Embedding(config.num_classes, D) if config.num_classes else None
        if config.pos_embed == "learned":
            self.rows = nn.Embedding(rows, D)
            self.columns = nn.Embedding(columns, D)
        self.drop = nn.Dropout(config.drop_rate)
        self.layers = nn.ModuleList(LocalBlock(config, region) for _ in range(config.depth))
        self.head = nn.Linear(D, 10 * config.mixtures or config.levels, bias=not config.mixtures)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Uniform values scaled by the inputs (tensor2tensor's uniform_unit_scaling, gain 0.2 in its models)."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                limit = math.sqrt(3 / module.in_features)
                nn.init.uniform_(module.weight, -limit, limit)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)

    @property
    def order(self) -> Tensor | None:  # type: ignore[override]  # a buffer of the attention
        """Places in the map of the tokens in the order of the generation; None for the order of rows."""
        layer: Any = self.layers[0]
        return getattr(layer.attn.region, "order", None)

    def encode(self, images: Tensor) -> Tensor:
        """Images [B, C, H, W] between −1 and 1 → levels [B, H·W·C], or of pixels [B, H·W, 3]."""
        top = self.config.levels - 1
        codes = (
            ((images.to(torch.promote_types(images.dtype, torch.float32)) + 1) * (top / 2))
            .round()
            .clamp(0, top)
            .long()
            .movedim(1, -1)
        )
        return codes.flatten(1, 2) if self.config.mixtures else codes.flatten(1)

    def decode(self, codes: Tensor) -> Tensor:
        """Levels → images [B, C, H, W] between −1 and 1."""
        codes = codes.reshape(codes.shape[0], *sides(self.config.img_size), self.config.in_chans)
        return self.symmetric(codes, torch.promote_types(self.head.weight.dtype, torch.float32)).movedim(-1, 1)

    def symmetric(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Levels as numbers between −1 and 1; half precision does not tell 256 of them apart."""
        return codes.to(dtype) * (2 / (self.config.levels - 1)) - 1

    def inputs(self, codes: Tensor, classes: Tensor | None, start: int, stop: int) -> Tensor:
        """Embeddings [B, stop − start, D] of the codes of the steps before each step, with positions and class."""
        steps = torch.arange(start, stop, device=codes.device)
        order = self.order
        places = steps if order is None else order[start:stop]
        before = codes[:, max(start - 1, 0) : stop - 1]
        if start == 0:
            before = torch.cat((codes.new_zeros(codes.shape[0], 1, *codes.shape[2:]), before), 1)
        x = self.embedded(before, steps, order) * (steps % self.period != 0)[:, None]
        x = x + self.positions(places).to(x.dtype)
        if self.class_embed is not None and classes is not None:
            x = x + self.class_embed(classes)[:, None]
        return self.drop(x)

    def embedded(self, codes: Tensor, steps: Tensor, order: Tensor | None) -> Tensor:
        """Embeddings [B, n, D] of the codes that precede these steps."""
        if self.config.mixtures:
            return F.relu(self.embed(self.symmetric(codes, self.head.weight.dtype)))
        earlier = (steps - 1).clamp_min(0)
        channel = (earlier if order is None else order[earlier]) % self.config.in_chans
        return self.embed(codes + channel * self.config.levels) * self.config.embed_dim**0.5

    def positions(self, places: Tensor) -> Tensor:
        """Position embeddings [n, D] of places in the map."""
        rows = places // self.config.grid[1]
        columns = places % self.config.grid[1]
        D = self.config.embed_dim
        if self.config.pos_embed == "learned":
            return (self.rows(rows) + self.columns(columns)) * D**0.5
        # tensor2tensor's add_timing_signal_nd: half of the channels for rows, half for columns; sines, then cosines
        frequencies = torch.arange(D // 4, device=places.device, dtype=torch.float64)
        frequencies = torch.exp(frequencies * (-math.log(1e4) / (D // 4 - 1)))
        angles = torch.stack((rows, columns), 1)[:, :, None] * frequencies  # [n, 2, D / 4]
        return torch.cat((angles.sin(), angles.cos()), 2).flatten(1).to(self.head.weight.dtype)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Features [B, n, D] → logits of the levels [B, n, K], or parameters of the mixtures [B, n, 10·M]."""
        return x if pre_logits else self.head(x)

    def losses(self, logits: Tensor, codes: Tensor) -> Tensor:
        """Negative log-likelihoods in nats [B, N] of each channel, or means over the channels of each pixel."""
        if self.config.mixtures:
            return -mixture_log_prob(logits, self.symmetric(codes, logits.dtype), self.config.levels) / 3
        return super().losses(logits, codes)

    def draw(self, logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
        """Logits of one step → drawn levels [B], or of pixels [B, 3]."""
        if not self.config.mixtures:
            return super().draw(logits, temperature, top_k, generator)
        if top_k is not None:
            raise ValueError(f"top_k is {top_k}; a mixture of logistics has no list of codes, so leave it out")
        pixels = mixture_sample(logits.float(), temperature, generator)
        top = self.config.levels - 1
        return ((pixels + 1) * (top / 2)).round().long()

    def empty_codes(self, count: int) -> Tensor:
        codes = super().empty_codes(count)
        return codes[..., None].repeat(1, 1, 3) if self.config.mixtures else codes

    def prune(self, stages: int, norm: bool, head: bool) -> None:
        """Keeps the first `stages` blocks; removes the head if `head`. There is no final norm."""
        self.layers = self.layers[:stages]
        if head:
            self.config = self.config.replace(depth=stages)


def mixture_of(params: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Parameters [..., 10·M] → log-weights [..., M]; means, log-scales and coefficients [..., M, 3]."""
    M = params.shape[-1] // 10
    weights, means, scales, coefficients = params.split((M, 3 * M, 3 * M, 3 * M), -1)
    means, scales, coefficients = (t.unflatten(-1, (M, 3)) for t in (means, scales, coefficients))
    return weights.log_softmax(-1), means, scales.clamp_min(-7), coefficients.tanh()


def mixture_log_prob(params: Tensor, pixels: Tensor, levels: int = 256) -> Tensor:
    """Log-probability of pixels under a mixture of discretized logistics (PixelCNN++, equations 1-3).

        P(x) = Σ_k π_k Π_c [σ((x_c + δ − μ_kc) / s_kc) − σ((x_c − δ − μ_kc) / s_kc)],   δ = 1 / (levels − 1)

    The first and the last level hold the tails; a level of little probability has that of the density at its middle.
    """
    weights, means, scales, coefficients = mixture_of(params)
    x = pixels[..., None, :]  # [..., 1, 3]
    red, green, _ = x.unbind(-1)
    a, b, c = coefficients.unbind(-1)
    shifts = torch.stack((torch.zeros_like(a), a * red, b * red + c * green), -1)  # the means depend on channels before
    inverse = (-scales).exp()
    centred = x - means - shifts
    delta = 1 / (levels - 1)
    above = inverse * (centred + delta)
    below = inverse * (centred - delta)
    inside = above.sigmoid() - below.sigmoid()
    middle = inverse * centred
    density = middle - scales - 2 * F.softplus(middle) + math.log(2 * delta)
    log_prob = torch.where(inside > 1e-5, inside.clamp_min(1e-12).log(), density)
    log_prob = torch.where(x > 1 - delta, -F.softplus(below), log_prob)
    log_prob = torch.where(x < delta - 1, F.logsigmoid(above), log_prob)
    return (log_prob.sum(-1) + weights).logsumexp(-1)


def mixture_sample(params: Tensor, temperature: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
    """Pixels [..., 3] between −1 and 1 drawn from mixtures [..., 10·M]: a component, then channel after channel."""
    weights, means, scales, coefficients = mixture_of(params)
    component = torch.multinomial((weights / temperature).exp().flatten(0, -2), 1, generator=generator)
    component = component.view(*weights.shape[:-1], 1, 1).expand(*weights.shape[:-1], 1, 3)
    mean, scale, coefficient = (t.gather(-2, component)[..., 0, :] for t in (means, scales, coefficients))
    uniform = torch.rand(mean.shape, generator=generator, device=mean.device, dtype=mean.dtype)
    x = mean + scale.exp() * temperature * uniform.clamp(1e-5, 1 - 1e-5).logit()
    a, b, c = coefficient.unbind(-1)
    red = x[..., 0].clamp(-1, 1)
    green = (x[..., 1] + a * red).clamp(-1, 1)
    blue = (x[..., 2] + b * red + c * green).clamp(-1, 1)
    return torch.stack((red, green, blue), -1)


CONFIG = ImageTransformerConfig
MODEL = ImageTransformer
DMOL = dict(embed_dim=256, num_heads=8, head_dim=64, mlp_dim=512, mixtures=10, pos_embed="learned", drop_rate=0.1)
VARIANTS: dict[str, Options] = {  # tensor2tensor's imagetransformer_cifar10_base and its _dmol, imagetransformer2d_base
    "image_transformer_cifar10": {},
    "image_transformer_cifar10_dmol": DMOL,
    "image_transformer_cifar10_2d": dict(block_shape=(16, 16)),
}


# No weights were published; the names are ours.

OURS = Layout(name="fastvit_triton", mark="layers.0.attn.wq.weight", beside="head.weight", resize="bicubic")


CHECKPOINTS = CheckpointFormats("Image Transformer", (OURS,), fit.fit_tables)
