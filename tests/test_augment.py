"""Tests of augmentation policies, random erasing, repeated augmentation and drop-path rates."""

import random

import numpy as np
import pytest
import timm
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from timm.data.auto_augment import _RAND_INCREASING_TRANSFORMS, AugmentOp
from timm.data.distributed_sampler import RepeatAugSampler

from fastvit_triton.models import create_model
from fastvit_triton.train.augment import policy, random_erasing
from fastvit_triton.train.data.sampler import RepeatedAugmentation
from fastvit_triton.train.data.transform import Transform
from fastvit_triton.train.drop_path import set_drop_path

pytestmark = pytest.mark.fast

FILL = (124, 116, 104)


def photo(mode: str = "RGB") -> Image.Image:
    levels = np.random.default_rng(0).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    return Image.fromarray(levels).resize((24, 18), Image.Resampling.BICUBIC).convert(mode)


@pytest.mark.parametrize("level", [0.0, 0.31, 0.9, 1.0])
@pytest.mark.parametrize("sign", [-1, 1])
def test_operations_equal_timms(sign: int, level: float, monkeypatch: pytest.MonkeyPatch):
    """Oracle: timm's AugmentOp at the same index of `_RAND_INCREASING_TRANSFORMS`, pixel for pixel; at least 1 bit."""
    monkeypatch.setattr(random, "random", lambda: 0.9 if sign < 0 else 0.1)
    for name, theirs in zip(policy.OPERATIONS, _RAND_INCREASING_TRANSFORMS, strict=True):
        assert theirs.lower().startswith(name.replace("_", "")), "the same operation"
        moved = dict(fillcolor=FILL, resample=Image.Resampling.BICUBIC)
        if name == "posterize" and level == 1:  # timm would keep 0 bits, which Pillow rejects
            assert policy.OPERATIONS[name](photo(), level, sign, moved) == ImageOps.posterize(photo(), 1)
            continue
        hparams = dict(img_mean=FILL, interpolation=Image.Resampling.BICUBIC)
        expected = AugmentOp(theirs, prob=1.0, magnitude=10 * level, hparams=hparams)(photo())
        assert policy.OPERATIONS[name](photo(), level, sign, moved).tobytes() == expected.tobytes(), name


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_policies_are_determined_by_their_seed(mode: str):
    """Oracle: the same seed gives the same image; size and mode are kept; probability 0 changes nothing."""
    for change in (policy.rand_augment, policy.three_augment):
        results = set()
        for seed in range(30):
            first, again = (change(photo(mode), torch.Generator().manual_seed(seed)) for _ in range(2))
            assert first.tobytes() == again.tobytes() and first.size == (24, 18) and first.mode == mode
            results.add(first.tobytes())
        assert len(results) > 10
    same = policy.rand_augment(photo(mode), torch.Generator(), probability=0.0)
    assert same.tobytes() == photo(mode).tobytes()


def test_three_augment_applies_one_of_three_operations(monkeypatch: pytest.MonkeyPatch):
    """Oracle: Pillow's grey and solarised images, or a blur of 0.1 to 2 pixels; each occurs; jitter by ±30 %."""
    radii, blur = [], ImageFilter.GaussianBlur
    monkeypatch.setattr(ImageFilter, "GaussianBlur", lambda radius: (radii.append(radius), blur(radius))[1])
    grey, solarised = ImageOps.grayscale(photo()).convert("RGB").tobytes(), ImageOps.solarize(photo()).tobytes()
    kinds = []
    for seed in range(30):
        kinds.append(policy.three_augment(photo(), torch.Generator().manual_seed(seed), jitter=0).tobytes())
    assert grey in kinds and solarised in kinds
    others = [kind for kind in kinds if kind not in (grey, solarised)]
    assert others == [photo().filter(blur(radius)).tobytes() for radius in radii]
    assert 0.1 <= min(radii) < 0.6 and 1.5 < max(radii) <= 2
    flat = Image.new("RGB", (8, 8), (50, 50, 50))  # unchanged by grey, solarise and blur
    levels = {policy.three_augment(flat, torch.Generator().manual_seed(seed)).getpixel((4, 4))[0] for seed in range(60)}
    bounds = [ImageEnhance.Brightness(flat).enhance(factor).getpixel((0, 0))[0] for factor in (0.7, 1.3)]
    assert bounds[0] <= min(levels) < 42 and 58 < max(levels) <= bounds[1]


def test_a_transform_applies_its_policy():
    """Oracle: a policy that paints the image black is applied in training and not without a random crop."""
    transform = Transform((8, 8), (0.0,) * 3, (1.0,) * 3)
    black = lambda image, generator: Image.new("RGB", image.size)  # noqa: E731
    assert transform(photo(), seed=3, policy=black).abs().sum() == 0
    assert torch.equal(transform(photo(), policy=black), transform(photo()))


def test_random_erasing():
    """Oracle: one box per image changes, with area and aspect ratio within the limits; the input is not modified."""
    images = torch.full((200, 3, 32, 24), 9.0)
    erased = random_erasing(images, probability=0.5)
    assert (images == 9).all()
    changed = (erased != 9).all(1)
    touched = changed.any((1, 2))
    assert 70 < touched.sum() < 130  # 28 is four standard deviations of a fair coin
    for mask in changed[touched]:
        rows, columns = mask.any(1), mask.any(0)
        h, w = int(rows.sum()), int(columns.sum())
        assert torch.equal(mask, rows[:, None] & columns) and rows.diff().sum() <= 2 and columns.diff().sum() <= 2
        low, high = (h - 0.5) * (w - 0.5), (h + 0.5) * (w + 0.5)  # sides are rounded
        assert high >= 0.02 * 768 and low <= 768 / 3
        assert (h + 0.5) / (w - 0.5) >= 0.3 and (h - 0.5) / (w + 0.5) <= 1 / 0.3
    noise = erased[changed[:, None].expand_as(erased)]
    assert abs(noise.mean()) < 4 / len(noise) ** 0.5 and abs(noise.std() - 1) < 4 / (2 * len(noise)) ** 0.5
    assert torch.equal(random_erasing(images, 0.0), images)


@pytest.mark.parametrize(("count", "world"), [(1000, 1), (1000, 4), (256, 3), (10, 1), (10, 4)])
def test_repeated_augmentation(count: int, world: int):
    """Oracle: timm's RepeatAugSampler, index by index, for every rank and two epochs."""
    for rank in range(world):
        ours = RepeatedAugmentation(count, 3, rank, world)
        theirs = RepeatAugSampler(range(count), num_replicas=world, rank=rank)
        for epoch in (0, 5):
            ours.epoch = epoch
            theirs.set_epoch(epoch)
            assert list(ours) == list(theirs) and len(ours) == len(theirs) == len(list(ours))
    with pytest.raises(ValueError, match="rank is 4, but there are 4 processes; use 0 to 3"):
        RepeatedAugmentation(10, 3, 4, 4)
    with pytest.raises(ValueError, match="count is 0"):
        RepeatedAugmentation(0)


def test_drop_path_rates_are_set_per_block():
    """Oracle: models built with that rate: ours, timm's and torchvision's modules."""
    import torchvision

    model, built = (create_model("vit_digits_patch2_8", drop_path_rate=rate) for rate in (0.0, 0.3))
    rates = set_drop_path(model, 0.3)
    assert rates == [0.3 * i / 3 for i in range(4)]
    assert [block.drop_path1.p for block in model.blocks] == [block.drop_path2.p for block in built.blocks] == rates
    foreign = timm.create_model("vit_tiny_patch16_224", depth=3, drop_path_rate=0.1)
    assert set_drop_path(foreign, 0.2) == [0.0, 0.1, 0.2]
    assert [getattr(block.drop_path1, "drop_prob", 0.0) for block in foreign.blocks] == [0.0, 0.1, 0.2]
    with pytest.raises(ValueError, match=r"blocks\.0 has no DropPath; .*, or leave the rate at 0"):
        set_drop_path(foreign, 0.2, constant=True)
    assert set_drop_path(model, 0.2, constant=True) == [0.2] * 4
    with pytest.raises(ValueError, match="no numbered blocks"):
        set_drop_path(torchvision.ops.StochasticDepth(0.1, "row"), 0.2)
    with pytest.raises(ValueError, match=r"last is 1; use a number in \[0, 1\)"):
        set_drop_path(model, 1)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("swin_tiny_patch4_window7_224", dict(depths=(2, 2, 3, 1))),
        ("pvt_tiny", dict(depths=(1, 2, 2, 2))),
        ("twins_svt_small", dict(depths=(2, 1, 3, 2))),
        ("pit_ti_224", dict(depths=(2, 3, 1))),
        ("botnet50", dict(depths=(1, 2, 2, 1))),
    ],
)
def test_drop_path_counts_the_blocks_of_all_stages(name: str, options: dict):
    """Oracle: our models built with that rate, timm's for Swin; their rates rise with each block of each stage."""
    width = {} if name == "botnet50" else dict(img_size=64)
    model, built = (create_model(name, **options, **width, drop_path_rate=rate) for rate in (0.0, 0.3))
    rates = set_drop_path(model, 0.3)
    assert len(rates) == sum(options["depths"]) and rates[0] == 0.0 and rates[-1] == 0.3
    found = {path: module.p for path, module in model.named_modules() if type(module).__name__ == "DropPath"}
    wanted = {path: module.p for path, module in built.named_modules() if type(module).__name__ == "DropPath"}
    assert found == pytest.approx(wanted) and len(set(found.values())) == len(rates)
    if name.startswith("swin"):
        foreign = timm.create_model(name, **options, **width, drop_path_rate=0.1)
        set_drop_path(foreign, 0.3)
        theirs = timm.create_model(name, **options, **width, drop_path_rate=0.3)
        pairs = [(a.drop_prob, b.drop_prob) for a, b in zip(*map(_timm_drop_paths, (foreign, theirs)), strict=True)]
        assert all(a == pytest.approx(b) for a, b in pairs) and len(pairs) == 2 * (sum(options["depths"]) - 1)


def _timm_drop_paths(model):
    return [module for module in model.modules() if type(module).__name__ == "DropPath"]
