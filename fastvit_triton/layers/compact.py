"""Blocks and tokenizer of compact transformers (CCT, arXiv:2104.05704). Parameter names are the authors'."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.body import activate, normalize
from ..engine.branch import Branch, add_branches, runs_plain
from ..engine.hooks import can_fuse
from ..engine.leaves import is_patch_conv, is_readable
from ..engine.mlp import MlpBody
from ..engine.replay import call_branches
from ..kernels.attention import attention
from ..kernels.patch_embed import assemble, patch_embed, whole_patches
from .attention import Attention
from .block import Blocks
from .drop_path import DropPath
from .embed import sincos1d


class CompactBlock(nn.Module):
    """y = LN(x + attention(LN x)), then y + MLP(y): the residual is normalised after the attention, and not before fc1.

    Args:
        dim: D, channels per token.
        self_attn: maps [B, N, D] to [B, N, D].
        hidden: channels inside the MLP.
        eps: LayerNorm epsilon.
        drop: dropout inside and after the MLP.
        drop_path: probability of skipping each branch.
    """

    def __init__(self, dim: int, self_attn: Attention, hidden: int, eps: float, drop: float, drop_path: float) -> None:
        super().__init__()
        self.pre_norm = nn.LayerNorm(dim, eps=eps)
        self.self_attn = self_attn
        self.norm1 = nn.LayerNorm(dim, eps=eps)
        self.linear1, self.dropout1 = nn.Linear(dim, hidden), nn.Dropout(drop)
        self.linear2, self.dropout2 = nn.Linear(hidden, dim), nn.Dropout(drop)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, D] → [B, N, D]."""
        x = normalize(call_branches(attend, self.self_attn, x, self.pre_norm, self.drop_path), self.norm1)
        layers = self.dropout1, self.linear2, self.dropout2, self.drop_path
        if can_fuse(x) and not runs_plain(x, mlp_branch(self.linear1, *layers), block=self.linear1):
            return call_branches(add_mlp, self.linear1, x, *layers)
        h = self.dropout1(activate(self.linear1(x), "gelu"))
        return x + self.drop_path(self.dropout2(self.linear2(h)))


def attend(attn: nn.Module, x: Tensor, norm: nn.Module, drop_path: nn.Module | None) -> Tensor:
    """x [B, N, D] plus attention after a norm."""
    return add_branches(x, Branch(attn, norm, drop_path=drop_path), block=attn)


def add_mlp(fc1: nn.Module, x: Tensor, *layers: Any) -> Tensor:
    """x [B, N, D] plus an MLP without norm, see `mlp_branch`."""
    return add_branches(x, mlp_branch(fc1, *layers), block=fc1)


def mlp_branch(fc1: nn.Module, drop1: nn.Module, fc2: Any, drop2: nn.Module, drop_path: nn.Module | None) -> Branch:
    """An MLP with GELU whose layers are modules of a block."""
    return Branch(MlpBody((fc1,), "gelu", fc2, (drop1, drop2)), drop_path=drop_path)


def sequence_pool(x: Tensor, score: nn.Linear) -> Tensor:
    """Sequence pooling: softmax(x w + b)ᵀ x over the tokens (CCT, arXiv:2104.05704, equation 5), [B, N, D] → [B, D].

    Without gradients it is attention of the query w to x, with scale 1, in which b has no effect. With gradients it
    is composed: that of w is a difference of nearly equal sums, which PyTorch's softmax gives with a smaller error.

    Args:
        x: [B, N, D].
        score: D → 1.
    """
    if torch.is_grad_enabled() or not (can_fuse(x) and is_readable(score)):
        return (score(x).softmax(1).mT @ x)[:, 0]
    query = score.weight.to(x.dtype)[None, None].expand(x.shape[0], 1, 1, -1)
    return attention(query, x[:, None], x[:, None], scale=1.0)[:, 0, 0]


class ConvTokenizer(nn.Module):
    """Image to tokens by convolutions, each with ReLU and max pooling, or by one patch projection.

    Args:
        in_chans: C, image channels.
        embed_dim: D.
        kernel_size: side of the convolutions, or of the patches.
        layers: convolutions; 0 for a patch projection.
    """

    WIDTH = 64  # channels between the convolutions

    def __init__(self, in_chans: int, embed_dim: int, kernel_size: int, layers: int) -> None:
        super().__init__()
        self.in_chans = in_chans
        stride = max(1, kernel_size // 2 - 1) if layers else kernel_size
        self.reduction = (2 * stride) ** layers if layers else stride
        padding = max(1, kernel_size // 2) if layers else 0
        widths = [in_chans, *[self.WIDTH] * (layers - 1), embed_dim]
        self.conv_layers: Any = nn.Sequential()
        for i, (inputs, outputs) in enumerate(pairwise(widths)):
            conv = nn.Conv2d(inputs, outputs, kernel_size, stride, padding, bias=not layers)
            rest = (nn.ReLU(), nn.MaxPool2d(3, 2, 1)) if layers else (nn.Identity(), nn.Identity())
            self.conv_layers.add_module(str(i), nn.Sequential(conv, *rest))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for layer in self.conv_layers:
            nn.init.kaiming_normal_(layer[0].weight)

    def grid_of(self, size: tuple[int, ...]) -> tuple[int, ...]:
        """(rows, columns) of tokens of an image of (height, width); 0 where it is too small."""
        for layer in self.conv_layers:
            conv = layer[0]
            steps = [(conv.kernel_size[0], conv.stride[0], conv.padding[0])]
            steps += [(3, 2, 1)] if isinstance(layer[2], nn.MaxPool2d) else []
            for kernel, stride, padding in steps:
                size = tuple(max(0, (n + 2 * padding - kernel) // stride + 1) for n in size)
        return size

    def forward(self, image: Tensor, pos: Tensor | None = None, prefix: Tensor | None = None) -> Tensor:
        """image [B, C, H, W], pos [1, T + N, D], prefix [1, T, D] → tokens [B, T + N, D]."""
        conv = self.conv_layers[0][0]
        if is_patch_conv(conv) and can_fuse(image):
            return patch_embed(whole_patches(image, conv.kernel_size), conv.weight, conv.bias, pos, prefix)
        return assemble(self.conv_layers(image).flatten(2).transpose(1, 2), pos, prefix)


class CompactClassifier(nn.Module):
    """The modules after the tokenizer, under the authors' names; the model calls them.

    Args:
        blocks: the blocks.
        dim: D.
        rows: positions, with that of the class token.
        pos_embed: "learned", "sincos1d" (a parameter that is not trained) or "none".
        class_token: prepend a learned token.
        norm: after the last block.
        pooled: pool the tokens by a learned query.
        pos_drop: dropout after the positions.
    """

    class_emb: nn.Parameter | None
    positional_emb: nn.Parameter | None

    def __init__(
        self,
        blocks: Blocks,
        dim: int,
        rows: int,
        pos_embed: str,
        class_token: bool,
        norm: nn.Module,
        pooled: bool,
        pos_drop: float,
    ) -> None:
        super().__init__()
        self.class_emb = nn.Parameter(torch.zeros(1, 1, dim)) if class_token else None
        self.attention_pool = nn.Linear(dim, 1) if pooled else None
        learned = pos_embed == "learned"
        table = torch.empty(1, rows, dim) if learned else sincos1d(rows, dim) if pos_embed == "sincos1d" else None
        self.positional_emb = None if table is None else nn.Parameter(table, requires_grad=learned)
        self.dropout, self.blocks, self.norm = nn.Dropout(pos_drop), blocks, norm

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Reinitialises all weights as the authors do."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        if self.class_emb is not None:
            nn.init.zeros_(self.class_emb)
        if self.positional_emb is not None and self.positional_emb.requires_grad:
            nn.init.trunc_normal_(self.positional_emb, std=0.2)
