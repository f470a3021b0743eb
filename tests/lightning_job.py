"""Training by Lightning in two processes of DDP, which a test runs; for its oracle see `test_in_lightning`."""

import sys

import torch

import benchmarks  # noqa: F401  (must precede timm)

# isort: split
import pytorch_lightning
from test_in_lightning import converted, fit, vit

from fastvit_triton.integrations.lightning import Optimize
from fastvit_triton.kernels.backend import using_backend


class Wrapped(pytorch_lightning.Callback):
    """Notes the class that wraps the module, and how many modules in it have a forward of ours."""

    def on_train_start(self, trainer, pl_module):
        self.seen = type(trainer.strategy.model).__name__, converted(trainer.strategy.model)


def main(folder: str) -> None:
    """Trains with and without the callback, and compares the weights."""
    wrapped, options = Wrapped(), dict(devices=2, strategy="ddp")
    with using_backend("torch"):
        want, none = fit(pytorch_lightning, folder, **options)
        got, seen = fit(pytorch_lightning, folder, Optimize(), wrapped, **options)
    assert torch.distributed.get_world_size() == 2
    assert set(none) == {0} and seen[0] > 0  # seen[0]: in `configure_model`, before the strategy wraps the module
    assert wrapped.seen == ("DistributedDataParallel", seen[0])
    weights, start = want.model.state_dict(), vit().state_dict()
    assert all(torch.equal(tensor, weights[key]) for key, tensor in got.model.state_dict().items())
    assert any(not torch.equal(tensor, start[key]) for key, tensor in weights.items())
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
