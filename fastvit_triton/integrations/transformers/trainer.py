"""`Optimize`: a callback for the Trainer of transformers."""

from typing import Any

from transformers import TrainerCallback

from ..callback import Optimizing


class Optimize(Optimizing, TrainerCallback):
    """Optimises the model of a Trainer while it trains, and prints what it became; for its options see `Optimizing`.

    The model is optimised at the end of `Trainer.__init__`, before it is compiled or wrapped by DDP, FSDP or DeepSpeed,
    and reverted when training ends. A Trainer with `model_init=` makes another model for each training, which is
    optimised when training begins, after it was wrapped.
    """

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Optimises the model before anything wraps it."""
        self._begin(model, state.is_world_process_zero)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Optimises the model that `model_init` made for this training, or that the end of the last one reverted."""
        if model is not self._model:
            when = "Optimised when training began, after the model was wrapped.\n"
            self._begin(model, state.is_world_process_zero, when)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Puts the original forwards back."""
        self._end()
