"""The ops of a ViT as benchmark cases: our kernels, PyTorch, torch.compile and other libraries."""

import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastvit_triton.kernels import OPS, launch
from fastvit_triton.kernels.op import Op
from fastvit_triton.measure.variants import Case, Variant, absent, compiled, with_backend

from .launch_cases import BATCH, MODELS

BY_NAME = {op.name: op for op in OPS}
NAMES = (
    "attention", "mlp", "linear qkv", "linear proj", "linear fc1", "layer_norm", "add_layer_norm", "patch_embed",
    "depthwise", "deformable_attention",
)  # fmt: skip
BACKENDS = {
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA efficient": SDPBackend.EFFICIENT_ATTENTION,
    "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA math": SDPBackend.MATH,
}


def variant_names(name: str) -> tuple[str, ...]:
    """Names of all variants of an op, including those that cannot run here."""
    more = {"attention": (*BACKENDS, "flash-attn", "xformers"), "layer_norm": ("Liger",)}
    return ("eager", "ours eager", "torch.compile", "ours compiled", "as planned", *more.get(name, ()))


@dataclass(frozen=True)
class Shape:
    """Sizes of a model: B images of side² pixels, N tokens of D channels, H heads, patches of P² pixels."""

    name: str
    B: int
    N: int
    D: int
    H: int
    P: int
    side: int = 224


FULL = tuple(Shape(name, BATCH, N, D, H, P) for name, (D, H, P, N) in MODELS.items())
SMALL = Shape("small", 4, 50, 96, 3, 16, 112)
TINY = Shape("tiny", 2, 5, 32, 2, 8, 16)


def on_gpu(device: torch.device) -> bool:
    """True on a GPU, and where the CPU stands for one, see `launch.targeting`."""
    return device.type == "cuda" or launch.target is not None


def kernel_backend(device: torch.device) -> str:
    """The backend that forces our kernels on this device, instead of what the plan would choose."""
    return "triton" if on_gpu(device) else "auto"


def case(name: str, s: Shape, dtype: torch.dtype, device: torch.device) -> Case:
    """The case of an op at one shape; `name` is one of `NAMES`."""
    function, make, fixed, work = _call(name, s, dtype)
    op = BY_NAME[function]

    def inputs(seed: int) -> dict:
        generator = torch.Generator(device).manual_seed(seed)

        def new(*shape: int, scale: float = 1.0, learns: bool = True) -> torch.Tensor:
            values = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
            return (values * scale).to(dtype).requires_grad_(learns)

        return make(new)

    run, reference = partial(op.run, **fixed), partial(op.reference, **fixed)
    gpu, kernels = on_gpu(device), kernel_backend(device)
    variants = [
        Variant("eager", None, reference),
        Variant("ours eager", None, with_backend(kernels, run)),
        Variant("torch.compile", None, compiled(reference)),
        Variant("ours compiled", None, with_backend(kernels, compiled(run))),
        Variant("as planned", None if gpu else "needs a GPU", with_backend("auto", run)),
        *_libraries(name, s, op, device, reference),
    ]
    facts = dict(op=name, model=s.name, batch=s.B)
    return Case(f"{name} {s.name} batch {s.B}", dtype, inputs, variants, reference, facts=facts, work=work)


def _call(name: str, s: Shape, dtype: torch.dtype) -> tuple[str, Callable, dict, tuple[float, float]]:
    """(op, function from a tensor factory to arguments, fixed arguments, (flops, bytes) of a forward pass)."""
    M, D, size, d = s.B * s.N, s.D, dtype.itemsize, s.D // s.H
    rows = (s.B, s.N, D)

    def norm(new: Callable) -> tuple:
        return new(D), new(D), 1e-6

    def layer(new: Callable, F: int, K: int) -> tuple[torch.Tensor, torch.Tensor]:
        return new(F, K, scale=K**-0.5), new(F)

    if name == "attention":
        work = 4 * s.B * s.H * s.N**2 * d, 4 * M * D * size
        return "attention_qkv", lambda new: dict(qkv=new(s.B, s.N, 3 * D)), dict(num_heads=s.H), work
    if name == "linear qkv":

        def make(new: Callable) -> dict:
            return dict(zip(("x", "weight", "bias"), (new(*rows), *layer(new, 3 * D, D)), strict=True), norm=norm(new))

        return "linear", make, {}, (6 * M * D**2, (4 * M * D + 3 * D**2) * size)
    if name == "linear fc1":

        def make(new: Callable) -> dict:
            return dict(zip(("x", "weight", "bias"), (new(*rows), *layer(new, 4 * D, D)), strict=True), norm=norm(new))

        return "linear", make, dict(activation="gelu"), (8 * M * D**2, (5 * M * D + 4 * D**2) * size)
    if name == "linear proj":

        def make(new: Callable) -> dict:
            weight, bias = layer(new, D, D)
            return dict(x=new(*rows), weight=weight, bias=bias, residual=new(*rows))

        return "linear", make, {}, (2 * M * D**2, (3 * M * D + D**2) * size)
    if name == "mlp":

        def make(new: Callable) -> dict:
            layers = dict(fc1=layer(new, 4 * D, D), fc2=layer(new, D, 4 * D))
            return dict(x=new(*rows), **layers, norm=norm(new), residual=new(*rows))

        return "mlp", make, {}, (16 * M * D**2, (3 * M * D + 8 * D**2) * size)
    if name in ("layer_norm", "add_layer_norm"):
        adds = name == "add_layer_norm"

        def make(new: Callable) -> dict:
            arguments = dict(x=new(*rows), weight=new(D), bias=new(D))
            return arguments | (dict(residual=new(*rows)) if adds else {})

        return name, make, dict(eps=1e-6), (0.0, (4 if adds else 2) * M * D * size)

    if name == "depthwise":  # a positional encoding

        def make(new: Callable) -> dict:
            return dict(x=new(s.B, s.side // s.P, s.side // s.P, D), weight=new(D, 1, 3, 3, scale=1 / 3), bias=new(D))

        outputs = s.B * (s.side // s.P) ** 2 * D
        return name, make, dict(residual=True), (18 * outputs, 2 * outputs * size)

    if name == "deformable_attention":  # the patches, as one map that a detector's encoder samples
        side = s.side // s.P

        def make(new: Callable) -> dict:
            points = s.B, side**2, s.H, 1, 4
            return dict(value=new(s.B, side**2, s.H, d), locations=new(*points, 2, scale=0.5), weights=new(*points))

        outputs = s.B * side**2 * D
        nbytes = (2 * outputs + 12 * s.B * side**2 * s.H) * size
        return name, make, dict(shapes=((side, side),)), (40 * outputs, nbytes)

    side = (s.side // s.P) ** 2  # patch_embed

    def make(new: Callable) -> dict:
        image = new(s.B, 3, s.side, s.side, learns=False)
        weight = new(D, 3, s.P, s.P, scale=(3 * s.P**2) ** -0.5)
        return dict(image=image, weight=weight, bias=new(D), pos=new(1, side + 1, D), prefix=new(1, 1, D))

    nbytes = (s.B * (3 * s.side**2 + (side + 1) * D) + 3 * s.P**2 * D) * size
    return "patch_embed", make, {}, (2 * s.B * side * 3 * s.P**2 * D, nbytes)


def _libraries(name: str, s: Shape, op: Op, device: torch.device, reference: Callable) -> Iterator[Variant]:
    """Implementations of other libraries."""
    if name == "attention":
        for label, backend in BACKENDS.items():
            here = device.type == "cuda" or backend == SDPBackend.MATH
            yield Variant(label, None if here else "needs a GPU", _within(backend, reference))
        yield _imported("flash-attn", "flash_attn", device, lambda library: _flash(library, s))
        yield _imported("xformers", "xformers.ops", device, lambda library: _xformers(library, s))
    if name == "layer_norm":
        yield _imported("Liger", "liger_kernel.ops.layer_norm", device, _liger)


def _imported(name: str, module: str, device: torch.device, build: Callable) -> Variant:
    """A variant that needs a library and a GPU."""
    reason = absent(module, name) or (None if device.type == "cuda" else "needs a GPU")
    if reason:
        return Variant(name, reason)
    return Variant(name, None, build(importlib.import_module(module)))


def _within(backend: SDPBackend, reference: Callable) -> Callable:
    def call(**arguments: object) -> object:
        with sdpa_kernel(backend):
            return reference(**arguments)

    return call


def _flash(library: object, s: Shape) -> Callable:
    def call(qkv: torch.Tensor) -> torch.Tensor:
        return library.flash_attn_qkvpacked_func(qkv.view(s.B, s.N, 3, s.H, -1)).flatten(2)

    return call


def _xformers(library: object, s: Shape) -> Callable:
    def call(qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv.view(s.B, s.N, 3, s.H, -1).unbind(2)
        return library.memory_efficient_attention(q, k, v, scale=1 / math.sqrt(q.shape[-1])).flatten(2)

    return call


def _liger(library: object) -> Callable:
    def call(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return library.LigerLayerNormFunction.apply(x, weight, bias, 1e-6)

    return call
