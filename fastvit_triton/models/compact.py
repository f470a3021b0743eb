"""The compact transformer that `cct.py` configures. Hassani et al., arXiv:2104.05704."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ..layers import Attention, Blocks, drop_path_rates, normalize, resize_pos_embed
from ..layers.compact import CompactBlock, CompactClassifier, ConvTokenizer
from ..layers.embed import sides
from ..layers.one_query import sequence_pool
from .base import ImageModel


class CompactTransformer(ImageModel):
    """CCT, CVT or ViT-Lite. Positions are resampled for images of another size than `img_size`."""

    config: Any  # of cct.py
    layout = "cct"
    head_names = ("classifier.fc",)
    feature_formats = ("NCHW", "NLC")
    feature_indices = 3
    position_resize = "bilinear"

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.num_classes, self.num_features = config, config.num_classes, (D := config.embed_dim)
        self.grad_checkpointing, self.num_prefix_tokens = config.grad_checkpointing, int(config.class_token)
        self.tokenizer = ConvTokenizer(config.in_chans, D, config.kernel_size, config.conv_layers)
        self.grid_size = self.grid_of(sides(config.img_size))
        blocks, attn_drop, drop = Blocks(), config.attn_drop_rate, config.proj_drop_rate
        for rate in drop_path_rates(config.drop_path_rate, config.depth):
            attn = Attention(D, config.num_heads, None, False, attn_drop=attn_drop, proj_drop=drop)
            blocks.append(CompactBlock(D, attn, int(D * config.mlp_ratio), config.eps, drop, rate))
        rows = self.grid_size[0] * self.grid_size[1] + self.num_prefix_tokens
        self.classifier: Any = CompactClassifier(
            blocks,
            D,
            rows,
            config.pos_embed,
            config.class_token,
            nn.LayerNorm(D, eps=config.eps) if config.final_norm else nn.Identity(),
            config.global_pool == "seq",
            config.pos_drop_rate,
        )
        self.classifier.fc = nn.Linear(D, self.num_classes) if self.num_classes else nn.Identity()
        self.classifier.reset_parameters()

    def grid_of(self, size: tuple[int, ...]) -> tuple[int, int]:
        """(rows, columns) of tokens of an image of (height, width); raises ValueError if there are none."""
        rows, columns = self.tokenizer.grid_of(size)
        if not rows * columns:
            raise ValueError(f"image is {size[0]}x{size[1]} pixels, too small for a token of this model")
        return rows, columns

    def stages(self, image: Tensor) -> Iterator[Tensor]:
        """Yields the tokens [B, T + N, D] after each block."""
        if image.dim() != 4 or image.shape[1] != self.config.in_chans:
            raise ValueError(f"image must have axes [B, {self.config.in_chans}, H, W], got shape {list(image.shape)}")
        parts, grid, pos = self.classifier, self.grid_of(image.shape[2:]), self.classifier.positional_emb
        if pos is not None and grid != self.grid_size:
            pos = resize_pos_embed(pos, self.grid_size, grid, self.num_prefix_tokens, self.position_resize)
        x = parts.dropout(self.tokenizer(image, pos, parts.class_emb))
        yield from parts.blocks.outputs(x, recompute=self.recomputes)

    def forward_features(self, image: Tensor) -> Tensor:
        """image [B, C, H, W] → tokens [B, T + N, D] after the final norm."""
        x = image
        for y in self.stages(image):
            x = y
        return self.normalize_stage(x, 0)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens [B, T + N, D] → logits [B, num_classes], or the pooled features with `pre_logits`."""
        pool = self.config.global_pool
        x = sequence_pool(x, self.classifier.attention_pool) if pool == "seq" else x[:, 0] if pool == "token" else x
        return x if pre_logits else self.classifier.fc(x)

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """For each block: `num_chs`, its channels; `reduction`, pixels a token; `module`, its name."""
        shared = dict(num_chs=self.num_features, reduction=self.tokenizer.reduction)
        return [dict(module=f"classifier.blocks.{i}", **shared) for i in range(len(self.classifier.blocks))]

    def normalize_stage(self, x: Tensor, stage: int) -> Tensor:
        """The final norm of a block's output."""
        return normalize(x, self.classifier.norm)

    def to_map(self, x: Tensor, image: Tensor, output_fmt: str) -> tuple[Tensor, Tensor | None]:
        """Tokens [B, T + N, D] → patch tokens, as [B, D, h, w] or [B, N, D], and the class token [B, 1, D] or None."""
        T = self.num_prefix_tokens
        prefix, x = x[:, :T] if T else None, x[:, T:]
        return (x.mT.unflatten(2, self.grid_of(image.shape[2:])) if output_fmt == "NCHW" else x).contiguous(), prefix

    def prune(self, stages: int, norm: bool, head: bool) -> None:
        """Keeps the first `stages` blocks; removes the final norm if `norm`, pooling and classifier if `head`."""
        self.classifier.blocks = self.classifier.blocks[:stages]
        if norm:
            self.classifier.norm = nn.Identity()
        if head:
            self.reset_classifier(0, "none")
        kept = dict(depth=stages, drop_path_rate=self.classifier.blocks[-1].drop_path.p)
        self.config = self.config.replace(**kept, final_norm=isinstance(self.classifier.norm, nn.LayerNorm))

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replaces the head, as `ImageModel` does; without global_pool="seq" the pooling is removed."""
        if global_pool == "seq" and self.classifier.attention_pool is None:
            raise ValueError("global_pool is 'seq', but the model has no sequence pooling; create it with that option")
        super().reset_classifier(num_classes, global_pool)
        if self.config.global_pool != "seq":
            self.classifier.attention_pool = None

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Regular expressions that assign parameters to layers, for timm's layer-wise learning rates."""
        stem, last = r"^tokenizer|^classifier\.(?:class|positional)_emb", (r"^classifier\.norm", (99999,))
        return dict(stem=stem, blocks=[(r"^classifier\.blocks\.(\d+)", None), last])

    def no_weight_decay(self) -> set[str]:
        """Names of parameters to exclude from weight decay: positions and class token, as in ViT."""
        return {"classifier.positional_emb", "classifier.class_emb"} & dict(self.named_parameters()).keys()
