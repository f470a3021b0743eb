"""`Optimize`: a callback for the Trainer of Lightning, by either of its packages, lightning and pytorch-lightning."""

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from ..convert import Report, optimize, revert
from .host import need


def _package() -> Any:
    """The one that the program uses; where it has imported neither, lightning if it is installed."""
    used = next((name for name in ("lightning", "pytorch_lightning") if name in sys.modules), None)
    if used == "lightning" or (used is None and importlib.util.find_spec("lightning") is not None):
        return need("lightning.pytorch", "2.0", "lightning")
    return need("pytorch_lightning", "2.0", "pytorch-lightning")


Callback: Any = _package().Callback


class Optimize(Callback):
    """Optimises a LightningModule before the strategy wraps it, prints what it became, and reverts it at the end.

    Args:
        filter_fn, example, tune, verify: as for `fastvit_triton.optimize`.
        keep: leave the module optimised at the end.

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

    def setup(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        """Optimises the module; Lightning calls this before `configure_model`, DDP and FSDP."""
        self.report = optimize(pl_module, **self.options)
        if trainer.is_global_zero:
            print(self.report)

    def teardown(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        """Puts the original forwards back."""
        if not self.keep:
            revert(pl_module)
