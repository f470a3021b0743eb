"""The base class of all models: timm's model methods."""

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.body import normalize
from ..layers.embed import sides
from ..layers.fusable import Fusable
from .config import ALIASES, BaseConfig
from .hub import HubMethods

Patterns = tuple[tuple[str, tuple[int, ...] | None], ...]
LAST = (99_999,)  # number of the last layer, as in timm
BLOCKS, NORM = (r"^blocks\.(\d+)", None), (r"^norm", LAST)


class ImageModel(HubMethods, Fusable):
    """A model of images, by default a classifier, with timm's methods.

    A family implements `outputs` and `prune`. A stage is what ends in one intermediate feature: a block of a ViT, or a
    level of a pyramid. Unless a family says otherwise, outputs are tokens [B, T + N, D], see `grid_of`.

    `variant` is the name passed to `create_model`.
    """

    # of its output, beside classes: "detect" for objects, see `detector.Detector`, "segment" for a class of each pixel,
    # "generate" for models of pixels, see `pixel.PixelModel`, "restore" for an image
    task = "classify"
    layout = "vit"  # names of parameters in its published checkpoints, a key of `weights.load.CHECKPOINT_FORMATS`
    head_names: tuple[str, ...] = ("head",)  # classifier modules, as prefixes of their keys in the state dict
    # head tensors that a checkpoint lacks are set to zero, or keep their initial values: heads of several layers would
    # not learn from zeros
    zero_missing_heads: bool = True
    feature_formats: tuple[str, ...] = ("NCHW",)  # values of `output_fmt`; `FeatureGetterNet` takes the first
    feature_indices: int | None = None  # the default `out_indices` of `FeatureGetterNet`; None means every stage
    num_prefix_tokens: int = 0  # T, tokens before those of patches
    blocks_path = "blocks"  # name of the list of blocks, each of which is a stage
    pruned: frozenset[str] = frozenset()  # keys that pruning has removed; `load_weights` ignores them
    undecayed: str = r"^$"  # regular expression of the parameters to exclude from weight decay; none
    stem_pattern: str  # regular expression of the parameters of the first layer, see `group_matcher`
    # those of the other layers in order, whose groups are numbers, each with further numbers or None
    layer_patterns: Patterns = (BLOCKS, NORM)
    coarse_patterns: Patterns | None = None  # the same with one layer for each stage; None if a stage is a block
    config: BaseConfig  # every option
    num_classes: int  # outputs of the head
    num_features: int  # inputs of the head
    norm: nn.Module
    head_drop: nn.Module
    grad_checkpointing: bool

    def __init__(self, config: BaseConfig, num_features: int) -> None:
        super().__init__()
        self.config = config
        self.num_classes = config.num_classes
        self.num_features = num_features
        self.grad_checkpointing = config.grad_checkpointing

    def forward_features(self, image: Tensor) -> Tensor:
        """image [B, C, H, W] → features before the pooling, those of the last stage."""
        _, x, last = self.collect(image, [], False, False)
        return self.stage_features(x, last)

    def pool(self, x: Tensor) -> Tensor:
        """Features → [B, D]: the class token, or the mean of the patches; all of them for global_pool="none"."""
        pool = vars(self.config)["global_pool"]
        if pool == "avg":
            return x[:, self.num_prefix_tokens :].flatten(1, -2).mean(1)
        return x if pool == "none" else x[:, 0]

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Features → logits [B, num_classes], or the pooled features with `pre_logits`."""
        x = self.head_drop(self.pool(x))
        return x if pre_logits else self.get_submodule(self.head_names[0])(x)

    def forward(self, image: Tensor) -> Tensor:
        """image [B, C, H, W] → logits [B, num_classes]."""
        return self.forward_head(self.forward_features(image))

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """For each stage: `num_chs`, its channels; `reduction`, pixels a step; `module`, its name (as in timm)."""
        shared = dict(num_chs=self.num_features, reduction=self.reduction)
        blocks: Any = self.get_submodule(self.blocks_path)
        return [dict(module=f"{self.blocks_path}.{i}", **shared) for i in range(len(blocks))]

    @property
    def reduction(self) -> int:
        """Pixels of the image for each token."""
        if not hasattr(self.config, "patch_size"):
            raise NotImplementedError(f"{type(self).__name__} has no stages of features")
        return max(sides(self.config.patch_size))

    def outputs(self, image: Tensor) -> Iterator[Tensor]:
        """Yields the output of each stage in turn, before the final norm."""
        raise NotImplementedError

    def normalize_stage(self, x: Tensor, stage: int) -> Tensor:
        """The final norm of a stage's output; a pyramid's is that of its last stage only."""
        return normalize(x, self.norm)

    def stage_features(self, x: Any, stage: int) -> Any:
        """A stage's output as the features before the pooling."""
        return self.normalize_stage(x, stage)

    def to_map(self, x: Tensor, image: Tensor, output_fmt: str) -> tuple[Tensor, Tensor | None]:
        """A stage's output as a map in one of `feature_formats`, and its prefix tokens [B, T, D] if it has any."""
        T = self.num_prefix_tokens
        patches = x[:, T:]
        if output_fmt == "NCHW":
            patches = patches.transpose(1, 2).unflatten(2, self.grid_of(image)).contiguous()
        return patches, x[:, :T] if T else None

    def grid_of(self, image: Tensor) -> tuple[int, int]:
        """(rows, columns) of the patch tokens of an image [B, C, H, W]."""
        raise NotImplementedError

    def position_tables(self) -> dict[str, tuple[Any, int]]:
        """Key of each table of positions that `fit.fit_tables` resizes → its grid, and its rows before that."""
        return {}

    def prune(self, stages: int, norm: bool, head: bool) -> None:
        """Keeps the first `stages` stages; removes the final norm if `norm`, the classifier if `head`."""
        raise NotImplementedError

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
    ) -> Any:
        """image [B, C, H, W] → features before the pooling, and the outputs of some stages, as in timm.

        Args:
            x: image [B, C, H, W], or what the model takes instead.
            indices: stages to take; n means the last n, None means all, and negative ones count from the end. Outputs
                come in the order of the stages.
            return_prefix_tokens: return pairs (map, prefix tokens [B, T, D]) if the model has such tokens.
            norm: apply the final norm to the outputs too.
            stop_early: skip the stages after the last one taken; the features before the pooling are then that one's.
            output_fmt: "NCHW" for maps [B, D, h, w], or "NLC" for tokens [B, N, D], see `feature_formats`.
            intermediates_only: return the list of outputs only.
            output_dict: return a dict of `image_intermediates` and, unless left out, `image_features` and
                `image_intermediates_prefix`.

        Raises:
            ValueError: an index is out of range, or the model has no such format.
        """
        take, _ = feature_take_indices(len(self.feature_info), indices)
        check_format(output_fmt, self.feature_formats)
        taken, features, i = self.collect(x, take, norm, stop_early)
        pairs = [self.to_map(y, x, output_fmt) for y in taken]
        maps = [y for y, _ in pairs]
        prefixes = [prefix for _, prefix in pairs if prefix is not None]
        paired = return_prefix_tokens and bool(prefixes)
        if output_dict:
            parts = {"image_intermediates": maps} | ({"image_intermediates_prefix": prefixes} if paired else {})
            return parts if intermediates_only else parts | {"image_features": self.stage_features(features, i)}
        outputs = pairs if paired else maps
        return outputs if intermediates_only else (self.stage_features(features, i), outputs)

    def collect(self, image: Tensor, take: list[int], norm: bool, stop_early: bool) -> tuple[list[Any], Any, int]:
        """(outputs of the stages to take, output of the last one that ran, its number), see `forward_intermediates`."""
        outputs = []
        x = image
        i = 0
        for i, x in enumerate(self.outputs(image)):
            if i in take:
                outputs.append(self.normalize_stage(x, i) if norm else x)
            if stop_early and i == max(map(self.stage_of, take)):
                break
        return outputs, x, i

    def get_intermediate_layers(
        self,
        x: Tensor,
        n: int | Sequence[int] = 1,
        reshape: bool = False,
        return_prefix_tokens: bool = False,
        norm: bool = False,
    ) -> list[Any]:
        """The outputs of the last n stages, or of those listed, as in DINOv2 and timm; see `forward_intermediates`.

        They are tokens [B, N, D], or with `reshape` maps [B, D, h, w].
        """
        take, _ = feature_take_indices(len(self.feature_info), n, "n")
        output_fmt = "NCHW" if reshape else "NLC"
        return self.forward_intermediates(x, take, return_prefix_tokens, norm, False, output_fmt, True)

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Removes the stages after the last of `indices` and, if asked, final norm and classifier, as in timm.

        Returns:
            The indices, none of them negative.
        """
        take, _ = feature_take_indices(len(self.feature_info), indices)
        before = self.state_dict().keys()
        self.prune(max(map(self.stage_of, take)) + 1, prune_norm, prune_head)
        self.pruned |= before - self.state_dict().keys()
        return take

    def stage_of(self, index: int) -> int:
        """The stage that has the feature of this number."""
        return index

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Regular expressions that assign parameters to layers, for timm's layer-wise learning rates."""
        by_stage = coarse and self.coarse_patterns is not None
        return dict(stem=self.stem_pattern, blocks=self.coarse_patterns if by_stage else self.layer_patterns)

    def no_weight_decay(self) -> set[str]:
        """Names of parameters to exclude from weight decay, as in timm and in the authors' code."""
        return {name for name, _ in self.named_parameters() if re.search(self.undecayed, name)}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Enables recomputing every block in the backward pass instead of storing its activations."""
        self.grad_checkpointing = enable

    @property
    def recomputes(self) -> bool:
        """True if blocks are recomputed in the backward pass of this call."""
        return self.grad_checkpointing and torch.is_grad_enabled()

    def get_classifier(self) -> nn.Module | tuple[nn.Module, ...]:
        """Returns the head, or a tuple of heads."""
        heads = tuple(self.get_submodule(name) for name in self.head_names)
        return heads[0] if len(heads) == 1 else heads

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replaces the heads by zero-initialised ones (ViT paper, section 3.2); 0 removes them.

        Args:
            num_classes: outputs of the new head.
            global_pool: the pooling from now on, as in the config; None leaves it.

        Raises:
            ValueError: the model does not take this pooling; the message has those that it takes.
        """
        if global_pool is not None and ALIASES.get(global_pool, global_pool) not in (taken := self.poolings()):
            raise ValueError(f"global_pool is {global_pool!r}; use one of {', '.join(taken)}")
        self.config = self.config.replace(num_classes=num_classes, global_pool=global_pool)
        self.num_classes = num_classes
        for name in self.head_names:
            module, _, leaf = name.rpartition(".")
            setattr(self.get_submodule(module), leaf, self.zero_head())

    def poolings(self) -> list[str]:
        """The values of global_pool that `reset_classifier` takes."""
        taken = []
        for name in ("token", "avg", "map", "seq", "none"):
            with contextlib.suppress(ValueError):
                self.config.replace(global_pool=name)
                taken.append(name)
        return taken

    def zero_head(self) -> nn.Module:
        """A zero-initialised linear layer num_features → num_classes on the model's device, or Identity."""
        if not self.num_classes:
            return nn.Identity()
        like = next(self.parameters())
        head = nn.Linear(self.num_features, self.num_classes, device=like.device, dtype=like.dtype)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        return head.train(self.training)


def init_linear(model: nn.Module) -> None:
    """Reinitialises all linear layers of a model as in timm: truncated normal 0.02, zero biases."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def feature_take_indices(
    stages: int, indices: int | Sequence[int] | None, argument: str = "indices"
) -> tuple[list[int], int]:
    """Resolves which of a model's stages to take."""
    if indices is None:
        indices = stages
    if isinstance(indices, int):
        if not 0 < indices <= stages:
            raise ValueError(f"{argument} is {indices}; the model has {stages} stages, so use 1 to {stages}")
        return list(range(stages - indices, stages)), stages - 1
    if not hasattr(indices, "__iter__") or not all(hasattr(i, "__index__") for i in indices):
        raise TypeError(f"{argument} is {indices!r}; give an integer, or a sequence of integers")
    if not indices or not all(-stages <= i < stages for i in indices):
        raise ValueError(
            f"{argument} is {list(indices)}; the model has {stages} stages, so give some of {-stages} to {stages - 1}"
        )
    take = [i % stages for i in indices]
    return take, max(take)


def check_format(output_fmt: str, formats: tuple[str, ...]) -> None:
    """Raises ValueError unless `output_fmt` is one of the model's formats."""
    if output_fmt not in formats:
        raise ValueError(f"output_fmt is {output_fmt!r}; this model's features have {' or '.join(map(repr, formats))}")
