"""Tests of models of pixels: iGPT and Image Transformer.

Oracles are transformers' ImageGPT, equations of tensor2tensor written out with dense masks in float64, and the
definition of a likelihood.
"""

import json
import math

import numpy as np
import pytest
import torch
from agreement import EPS64, ROUNDINGS, distance, normal, one_sentence
from budget import telling
from interpreter import interpreting
from recording import Recorder
from torch import Tensor, nn
from transformers import ImageGPTConfig, ImageGPTForCausalImageModeling

from fastvit_triton import create_model, load_model, load_weights, save_weights
from fastvit_triton.checkpoints import WeightsError
from fastvit_triton.checkpoints.reading import read
from fastvit_triton.kernels.settings import forcing
from fastvit_triton.models.igpt import colour_clusters, nearest
from fastvit_triton.models.image_transformer import Blocks1d, mixture_log_prob, mixture_sample
from fastvit_triton.models.pixel import KeyValues
from fastvit_triton.models.weights import publish
from fastvit_triton.train.fewshot import extract_features

pytestmark = pytest.mark.fast

SMALL = dict(img_size=(4, 6), n_colors=27, embed_dim=24, depth=3, num_heads=3)


def randomized(model: nn.Module) -> nn.Module:
    """The model in float64 and evaluation mode, with random parameters."""
    return normal(model, 0.4).double().eval()


def igpt(**options: object) -> nn.Module:
    """A small iGPT with random weights."""
    return randomized(create_model("igpt_small", **SMALL | options))


def oracle() -> nn.Module:
    """transformers' model of the same sizes."""
    config = ImageGPTConfig(
        vocab_size=28, n_positions=24, n_embd=24, n_layer=3, n_head=3, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return randomized(ImageGPTForCausalImageModeling(config))


def test_igpt_equals_transformers():
    """Oracle: transformers' logits, of the start and all colours but the last, and all gradients, in float64."""
    theirs, ours = oracle(), igpt()
    report = load_weights(ours, theirs.state_dict())
    assert report.family == "transformers ImageGPT" and not report.dropped
    codes = drawn(ours)
    y = ours(codes)
    want = theirs(torch.cat((torch.full((2, 1), 27), codes[:, :-1]), 1)).logits
    assert distance(y, want) <= ROUNDINGS * EPS64
    weights = torch.randn_like(y)
    (y * weights).sum().backward()
    (want * weights).sum().backward()
    found = {key: p.grad for key, p in ours.named_parameters()}
    theirs_by_name = {key.removeprefix("transformer."): p.grad for key, p in theirs.named_parameters()}
    assert found.keys() == theirs_by_name.keys()
    for key, gradient in found.items():
        wanted = theirs_by_name[key].mT if key.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) else None
        wanted = theirs_by_name[key] if wanted is None else wanted
        assert distance(gradient, wanted) <= ROUNDINGS * EPS64, key


def test_layouts_of_igpt_are_written_and_read(tmp_path):
    """Oracle: transformers' class takes the file strictly; OpenAI's variables, computed by its code's einsums."""
    model = igpt()
    save_weights(model, tmp_path / "hf.safetensors", layout="transformers")
    theirs = oracle()
    theirs.load_state_dict(read(tmp_path / "hf.safetensors", True)[0])
    codes = drawn(model)
    tokens = torch.cat((torch.full((2, 1), 27), codes[:, :-1]), 1)
    assert distance(model(codes), theirs(tokens).logits) <= ROUNDINGS * EPS64
    with pytest.raises(WeightsError, match="bias is not zero"):
        save_weights(model, tmp_path / "openai.safetensors", layout="openai")
    plain = igpt(bias=False)
    save_weights(plain, tmp_path / "openai.safetensors", layout="openai")
    state = read(tmp_path / "openai.safetensors", True)[0]
    assert {key for key in state if "/h" not in key} == {
        f"model/{key}" for key in ("wte", "wpe", "wtet", "sos", "ln_f/g")
    }
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    q = torch.einsum("bsf,hef->bhse", x, state["model/h1/attn/q_proj"])
    attn = plain.h[1].attn
    assert distance(attn.c_attn(x)[..., :24], q.transpose(1, 2).flatten(2)) <= ROUNDINGS * EPS64
    o = torch.einsum("bhse,hef->bsf", q, state["model/h1/attn/c_proj"])
    assert distance(attn.c_proj(q.transpose(1, 2).flatten(2)), o) <= ROUNDINGS * EPS64
    assert distance(plain.h[1].mlp.c_fc(x), x @ state["model/h1/mlp/c_fc/w"]) <= ROUNDINGS * EPS64
    again = igpt()  # with biases, which become zero
    extra = {"model/h0/attn/q_proj/adam_v": torch.zeros(3), "global_step": torch.zeros(())}
    report = load_weights(again, {**state, **extra})
    assert report.family == "OpenAI" and set(report.dropped) == extra.keys()
    assert torch.equal(again(codes), plain(codes))
    by_class = igpt(bias=False, num_classes=4)
    with pytest.raises(WeightsError, match="start for each class"):
        save_weights(by_class, tmp_path / "classes.safetensors", layout="openai")


def test_files_of_older_transformers_have_masks():
    """Oracle: releases before 4.31 stored the causal mask of each block."""
    masks = {
        f"transformer.h.{i}.attn.{key}": torch.ones(1, 1, 24, 24) for i in range(3) for key in ("bias", "masked_bias")
    }
    assert set(load_weights(igpt(), oracle().state_dict() | masks).dropped) == masks.keys()


def first_inputs(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The embeddings of the tokens of later calls, as leaves: of the start, and of the codes before each step."""
    embedding = model.wte if hasattr(model, "wte") else model.embed
    seen: list[Tensor] = []

    def embed(tokens: Tensor) -> Tensor:
        seen.append(type(embedding).forward(embedding, tokens).detach().requires_grad_())
        return seen[-1]

    monkeypatch.setattr(embedding, "forward", embed)
    return seen


LOCAL = dict(img_size=(4, 4), levels=5, embed_dim=24, depth=2, num_heads=3, mlp_dim=36, block_length=16)
RECTANGLES = dict(block_shape=(2, 3), flange=(1, 2))
DMOL = dict(mixtures=2, levels=256, pos_embed="learned", head_dim=16, block_length=4)
WIDE, LOW = dict(block_shape=(2, 4), flange=(0, 5)), dict(block_shape=(1, 3), flange=(3, 0))
LOCALS = {
    "2d_beside": WIDE,
    "2d_above": LOW,
    "1d": {},
    "short": dict(block_length=40),
    "ragged": dict(block_length=20),
    "2d": RECTANGLES,
    "dmol": DMOL,
}


def local(**options: object) -> nn.Module:
    """A small Image Transformer with random weights."""
    return randomized(create_model("image_transformer_cifar10", **LOCAL | options))


MODELS = {"igpt": igpt, "igpt_classes": lambda: igpt(num_classes=3)}
MODELS |= {name: lambda options=options: local(**options) for name, options in LOCALS.items()}


def drawn(model: nn.Module, count: int = 2) -> Tensor:
    """Random codes [count, N], or [count, N, 3] for mixtures."""
    config = model.config
    shape = (count, model.num_positions, *([3] if getattr(config, "mixtures", 0) else []))
    return torch.randint(getattr(config, "n_colors", 0) or config.levels, shape)


@pytest.mark.parametrize("name", MODELS)
def test_no_pixel_sees_a_later_one(name, monkeypatch):
    """Oracle: the gradient of the logits of step n by the embedding of the code of step m is 0 for m ≥ n, and not for
    the last code that it sees."""
    model = MODELS[name]()
    codes = drawn(model, 1)
    leaves = first_inputs(model, monkeypatch)
    logits = model(codes)
    starts = range(0, model.num_positions, getattr(model, "period", model.num_positions))
    for n in range(model.num_positions):
        (gradient,) = torch.autograd.grad(logits[0, n].sum(), leaves[0], retain_graph=True)
        seen = gradient[0].abs().sum(1)  # of the start and the codes of steps 0 … N − 2
        assert bool(seen[n] > 0) or (name != "igpt" and n in starts), n
        assert not bool(seen[n + 1 :].any()), n


@pytest.mark.parametrize(
    "name, prefix",
    [
        *(("igpt_classes", n) for n in (0, 1, 9, 24)),
        *(("1d", 0), ("1d", 37), ("short", 2), ("ragged", 21), ("2d", 0), ("2d", 24), ("dmol", 0), ("dmol", 6)),
    ],
)
def test_cache_equals_full_pass(name, prefix):
    """Oracle: the logits of one pass over the drawn image; draws are those of these logits."""
    model = MODELS[name]()
    classes = torch.tensor([2, 0]) if model.num_classes else None
    given = drawn(model, 1)[:, :prefix] if prefix else None
    seen: list[Tensor] = []
    draw = model.draw
    model.draw = lambda logits, *rest: (seen.append(logits), draw(logits, *rest))[1]
    codes = model.generate(
        2, prefix=given, classes=classes, temperature=0.7, generator=torch.Generator().manual_seed(1)
    )
    assert prefix == 0 or torch.equal(codes[:, :prefix], given.expand(2, *given.shape[1:]))
    full = model(codes, classes)
    assert len(seen) == model.num_positions - prefix
    for n, logits in enumerate(seen, prefix):
        assert distance(logits, full[:, n]) <= ROUNDINGS * EPS64
    assert classes is None or distance(full, model(codes, classes.flip(0))) > 0.01


def test_draws_follow_the_logits():
    """Oracle: probabilities within five standard errors; top_k=1 is the most likely code; temperature sharpens."""
    model = igpt()
    logits = torch.randn(1, 5).expand(20_000, 5)
    for temperature in (1.0, 0.5):
        p = (logits[0] / temperature).softmax(0)
        drawn = model.draw(logits, temperature, None, torch.Generator().manual_seed(0))
        found = drawn.bincount(minlength=5) / len(drawn)
        assert bool(((found - p).abs() <= 5 * (p * (1 - p) / len(drawn)).sqrt()).all())
    assert torch.equal(model.draw(logits[:9], 1.0, 1, None), logits[:9].argmax(1))
    assert set(model.draw(logits, 1.0, 2, None).tolist()) == set(logits[0].topk(2).indices.tolist())


def test_likelihoods_of_all_images_sum_to_one():
    """Oracle: the definition; 3 colours on 1 × 4 pixels are 81 images."""
    model = randomized(create_model("igpt_small", img_size=(1, 4), n_colors=3, embed_dim=8, depth=1, num_heads=2))
    images = torch.cartesian_prod(*[torch.arange(3)] * 4)
    probabilities = (-4 * model.nats(images).detach()).exp()
    assert abs(float(probabilities.sum()) - 1) <= 81 * EPS64
    assert torch.equal(model.bits_per_dim(images), model.nats(images) / math.log(2))


def test_clusters(tmp_path):
    """Oracle: three well separated colours are found; every pixel has the nearest colour; files of both libraries."""
    colours = torch.tensor([[-0.9, 0.5, 0.0], [0.8, 0.8, 0.8], [0.0, -0.7, 0.3]])
    numbers = torch.randint(3, (4, 8, 8))
    images = (colours[numbers] + 0.02 * torch.randn(4, 8, 8, 3)).movedim(-1, 1)
    found = colour_clusters(images, 3, seed=5)
    at = torch.cdist(colours, found).argmin(1)
    assert sorted(at.tolist()) == [0, 1, 2] and float((found[at] - colours).abs().max()) < 0.02
    means = torch.stack([images.movedim(1, -1)[numbers == i].mean(0) for i in range(3)])
    assert distance(found[at], means) <= ROUNDINGS * torch.finfo(torch.float32).eps
    pixels = torch.randn(50, 3)
    assert torch.equal(nearest(pixels, found), torch.cdist(pixels, found).argmin(1))
    model = create_model("igpt_small", **SMALL | dict(n_colors=3))
    np.save(tmp_path / "kmeans_centers.npy", found.numpy())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"clusters": found.tolist()}))
    for name in ("kmeans_centers.npy", "preprocessor_config.json"):
        model.set_clusters(torch.zeros(3, 3))
        model.set_clusters(tmp_path / name)
        assert torch.equal(model.clusters, found)
    codes = drawn(model)
    assert torch.equal(model.encode(model.decode(codes)), codes)
    # half precision tells these colours apart
    fine = create_model("igpt_small", **SMALL | dict(n_colors=64)).bfloat16()
    codes = drawn(fine)
    assert torch.equal(fine.encode(fine.decode(codes)), codes)
    with pytest.raises(ValueError, match="count is 3, and the images have 1 different pixels; use 1 to that many"):
        colour_clusters(torch.zeros(1, 3, 4, 4), 3)


def test_probe_features_are_those_of_the_middle_block():
    """Oracle: the normalised input of block 1 of 3 of transformers' model, averaged over its tokens (section 2.3)."""
    theirs, ours = oracle(), igpt()
    load_weights(ours, theirs.state_dict())
    codes = drawn(ours)
    tokens = torch.cat((torch.full((2, 1), 27), codes[:, :-1]), 1)
    hidden = theirs(tokens, output_hidden_states=True).hidden_states
    wanted = theirs.transformer.h[1].ln_1(hidden[1]).mean(1)
    assert distance(ours.probe_features(codes), wanted) <= ROUNDINGS * EPS64
    features, targets = extract_features(ours, [(ours.decode(codes), torch.arange(2))], ours.probe_features)
    assert distance(features, wanted) <= ROUNDINGS * EPS64 and targets.tolist() == [0, 1]
    maps = ours.forward_intermediates(codes, [0], intermediates_only=True)
    assert distance(maps[0].flatten(2).mT, hidden[1]) <= ROUNDINGS * EPS64
    backbone = create_model("igpt_small", **SMALL, features_only=True, out_indices=(0, 1))
    assert [y.shape for y in backbone(ours.decode(codes).float())] == [(2, 24, 4, 6)] * 2


def test_folders_of_transformers(tmp_path):
    """Oracle: transformers' model, and the colours of its image processor; its own classes read what we write."""
    from transformers import ImageGPTImageProcessor

    config = ImageGPTConfig(vocab_size=28, n_positions=16, n_embd=24, n_layer=2, n_head=3)
    theirs = ImageGPTForCausalImageModeling(config).eval()
    colours = torch.rand(27, 3) * 2 - 1
    theirs.save_pretrained(tmp_path / "theirs")
    ImageGPTImageProcessor(clusters=colours.tolist(), size=dict(height=4, width=4)).save_pretrained(tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs")[0].eval()
    assert ours.variant == "igpt_small" and torch.equal(ours.clusters, colours)
    again = create_model(f"local-dir:{tmp_path / 'theirs'}", pretrained=True)
    assert torch.equal(again.clusters, colours) and "clusters" not in again.pretrained_cfg
    save_weights(again, tmp_path / "file.safetensors")
    assert torch.equal(load_model(tmp_path / "file.safetensors")[0].clusters, colours)
    publish.save_pretrained(ours, tmp_path / "ours", layout="transformers")
    found = ImageGPTForCausalImageModeling.from_pretrained(tmp_path / "ours").eval()
    codes = torch.randint(27, (2, 16))
    want = theirs(torch.cat((torch.full((2, 1), 27), codes[:, :-1]), 1)).logits
    assert distance(ours(codes), want) <= ROUNDINGS * torch.finfo(torch.float32).eps
    assert torch.equal(found(torch.cat((torch.full((2, 1), 27), codes[:, :-1]), 1)).logits, want)
    processor = ImageGPTImageProcessor.from_pretrained(tmp_path / "ours")
    image = (ours.decode(codes)[0].movedim(0, -1) + 1) * 127.5
    pixels = image.round().byte().numpy()
    assert (
        processor(pixels, return_tensors="pt", input_data_format="channels_last")["input_ids"][0].tolist()
        == codes[0].tolist()
    )
    (tmp_path / "theirs" / "config.json").write_text(json.dumps({"model_type": "imagegpt", "n_inner": 5}))
    with pytest.raises(WeightsError, match="n_inner is 5; our iGPT has no such models"):
        load_model(tmp_path / "theirs")


@pytest.mark.parametrize(
    "name, options", [("igpt_small", SMALL | dict(depth=1)), ("image_transformer_cifar10", LOCAL | dict(depth=1))]
)
def test_kernels_give_the_same(name, options):
    """Oracle: the model in float64; kernels in the interpreter, logits and gradients."""
    model = randomized(create_model(name, **options))
    codes = drawn(model)
    fused = create_model(name, **options).eval()
    fused.load_state_dict(model.state_dict())
    weights = torch.randn_like(model(codes)).float()
    (model(codes) * weights).sum().backward()
    with interpreting(), forcing("fused"):
        y = fused(codes)
        (y * weights).sum().backward()
    eps = torch.finfo(torch.float32).eps
    assert distance(y.double(), model(codes)) <= ROUNDINGS * eps
    for (name, ours), theirs in zip(fused.named_parameters(), model.parameters(), strict=True):
        assert distance(ours.grad.double(), theirs.grad) <= ROUNDINGS * eps, name


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name, options", [("igpt_small", SMALL | dict(depth=1)), ("image_transformer_cifar10", LOCAL | dict(depth=1))]
)
def test_kernels_give_the_same_with_a_cache(name, options):
    """Oracle: a block in float64 without cache, over all positions; and our operators without cache."""
    model = randomized(create_model(name, **options))
    fused = create_model(name, **options).eval()
    fused.load_state_dict(model.state_dict())
    (block,), (truth,) = fused.block_list(), model.block_list()
    x = torch.randn(2, model.num_positions, model.num_features, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = truth(x.double())
        with interpreting(), forcing("fused"), Recorder() as whole:
            block(x)
        for repeat in range(3):  # later calls would replay
            cache, parts = KeyValues(model.num_positions), []
            with interpreting(), forcing("fused"), Recorder() as run:
                for part in (x[:, :5], x[:, 5:6], x[:, 6:7]):
                    parts.append(block(part, cache))
            got = torch.cat(parts, 1).double()
            assert distance(got, want[:, :7]) <= ROUNDINGS * torch.finfo(torch.float32).eps, repeat
            rest = [[name for name in recorder.ours if name != "attention_fwd"] for recorder in (run, whole)]
            assert rest[0] == 3 * rest[1] and len(rest[1]) > 3
            assert run.ours.count("attention_fwd") >= 3  # blocks of the whole sequence have one each


def timing(rows: int, columns: int, D: int) -> Tensor:
    """tensor2tensor's add_timing_signal_nd, [rows, columns, D], as it is written there."""
    scales = D // 4
    increment = math.log(1e4) / (scales - 1)
    inverse = torch.tensor([math.exp(-i * increment) for i in range(scales)], dtype=torch.float64)
    signal = torch.zeros(rows, columns, D, dtype=torch.float64)
    for dim, length in enumerate((rows, columns)):
        scaled = torch.arange(length, dtype=torch.float64)[:, None] * inverse
        part = torch.nn.functional.pad(
            torch.cat((scaled.sin(), scaled.cos()), 1), (dim * 2 * scales, D - (dim + 1) * 2 * scales)
        )
        signal += part[:, None] if dim == 0 else part[None]
    return signal


def visible(config: object) -> Tensor:
    """[N, N]: which tokens each token of the map sees, by the coordinates of both."""
    rows, columns = config.grid
    at = torch.arange(rows * columns)
    if config.block_shape is None:
        length = len(at) if len(at) < 2 * config.block_length else config.block_length
        distance_of_blocks = at[:, None] // length - at // length
        return (distance_of_blocks >= 0) & (distance_of_blocks <= 1) & (at <= at[:, None])
    (h, w), (above, beside) = config.block_shape, config.flange
    y, x = at // columns, at % columns
    top, left = (y // h * h)[:, None], (x // w * w)[:, None]  # of each query's rectangle
    inside = (y >= top) & (y < top + h) & (x >= left) & (x < left + w) & (at <= at[:, None])
    over = (y >= top - above) & (y < top) & (x >= left - beside) & (x < left + w + beside)
    return inside | over | ((y >= top) & (y < top + h) & (x >= left - beside) & (x < left))


def transcribed(model: nn.Module, codes: Tensor) -> Tensor:
    """The logits [B, N, K] of the Image Transformer in the order of rows: tensor2tensor's equations with dense maps."""
    config, state = model.config, model.state_dict()
    rows, columns = config.grid
    D, H, N = config.embed_dim, config.num_heads, rows * columns
    if config.mixtures:
        pixels = codes.double() / 127.5 - 1
        x = (pixels @ state["embed.weight"].T + state["embed.bias"]).relu()
        signal = (state["rows.weight"][:, None] + state["columns.weight"]) * D**0.5
    else:
        channel = torch.arange(N) % 3
        x = state["embed.weight"][codes + config.levels * channel] * D**0.5
        signal = timing(rows, columns, D)
    if config.block_shape is None:
        x = torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1)
    else:
        h, w = config.block_shape
        tiles = x.view(len(x), rows // h, h, columns // w, w, D).transpose(2, 3).flatten(3, 4)
        tiles = torch.cat((torch.zeros_like(tiles[:, :, :, :1]), tiles[:, :, :, :-1]), 3)
        x = tiles.unflatten(3, (h, w)).transpose(2, 3).reshape(len(x), N, D)
    x = x + signal.flatten(0, 1)
    mask = torch.where(visible(config), 0.0, -math.inf)
    for i in range(config.depth):
        part = {key.removeprefix(f"layers.{i}."): t for key, t in state.items() if key.startswith(f"layers.{i}.")}
        q, k, v = ((x @ part[f"attn.w{name}.weight"].T).unflatten(-1, (H, -1)).transpose(1, 2) for name in "qkv")
        maps = (q * q.shape[-1] ** -0.5 @ k.mT + mask).softmax(-1)
        y = x + (maps @ v).transpose(1, 2).flatten(2) @ part["attn.wo.weight"].T
        x = normed(y, part["norm1.weight"], part["norm1.bias"])
        hidden = (x @ part["mlp.fc1.weight"].T + part["mlp.fc1.bias"]).relu()
        x = normed(
            x + hidden @ part["mlp.fc2.weight"].T + part["mlp.fc2.bias"], part["norm2.weight"], part["norm2.bias"]
        )
    return x @ state["head.weight"].T + state.get("head.bias", 0.0)


def normed(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """tensor2tensor's layer_norm_compute."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * scale + bias


@pytest.mark.parametrize("name", LOCALS)
def test_image_transformer_equals_its_equations(name, tmp_path):
    """Oracle: tensor2tensor's equations with dense maps of all tokens, in float64; of a model read from its file."""
    save_weights(local(**LOCALS[name]), tmp_path / "model.safetensors")
    model = load_model(tmp_path / "model.safetensors")[0].double().eval()
    codes = drawn(model)
    wanted = transcribed(model, codes)
    order = torch.arange(model.num_positions) if model.order is None else model.order
    assert (order.tolist() == sorted(order.tolist())) == (not name.startswith("2d_b") and name != "2d")
    assert distance(model(codes), wanted[:, order]) <= ROUNDINGS * EPS64
    if not model.config.mixtures:
        expected = nn.functional.cross_entropy(wanted.mT, codes, reduction="none").mean(1)
        assert distance(model.nats(codes), expected) <= ROUNDINGS * EPS64
    assert torch.equal(model.encode(model.decode(codes)), codes)


def test_gradients_of_rectangles_repeat():
    """Oracle: the same bits in three runs of two threads; sums over indices that repeat differ."""
    threads = torch.get_num_threads()
    options = dict(block_shape=(16, 16), img_size=32, embed_dim=8, num_heads=2, depth=1, mlp_dim=8, drop_rate=0.0)
    model = create_model("image_transformer_cifar10_2d", **options)
    images = torch.rand(1, 3, 32, 32)
    found = []
    try:
        torch.set_num_threads(2)
        for _ in range(3):
            model.zero_grad()
            model.nats(images).sum().backward()
            found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0], gradient) for gradient in found)


@pytest.mark.parametrize("tokens, length", [(1, 256), (255, 256), (700, 256), (768, 256), (512, 256)])
def test_local_attention_equals_a_dense_mask(tokens, length):
    """Oracle: a dense map of all tokens, restricted to the own block and the one before, as in the paper's 3.3."""
    q, k, v = (torch.randn(1, 2, tokens, 4, dtype=torch.float64) for _ in range(3))
    at = torch.arange(tokens)
    seen = (at <= at[:, None]) & (at[:, None] // length - at // length <= 1)
    dense = (q @ k.mT / 2 + torch.where(seen, 0.0, -math.inf)).softmax(-1) @ v
    assert distance(Blocks1d(length)(q, k, v), dense) <= ROUNDINGS * EPS64


def logistic_loss(params: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """tensor2tensor's discretized_mix_logistic_loss in numpy: params [n, 10·M], labels [n, 3] in [−1, 1] → [n]."""
    M = params.shape[1] // 10
    sigmoid, softplus = (lambda t: (1 + np.tanh(t / 2)) / 2), (lambda t: np.logaddexp(0, t))
    logits, rest = params[:, :M], params[:, M:].reshape(-1, 3, M, 3)
    locs, log_scales, coeffs = rest[:, 0], np.maximum(rest[:, 1], -7.0), np.tanh(rest[:, 2])
    x = np.repeat(labels[:, None], M, 1)
    means = locs.copy()
    means[..., 1] += coeffs[..., 0] * x[..., 0]
    means[..., 2] += coeffs[..., 1] * x[..., 0] + coeffs[..., 2] * x[..., 1]
    inv, centred = np.exp(-log_scales), x - means
    plus, minus, mid = inv * (centred + 1 / 255), inv * (centred - 1 / 255), inv * centred
    event = np.maximum(sigmoid(plus) - sigmoid(minus), 1e-12)
    approx = mid - log_scales - 2 * softplus(mid) - np.log(127.5)
    inner = np.where(event > 1e-5, np.log(event), approx)
    log_probs = np.where(x < -0.999, plus - softplus(plus), np.where(x > 0.999, -softplus(minus), inner)).sum(-1)
    log_probs = log_probs + logits - np.logaddexp.reduce(logits, 1, keepdims=True)
    return -np.logaddexp.reduce(log_probs, 1)


def test_mixture_equals_tensor2tensors_and_sums_to_one():
    """Oracle: its loss in numpy, at both ends and for improbable pixels; the sum over all levels of the last channels
    is the probability of the first, by the logistic's distribution function, and sums to one."""
    params = torch.randn(200, 30, dtype=torch.float64) * 3
    pixels = torch.randint(256, (200, 3))
    pixels[::5] = torch.tensor([0, 255, 0])
    values = pixels.double() / 127.5 - 1
    found = -mixture_log_prob(params, values)
    wanted = torch.from_numpy(logistic_loss(params.numpy(), values.numpy()))
    lost = EPS64 / 1e-5  # a level's probability is a difference of distribution functions, of at least 1e-5
    assert distance(found, wanted) <= lost
    wide = torch.randn(20, dtype=torch.float64) * 0.5
    wide[8:14] = 0.3  # log-scales: every level has a probability above 1e-5
    levels = torch.arange(256, dtype=torch.float64) / 127.5 - 1
    others = torch.cartesian_prod(levels, levels)
    weights, means = wide[:2].softmax(0), wide[2:8].view(2, 3)[:, 0]
    edges = torch.cat((torch.tensor([-math.inf]), levels[:-1] + 1 / 255, torch.tensor([math.inf])))
    cdf = ((edges[:, None] - means) * math.exp(-0.3)).sigmoid()
    marginal = ((cdf[1:] - cdf[:-1]) * weights).sum(1)
    for level in (0, 100, 255):
        pixels = torch.cat((levels[level].expand(len(others), 1), others), 1)
        total = mixture_log_prob(wide.expand(len(others), -1), pixels).exp().sum()
        assert abs(float(total / marginal[level]) - 1) <= lost


def test_mixture_is_sampled_by_its_probabilities():
    """Oracle: means of each channel and their products within five standard errors, of a narrow mixture whose moments
    are known: x₁ has mean μ₁ + tanh(a) x₀."""
    params = torch.zeros(1, 10, dtype=torch.float64)
    params[0, 1:4] = torch.tensor([0.2, -0.1, 0.1])
    params[0, 4:7] = math.log(0.03)
    params[0, 7:10] = torch.tensor([0.9, -0.6, 0.4])
    pixels = mixture_sample(params.expand(40_000, 10), generator=torch.Generator().manual_seed(0))
    a, b, c = params[0, 7:10].tanh().tolist()
    spread = 0.03 * math.pi / math.sqrt(3)
    means = [0.2, -0.1 + a * 0.2, 0.1 + b * 0.2 + c * (-0.1 + a * 0.2)]
    variances = [spread**2, spread**2 * (1 + a**2), spread**2 * (1 + (b + c * a) ** 2 + c**2)]
    for channel, (mean, variance) in enumerate(zip(means, variances, strict=True)):
        assert abs(float(pixels[:, channel].mean()) - mean) <= 5 * math.sqrt(variance / 40_000)
        assert abs(float(pixels[:, channel].var()) / variance - 1) <= 5 * math.sqrt(3.2 / 40_000)  # kurtosis 4.2
    model = local(**DMOL)
    codes = drawn(model)
    half = local(**DMOL).bfloat16()
    assert torch.equal(half.encode(half.decode(codes)), codes)
    logits = torch.randn(2, 16, 20)
    assert torch.equal(half.losses(logits, codes), model.losses(logits, codes))
    codes = model.generate(2, generator=torch.Generator().manual_seed(0))
    assert codes.shape == (2, 16, 3) and 0 <= int(codes.min()) and int(codes.max()) <= 255 and len(codes.unique()) > 20


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda m: m.generate(prefix=torch.zeros(1, 25, dtype=torch.long)), "prefix has 25 positions; .* has 24$"),
        (lambda m: m.generate(0), "count is 0"),
        (lambda m: m.generate(temperature=0.0), "temperature 0.0"),
        (lambda m: m.generate(top_k=0), "top_k 0"),
        (lambda m: m.generate(2, classes=torch.zeros(2, dtype=torch.long)), "create it with num_classes"),
        (lambda m: m(torch.zeros(1, 9, dtype=torch.long)), r"codes have shape \[1, 9\]; this model takes \[B, 24\]"),
        (lambda m: m(torch.zeros(1, 3, 8, 8)), r"shape \[1, 3, 8, 8\]; this model takes \[B, 3, 4, 6\]"),
        (lambda m: m.set_clusters(torch.zeros(2, 3)), r"shape \[2, 3\]; this model takes \[27, 3\]"),
        (lambda m: m.set_clusters(torch.full((27, 3), math.nan)), "not finite"),
        (lambda m: m.set_clusters("no.npy"), "no.npy holds no colours"),
        (lambda m: m.set_clusters("no.json"), "no.json holds no colours"),
        (lambda m: m.reset_classifier(3), "has no classifier"),
        (lambda m: m.probe_features(drawn(m), 3), "block is 3; the model has 3 blocks, so use 0 to 2"),
        (
            lambda m: local(**RECTANGLES).generate(prefix=torch.zeros(1, 6, dtype=torch.long)),
            "give whole rows of blocks",
        ),
        (lambda m: local(block_shape=(3, 3)), r"block_shape \(3, 3\) does not divide the \(4, 12\) tokens"),
        (lambda m: local(mixtures=2, in_chans=1), "mixtures of logistics are of pixels of 3 channels"),
        (lambda m: local(**DMOL).generate(top_k=3), "leave it out"),
        (lambda m: local(pos_embed="sines"), "pos_embed is 'sines'"),
        (lambda m: create_model("igpt_small", num_heads=7), "embed_dim 512 is not a multiple of num_heads 7"),
        (lambda m: igpt(num_classes=2).nats(drawn(m)), r"give classes, \[B\] integers below 2"),
        (lambda m: igpt(num_classes=2).generate(2, classes=torch.zeros(3)), "one for each of the 2 images"),
    ],
)
def test_wrong_calls_raise_one_sentence(call, words):
    """Oracle: what was given and what would do, on one line."""
    with one_sentence(words):
        call(igpt())


@pytest.mark.parametrize("build", [igpt, local], ids=["igpt", "image_transformer"])
def test_every_call_checks_its_classes(build):
    """Oracle: one sentence, whichever call is given classes that the model does not depend on, or lacks those that it
    does; features are then those of class 0."""
    images, classes = drawn(build()), torch.tensor([0, 1])
    for name in ("forward", "forward_features", "nats", "bits_per_dim"):
        with pytest.raises(ValueError, match="classes are given, but the model does not depend on them; create it"):
            getattr(build(), name)(images, classes)
    with pytest.raises(ValueError, match="classes are given, but the model does not depend on them; create it"):
        build().generate(2, classes=classes)
    model = build(num_classes=2)
    for call in (lambda: model.nats(images), lambda: model.bits_per_dim(images), lambda: model.generate(2)):
        with pytest.raises(ValueError, match=r"the model depends on the class; give classes, \[B\] integers below 2"):
            call()
    with torch.no_grad():
        first, second = model(images, torch.zeros(2, dtype=torch.long)), model(images, torch.ones(2, dtype=torch.long))
        assert torch.equal(model(images), telling(first)) and not torch.equal(first, second)
        assert torch.equal(model.forward_head(model.forward_intermediates(images)[0]), first)
