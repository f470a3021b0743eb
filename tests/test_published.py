"""Tests of published recipes: every number is pinned, and each recipe takes a training step."""

import math
from dataclasses import fields

import pytest
import torch

from fastvit_triton.models import create_model
from fastvit_triton.train.augment.policy import policy_by_name
from fastvit_triton.train.build import build_loss, build_lr, build_mix, build_optimizer, configure_model
from fastvit_triton.train.recipes import Recipe, override_recipe
from fastvit_triton.train.recipes.published import PUBLISHED

pytestmark = pytest.mark.fast

USUAL = dict(  # fields that a recipe below does not list
    options={}, img_size=224, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), eval_crop=0.9, crop_mode="box",
    interpolation="bilinear", epochs=None, steps=None, warmup=0.05, warmup_unit="run", optimizer="adamw",
    lr_images=None, weight_decay=0.05, betas=(0.9, 0.999), layer_decay=1.0, lr_scales={},
    schedule="own", decay="cosine", floor=0.0,
    clip=None, loss="softmax", head_bias=0.0, pos_std=None, label_smoothing=0.0, mixup=0.0, cutmix=0.0, mixtoken=0.0,
    drop_path_rate=0.0, drop_path_constant=False, policy="", erasing=0.0, repeats=1, degrees=0.0, zoom=0.0, shear=0.0,
    shift=0.0, min_area=0.35, flip=True, ema_decay=None, mask_ratio=0.0, norm_pixels=False, decoder={},
)  # fmt: skip
# Read from the papers, READMEs and configs that `source` names.
DROPOUT = dict(pos_drop_rate=0.1, proj_drop_rate=0.1, weight_init="jax", pre_logits=True)
JAX = dict(schedule="vit", warmup_unit="steps", clip=1.0, min_area=0.05, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
PINNED = {
    "vit-i1k": JAX | dict(options=DROPOUT, batch_size=4096, epochs=300, warmup=10_000, lr=3e-3, weight_decay=0.3),
    "vit-i21k": JAX | dict(
        options=DROPOUT, batch_size=4096, epochs=90, warmup=10_000, lr=1e-3, weight_decay=0.03, decay="linear",
        floor=1e-5,
    ),
    "vit-finetune": JAX | dict(
        img_size=384, batch_size=512, steps=20_000, warmup=500, lr=0.03, weight_decay=0.0, optimizer="sgd",
        eval_crop=1.0,
    ),
    "cifar10": JAX | dict(
        img_size=384, batch_size=512, steps=10_000, warmup=500, lr=0.01, weight_decay=0.0, optimizer="sgd",
        eval_crop=1.0,
    ),
    "augreg": JAX | dict(
        options={"pre_logits": True}, batch_size=4096, epochs=300, warmup=10_000, lr=1e-3, weight_decay=0.1,
        loss="sigmoid", head_bias=-6.9, mixup=0.5, policy="randaug(2,15)", eval_crop=0.875,
    ),
    "simplevit": JAX | dict(
        options={"pre_logits": True}, batch_size=1024, epochs=90, warmup=10_000, lr=1e-3, weight_decay=0.1, mixup=0.2,
        policy="randaug(2,10)", eval_crop=0.875,
    ),
    "deit": dict(
        batch_size=1024, epochs=300, warmup=5, warmup_unit="epochs", lr=1e-3, lr_images=512, weight_decay=0.05,
        schedule="deit", floor=1e-5, label_smoothing=0.1, mixup=0.8, cutmix=1.0, drop_path_rate=0.1, policy="timm",
        erasing=0.25, repeats=3, ema_decay=0.99996, min_area=0.08, eval_crop=0.875,
    ),
    "deit3": dict(
        options={"init_values": 1e-4}, img_size=192, batch_size=2048, epochs=800, warmup=5, warmup_unit="epochs",
        lr=3e-3, weight_decay=0.05, schedule="deit", floor=1e-5, optimizer="lamb", loss="bce", mixup=0.8, cutmix=1.0,
        drop_path_rate=0.2, drop_path_constant=True, policy="three", repeats=3, ema_decay=0.99996, min_area=0.08,
        eval_crop=1.0,
    ),
    "mae-pretrain": dict(
        options={"num_classes": 0}, batch_size=4096, epochs=800, warmup=40, warmup_unit="epochs", lr=2.4e-3,
        lr_images=256, weight_decay=0.05, betas=(0.9, 0.95), schedule="mae", loss="pixels", min_area=0.2,
        mask_ratio=0.75, norm_pixels=True, eval_crop=0.875, decoder={"embed_dim": 512, "depth": 8, "num_heads": 16},
    ),
    "mae-finetune": dict(
        options={"global_pool": "avg"}, batch_size=1024, epochs=100, warmup=5, warmup_unit="epochs", lr=2e-3,
        lr_images=256, weight_decay=0.05, layer_decay=0.65, schedule="mae", floor=1e-6, label_smoothing=0.1,
        mixup=0.8, cutmix=1.0, drop_path_rate=0.1, policy="timm", erasing=0.25, min_area=0.08, eval_crop=0.875,
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
    """Oracle: the tables above, with units converted by hand; SGD has the momentum of 0.9 of all papers."""
    recipe = PUBLISHED[name]
    assert recipe.model == MODELS[name] and recipe.source
    for field in fields(Recipe):
        if field.name not in WORDS:
            want, value = (USUAL | PINNED[name])[field.name], getattr(recipe, field.name)
            assert value == want or (isinstance(want, float) and math.isclose(value, want)), field.name
    assert (recipe.epochs is None) != (recipe.steps is None)
    made = build_optimizer(recipe, create_model("vit_digits_patch2_8", embed_dim=8, depth=1, num_heads=1))
    moments = {"betas": (USUAL | PINNED[name])["betas"]} if recipe.optimizer != "sgd" else {"momentum": 0.9}
    assert all(group[key] == value for group in made.param_groups for key, value in moments.items())


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_recipe_takes_a_step(name: str):
    """Oracle: a narrow model with the recipe's name and options learns from one batch at the recipe's peak rate."""
    recipe = PUBLISHED[name]
    size = dict(embed_dim=32, depth=2, num_heads=2, img_size=32, drop_path_rate=recipe.drop_path_rate)
    model = create_model(recipe.model, **(size | {"num_classes": 10} | recipe.options))
    configure_model(recipe, model)
    at = build_lr(recipe, steps_per_epoch=1000)
    length, warmup = (
        recipe.steps or 1000 * recipe.epochs,
        recipe.warmup * {"steps": 1, "epochs": 1000}[recipe.warmup_unit],
    )
    assert at(0) <= 1e-6 and max(at(step) for step in range(warmup, warmup + 2001, 500)) > 0.99 * recipe.lr
    assert recipe.floor <= at(length - 1) < 0.05 * recipe.lr
    optimizer = build_optimizer(recipe, model)
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, recipe.weight_decay}
    if recipe.loss == "pixels":
        with pytest.raises(ValueError, match="this recipe predicts pixels"):
            build_loss(recipe)
        return
    mix = build_mix(recipe, 10) or (lambda images, targets: (images, targets))
    images, targets = mix(torch.randn(4, 3, 32, 32), torch.arange(4))
    before, loss = [parameter.detach().clone() for parameter in model.parameters()], build_loss(recipe)
    for _ in range(2):  # at first, a zero head passes no gradient on
        optimizer.zero_grad()
        value = loss(model(images), targets)
        value.backward()
        optimizer.step()
    assert value.isfinite() and all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_policies_by_name():
    """Oracle: which recipes augment crops, with whose operations and how strongly."""
    names = {name: policy_by_name(recipe.policy) for name, recipe in PUBLISHED.items() if recipe.policy}
    assert names["deit"].__name__ == names["mae-finetune"].__name__ == "rand_augment"
    assert names["deit3"].__name__ == "three_augment"
    assert names["augreg"].keywords == dict(layers=2, magnitude=15.0)
    assert names["simplevit"].keywords == dict(layers=2, magnitude=10.0)
    assert policy_by_name("") is None and names.keys() == {"deit", "deit3", "mae-finetune", "augreg", "simplevit"}
    with pytest.raises(ValueError, match="policy is 'auto'; use 'timm'"):
        policy_by_name("auto")


def test_shorter_runs_keep_proportions():
    """Oracle: by hand; ImageNet has 1,281,167 // 4096 = 312 steps per epoch, // 1024 = 1251."""
    vit = override_recipe(PUBLISHED["vit-i1k"], epochs=3)
    assert (vit.epochs, vit.warmup_unit, vit.lr) == (3, "run", 3e-3)
    assert math.isclose(vit.warmup, 10_000 / (300 * 312))
    deit = override_recipe(PUBLISHED["deit"], batch_size=64)
    assert deit.lr == 1e-3 * 64 / 1024 == 5e-4 * 64 / 512 and math.isclose(deit.warmup, 5 / 300)
    assert override_recipe(PUBLISHED["deit"], batch_size=64, lr=1.0).lr == 1.0
    assert override_recipe(PUBLISHED["deit3"], batch_size=64).lr == 3e-3  # --unscale-lr
    cifar = override_recipe(PUBLISHED["cifar10"], epochs=2, warmup=0.1)
    assert (cifar.epochs, cifar.steps, cifar.warmup) == (2, None, 0.1)
    at = build_lr(override_recipe(PUBLISHED["deit"], epochs=3), steps_per_epoch=100)
    assert at(0) == 1e-6 and at(10) > 0.99e-3  # warm-up ends within an epoch
    with pytest.raises(ValueError, match="warmup is 10000 of 300 steps; take more epochs"):
        build_lr(PUBLISHED["vit-i1k"], steps_per_epoch=1)
