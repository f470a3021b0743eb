"""Cost by image size: tokens, FLOPs, and bytes of the N × N matrix that fused attention does not write.

Computed from shapes; nothing is timed.
"""

from dataclasses import dataclass

SIDES = (224, 384, 512, 768, 1024)


@dataclass(frozen=True)
class Cost:
    """Cost of the forward pass of one image through all blocks of a plain ViT."""

    label: str  # label of the row
    side: int  # image side, pixels
    tokens: int  # N
    linear_flops: int  # patch projection and all layers that are linear in N; a multiply-add counts as 2
    attention_flops: int  # q kᵀ and its product with v, which grow with N²
    matrix_bytes: int  # size of one layer's attention probabilities
    fused_bytes: int  # bytes that one layer's fused attention reads and writes: q, k, v, output and log-sum-exp


def image_cost(
    side: int,
    patch: int,
    *,
    dim: int,
    depth: int,
    num_heads: int,
    head_dim: int,
    hidden: int,
    channels: int = 3,
    prefix: int = 1,
    itemsize: int = 2,
    label: str = "",
) -> Cost:
    """The cost of one image of side × side pixels.

    Args:
        side: a multiple of `patch`.
        patch: patch side, pixels.
        dim: D, channels of a token.
        depth: blocks.
        num_heads: H.
        head_dim: channels of a head.
        hidden: F, hidden channels of an MLP of two layers.
        channels: C of the image.
        prefix: number of tokens other than patches.
        itemsize: bytes per number; 2 is half precision.
        label: label of the row.

    Raises:
        ValueError: `side` is not a multiple of `patch`.
    """
    if side % patch:
        raise ValueError(f"side is {side}, not a multiple of the patch {patch}; use {side // patch * patch or patch}")
    patches = (side // patch) ** 2
    inner = num_heads * head_dim
    N = patches + prefix
    return Cost(
        label,
        side,
        N,
        linear_flops=2 * patches * channels * patch**2 * dim + 2 * depth * N * dim * (4 * inner + 2 * hidden),
        attention_flops=4 * depth * N * N * inner,
        matrix_bytes=num_heads * N * N * itemsize,
        fused_bytes=4 * N * inner * itemsize + 4 * num_heads * N,
    )


def cost_table(patch: int, sides: tuple[int, ...] = SIDES, **model: int) -> list[Cost]:
    """One row per image size, and a last row with one token per pixel: 224 × 224 gives 50,176 tokens.

    Args:
        patch: patch side, pixels.
        sides: image sides; each is rounded down to a multiple of the patch.
        model: the other arguments of `image_cost`.
    """
    usable = sorted({side // patch * patch for side in sides if side >= patch})
    rows = [image_cost(side, patch, label=f"{side} px, patch {patch}", **model) for side in usable]
    return [*rows, image_cost(224, 1, label="224 px, one token per pixel", **model | {"prefix": 0})]
