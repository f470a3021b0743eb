"""Tests of the package inside transformers: attention by name, and the Trainer. Oracle: transformers without it."""

import importlib
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from budget import allowed, telling
from interpreter import interpreting
from recording import Recorder
from test_parallel import launch
from torch import nn
from trainer_job import same_weights, train, vit

from fastvit_triton.convert.readers.transformers import attention_interface
from fastvit_triton.engine.hooks import is_our_forward
from fastvit_triton.integrations import host
from fastvit_triton.integrations import transformers as ours

STARTS = torch.tensor([0, 3, 8], dtype=torch.int32)
PACKED = dict(cu_seq_lens_q=STARTS, cu_seq_lens_k=STARTS, max_length_q=5)
LOWER = torch.ones(8, 8, dtype=torch.bool).tril()
IMAGES = torch.block_diag(torch.ones(3, 3), torch.ones(5, 5)).bool()
PADDING = torch.tensor([[1] * 6 + [0] * 2])
COMPILED = {"torch_compile": True, "torch_compile_backend": "eager"}
BIAS = torch.randn(1, 2, 8, 8, generator=torch.Generator().manual_seed(5))


class Caller(nn.Module):
    """A module that calls an attention function; `is_causal` is False in transformers' vision towers."""

    is_causal = False


def test_the_name_is_known_after_the_import(monkeypatch):
    """Oracle: transformers refuses the name before; afterwards a model is built with it and keeps it."""
    for registry in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        monkeypatch.delitem(registry._global_mapping, ours.NAME, raising=False)
    with pytest.raises(ValueError, match="fastvit_triton"):
        transformers.ViTModel._from_config(vit().config, attn_implementation="fastvit_triton")
    importlib.reload(ours)
    model = transformers.ViTModel._from_config(vit().config, attn_implementation="fastvit_triton")
    assert model.config._attn_implementation == "fastvit_triton"


def attend(call, dtype):
    """The output and the gradients of q, k, v [1, 2, 8, 16], all in float64; they and the cotangent are random."""
    generator = torch.Generator().manual_seed(1)
    q, k, v, cotangent = (torch.randn(1, 2, 8, 16, generator=generator).to(dtype) for _ in range(4))
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    y = call(q, k, v)
    (y * cotangent.transpose(1, 2)).sum().backward()
    return [t.double() for t in (y.detach(), q.grad, k.grad, v.grad)]


def written_out(mask=None, bias=None, scaling=None):
    """Attention as its equation says: softmax(q·kᵀ·scale + bias) over the keys that the mask keeps, times v."""

    def call(q, k, v):
        scores = q @ k.mT * (16**-0.5 if scaling is None else scaling)
        scores = scores if bias is None else scores + bias.to(scores)
        scores = scores if mask is None else scores.masked_fill(~mask, float("-inf"))
        return (scores.softmax(-1) @ v).transpose(1, 2)

    return call


@pytest.mark.parametrize(
    "given, equation",
    [
        pytest.param({}, {}, id="dense"),
        pytest.param({"scaling": 0.3}, {"scaling": 0.3}, id="scaled"),
        pytest.param({"attention_mask": BIAS}, {"bias": BIAS}, id="mask to be added"),
        pytest.param({"attention_mask": LOWER[None, None]}, {"mask": LOWER}, id="mask of booleans"),
        pytest.param({"attention_mask": PADDING}, {"mask": PADDING.bool()}, id="padding"),
        pytest.param(PACKED, {"mask": IMAGES}, id="packed"),
        pytest.param({"is_causal": True}, {"mask": LOWER}, id="causal"),
        pytest.param(
            {"is_causal": True, "attention_mask": PADDING}, {"mask": LOWER & PADDING.bool()}, id="causal with padding"
        ),
        pytest.param({"is_causal": True, **PACKED}, {"mask": LOWER & IMAGES}, id="causal and packed"),
    ],
)
def test_supported_cases_run_the_kernels(given, equation):
    """Output and gradients are as close to float64 as "sdpa" in float32 is; one kernel runs forward."""
    given = {"attention_mask": None} | given

    def call(q, k, v):
        return attention_interface.attention_forward(Caller(), q, k, v, **given)[0]

    with interpreting(), Recorder() as run:
        got = attend(call, torch.float32)
    assert run.ours.count("attention_fwd") == 1
    truth = attend(written_out(**equation), torch.float64)
    own = attend(written_out(**equation), torch.float32)
    for a, b, c in zip(got, own, truth, strict=True):
        assert (a - c).norm() <= allowed((b - c).norm(), telling(c).norm(), torch.float32)


@pytest.mark.parametrize(
    "given, equation, cause",
    [
        ({"attention_mask": LOWER[None, None], **PACKED}, {"mask": LOWER & IMAGES}, "masks of packed images"),
        ({"attention_mask": BIAS, **PACKED}, {"mask": IMAGES, "bias": BIAS}, "masks of packed images"),
        ({"position_bias": BIAS}, {"bias": BIAS}, "position_bias"),
    ],
)
def test_unsupported_cases_run_sdpa_and_warn_once(given, equation, cause, monkeypatch):
    """Oracle: the equation in float64, and its own error in float32; one warning in two calls."""
    monkeypatch.setattr(attention_interface, "_WARNED", set())
    given = {"attention_mask": None} | given

    def call(q, k, v):
        return attention_interface.attention_forward(Caller(), q, k, v, **given)[0]

    with pytest.warns(UserWarning, match=f'Caller runs transformers\' "sdpa": the kernels do not support {cause}'):
        got = attend(call, torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attend(call, torch.float32)
    truth = attend(written_out(**equation), torch.float64)
    own = attend(written_out(**equation), torch.float32)
    for a, b, c in zip(got, own, truth, strict=True):
        assert (a - c).norm() <= allowed((b - c).norm(), telling(c).norm(), torch.float32)


@pytest.mark.parametrize(
    "given, sentence",
    [
        ({"s_aux": torch.zeros(2)}, "does not support attention sinks; give Caller attn_implementation='eager'"),
        ({"sliding_window": 4}, "does not support a sliding window without a mask"),
        ({"sliding_window": 4, **PACKED}, "does not support a sliding window without a mask"),
        (PACKED | {"cu_seq_lens_k": torch.tensor([0, 4, 8])}, "a batch of one, with the same cu_seq_lens for q and k"),
    ],
)
def test_what_sdpa_would_ignore_is_refused(given, sentence):
    """Oracle: the sentence."""
    q = torch.randn(1, 2, 8, 16)
    with pytest.raises(ValueError, match=sentence):
        attention_interface.attention_forward(Caller(), q, q, q, None, **given)


def adapted():
    """The ViT with LoRA on queries and values, whose head also learns."""
    peft = pytest.importorskip("peft")
    model = vit()
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"])
    torch.manual_seed(1)
    return peft.get_peft_model(model, settings)


@pytest.mark.full
@pytest.mark.parametrize(
    "make, options",
    [
        pytest.param(vit, {}, id="plain"),
        pytest.param(adapted, {}, id="peft"),
        pytest.param(vit, {"activation_checkpointing": True}, id="checkpointing", marks=pytest.mark.full),
        pytest.param(vit, COMPILED, id="compiled", marks=pytest.mark.full),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of the libraries
def test_training_with_the_callback_gives_the_same_bits(make, options, tmp_path, capsys):
    """Oracle: training without it, with the backend "torch"; the report is printed once."""
    optimized = same_weights(str(tmp_path), make, **options)
    printed = capsys.readouterr().out
    assert printed.count(str(optimized.report)) == 1 and "2 of 2 blocks are converted" in printed


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_the_kernels_run_in_training_and_not_after(tmp_path):
    """Oracle: the recorded operators; and that no module keeps a forward of ours unless it was asked for."""
    with interpreting(), Recorder() as run:
        model, *_ = train(str(tmp_path), vit, ours.Optimize(), max_steps=1)
    assert run.ours
    assert not any(is_our_forward(m.__dict__.get("forward")) for m in model.modules())
    kept, *_ = train(str(tmp_path), vit, ours.Optimize(keep=True), max_steps=1)
    assert any(is_our_forward(m.__dict__.get("forward")) for m in kept.modules())


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_model_init_is_optimised_in_each_training(tmp_path, capsys):
    """Oracle: the bits of training without the callback; the report says when, and the second training has one too."""
    same_weights(str(tmp_path), seed=7)
    assert capsys.readouterr().out.count("Optimised when training began, after the model was wrapped.") == 1
    _, seen, trainer = train(str(tmp_path), vit, ours.Optimize())
    trainer.train()
    assert len(seen) == 1 and min(seen) > 0
    assert capsys.readouterr().out.count("Optimised when training began") == 1


@pytest.mark.full
@pytest.mark.parametrize("engines", [("ddp", "fsdp2"), ("zero2",), ("zero3",)], ids=" ".join)
def test_two_processes(engines, tmp_path, monkeypatch):
    """Oracle: training without the callback in the same processes, bit for bit; and the report before wrapping."""
    if engines[0].startswith("zero"):
        pytest.importorskip("deepspeed")
        monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    launch(2, str(Path(__file__).parent / "trainer_job.py"), str(tmp_path), *engines)


def test_options_of_optimize_reach_it(tmp_path):
    """Oracle: a filter that refuses everything leaves every module."""
    optimized = ours.Optimize(filter_fn=lambda module, path: False)
    optimized.on_init_end(None, transformers.TrainerState(), None, model=vit())
    assert not optimized.report.fused and {row.why for row in optimized.report.rows} >= {"excluded by filter_fn"}


def test_hosts_that_do_not_fit_are_named():
    """Oracle: the sentences: the package, the version seen, and what works."""
    with pytest.raises(ImportError, match=r"absent is not installed; this integration works with absent 1\.2 and"):
        host.need("absent", "1.2")
    seen = transformers.__version__
    with pytest.raises(ImportError, match=rf"transformers is of version {seen}; this integration works with .* 99\.0"):
        host.need("transformers", "99.0")
    assert host.need("torch", "2.11") is torch
