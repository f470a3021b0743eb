"""A module that fuses as the parts it describes, see `engine.body.Body`."""

from typing import Any

from torch import Tensor, nn

from ..kernels.cost import Branch as Sizes
from .body import Before, Given, Output
from .leaves import Layer
from .ways import way_alone


class Parted(nn.Module):
    """A body of a residual branch; a subclass implements `parts`, and `plain` with its modules as they are."""

    def parts(self) -> Any:
        """Its submodules, as a `engine.body.Body` such as `Body`."""
        raise NotImplementedError

    def plain(self, x: Tensor) -> Tensor:
        """The same by calling the submodules."""
        raise NotImplementedError

    def entering(self) -> tuple[Layer, ...]:
        """The linear layers applied to x."""
        return self.parts().entering()

    def sizes(self) -> Sizes:
        """See `engine.body.Body`."""
        return self.parts().sizes()

    def forward(
        self,
        x: Tensor,
        *,
        norm: Before | None = None,
        stats: Given | None = None,
        way: str | None = None,
        **end: Any,
    ) -> Output:
        """x [B, ..., D] → [B, ..., D]; for the arguments see `engine.body.Body`."""
        if way is None:
            way = way_alone(self, x)
        return self.plain(x) if way == "plain" else self.parts()(x, norm=norm, stats=stats, way=way, **end)
