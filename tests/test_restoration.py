"""Tests of IPT and of the measures of restoration. Oracles: a transcription of the authors' code, and scipy."""

import dataclasses
import json
import math
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from agreement import EPS64, ROUNDINGS, distance, one_sentence
from interpreter import interpreting
from scipy.ndimage import gaussian_filter
from torch import Tensor, nn

from benchmarks.trainings import rows_of
from fastvit_triton import create_model, load_model, load_weights, save_weights
from fastvit_triton.kernels.settings import forcing
from fastvit_triton.models.ipt import ramp, starts
from fastvit_triton.train.recipes import RESTORATION
from fastvit_triton.train.restoration import add_rain, degrade, psnr, ssim

pytestmark = pytest.mark.fast

SMALL = dict(img_size=(12, 9), features=4, patch_size=3, depth=2, num_heads=3, mlp_ratio=2.0)


def ipt(tasks: tuple[str, ...] = ("x2",), **options: object) -> nn.Module:
    """A small IPT in float64 and evaluation mode, with random weights."""
    model = create_model("ipt_multitask", tasks=tasks, **SMALL | options).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_mean" not in name:
                parameter.normal_(0.0, 0.3 if parameter.dim() == 1 else parameter[0].numel() ** -0.5)
        for head in model.head:
            head[0].weight.mul_(0.01)  # of pixels up to 255; maps are then near 1, and no softmax is saturated
    return model


# The classes below are transcribed from huawei-noah/Pretrained-IPT, model/ipt.py and model/common.py: Copyright 2021
# Huawei Technologies Co., Ltd. and Facebook, Inc.; Licensed under the Apache License, Version 2.0,
# http://www.apache.org/licenses/LICENSE-2.0. Shortened: the options that the released models do not use are left out.


class TheirEncoderLayer(nn.Module):
    def __init__(self, d_model: int, nhead: int, dim_feedforward: int) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(d_model, nhead, bias=False)
        self.linear1, self.linear2 = nn.Linear(d_model, dim_feedforward), nn.Linear(dim_feedforward, d_model)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, src: Tensor) -> Tensor:
        src2 = self.norm1(src)
        src = src + self.self_attn(src2, src2, src2)[0]
        src2 = self.norm2(src)
        return src + self.linear2(F.relu(self.linear1(src2)))


class TheirDecoderLayer(nn.Module):
    def __init__(self, d_model: int, nhead: int, dim_feedforward: int) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(d_model, nhead, bias=False)
        self.multihead_attn = nn.MultiheadAttention(d_model, nhead, bias=False)
        self.linear1, self.linear2 = nn.Linear(d_model, dim_feedforward), nn.Linear(dim_feedforward, d_model)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(d_model) for _ in range(3))

    def forward(self, tgt: Tensor, memory: Tensor, query_pos: Tensor) -> Tensor:
        tgt2 = self.norm1(tgt)
        q = k = tgt2 + query_pos
        tgt = tgt + self.self_attn(q, k, value=tgt2)[0]
        tgt2 = self.norm2(tgt)
        tgt = tgt + self.multihead_attn(query=tgt2 + query_pos, key=memory, value=memory)[0]
        tgt2 = self.norm3(tgt)
        return tgt + self.linear2(F.relu(self.linear1(tgt2)))


class TheirPositions(nn.Module):
    def __init__(self, count: int, dim: int) -> None:
        super().__init__()
        self.pe = nn.Embedding(count, dim)
        self.register_buffer("position_ids", torch.arange(count).expand((1, -1)))


class TheirTransformer(nn.Module):
    def __init__(self, size: tuple[int, int], dim: int, heads: int, layers: int, hidden: int, queries: int) -> None:
        super().__init__()
        self.img_dim, self.patch_dim, self.embedding_dim = size, 3, dim
        count = size[0] * size[1] // 9
        self.linear_encoding = nn.Linear(dim, dim)
        self.mlp_head = nn.Sequential(
            nn.Linear(dim, hidden), nn.Dropout(0), nn.ReLU(), nn.Linear(hidden, dim), nn.Dropout(0)
        )
        self.query_embed = nn.Embedding(queries, dim * count)
        self.encoder, self.decoder = nn.Module(), nn.Module()
        self.encoder.layers = nn.ModuleList(TheirEncoderLayer(dim, heads, hidden) for _ in range(layers))
        self.decoder.layers = nn.ModuleList(TheirDecoderLayer(dim, heads, hidden) for _ in range(layers))
        self.position_encoding = TheirPositions(count, dim)

    def forward(self, x: Tensor, query_idx: int) -> Tensor:
        x = F.unfold(x, self.patch_dim, stride=self.patch_dim).transpose(1, 2).transpose(0, 1).contiguous()
        x = self.linear_encoding(x) + x
        query_embed = self.query_embed.weight[query_idx].view(-1, 1, self.embedding_dim).repeat(1, x.size(1), 1)
        pos = self.position_encoding.pe(self.position_encoding.position_ids).transpose(0, 1)
        x = x + pos
        for layer in self.encoder.layers:
            x = layer(x)
        memory = x
        for layer in self.decoder.layers:
            x = layer(x, memory, query_embed)
        x = self.mlp_head(x) + x
        x = x.transpose(0, 1).contiguous()
        return F.fold(x.transpose(1, 2).contiguous(), self.img_dim, self.patch_dim, stride=self.patch_dim)


class TheirBlock(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        convs = [nn.Conv2d(features, features, 5, padding=2) for _ in range(2)]
        self.body = nn.Sequential(convs[0], nn.ReLU(), convs[1])

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + x


class TheirShift(nn.Conv2d):
    def __init__(self, sign: int) -> None:
        super().__init__(3, 3, 1)
        self.weight.data = torch.eye(3).view(3, 3, 1, 1)
        self.bias.data = sign * 255 * torch.tensor((0.4488, 0.4371, 0.4040))


class TheirIpt(nn.Module):
    def __init__(self, scales: tuple[int, ...], n: int = 4) -> None:
        super().__init__()
        self.sub_mean, self.add_mean = TheirShift(-1), TheirShift(1)
        self.head = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3, n, 3, padding=1), TheirBlock(n), TheirBlock(n)) for _ in scales
        )
        self.body = TheirTransformer((12, 9), 9 * n, 3, 2, 18 * n, len(scales))
        self.tail = nn.ModuleList(
            nn.Sequential(nn.Sequential(*self.up(s, n)), nn.Conv2d(n, 3, 3, padding=1)) for s in scales
        )

    @staticmethod
    def up(scale: int, n: int) -> list[nn.Module]:
        m: list[nn.Module] = []
        if scale & (scale - 1) == 0:
            for _ in range(int(math.log2(scale))):
                m += [nn.Conv2d(n, 4 * n, 3, padding=1), nn.PixelShuffle(2)]
        else:
            m += [nn.Conv2d(n, 9 * n, 3, padding=1), nn.PixelShuffle(3)]
        return m

    def forward(self, x: Tensor, scale_idx: int) -> Tensor:
        x = self.head[scale_idx](self.sub_mean(x))
        res = self.body(x, scale_idx) + x
        return self.add_mean(self.tail[scale_idx](res))


TASKS = {"x2": 2, "x3": 3, "x4": 4, "denoise30": 1, "derain": 1}


def test_ipt_equals_the_authors_code(tmp_path):
    """Oracle: the transcription with the same weights, read from its state dict: outputs and all gradients of each
    task, in float64; our file is read again."""
    ours = ipt(tuple(TASKS))
    theirs = TheirIpt(tuple(TASKS.values())).double()
    save_weights(ours, tmp_path / "model.safetensors")
    theirs.load_state_dict(ours.state_dict() | {"body.position_encoding.position_ids": torch.arange(12)[None]})
    again = load_model(tmp_path / "model.safetensors")[0].double().eval()
    report = load_weights(again, {f"module.{key}": t for key, t in theirs.state_dict().items()})
    assert report.dropped == ("module.body.position_encoding.position_ids",)
    images = torch.rand(2, 3, 12, 9, dtype=torch.float64) * 255
    for i, (task, scale) in enumerate(TASKS.items()):
        again.select(task)
        y, want = again(images), theirs(images, i)
        assert y.shape == (2, 3, 12 * scale, 9 * scale) and torch.equal(y, again(images, task))
        assert distance(y, want) <= ROUNDINGS * EPS64
        weights = torch.rand_like(y)  # positive: sums that cancel lose digits
        (y * weights).sum().backward()
        (want * weights).sum().backward()
    wanted = {name: p.grad for name, p in theirs.named_parameters()}
    for name, parameter in again.named_parameters():
        assert ("_mean" in name) == (not parameter.requires_grad)
        if parameter.requires_grad:
            assert distance(parameter.grad, wanted[name]) <= ROUNDINGS * EPS64, name
    skipping = ipt(("x2", "denoise30"), skip=True)
    for last in (tail[1] for tail in skipping.tail):
        nn.init.zeros_(last.weight), nn.init.zeros_(last.bias)
    assert torch.equal(skipping(images, "denoise30"), images)
    assert torch.equal(skipping(images, "x2"), F.interpolate(images, scale_factor=2, mode="bicubic"))


def test_weights_may_be_given_to_a_call():
    """Oracle: the model with these weights, which are no parameters in torch.func.functional_call."""
    model = ipt(("x2",), depth=1)
    images = torch.rand(1, 3, 12, 9, dtype=torch.float64)
    doubled = {name: 2 * p.detach() for name, p in model.named_parameters() if "position_encoding" in name}
    y = torch.func.functional_call(model, doubled, (images,))
    model.load_state_dict(doubled, strict=False)
    assert torch.equal(y, model(images))


@pytest.mark.full
def test_kernels_give_the_same():
    """Oracle: the model in float64; kernels in the interpreter err at most twice as much as PyTorch in float32, and a
    few roundings: a ReLU turns one rounding into another gradient."""
    model = ipt(depth=1)
    images = torch.rand(2, 2, 3, 12, 9) * 255  # two calls
    weights = torch.randn(2, 2, 3, 24, 18)
    found: dict[str, dict[str, Tensor]] = {}
    for name in ("float64", "float32", "fused"):
        one = model if name == "float64" else create_model("ipt_x2", **SMALL | dict(depth=1)).eval()
        one.load_state_dict(model.state_dict())
        dtype = next(one.parameters()).dtype
        with interpreting() if name == "fused" else nullcontext(), forcing("fused"):
            y = torch.stack([one(some) for some in images.to(dtype)])
            (y * weights.to(dtype)).sum().backward()
        gradients = {key: p.grad.double() for key, p in one.named_parameters() if p.requires_grad}
        found[name] = gradients | {"output": y.detach().double()}
    for key, wanted in found["float64"].items():
        own = distance(found["float32"][key], wanted)
        assert distance(found["fused"][key], wanted) <= 2 * own + ROUNDINGS * torch.finfo(torch.float32).eps, key
    assert any(not torch.equal(found["fused"][key], found["float32"][key]) for key in found["fused"])


@pytest.mark.parametrize("task, size", [("x2", (12, 9)), ("x2", (30, 9)), ("denoise30", (31, 25)), ("x3", (13, 20))])
def test_tiles_are_joined(task, size):
    """Oracle: where a model gives what does not depend on the place in a tile, the tiles give it for the image; a
    pixel of one tile is that tile's; a single tile is the plain forward."""
    model = ipt((task,))
    image = torch.rand(3, *size, dtype=torch.float64) * 255
    scale = TASKS[task]
    if size == (12, 9):
        assert torch.equal(model.restore(image), model(image[None])[0].clamp(0, 255))
        return
    first = model(image[None, :, :12, :9])[0]
    restored = model.restore(image, overlap=4)
    assert restored.shape == (3, size[0] * scale, size[1] * scale)
    alone = [(*starts(side, tile, 4)[1:], tile)[0] * scale for side, tile in zip(size, (12, 9), strict=True)]
    found, wanted = (t[:, : alone[0], : alone[1]] for t in (restored, first.clamp(0, 255)))
    assert distance(found, wanted) <= ROUNDINGS * EPS64
    model.forward = lambda tiles, task: F.interpolate(tiles, scale_factor=scale, mode="nearest")
    for batch in (1, 5):
        for overlap in (0, 4):
            found = model.restore(image[None], overlap=overlap, batch=batch)[0]
            wanted = F.interpolate(image[None], scale_factor=scale, mode="nearest")[0]
            assert distance(found, wanted) <= ROUNDINGS * EPS64


def test_starts_and_weights_of_tiles():
    """Oracle: by hand."""
    assert starts(48, 48, 12) == [0] and starts(50, 48, 12) == [0, 2] and starts(120, 48, 12) == [0, 36, 72]
    assert ramp(6, 2).tolist() == [0.25, 0.75, 1, 1, 0.75, 0.25] and ramp(3, 0).tolist() == [0.5, 1, 0.5]


def ssim_of_scikit_image(x: np.ndarray, y: np.ndarray) -> float:
    """skimage.metrics.structural_similarity of [C, H, W] with gaussian_weights, sigma 1.5 and data_range 255, without
    sample covariances, as its code computes it."""
    means = []
    for a, b in zip(x, y, strict=True):
        ux, uy, uxx, uyy, uxy = (
            gaussian_filter(t, 1.5, truncate=3.5, mode="reflect") for t in (a, b, a * a, b * b, a * b)
        )
        c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
        a1, a2 = 2 * ux * uy + c1, 2 * (uxy - ux * uy) + c2
        b1, b2 = ux**2 + uy**2 + c1, uxx - ux * ux + uyy - uy * uy + c2
        means.append(((a1 * a2) / (b1 * b2))[5:-5, 5:-5].mean())
    return float(np.mean(means))


def test_psnr_and_ssim_equal_scikit_images():
    """Oracle: scikit-image's formulas with scipy's filter, in float64."""
    targets = torch.rand(3, 3, 20, 31, dtype=torch.float64) * 255
    images = (targets + torch.randn_like(targets) * torch.tensor([3.0, 20.0, 90.0])[:, None, None, None]).clamp(0, 255)
    x, y = images.numpy(), targets.numpy()
    wanted = [ssim_of_scikit_image(a, b) for a, b in zip(x, y, strict=True)]
    assert distance(ssim(images, targets), torch.tensor(wanted, dtype=torch.float64)) <= ROUNDINGS * EPS64 * 255
    errors = [10 * np.log10(255**2 / np.mean((a - b) ** 2)) for a, b in zip(x, y, strict=True)]
    assert distance(psnr(images, targets), torch.tensor(errors)) <= ROUNDINGS * EPS64
    assert psnr(targets, targets).isinf().all() and torch.equal(ssim(targets, targets), torch.ones(3).double())


def test_degraded_images():
    """Oracle: the standard deviation of the noise; Pillow's bicubic reduction, which has antialiasing, to a level."""
    from PIL import Image

    images = torch.full((1, 3, 100, 100), 128.0)
    noisy = degrade(images, "denoise30", torch.Generator().manual_seed(0))
    assert abs(float(noisy.std()) - 30) <= 5 * 30 / math.sqrt(2 * 30_000)
    image = torch.randint(256, (24, 36, 3), dtype=torch.uint8)
    small = degrade(image.movedim(-1, 0)[None].float(), "x3")[0].movedim(0, -1)
    pillows = np.asarray(Image.fromarray(image.numpy()).resize((12, 8), Image.BICUBIC)).astype(np.float32)
    assert small.shape == (8, 12, 3) and float((small - torch.from_numpy(pillows)).abs().max()) <= 1


def test_rain_is_bright_straight_and_of_one_direction():
    """Oracle: a streak by its equation, and what adding light cannot do; each image has a direction of its own."""
    seed = torch.Generator().manual_seed
    images = torch.randint(256, (4, 3, 40, 50), generator=seed(0)).float()
    rainy = degrade(images, "derain", seed(1))
    assert torch.equal(rainy, degrade(images, "derain", seed(1)))
    assert bool((rainy >= images).all()) and float(rainy.max()) <= 255 and torch.equal(rainy, rainy.round())
    assert torch.equal(add_rain(images, seed(1), drops=0.0), images)
    dark = torch.zeros(64, 1, 31, 31, dtype=torch.float64)
    slopes = []
    for one in add_rain(dark, seed(2), drops=1 / 961)[:, 0]:
        lit = one.nonzero().double()
        if not 15 <= len(lit) <= 40:  # none or several
            continue
        middle, spread = lit.mean(0), lit - lit.mean(0)
        length = 2 * float(spread.norm(dim=1).max())
        if bool(((middle > 8) & (middle < 22)).all()):  # within the image
            direction = torch.linalg.svd(spread).Vh[0]
            away = (spread - spread @ direction[:, None] * direction).norm(dim=1).max()
            assert away <= 2 and 13 <= length <= 17 and 60 <= one.max() <= 2 * 140  # two may lie in one
            slopes.append(
                math.degrees(math.atan2(float(direction[1] * direction[0].sign()), float(direction[0].abs())))
            )
    assert len(slopes) > 5 and max(map(abs, slopes)) <= 32 and max(slopes) - min(slopes) > 20


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: ipt().restore(torch.zeros(3, 8, 20)), "image is 8x20 pixels, smaller than a tile of 12x9"),
        (lambda: ipt().restore(torch.zeros(1, 20, 20)), r"shape \[1, 20, 20\]; give one image \[3, H, W\]"),
        (lambda: ipt().restore(torch.zeros(3, 20, 20), overlap=9), "overlap is 9; use 0 to 8"),
        (lambda: ipt().restore(torch.zeros(3, 20, 20), "x3"), "task is 'x3'; this model has x2"),
        (lambda: ipt()(torch.zeros(1, 3, 20, 20)), r"takes \[B, 3, 12, 9\]; use restore"),
        (lambda: ipt(("x2", "x2")), "each once"),
        (lambda: ipt(patch_size=5, num_heads=2), "not a multiple of patch_size 5"),
        (lambda: ipt(num_classes=3), "IPT has no classes"),
        (lambda: ipt().reset_classifier(2), "no classifier"),
        (lambda: create_model("ipt_x2", features_only=True, **SMALL), "no stages of features"),
        (lambda: degrade(torch.zeros(1, 3, 9, 9), "deblur"), "task is 'deblur'"),
        (lambda: add_rain(torch.zeros(1, 3, 9, 9), length=4), "drops is 0.004 and length 4; use a share"),
        (lambda: degrade(torch.zeros(1, 3, 9, 9), "x2"), "which 2 does not divide"),
        (lambda: ssim(torch.zeros(1, 3, 9, 9), torch.zeros(1, 3, 9, 9)), "at least 11 a side"),
    ],
)
def test_wrong_calls_raise_one_sentence(call, words):
    """Oracle: what was given and what would do, on one line."""
    with one_sentence(words):
        call()


def test_committed_figures_of_photographs_are_those_of_the_docs():
    """Oracle: the result file; restored photographs are nearer to the original than what was given."""
    root = Path(__file__).parent.parent
    (result,) = rows_of("photographs")
    page = (root / "docs" / "pixels.md").read_text()
    assert result["recipe"] == json.loads(json.dumps(dataclasses.asdict(RESTORATION)))
    assert len(set(result["photographs"].values())) == 2 and f"{result['steps']:,} steps" in page
    for scores in result["tasks"].values():
        assert scores["restored_psnr"] > scores["given_psnr"]
        assert all(f"{scores[name]:.2f}" in page for name in ("given_psnr", "restored_psnr"))
