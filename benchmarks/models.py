"""Whole models as cases: inference and the training step, every arm with the same random weights and images."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from fastvit_triton import create_model, load_weights

from .arms import Arm, Case, absent, compiled, switched
from .match import Named
from .peers import (
    TORCHVISION,
    Encoder,
    Forward,
    built,
    no_fast_path,
    optimized,
    timm_arms,
    torchvision_model,
    transformers_model,
)

VIT_PYTORCH = {"vit-pytorch SimpleViT-B": (768, 12, 12), "vit-pytorch SimpleViT-S": (384, 12, 6)}


@dataclass(frozen=True)
class Run:
    """A model at a batch size; `options` are those of `create_model`, `modes` further ones of torch.compile."""

    model: str
    batch: int
    training: bool = False
    options: dict = field(default_factory=dict)
    modes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Unique in a file."""
        return " ".join((f"{self.model} batch {self.batch}", "training" if self.training else "inference", *self.modes))


# What a GPU is asked first comes first.
FULL = (
    Run("vit_base_patch16_224", 256),
    Run("vit_base_patch16_224", 128, True),
    Run("vit_tiny_patch16_224", 256),
    Run("vit_small_patch16_224", 256),
    Run("vit_large_patch16_224", 256),
    Run("vit_base_patch14_dinov2", 32),
    Run("vit_small_patch16_224", 128, True),
    Run("vit_huge_patch14_224", 128),
    Run("vit_base_patch16_siglip_224", 256),
    Run("vit_base_patch16_dinov3", 256),
    Run("deit3_base_patch16_224", 256),
    Run("vit-pytorch SimpleViT-B", 256),
    Run("vit_large_patch16_224", 64, True),
    Run("vit_tiny_patch16_224", 256, True),
    Run("vit_huge_patch14_224", 32, True),
    Run("vit_base_patch16_224", 256, modes=("max-autotune-no-cudagraphs",)),
)
LATENCY = tuple(
    Run(f"vit_{size}_patch16_224", batch, modes=("reduce-overhead",))  # with CUDA graphs
    for size in ("base", "small", "large")
    for batch in (1, 8, 64)
)
SHORT = dict(img_size=64, depth=2)
SMALL = tuple(
    Run(model, 2, training, SHORT)
    for model in ("vit_tiny_patch16_224", "vit_small_patch16_224")
    for training in (False, True)
)
TINY = tuple(Run("vit_tiny_patch16_224", 2, training, dict(img_size=32, depth=1)) for training in (False, True))


def randomized(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Fresh values everywhere, rounded to dtype: no zero head and no LayerScale of 1e-6 hides an error."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            spread = p[0].numel() ** -0.5 if p.dim() in (2, 4) else 0.1
            p.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, spread)
            p.copy_(p.to(dtype))
    return model


def arms_of(run: Run) -> tuple[str, ...]:
    """The arms of a run, whether they are here or not."""
    if run.model in VIT_PYTORCH:
        return "eager", "torch.compile", "optimized by us"
    modes = [arm for mode in run.modes for arm in (f"torch.compile {mode}", f"ours compiled {mode}")]
    theirs = ["timm", "timm AMP", "optimized by us", "compiled, our backend", "transformers"]
    theirs += ["torchvision"] * (run.model in TORCHVISION) + ["nn.TransformerEncoder"] * (not run.training)
    return ("eager", "ours eager", "torch.compile", "ours compiled", *modes, *theirs)


def case(run: Run, dtype: torch.dtype, device: torch.device) -> Case:
    """The case of a run, its models built."""
    if run.model in VIT_PYTORCH:
        return _vit_pytorch(run, dtype, device)
    with device:
        base = create_model(run.model, **run.options)
        first = torchvision_model(run.model, run.options)
        randomized(base if first is None else first, dtype)
        if first is not None:
            load_weights(base, first.state_dict())
        base = base.to(dtype).train(run.training).requires_grad_(run.training)
        truth = copy.deepcopy(base).double()
        arms = [arm for arm in _arms(run, base, first, dtype, device)]
    work = flops(base) * run.batch, None
    truth = Forward(truth, partial(switched, "torch"))
    return _finished(run, dtype, device, arms, truth, base.patch_embed.img_size, work)


def _finished(
    run: Run,
    dtype: torch.dtype,
    device: torch.device,
    arms: list[Arm],
    truth: Forward,
    size: tuple[int, int],
    work: tuple[float, float | None] | None,
) -> Case:
    """The case, with all modules in the mode that it asks for."""
    for call in (truth, *(arm.call for arm in arms if arm.reason is None)):
        call.module.train(run.training).requires_grad_(run.training)

    def inputs(seed: int) -> dict:
        generator = torch.Generator(device).manual_seed(seed)
        return dict(image=torch.randn(run.batch, 3, *size, generator=generator, device=device).to(dtype))

    facts = dict(model=run.model, batch=run.batch, options=run.options)
    phases = ("training",) if run.training else ("forward",)
    return Case(run.name, dtype, inputs, arms, truth, phases, facts, work, _learning)


def _vit_pytorch(run: Run, dtype: torch.dtype, device: torch.device) -> Case:
    """A model of vit-pytorch, alone and optimized; its layers are its own, so it is its own truth."""
    from vit_pytorch import SimpleViT

    dim, depth, heads = VIT_PYTORCH[run.model]
    sizes = (
        dict(dim=dim, depth=depth, heads=heads, mlp_dim=4 * dim, image_size=224, dim_head=dim // heads) | run.options
    )
    with device:
        base = randomized(SimpleViT(patch_size=16, num_classes=1000, **sizes), dtype).to(dtype)
        arms = [Arm("eager", None, Forward(base)), Arm("torch.compile", None, Forward(base, run=compiled(base)))]
        arms.append(optimized(base))
        truth = Forward(copy.deepcopy(base).double())
    return _finished(run, dtype, device, arms, truth, (sizes["image_size"],) * 2, None)


def _learning(call: Forward, arguments: dict) -> Named:
    """Every parameter; where they are spelled otherwise, the stem's weights, which all layers reach, by our name."""
    named, ours = dict(call.module.named_parameters()), "patch_embed.proj.weight"
    if ours in named:
        return named
    return {ours if p.dim() == 4 else f"theirs: {name}": p for name, p in named.items()}


def flops(model: nn.Module) -> float:
    """Of one image's forward pass: two per weight of a linear layer and token, and attention's two products."""
    c, blocks = model.config, len(model.blocks)
    N = model.patch_embed.num_patches + model.num_prefix_tokens
    weights = sum(p.numel() for p in model.blocks.parameters() if p.dim() == 2)
    stem = (
        2
        * model.patch_embed.num_patches
        * c.embed_dim
        * c.in_chans
        * (model.patch_embed.patch_size[0] * model.patch_embed.patch_size[1])
    )
    return 2.0 * N * weights + 4.0 * blocks * N * N * c.embed_dim + stem


def _arms(
    run: Run, base: nn.Module, first: nn.Module | None, dtype: torch.dtype, device: torch.device
) -> Iterator[Arm]:
    plain, auto = partial(switched, "torch"), partial(switched, "auto")
    yield Arm("eager", None, Forward(base, plain))
    yield Arm("ours eager", None, Forward(base, auto))
    yield Arm("torch.compile", None, Forward(base, plain, run=compiled(base)))
    yield Arm("ours compiled", None, Forward(base, auto, run=compiled(base)))
    for mode in run.modes:
        yield Arm(f"torch.compile {mode}", None, Forward(base, plain, run=compiled(base, mode)))
        yield Arm(f"ours compiled {mode}", None, Forward(base, auto, run=compiled(base, mode)))
    yield from timm_arms(run.model, run.options, base, dtype, device)
    yield built("transformers", absent("transformers"), lambda: transformers_model(base, dtype))
    if run.model in TORCHVISION:
        why = absent("torchvision") or (None if first is not None else "takes no such options")
        yield built("torchvision", why, lambda: Forward(first.to(dtype)))
    if not run.training:
        yield built("nn.TransformerEncoder", no_fast_path(base), lambda: Forward(Encoder(copy.deepcopy(base)), plain))
