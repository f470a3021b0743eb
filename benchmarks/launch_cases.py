"""Cases of the compile report: the ops of ViT-Ti/S/B/L/H at batch 256, and shapes of other model families.

Tensors are never written, so a batch of 256 takes address space but no memory.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from fastvit_triton import (
    add_layer_norm,
    add_rms_norm,
    attention,
    attention_qkv,
    batch_norm_act,
    deformable_attention,
    depthwise,
    layer_norm,
    linear,
    mlp,
    patch_embed,
    rms_norm,
    varlen_attention,
    window_attention,
)
from fastvit_triton.convert.conversion import attach
from fastvit_triton.kernels.argument import Norm
from fastvit_triton.kernels.settings import forcing
from fastvit_triton.layers.attention import Attention
from fastvit_triton.layers.block import Block, Blocks
from fastvit_triton.layers.mlp import Mlp

BATCH = 256
# model → channels, heads, patch side, tokens including the class token
MODELS = {
    "ViT-Ti/16": (192, 3, 16, 197),
    "ViT-S/16": (384, 6, 16, 197),
    "ViT-B/16": (768, 12, 16, 197),
    "ViT-L/16": (1024, 16, 16, 197),
    "ViT-H/14": (1280, 16, 14, 257),
}


@dataclass(frozen=True)
class Case:
    """One call of a public function; `build` returns (function, arguments, options)."""

    name: str
    op: str
    dtype: str
    build: Callable[[], tuple[Callable, tuple, dict]]
    precision: str = "highest"


def cases(quick: bool = False) -> list[Case]:
    """All cases; with `quick`, only ViT-B in bfloat16, one long attention and one MLP in a single launch."""
    if quick:
        names = ("N=577 D=64", "recompute, D=128", "ViT-B/16, LayerScale and drop path")
        other = [c for c in (*_attentions(), *_linears(), *_blocks()) if c.name in names and c.dtype == "bfloat16"]
        return [*_vit("ViT-B/16", "bfloat16"), *other]
    all_cases = [case for model in MODELS for case in _vit(model, "bfloat16")]
    all_cases += [
        *_attentions(),
        *_towers(),
        *_windows(),
        *_linears(),
        *_convolutions(),
        *_samplings(),
        *_maps(),
        *_blocks(),
    ]
    all_cases += [*_vit("ViT-B/16", "float16"), *_vit("ViT-B/16", "float32"), *_vit("ViT-B/16", "float32", "high")]
    return all_cases


def _maker(dtype: str) -> Callable[..., torch.Tensor]:
    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=getattr(torch, dtype)).requires_grad_()

    return empty


def _vit(model: str, dtype: str, precision: str = "highest") -> Iterator[Case]:
    """The ops of one block and the patch embedding."""
    (D, H, P, N), new = MODELS[model], _maker(dtype)

    def norm():
        return new(D), new(D), 1e-6

    def residual_mlp():
        x = new(BATCH, N, D)
        return mlp, (x, (new(4 * D, D), new(4 * D)), (new(D, 4 * D), new(D))), dict(norm=norm(), residual=x)

    def norm_and_stats():
        return dict(norm=norm(), stats=torch.empty(BATCH * N, D // 128, 2))

    def stem():
        image = new(BATCH, 3, 224, 224).detach()
        return patch_embed, (image, new(D, 3, P, P), new(D), new(1, N, D), new(1, 1, D)), {}

    parts = {
        "qkv": lambda: (linear, (new(BATCH, N, D), new(3 * D, D), new(3 * D)), dict(norm=norm())),
        "qkv, given statistics": lambda: (linear, (new(BATCH, N, D), new(3 * D, D), new(3 * D)), norm_and_stats()),
        "attention": lambda: (attention_qkv, (new(BATCH, N, 3 * D), H), {}),
        "proj": lambda: (linear, (new(BATCH, N, D), new(D, D), new(D)), dict(residual=new(BATCH, N, D))),
        "mlp": residual_mlp,
        "layer_norm": lambda: (layer_norm, (new(BATCH, N, D), *norm()), {}),
        "add_layer_norm": lambda: (add_layer_norm, (new(BATCH, N, D), new(BATCH, N, D), *norm()), {}),
        "patch_embed": stem,
    }
    name = model if precision == "highest" else f"{model} {precision}"
    yield from (Case(name, op, dtype, build, precision) for op, build in parts.items())


def _blocks() -> Iterator[Case]:
    """Two consecutive blocks, which hand on row statistics, or three mixed ones, which lend their outputs."""

    def build(
        model: str, dtype: str, autocast: bool, way: str = "fused", **options: float
    ) -> tuple[Callable, tuple, dict]:
        D, H, _, N = MODELS[model]
        depth = 3 if way == "mixed" else 2
        blocks = Blocks(*(Block(D, Attention(D, H), Mlp(D, 4 * D), **options) for _ in range(depth)))
        attach(blocks)
        blocks.to(getattr(torch, dtype))

        def call(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast), forcing(way):
                return blocks(x)

        return call, (_maker(dtype)(BATCH, N, D), *blocks.parameters()), {}

    scaled = dict(init_values=1e-5, drop_path=0.1)
    for model in ("ViT-Ti/16", "ViT-B/16"):
        yield Case(model, "blocks", "bfloat16", partial(build, model, "bfloat16", False))
        yield Case(f"{model}, mixed", "blocks", "bfloat16", partial(build, model, "bfloat16", False, "mixed"))
    for dtype, autocast, kind in (("bfloat16", False, ""), ("float16", False, ""), ("float32", True, ", autocast")):
        for options, ends in (({}, ""), (scaled, ", LayerScale and drop path")):
            if ends or autocast or dtype == "float16":
                name = f"ViT-B/16{ends}{kind}"
                yield Case(name, "blocks", dtype, partial(build, "ViT-B/16", dtype, autocast, **options))
            if dtype != "float16" and (ends or autocast):
                build_mixed = partial(build, "ViT-B/16", dtype, autocast, "mixed", **options)
                yield Case(f"ViT-B/16{ends}{kind}, mixed", "blocks", dtype, build_mixed)


def _attentions() -> Iterator[Case]:
    """Longer sequences, other head dimensions, bias, padding, packed sequences."""
    new = _maker("bfloat16")
    packed = {
        "N=577 D=64": (64, 577, 12, 64),
        "N=1025 D=64": (32, 1025, 16, 64),
        "N=4097 D=64": (4, 4097, 16, 64),
        "N=197 D=32": (256, 197, 12, 32),
        "N=197 D=48": (256, 197, 8, 48),
        "N=729 D=72": (64, 729, 16, 72),
        "N=257 D=88": (64, 257, 16, 88),
        "N=257 D=96": (64, 257, 16, 96),
        "N=257 D=104": (64, 257, 16, 104),
        "N=257 D=128": (64, 257, 16, 128),
        "N=257 D=256": (64, 257, 8, 256),
    }
    for name, shape in packed.items():
        yield Case(name, "attention", "bfloat16", partial(_packed, new, *shape))

    def heads(B, Nq, Nk, D, Dv, **options):
        q, k, v = (new(B, n, 12, d).transpose(1, 2) for n, d in ((Nq, D), (Nk, D), (Nk, Dv)))
        return attention, (q, k, v), options

    def axes(B, Nq, *lengths):
        return tuple(new(B, 12, Nq, n) for n in lengths)

    other = {
        "bias N=197 D=64": lambda: heads(256, 197, 197, 64, 64, bias=new(1, 12, 197, 197)),
        "bias N=257 D=80": lambda: heads(64, 257, 257, 80, 80, bias=new(1, 12, 257, 257)),
        "windows N=49 D=32": lambda: heads(4096, 49, 49, 32, 32, bias=new(64, 12, 49, 49)),
        "mask N=197 D=64": lambda: heads(256, 197, 197, 64, 64, bias=torch.empty(256, 1, 1, 197, dtype=torch.bool)),
        "padded N=256 D=64": lambda: heads(256, 256, 256, 64, 64, kv_lens=torch.full((256,), 256, dtype=torch.int32)),
        "class token D=64": lambda: heads(256, 1, 197, 64, 64),
        "levit D=16 Dv=32": lambda: heads(256, 49, 196, 16, 32, bias=new(1, 12, 49, 196)),
        "axes 64x64 D=64": lambda: heads(4, 4096, 4096, 64, 64, axis_bias=axes(4, 4096, 64, 64)),
        "axes 14x14 D=64": lambda: heads(100, 196, 196, 64, 64, axis_bias=axes(100, 196, 14, 14)),
        "axes 14x14 D=80": lambda: heads(100, 196, 196, 80, 80, axis_bias=axes(100, 196, 14, 14)),
        "axes 7x7 D=96": lambda: heads(256, 196, 49, 96, 96, axis_bias=axes(256, 196, 7, 7)),
    }
    other |= {
        "causal N=1024 D=64": lambda: heads(32, 1024, 1024, 64, 64, causal=True),
        "causal N=577 D=80": lambda: heads(64, 577, 577, 80, 80, causal=True),
        "causal Nq=256 Nk=512 D=128": lambda: heads(64, 256, 512, 128, 128, causal=True),
        "causal bias N=257 D=64": lambda: heads(64, 257, 257, 64, 64, bias=new(1, 12, 257, 257), causal=True),
        "causal N=77 D=64": lambda: heads(256, 77, 77, 64, 64, causal=True),
    }
    for name, build in other.items():
        yield Case(name, "attention", "bfloat16", build)

    def varlen():
        tokens = (new(BATCH * 197, 12, 64) for _ in range(3))
        ends = 197 * torch.arange(BATCH + 1, dtype=torch.int32)  # lengths are checked, so these values are real
        return varlen_attention, (*tokens, ends, 256), {}

    def with_rope(D: int, norms: bool, pairs: bool | int):
        norm = (new(D), new(D), 1e-6)
        options = dict(rope=(torch.empty(196, D), torch.empty(196, D), pairs), prefix_tokens=1)
        options |= dict(q_norm=norm, k_norm=(new(D), new(D), 1e-6)) if norms else {}
        return attention_qkv, (new(BATCH, 197, 3 * 12 * D), 12), options

    yield Case("RoPE D=64", "attention_qkv", "bfloat16", partial(with_rope, 64, False, False))
    yield Case("Q/K norm and axial RoPE D=64", "attention_qkv", "bfloat16", partial(with_rope, 64, True, 32))
    yield Case("Q/K norm and interleaved RoPE D=64", "attention_qkv", "bfloat16", partial(with_rope, 64, True, True))
    yield Case("packed images D=64", "varlen_attention", "bfloat16", varlen)


def _towers() -> Iterator[Case]:
    """Blocks of Qwen2.5-VL's tower, 80 channels a head, in windows of 8 × 8 patches, and of those that norm heads."""
    new, T, D = _maker("bfloat16"), 12_544, 80

    def attend(**options):
        ends = 64 * torch.arange(T // 64 + 1, dtype=torch.int32)
        rope = torch.empty(T, D), torch.empty(T, D), False
        return attention_qkv, (new(T, 3 * 16 * D), 16), dict(rope=rope, varlen=(ends, 64), **options)

    def rms():
        return new(D), None, 1e-6, "rms_norm"

    builders = {
        "windows D=80": ("attention_qkv", attend),
        "RMSNorm of heads, windows D=80": ("attention_qkv", lambda: attend(q_norm=rms(), k_norm=rms())),
        "D=1280": ("rms_norm", lambda: (rms_norm, (new(T, 1280), new(1280), 1e-6), {})),
        "sum, D=1280": ("add_rms_norm", lambda: (add_rms_norm, (new(T, 1280), new(T, 1280), new(1280), 1e-6), {})),
    }
    yield from (Case(f"Qwen2.5-VL {name}", op, "bfloat16", build) for name, (op, build) in builders.items())


# case → images, side of the grid, heads, side of the window, shift, padded, cosine
WINDOWS = {
    "Swin-T stage 1": (128, 56, 3, 7, 3, False, False),
    "Swin-B stage 3": (128, 14, 16, 7, 3, False, False),
    "Swin-L stage 4": (128, 7, 48, 7, 0, False, False),
    "Swin-T padded": (8, 50, 3, 7, 3, True, False),
    "Swin-B 384 stage 1": (32, 96, 4, 12, 6, False, False),
    "SwinV2-T stage 1, window 8": (128, 64, 3, 8, 4, False, True),
    "SwinV2-T stage 1, window 16": (128, 64, 3, 16, 8, False, True),
    "SwinV2-B 384 stage 1, padded window 24": (8, 90, 4, 24, 12, True, True),
}


def _windows() -> Iterator[Case]:
    """Windows of Swin, Swin V2 and Twins, whose heads have 32 channels."""
    new = _maker("bfloat16")

    def build(B: int, side: int, heads: int, window: int, shift: int, padded: bool, cosine: bool):
        table = new(window**2, window**2, heads).permute(2, 0, 1)  # an indexed table of relative positions
        options = dict(shift_size=(shift, shift), bias=table, scale=new(heads) if cosine else None)
        options |= dict(pad=new(96 * heads)) if padded else {}
        return window_attention, (new(B, side, side, 96 * heads), heads, (window, window)), options

    for name, sizes in WINDOWS.items():
        yield Case(name, "window_attention", "bfloat16", partial(build, *sizes))
    twins = window_attention, (new(128, 56, 56, 192), 2, (7, 7)), {}
    yield Case("Twins-S stage 1", "window_attention", "bfloat16", lambda: twins)


def _packed(new: Callable, B: int, N: int, H: int, D: int) -> tuple[Callable, tuple, dict]:
    return attention_qkv, (new(B, N, 3 * H * D), H), {}


# name → images, queries, heads, channels of a head, shapes of the maps, sides of the reference or None
SAMPLINGS = {
    "Deformable DETR encoder": (1, 18071, 8, 32, ((100, 136), (50, 68), (25, 34), (13, 17)), None),
    "Deformable DETR encoder, offsets": (1, 18071, 8, 32, ((100, 136), (50, 68), (25, 34), (13, 17)), 2),
    "RT-DETR decoder": (8, 300, 8, 32, ((80, 80), (40, 40), (20, 20)), None),
    "heads of 64": (1, 8500, 4, 64, ((64, 64), (32, 32)), 4),
}


def _samplings() -> Iterator[Case]:
    """Multi-scale deformable sampling of detectors, with four points of a level."""

    def build(dtype: str, B: int, Nq: int, H: int, D: int, shapes: tuple, sides: int | None):
        new, L = _maker(dtype), len(shapes)
        points = torch.empty(B, Nq, H, L, 4, 2), torch.empty(B, Nq, H, L, 4)
        options = {} if sides is None else dict(reference=torch.empty(B, Nq, L, sides, requires_grad=sides == 4))
        learning = tuple(t.requires_grad_() for t in points)
        return deformable_attention, (new(B, sum(h * w for h, w in shapes), H, D), shapes, *learning), options

    for name, sizes in SAMPLINGS.items():
        yield Case(name, "deformable_attention", "bfloat16", partial(build, "bfloat16", *sizes))
    yield Case("float32", "deformable_attention", "float32", partial(build, "float32", *SAMPLINGS["heads of 64"]))


# name → images, channels, sides of the map, channels last
MAPS = {
    "ResNet-50 stage 1 of DETR": (8, 256, 200, 272, False),
    "ResNet-50 stage 4 of DETR": (8, 2048, 25, 34, False),
    "channels last": (8, 256, 100, 136, True),
}


def _maps() -> Iterator[Case]:
    """BatchNorm by stored statistics, residual and ReLU after a convolution."""

    def build(dtype: str, B: int, C: int, H: int, W: int, last: bool):
        new = _maker(dtype)
        order = torch.channels_last if last else torch.contiguous_format
        x, residual = (torch.empty_like(new(B, C, H, W), memory_format=order).requires_grad_() for _ in range(2))
        vectors = new(C).detach(), new(C).detach(), new(C), new(C), 1e-5
        return batch_norm_act, (x, *vectors), dict(activation="relu", residual=residual)

    for name, sizes in MAPS.items():
        yield Case(name, "batch_norm_act", "bfloat16", partial(build, "bfloat16", *sizes))
    yield Case("float32", "batch_norm_act", "float32", partial(build, "float32", *MAPS["channels last"]))


def _linears() -> Iterator[Case]:
    """Other arguments of linear, mlp and patch_embed, as recipes and other model families use them."""
    new, M, D = _maker("bfloat16"), (BATCH, 197), 768

    def layers(F: int, gated: int = 1, D: int = D):
        return (new(gated * F, D), new(gated * F)), (new(D, F), new(D))

    def branch(D: int = D):
        keep = torch.empty(BATCH, dtype=torch.bfloat16)
        return dict(norm=(new(D), new(D), 1e-6), layer_scale=new(D), sample_scale=keep, residual=new(*M, D))

    def narrow(D: int):
        return mlp, (new(*M, D), *layers(4 * D, 1, D)), branch(D) | dict(save="input", return_stats=True)

    def rms(D: int):
        return Norm(new(D), None, 1e-6, "rms_norm")

    def gated(activation: str):
        norm = None if activation == "swiglu" else rms(D)
        return mlp, (new(*M, D), *layers(2048, 2)), dict(activation=activation, norm=norm)

    def with_stats(norm: tuple):
        stats = torch.empty(BATCH * 197, 6, 2)
        return linear, (new(*M, D), new(3 * D, D), new(3 * D)), dict(norm=norm, stats=stats)

    def stem(P: int, image: torch.Tensor, **options):
        T = (image.shape[2] // P) ** 2
        return patch_embed, (image, new(D, 3, P, P), new(D), new(1, T, D)), options

    builders = {
        "swiglu": ("mlp", lambda: gated("swiglu")),
        "rms_norm, geglu": ("mlp", lambda: gated("geglu")),
        "rms_norm, geglu_tanh": ("mlp", lambda: gated("geglu_tanh")),
        "hardswish": ("mlp", lambda: (mlp, (new(*M, D), *layers(2 * D)), dict(activation="hardswish"))),
        "relu6": ("mlp", lambda: (mlp, (new(*M, D), *layers(4 * D)), dict(activation="relu6"))),
        "rms_norm, D=192": ("mlp", lambda: (mlp, (new(*M, 192), *layers(768, 1, 192)), dict(norm=rms(192)))),
        "gelu_tanh": ("mlp", lambda: (mlp, (new(*M, D), *layers(4 * D)), dict(activation="gelu_tanh"))),
        "branch": ("mlp", lambda: (mlp, (new(*M, D), *layers(4 * D)), branch() | dict(return_stats=True))),
        "recompute": ("mlp", lambda: (mlp, (new(*M, D), *layers(4 * D)), branch() | dict(save="input"))),
        "recompute, D=128": ("mlp", lambda: narrow(128)),
        "recompute, D=192": ("mlp", lambda: narrow(192)),
        "given statistics": ("linear", lambda: with_stats((new(D), new(D), 1e-6))),
        "given statistics, rms_norm": ("linear", lambda: with_stats(rms(D))),
        "head": ("linear", lambda: (linear, (new(BATCH, D), new(1000, D), new(1000)), {})),
        "patch 14, D=768": ("patch_embed", lambda: stem(14, torch.empty(BATCH, 3, 224, 224, dtype=torch.bfloat16))),
        "patch 32": ("patch_embed", lambda: stem(32, torch.empty(BATCH, 3, 224, 224, dtype=torch.bfloat16))),
        "uint8 image": (
            "patch_embed",
            lambda: stem(
                16, torch.empty(BATCH, 3, 224, 224, dtype=torch.uint8), mean=torch.empty(3), std=torch.empty(3)
            ),
        ),
    }
    yield from (Case(name, op, "bfloat16", build) for name, (op, build) in builders.items())


def _convolutions() -> Iterator[Case]:
    """Depthwise convolutions of pyramids and positional encodings; those of CPVT skip a class token."""

    def build(
        dtype: str, B: int, side: int, C: int, prefix: int, K: int, **options: object
    ) -> tuple[Callable, tuple, dict]:
        new = _maker(dtype)
        tokens = new(B, prefix + side * side, C)
        return depthwise, (tokens[:, prefix:].unflatten(1, (side, side)), new(C, 1, K, K), new(C)), options

    mlp, position = dict(activation="gelu"), dict(residual=True)
    shapes = {
        "PVTv2-B1 stage 1": (BATCH, 56, 512, 0, 3, mlp),
        "PVTv2-B1 stage 4": (BATCH, 7, 2048, 0, 3, mlp),
        "SegFormer-B0 stage 1": (16, 128, 128, 0, 3, mlp),
        "Twins-PCPVT-S stage 1": (BATCH, 56, 64, 0, 3, position),
        "CPVT-S": (BATCH, 14, 384, 1, 3, position),
        "CvT-13 keys": (BATCH, 28, 192, 0, 3, dict(stride=2)),
        "side 5": (BATCH, 28, 192, 0, 5, mlp),
    }
    for name, (*sizes, options) in shapes.items():
        yield Case(name, "depthwise", "bfloat16", partial(build, "bfloat16", *sizes, **options))
    yield Case("side 3", "depthwise", "float32", partial(build, "float32", BATCH, 28, 192, 0, 3, **mlp))
