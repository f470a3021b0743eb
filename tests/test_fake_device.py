"""Tests of every model on a simulated GPU: nothing raises, the host never waits, and fakes describe the launches."""

from contextlib import nullcontext
from itertools import cycle

import pytest
import torch
from catalogue import COMMON, inputs, outputs
from torch import Tensor, nn

import fastvit_triton
from benchmarks.launches import ARCHS
from fastvit_triton.expected.trace import tracing
from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.kernels.launch import targeting
from fastvit_triton.kernels.settings import forcing
from fastvit_triton.models import model_config

WAYS = ("default", "mixed", "fused")
DTYPES = {"bf16": torch.bfloat16, "autocast": torch.float32, "fp16": torch.float16, "fp32": torch.float32}
WAITING = {"timm_naflex": "_local_scalar_dense", "hf_siglip2": "tolist"}  # their own code reads the sizes of images
WAITING |= {name: "tolist" for name in fastvit_triton.list_models() if name.startswith("naflexvit")}  # so does ours
DROPPING = ("Detr",)  # drop out probabilities of attention in training, which no kernel does
# one of each kind of block, stem and head, and unusual widths
OURS = (
    "deit_tiny_distilled_patch16_224 simplevit_tiny_patch16_224 vit_base_patch14_reg4_dinov2 vit_digits_patch2_8 "
    "vit_giant_patch14_dinov2 vit_small_r26_s32_224 vit_so400m_patch14_siglip_224 vit_tiny_patch16_postnorm_224"
).split()
FOREIGN = "timm_beit timm_dinov3 timm_vit_qk_norm hf_dinov2_swiglu hf_clip torchvision_vit vit_pytorch_vit".split()


def selected(names: list[str], sample: list[str]) -> list:
    """(name, dtype) parameters: those of the sample run in bfloat16 or autocast, in turn; the others with `-m full`.

    Only the sample runs in float16, whose launches are those of bfloat16; the others take turns with one dtype each.
    A model that differs from one before it in sizes alone runs in fewer turns.
    """
    turns = cycle(dtype for dtype in DTYPES if dtype != "fp16")
    pairs = [(n, d) for n in names if n not in WAITING for d in (DTYPES if n in sample else [next(turns)])]
    often, kinds = set(zip(sample, cycle(("bf16", "autocast")))), {kind(n): n for n in reversed(names)}
    rare = pytest.mark.full(one_in=8)
    marks = {pair: pytest.mark.full if pair[0] in sample or kinds[kind(pair[0])] == pair[0] else rare for pair in pairs}
    return [pytest.param(*pair, marks=[] if pair in often else marks[pair]) for pair in pairs]


SIZES = "depth depths embed_dim num_heads img_size num_classes drop_path_rate".split()


def kind(name: str) -> object:
    """What is equal for two models of ours that differ in sizes alone; another library's name."""
    if name in COMMON:
        return name
    options = vars(model_config(name))
    aligned = all(width % 64 == 0 for width in torch.tensor(options.get("embed_dim", 0)).flatten().tolist())
    return type(model_config(name)), aligned, str({key: v for key, v in options.items() if key not in SIZES})


def catalogued(name: str) -> tuple[nn.Module, Tensor]:
    """Our model of that name with two blocks, or five of a pyramid, uninitialised parameters, and two images."""
    config = model_config(name)
    small: dict[str, object] = {}
    if depths := getattr(config, "depths", ()):
        small["depths"] = (2, *(1,) * len(depths[1:]))
    elif depth := getattr(config, "depth", ()):
        small["depth"] = depth[:1] if isinstance(depth, tuple) else 2
    if hasattr(config, "aux_indices"):
        small["aux_indices"] = (0,)
    with torch.device("meta"):
        model = fastvit_triton.create_model(name, **small)
    return model.to_empty(device="cpu"), torch.empty(2, model.config.in_chans, *model.config.img_size)


def converted(given: object, dtype: torch.dtype) -> object:
    """Converts floating-point tensors to this dtype."""
    if isinstance(given, dict):
        return {name: converted(value, dtype) for name, value in given.items()}
    return given.to(dtype) if given.is_floating_point() else given


def findings(model: nn.Module, given: object, dtype: str, way: str, training: bool, arch: str = "sm_90") -> list[str]:
    """Findings of a call on a GPU and, in training, its backward pass; a fused way must launch our kernels."""
    model.to(DTYPES[dtype]).train(training)
    given = converted(given, DTYPES[dtype])
    chosen = nullcontext() if way == "default" else forcing(way)
    with targeting(arch), using_backend("auto"), chosen, torch.set_grad_enabled(training), tracing() as found:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
            y = outputs(model, given)
        if training:
            y.backward(torch.empty_like(y))
    unfused = training and type(model).__name__ in DROPPING
    assert way != "fused" or unfused or any(event.ours for event in found.events)
    return found.findings


@pytest.mark.few(2)
@pytest.mark.parametrize("name, dtype", selected(fastvit_triton.list_models(), OURS))
def test_our_models(name, dtype):
    """Oracle: no finding, forward and backward, in the default way for two images and with all mixed or fused."""
    model, images = catalogued(name)
    for way in WAYS:
        for training in (False, True):
            assert findings(model, images, dtype, way, training) == [], (way, training)


@pytest.mark.few(3)
@pytest.mark.parametrize("name, dtype", selected(list(COMMON), FOREIGN))
def test_foreign_models(name, dtype):
    """Oracle: as for our models, on models converted by `optimize`."""
    model, given = COMMON[name].make(), inputs(name, torch.float32)
    fastvit_triton.optimize(model)
    for way in WAYS:
        for training in (False, True):
            assert findings(model, given, dtype, way, training) == [], (way, training)


@pytest.mark.fast
@pytest.mark.parametrize("arch", ARCHS)
def test_every_architecture(arch):
    """Oracle: as above; each architecture has launch parameters of its own."""
    model, images = catalogued("vit_base_patch16_224")
    for way in WAYS:
        assert findings(model, images, "bf16", way, True, arch) == [], way


@pytest.mark.fast
@pytest.mark.parametrize("name", ["timm_naflex", "hf_siglip2"])
def test_models_that_wait_for_values_are_listed(name):
    """Oracle: the reason why a family is excluded above; if it no longer waits, it must be included."""
    model, given = COMMON[name].make(), inputs(name, torch.float32)
    with torch.no_grad(), tracing() as found:  # masks and sizes of images are integers, which have values
        outputs(model.eval(), given)
    assert f"host waits for {WAITING[name]}" in found.findings


def test_operations_forbidden_during_capture_are_found():
    """Oracle: by hand. torch.tensor copies from memory that is not pinned; kernels that fill a tensor copy nothing."""
    with torch.no_grad(), tracing() as found:
        torch.ones(1) + torch.tensor([1.0])
    assert found.findings == ["host copies values for lift_fresh"]
    with torch.no_grad(), tracing() as found:
        x = torch.arange(3) + torch.full((3,), 2.0) + torch.zeros(3)
        x[:2] = 1
    assert found.findings == []
    with torch.no_grad(), tracing() as found:
        assert float(torch.ones(1)) == 1
    assert found.findings == ["host waits for _local_scalar_dense"]
