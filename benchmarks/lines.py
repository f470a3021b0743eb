"""The list of what is measured on a GPU: correctness, attention, products, blocks, latency, whole models, tuning.

`python -m benchmarks.gpu --plan` prints it, and the command without --plan measures it. Arms of kernels that do not
exist yet stand in it as "not built".
"""

import contextlib
import copy
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastvit_triton import create_model, cuda_graph, optimize
from fastvit_triton.kernels.attention_launch import WHOLE, whole
from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.kernels.launch import overriding
from fastvit_triton.measure.compare import Named, named_leaves
from fastvit_triton.measure.libraries import ModelCall, build_variant
from fastvit_triton.measure.model_cases import randomized
from fastvit_triton.measure.variants import Case, Variant, absent, compiled, with_backend

from . import correctness, op_cases, tune
from .op_cases import BATCH, kernel_backend
from .result_file import ROOT, ResultFile
from .rows import NOT_BUILT, Line

# section → seconds of a run that it may take before the sections after it, in their order
SECTIONS = {
    "correctness": 50.0,
    "attention": 35.0,
    "products": 25.0,
    "blocks": 170.0,
    "direct": 60.0,
    "autotune": 100.0,
    "latency": 60.0,
    "models": 70.0,
    "ops": 10.0,
    "ways": 10.0,
    "tuning": 0.0,
}
FP8 = torch.float8_e4m3fn


# Attention

STAGES = {"ours, 1 stage": 1, "ours, 2 stages": 2, "ours, 3 stages": 3}
FORMS = {  # of the forward pass, for up to 256 keys
    "ours, whole rows": dict(BLOCK_M=64, num_warps=4, num_stages=1),
    "ours, whole rows by TMA": dict(BLOCK_M=128, TMA=1, num_warps=8, num_stages=3),  # on other than sm_90 as "ours"
    "ours, whole rows by TMA, 2 stages": dict(BLOCK_M=128, TMA=1, num_warps=8, num_stages=2),
}
BACKWARD_FORMS = {  # with up to 256 keys on sm_90; elsewhere as "ours"
    "ours, all keys by TMA": dict(BLOCK_M=32, num_warps=8, num_stages=3),
    "ours, all keys by TMA, 2 stages": dict(BLOCK_M=32, num_warps=8, num_stages=2),
}
Rows = dict[str, dict[str, int]]  # launch parameters by row of tuned/
UNBUILT_ATTENTION = ("ours, slices of channels",)
ATTENTION_ARMS = ("SDPA cuDNN", "SDPA flash", "ours", *STAGES, *UNBUILT_ATTENTION)


def attention(N: int, D: int, batch: int, device: torch.device, dry: bool) -> Case:
    """Attention of packed projections of ViT-B's 12 heads, or of 16 heads of ViT-H's width; the truth in slices."""
    heads = 12 if D == 64 else 16
    shape = op_cases.Shape(f"N={N} D={D}", 2 if dry else batch, 5 if dry else N, D * heads, heads, 16)
    dtype = torch.float32 if dry else torch.bfloat16
    case = op_cases.case("attention", shape, dtype, device)
    held = {variant.name: variant for variant in case.variants}
    ours = replace(held["ours eager"], name="ours")
    variants = [held["eager"], held["SDPA cuDNN"], held["SDPA flash"], ours]
    rows: dict[str, Any] = {name: partial(staged, stages) for name, stages in STAGES.items()}
    rows |= {name: whole(**blocks) for name, blocks in FORMS.items()}
    rows |= {name: whole("bwd_whole", **blocks) for name, blocks in BACKWARD_FORMS.items()}
    variants += [Variant(name, None, InRows(ours.call, changed)) for name, changed in rows.items()]
    variants += [Variant(name, NOT_BUILT) for name in UNBUILT_ATTENTION]
    few = max(1, 2**31 // (heads * N * N * 8))  # images whose scores take 2 GiB in float64

    def truth(qkv: Tensor) -> Tensor:
        parts = [checkpoint(case.truth, qkv=part, use_reentrant=False) for part in qkv.split(few)]
        return torch.cat(parts)

    name = attention_name(N, D, batch)
    return replace(case, name=name, variants=variants, truth=truth, work=None, facts=dict(N=N, D=D, batch=batch))


class InRows:
    """A call of attention with other launch parameters, forward and backward.

    rows: replaces rows of tuned/; or makes those from the rows that the call looks up.
    """

    inside = contextlib.ExitStack()  # holds the launch parameters during a backward pass

    def __init__(self, run: Callable, rows: Rows | Callable[[Rows], Rows]) -> None:
        self.run, self.rows = run, rows

    def __call__(self, qkv: Tensor) -> Tensor:
        InRows.inside.close()  # of a backward pass that failed
        if callable(self.rows):
            with overriding({}) as seen:
                y = self.run(qkv=qkv)
                if y.requires_grad:
                    torch.autograd.grad(y, qkv, torch.zeros_like(y))
            self.rows = self.rows(seen)
        with overriding(self.rows):
            y = self.run(qkv=_Before.apply(qkv, InRows.inside.close))
        return _Before.apply(y, lambda: InRows.inside.enter_context(overriding(self.rows)))


def staged(stages: int, seen: Rows) -> Rows:
    """The rows with another number of stages."""
    return {name: row | dict(num_stages=stages) for name, row in seen.items() if "num_stages" in row}


class _Before(torch.autograd.Function):
    """Identity whose backward pass calls a function first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable) -> Tensor:
        ctx.function = function
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        ctx.function()
        return dx, None


def attention_name(N: int, D: int, batch: int) -> str:
    """Name of the case."""
    return f"attention N={N} D={D} batch {batch}"


def attention_lines() -> Iterator[Line]:
    """Forward and backward passes of all sizes; ViT-B's at batch 256 are worth most."""
    for N, D, batch in product((197, 201, 256, 257, 577, 1025), (64, 80), (256, 64, 8)):
        value = (4 if N == 197 else 2 if N < 300 else 1) * (2 if D == 64 else 1) * (2 if batch == 256 else 1)
        build = partial(attention, N, D, batch)
        for phase in ("forward", "backward"):
            usual = {"": 0.3, **dict.fromkeys(UNBUILT_ATTENTION, 0.0)}
            forms = [arm for arm, blocks in FORMS.items() if D == 64 or "TMA" not in blocks]
            forms = forms if phase == "forward" or batch == 8 else []  # gradients check their L
            forms += BACKWARD_FORMS if phase == "backward" and D == 64 else []
            forms = forms if N <= WHOLE else []
            arms, how = (*ATTENTION_ARMS, *forms), dict(seconds=0.1, copies=3, default=usual)
            yield Line("attention", attention_name(N, D, batch), phase, arms, value, build, **how)


# Products

UNBUILT_PRODUCTS = ("ours, 128 × 256 by TMA", "ours, warps specialised")
SCALED = ("tensor", "row")
FP8_ARMS = tuple(f"fp8 by {kind}{more}" for kind in SCALED for more in ("", ", product alone"))
# product of a block → (columns, inner dimension) in channels, what follows it, arms that compute it
PRODUCTS = {
    "qkv": (3, 1, "", ("ours",)),
    "proj": (1, 1, "residual", ("addmm_", "ours")),
    "fc1": (4, 1, "gelu", ("_addmm_activation", "ours")),
    "fc2": (1, 4, "residual", ("addmm_", "ours")),
}
WIDTHS = {"ViT-S": 384, "ViT-B": 768, "ViT-L": 1024}


class InPlace:
    """residual += x Wᵀ by cuBLAS with beta 1; the bias is left to the next operator, and added here to be compared."""

    def __init__(self) -> None:
        self.ready: Tensor | None = None

    def prepare(self, residual: Tensor, bias: Tensor, **_: Tensor) -> None:
        """Copies the residual, which the call overwrites."""
        self.ready = residual + bias

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        if self.ready is None:
            self.prepare(residual, bias)
        y, self.ready = self.ready, None
        return y.addmm_(x, weight.t())


class Scaled:
    """A product of e4m3 operands; scales of the whole tensor, or of each row of x and each column.

    With `alone`, x is quantised once and not in each call. The weight is quantised once.
    """

    def __init__(self, kind: str, alone: bool, after: Callable) -> None:
        self.kind, self.alone, self.after = kind, alone, after
        self.held: dict[int, tuple[Tensor, Tensor]] = {}

    def quantised(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Values in e4m3, and the scales by which they are multiplied, in float32."""
        largest = t.abs().amax(1, keepdim=True) if self.kind == "row" else t.abs().amax()
        scale = largest.float().clamp(min=1e-12) / torch.finfo(FP8).max
        return (t / scale).to(FP8), scale

    def once(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """`quantised`, kept for this tensor."""
        if id(t) not in self.held:
            self.held[id(t)] = self.quantised(t)
        return self.held[id(t)]

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        a, scale_a = self.once(x) if self.alone else self.quantised(x)
        b, scale_b = self.once(weight)
        scale_b = scale_b.t() if self.kind == "row" else scale_b
        y = torch._scaled_mm(a, b.t(), scale_a, scale_b, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=True)
        return self.after(y, residual)


AFTER = {"": lambda y, residual: y, "residual": lambda y, residual: residual + y, "gelu": lambda y, residual: F.gelu(y)}


def product_case(name: str, model: str, images: int, device: torch.device, dry: bool) -> Case:
    """One product of a block with what follows it: nothing, a residual, or GELU."""
    columns, inner, what, _ = PRODUCTS[name]
    D, M = (32, 32) if dry else (WIDTHS[model], images * 197)
    after = AFTER[what]

    def inputs(seed: int) -> dict:
        generator = torch.Generator(device).manual_seed(seed)
        new = partial(torch.randn, generator=generator, device=device)
        given = dict(x=new(M, inner * D), weight=new(columns * D, inner * D) * (inner * D) ** -0.5)
        given |= dict(bias=new(columns * D), residual=new(M, columns * D))
        return {key: t.bfloat16() for key, t in given.items()}

    def eager(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return after(F.linear(x, weight, bias), residual)

    def activated(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)

    def ours(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        more = dict(activation="gelu") if what == "gelu" else dict(residual=residual) if what else {}
        return op_cases.BY_NAME["linear"].run(x, weight, bias, **more)

    variants = [Variant("eager", None, eager), Variant("ours", None, with_backend(kernel_backend(device), ours))]
    variants += [Variant("addmm_", None, InPlace())] if what == "residual" else []
    variants += [Variant("_addmm_activation", None, activated, reduced=True)] if what == "gelu" else []
    for kind, alone in product(SCALED, (False, True)):
        arm = f"fp8 by {kind}{', product alone' if alone else ''}"
        variants.append(Variant(arm, None, Scaled(kind, alone, after), reduced=True))
    variants += [Variant(arm, NOT_BUILT) for arm in UNBUILT_PRODUCTS]
    facts = dict(model=model, rows=M)
    return Case(product_name(name, model, images), torch.bfloat16, inputs, variants, eager, ("forward",), facts)


def product_name(name: str, model: str, images: int) -> str:
    """Name of the case."""
    return f"{name} of {model}, {images * 197} rows"


def product_lines() -> Iterator[Line]:
    """Products of three widths and two batches, ViT-B's first."""
    for model, images, name in product(("ViT-B", "ViT-S", "ViT-L"), (256, 64), PRODUCTS):
        arms = (*PRODUCTS[name][3], *FP8_ARMS, *UNBUILT_PRODUCTS)
        value = (2 if model == "ViT-B" else 1) * (2 if images == 256 else 1)
        usual = {"": 0.25, **dict.fromkeys(UNBUILT_PRODUCTS, 0.0)}
        build = partial(product_case, name, model, images)
        case, how = product_name(name, model, images), dict(seconds=0.1, default=usual)
        yield Line("products", case, "forward", arms, value, build, **how)


# Blocks and models

VIT5 = "ViT-5-Small"
# title → (timm's name, options); None for the example's model, of which we have no own
MODELS = {
    "ViT-B": ("vit_base_patch16_224", {}),
    "ViT-S": ("vit_small_patch16_224", {}),
    "ViT-L": ("vit_large_patch16_224", {}),
    "ViT-Ti": ("vit_tiny_patch16_224", {}),
    VIT5: (None, {}),
    "DINOv2-B": ("vit_base_patch14_dinov2", dict(img_size=224)),
    "Swin-T": ("swin_tiny_patch4_window7_224", {}),
}
TINY = dict(embed_dim=32, num_heads=2)
TINY_SWIN = dict(img_size=32, embed_dim=16, depths=(1, 1), num_heads=(1, 2), window_size=4)
BLOCK_ARMS = ("torch.compile", "optimize", "ours", "ours, compiled")
AUTOTUNED = "max-autotune-no-cudagraphs"
# our backend: arm → (mode, code launches kernels itself, any number of images)
BACKEND_ARMS = {
    "backend": (None, False, False),
    "backend, direct": (None, True, False),
    "backend, direct, any batch": (None, True, True),
    "backend, direct, reduce-overhead": ("reduce-overhead", True, False),
}
OURS_GRAPH, OPTIMIZED_GRAPH = "ours, CUDA graph", "optimize, CUDA graph"


@dataclass(frozen=True)
class Setting:
    """A model, or two of its blocks, and how it is run."""

    model: str  # of MODELS
    batch: int  # number of images
    phase: str  # "forward", "training" or "step"
    autocast: bool = False  # float32 weights, computed in bfloat16; else all is bfloat16
    whole: bool = False  # the model, not two of its blocks
    latency: bool = False  # part of the name, for cases that are timed with an idle device

    @property
    def name(self) -> str:
        """Name of the case."""
        what = self.model if self.whole else f"two blocks of {self.model}"
        return f"{what} batch {self.batch}{' autocast' * self.autocast}{' latency' * self.latency}"


@cache
def example() -> Any:
    """The module examples/vit5_training.py."""
    spec = importlib.util.spec_from_file_location("vit5_training", ROOT / "examples" / "vit5_training.py")
    assert spec is not None and spec.loader is not None  # a file that exists
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where torch.compile looks for the code's globals
    spec.loader.exec_module(module)
    return module


def pair(setting: Setting, device: torch.device, dry: bool) -> tuple[nn.Module, nn.Module | None, tuple[int, ...]]:
    """(another author's module, ours with the same weights or None, shape of an input) in float32."""
    name, options = MODELS[setting.model]
    depth = {} if (setting.whole and not dry) or setting.model == "Swin-T" else dict(depth=2)
    with device, patch.object(nn.init, "trunc_normal_", lambda t, *_, **__: t):  # `randomized` sets all weights
        if name is None:
            theirs = example().ViT5(**(dict(dim=32, heads=2, side=32) if dry else {}), **depth)
            ours, side, tokens = None, 32 if dry else 224, theirs.num_tokens
        else:
            tiny = TINY_SWIN if setting.model == "Swin-T" else TINY | dict(img_size=28 if "14" in name else 32)
            given = options | (tiny if dry else {}) | depth | ({} if setting.whole else dict(num_classes=0))
            given |= dict(num_classes=8) if setting.whole and dry else {}
            if absent("timm") is not None:
                raise ImportError(absent("timm"))
            import timm

            theirs, ours = timm.create_model(name, **given), create_model(name, **given)
            side = given.get("img_size", 224)
            tokens = theirs.patch_embed.num_patches + getattr(theirs, "num_prefix_tokens", 0)
        torch.manual_seed(0)
        randomized(theirs, torch.bfloat16)
        if ours is not None:
            ours.load_state_dict(theirs.state_dict())
    if setting.whole:
        return theirs, ours, (3, side, side)
    return theirs.blocks, None if ours is None else ours.blocks, (tokens, theirs.embed_dim)


def model_case(setting: Setting, device: torch.device, dry: bool) -> Case:
    """The case of a model or of two blocks; the truth is the other author's module in float64."""
    theirs, ours, shape = pair(setting, device, dry)
    batch, training = 2 if dry else setting.batch, setting.phase != "forward"
    dtype = torch.float32 if setting.autocast else torch.bfloat16
    theirs.to(dtype).train(training).requires_grad_(training)
    truth = copy.deepcopy(theirs).double()
    plain, auto = partial(using_backend, "torch"), partial(using_backend, "auto")
    amp = (partial(torch.autocast, device.type, torch.bfloat16),) if setting.autocast else ()

    def inputs(seed: int) -> dict:
        generator = torch.Generator(device).manual_seed(seed)
        x = torch.randn(batch, *shape, generator=generator, device=device).to(dtype)
        return dict(image=x.requires_grad_(training and not setting.whole))

    def call(module: nn.Module, context: Callable, mode: str | None = None, compiling: bool = False) -> ModelCall:
        return ModelCall(module, context, *amp, run=compiled(module, mode) if compiling else None)

    @cache
    def optimized() -> nn.Module:
        module = copy.deepcopy(theirs)
        with contextlib.ExitStack() as stack, torch.set_grad_enabled(training):
            for context in amp:
                stack.enter_context(context())
            optimize(module, example=inputs(0)["image"] if ours is None else None)
        return module

    no_graph = None if op_cases.on_gpu(device) else "needs a GPU"
    no_ours = None if ours is not None else f"no model of ours has the structure of {setting.model}"
    if ours is not None:
        ours.to(dtype).train(training).requires_grad_(training)
    variants = [Variant("eager", None, call(theirs, plain))]
    for mode in (None, AUTOTUNED, "reduce-overhead"):
        arm = f"torch.compile {mode}" if mode else "torch.compile"
        variants.append(Variant(arm, None, call(theirs, plain, mode, True)))
    for arm, (mode, direct, any_batch) in BACKEND_ARMS.items():
        run = compiled(theirs, mode, ours=True, direct=direct, dynamic=None if any_batch else False)
        variants.append(Variant(arm, None, ModelCall(theirs, auto, *amp, run=of_any_batch(run) if any_batch else run)))
    variants.append(build_variant("optimize", None, lambda: call(optimized(), auto)))
    best = "optimize" if ours is None else "ours"  # what is also run compiled
    find = optimized if ours is None else lambda: ours
    variants.append(build_variant("ours", no_ours, lambda: call(ours, auto)))
    for mode in (None, AUTOTUNED):
        arm = f"{best}, compiled {mode}" if mode else f"{best}, compiled"
        variants.append(build_variant(arm, None, lambda mode=mode: call(find(), auto, mode, True)))
    variants.append(build_variant(OURS_GRAPH, no_ours or no_graph, lambda: graphed(ours, auto, batch)))
    variants.append(build_variant(OPTIMIZED_GRAPH, no_graph, lambda: graphed(optimized(), auto, batch)))
    eager = {v.name: v.call for v in variants if v.name in ("eager", "ours", "optimize")}

    def uncompiled(name: str) -> ModelCall | None:
        name = name.replace("backend", "optimize")  # which launches the same kernels
        return eager["eager" if name.startswith("torch.compile") else name.partition(",")[0]]

    variants = [replace(v, eager=uncompiled(v.name)) for v in variants]

    def learning(call: ModelCall, arguments: dict) -> Named:
        return named_leaves(arguments) | dict(call.module.named_parameters())

    facts = dict(model=setting.model, batch=setting.batch, autocast=setting.autocast, whole=setting.whole)
    exact = ModelCall(truth, plain)
    return Case(setting.name, torch.bfloat16, inputs, variants, exact, (setting.phase,), facts, None, True, learning)


def of_any_batch(run: Callable) -> Callable:
    """A compiled function, compiled for any number of images."""
    marked: list[Tensor] = []

    def call(image: Tensor) -> object:
        image = image.view_as(image)  # the arms share their inputs, and a mark would stay
        if not marked:
            marked.append(image)
            torch._dynamo.mark_dynamic(image, 0)
        return run(image)

    return call


def graphed(module: nn.Module, context: Callable, batch: int) -> ModelCall:
    """The module run by a CUDA graph, which the first call captures."""
    graphs: list = []

    def call(image: Tensor) -> object:
        if not graphs:
            graphs.append(cuda_graph(module, image, batch_sizes=(batch,), max_graphs=1))
        return graphs[0](image)

    return ModelCall(module, context, run=call)


def _line(section: str, setting: Setting, arms: tuple[str, ...], value: float, **how: Any) -> Line:
    if MODELS[setting.model][0] is None:  # there is no model of ours
        arms = tuple(dict.fromkeys(arm.replace("ours", "optimize") for arm in arms))
    return Line(section, setting.name, setting.phase, arms, value, partial(model_case, setting), **how)


def block_lines() -> Iterator[Line]:
    """Two blocks of five models: training and inference, two batches, bfloat16 and autocast; then max-autotune."""
    models = {"ViT-B": 4, "ViT-S": 3, "ViT-L": 2, VIT5: 3, "DINOv2-B": 1}
    for (model, worth), batch, phase, autocast in product(
        models.items(), (256, 64), ("training", "forward"), (False, True)
    ):
        value = worth * (2 if batch == 256 else 1) * (1 if autocast == (phase == "forward") else 2)
        setting = Setting(model, batch, phase, autocast)
        yield _line("blocks", setting, BLOCK_ARMS, value, seconds=0.3)
        if batch == 256:  # a batch of 64 takes as long to tune, and its products choose among the same kernels
            arms = (f"torch.compile {AUTOTUNED}", f"ours, compiled {AUTOTUNED}")
            value *= 2 if phase == "forward" else 1  # it has fewer products to tune
            yield _line("autotune", setting, arms, value, seconds=0.3)


def direct_lines() -> Iterator[Line]:
    """Two blocks of small batches, where Python's time counts: our backend beside Inductor alone."""
    arms = ("torch.compile", "torch.compile reduce-overhead", *BACKEND_ARMS)
    for model, batch, phase in product(("ViT-Ti", "ViT-S"), (8, 64), ("forward", "training")):
        value = (2 if batch == 8 else 1) * (2 if phase == "forward" else 1)
        yield _line("direct", Setting(model, batch, phase), arms, value, seconds=0.3, default={"": 8.0})


def model_lines() -> Iterator[Line]:
    """Latency of small batches; then whole models, inference and training steps with the optimiser."""
    for model, batch in product(("ViT-B", "ViT-S"), (1, 8, 64)):
        setting = Setting(model, batch, "forward", whole=True, latency=True)
        arms = ("torch.compile reduce-overhead", OURS_GRAPH, OPTIMIZED_GRAPH)
        value = (2 if model == "ViT-B" else 1) * (2 if batch < 64 else 1)
        yield _line("latency", setting, arms, value, seconds=0.3, latency=True, default={"": 2.0, arms[0]: 15.0})
    for (model, worth), phase in product({"ViT-B": 4, VIT5: 3, "ViT-S": 3, "Swin-T": 2}.items(), ("step", "forward")):
        setting = Setting(model, 256, phase, autocast=phase == "step", whole=True)
        usual = {"": 2.0, "torch.compile": 20.0}
        yield _line("models", setting, BLOCK_ARMS[:3], worth, seconds=0.6, default=usual)


# Ops, tuning, correctness


def op_case(name: str, shape: op_cases.Shape, device: torch.device, dry: bool) -> Case:
    """An op at the sizes of a model."""
    small = replace(op_cases.TINY, name=shape.name)
    case = op_cases.case(name, small if dry else shape, torch.bfloat16, device)
    return replace(case, name=f"{name} {shape.name} batch {BATCH}", facts=case.facts | dict(batch=BATCH))


def op_lines() -> Iterator[Line]:
    """Ops of the five models in bfloat16, ViT-B's first; attention and products have lines of their own."""
    names = "mlp", "layer_norm", "add_layer_norm", "patch_embed", "depthwise", "deformable_attention"
    for name, shape, phase in product(names, op_cases.FULL, ("forward", "backward")):
        arms = ("ours eager", "as planned")
        value = 2 if shape.name == "ViT-B/16" else 1
        case, build = f"{name} {shape.name} batch {BATCH}", partial(op_case, name, shape)
        yield Line("ops", case, phase, arms, value, build)


def run_tuning(result: ResultFile, device: torch.device) -> None:
    """Launch parameters; `python -m benchmarks.tune --adopt FILE` writes them into kernels/tuned."""
    tune.run(result, device, partial(correctness.kernels_on, device))


def run_ways(result: ResultFile, device: torch.device) -> None:
    """Ways of blocks, with the launch parameters in kernels/tuned; `--adopt` writes them there too."""
    context = partial(using_backend, "auto") if device.type == "cuda" else partial(correctness.kernels_on, device)
    tune.measure_ways(result, device, context)


def lines() -> list[Line]:
    """The whole list."""
    return [
        Line("correctness", "correctness", value=1.0, run=correctness.run, default={"": 40.0}),
        *attention_lines(),
        *product_lines(),
        *block_lines(),
        *direct_lines(),
        *model_lines(),
        *op_lines(),
        Line("ways", "ways", run=run_ways, default={"": 40.0}),
        Line("tuning", "tuning", run=run_tuning, default={"": 70.0}),
    ]
