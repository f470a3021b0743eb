"""Whole models as cases: inference and the training step, every arm with the same random weights and images."""

import contextlib
import copy
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

import fastvit_triton
from fastvit_triton import create_model, load_weights, save_weights

from .arms import Arm, Case, absent, compiled, switched
from .match import Named, leaves
from .record import told

TORCHVISION = {"vit_base_patch16_224": "vit_b_16", "vit_large_patch16_224": "vit_l_16"}
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
    Run(model, 2, training, SHORT) for model in ("vit_tiny_patch16_224", "vit_small_patch16_224") for training in (0, 1)
)
TINY = tuple(Run("vit_tiny_patch16_224", 2, training, dict(img_size=32, depth=1)) for training in (False, True))


class Forward:
    """A module as an arm's call: inside its contexts, and giving the tensor that all arms give."""

    def __init__(self, module: nn.Module, *around: Callable, run: Callable | None = None) -> None:
        self.module, self._around, self._run = module, around, module if run is None else run

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        with contextlib.ExitStack() as stack:
            for enter in self._around:
                stack.enter_context(enter())
            return next(leaves(self._run(image)))


class _Outputs(nn.Module):
    """transformers' models take pixel_values by name and say more than logits."""

    def __init__(self, module: nn.Module, pick: str) -> None:
        super().__init__()
        self.module, self._pick = module, pick

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return getattr(self.module(pixel_values=image), self._pick)


class Encoder(nn.Module):
    """A plain timm-like ViT whose blocks are one nn.TransformerEncoder, with the same weights: its fast path."""

    def __init__(self, vit: nn.Module) -> None:
        super().__init__()
        D, H, depth = vit.embed_dim, vit.config.num_heads, len(vit.blocks)
        layer = nn.TransformerEncoderLayer(
            D, H, 4 * D, 0.0, "gelu", layer_norm_eps=vit.blocks[0].norm1.eps, batch_first=True, norm_first=True
        )
        self.vit = vit
        self.encoder = nn.TransformerEncoder(layer, depth)
        for theirs, ours in zip(self.encoder.layers, vit.blocks, strict=True):
            attention, mlp = ours.attn, ours.mlp
            theirs.self_attn.in_proj_weight, theirs.self_attn.in_proj_bias = attention.qkv.weight, attention.qkv.bias
            theirs.self_attn.out_proj = attention.proj
            theirs.linear1, theirs.linear2, theirs.norm1, theirs.norm2 = mlp.fc1, mlp.fc2, ours.norm1, ours.norm2

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        vit = self.vit
        x = vit.patch_embed(image, vit.positions(vit.patch_embed.grid_of(image)), torch.cat(vit.prefix(), 1))
        return vit.forward_head(vit.norm(self.encoder(x)))


def randomized(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Fresh values everywhere, rounded to dtype: no zero head and no LayerScale of 1e-6 hides an error."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            spread = p[0].numel() ** -0.5 if p.dim() in (2, 4) else 0.1
            p.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, spread)
            p.copy_(p.to(dtype))
    return model


def case(run: Run, dtype: torch.dtype, device: torch.device) -> Case:
    """The case of a run, its models built."""
    if run.model in VIT_PYTORCH:
        return _vit_pytorch(run, dtype, device)
    with device:
        base = create_model(run.model, **run.options)
        first = _torchvision(run, base) if absent("torchvision") is None else None
        randomized(base if first is None else first, dtype)
        if first is not None:
            load_weights(base, first.state_dict())
        base = base.to(dtype).train(run.training).requires_grad_(run.training)
        truth = copy.deepcopy(base).double()
        arms = [arm for arm in _arms(run, base, first, dtype, device)]
    work = flops(base) * run.batch, 0.0
    truth = Forward(truth, partial(switched, "torch"))
    return _finished(run, dtype, device, arms, truth, base.patch_embed.img_size, work)


def _finished(
    run: Run,
    dtype: torch.dtype,
    device: torch.device,
    arms: list[Arm],
    truth: Forward,
    size: tuple[int, int],
    work: tuple[float, float] | None,
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
        arms.append(_optimized(base))
        truth = Forward(copy.deepcopy(base).double())
    return _finished(run, dtype, device, arms, truth, (sizes["image_size"],) * 2, None)


def _optimized(model: nn.Module) -> Arm:
    """What this package makes of a model that is not its own."""

    def build() -> Forward:
        from fastvit_triton import optimize

        converted = copy.deepcopy(model)
        optimize(converted)
        return Forward(converted)

    return _built("optimized by us", None, build)


def build() -> Forward:
        converted = copy.deepcopy(model)
        optimize(converted)
        return Forward(converted)

    return _built("optimized by us", why or (None if optimize else "fastvit_triton.optimize is not there"), build)


def _learning(call: Forward, arguments: dict) -> Named:
    """Parameters by our names; of a model that spells them otherwise the stem's weights, which all layers reach."""
    named = dict(call.module.named_parameters())
    stems = [p for p in named.values() if p.dim() == 4]
    ours = "patch_embed.proj.weight"
    return named if ours in named else {ours: stems[0]} if stems else named


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
    yield Arm("torch.compile", None, Forward(base, plain, run=compiled(base)))
    for mode in run.modes:
        yield Arm(f"torch.compile {mode}", None, Forward(base, plain, run=compiled(base, mode)))
        yield Arm(f"ours compiled {mode}", None, Forward(base, auto, run=compiled(base, mode)))
    yield Arm("ours eager", None, Forward(base, auto))
    yield Arm("ours compiled", None, Forward(base, auto, run=compiled(base)))
    yield from _timm(run, base, dtype, device)
    yield _built("transformers", absent("transformers"), lambda: _transformers(base, dtype))
    if run.model in TORCHVISION:
        why = absent("torchvision") or (None if first is not None else "takes no such options")
        yield _built("torchvision", why, lambda: Forward(first.to(dtype)))
    if not run.training:
        yield _built(
            "nn.TransformerEncoder", _no_fast_path(base, device), lambda: Forward(Encoder(copy.deepcopy(base)), plain)
        )


def _built(name: str, reason: str | None, build: Callable[[], Forward]) -> Arm:
    """An arm, or why it could not be built."""
    if reason is not None:
        return Arm(name, reason)
    try:
        return Arm(name, None, build())
    except Exception as error:
        return Arm(name, told(error))


def _timm(run: Run, base: nn.Module, dtype: torch.dtype, device: torch.device) -> Iterator[Arm]:
    """timm's own model in dtype and under autocast, and what this package makes of it."""
    why = absent("timm")
    if why is None:
        import timm

        why = None if timm.is_model(run.model) else "timm has no such model"

    def theirs(kind: torch.dtype) -> nn.Module:
        model = timm.create_model(run.model, **({"num_classes": 0} if not base.num_classes else {}), **run.options)
        model.load_state_dict(base.state_dict())
        return model.to(kind)

    yield _built(f"timm {dtype}".replace("torch.", ""), why, lambda: Forward(theirs(dtype)))
    if dtype != torch.float32:
        amp = partial(torch.autocast, device.type, dtype)
        yield _built("timm AMP", why, lambda: Forward(theirs(torch.float32), amp))
    if why is None:
        yield _optimized(theirs(dtype))
    def backend() -> Forward:
        model = theirs(dtype)
        return Forward(model, run=compiled(model, backend="fastvit_triton"))

    yield _built("compiled, our backend", why, backend)


def _transformers(base: nn.Module, dtype: torch.dtype) -> Forward:
    """transformers' ViT or DINOv2 with our weights; a ValueError says that it is neither."""
    import transformers

    c = base.config
    plain = fastvit_triton.ViTConfig(embed_dim=c.embed_dim, num_heads=c.num_heads, depth=c.depth)
    plain = plain.replace(img_size=c.img_size, patch_size=c.patch_size, num_classes=c.num_classes)
    sizes = dict(hidden_size=c.embed_dim, num_hidden_layers=c.depth, num_attention_heads=c.num_heads)
    sizes |= dict(image_size=c.img_size, patch_size=c.patch_size, layer_norm_eps=c.eps, attn_implementation="sdpa")
    if c == plain:
        config = transformers.ViTConfig(**sizes, intermediate_size=4 * c.embed_dim, num_labels=c.num_classes)
        model, pick = transformers.ViTForImageClassification(config), "logits"
    elif c == plain.replace(init_values=c.init_values) and not c.num_classes:
        model, pick = transformers.Dinov2Model(transformers.Dinov2Config(**sizes)), "pooler_output"
    else:
        raise ValueError("only plain ViT and DINOv2 are compared with transformers")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_weights(base, path, layout="transformers")
        model.load_state_dict(load_file(path))
    return Forward(_Outputs(model.to(dtype), pick))


def _torchvision(run: Run, base: nn.Module) -> nn.Module | None:
    """torchvision's model of that name, where it has one."""
    if run.model not in TORCHVISION or run.options:
        return None
    import torchvision

    return getattr(torchvision.models, TORCHVISION[run.model])(weights=None)


def _no_fast_path(base: nn.Module, device: torch.device) -> str | None:
    """Why nn.TransformerEncoder's fast path would not run this model."""
    if base.config.num_heads % 2:
        return "the fast path refuses an odd number of heads"
    plain = base.config.replace(img_size=224, num_classes=1000, depth=12)
    known = fastvit_triton.ViTConfig(embed_dim=plain.embed_dim, num_heads=plain.num_heads, depth=12)
    if plain != known.replace(patch_size=plain.patch_size):
        return "only a plain ViT is one nn.TransformerEncoder"
    return None
