"""Small models with the structure of research code whose classes no reader knows, for tests of captured blocks."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, H = 16, 2  # width, heads


class WrittenAttention(nn.Module):
    """Self-attention with softmax written out and a packed projection, as in DINO."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = H
        self.scale = (D // H) ** -0.5
        self.qkv = nn.Linear(D, 3 * D)
        self.attn_drop = nn.Dropout(0.0)
        self.proj = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        attn = self.attn_drop((q @ k.transpose(-2, -1) * self.scale).softmax(dim=-1))
        return self.proj((attn @ v).transpose(1, 2).reshape(B, N, C))


class Scale(nn.Module):
    """LayerScale."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Feedforward(nn.Module):
    """Two linear layers with an activation."""

    def __init__(self, act: nn.Module | None = None) -> None:
        super().__init__()
        self.fc1 = nn.Linear(D, 2 * D)
        self.act = nn.GELU() if act is None else act
        self.fc2 = nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class DinoBlock(nn.Module):
    """Pre-norm block with LayerScale and a branch that the number of tokens selects."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attn = WrittenAttention()
        self.ls1, self.ls2 = Scale(), Scale()
        self.mlp = Feedforward()
        self.long = 7  # between the two sizes of the tests

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        y = self.ls2(self.mlp(self.norm2(x)))
        return x + y if x.shape[1] < self.long else x + 2 * y


def rotate(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    """Rotary positions on all but the first token, as in DINOv3."""
    a, b = x[:, :, 1:].chunk(2, dim=-1)
    turned = x[:, :, 1:] * cos + torch.cat([-b, a], dim=-1) * sin
    return torch.cat([x[:, :, :1], turned], dim=2)


class MaskedKeyLinear(nn.Linear):
    """A packed projection whose keys have no bias."""

    def __init__(self) -> None:
        super().__init__(D, 3 * D)
        mask = torch.ones(3 * D)
        mask[D : 2 * D] = 0
        self.register_buffer("bias_mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias * self.bias_mask)


class RotaryAttention(nn.Module):
    """Self-attention with rotary positions, by PyTorch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = MaskedKeyLinear()
        self.proj = nn.Linear(D, D)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        B, N, C = x.shape
        q, k, v = (t.transpose(1, 2) for t in self.qkv(x).reshape(B, N, 3, H, C // H).unbind(2))
        x = F.scaled_dot_product_attention(rotate(q, *rope), rotate(k, *rope), v)
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class SwiGlu(nn.Module):
    """SwiGLU with three linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(D, 24), nn.Linear(D, 24)
        self.w3 = nn.Linear(24, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.w3(F.silu(self.w1(x)) * self.w2(x))


class RotaryBlock(nn.Module):
    """Pre-norm block that takes a list of token sequences, as in DINOv3."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attn = RotaryAttention()
        self.mlp = SwiGlu()

    def forward(self, tokens: list[Tensor], rope: tuple[Tensor, Tensor]) -> list[Tensor]:
        tokens = [x + self.attn(self.norm1(x), rope) for x in tokens]
        return [x + self.mlp(self.norm2(x)) for x in tokens]


class MapAttention(nn.Module):
    """Attention on windows of a map with decomposed relative positions, as in SAM's image encoder."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)
        self.proj = nn.Linear(D, D)
        self.rows = nn.Parameter(torch.zeros(2 * side - 1, D // H))
        self.columns = nn.Parameter(torch.zeros(2 * side - 1, D // H))

    def forward(self, x: Tensor) -> Tensor:
        B, h, w, _ = x.shape
        qkv = self.qkv(x).reshape(B, h * w, 3, H, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.reshape(3, B * H, h * w, -1).unbind(0)
        attn = (q * (D // H) ** -0.5) @ k.transpose(-2, -1)
        far = [torch.arange(n)[:, None] - torch.arange(n)[None] + n - 1 for n in (h, w)]
        maps = q.reshape(B * H, h, w, -1)
        rows = torch.einsum("bhwc,hkc->bhwk", maps, self.rows[far[0]])
        columns = torch.einsum("bhwc,wkc->bhwk", maps, self.columns[far[1]])
        attn = attn.view(B * H, h, w, h, w) + rows[:, :, :, :, None] + columns[:, :, :, None, :]
        attn = attn.view(B * H, h * w, h * w).softmax(dim=-1)
        x = (attn @ v).view(B, H, h, w, -1).permute(0, 2, 3, 1, 4).reshape(B, h, w, -1)
        return self.proj(x)


class MapBlock(nn.Module):
    """Block on a map [B, h, w, D], padded to windows."""

    def __init__(self, window: int = 3) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attn = MapAttention(window)
        self.mlp = Feedforward()
        self.window = window

    def forward(self, x: Tensor) -> Tensor:
        B, h, w, C = x.shape
        side = self.window
        y = F.pad(self.norm1(x), (0, 0, 0, -w % side, 0, -h % side))
        high, wide = y.shape[1:3]
        y = y.view(B, high // side, side, wide // side, side, C).permute(0, 1, 3, 2, 4, 5).reshape(-1, side, side, C)
        y = self.attn(y).view(B, high // side, wide // side, side, side, C)
        y = y.permute(0, 1, 3, 2, 4, 5).reshape(B, high, wide, C)[:, :h, :w]
        x = x + y
        return x + self.mlp(self.norm2(x))


class RopeAttention(nn.Module):
    """Attention whose first keys are rotated in place, with separate projections, as in SAM 2's memory attention."""

    def __init__(self, memory: int = D) -> None:
        super().__init__()
        self.q_proj = nn.Linear(D, D)
        self.k_proj, self.v_proj = nn.Linear(memory, D), nn.Linear(memory, D)
        self.out_proj = nn.Linear(D, D)
        self.angles = torch.linspace(0.1, 1.0, D // H // 2)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, unrotated: int = 0) -> Tensor:
        self.angles = self.angles.to(q.device)
        q, k, v = (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in (self.q_proj(q), self.k_proj(k), self.v_proj(v)))
        last = k.shape[-2] - unrotated
        phase = torch.outer(torch.arange(last), self.angles).to(q.dtype)
        turn = torch.polar(torch.ones_like(phase), phase)
        turned = torch.view_as_complex(k[:, :, :last].unflatten(-1, (-1, 2))) * turn
        k[:, :, :last] = torch.view_as_real(turned).flatten(3)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.out_proj(x.transpose(1, 2).flatten(2))


class MemoryBlock(nn.Module):
    """Self-attention, cross attention and MLP, with positions added to the queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(D), nn.LayerNorm(D), nn.LayerNorm(D)
        self.self_attn = RopeAttention()
        self.cross_attn = RopeAttention(8)
        self.linear1, self.linear2 = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor, memory: Tensor, pos: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.dropout(self.self_attn(y, y, y))
        x = x + self.dropout(self.cross_attn(self.norm2(x), memory + pos, memory, unrotated=2))
        return x + self.dropout(self.linear2(F.relu(self.linear1(self.norm3(x)))))


class CastingNorm(nn.LayerNorm):
    """LayerNorm that computes in float32, as in CLIP; in float64 it does nothing else."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        return super().forward(x if dtype == torch.float64 else x.type(torch.float32)).type(dtype)


class QuickGelu(nn.Module):
    """x · sigmoid(1.702 x)."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class ClipBlock(nn.Module):
    """Pre-norm block on [N, B, D] with a causal mask that it keeps as an attribute, as in CLIP's text tower."""

    def __init__(self, tokens: int = 6) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(D, H)
        self.ln_1, self.ln_2 = CastingNorm(D), CastingNorm(D)
        self.mlp = nn.Sequential(nn.Linear(D, 2 * D), QuickGelu(), nn.Linear(2 * D, D))
        self.attn_mask = torch.full((tokens, tokens), -math.inf, dtype=torch.float64).triu(1)

    def attention(self, x: Tensor) -> Tensor:
        self.attn_mask = self.attn_mask.to(dtype=x.dtype, device=x.device)
        return self.attn(x, x, x, need_weights=False, attn_mask=self.attn_mask)[0]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class DetrBlock(nn.Module):
    """Post-norm decoder layer with positions added to the queries and keys, as in DETR."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(D, H, batch_first=True)
        self.cross_attn = nn.MultiheadAttention(D, H, batch_first=True)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(D), nn.LayerNorm(D), nn.LayerNorm(D)
        self.mlp = Feedforward(nn.ReLU())

    def forward(self, x: Tensor, memory: Tensor, pos: Tensor) -> tuple[Tensor, None]:
        q = x + pos
        x = self.norm1(x + self.self_attn(q, q, q, need_weights=False)[0])
        x = self.norm2(x + self.cross_attn(x + pos, memory, memory, need_weights=False)[0])
        return self.norm3(x + self.mlp(x)), None


class UnitAttention(nn.Module):
    """Attention within units of a sequence: PyTorch's function on five axes, as in Hiera."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)
        self.proj = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        B = x.shape[0]
        q, k, v = self.qkv(x).reshape(B, -1, 3, 3, H, D // H).permute(3, 0, 4, 2, 1, 5).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 3).reshape(B, -1, D))


class UnitBlock(nn.Module):
    """Block whose tokens attend in three units."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attn = UnitAttention()
        self.mlp = Feedforward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Stack(nn.Module):
    """Two blocks of a class.

    Args:
        block: the class.
        first: True if a block returns a tuple, whose first part is passed on.
    """

    def __init__(self, block: Callable[[], nn.Module], first: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.first = first

    def forward(self, x: Any, *more: Any) -> Any:
        for block in self.blocks:
            x = block(x, *more)
            x = x[0] if self.first else x
        return x


class Research(NamedTuple):
    """A model.

    Attributes:
        build: () → it, in float64 and evaluation mode, with random weights.
        inputs: (number of images, number of tokens or side of a map) → random arguments of a call in float64.
        sizes: two sizes of images.
        calls: functions that a captured block calls, with their numbers.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[int, int], tuple]
    sizes: tuple[int, int]
    calls: dict[str, int]


def _stack(block: Callable[[], nn.Module], first: bool = False) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        model = Stack(block, first).double().eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 0.5 * (parameter.dim() == 1), 0.3)
        return model

    return build


def _draw(*sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=torch.float64)


def _rotary(batch: int, tokens: int) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    angles = _draw(tokens - 1, D // H)
    return [_draw(batch, tokens, D)], (angles.sin(), angles.cos())


CAUSAL = 6  # tokens of "clip", whose mask has this size
MODELS = {
    "dino": Research(_stack(DinoBlock), lambda b, n: (_draw(b, n, D),), (5, 9), dict(linear=2, attention_qkv=1, mlp=1)),
    "rotary": Research(_stack(RotaryBlock), _rotary, (5, 9), dict(linear=2, attention_qkv=1, mlp=1)),
    "map": Research(
        _stack(MapBlock),
        lambda b, n: (_draw(b, n, n + 1, D),),
        (4, 6),
        dict(layer_norm=1, linear=2, attention=1, mlp=1),
    ),
    "memory": Research(
        _stack(MemoryBlock),
        lambda b, n: (_draw(b, n, D), _draw(b, n + 3, 8), _draw(b, n + 3, 8)),
        (4, 6),
        dict(layer_norm=1, linear=8, attention=2, mlp=1),
    ),
    "clip": Research(
        _stack(ClipBlock),
        lambda b, n: (_draw(CAUSAL, b, D),),
        (CAUSAL, CAUSAL),
        dict(layer_norm=1, linear=2, attention_qkv=1, mlp=1),
    ),
    "detr": Research(
        _stack(DetrBlock, True),
        lambda b, n: (_draw(b, 4, D), _draw(b, n, D), _draw(b, 4, D)),
        (5, 7),
        dict(linear=5, attention_qkv=1, layer_norm=3, attention=1, mlp=1),
    ),
    "unit": Research(_stack(UnitBlock), lambda b, n: (_draw(b, 3 * n, D),), (2, 4), dict(linear=2, attention=1, mlp=1)),
}
