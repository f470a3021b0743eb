"""Tests of the callback for Lightning, and of accelerate. Oracle: the same without our package."""

from pathlib import Path

import pytest
import timm
import torch
from interpreter import interpreting
from recording import Recorder
from test_parallel import launch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fastvit_triton import optimize, revert
from fastvit_triton.engine.hooks import is_our_forward
from fastvit_triton.kernels.backend import using_backend

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning
IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def converted(model: nn.Module) -> int:
    """How many modules have a forward of ours."""
    return sum(is_our_forward(module.__dict__.get("forward")) for module in model.modules())


def vit() -> nn.Module:
    torch.manual_seed(0)
    sizes = dict(img_size=32, patch_size=16, embed_dim=16, depth=2, num_heads=2, num_classes=3)
    return timm.models.VisionTransformer(**sizes)


@pytest.fixture
def lightning():
    """The package, which may be installed under either name."""
    return pytest.importorskip("pytorch_lightning")


def fit(lightning, folder, *callbacks, steps=2, **options):
    """(the model after training, the numbers of converted modules when the strategy took it and in each step)."""
    seen = []

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = vit()

        def configure_model(self):
            seen.append(converted(self))

        def training_step(self, batch):
            seen.append(converted(self))
            return self.model(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Classifier()
    trainer = lightning.Trainer(
        **dict(max_steps=steps, accelerator="cpu", callbacks=list(callbacks), default_root_dir=folder),
        **{"devices": 1} | options,
        **dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False),
    )
    trainer.fit(module, DataLoader(TensorDataset(IMAGES), batch_size=2))
    return module, seen


def test_training_with_the_callback_gives_the_same_bits(lightning, tmp_path, capsys):
    """Oracle: weights of training without it, with the backend "torch"; optimised before the strategy sees it."""
    from fastvit_triton.integrations.lightning import Optimize

    optimized = Optimize()
    with using_backend("torch"):
        want, none = fit(lightning, tmp_path)
        got, seen = fit(lightning, tmp_path, optimized)
    assert set(none) == {0} and min(seen) > 0 and len(seen) == 3 and converted(got) == 0
    assert capsys.readouterr().out.count(str(optimized.report)) == 1 and optimized.report.fused
    weights, start = want.model.state_dict(), vit().state_dict()
    assert all(torch.equal(tensor, weights[key]) for key, tensor in got.model.state_dict().items())
    assert any(not torch.equal(tensor, start[key]) for key, tensor in weights.items())
    kept, _ = fit(lightning, tmp_path, Optimize(keep=True), steps=1)
    assert converted(kept) > 0


def test_the_kernels_run_in_lightning(lightning, tmp_path):
    """Oracle: the recorded operators."""
    from fastvit_triton.integrations.lightning import Optimize

    with interpreting(), Recorder() as run:
        fit(lightning, tmp_path, Optimize(), steps=1)
    assert run.ours


@pytest.mark.full
def test_two_processes(lightning, tmp_path):
    """Oracle: training without the callback by DDP in the same two processes, bit for bit."""
    launch(2, str(Path(__file__).with_name("lightning_job.py")), str(tmp_path))


@pytest.mark.parametrize("first", ["optimize", "prepare"])
def test_accelerate_prepares_a_model_before_or_after(first):
    """Oracle: weights of training without `optimize`, with the backend "torch"; `revert` after."""
    accelerate = pytest.importorskip("accelerate")

    def train(optimized):
        accelerator, model = accelerate.Accelerator(cpu=True), vit()
        if optimized and first == "optimize":
            optimize(model)
        model, optimiser = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if optimized and first == "prepare":
            optimize(model)
        assert (converted(model) > 0) is optimized
        for _ in range(2):
            accelerator.backward(model(IMAGES).square().mean())
            optimiser.step()
        revert(model)
        assert converted(model) == 0
        return accelerator.unwrap_model(model).state_dict()

    with using_backend("torch"):
        want, got = train(False), train(True)
    assert all(torch.equal(got[key], want[key]) for key in want)


def test_accelerate_compiles_what_was_optimised_or_compiled(monkeypatch):
    """Oracle: one graph without breaks; a model that was compiled is not compiled again; the refusal of our name."""
    accelerate = pytest.importorskip("accelerate")
    monkeypatch.setattr(accelerate.state.AcceleratorState, "_shared_state", {})
    with pytest.raises(ValueError, match="FASTVIT_TRITON"):
        accelerate.Accelerator(cpu=True, dynamo_backend="fastvit_triton")
    accelerate.state.AcceleratorState._shared_state.clear()
    accelerator, model = accelerate.Accelerator(cpu=True, dynamo_backend="eager"), vit()
    compiled = torch.compile(vit(), backend="fastvit_triton")
    assert accelerator.prepare(compiled) is compiled
    assert optimize(model).fused
    prepared = accelerator.prepare(model)
    torch._dynamo.reset()
    explained = torch._dynamo.explain(prepared)(IMAGES)
    assert isinstance(prepared, torch._dynamo.OptimizedModule) and explained.graph_count == 1
