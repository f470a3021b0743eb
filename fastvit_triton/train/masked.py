"""Self-supervised pre-training: masked patch prediction and MAE.

Both wrap an encoder that has the attributes of our `VisionTransformer`: patch_embed, prefix(), positions(grid),
pos_drop, norm_pre, blocks, norm. After training, save the encoder: it is an ordinary checkpoint.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .ranges import OpenFraction, PositiveInt, Probability, checked

Encoder = Any  # a module with the attributes listed above


class MaskedPatchPrediction(nn.Module):
    """Predicts the mean colour of corrupted patches (ViT, arXiv:2010.11929, sections 4.6 and B.1.2).

    Args:
        encoder: with the attributes listed at the top of this file; its head is not used.
        classes: K = 2^(bits · C), see `mean_colours`: 512 for three channels and 3 bits.
        ratio: fraction of patches to corrupt.
    """

    @checked
    def __init__(self, encoder: Encoder, classes: PositiveInt = 512, ratio: OpenFraction = 0.5) -> None:
        super().__init__()
        self.encoder = encoder
        self.ratio = ratio
        self.mask_token = nn.Parameter(torch.empty(1, 1, encoder.embed_dim))
        self.predict = nn.Linear(encoder.embed_dim, classes)
        nn.init.normal_(self.mask_token, std=0.02)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """images [B, C, H, W] → logits [B, N, K] and the mask of corrupted patches [B, N], bool."""
        patches = self.encoder.patch_embed(images)  # [B, N, D]
        patches, corrupted = corrupt(patches, self.mask_token, self.ratio)
        prefix, patches = add_positions(self.encoder, patches, images)
        return self.predict(encode(self.encoder, prefix, patches)[:, prefix.shape[1] :]), corrupted


class MaskedAutoencoder(nn.Module):
    """MAE: encodes the visible patches only, decodes all patches (He et al., arXiv:2111.06377; facebookresearch/mae).

    The paper's decoder has 8 blocks of width 512 with 16 heads. Decoder positions are fixed sines, as in the paper; the
    encoder keeps its own positions, learned or fixed.

    Args:
        encoder: with the attributes listed at the top of this file; its head is not used.
        decoder: Transformer blocks, from [B, T + N, E] to [B, T + N, E].
        dim: E, the decoder's width, divisible by 4.
        ratio: fraction of patches to hide.

    Raises:
        ValueError: the ratio is outside (0, 1), or `dim` is not divisible by 4.
    """

    decoder_pos_embed: Tensor

    @checked
    def __init__(self, encoder: Encoder, decoder: nn.Module, dim: PositiveInt, ratio: OpenFraction = 0.75) -> None:
        super().__init__()
        stem = encoder.patch_embed
        self.encoder = encoder
        self.decoder = decoder
        self.ratio = ratio
        self.decoder_embed = nn.Linear(encoder.embed_dim, dim)
        self.mask_token = nn.Parameter(torch.empty(1, 1, dim))
        self.register_buffer("decoder_pos_embed", sincos_positions(stem.grid_size, dim), persistent=False)
        self.decoder_norm = nn.LayerNorm(dim, eps=1e-6)
        self.decoder_pred = nn.Linear(dim, stem.patch_size[0] * stem.patch_size[1] * stem.in_chans)
        nn.init.normal_(self.mask_token, std=0.02)
        for layer in (self.decoder_embed, self.decoder_pred):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, images: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """images [B, C, H, W] → predicted pixels [B, N, P·P·C] and the mask of hidden patches [B, N], bool.

        The patches with the smallest `noise` [B, N] stay visible; None draws uniform noise.
        """
        prefix, patches = add_positions(self.encoder, self.encoder.patch_embed(images), images)
        B, N, _ = patches.shape
        order = (torch.rand(B, N, device=images.device) if noise is None else noise).argsort(1)
        visible = order[:, : int(N * (1 - self.ratio))]
        x = encode(self.encoder, prefix, gather_tokens(patches, visible))
        x = self.decoder_embed(x)  # [B, T + visible, E]
        encoded = x[:, prefix.shape[1] :]
        T = prefix.shape[1]
        full = self.mask_token.to(x.dtype).expand(B, N, -1).scatter(1, visible[..., None].expand_as(encoded), encoded)
        x = torch.cat((x[:, :T], full + self.decoder_pos_embed.to(x.dtype)), 1)  # prefix tokens get no position
        x = self.decoder_pred(self.decoder_norm(self.decoder(x)))[:, T:]
        return x, torch.ones(B, N, dtype=torch.bool, device=images.device).scatter(1, visible, False)


def add_positions(encoder: Encoder, patches: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
    """Prefix tokens [B, T, D] and patches [B, N, D] with the encoder's positions added; T may be 0."""
    B, N, D = patches.shape
    prefix = torch.cat([patches.new_empty(1, 0, D), *(token.to(patches.dtype) for token in encoder.prefix())], 1)
    positions = encoder.positions(encoder.patch_embed.grid_of(images))
    if positions is not None:
        patches = patches + positions[:, -N:]
        prefix = prefix + positions[:, :-N] if positions.shape[1] > N else prefix
    return prefix.expand(B, -1, -1), patches


def encode(encoder: Encoder, prefix: Tensor, patches: Tensor) -> Tensor:
    """Runs the encoder's blocks and norm on prefix [B, T, D] and n ≤ N patches [B, n, D]: [B, T + n, D]."""
    x = encoder.norm_pre(encoder.pos_drop(torch.cat((prefix, patches), 1)))
    return encoder.norm(encoder.blocks(x))


def gather_tokens(tokens: Tensor, indices: Tensor) -> Tensor:
    """Gathers tokens [B, N, D] at indices [B, n]: [B, n, D]."""
    return tokens.gather(1, indices[..., None].expand(-1, -1, tokens.shape[2]))


@checked
def corrupt(
    patches: Tensor, mask_token: Tensor, ratio: Probability = 0.5, masked: Probability = 0.8, swapped: Probability = 0.1
) -> tuple[Tensor, Tensor]:
    """Corrupts patch embeddings as BERT corrupts words (arXiv:2010.11929, appendix B.1.2)."""
    B, N, _ = patches.shape
    chosen = torch.rand(B, N, device=patches.device).argsort(1).argsort(1) < round(ratio * N)
    kind = torch.rand(B, N, device=patches.device)
    step = torch.randint(1, N, (B, N), device=patches.device)
    others = gather_tokens(patches, (torch.arange(N, device=patches.device) + step) % N)
    hidden = chosen & (kind < masked)
    moved = chosen & (kind >= masked) & (kind < masked + swapped)
    patches = torch.where(hidden[..., None], mask_token.to(patches.dtype), patches)
    return torch.where(moved[..., None], others, patches), chosen


@checked
def mean_colours(pixels: Tensor, patch_size: tuple[PositiveInt, PositiveInt], bits: PositiveInt = 3) -> Tensor:
    """The mean colour of each patch, quantised to a few bits per channel, as a class number (ViT, appendix B.1.2).

    Args:
        pixels: [B, C, H, W] in [0, 1], before normalisation.
        patch_size: (height, width).
        bits: bits per channel.

    Returns:
        Classes [B, N] in [0, 2^(bits · C)), the first channel in the highest bits.
    """
    levels = (F.avg_pool2d(pixels, patch_size) * 2**bits).long().clamp(0, 2**bits - 1)  # [B, C, h, w]
    weights = 2 ** (bits * torch.arange(pixels.shape[1] - 1, -1, -1, device=pixels.device))
    return (levels * weights.view(-1, 1, 1)).sum(1).flatten(1)


def colour_loss(logits: Tensor, colours: Tensor, corrupted: Tensor) -> Tensor:
    """Cross-entropy over the corrupted patches: logits [B, N, K], colours [B, N], corrupted [B, N] → a scalar."""
    return F.cross_entropy(logits[corrupted], colours[corrupted])


def patchify(images: Tensor, patch_size: tuple[int, int]) -> Tensor:
    """[B, C, H, W] → [B, N, P·P·C], each patch in (row, column, channel) order, as in MAE's code."""
    (P, Q), (B, C, H, W) = patch_size, images.shape
    x = images.reshape(B, C, H // P, P, W // Q, Q).permute(0, 2, 4, 3, 5, 1)
    return x.reshape(B, -1, P * Q * C)


@checked
def pixel_loss(
    predicted: Tensor, images: Tensor, hidden: Tensor, patch_size: tuple[PositiveInt, PositiveInt], norm: bool = True
) -> Tensor:
    """Mean squared error over the hidden patches (MAE, arXiv:2111.06377; models_mae.py, `forward_loss`).

    Args:
        predicted: [B, N, P·P·C].
        images: [B, C, H, W], the encoder's input.
        hidden: [B, N], bool.
        patch_size: (height, width).
        norm: normalise each target patch: subtract its mean, divide by √(unbiased variance + 1e-6).

    Returns:
        A scalar.
    """
    target = patchify(images, patch_size)
    if norm:
        target = (target - target.mean(-1, keepdim=True)) / (target.var(-1, keepdim=True) + 1e-6).sqrt()
    return (predicted - target).square().mean(-1)[hidden].mean()


def sincos_positions(grid: tuple[int, int], dim: int) -> Tensor:
    """MAE's positions [1, h·w, D]: [sin xω, cos xω, sin yω, cos yω], ω = 10000^(−k / (D/4)) (util/pos_embed.py)."""
    if dim % 4:
        raise ValueError(f"dim is {dim}; it must be divisible by 4")
    omega = 10000.0 ** -(torch.arange(dim // 4, dtype=torch.float64) / (dim // 4))
    y, x = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in grid), indexing="ij")
    x = x.flatten()[:, None] * omega
    y = y.flatten()[:, None] * omega
    return torch.cat((x.sin(), x.cos(), y.sin(), y.cos()), 1)[None].float()
