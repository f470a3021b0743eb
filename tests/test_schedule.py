"""Tests of parameter groups, learning-rate schedules, EMA and gradient accumulation."""

import math
from functools import partial

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.optim import param_groups_weight_decay
from timm.scheduler import CosineLRScheduler
from torch import nn

from fastvit_triton.models import create_model
from fastvit_triton.train.ema import ema_decay_at, ema_model
from fastvit_triton.train.objective import supervised
from fastvit_triton.train.optim import layer_of, parameter_groups, set_lr
from fastvit_triton.train.schedule import constant, deit_schedule, mae_schedule, vit_schedule
from fastvit_triton.train.step import accumulate_gradients

pytestmark = pytest.mark.fast

CLOSE = torch.testing.assert_close


def names_of(model: nn.Module, groups: list[dict]) -> list[set[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [{names[id(parameter)] for parameter in group["params"]} for group in groups]


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "deit3_small_patch16_224"])
def test_weight_decay_groups_equal_timms(name: str):
    """Oracle: timm's groups for its model of the same name, including LayerScale and both tokens."""
    theirs = timm.create_model(name)
    expected = param_groups_weight_decay(theirs, 0.1, no_weight_decay_list=theirs.no_weight_decay())
    model = create_model(name)
    assert names_of(model, parameter_groups(model, 0.1)) == names_of(theirs, expected)[::-1]


def test_weight_decay_groups_of_other_models():
    """Oracle: torchvision's and transformers' own names of tokens and positions."""
    import torchvision
    from transformers import ViTConfig, ViTModel

    model = torchvision.models.VisionTransformer(32, 16, 2, 2, 8, 16)
    _, free = names_of(model, parameter_groups(model, 0.1))
    assert {"class_token", "encoder.pos_embedding"} == {n for n in free if model.get_parameter(n).ndim > 1}
    model = ViTModel(
        ViTConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, image_size=32),
        use_mask_token=True,
        add_pooling_layer=False,
    )
    _, free = names_of(model, parameter_groups(model, 0.1))
    few = {n for n in free if model.get_parameter(n).ndim > 1}
    assert few == {f"embeddings.{n}" for n in ("cls_token", "mask_token", "position_embeddings")}
    rates = {group["lr_scale"] for group in parameter_groups(model, 0.1, 0.5)}
    assert rates == {0.125, 0.25, 0.5, 1.0}


def test_layer_decay_scales_the_learning_rate():
    """Oracle: MAE's rule by hand: three blocks, d = 0.5: stem 1/16, blocks 1/8, 1/4, 1/2, norm and head 1."""
    model = create_model("vit_digits_patch2_8", embed_dim=16, depth=3, num_heads=2)
    groups = parameter_groups(model, 0.1, 0.5, patch_embed_scale=0.2)
    rates = {}
    for names, group in zip(names_of(model, groups), groups, strict=True):
        for name in names:
            assert name not in rates
            rates[name] = group["lr_scale"]
            assert (group["weight_decay"] == 0) == (model.get_parameter(name).ndim < 2 or "_" in name.split(".")[-1])
    expected = {"cls_token": 1 / 16, "pos_embed": 1 / 16, "norm": 1.0, "head": 1.0, "patch_embed": 0.2 / 16}
    for name, _ in model.named_parameters():
        first, *rest = name.split(".")
        assert math.isclose(rates[name], 2.0 ** (int(rest[0]) - 3) if first == "blocks" else expected[first]), name
    optimizer = torch.optim.SGD(groups, lr=1.0)
    set_lr(optimizer, 0.3)
    assert [group["lr"] for group in optimizer.param_groups] == [0.3 * group["lr_scale"] for group in groups]
    assert layer_of("encoder.layers.encoder_layer_4.mlp.0.weight", 12) == 5
    assert layer_of("heads.head.weight", 12) == 13 and layer_of("encoder.pos_embedding", 12) == 0
    with pytest.raises(ValueError, match="layer_decay needs numbered blocks"):
        parameter_groups(nn.Linear(2, 2), 0.1, 0.5)
    with pytest.raises(ValueError, match=r"layer_decay is 1.5; use a number in \(0, 1\]"):
        parameter_groups(model, 0.1, 1.5)


def test_vit_schedule():
    """Oracle: `create_learning_rate_schedule` by hand: 110 steps, 10 of warm-up, peak 2."""
    at = partial(vit_schedule, steps=110, warmup=10, peak=2.0)
    assert at(0) == 0 and at(5) == 1.0 and at(10) == 2.0 and math.isclose(at(60), 1.0) and at(110) == 0.0
    assert math.isclose(at(35), 1 + math.sqrt(0.5))
    line = partial(at, decay="linear", linear_end=1.0)
    assert line(5) == 1.0 and line(10) == 2.0 and line(60) == 1.5 and line(110) == line(200) == 1.0
    assert math.isclose(at(110, decay="linear"), 1e-5)
    assert constant(3, 6, 2.0) == 1.0 and constant(60, 6, 2.0) == constant(0, 0, 2.0) == 2.0
    with pytest.raises(ValueError, match="decay is 'stair'"):
        at(1, decay="stair")
    for schedule in (vit_schedule, deit_schedule, mae_schedule):
        with pytest.raises(ValueError, match="warmup is 5 of 5"):
            schedule(1, 5, 5, 1.0)


@pytest.mark.parametrize("epoch", [0, 1, 4, 5, 6, 150, 299, 300, 305])
def test_deit_schedule(epoch: int):
    """Oracle: timm's CosineLRScheduler, built with DeiT's arguments."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1e-3)
    theirs = CosineLRScheduler(optimizer, t_initial=300, lr_min=1e-5, warmup_t=5, warmup_lr_init=1e-6)
    theirs.step(epoch)
    assert math.isclose(deit_schedule(epoch, 300, 5, 1e-3), optimizer.param_groups[0]["lr"], rel_tol=1e-12)


def test_mae_schedule():
    """Oracle: lr_sched.py by hand: 100 epochs, 20 of warm-up, peak 2, floor 1, at fractional epochs."""
    at = partial(mae_schedule, epochs=100, warmup=20, peak=2.0, floor=1.0)
    assert at(0) == 0 and at(0.5) == 0.05 and at(20) == 2.0 and math.isclose(at(60), 1.5) and at(100) == 1.0


@pytest.mark.parametrize("warmup", [True, False])
def test_ema(warmup: bool):
    """Oracle: the recursion on w_n = n, in closed form Σ (1 − d) d^(N−n) n without warm-up; counters are copied."""
    model = nn.BatchNorm1d(1, affine=True)
    ema = ema_model(model, 0.9, warmup)
    expected = 0.0
    for n in range(40):
        with torch.no_grad():
            model.weight.fill_(float(n))
            model.running_mean.fill_(float(n))
            model.num_batches_tracked.fill_(n)
        ema.update_parameters(model)
        kept = 0.0 if n == 0 else ema_decay_at(n, 0.9) if warmup else 0.9
        expected = kept * expected + (1 - kept) * n
    if not warmup:
        assert math.isclose(expected, sum(0.1 * 0.9 ** (39 - n) * n for n in range(1, 40)), rel_tol=1e-12)
    rounding = 40 * 40 * torch.finfo(torch.float32).eps
    assert abs(ema.module.weight.item() - expected) <= rounding
    assert abs(ema.module.running_mean.item() - expected) <= rounding
    assert ema.module.num_batches_tracked == 39
    again = ema_model(nn.BatchNorm1d(1), 0.9, warmup)
    again.load_state_dict(ema.state_dict())
    for one in (ema, again):
        one.update_parameters(model)
    assert torch.equal(ema.module.weight, again.module.weight)
    assert ema_decay_at(1, 0.9999) == 2 / 11 and ema_decay_at(10**9, 0.9999) == 0.9999
    with pytest.raises(ValueError, match=r"decay is 1.0; use a number in \[0, 1\)"):
        ema_model(model, 1.0)
    usual = ema_model(nn.Linear(1, 1, bias=False).double(), warmup=warmup)
    usual.module.weight.data.zero_()
    usual.n_averaged.fill_(10**6)  # updates, after which the warm-up has no effect
    one = nn.Linear(1, 1, bias=False).double()
    one.weight.data.fill_(1.0)
    usual.update_parameters(one)
    assert math.isclose(usual.module.weight.item(), 1 - 0.9999, rel_tol=1e-12)


@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_accumulation_equals_the_full_batch_gradient(steps: int):
    """Oracle: one backward pass over the whole batch in float64, then clipped; with a smaller last micro-batch."""
    model = create_model("vit_digits_patch2_8", embed_dim=16, depth=1, num_heads=2).double()
    images, targets = torch.randn(7, 1, 8, 8).double(), torch.rand(7, 10).double().softmax(-1)
    value = F.cross_entropy(model(images), targets)
    value.backward()
    whole_norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    whole = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    total, answers = accumulate_gradients(model, supervised(F.cross_entropy), images, targets, steps)
    CLOSE(total, value.detach(), check_dtype=False)
    CLOSE(answers, model(images).detach())
    CLOSE(nn.utils.clip_grad_norm_(model.parameters(), 0.1), whole_norm)
    for parameter, expected in zip(model.parameters(), whole, strict=True):
        CLOSE(parameter.grad, expected)
    with pytest.raises(ValueError, match="grad_accum_steps is 8 for 7 images"):
        accumulate_gradients(model, supervised(F.cross_entropy), images, targets, 8)
