"""Tests of activations in cuBLASLt's epilogue, and of the tanh form of GELU in bfloat16 inference."""

import copy
import pickle
from contextlib import nullcontext

import pytest
import timm
import torch
import torch.nn.functional as F
from interpreter import interpreting
from recording import Recorder
from torch import nn

from fastvit_triton import create_model, optimize, revert
from fastvit_triton.engine.mlp import asks_for_exact_gelu
from fastvit_triton.expected.cuda_operators import as_on_cuda
from fastvit_triton.expected.trace import tracing
from fastvit_triton.kernels import measured, mixed, settings
from fastvit_triton.kernels.launch import targeting
from fastvit_triton.kernels.measured import Measured, op_names
from fastvit_triton.kernels.settings import forcing
from fastvit_triton.measure.compare import verdict
from fastvit_triton.measure.model_parts import calls_of

IN_BLAS = "_addmm_activation"
SHARE = 0.1  # of bfloat16's rounding error: what `docs/ways.md` promises


@pytest.mark.parametrize("spread", [0.25, 0.5, 1.0, 2.0, 4.0])
def test_tanh_differs_from_erf_by_less_than_a_tenth_of_the_rounding_to_bfloat16_but_not_to_float16(spread):
    """Oracle: both forms in float64, of normal values with this standard deviation."""
    x = spread * torch.randn(1 << 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    erf = F.gelu(x)
    difference = (F.gelu(x, approximate="tanh") - erf).norm()
    of_bfloat16, of_float16 = ((F.gelu(x.to(dtype)).double() - erf).norm() for dtype in (torch.bfloat16, torch.half))
    assert difference < SHARE * of_bfloat16
    assert spread > 0.5 or difference > SHARE * of_float16


def events_of(
    model: nn.Module, arch: str = "sm_90", dtype=torch.bfloat16, autocast=None, grad: bool = False
) -> set[str]:
    """The names of operators and kernels of a call in the mixed way, on fake tensors of a GPU."""
    x = torch.empty(2, 5, 32, dtype=dtype)
    with targeting(arch), as_on_cuda(autocast), tracing() as found, forcing("mixed"), torch.set_grad_enabled(grad):
        with nullcontext() if autocast is None else torch.autocast("cpu", autocast):
            model(x)
    return {event.name for event in found.events}


def block(dtype=torch.bfloat16, act: type[nn.Module] = nn.GELU) -> nn.Module:
    """A block of timm, converted."""
    made = timm.models.vision_transformer.Block(32, 2, act_layer=act).to(dtype).eval()
    optimize(made)
    return made


def test_inference_in_bfloat16_activates_in_blas():
    """Oracle: the rule of `kernels.mixed`; of each exception one case."""
    assert IN_BLAS in events_of(block())
    assert IN_BLAS in events_of(block(act=nn.ReLU), dtype=torch.bfloat16)
    assert IN_BLAS in events_of(block(torch.float16, nn.ReLU), dtype=torch.float16)
    assert IN_BLAS in events_of(block(torch.float32), dtype=torch.float32, autocast=torch.bfloat16)
    ours = create_model("vit_tiny_patch16_224", img_size=32, embed_dim=32, num_heads=2, depth=1)
    assert IN_BLAS in events_of(ours.blocks.bfloat16().eval(), "sm_100")


@pytest.mark.parametrize(
    "options",
    [
        dict(arch="sm_80"), dict(arch="sm_120"), dict(grad=True), dict(dtype=torch.float16), dict(dtype=torch.float32),
        dict(act=nn.SiLU), dict(dtype=torch.float32, autocast=torch.float16),
    ],
    ids=str,
)  # fmt: skip
def test_erf_stays(options):
    """Oracle: the rule of `kernels.mixed`, as above."""
    made = block(options.get("dtype", torch.bfloat16), options.pop("act", nn.GELU))
    assert IN_BLAS not in events_of(made, **options)


def test_a_layer_without_bias_keeps_erf():
    """Oracle: the rule of `kernels.mixed`; the operator has no form without a bias."""
    made = block()
    made.mlp.fc1.bias = None
    assert IN_BLAS not in events_of(made)


def names_of(options: dict, **row: str) -> set[str]:
    """`events_of` a block, with the way of "fc1" in place of the table's row."""
    shape = op_names("fc1", options.get("dtype", torch.bfloat16).itemsize, False, (10, 32, 128, 1))
    with measured.using(Measured(ways=dict.fromkeys(shape, row["fc1"])) if row else measured.NOTHING):
        return events_of(block(options.get("dtype", torch.bfloat16)), **options)


def test_a_row_decides_whether_our_kernel_computes_the_activation():
    """Oracle: the launches of fc1 and its activation, by the row of "fc1" that is measured, else predicted."""
    ours, apart = {"linear._fwd_kernel"}, {"mixed._activation_kernel"}
    kinds = ours | apart
    for options in (dict(arch="sm_80"), dict(arch="sm_89", dtype=torch.float16)):
        assert names_of(options) & kinds == ours
        assert names_of(options, fc1="plain") & kinds == apart
        assert names_of(options, fc1="fused") & kinds == ours
    assert names_of(dict(arch="sm_80", grad=True), fc1="fused") & kinds == apart  # the pre-activation is saved
    assert not names_of(dict(arch="sm_90"), fc1="fused") & kinds  # cuBLASLt's
    assert names_of(dict(arch="sm_80", dtype=torch.float32)) & kinds == apart  # IEEE float32


@pytest.mark.parametrize("mlp", [timm.layers.Mlp, timm.layers.SwiGLU], ids=lambda mlp: mlp.__name__)
def test_a_mixed_block_computes_the_same_with_either_kernel(mlp):
    """Oracle: the block in float64; the baseline is PyTorch's operators in float16."""
    made = timm.models.vision_transformer.Block(32, 2, mlp_layer=mlp).half().eval()
    x = torch.randn(2, 5, 32).half()
    with torch.no_grad():
        truth, baseline = dict(y=copy.deepcopy(made).double()(x.double())), dict(y=made(x))
        optimize(made)
        got: dict[str, torch.Tensor] = {}
        for way in ("fused", "plain"):
            shapes = [op_names("fc1", 2, False, (10, 32, F, p)) for F, p in ((128, 1), (256, 2))]
            table = Measured(ways=dict.fromkeys((name for names in shapes for name in names), way))
            with interpreting(), forcing("mixed"), measured.using(table):
                ops = {call.op for call in calls_of(lambda: got.update(y=made(x)))}
            assert verdict(got, truth, baseline, torch.float16).match
            assert ("linear_fwd" in ops) == (way == "fused")


def test_exact_gelu_is_asked_for_by_model_and_by_variable(monkeypatch):
    """Oracle: the operators of a call; copies and pickles are as exact, and `revert` removes the mark."""
    made = block()
    before = set(vars(made.mlp))
    report = optimize(made, exact_gelu=True)
    assert not report.tanh_gelu
    for model in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert IN_BLAS not in events_of(model)
    optimize(made)
    assert IN_BLAS in events_of(made)
    optimize(made, exact_gelu=True)
    revert(made)
    assert not asks_for_exact_gelu(made.mlp) and set(vars(made.mlp)) <= before
    with monkeypatch.context() as patch:
        patch.setattr(settings, "exact", True)
        assert IN_BLAS not in events_of(block())
    with pytest.raises(TypeError, match="exact_gelu is 1; give True or False"):
        optimize(made, exact_gelu=1)


def test_the_report_says_it():
    """Oracle: where the operator is used."""
    for arch, said in (("sm_90", True), ("sm_120", False)):
        with targeting(arch):
            text = str(optimize(timm.models.vision_transformer.Block(32, 2).bfloat16()))
        assert ("tanh form" in text) == said


@pytest.mark.parametrize("act, use_gelu", [(nn.ReLU, False), (nn.GELU, True)])
def test_its_operands_are_right(monkeypatch, act, use_gelu):
    """Oracle: the block by PyTorch in float64; budget: twice the error of the plain way, and a rounding."""
    made = block(torch.float32, act)
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(mixed, "has_epilogues", lambda device: True)
    monkeypatch.setattr("fastvit_triton.engine.mlp.mixed.takes_tanh_for_erf", lambda x: True)
    with torch.no_grad(), interpreting():
        with forcing("mixed"), Recorder() as run:
            y = made(x)
        with forcing("plain"):
            plain = made(x)
        revert(made)
        exact = made.double()(x.double())
    calls = [named for function, _, named in run.calls if IN_BLAS in str(function)]
    assert [named.get("use_gelu", False) for named in calls] == [use_gelu]
    error, usual = (y - exact).abs().max(), (plain - exact).abs().max()
    assert error <= 2 * usual + torch.finfo(torch.float32).eps * exact.abs().max()
