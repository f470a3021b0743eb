"""Benchmark cases of whole models: inference and training steps; all variants have the same weights and images."""

import copy
import dataclasses
import importlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ..deploy.cuda_graph import GraphedModel, cuda_graph
from ..expected.count import count
from ..kernels.backend import using_backend
from ..kernels.settings import forcing
from ..layers.embed import sides
from ..models import create_model, list_models
from ..models.transformer import VisionTransformer
from ..models.weights.load import load_weights
from .compare import Named
from .libraries import (
    MEDIUM,
    TORCHVISION,
    Encoder,
    ModelCall,
    build_variant,
    medium_variant,
    no_fast_path,
    optimized_variant,
    timm_variants,
    torchvision_model,
    transformers_model,
)
from .variants import Case, Variant, absent, compiled

VIT_PYTORCH = {"vit-pytorch SimpleViT-B": (768, 12, 12), "vit-pytorch SimpleViT-S": (384, 12, 6)}
OPEN_CLIP = {"open_clip ViT-B-16": (768, 12, 12)}  # width, depth, heads of CLIP's image encoder
GRAPH = "ours, CUDA graph"
FOREIGN = ("eager", MEDIUM, "optimized by us", "torch.compile", "optimized, compiled", "compiled, our backend")


@dataclass(frozen=True)
class CaseRun:
    """A model and batch size; `options` are those of `create_model`, `modes` are additional ones of torch.compile."""

    model: str
    batch: int
    training: bool = False
    options: dict = field(default_factory=dict)
    modes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the case, unique in a result file."""
        return " ".join((f"{self.model} batch {self.batch}", "training" if self.training else "inference", *self.modes))


def randomized(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Sets all parameters to random values, rounded to dtype; zero heads and small LayerScales would hide errors."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            spread = p[0].numel() ** -0.5 if p.dim() in (2, 4) else 0.1
            p.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, spread)
            p.copy_(p.to(dtype))
    return model


def known(name: str) -> str | None:
    """Why a model cannot be measured; None if it is in this package, timm, vit-pytorch or open_clip."""
    if name in list_models() or name in VIT_PYTORCH:
        return None
    if name in OPEN_CLIP:
        return absent("open_clip")
    if why := absent("timm"):
        return why
    return None if importlib.import_module("timm").is_model(name) else "timm has no such model"


def variant_names(run: CaseRun) -> tuple[str, ...]:
    """Names of all variants of a run, including those that cannot run here."""
    if run.model not in list_models():
        return FOREIGN
    modes = [variant for mode in run.modes for variant in (f"torch.compile {mode}", f"ours compiled {mode}")]
    theirs = ["timm", "timm AMP", "optimized by us", "compiled, our backend", "transformers"]
    theirs += ["torchvision"] * (run.model in TORCHVISION) + ["nn.TransformerEncoder"] * (not run.training)
    kernels = ("our kernels", "our kernels, compiled", *[GRAPH] * (not run.training))
    return ("eager", MEDIUM, "ours eager", "torch.compile", "ours compiled", *kernels, *modes, *theirs)


def case(run: CaseRun, dtype: torch.dtype, device: torch.device) -> Case:
    """Builds the models of a run and returns its case.

    Variants named "ours" run as `kernels.choose` chooses, "our kernels" always run fused.
    """
    if run.model not in list_models():
        return _foreign(run, dtype, device)
    with device:
        base = create_model(run.model, **run.options)
        first = torchvision_model(run.model, run.options)
        randomized(base if first is None else first, dtype)
        if first is not None:
            load_weights(base, first.state_dict())
        base = base.to(dtype).train(run.training).requires_grad_(run.training)
        truth = copy.deepcopy(base).double()
        variants = list(_variants(run, base, first, dtype, device))
    size = base.config.in_chans, *sides(base.config.img_size)
    exact = ModelCall(truth, partial(using_backend, "torch"))
    return _finished(run, dtype, device, variants, exact, size, (flops(base) * run.batch, None))


def _finished(
    run: CaseRun,
    dtype: torch.dtype,
    device: torch.device,
    variants: list[Variant],
    truth: ModelCall,
    size: tuple[int, int, int],
    work: tuple[float, float | None] | None,
) -> Case:
    """Builds the case, and sets all modules to training or inference."""
    for call in (truth, *(variant.call for variant in variants if variant.reason is None)):
        call.module.train(run.training).requires_grad_(run.training)

    def inputs(seed: int) -> dict:
        generator = torch.Generator(device).manual_seed(seed)
        return dict(image=torch.randn(run.batch, *size, generator=generator, device=device).to(dtype))

    facts = dict(model=run.model, batch=run.batch, image=size, options=run.options)
    phases = ("training",) if run.training else ("forward",)
    return Case(run.name, dtype, inputs, variants, truth, phases, facts, work, True, _learning)


def _foreign(run: CaseRun, dtype: torch.dtype, device: torch.device) -> Case:
    """Builds the case of a model of another library; the truth is the model in float64."""
    build = _vit_pytorch if run.model in VIT_PYTORCH else _open_clip if run.model in OPEN_CLIP else _timm
    with device:
        base, size = build(run)
        base = randomized(base, dtype).to(dtype).train(run.training)
        # no reader knows the blocks of open_clip, which `optimize` therefore captures
        example = torch.zeros(run.batch, *size, dtype=dtype) if run.model in OPEN_CLIP else None
        fast = optimized_variant(base, example)
        graphed = copy.deepcopy(base)
        variants = [Variant("eager", None, ModelCall(base)), medium_variant(base, dtype), fast]
        variants.append(Variant("torch.compile", None, ModelCall(base, run=compiled(base))))
        both = ModelCall(fast.call.module, run=compiled(fast.call.module)) if fast.reason is None else None
        variants.append(Variant("optimized, compiled", fast.reason, both))
        graph = compiled(graphed, ours=True)
        variants.append(Variant("compiled, our backend", None, ModelCall(graphed, run=graph)))
        truth = ModelCall(copy.deepcopy(base).double())
    return _finished(run, dtype, device, variants, truth, size, None)


def _vit_pytorch(run: CaseRun) -> tuple[nn.Module, tuple[int, int, int]]:
    from vit_pytorch import SimpleViT

    dim, depth, heads = VIT_PYTORCH[run.model]
    sizes = dict(dim=dim, depth=depth, heads=heads, mlp_dim=4 * dim, image_size=224, dim_head=dim // heads)
    sizes |= run.options
    return SimpleViT(patch_size=16, num_classes=1000, **sizes), (3, *(sizes["image_size"],) * 2)


def _open_clip(run: CaseRun) -> tuple[nn.Module, tuple[int, int, int]]:
    if why := known(run.model):
        raise ValueError(f"model is {run.model!r}: {why}")
    width, layers, heads = OPEN_CLIP[run.model]
    sizes = dict(image_size=224, patch_size=16, width=width, layers=layers, heads=heads, output_dim=512) | run.options
    encoder = importlib.import_module("open_clip.transformer").VisionTransformer
    return encoder(mlp_ratio=4.0, **sizes), (3, *(sizes["image_size"],) * 2)


def _timm(run: CaseRun) -> tuple[nn.Module, tuple[int, int, int]]:
    if why := known(run.model):
        raise ValueError(f"model is {run.model!r}: no model of ours has that name, and {why}")
    model = importlib.import_module("timm").create_model(run.model, **run.options)
    side = run.options.get("img_size")
    return model, (3, side, side) if side else tuple(model.default_cfg["input_size"])


def _graphed(base: nn.Module, run: CaseRun) -> ModelCall:
    """The model run by a CUDA graph, which the first call captures."""
    graphs: list[GraphedModel] = []

    def call(image: torch.Tensor) -> object:
        if not graphs:
            graphs.append(cuda_graph(base, image, batch_sizes=(run.batch,), max_graphs=1))
        return graphs[0](image)

    return ModelCall(base, partial(using_backend, "auto"), run=call)


def _learning(call: ModelCall, arguments: dict) -> Named:
    """Parameters by name; of other libraries' names the patch projection gets ours: its gradient needs all layers."""
    named: Named = dict(call.module.named_parameters())
    ours = "patch_embed.proj.weight"
    if ours in named:
        return named
    return {ours if p.dim() == 4 else f"theirs: {name}": p for name, p in named.items()}


def flops(model: VisionTransformer) -> float:
    """Flops of the forward pass of one image through a model from `create_model`: matrix products and convolutions."""
    with torch.device("meta"), using_backend("torch"), torch.no_grad():
        twin = create_model(model.variant, **dataclasses.asdict(model.config)).to_empty(device="cpu").eval()
        image = torch.empty(1, model.config.in_chans, *sides(model.config.img_size), device="cpu")
        return float(count(twin, image).flops)


def least_bytes(case: Case, copies: int) -> int:
    """Lower bound of the memory for measuring a case, in bytes: images, and activations in float64.

    In inference the activations of the widest layer are counted, in training those of all layers; weights are not.
    """
    model = case.truth.module
    batch = case.facts["batch"]
    stem = getattr(model, "patch_embed", None)
    D = getattr(model, "embed_dim", 0)
    tokens = batch * getattr(stem, "num_patches", 0)
    blocks = len(getattr(model, "blocks", ()))
    kept = 16 * D * blocks if "training" in case.phases else 10 * D  # values per token
    return batch * math.prod(case.facts["image"]) * (copies * case.dtype.itemsize + 8) + tokens * kept * 8


def _variants(
    run: CaseRun, base: VisionTransformer, first: nn.Module | None, dtype: torch.dtype, device: torch.device
) -> Iterator[Variant]:
    plain = partial(using_backend, "torch")
    auto = partial(using_backend, "auto")
    kernels = partial(forcing, "fused")
    yield Variant("eager", None, ModelCall(base, plain))
    yield medium_variant(base, dtype, plain)
    yield Variant("ours eager", None, ModelCall(base, auto))
    yield Variant("torch.compile", None, ModelCall(base, plain, run=compiled(base)))
    ours = compiled(base)
    why = None if device.type == "cuda" else "needs a GPU"
    yield Variant("ours compiled", None, ModelCall(base, auto, run=ours))
    yield Variant("our kernels", why, ModelCall(base, auto, kernels))
    fused = compiled(base)  # compiled separately, as the way is chosen while tracing
    yield Variant("our kernels, compiled", why, ModelCall(base, auto, kernels, run=fused))
    if not run.training:
        yield build_variant(GRAPH, why, lambda: _graphed(base, run))
    for mode in run.modes:
        yield Variant(f"torch.compile {mode}", None, ModelCall(base, plain, run=compiled(base, mode)))
        yield Variant(f"ours compiled {mode}", None, ModelCall(base, auto, run=compiled(base, mode)))
    yield from timm_variants(run.model, run.options, base, dtype, device)
    yield build_variant("transformers", absent("transformers"), lambda: transformers_model(base, dtype))
    if run.model in TORCHVISION:
        theirs: Any = first
        why = absent("torchvision") or (None if theirs is not None else "takes no such options")
        yield build_variant("torchvision", why, lambda: ModelCall(theirs.to(dtype)))
    if not run.training:
        yield build_variant(
            "nn.TransformerEncoder", no_fast_path(base), lambda: ModelCall(Encoder(copy.deepcopy(base)), plain)
        )
