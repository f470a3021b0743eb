"""VT-ResNet — Visual transformers: token-based image representation. Wu et al., arXiv:2006.03677.

Differs from ViT:
  1. A ResNet, of whose last stage visual transformers replace the blocks.
  2. Each reads the map into 16 tokens, by a softmax over the pixels; the second computes its filters from the tokens.
  3. Tokens attend to each other without scale, norm and values, and are added to every pixel.
  4. The mean of the tokens goes to the head.
No relation to ViT's names `vit_*`. The authors have published no code; parameter names of the ResNet are timm's.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoints.renaming import CheckpointFormats, Layout
from ..layers import DropPath, Mlp
from ..layers.drop_path import add
from ..layers.fusable import Fusable
from ..layers.recompute import recomputed
from ..layers.residual import BasicBlock
from .config import Options
from .fit import fit_tables
from .residual import ResidualConfig, ResidualNetwork

Grid = tuple[int, int]
Inputs = tuple[Tensor, Tensor, Tensor]


class OneHead(Fusable):
    """softmax(q kᵀ) v of one head; a subclass computes q [B, N, d], k [B, M, d] and v [B, M, e]."""

    def heads(self, x: Tensor, tokens: Tensor) -> Inputs:
        """Map [B, N, C] and tokens [B, L, D] → q, k, v."""
        raise NotImplementedError

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Map [B, N, C] and tokens [B, L, D] → [B, Nq, e]."""
        q, k, v = (t[:, None] for t in self.heads(x, tokens))
        return F.scaled_dot_product_attention(q, k, v, scale=1.0)[:, 0]


class Tokenizer(OneHead):
    """T = softmax(W Xᵀ) X V, a weighted mean of the pixels for each token (equations 1 and 2).

    W [L, C] is learned (filters) or, if `recurrent`, computed from the tokens before, T R. V is learned if tokens have
    another number of channels than the map.
    """

    def __init__(self, dim: int, tokens: int, token_dim: int, recurrent: bool) -> None:
        super().__init__()
        if recurrent:
            self.recur = nn.Linear(token_dim, dim, bias=False)
        self.filters = None if recurrent else nn.Parameter(torch.empty(tokens, dim))
        self.value = nn.Identity() if dim == token_dim else nn.Linear(dim, token_dim, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.filters is not None:
            nn.init.normal_(self.filters, std=0.01)

    def heads(self, x: Tensor, tokens: Tensor | None) -> Inputs:
        q = self.recur(tokens) if self.filters is None else self.filters.expand(x.shape[0], -1, -1)
        return q.to(x.dtype), x, self.value(x)


class TokenAttention(OneHead):
    """softmax(T K (T Q)ᵀ) T, without a projection of the values (equation 3)."""

    def __init__(self, token_dim: int, key_dim: int) -> None:
        super().__init__()
        self.key = nn.Linear(token_dim, key_dim, bias=False)
        self.query = nn.Linear(token_dim, key_dim, bias=False)

    def heads(self, x: Tensor, tokens: Tensor) -> Inputs:
        return self.key(tokens), self.query(tokens), tokens


class Projector(OneHead):
    """softmax(X Q (T K)ᵀ) T V, a weighted mean of the tokens for each pixel (equation 5)."""

    def __init__(self, dim: int, token_dim: int, key_dim: int) -> None:
        super().__init__()
        self.query = nn.Linear(dim, key_dim, bias=False)
        self.key = nn.Linear(token_dim, key_dim, bias=False)
        self.value = nn.Identity() if dim == token_dim else nn.Linear(token_dim, dim, bias=False)

    def heads(self, x: Tensor, tokens: Tensor) -> Inputs:
        return self.query(x), self.key(tokens), self.value(tokens)


class VisualTransformer(Fusable):
    """Tokenizer, attention and MLP of the tokens (equations 3 and 4), and a projector.

    A `recurrent` tokenizer reads the tokens of a module before; one that `projects` adds them to the map, for a module
    after this one.
    """

    def __init__(
        self,
        dim: int,
        tokens: int,
        token_dim: int,
        key_dim: int,
        recurrent: bool = False,
        projects: bool = True,
        drop: float = 0.0,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.tokenizer = Tokenizer(dim, tokens, token_dim, recurrent)
        self.attn = TokenAttention(token_dim, key_dim)
        self.mlp = Mlp(token_dim, token_dim, "relu", bias=False, drop=drop)
        self.projector = Projector(dim, token_dim, key_dim) if projects else None
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map [B, N, C], and the tokens [B, L, D] of the module before → the same."""
        t = self.tokenizer(x, tokens)
        t = t + self.drop_path(self.attn(x, t))
        t = add(t, self.drop_path, self.mlp)
        return x if self.projector is None else x + self.drop_path(self.projector(x, t)), t


@dataclass(frozen=True, kw_only=True)
class VtConfig(ResidualConfig):
    """Options of VT-ResNet, in addition to those of `ResidualConfig`; `num_heads` is 1 for visual transformers.

    Attributes:
        tokens: tokens of a visual transformer.
        token_dim: channels of a token; the published versions disagree on them.
        key_dim: channels of a query.
    """

    embed_dim: tuple[int, ...] = (64, 128, 256, 256)
    depths: tuple[int, ...] = (2, 2, 2, 2)
    num_heads: tuple[int, ...] = (0, 0, 0, 1)
    strides: tuple[int, ...] = (1, 2, 2, 1)
    tokens: int = 16
    token_dim: int = 1024
    key_dim: int = 512

    def check_heads(self) -> None:
        """Raises ValueError unless convolutions come first, and visual transformers keep the size of their map."""
        *first, last = self.num_heads
        if any(first) or last not in (0, 1):
            raise ValueError(f"num_heads is {self.num_heads}; use 0, and 1 for the last stage only")
        before = (self.stem_dim, *self.widths)[-2]
        if last and (self.strides[-1] != 1 or before != self.widths[-1]):
            raise ValueError(f"visual transformers keep a map; use stride 1 and {before} channels in the last stage")


class VisualTransformerResNet(ResidualNetwork):
    """VT-ResNet; its features are tokens [B, L, D]. The map of its last stage is what its last tokens read."""

    config: VtConfig
    layout = "vt"

    def build_head(self) -> None:
        """Creates the classifier of tokens, and initialises all weights."""
        self.num_features = self.config.token_dim if self.config.num_heads[-1] else self.num_features
        super().build_head()

    def build_block(
        self, stage: int, index: int, inputs: int, outputs: int, stride: int, drop_path: float, grid: Grid
    ) -> nn.Module:
        """Two convolutions, or a visual transformer in the last stage."""
        config = self.config
        if not config.num_heads[stage]:
            return BasicBlock(inputs, outputs, stride, drop_path)
        widths = outputs, config.tokens, config.token_dim, config.key_dim
        projects = index + 1 < config.depths[stage]  # what the last one would project is not read
        return VisualTransformer(*widths, index > 0, projects, config.proj_drop_rate, drop_path)

    def stage(self, x: Any, i: int) -> Any:
        """As that of `ResidualNetwork`; visual transformers return the pair (map [B, H, W, D], tokens [B, L, D])."""
        if not self.config.num_heads[i]:
            return super().stage(x, i)
        tokens = None
        grid = x.shape[1:3]
        x = x.flatten(1, 2)
        for block in self.stages[i]:
            x, tokens = recomputed(block, x, tokens) if self.recomputes else block(x, tokens)
        return x.unflatten(1, grid), tokens

    def normalize_stage(self, x: Any, stage: int) -> Any:
        """The map and its tokens as they are: there is no final norm."""
        return x

    def stage_features(self, x: Any, stage: int) -> Tensor:
        """The tokens [B, L, D] of visual transformers, or a map [B, H, W, D]."""
        return x[1] if isinstance(x, tuple) else x

    def to_map(self, x: Any, image: Tensor, output_fmt: str) -> tuple[Tensor, Tensor | None]:
        """A stage's map in another format, and the tokens of visual transformers or None."""
        x, tokens = x if isinstance(x, tuple) else (x, None)
        return super().to_map(x, image, output_fmt)[0], tokens

    def prune(self, stages: int, norm: bool, head: bool) -> None:
        width = self.num_features if stages == self.num_stages else self.config.widths[stages - 1]
        super().prune(stages, norm, head)
        self.num_features = width


CONFIG = VtConfig
MODEL = VisualTransformerResNet
VARIANTS: dict[str, Options] = {"vt_resnet18": {}}

# Key layout of our own checkpoints; the authors published no weights.

VT = Layout(name="VT-ResNet", mark="stem.conv1.conv.weight", resize="linear")

CHECKPOINTS = CheckpointFormats("VT-ResNet", (VT,), fit_tables)
