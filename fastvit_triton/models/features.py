"""Models as feature extractors: `FeatureGetterNet` returns the outputs of some stages, `FeatureInfo` describes them.

Names, arguments and results are timm's, so that detection and segmentation code that takes its models takes ours.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from .base import ImageModel, check_format, feature_take_indices


class FeatureInfo:
    """Describes the features of a model.

    Args:
        feature_info: for each stage a dict with `num_chs`, `reduction` and `module`, see `ImageModel.feature_info`.
        out_indices: stages that are returned; n means the last n.

    Attributes:
        info: the dicts, each with its `index`; `len`, iteration and `[i]` refer to them.
        out_indices: stages that are returned.
    """

    def __init__(self, feature_info: Sequence[dict[str, Any]], out_indices: int | Sequence[int]) -> None:
        self.info = [{"index": i, **stage} for i, stage in enumerate(feature_info)]
        self.out_indices = tuple(range(-out_indices, 0) if isinstance(out_indices, int) else out_indices)

    def get(self, key: str, idx: int | Sequence[int] | None = None) -> Any:
        """The value of `key` for each returned stage, or for the stage or the stages with index `idx`."""
        if isinstance(idx, int):
            return self.info[idx][key]
        return [self.info[i][key] for i in (self.out_indices if idx is None else idx)]

    def get_dicts(self, keys: Sequence[str] | None = None, idx: int | Sequence[int] | None = None) -> Any:
        """The dicts, or their `keys` only, of the stages as in `get`."""
        if isinstance(idx, int):
            return {key: self.info[idx][key] for key in keys or self.info[idx]}
        return [self.get_dicts(keys, i) for i in (self.out_indices if idx is None else idx)]

    def channels(self, idx: int | Sequence[int] | None = None) -> Any:
        """Channels of each returned feature, or of those with index `idx`."""
        return self.get("num_chs", idx)

    def reduction(self, idx: int | Sequence[int] | None = None) -> Any:
        """Pixels of the image for each step of the map, as `channels`."""
        return self.get("reduction", idx)

    def module_name(self, idx: int | Sequence[int] | None = None) -> Any:
        """Names of the modules that compute the features, as `channels`."""
        return self.get("module", idx)

    def __getitem__(self, item: Any) -> Any:
        return self.info[item]

    def __len__(self) -> int:
        return len(self.info)


class FeatureGetterNet(nn.Module):
    """A backbone: image [B, C, H, W] → a list of feature maps [B, D, h, w] from the first to the last stage taken.

    Args:
        model: the model, which loses the parts that are not needed, see `prune`.
        out_indices: stages to return; n means the last n, negative ones count from the end, and None means the model's
            `feature_indices`, 3 for a ViT as in timm.
        return_dict: return a dict by `feature_info.module_name()` instead of a list.
        output_fmt: "NCHW" for maps, "NLC" for tokens [B, N, D]; None means the first of the model's `feature_formats`.
        norm: apply the final norm to each feature.
        prune: remove the stages after the last one taken, the classifier and, unless `norm`, the final norm.

    Attributes:
        feature_info: a `FeatureInfo` of all stages of the model, with the stages returned.

    Raises:
        ValueError: a stage does not exist, or the model has no such format.
    """

    def __init__(
        self,
        model: ImageModel,
        out_indices: int | Sequence[int] | None = None,
        *,
        return_dict: bool = False,
        output_fmt: str | None = None,
        norm: bool = False,
        prune: bool = True,
    ) -> None:
        super().__init__()
        self.output_fmt = output_fmt or model.feature_formats[0]
        check_format(self.output_fmt, model.feature_formats)
        info = model.feature_info
        if out_indices is None:
            default = model.feature_indices
            out_indices = min(default, len(info)) if isinstance(default, int) else default
        take, _ = feature_take_indices(len(info), out_indices, "out_indices")
        self.out_indices = sorted(set(take))  # the order of the outputs
        self.feature_info = FeatureInfo(info, self.out_indices)
        self.return_dict = return_dict
        self.norm = norm
        if prune:
            model.prune_intermediate_layers(self.out_indices, prune_norm=not norm)
        self.model = model

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Enables recomputing every block in the backward pass instead of storing its activations."""
        self.model.set_grad_checkpointing(enable)

    def forward(self, image: Tensor) -> list[Tensor] | dict[str, Tensor]:
        """image [B, C, H, W] → features, in the order of the stages."""
        features = self.model.forward_intermediates(
            image,
            self.out_indices,
            norm=self.norm,
            stop_early=True,
            output_fmt=self.output_fmt,
            intermediates_only=True,
        )
        return dict(zip(self.feature_info.module_name(), features, strict=True)) if self.return_dict else features
