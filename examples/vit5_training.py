"""Trains a ViT of today's parts, written in plain PyTorch, on fused kernels: RMSNorm, QK norm, RoPE, registers.

    python examples/vit5_training.py                            # ViT-5-Small, batch 256
    python examples/vit5_training.py --depth 2 --batch 2 --side 32 --steps 1

The structure of ViT-5 (https://arxiv.org/abs/2602.08071): pre-norm blocks with LayerScale; queries and keys are
normalised per head and rotated by their position in 2-D. `optimize` captures such blocks from an example.
"""

import argparse
import math
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastvit_triton


def angles(side: int, base: float, width: int) -> Tensor:
    """Angles [side², width] of positions in a square: half of the channels turn with the row, half with the column."""
    frequencies = base ** -(torch.arange(width // 4) / (width // 4))
    axes = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    return torch.cat([axis.reshape(-1, 1) * frequencies.repeat(2) for axis in axes], 1)


class Attention(nn.Module):
    """Self-attention with normalised and rotated queries and keys; the class token is not rotated."""

    def __init__(self, dim: int, heads: int, side: int, registers: int) -> None:
        super().__init__()
        width = dim // heads
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.q_norm, self.k_norm = (nn.RMSNorm(width, eps=1e-6) for _ in "qk")
        patches, others = angles(side, 10000.0, width), angles(math.isqrt(registers), 100.0, width)
        turns = torch.cat([torch.zeros(1, width), patches, others])[:, None]
        self.register_buffer("cos", turns.cos(), persistent=False)
        self.register_buffer("sin", turns.sin(), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        """Rotates pairs of channels, a quarter of a head apart, by the position."""
        first, second = x.unflatten(-1, (2, 2, -1)).unbind(-2)
        return x * self.cos + torch.stack([-second, first], -2).flatten(-3) * self.sin

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).unbind(2)
        q, k = self.rotate(self.q_norm(q)).to(v.dtype), self.rotate(self.k_norm(k)).to(v.dtype)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """x + γ₁ attention(norm(x)), then x + γ₂ MLP(norm(x))."""

    def __init__(self, dim: int, heads: int, side: int, registers: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.RMSNorm(dim, eps=1e-6) for _ in "12")
        self.attn = Attention(dim, heads, side, registers)
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.gamma1, self.gamma2 = (nn.Parameter(torch.full((dim,), 1e-4)) for _ in "12")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gamma1 * self.attn(self.norm1(x))
        return x + self.gamma2 * self.fc2(F.gelu(self.fc1(self.norm2(x))))


class ViT5(nn.Module):
    """A class token, patches with learned positions, and registers; the class token is classified."""

    def __init__(self, dim: int = 384, depth: int = 12, heads: int = 6, side: int = 224, registers: int = 4) -> None:
        super().__init__()
        grid = side // 16
        self.embed_dim, self.num_tokens = dim, 1 + grid**2 + registers
        self.patch_embed = nn.Conv2d(3, dim, 16, 16)
        self.cls, self.registers = (nn.Parameter(0.02 * torch.randn(1, n, dim)) for n in (1, registers))
        self.positions = nn.Parameter(0.02 * torch.randn(1, grid**2, dim))
        self.blocks = nn.Sequential(*(Block(dim, heads, grid, registers) for _ in range(depth)))
        self.norm, self.head = nn.RMSNorm(dim, eps=1e-6), nn.Linear(dim, 1000, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patch_embed(images).flatten(2).transpose(1, 2) + self.positions
        first, last = (token.to(patches.dtype).expand(len(images), -1, -1) for token in (self.cls, self.registers))
        return self.head(self.norm(self.blocks(torch.cat([first, patches, last], 1)))[:, 0])


def main() -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=12, help="blocks (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=256, help="images in a step (default: %(default)s)")
    parser.add_argument("--side", type=int, default=224, help="pixels, a multiple of 16 (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="default: %(default)s")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = ViT5(depth=args.depth, side=args.side).to(device)
    images = torch.randn(args.batch, 3, args.side, args.side, device=device)
    classes = torch.randint(1000, (args.batch,), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    amp = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")
    with amp:
        print(fastvit_triton.optimize(model, example=images))
    times = []
    for _ in range(args.steps):
        start = time.perf_counter()
        with amp:
            loss = F.cross_entropy(model(images), classes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        last = loss.item()  # waits for the GPU
        times.append(time.perf_counter() - start)
    speed = args.batch / sorted(times)[len(times) // 2]
    print(f"loss {last:.3f}, {speed:.0f} images/s in training on this {device}")


if __name__ == "__main__":
    main()
