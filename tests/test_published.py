"""Published recipes: every number pinned, and each one takes a step."""

import math
from dataclasses import MISSING, fields

import pytest
import torch

from fastvit_triton.models import create_model
from fastvit_triton.train.drop_path import set_drop_path
from fastvit_triton.train.published import (
    PUBLISHED,
    Published,
    loss_for,
    lr_for,
    mix_for,
    optimizer_for,
    policy_for,
)

# Read from the papers, READMEs and configs that `source` names; what is not listed has the default.
DROPOUT = dict(pos_drop_rate=0.1, proj_drop_rate=0.1, weight_init="jax", pre_logits=True)
PINNED = {
    "vit-i1k": dict(options=DROPOUT, batch_size=4096, epochs=300, warmup=10_000, lr=3e-3, weight_decay=0.3, clip=1.0),
    "vit-i21k": dict(
        options=DROPOUT, batch_size=4096, epochs=90, warmup=10_000, lr=1e-3, weight_decay=0.03, decay="linear",
        floor=1e-5,
    ),
    "vit-finetune": dict(
        img_size=384, batch_size=512, steps=20_000, warmup=500, lr=0.03, weight_decay=0.0, clip=1.0, optimizer="sgd"
    ),
    "cifar10": dict(
        img_size=384, batch_size=512, steps=10_000, warmup=500, lr=0.01, weight_decay=0.0, clip=1.0, optimizer="sgd"
    ),
    "augreg": dict(
        options={"pre_logits": True}, batch_size=4096, epochs=300, warmup=10_000, lr=1e-3, weight_decay=0.1, clip=1.0,
        loss="sigmoid", head_bias=-6.9, mixup=0.5, policy="randaug(2,15)",
    ),
    "simplevit": dict(
        options={"pre_logits": True}, batch_size=1024, epochs=90, warmup=10_000, lr=1e-3, weight_decay=0.1, clip=1.0,
        mixup=0.2, policy="randaug(2,10)",
    ),
    "deit": dict(
        batch_size=1024, epochs=300, warmup=5, warmup_unit="epochs", lr=1e-3, weight_decay=0.05, schedule="deit",
        floor=1e-5, label_smoothing=0.1, mixup=0.8, cutmix=1.0, drop_path=0.1, policy="timm", erasing=0.25, repeats=3,
        average=0.99996,
    ),
    "deit3": dict(
        options={"init_values": 1e-4}, img_size=192, batch_size=2048, epochs=800, warmup=5, warmup_unit="epochs",
        lr=3e-3, weight_decay=0.05, schedule="deit", floor=1e-5, optimizer="lamb", loss="bce", mixup=0.8, cutmix=1.0,
        drop_path=0.2, drop_path_constant=True, policy="three", repeats=3, average=0.99996,
    ),
    "mae-pretrain": dict(
        options={"num_classes": 0}, batch_size=4096, epochs=800, warmup=40, warmup_unit="epochs", lr=2.4e-3,
        weight_decay=0.05, betas=(0.9, 0.95), schedule="mae", loss="pixels", min_area=0.2, mask_ratio=0.75,
        norm_pixels=True,
    ),
    "mae-finetune": dict(
        options={"global_pool": "avg"}, batch_size=1024, epochs=100, warmup=5, warmup_unit="epochs", lr=2e-3,
        weight_decay=0.05, layer_decay=0.65, schedule="mae", floor=1e-6, label_smoothing=0.1, mixup=0.8, cutmix=1.0,
        drop_path=0.1, policy="timm", erasing=0.25,
    ),
}  # fmt: skip
MODELS = {
    "vit-i1k": "vit_base_patch16_224",
    "vit-i21k": "vit_base_patch16_224",
    "vit-finetune": "vit_base_patch16_384",
    "cifar10": "vit_base_patch16_384",
    "augreg": "vit_base_patch16_224",
    "simplevit": "simplevit_small_patch16_224",
    "deit": "deit_base_patch16_224",
    "deit3": "deit3_base_patch16_224",
    "mae-pretrain": "vit_large_patch16_224",
    "mae-finetune": "vit_base_patch16_224",
}
WORDS = ("source", "reported", "duration", "model")


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_number_is_pinned(name: str):
    """Oracle: the table above, with units converted by hand; a field that is not in it has its default."""
    recipe = PUBLISHED[name]
    assert recipe.model == MODELS[name] and recipe.source
    for field in fields(Published):
        if field.name not in WORDS:
            default = field.default_factory() if field.default is MISSING and field.name == "options" else field.default
            want, value = PINNED[name].get(field.name, default), getattr(recipe, field.name)
            assert value == want or (isinstance(want, float) and math.isclose(value, want)), field.name
    assert (recipe.epochs is None) != (recipe.steps is None)


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_recipe_takes_a_step(name: str):
    """Oracle: a narrow model of the recipe's own name and options learns from one batch, at the recipe's own peak."""
    recipe = PUBLISHED[name]
    size = dict(embed_dim=32, depth=2, num_heads=2, img_size=32)
    model = create_model(recipe.model, **(size | {"num_classes": 10} | recipe.options))
    if recipe.drop_path:
        set_drop_path(model, recipe.drop_path, recipe.drop_path_constant)
    at = lr_for(recipe, steps_per_epoch=1000)
    length, warmup = (
        recipe.steps or 1000 * recipe.epochs,
        recipe.warmup * {"steps": 1, "epochs": 1000}[recipe.warmup_unit],
    )
    assert at(0) <= 1e-6 and max(at(step) for step in range(warmup, warmup + 2001, 500)) > 0.99 * recipe.lr
    assert recipe.floor <= at(length - 1) < 0.05 * recipe.lr
    if recipe.optimizer == "lamb":
        with pytest.raises(ValueError, match="optimizer 'lamb' is not in PyTorch"):
            optimizer_for(recipe, model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr)
    else:
        optimizer = optimizer_for(recipe, model)
        assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, recipe.weight_decay}
    if recipe.loss == "pixels":
        with pytest.raises(ValueError, match="this recipe predicts pixels"):
            loss_for(recipe)
        return
    images, targets = mix_for(recipe, 10)(torch.randn(4, 3, 32, 32), torch.arange(4))
    before, loss = [parameter.detach().clone() for parameter in model.parameters()], loss_for(recipe)
    for _ in range(2):  # a head of zeros passes no gradient on at first
        optimizer.zero_grad()
        value = loss(model(images), targets)
        value.backward()
        optimizer.step()
    assert value.isfinite() and all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_policies_by_name():
    """Oracle: which recipes change crops, and that another codebase's operations are not passed off as ours."""
    assert policy_for(PUBLISHED["vit-i1k"]) is None
    assert policy_for(PUBLISHED["deit"]).__name__ == policy_for(PUBLISHED["mae-finetune"]).__name__ == "rand_augment"
    assert policy_for(PUBLISHED["deit3"]).__name__ == "three_augment"
    for name in ("augreg", "simplevit"):
        with pytest.raises(ValueError, match="is big_vision's own"):
            policy_for(PUBLISHED[name])
