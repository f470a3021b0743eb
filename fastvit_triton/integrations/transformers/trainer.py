"""`Optimize`: a callback for the Trainer of transformers."""

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import TrainerCallback

from ...convert import Report, optimize, revert


class Optimize(TrainerCallback):
    """Optimises the model of a Trainer while it trains, and prints what it became.

    The model is optimised at the end of `Trainer.__init__`, before it is compiled or wrapped by DDP or FSDP, and
    reverted when training ends. A Trainer with `model_init=` makes another model for each training, which is optimised
    when training begins, after it was wrapped. Parameters stay the same objects under the same keys, so optimisers,
    checkpoints and adapters are those of the original.

    Args:
        filter_fn, example, tune, verify: as for `fastvit_triton.optimize`.
        keep: leave the model optimised when training ends.

    Attributes:
        report: what `optimize` returned last; None before.
    """

    def __init__(
        self,
        *,
        filter_fn: Callable[[nn.Module, str], bool] | None = None,
        example: Any = None,
        tune: Any = None,
        verify: Any = None,
        keep: bool = False,
    ) -> None:
        self.options = dict(filter_fn=filter_fn, example=example, tune=tune, verify=verify)
        self.keep = keep
        self.report: Report | None = None
        self._model: nn.Module | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Optimises the model before anything wraps it."""
        self._optimize(model, state, "")

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Optimises the model that `model_init` made for this training, or that the end of the last one reverted."""
        if model is not self._model:
            self._optimize(model, state, "Optimised when training began, after the model was wrapped.\n")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Puts the original forwards back."""
        if not self.keep and self._model is not None:
            revert(self._model)
            self._model = None

    def _optimize(self, model: nn.Module, state: Any, when: str) -> None:
        """Optimises a model, and prints the report on the first process."""
        self.report = optimize(model, **self.options)
        self._model = model
        if state.is_world_process_zero:
            print(f"{when}{self.report}")
