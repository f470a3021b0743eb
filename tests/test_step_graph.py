"""Tests of training steps by a CUDA graph, with a stand-in for the graph. Oracle: the same step written out."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from interpreter import interpreting
from torch import nn

from fastvit_triton import create_model, cuda_graph_step
from fastvit_triton.deploy import cuda_graph as graphs
from fastvit_triton.deploy.cuda_graph import WARMUPS
from fastvit_triton.layers import DropPath
from fastvit_triton.train import ema_model

SMALL = dict(img_size=8, patch_size=4, embed_dim=16, depth=1, num_heads=2, num_classes=3)
RATES = (0.5, 0.25, 0.25, 0.125, 0.125, 0.0625, 0.5)  # exact in float32


@pytest.fixture
def captures(monkeypatch):
    """Replaces CUDA graphs: a capture computes nothing, and a replay repeats the call. Yields the captures."""
    made = []

    def capture(run, pool, warmups=WARMUPS, stream=None):
        static = torch.zeros(())
        made.append(warmups)

        def replay():
            static.copy_(run())

        return static, replay

    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(graphs, "can_capture", lambda x: True)
    monkeypatch.setattr(graphs, "on_stream", lambda run, stream: run())
    return made


def training(**options):
    """A small ViT, an optimiser, and batches; the last but one is smaller."""
    torch.manual_seed(0)
    model = create_model("vit_tiny_patch16_224", **SMALL, **options).train()
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.5, fused=True)
    generator = torch.Generator().manual_seed(1)
    sizes = [4] * (len(RATES) - 2) + [3, 4]
    batches = [
        (torch.randn(n, 3, 8, 8, generator=generator), torch.randint(3, (n,), generator=generator)) for n in sizes
    ]
    return model, optimizer, batches


@pytest.mark.few(2)
@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("clip, averaged, amp", [(None, False, None), (0.5, True, torch.bfloat16)])
def test_steps_equal_those_without_a_graph(captures, kernels, clip, averaged, amp):
    """Oracle: forward, backward, clipping, update and average written out, with a scheduler; equal bits."""
    if kernels and amp is not None:
        amp = torch.float16  # the interpreter's bfloat16 products are wrong
    model, optimizer, batches = training()
    twin, same, _ = training()
    ema, average = (ema_model(m, 0.5) if averaged else None for m in (model, twin))
    step = cuda_graph_step(model, F.cross_entropy, optimizer, batches[0], amp=amp, clip=clip, ema=ema)
    with interpreting() if kernels else torch.autograd.set_detect_anomaly(False):
        for rate, (images, targets) in zip(RATES, batches, strict=True):
            optimizer.param_groups[0]["lr"] = same.param_groups[0]["lr"] = rate
            found = step(images, targets)
            same.zero_grad()
            with torch.autocast("cpu", amp, enabled=amp is not None):
                loss = F.cross_entropy(twin(images), targets)
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(twin.parameters(), clip)
            same.step()
            if average is not None:
                average.update_parameters(twin)
            assert torch.equal(found, loss) and optimizer.param_groups[0]["lr"] == rate
            pairs = zip(model.parameters(), twin.parameters(), strict=True)
            assert all(torch.equal(p, q) and torch.equal(p.grad, q.grad) for p, q in pairs)
    assert captures == [0]
    if averaged:
        assert all(torch.equal(p, q) for p, q in zip(ema.parameters(), average.parameters(), strict=True))


def test_what_changes_is_captured_again(captures):
    """Oracle: the list of what a graph depends on; rates and values of weights are read from their tensors."""
    model, optimizer, batches = training()
    images, targets = batches[0]
    step = cuda_graph_step(model, F.cross_entropy, optimizer, batches[0])

    def captured_by(change):
        change()
        before = len(captures)
        for _ in range(WARMUPS + 1):
            step(images, targets)
        return len(captures) - before

    weight = model.head.weight
    assert captured_by(lambda: None) == 1
    assert captured_by(lambda: optimizer.param_groups[0].update(lr=0.25)) == 0
    assert captured_by(lambda: nn.init.ones_(weight)) == 0
    assert captured_by(lambda: optimizer.param_groups[0].update(weight_decay=0.25)) == 1
    assert captured_by(lambda: weight.requires_grad_(False)) == 1
    assert captured_by(lambda: setattr(weight, "data", weight.data.clone())) == 1
    assert captured_by(lambda: model.blocks.eval()) == 1


def test_a_capture_that_fails_says_why(captures, monkeypatch):
    """Oracle: the error of PyTorch, in one sentence."""

    def fails(*arguments):
        raise RuntimeError("operation not permitted when stream is capturing")

    model, optimizer, batches = training()
    step = cuda_graph_step(model, F.cross_entropy, optimizer, batches[0])
    for _ in range(WARMUPS):
        step(*batches[0])
    monkeypatch.setattr(graphs, "capture", fails)
    with pytest.raises(RuntimeError, match=r"cannot be captured, as .*: operation not permitted"):
        step(*batches[0])


class Replica(nn.parallel.DistributedDataParallel):
    """One without processes."""

    def __init__(self, module):
        nn.Module.__init__(self)
        self.module = module


def refusals():
    """(error, message, change of the arguments)."""

    def skipping(model):
        model.blocks[0].drop_path1 = DropPath(0.5, skip=True)
        return model

    def having(kind, **options):
        return lambda given: given | {"optimizer": kind(given["model"].parameters(), 0.1, **options)}

    scaled = dict(scaler=torch.amp.GradScaler("cpu"))
    return [
        (ValueError, "SGD is not captured as it is; create it with fused=True", having(torch.optim.SGD)),
        (ValueError, "AdamW is not captured as it is; create it with capturable=True", having(torch.optim.AdamW)),
        (ValueError, "LBFGS has no capturable form; use", having(torch.optim.LBFGS)),
        (ValueError, "needs an optimizer that skips steps on the GPU; create RMSprop with fused=True",
         lambda given: having(torch.optim.RMSprop, capturable=True)(given) | scaled),
        (ValueError, "the model is Replica; give a model on one GPU", lambda g: g | {"model": Replica(g["model"])}),
        (ValueError, "drop_path1 is DropPath with skip=True", lambda g: g | {"model": skipping(g["model"])}),
        (ValueError, "1 is SyncBatchNorm",
         lambda g: g | {"model": nn.Sequential(g["model"], nn.SyncBatchNorm(3))}),
        (RuntimeError, "the model is in evaluation mode", lambda g: g | {"model": g["model"].eval()}),
        (TypeError, "batch is Tensor; give a tuple", lambda g: g | {"batch": g["batch"][0]}),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "error, message, change", refusals(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_refusals(captures, error, message, change):
    """Oracle: the sentences."""
    model, optimizer, batches = training(drop_path_rate=0.5)
    given = dict(model=model, loss=F.cross_entropy, optimizer=optimizer, batch=batches[0])
    with pytest.raises(error, match=re.escape(message)):
        cuda_graph_step(**change(given))


def test_a_batch_on_a_cpu_is_refused():
    """Oracle: the sentence."""
    model, optimizer, batches = training()
    with pytest.raises(ValueError, match="batch is on cpu; CUDA graphs need a model and a batch on a GPU"):
        cuda_graph_step(model, F.cross_entropy, optimizer, batches[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_on_a_gpu():
    """Oracle: the same steps without a graph, with the same learning rates; equal bits, in training with dropout."""
    made, _, batches = training(drop_path_rate=0.5)
    found = []
    for graphed in (False, True):
        torch.manual_seed(2)
        model = copy.deepcopy(made).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), torch.tensor(0.125).cuda(), capturable=True)
        step = cuda_graph_step(model, F.cross_entropy, optimizer, tuple(t.cuda() for t in batches[0]), clip=0.5)
        for images, targets in batches:
            images, targets = images.cuda(), targets.cuda()
            loss = step(images, targets) if graphed else step._run((images, targets))
        found.append((loss.cpu(), [p.cpu() for p in model.parameters()]))
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(p, q) for p, q in zip(found[0][1], found[1][1], strict=True))
