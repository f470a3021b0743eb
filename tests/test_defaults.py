"""By default nothing launches or moves more than eager PyTorch: every kind of block, on every GPU with known rates.

Counted from shapes on assumed GPUs, in bfloat16, for batches of 1 to 256; nothing runs. A call is traced once for each
set of choices: for another GPU the plan is asked the same questions, and only other answers are traced.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from test_fake_device import catalogued, kind
from torch import Tensor, nn

import fastvit_triton
from benchmarks import coverage
from benchmarks.op_cases import BY_NAME, FULL, NAMES, Shape, arguments, described
from fastvit_triton import measure
from fastvit_triton.engine.values import given
from fastvit_triton.expected.count import assumed, traced
from fastvit_triton.expected.cuda_operators import as_on_cuda
from fastvit_triton.expected.events import Count
from fastvit_triton.expected.gpus import Gpu, gpus
from fastvit_triton.expected.trace import tracing
from fastvit_triton.kernels import choose, fold, mlp
from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.kernels.launch import config, targeting
from fastvit_triton.models import model_config

BATCHES = (1, 8, 64, 256)
LIMIT = 1.01  # times eager's launches and bytes: in training, casts and partial sums of a few kilobytes count
# What exceeds eager by more, (family, training): launches and bytes. Their readers write the forward in another way.
EXCESS = {
    ("image_transformer", True): (1.0, 1.03),
    ("levit", True): (LIMIT, 1.022),  # between stages three kernels read keys and values backward, of PyTorch one
    ("cvt", False): (1.05, 1.0),
    ("vit_pytorch:deepvit", True): (LIMIT, 1.03),  # its attention mixes heads between two products of PyTorch's
}
SHOWN = {"vit_base_patch16_224": "training", "swin_tiny_patch4_window7_224": "inference"}  # the phase by default
EVERY_BATCH = (*SHOWN, "deit3_large_patch16_224", "cct_14_7x2_224")


class Questions:
    """Records what the plan is asked, with its answers, so that they can be asked for another GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[Callable, tuple, str]] = []
        for name in ("choose", "_choose_op"):
            monkeypatch.setattr(choose, name, partial(self._answer, getattr(choose, name)))

    def _answer(self, function: Callable, *arguments: object) -> choose.Choice:
        choice = function(*arguments)
        self.asked.append((function, arguments, choice.way))
        return choice

    def of(self, call: Callable[[], Count]) -> tuple[Count, list]:
        """The cost of a call, and its questions with their answers."""
        choose._choices.clear()
        self.asked = []
        return call(), self.asked


def rows_of_architecture(architecture: str) -> tuple:
    """The rows of tuned/ that change what is launched, besides the plan."""
    with targeting(architecture):
        device = torch.device("cpu")
        border = config("fold.border", fold.SPACE["border"], device)["ROWS_PER_OUTPUT"]
        return border, *(config(f"mlp.fwd.{limit}", row, device)["BLOCK_F"] > 0 for limit, row in mlp.SPACE)


def counts(questions: Questions, call: Callable[[Gpu | None], Count]) -> Iterator[tuple[str, Count]]:
    """(GPU, cost of call(gpu)) for each GPU with known rates."""
    known: list[tuple[tuple, list, Count]] = []
    for name, gpu in gpus().items():
        rows = rows_of_architecture(gpu.architecture)
        with assumed(gpu):
            same = (
                count
                for known_rows, asked, count in known
                if known_rows == rows and all(ask(*arguments).way == way for ask, arguments, way in asked)
            )
            found = next(same, None)
        if found is None:
            found, asked = questions.of(partial(call, gpu))
            known.append((rows, asked, found))
        yield name, found


def assert_at_most_eager(
    questions: Questions, call: Callable[[Gpu | None], Count], excess: tuple[float, float] = (LIMIT, LIMIT)
) -> None:
    """Fails if a call launches or moves more than eager PyTorch, times `excess`, on any GPU."""
    eager = call(None)
    assert eager.launches > 0
    for name, found in counts(questions, call):
        assert found.launches <= eager.launches * excess[0] and found.nbytes <= eager.nbytes * excess[1], (
            f"{name}: {found.launches} launches for {eager.launches}, {found.nbytes / eager.nbytes:.4f} of the bytes"
        )


def cost_of(model: nn.Module, training: bool, inputs: tuple, named: dict, gpu: Gpu | None) -> Count:
    return traced(model, gpu, training, inputs, named).count


@pytest.fixture
def questions(monkeypatch):
    yield Questions(monkeypatch)
    choose.forget()


def limits_of(name: str, training: bool) -> tuple[float, float]:
    """How many times eager's launches and bytes a model may have."""
    found = (limits for (family, phase), limits in EXCESS.items() if name.startswith(family) and phase == training)
    return next(found, (LIMIT, LIMIT))


def structures() -> list[str]:
    """One of our models for each kind of block, and in another width where there is one of 1,024 channels or more."""
    found: dict[tuple, str] = {}
    for name in fastvit_triton.list_models():
        widths = torch.tensor(getattr(model_config(name), "embed_dim", 0)).flatten()
        found.setdefault((str(kind(name)), bool(widths.max() >= 1024)), name)
    return list(found.values())


def batches_of(names: Iterable[str]) -> list:
    """(name, batches): all four of some names, one of the others in turn.

    NaFlex is left out: it reads the values of its input, the places of patches; its blocks are those of a plain ViT.
    """
    turns = itertools.cycle((batch,) for batch in BATCHES)
    pairs = [(name, BATCHES if name in EVERY_BATCH else next(turns)) for name in names]
    return [(name, batches) for name, batches in pairs if not name.startswith("naflex")]


def cases_of_ours() -> list:
    """(name, batches, phase), full but for the least and the largest batch of those of `SHOWN`."""
    pairs = itertools.product(batches_of(dict.fromkeys([*structures(), *EVERY_BATCH])), ("inference", "training"))
    cases = [pytest.param(*pair, phase, marks=pytest.mark.full(one_in=4)) for pair, phase in pairs]
    return [(name, BATCHES[::3], phase) for name, phase in SHOWN.items()] + cases


@pytest.mark.parametrize("name, batches, phase", cases_of_ours(), ids=str)
def test_our_models(name, batches, phase, questions):
    """Oracle: the operators of eager PyTorch."""
    training = phase == "training"
    model, image = catalogued(name)
    model = model.bfloat16().to("meta")
    for batch in batches:
        if training and batch == 1 and name.startswith("levit"):
            continue  # its BatchNorms need two images
        images = torch.empty(batch, *image.shape[1:], dtype=torch.bfloat16, device="meta")
        assert_at_most_eager(questions, partial(cost_of, model, training, (images,), {}), limits_of(name, training))


ENTRIES = {entry.name: entry for entry in coverage.entries(coverage.MODELS.read_text())}


@pytest.mark.full(one_in=4)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name, batches", batches_of(ENTRIES), ids=str)
def test_converted_models(name, batches, training, questions, monkeypatch):
    """Oracle: the operators of eager PyTorch."""
    if training and name == "vit_pytorch:cct.CCT":
        pytest.skip("its stochastic depth returns float32, which its norms in bfloat16 refuse")
    model = coverage.build(ENTRIES[name])
    fastvit_triton.optimize(model)
    for batch in batches:
        if batch > 1 or not training:  # BatchNorms need two images
            monkeypatch.setattr(coverage, "BATCH", batch)
            inputs = coverage.inputs_of(ENTRIES[name], model)
            assert_at_most_eager(questions, partial(cost_of, model, training, *inputs), limits_of(name, training))


class Block(nn.Module):
    """A block of a user: attention and an MLP after LayerNorms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


@pytest.mark.few(1)
@pytest.mark.parametrize("width", [384, 768, 1024])
def test_captured_blocks(width, questions):
    """Oracle: the operators of eager PyTorch. Row statistics that no kernel reads were the excess of 84 launches."""
    model = nn.Sequential(Block(width), Block(width)).bfloat16().eval()
    with using_backend("torch"):
        report = fastvit_triton.optimize(model, example=torch.randn(2, 197, width, dtype=torch.bfloat16))
    assert [row.type for row in report.fused] == ["Block"] * 2
    model.to("meta")
    for batch in BATCHES:
        x = torch.empty(batch, 197, width, dtype=torch.bfloat16, device="meta")
        assert_at_most_eager(questions, partial(cost_of, model, False, (x,), {}))


def cost_of_op(name: str, shape: Shape, training: bool, gpu: Gpu | None) -> Count:
    """The cost of a public op by default; for eager PyTorch, of its reference."""
    function, fixed, *_ = described(name, shape)

    def new(*sizes: int, scale: float = 1.0, learns: bool = True) -> Tensor:
        x = given(torch.empty(sizes, dtype=torch.bfloat16, device="meta"))
        return x.requires_grad_(learns and training)

    op = BY_NAME[function]
    where = nullcontext() if gpu is None else assumed(gpu)
    with using_backend("auto"), where, as_on_cuda(), torch.set_grad_enabled(training), tracing() as trace:
        found = (op.reference if gpu is None else op.run)(**arguments(name, shape, new), **fixed)
        outputs = [found] if isinstance(found, Tensor) else list(found)
        if training:
            torch.autograd.backward(outputs, [torch.empty_like(y) for y in outputs])
    return trace.count


@pytest.mark.few(4, one_in=3)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", NAMES)
def test_public_ops(name, training, questions):
    """Oracle: the operators of the op's reference."""
    for shape, batch in itertools.product(FULL, BATCHES):
        assert_at_most_eager(questions, partial(cost_of_op, name, replace(shape, B=batch), training))


@pytest.mark.full  # by default test_backtest.py compares a prediction in the dtype that it names
def test_predictions_of_captured_blocks_are_in_the_dtype_that_they_name():
    """Oracle: the prediction for an example in bfloat16, the dtype of both; float32 captures are other graphs."""
    said = []
    for dtype in (torch.bfloat16, torch.float32):
        model = Block(64).to(dtype).eval()
        report = fastvit_triton.optimize(model, example=torch.randn(2, 17, 64, dtype=dtype))
        said.append(measure.expected(report, gpu="h100", batch=64))
        assert next(model.parameters()).dtype == dtype
    assert said[0].ours_ms == said[1].ours_ms < said[0].eager_ms
