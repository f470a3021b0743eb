"""The choice between kernels and PyTorch inside an op: the rule, the tables, and that both give the same tensors."""

import json
from functools import partial

import pytest
import torch
from interpreter import interpreting
from test_interpreter import EVERY, converted, largest, results
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.launch_recorder import record, recording
from fastvit_triton import attention, linear
from fastvit_triton.kernels import attention as attention_file
from fastvit_triton.kernels import attention_launch, backend, dispatch, eager, launch, layer_norm
from fastvit_triton.kernels import linear as linear_file
from fastvit_triton.kernels import patch_embed as patch_embed_file
from fastvit_triton.kernels.argument import Epilogue
from fastvit_triton.measure.choices import calls_of

pytestmark = pytest.mark.usefixtures("always_folded")

OPS = torch.ops.fastvit_triton
HALF = torch.bfloat16
LONG = {"attention_qkv-vit", "attention-windows", "attention-padded", "attention-bias_wide"}  # or not for dispatch
NAMES = {"attention", "attention_qkv", "linear", "linear_with_statistics", "mlp", "patch_embed"}
CHOSEN = [case for case in EVERY if case.values[0].name in NAMES and case.id not in LONG]


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """Makes this an architecture with that table, where the switch says "auto"."""

    def become(architecture: str, table: dict | None = None) -> None:
        (tmp_path / f"{architecture}.json").write_text(json.dumps(table or {}))
        monkeypatch.setattr(launch, "TUNED", tmp_path)
        monkeypatch.setattr(launch, "target", architecture)
        dispatch.forget()

    yield become
    dispatch.forget()
    launch.table.cache_clear()


def sized(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    """A tensor of that shape that takes no memory."""
    return torch.empty(1, dtype=dtype).expand(*shape)


def product(
    D: int, F: int, norm: bool = False, residual: bool = False, activation: str | None = None, dtype: torch.dtype = HALF
) -> bool:
    """Whether a linear layer on 256 images of 197 tokens is ours."""
    x = sized(256, 197, D, dtype=dtype)
    epilogue = Epilogue(activation, None, None, sized(256, 197, F, dtype=dtype) if residual else None, False)
    colsum = sized(F, dtype=torch.float32) if norm else None
    return dispatch.linear(linear_file.tuned_row, x, sized(F, D, dtype=dtype), colsum, None, epilogue, False)


def heads(N: int, D: int = 64, dtype: torch.dtype = HALF) -> tuple[torch.Tensor, ...]:
    return tuple(sized(256, 12, N, D, dtype=dtype) for _ in "qkv")


def stem(D: int, dtype: torch.dtype = HALF, kernel: str = "fwd") -> bool:
    """Whether the stem of a ViT on 256 images is ours."""
    given = sized(256, 3, 224, 224, dtype=dtype), sized(D, 3, 16, 16, dtype=dtype)
    pos, prefix = sized(1, 197, D, dtype=dtype), sized(1, 1, D, dtype=dtype)
    return dispatch.patch_embed(patch_embed_file.tuned_row(kernel, given[1]), *given, pos, prefix)


def test_without_a_table_fewer_bytes_decide_where_memory_bound(elsewhere):
    """Oracle: by hand, for an H200 of 184 flops a byte.

    ViT-Ti's qkv: M·D values five times (once for statistics) for eager's six, 1.1e10 flops over 78 MB. ViT-B's: 226 µs
    of flops over 72 of bytes. A plain product and attention move the same bytes on both sides; a residual makes 3 of 5,
    and a packed gradient, which eager puts together, 8 of 14 where we take whole heads.
    """
    elsewhere("sm_90")
    assert product(192, 576, norm=True) and product(192, 192, residual=True) and stem(192)
    assert not product(768, 2304, norm=True) and not product(768, 768, residual=True) and not stem(768)
    assert not product(192, 192) and not product(192, 192, dtype=torch.float16)
    assert not dispatch.attention(attention_launch.tuned_row, "fwd", *heads(197))
    assert dispatch.attention(attention_launch.tuned_row, "bwd_dq", *heads(197), True)
    assert not dispatch.attention(attention_launch.tuned_row, "bwd_dq", *heads(197))
    assert not dispatch.attention(attention_launch.tuned_row, "bwd_dq", *heads(577), True)  # bound by its flops
    elsewhere("sm_86")  # 76 flops a byte: the same layer is bound by its flops there
    assert not product(192, 576, norm=True)
    elsewhere("sm_75")  # unknown parts are taken for the slowest one
    assert not product(192, 576, norm=True) and product(48, 144, norm=True)


def test_float32_products_use_pytorch_unless_tf32_is_allowed(elsewhere):
    """Oracle: the two precisions; half the flops of 16 bits are a byte's worth in TF32."""
    elsewhere("sm_90")
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert not product(192, 192, residual=True, dtype=torch.float32) and not stem(96, torch.float32)
        torch.set_float32_matmul_precision("high")
        assert product(192, 192, residual=True, dtype=torch.float32) and stem(96, torch.float32)
    finally:
        torch.set_float32_matmul_precision(before)


def test_switch_triton_overrides_the_tables(elsewhere, monkeypatch, switch):
    """Oracle: the switch, the interpreter, what is forced, and operations that SDPA has no kernel with L for."""
    elsewhere("sm_90")
    assert not product(768, 2304)
    monkeypatch.setenv("FASTVIT_TRITON_BACKEND", "triton")
    backend.set_backend(None)
    dispatch.forget()  # as in a new process
    assert product(768, 2304) and dispatch.attention(attention_launch.tuned_row, "fwd", *heads(197))
    monkeypatch.delenv("FASTVIT_TRITON_BACKEND")
    backend.set_backend(None)
    dispatch.forget()
    with interpreting():
        assert product(768, 2304) and stem(768)
    monkeypatch.setattr(dispatch, "forced", True)
    assert product(768, 2304)
    monkeypatch.undo()
    elsewhere("sm_90")
    assert dispatch.attention(attention_launch.tuned_row, "fwd", *heads(197, 33))
    q, k, v = heads(197)
    assert dispatch.attention(attention_launch.tuned_row, "fwd", q, k, v[..., :32])
    torch.use_deterministic_algorithms(True)
    try:
        assert dispatch.attention(attention_launch.tuned_row, "bwd_dq", q, k, v)
        assert not dispatch.attention(attention_launch.tuned_row, "fwd", q, k, v)
    finally:
        torch.use_deterministic_algorithms(False)


def test_tables_come_before_the_rule_and_measured_before_predicted(elsewhere):
    """Oracle: a table by hand; another shape of a row still goes by the rule, and float32 follows a measurement."""
    shape = "K=768 F=2304 M=65536 norm"
    column = dict(measured={shape: "ours"}, predicted={shape: "torch", "K=192 F=576 M=65536 norm": "torch"})
    fast = {"N=256 heads=4096": "ours"}
    elsewhere(
        "sm_90",
        {
            "linear.fwd.half": dict(config={}, provenance="predicted", choice=column),
            "attention.fwd_ieee.fp32.256": dict(config={}, provenance="measured", choice=dict(measured=fast)),
        },
    )
    assert product(768, 2304, norm=True) and not product(768, 3072, norm=True)
    assert not product(192, 576, norm=True) and product(192, 384, norm=True)
    assert dispatch.attention(attention_launch.tuned_row, "fwd", *heads(197, dtype=torch.float32))
    assert not dispatch.attention(attention_launch.tuned_row, "fwd", *heads(577, dtype=torch.float32))


def test_committed_tables_hold_known_words():
    """Oracle: the two provenances and the two answers."""
    for path in launch.TUNED.glob("*.json"):
        for name, row in json.loads(path.read_text()).items():
            column = row.get("choice", {})
            assert column.keys() <= {"measured", "predicted"}, name
            assert all(who in ("ours", "torch") for said in column.values() for who in said.values()), name


@pytest.mark.parametrize("architecture", sorted(path.stem for path in launch.TUNED.glob("*.json")))
def test_committed_predictions_are_what_the_rule_says(architecture):
    """Oracle: the rule, asked by a layer and the stem of ViT-S; `python -m benchmarks.tune --choices` writes them."""
    column, device = dispatch.choices(architecture), torch.device("cpu")
    calls = calls_of("vit_small_patch16_224", 256, device, partial(recording, architecture))
    assert calls
    for (row, shape), call in calls.items():
        assert column[row]["predicted"][shape] == call.rule, (row, shape)


class Seen(TorchDispatchMode):
    """What our ops gave: name, and shape, dtype and strides of every output."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        outputs = function(*arguments, **named or {})
        if function.namespace == "fastvit_triton":
            made = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
            self.found.append((function.name(), [(tuple(t.shape), t.dtype, layout(t)) for t in made]))
        return outputs


def layout(t: torch.Tensor) -> list[int]:
    """Strides of the axes along which something lies."""
    return [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1] if t.numel() else []


@pytest.mark.parametrize("tested, case", CHOSEN)
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_kernels_and_pytorch_give_the_same_tensors(tested, case, dtype, monkeypatch):
    """Oracle: the kernels' outputs for shapes and layouts, float64 for values and every gradient."""
    arguments = tested.inputs(case, dtype, "cpu")
    arguments = {n: converted(v, dtype) for n, v in arguments.items()}
    truth = results(tested.reference, {n: converted(v, torch.float64) for n, v in arguments.items()})
    baseline, seen = results(tested.reference, arguments), {}
    with interpreting():
        for kernels in (True, False):
            monkeypatch.setattr(dispatch, "forced", kernels)
            with Seen() as mode:
                got = results(tested.run, arguments)
            seen[kernels] = mode.found
    assert seen[True] == seen[False]
    for name, want in truth.items():
        allowed = 2 * (largest(baseline[name] - want) + torch.finfo(dtype).eps * largest(want))
        assert got[name].isfinite().all() and largest(got[name] - want) <= allowed, name


@pytest.mark.parametrize("first", [True, False])
def test_backward_accepts_outputs_of_the_other_path(first, monkeypatch):
    """Oracle: float64. L, statistics and the pre-activation mean the same on both sides."""
    cases = [(attention_file.OP, "vit"), (linear_file.OP, "norm_gelu"), (linear_file.OP, "swiglu")]
    for tested, name in cases:
        arguments = tested.inputs(tested.ragged[name], torch.float32, "cpu")
        truth = results(tested.reference, {n: converted(v, torch.float64) for n, v in arguments.items()})
        baseline = results(tested.reference, arguments)

        def mixed(**given):
            monkeypatch.setattr(dispatch, "forced", first)
            output = tested.run(**given)  # noqa: B023
            monkeypatch.setattr(dispatch, "forced", not first)
            return output

        with interpreting():
            got = results(mixed, arguments)
        for part, want in truth.items():
            allowed = 2 * (largest(baseline[part] - want) + torch.finfo(torch.float32).eps * largest(want))
            assert largest(got[part] - want) <= allowed, (name, part)


def test_log_sum_exp_and_row_statistics_are_the_same(monkeypatch):
    """Oracle: float64, and `merge_stats` written out, which the next layer applies to the statistics."""
    q, k, v = (torch.randn(2, 3, 50, 16) for _ in range(3))
    x, weight, residual = torch.randn(2, 17, 40), torch.randn(70, 40), 30 + torch.randn(2, 17, 70)
    lse = (q.double() @ k.double().mT / 4).logsumexp(-1)
    eps, epsilon = torch.finfo(torch.float32).eps, 1e-6
    with interpreting():
        for kernels in (True, False):
            monkeypatch.setattr(dispatch, "forced", kernels)
            got = attention(q, k, v, return_lse=True)[1]
            assert largest(got - lse) <= 8 * eps * largest(lse)
            y, stats = linear(x, weight, residual=residual, return_stats=True)
            rows = y.double().flatten(0, 1)
            tiles, width = stats.shape[1], launch.power_of_2(launch.cdiv(70, stats.shape[1]))
            count = torch.tensor([min(width, 70 - t * width) for t in range(tiles)])
            mean = stats[..., 0].double().sum(1) / 70
            m2 = stats[..., 1].double() + count * (stats[..., 0].double() / count - mean[:, None]) ** 2
            assert tiles == 2 and largest(mean - rows.mean(1)) <= 8 * eps * largest(rows)
            assert largest(m2.sum(1) / 70 - rows.var(1, correction=0)) <= 64 * eps * largest(rows)
            norm_weight = torch.ones(70)
            after = linear(y, torch.eye(70), norm=(norm_weight, None, epsilon), stats=stats)
            want = layer_norm.reference(y.double(), norm_weight.double(), None, epsilon)
            assert largest(after - want) <= 64 * eps * largest(rows)


def test_registered_ops_choose_pytorch_where_it_is_faster(elsewhere):
    """Oracle: float64. No interpreter and no compiler is here: what answers is PyTorch, inside the registered op."""
    elsewhere("sm_90")
    x, weight, bias = torch.randn(2, 9, 64), torch.randn(128, 64), torch.randn(128)
    y, pre, *_ = OPS.linear_fwd(x, weight, bias, None, None, 0.0, "gelu", None, None, None, True, False)
    want = x.double() @ weight.double().T + bias.double()
    tolerance = 64 * torch.finfo(torch.float32).eps * largest(want)
    assert largest(pre.view_as(y) - want) <= tolerance
    assert largest(y - torch.nn.functional.gelu(want)) <= tolerance
    q, k, v = (torch.randn(2, 3, 9, 16) for _ in range(3))
    o, lse = OPS.attention_fwd(q, k, v, None, None, None, 0, 0.25)
    scores = q.double() @ k.double().mT / 4
    assert largest(o - scores.softmax(-1) @ v.double()) <= tolerance
    assert largest(lse - scores.logsumexp(-1) / eager.LN_2) <= tolerance


def test_recorded_launches_are_the_kernels(elsewhere):
    """Oracle: the compile report must see kernels where the dispatcher would not take them."""
    elsewhere("sm_90")
    found = record("sm_90", linear, sized(2, 9, 768).requires_grad_(), sized(768, 768).requires_grad_())
    assert [launch.name for launch in found["inference"]] == ["linear._fwd_kernel"]


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_sdpa_accepts_our_arguments_on_a_gpu(dtype):
    """Oracle: PyTorch's own fake kernels for CUDA tensors: argument lists, shapes, layouts; no GPU is needed."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        qkv = torch.empty(2, 197, 3, 12, 64, device="cuda", dtype=dtype)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        o, lse = eager.attention(q, k, v, 0.125)
        assert o.shape == q.shape and o.stride() == (197 * 768, 64, 768, 1) and o.dtype == dtype
        assert lse.shape == (2, 12, 197) and lse.dtype == torch.float32 and lse.is_contiguous()
        dqkv, *_ = eager.attention_grads(torch.empty_like(o), q, k, v, o, lse, 0.125, True)
        assert dqkv.shape == qkv.shape and dqkv.stride() == qkv.stride() and dqkv.dtype == dtype
