"""`as_hf`: a classifier of ours as a model of transformers."""

import dataclasses
import os
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    CLIPImageProcessor,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import ImageClassifierOutput

from ...checkpoints.tensors import variant
from ...models import create_model
from ...models.base import ImageModel
from ...preparation import data_config

FILTERS = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3}  # PIL's numbers


class FvtConfig(PreTrainedConfig):
    """Configuration of `FvtForImageClassification`.

    Args:
        variant: name of the model for `create_model`.
        options: its other arguments, as in `model.config`.
        pretrained_cfg: `model.pretrained_cfg`, from which images are prepared.
        **more: of transformers' PreTrainedConfig, such as id2label; num_labels replaces num_classes of the options.
    """

    model_type = "fastvit_triton"

    def __init__(
        self,
        variant: str = "vit_base_patch16_224",
        options: dict[str, Any] | None = None,
        pretrained_cfg: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        self.variant = variant
        self.options = dict(options or {})
        self.pretrained_cfg = dict(pretrained_cfg or {})
        if not {"num_labels", "id2label"} & more.keys():
            more["num_labels"] = self.options.get("num_classes", 1000)
        super().__init__(**more)


class FvtForImageClassification(PreTrainedModel):
    """A classifier of ours, `self.model`, with the interface of transformers' ForImageClassification classes."""

    config_class = FvtConfig
    base_model_prefix = "model"
    main_input_name = "pixel_values"
    supports_gradient_checkpointing = True
    _supports_sdpa = True

    def __init__(self, config: FvtConfig, model: ImageModel | None = None) -> None:
        super().__init__(config)
        if model is None:
            with torch.device("cpu"):  # `from_pretrained` builds on meta, where computed tables would be lost
                model = create_model(config.variant, **config.options | {"num_classes": config.num_labels})
            model.pretrained_cfg = config.pretrained_cfg
        self.model = model
        kept = model.state_dict().keys()
        self._tables = {name: table for name, table in model.named_buffers() if name not in kept}
        self.post_init()

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None, **more: Any) -> Any:
        """pixel_values [B, C, H, W] and labels [B] → logits [B, num_labels] and, with labels, the loss.

        Several heads, which some models have in training, are averaged.
        """
        logits = self.model(pixel_values)
        if isinstance(logits, tuple | list):
            logits = sum(logits) / len(logits)
        loss = None if labels is None else self.loss_function(labels, logits, self.config, **more)
        output = ImageClassifierOutput(loss=loss, logits=logits)
        return output if more.get("return_dict") in (None, True) else output.to_tuple()

    def save_pretrained(self, save_directory: str | os.PathLike, *arguments: Any, **options: Any) -> None:
        """Writes the model, its configuration and how its images are prepared, which `pipeline` reads."""
        super().save_pretrained(save_directory, *arguments, **options)
        if options.get("is_main_process", True):
            self.image_processor().save_pretrained(save_directory)

    def image_processor(self) -> Any:
        """The preprocessing of the model's images as an image processor of transformers."""
        how = data_config(self.model)
        tall, wide = how["input_size"][1:]
        resized = [int(side / how["crop_pct"]) for side in (tall, wide)]
        whole = tall == wide and how["crop_mode"] == "center"
        return CLIPImageProcessor(
            size={"shortest_edge": resized[0]} if whole else dict(zip(("height", "width"), resized, strict=True)),
            crop_size={"height": tall, "width": wide},
            resample=FILTERS[how["interpolation"]],
            image_mean=list(how["mean"]),
            image_std=list(how["std"]),
        )

    def _set_gradient_checkpointing(self, enable: bool = True, *_: Any, **__: Any) -> None:
        self.model.set_grad_checkpointing(enable)

    def init_weights(self) -> None:
        """Leaves the weights, which are those of the model given or drawn by `create_model`."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Zeroes a classifier that a checkpoint lacks, as `reset_classifier` does; restores computed tables."""
        super()._init_weights(module)
        if any(module is self.model.get_submodule(name) for name in self.model.head_names):
            for parameter in module.parameters():
                nn.init.zeros_(parameter)
        if module is self.model:
            for name, table in self._tables.items():
                module.get_buffer(name).copy_(table)


def as_hf(model: ImageModel, classes: list[str] | None = None) -> FvtForImageClassification:
    """Wraps a model of ours for transformers: Trainer, pipeline, save_pretrained, from_pretrained.

    The model is not copied: `as_hf(model).model is model`. What `save_pretrained` writes,
    `AutoModelForImageClassification.from_pretrained` loads once this module was imported.

    Args:
        model: a classifier from `create_model` or `load_model`.
        classes: names of its classes, which `pipeline` shows.

    Raises:
        TypeError: it is no classifier of this package.
        ValueError: it has no classifier, or another number of classes than names.
    """
    if not isinstance(model, ImageModel) or model.task != "classify":
        raise TypeError(f"model is {type(model).__name__}; give a classifier that fastvit_triton.create_model returns")
    if not model.num_classes:
        raise ValueError("model has no classifier; give it one by model.reset_classifier(num_classes)")
    if classes is not None and len(classes) != model.num_classes:
        raise ValueError(f"classes has {len(classes)} names, and the model {model.num_classes} classes")
    names: dict[str, Any] = {}
    if classes is not None:
        names = {"id2label": dict(enumerate(classes)), "label2id": {name: i for i, name in enumerate(classes)}}
    options = dataclasses.asdict(model.config)
    config = FvtConfig(variant(model), options, dict(model.pretrained_cfg), **names)
    return FvtForImageClassification(config, model)


def register_classes() -> None:
    """Makes the Auto classes of transformers know models that `as_hf` saved."""
    AutoConfig.register(FvtConfig.model_type, FvtConfig, exist_ok=True)
    AutoModelForImageClassification.register(FvtConfig, FvtForImageClassification, exist_ok=True)
    AutoImageProcessor.register(FvtConfig, slow_image_processor_class=CLIPImageProcessor, exist_ok=True)
