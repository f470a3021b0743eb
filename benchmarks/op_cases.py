"""The ops of a ViT as benchmark cases: our kernels, PyTorch, torch.compile and other libraries."""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastvit_triton.kernels import OPS, launch
from fastvit_triton.kernels.op import Op
from fastvit_triton.measure.variants import Case, Variant, absent, compiled, with_backend

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

    @property
    def cells(self) -> int:
        """Number of patches."""
        return (self.side // self.P) ** 2


BATCH = 256
FULL = (
    Shape("ViT-Ti/16", BATCH, 197, 192, 3, 16),
    Shape("ViT-S/16", BATCH, 197, 384, 6, 16),
    Shape("ViT-B/16", BATCH, 197, 768, 12, 16),
    Shape("ViT-L/16", BATCH, 197, 1024, 16, 16),
    Shape("ViT-H/14", BATCH, 257, 1280, 16, 14),
)
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
    function, fixed, flops, elements = described(name, s)
    op = BY_NAME[function]

    def inputs(seed: int) -> dict:
        generator = torch.Generator(device).manual_seed(seed)

        def new(*shape: int, scale: float = 1.0, learns: bool = True) -> torch.Tensor:
            values = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
            return (values * scale).to(dtype).requires_grad_(learns)

        return arguments(name, s, new)

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
    facts, work = dict(op=name, model=s.name, batch=s.B), (flops, elements * dtype.itemsize)
    return Case(f"{name} {s.name} batch {s.B}", dtype, inputs, variants, reference, facts=facts, work=work)


def described(name: str, s: Shape) -> tuple[str, dict[str, Any], float, float]:
    """(op, its fixed arguments, flops, elements read and written) of a forward pass; `name` is one of `NAMES`."""
    M, D, cells = s.B * s.N, s.D, s.cells * s.B
    pixels = 3 * s.P**2
    return {
        "attention": ("attention_qkv", dict(num_heads=s.H), 4 * s.B * s.N**2 * D, 4 * M * D),
        "linear qkv": ("linear", {}, 6 * M * D**2, 4 * M * D + 3 * D**2),
        "linear fc1": ("linear", dict(activation="gelu"), 8 * M * D**2, 5 * M * D + 4 * D**2),
        "linear proj": ("linear", {}, 2 * M * D**2, 3 * M * D + D**2),
        "mlp": ("mlp", {}, 16 * M * D**2, 3 * M * D + 8 * D**2),
        "layer_norm": (name, dict(eps=1e-6), 0.0, 2 * M * D),
        "add_layer_norm": (name, dict(eps=1e-6), 0.0, 4 * M * D),
        "patch_embed": (name, {}, 2 * cells * pixels * D, s.B * (3 * s.side**2 + (s.cells + 1) * D) + pixels * D),
        "depthwise": (name, dict(residual=True), 18 * cells * D, 2 * cells * D),  # a positional encoding
        # the patches, as one map that a detector's encoder samples
        "deformable_attention": (
            name,
            dict(shapes=((s.side // s.P,) * 2,)),
            40 * cells * D,
            2 * cells * D + 12 * cells * s.H,
        ),
    }[name]


def arguments(name: str, s: Shape, new: Callable) -> dict[str, Any]:
    """The other arguments; `new` makes a tensor of these sizes, with `scale` and, if not `learns`, no gradient."""
    rows, D, side = (s.B, s.N, s.D), s.D, s.side // s.P

    def norm() -> tuple:
        return new(D), new(D), 1e-6

    def layer(F: int, K: int) -> tuple[torch.Tensor, torch.Tensor]:
        return new(F, K, scale=K**-0.5), new(F)

    if name == "attention":
        return dict(qkv=new(s.B, s.N, 3 * D))
    if name.startswith("linear"):
        x, (weight, bias) = new(*rows), layer({"qkv": 3, "fc1": 4, "proj": 1}[name.removeprefix("linear ")] * D, D)
        more = dict(residual=new(*rows)) if name == "linear proj" else dict(norm=norm())
        return dict(x=x, weight=weight, bias=bias, **more)
    if name == "mlp":
        return dict(x=new(*rows), fc1=layer(4 * D, D), fc2=layer(D, 4 * D), norm=norm(), residual=new(*rows))
    if name in ("layer_norm", "add_layer_norm"):
        vectors = dict(x=new(*rows), weight=new(D), bias=new(D))
        return vectors | (dict(residual=new(*rows)) if name == "add_layer_norm" else {})
    if name == "depthwise":
        return dict(x=new(s.B, side, side, D), weight=new(D, 1, 3, 3, scale=1 / 3), bias=new(D))
    if name == "deformable_attention":
        points = s.B, s.cells, s.H, 1, 4
        value = new(s.B, s.cells, s.H, D // s.H)
        return dict(value=value, locations=new(*points, 2, scale=0.5), weights=new(*points))
    image = new(s.B, 3, s.side, s.side, learns=False)
    weight = new(D, 3, s.P, s.P, scale=(3 * s.P**2) ** -0.5)
    return dict(image=image, weight=weight, bias=new(D), pos=new(1, s.cells + 1, D), prefix=new(1, 1, D))


def _libraries(name: str, s: Shape, op: Op, device: torch.device, reference: Callable) -> Iterator[Variant]:
    """Implementations of other libraries."""
    if name == "attention":
        for label, backend in BACKENDS.items():
            here = device.type == "cuda" or backend == SDPBackend.MATH
            yield Variant(label, None if here else "needs a GPU", _within(backend, reference))
        packed, scale = (s.B, s.N, 3, s.H, s.D // s.H), (s.D // s.H) ** -0.5

        def flash(library: Any) -> Callable:
            return lambda qkv: library.flash_attn_qkvpacked_func(qkv.view(packed)).flatten(2)

        def xformers(library: Any) -> Callable:
            attend = partial(library.memory_efficient_attention, scale=scale)
            return lambda qkv: attend(*qkv.view(packed).unbind(2)).flatten(2)

        yield _imported("flash-attn", "flash_attn", device, flash)
        yield _imported("xformers", "xformers.ops", device, xformers)
    if name == "layer_norm":

        def liger(library: Any) -> Callable:
            return lambda x, weight, bias: library.LigerLayerNormFunction.apply(x, weight, bias, 1e-6)

        yield _imported("Liger", "liger_kernel.ops.layer_norm", device, liger)


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
