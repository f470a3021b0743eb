"""Statistics of tokens, positions and patch filters: principal components, similarity, frequency bands.

Sources   ViT, arXiv:2010.11929, figure 7 left and centre; Oquab et al., DINOv2, arXiv:2304.07193, figure 1 (colours);
          Darcet et al., Vision transformers need registers, arXiv:2309.16588 (norms); Zhou et al., DeepViT,
          arXiv:2103.11886, and Gong et al., arXiv:2104.12753 (similarity by depth).
"""

import math
import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.argument import Rope, group_of


@dataclass(frozen=True)
class Geometry:
    """Layout of a token sequence: prefix tokens, then a grid of patches in row order."""

    grid: tuple[int, int]  # (rows, columns) of patches
    prefix: int  # number of prefix tokens, such as class token and registers
    patch: tuple[float, float]  # (height, width) of a patch in pixels

    @property
    def count(self) -> int:
        """Number of patches."""
        return self.grid[0] * self.grid[1]


def geometry(model: nn.Module, images: Tensor, tokens: int) -> Geometry:
    """Token layout of a model, from its patch projection, else the largest square grid of at most `tokens` patches.

    Args:
        model: any ViT.
        images: [B, C, H, W].
        tokens: N, the sequence length in attention.

    Raises:
        ValueError: the image has more patches than there are tokens.
    """
    H, W = images.shape[2:]
    filters = patch_filters(model, images.shape[1])
    stem: Any = getattr(model, "patch_embed", model)
    if filters is not None:
        grid = H // filters.shape[2], W // filters.shape[3]
    elif hasattr(stem, "grid_of"):
        grid = stem.grid_of(images)
    else:
        grid = (int(tokens**0.5),) * 2
    if grid[0] * grid[1] > tokens:
        raise ValueError(f"the image has {grid[0]} x {grid[1]} patches, but attention has {tokens} tokens")
    return Geometry(grid, tokens - grid[0] * grid[1], (H / grid[0], W / grid[1]))


def stage_geometry(images: Tensor, tokens: int) -> Geometry:
    """Token layout of a stage without prefix tokens: the grid whose shape is nearest to the image's.

    Args:
        images: [B, C, H, W].
        tokens: N, the number of tokens of the stage.
    """
    return _nearest(images, [(_grid(images, tokens), 0)])


def grid_of(images: Tensor, x: Tensor) -> Geometry:
    """Token layout of what a block returns: the grid of the map, or that whose shape is nearest to the image's."""
    N = x[0, ..., 0].numel()
    whole = (x.shape[1], x.shape[2]) if x.dim() == 4 else _grid(images, N)
    return _nearest(images, [(whole, 0), *((_grid(images, N - prefix), prefix) for prefix in (1, 2) if N > prefix)])


def channels_first(images: Tensor, x: Tensor) -> bool:
    """True if a block returns a map [B, D, h, w] whose shape is nearer to the image's than that of [B, h, w, D]."""
    if x.dim() != 4:
        return False
    last, first = (_error(images, grid) for grid in ((x.shape[1], x.shape[2]), (x.shape[2], x.shape[3])))
    return first < last


def _error(images: Tensor, grid: tuple[int, int]) -> float:
    """How far the shape of a grid is from the image's; 0 if they are the same."""
    return round(abs(math.log(grid[0] * images.shape[3] / grid[1] / images.shape[2])), 6)


def _grid(images: Tensor, count: int) -> tuple[int, int]:
    """(rows, columns) of `count` patches, as near as possible to the image's shape."""
    H, W = images.shape[2:]
    heights = (n for n in range(1, count + 1) if count % n == 0)
    rows = min(heights, key=lambda n: abs(math.log(n * n * W / count / H)))
    return rows, count // rows


def _nearest(images: Tensor, candidates: list[tuple[tuple[int, int], int]]) -> Geometry:
    """The candidate (grid, prefix tokens) nearest to the image's shape; the first of equals."""
    H, W = images.shape[2:]
    (h, w), prefix = min(candidates, key=lambda candidate: _error(images, candidate[0]))
    return Geometry((h, w), prefix, (H / h, W / w))


def patch_filters(model: nn.Module, channels: int) -> Tensor | None:
    """The patch projection as filters [D, C, P, P]; None if the model's first layer does not project patches.

    Args:
        model: any ViT.
        channels: C of its images; the inputs of a linear layer are in the order (row, column, channel).
    """
    for path, module in model.named_modules():
        if path.startswith("blocks."):  # which may come before the stem
            continue
        if isinstance(module, nn.Conv2d):
            fits = module.kernel_size == module.stride and module.in_channels == channels and module.groups == 1
            return module.weight.detach() if fits else None
        if isinstance(module, nn.Linear):
            side = round((module.in_features / channels) ** 0.5)
            if side * side * channels != module.in_features or not re.search("patch|embed", path):
                return None
            return module.weight.detach().unflatten(1, (side, side, channels)).movedim(-1, 1)
    return None


def principal_components(samples: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Principal component analysis.

    Args:
        samples: [M, D].
        count: number of components to return, at most min(M, D).

    Returns:
        Unit directions [count, D], signed so that the entry of largest magnitude is positive; projections of the
        centred samples [M, count]; and explained variance ratios [count].

    Raises:
        ValueError: `samples` is not a matrix, or `count` is out of range.
    """
    if samples.dim() != 2 or not 1 <= count <= min(samples.shape):
        raise ValueError(f"count is {count}; samples of shape {list(samples.shape)} have 1 to {min(samples.shape)}")
    centred = samples - samples.mean(0)
    _, values, directions = torch.linalg.svd(
        centred.to(torch.promote_types(samples.dtype, torch.float32)), full_matrices=False
    )
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    directions = (directions * torch.where(largest < 0, -1.0, 1.0))[:count]
    variance = values.square()
    return directions, centred.to(directions) @ directions.T, (variance / variance.sum().clamp_min(1e-30))[:count]


def filter_components(filters: Tensor, count: int = 28) -> Tensor:
    """The first principal components of the patch filters as images, each rescaled to [0, 1].

    Args:
        filters: [D, C, P, P].
        count: largest number of components; at most min(D, C·P·P) exist.

    Returns:
        [count or fewer, C, P, P].
    """
    rows = filters.flatten(1)
    directions, _, _ = principal_components(rows, min(count, *rows.shape))
    return stretch(directions).unflatten(1, filters.shape[1:])


def feature_colours(tokens: Tensor, where: Geometry) -> Tensor:
    """Patch tokens as RGB: their first three principal components over all images together, as in DINOv2.

    Args:
        tokens: [B, N, D].
        where: layout of the tokens.

    Returns:
        [B, h, w, 3] in [0, 1]; with fewer than three patches or channels, missing components are 0.
    """
    patches = tokens[:, where.prefix :].flatten(0, 1)
    _, along, _ = principal_components(patches, min(3, *patches.shape))
    colours = F.pad(stretch(along.T).T, (0, 3 - along.shape[1]))
    return colours.view(len(tokens), *where.grid, 3)


def stretch(values: Tensor) -> Tensor:
    """Rescales each row of [M, ...] to [0, 1]; constant rows become 0."""
    flat = values.flatten(1)
    low = flat.amin(1, keepdim=True)
    high = flat.amax(1, keepdim=True)
    return ((flat - low) / (high - low).clamp_min(torch.finfo(flat.dtype).tiny)).view_as(values)


def token_similarity(tokens: Tensor) -> Tensor:
    """Mean cosine similarity of pairs of different tokens in an image, [B]; 1 means over-smoothing.

    Args:
        tokens: [B, N, D], N at least 2.
    """
    N = tokens.shape[1]
    unit = F.normalize(tokens.to(torch.promote_types(tokens.dtype, torch.float32)), dim=-1)
    self_similarity = unit.square().sum((-1, -2))  # N minus the number of zero tokens
    return (unit.sum(1).square().sum(-1) - self_similarity) / (N * (N - 1))


def position_table(model: nn.Module, where: Geometry) -> Tensor | None:
    """The absolute position embedding of each patch, [h·w, D]; None if the model has none for this grid."""
    positions: Any = getattr(model, "positions", None)
    if positions is not None:
        grid_positions = positions(where.grid)
        return None if grid_positions is None else grid_positions[0, -where.count :].detach()
    for module in model.modules():
        for name in ("pos_embed", "position_embeddings", "position_embedding", "pos_embedding"):
            table = getattr(module, name, None)
            table = table.weight if isinstance(table, nn.Embedding) else table
            if isinstance(table, Tensor) and table.dim() in (2, 3) and table.shape[-2] >= where.count:
                table = table.detach().flatten(0, -2)
                return table[-where.count :] if len(table) <= where.count + where.prefix else None
    return None


def position_similarity(table: Tensor, grid: tuple[int, int]) -> Tensor:
    """Cosine similarity of the position embeddings of all pairs of patches.

    Args:
        table: [h·w, D].
        grid: (h, w).

    Returns:
        [h, w, h, w] in [−1, 1]: entry (i, j) is the map of similarities to patch (i, j).

    Raises:
        ValueError: the number of rows differs from the number of patches.
    """
    if table.dim() != 2 or len(table) != grid[0] * grid[1]:
        raise ValueError(
            f"table has shape {list(table.shape)}; grid {grid[0]} x {grid[1]} needs [{grid[0] * grid[1]}, D]"
        )
    unit = F.normalize(table, dim=-1)
    return (unit @ unit.T).view(*grid, *grid)


def rotary_bands(rope: Rope, grid: tuple[int, int]) -> Tensor:
    """Rotation angle of each rotary channel pair between neighbouring patches.

    Args:
        rope: (cos, sin, pairs) as passed to attention, tables [..., h·w, D].
        grid: (h, w), each at least 2.

    Returns:
        [..., D/2, 2] signed radians per patch, downwards and to the right.

    Raises:
        ValueError: the grid has one row or column, or the tables have a different size.
    """
    cos, sin, pairs = rope
    if min(grid) < 2 or cos.shape[-2] != grid[0] * grid[1]:
        raise ValueError(f"tables have {cos.shape[-2]} rows; rotary bands need a grid of at least 2 x 2, got {grid}")
    group = group_of(pairs, cos.shape[-1])
    cos, sin = (t.unflatten(-1, (-1, group))[..., : group // 2].flatten(-2) for t in (cos, sin))
    angle = torch.atan2(sin, cos).unflatten(-2, grid)  # [..., h, w, D/2]
    steps = [angle.diff(dim=axis) for axis in (-3, -2)]
    wrapped = [torch.atan2(step.sin(), step.cos()) for step in steps]  # to (−π, π]
    return torch.stack([step.flatten(-3, -2).mean(-2) for step in wrapped], -1)
