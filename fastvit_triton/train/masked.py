"""Learning from pictures alone: hide patches and predict them. Masked patch prediction, and the masked autoencoder.

Both take an encoder with the parts of our `VisionTransformer`: patch_embed, prefix(), positions(grid), pos_drop,
norm_pre, blocks, norm. Afterwards its weights are an ordinary checkpoint: save the encoder, not the wrapper.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .ranges import Count, Hidden, Probability, checked


class MaskedPatchPrediction(nn.Module):
    """Predicts the mean colour of corrupted patches (ViT, arXiv:2010.11929, sections 4.6 and B.1.2).

    Args:
        encoder: see above; its head is not used.
        classes: K, `2^(bits · C)` of `mean_colours`: 512 for three channels and 3 bits.
        ratio: part of the patches that is corrupted; the paper's 0.5.
    """

    @checked
    def __init__(self, encoder: nn.Module, classes: Count = 512, ratio: Hidden = 0.5) -> None:
        super().__init__()
        self.encoder, self.ratio = encoder, ratio
        self.mask_token = nn.Parameter(torch.empty(1, 1, encoder.embed_dim))
        self.predict = nn.Linear(encoder.embed_dim, classes)
        nn.init.normal_(self.mask_token, std=0.02)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """images [B, C, H, W] → logits [B, N, K] and which patches were corrupted [B, N], bool."""
        patches = self.encoder.patch_embed(images)  # [B, N, D]
        patches, corrupted = corrupt(patches, self.mask_token, self.ratio)
        prefix, patches = positioned(self.encoder, patches, images)
        return self.predict(through(self.encoder, prefix, patches)[:, prefix.shape[1] :]), corrupted


class MaskedAutoencoder(nn.Module):
    """Encodes the visible patches only, decodes all (He et al., MAE, arXiv:2111.06377; facebookresearch/mae).

    The paper's decoder has 8 blocks of width 512 with 16 heads. Positions of the encoder are its own: the paper's are
    fixed sines, learned ones do as well; those of the decoder are the paper's.

    Args:
        encoder: see above; its head is not used.
        decoder: blocks from [B, T + N, E] to the same.
        dim: E, the decoder's width, divisible by 4.
        ratio: part of the patches that is hidden.
    """

    @checked
    def __init__(self, encoder: nn.Module, decoder: nn.Module, dim: Count, ratio: Hidden = 0.75) -> None:
        super().__init__()
        stem = encoder.patch_embed
        self.encoder, self.decoder, self.ratio = encoder, decoder, ratio
        self.decoder_embed = nn.Linear(encoder.embed_dim, dim)
        self.mask_token = nn.Parameter(torch.empty(1, 1, dim))
        self.register_buffer("decoder_pos_embed", sines(stem.grid_size, dim), persistent=False)
        self.decoder_norm = nn.LayerNorm(dim, eps=1e-6)
        self.decoder_pred = nn.Linear(dim, stem.patch_size[0] * stem.patch_size[1] * stem.in_chans)
        nn.init.normal_(self.mask_token, std=0.02)
        for layer in (self.decoder_embed, self.decoder_pred):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, images: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """images [B, C, H, W] → predicted pixels [B, N, P·P·C] and which patches were hidden [B, N], bool.

        `noise` [B, N] says who stays: the patches with the least; drawn at random when it is None.
        """
        prefix, patches = positioned(self.encoder, self.encoder.patch_embed(images), images)
        B, N, _ = patches.shape
        order = (torch.rand(B, N, device=images.device) if noise is None else noise).argsort(1)
        kept = order[:, : int(N * (1 - self.ratio))]
        x = through(self.encoder, prefix, select(patches, kept))
        x = self.decoder_embed(x)  # [B, T + kept, E]
        seen, T = x[:, prefix.shape[1] :], prefix.shape[1]
        full = self.mask_token.to(x.dtype).expand(B, N, -1).scatter(1, kept[..., None].expand_as(seen), seen)
        x = torch.cat((x[:, :T], full + self.decoder_pos_embed.to(x.dtype)), 1)  # prefix tokens have position 0
        x = self.decoder_pred(self.decoder_norm(self.decoder(x)))[:, T:]
        return x, torch.ones(B, N, dtype=torch.bool, device=images.device).scatter(1, kept, False)


def positioned(encoder: nn.Module, patches: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
    """Adds the encoder's positions to patches [B, N, D], and to its prefix tokens [B, T, D]; T may be 0."""
    B, N, D = patches.shape
    prefix = torch.cat([patches.new_empty(1, 0, D), *(token.to(patches.dtype) for token in encoder.prefix())], 1)
    positions = encoder.positions(encoder.patch_embed.grid_of(images))
    if positions is not None:
        patches = patches + positions[:, -N:]
        prefix = prefix + positions[:, :-N] if positions.shape[1] > N else prefix
    return prefix.expand(B, -1, -1), patches


def through(encoder: nn.Module, prefix: Tensor, patches: Tensor) -> Tensor:
    """Prefix [B, T, D] and some patches [B, n, D], with positions, through blocks and norm: [B, T + n, D]."""
    x = encoder.norm_pre(encoder.pos_drop(torch.cat((prefix, patches), 1)))
    return encoder.norm(encoder.blocks(x))


def select(tokens: Tensor, indices: Tensor) -> Tensor:
    """Tokens [B, N, D] at indices [B, n]: [B, n, D]."""
    return tokens.gather(1, indices[..., None].expand(-1, -1, tokens.shape[2]))


@checked
def corrupt(
    patches: Tensor, mask_token: Tensor, ratio: Probability = 0.5, masked: Probability = 0.8, swapped: Probability = 0.1
) -> tuple[Tensor, Tensor]:
    """Corrupts part of the patch embeddings, as BERT does words (arXiv:2010.11929, appendix B.1.2).

    Args:
        patches: [B, N, D], N at least 2.
        mask_token: [1, 1, D], learned.
        ratio: part of each image's patches, rounded.
        masked: of these, the part replaced by the mask token.
        swapped: of these, the part replaced by another patch of the image; the rest stays as it is.

    Returns:
        [B, N, D], and which were chosen [B, N], those that stay as they are among them.
    """
    B, N, _ = patches.shape
    chosen = torch.rand(B, N, device=patches.device).argsort(1).argsort(1) < round(ratio * N)
    kind = torch.rand(B, N, device=patches.device)
    step = torch.randint(1, N, (B, N), device=patches.device)
    others = select(patches, (torch.arange(N, device=patches.device) + step) % N)
    hidden, moved = chosen & (kind < masked), chosen & (kind >= masked) & (kind < masked + swapped)
    patches = torch.where(hidden[..., None], mask_token.to(patches.dtype), patches)
    return torch.where(moved[..., None], others, patches), chosen


@checked
def mean_colours(pixels: Tensor, patch_size: tuple[Count, Count], bits: Count = 3) -> Tensor:
    """The mean colour of each patch in a few bits per channel, as one class (ViT, appendix B.1.2).

    Args:
        pixels: [B, C, H, W] in [0, 1], before normalisation.
        patch_size: (height, width).
        bits: per channel.

    Returns:
        Classes [B, N] in [0, 2^(bits · C)), the first channel in the highest bits.
    """
    levels = (F.avg_pool2d(pixels, patch_size) * 2**bits).long().clamp(0, 2**bits - 1)  # [B, C, h, w]
    weights = 2 ** (bits * torch.arange(pixels.shape[1] - 1, -1, -1, device=pixels.device))
    return (levels * weights.view(-1, 1, 1)).sum(1).flatten(1)


def colour_loss(logits: Tensor, colours: Tensor, corrupted: Tensor) -> Tensor:
    """Cross-entropy of the corrupted patches: logits [B, N, K], colours [B, N], corrupted [B, N] → a scalar."""
    return F.cross_entropy(logits[corrupted], colours[corrupted])


def patchify(images: Tensor, patch_size: tuple[int, int]) -> Tensor:
    """[B, C, H, W] → [B, N, P·P·C], each patch in (row, column, channel) order, as MAE's code has it."""
    (P, Q), (B, C, H, W) = patch_size, images.shape
    x = images.reshape(B, C, H // P, P, W // Q, Q).permute(0, 2, 4, 3, 5, 1)
    return x.reshape(B, -1, P * Q * C)


@checked
def pixel_loss(
    predicted: Tensor, images: Tensor, hidden: Tensor, patch_size: tuple[Count, Count], norm: bool = True
) -> Tensor:
    """Mean squared error of the hidden patches (MAE, arXiv:2111.06377; models_mae.py, `forward_loss`).

    Args:
        predicted: [B, N, P·P·C].
        images: [B, C, H, W], as the encoder saw them.
        hidden: [B, N], bool.
        patch_size: (height, width).
        norm: predict each patch less its mean, over its deviation (unbiased, variance + 1e-6).

    Returns:
        A scalar.
    """
    target = patchify(images, patch_size)
    if norm:
        target = (target - target.mean(-1, keepdim=True)) / (target.var(-1, keepdim=True) + 1e-6).sqrt()
    return (predicted - target).square().mean(-1)[hidden].mean()


def sines(grid: tuple[int, int], dim: int) -> Tensor:
    """MAE's positions [1, h·w, D]: [sin xω, cos xω, sin yω, cos yω], ω = 10000^(−k / (D/4)) (util/pos_embed.py)."""
    if dim % 4:
        raise ValueError(f"dim is {dim}; it must be divisible by 4")
    omega = 10000.0 ** -(torch.arange(dim // 4, dtype=torch.float64) / (dim // 4))
    y, x = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in grid), indexing="ij")
    x, y = x.flatten()[:, None] * omega, y.flatten()[:, None] * omega
    return torch.cat((x.sin(), x.cos(), y.sin(), y.cos()), 1)[None].float()
