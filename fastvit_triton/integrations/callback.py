"""`Optimizing`: what the callbacks of all training programs share."""

from collections.abc import Callable
from typing import Any

from torch import nn

from ..convert import Report, optimize, revert


class Optimizing:
    """Optimises a model while it trains, prints what it became, and reverts it at the end.

    Parameters stay the same objects under the same keys, so optimisers, checkpoints and adapters are those of the
    original.

    Args:
        filter_fn, example, tune, verify: as for `fastvit_triton.optimize`.
        keep: leave the model optimised at the end.

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
        super().__init__()
        self.options = dict(filter_fn=filter_fn, example=example, tune=tune, verify=verify)
        self.keep = keep
        self.report: Report | None = None
        self._model: nn.Module | None = None

    def _begin(self, model: nn.Module, prints: bool, when: str = "") -> None:
        """Optimises a model; one process prints the report, after a line that says when."""
        self.report = optimize(model, **self.options)
        self._model = model
        if prints:
            print(f"{when}{self.report}")

    def _end(self) -> None:
        """Puts the original forwards back, unless they were to be kept."""
        if not self.keep and self._model is not None:
            revert(self._model)
            self._model = None
