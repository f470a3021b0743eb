"""`Optimize`: a callback for the Trainer of Lightning, by either of its packages, lightning and pytorch-lightning."""

import importlib.util
import sys
from typing import Any

from .callback import Optimizing
from .host import need


def _package() -> Any:
    """The one that the program uses; where it has imported neither, lightning if it is installed."""
    used = next((name for name in ("lightning", "pytorch_lightning") if name in sys.modules), None)
    if used == "lightning" or (used is None and importlib.util.find_spec("lightning") is not None):
        return need("lightning.pytorch", "2.0", "lightning")
    return need("pytorch_lightning", "2.0", "pytorch-lightning")


Callback: Any = _package().Callback


class Optimize(Optimizing, Callback):
    """Optimises a LightningModule before the strategy wraps it; for its options see `Optimizing`."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Optimises the module; Lightning calls this before `configure_model`, DDP and FSDP."""
        self._begin(pl_module, trainer.is_global_zero)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Puts the original forwards back."""
        self._end()
