"""Whole models as cases: inference and the training step, every arm with the same random weights and images."""

import copy
import importlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from ..kernels.backend import using_backend
from ..models import create_model, list_models
from ..weights import load_weights
from .compare import Named
from .libraries import (
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
from .variants import Arm, Case, absent, compiled, forcing

VIT_PYTORCH = {"vit-pytorch SimpleViT-B": (768, 12, 12), "vit-pytorch SimpleViT-S": (384, 12, 6)}
FOREIGN = ("eager", "optimized by us", "torch.compile", "optimized, compiled", "compiled, our backend")


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


def randomized(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Fresh values everywhere, rounded to dtype: no zero head and no LayerScale of 1e-6 hides an error."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            spread = p[0].numel() ** -0.5 if p.dim() in (2, 4) else 0.1
            p.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, spread)
            p.copy_(p.to(dtype))
    return model


def known(name: str) -> str | None:
    """Why there is no such model to measure: ours, timm's or vit-pytorch's; None where there is."""
    if name in list_models() or name in VIT_PYTORCH:
        return None
    if why := absent("timm"):
        return why
    return None if importlib.import_module("timm").is_model(name) else "timm has no such model"


def arms_of(run: Run) -> tuple[str, ...]:
    """The arms of a run, whether they are here or not."""
    if run.model not in list_models():
        return FOREIGN
    modes = [arm for mode in run.modes for arm in (f"torch.compile {mode}", f"ours compiled {mode}")]
    theirs = ["timm", "timm AMP", "optimized by us", "compiled, our backend", "transformers"]
    theirs += ["torchvision"] * (run.model in TORCHVISION) + ["nn.TransformerEncoder"] * (not run.training)
    kernels = ("our kernels", "our kernels, compiled")
    return ("eager", "ours eager", "torch.compile", "ours compiled", *kernels, *modes, *theirs)


def case(run: Run, dtype: torch.dtype, device: torch.device) -> Case:
    """The case of a run, its models built.

    "ours" takes what the dispatcher chooses, "our kernels" are ours alone.

    Raises:
        ValueError: the model is not ours, timm's or vit-pytorch's.
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
        arms = list(_arms(run, base, first, dtype, device))
    truth = Forward(truth, partial(using_backend, "torch"))
    size = base.config.in_chans, *base.patch_embed.img_size
    return _finished(run, dtype, device, arms, truth, size, (flops(base) * run.batch, None))


def _finished(
    run: Run,
    dtype: torch.dtype,
    device: torch.device,
    arms: list[Arm],
    truth: Forward,
    size: tuple[int, int, int],
    work: tuple[float, float | None] | None,
) -> Case:
    """The case, with all modules in the mode that it asks for."""
    for call in (truth, *(arm.call for arm in arms if arm.reason is None)):
        call.module.train(run.training).requires_grad_(run.training)

    def inputs(seed: int) -> dict:
        generator = torch.Generator(device).manual_seed(seed)
        return dict(image=torch.randn(run.batch, *size, generator=generator, device=device).to(dtype))

    facts = dict(model=run.model, batch=run.batch, image=size, options=run.options)
    phases = ("training",) if run.training else ("forward",)
    return Case(run.name, dtype, inputs, arms, truth, phases, facts, work, True, _learning)


def _foreign(run: Run, dtype: torch.dtype, device: torch.device) -> Case:
    """A model of vit-pytorch, or of timm where we have none of that name; its layers are its own: it is its truth."""
    with device:
        base, size = _vit_pytorch(run) if run.model in VIT_PYTORCH else _timm(run)
        base = randomized(base, dtype).to(dtype)
        fast, graphed = optimized(base), copy.deepcopy(base)
        arms = [Arm("eager", None, Forward(base)), fast]
        arms.append(Arm("torch.compile", None, Forward(base, run=compiled(base))))
        both = Forward(fast.call.module, run=compiled(fast.call.module)) if fast.reason is None else None
        arms.append(Arm("optimized, compiled", fast.reason, both))
        graph = compiled(graphed, ours=True)
        arms.append(Arm("compiled, our backend", None, Forward(graphed, run=graph)))
        truth = Forward(copy.deepcopy(base).double())
    return _finished(run, dtype, device, arms, truth, size, None)


def _vit_pytorch(run: Run) -> tuple[nn.Module, tuple[int, int, int]]:
    from vit_pytorch import SimpleViT

    dim, depth, heads = VIT_PYTORCH[run.model]
    sizes = dict(dim=dim, depth=depth, heads=heads, mlp_dim=4 * dim, image_size=224, dim_head=dim // heads)
    sizes |= run.options
    return SimpleViT(patch_size=16, num_classes=1000, **sizes), (3, *(sizes["image_size"],) * 2)


def _timm(run: Run) -> tuple[nn.Module, tuple[int, int, int]]:
    if why := known(run.model):
        raise ValueError(f"model is {run.model!r}: we have none by that name, and {why}")
    model = importlib.import_module("timm").create_model(run.model, **run.options)
    side = run.options.get("img_size")
    return model, (3, side, side) if side else tuple(model.default_cfg["input_size"])


def _learning(call: Forward, arguments: dict) -> Named:
    """Every parameter; where they are spelled otherwise, the stem's weights, which all layers reach, by our name."""
    named, ours = dict(call.module.named_parameters()), "patch_embed.proj.weight"
    if ours in named:
        return named
    return {ours if p.dim() == 4 else f"theirs: {name}": p for name, p in named.items()}


def flops(model: nn.Module) -> float:
    """Of one image's forward pass: two per weight of a linear layer and token, and attention's two products."""
    c, blocks, stem = model.config, len(model.blocks), model.patch_embed
    N = stem.num_patches + model.num_prefix_tokens
    weights = sum(p.numel() for p in model.blocks.parameters() if p.dim() == 2)
    projection = 2 * stem.num_patches * c.embed_dim * c.in_chans * math.prod(stem.patch_size)
    return 2.0 * N * weights + 4.0 * blocks * N * N * c.embed_dim + projection


def least_bytes(case: Case, copies: int) -> int:
    """What measuring the case allocates at least: images, and the widest layer of the model in float64, or all layers.

    The weights, and what other arms hold at the same time, come on top.
    """
    model, batch = case.truth.module, case.facts["batch"]
    tokens, D = batch * getattr(model.patch_embed, "num_patches", 0), getattr(model, "embed_dim", 0)
    kept = 16 * D * len(model.blocks) if "training" in case.phases else 10 * D  # values a token
    return batch * math.prod(case.facts["image"]) * (copies * case.dtype.itemsize + 8) + tokens * kept * 8


def _arms(
    run: Run, base: nn.Module, first: nn.Module | None, dtype: torch.dtype, device: torch.device
) -> Iterator[Arm]:
    plain, auto = partial(using_backend, "torch"), partial(using_backend, "auto")
    yield Arm("eager", None, Forward(base, plain))
    yield Arm("ours eager", None, Forward(base, auto))
    yield Arm("torch.compile", None, Forward(base, plain, run=compiled(base)))
    ours, why = compiled(base), None if device.type == "cuda" else "needs a GPU"
    yield Arm("ours compiled", None, Forward(base, auto, run=ours))
    yield Arm("our kernels", why, Forward(base, auto, forcing))
    yield Arm("our kernels, compiled", why, Forward(base, auto, forcing, run=ours))  # ops choose when they run
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
