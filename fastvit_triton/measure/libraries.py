"""Whole models of other libraries as arms, with our weights: timm, transformers, torchvision, torch's own encoder."""

import contextlib
import copy
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from ..convert import optimize
from ..models.config import ViTConfig
from ..weights import save_weights
from .compare import leaves
from .timeout import noting
from .variants import Arm, absent, compiled

TORCHVISION = {"vit_base_patch16_224": "vit_b_16", "vit_large_patch16_224": "vit_l_16"}


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
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        for theirs, ours in zip(self.encoder.layers, vit.blocks, strict=True):
            attention, mlp = ours.attn, ours.mlp
            theirs.self_attn.in_proj_weight, theirs.self_attn.in_proj_bias = attention.qkv.weight, attention.qkv.bias
            theirs.self_attn.out_proj = attention.proj
            theirs.linear1, theirs.linear2, theirs.norm1, theirs.norm2 = mlp.fc1, mlp.fc2, ours.norm1, ours.norm2

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        vit = self.vit
        x = vit.patch_embed(image, vit.positions(vit.patch_embed.grid_of(image)), torch.cat(vit.prefix(), 1))
        return vit.forward_head(vit.norm(self.encoder(x)))


def built(name: str, reason: str | None, build: Callable[[], Forward]) -> Arm:
    """An arm, or why it could not be built."""
    if reason is not None:
        return Arm(name, reason)
    errors: dict[str, str] = {}
    with noting(errors, name):
        return Arm(name, None, build())
    return Arm(name, errors[name])


def timm_arms(name: str, options: dict, base: nn.Module, dtype: torch.dtype, device: torch.device) -> Iterator[Arm]:
    """timm's own model in dtype and under autocast, and what this package makes of it."""
    why = absent("timm")
    if why is None:
        import timm

        why = None if timm.is_model(name) else "timm has no such model"

    def theirs(kind: torch.dtype) -> nn.Module:
        model = timm.create_model(name, **({"num_classes": 0} if not base.num_classes else {}), **options)
        model.load_state_dict(base.state_dict())
        return model.to(kind)

    yield built("timm", why, lambda: Forward(theirs(dtype)))
    if dtype != torch.float32:
        amp = partial(torch.autocast, device.type, dtype)
        yield built("timm AMP", why, lambda: Forward(theirs(torch.float32), amp))
    if why is None:
        yield optimized(theirs(dtype))

    def backend() -> Forward:
        model = theirs(dtype)
        return Forward(model, run=compiled(model, ours=True))

    yield built("compiled, our backend", why, backend)


def transformers_model(base: nn.Module, dtype: torch.dtype) -> Forward:
    """transformers' ViT or DINOv2 with our weights; a ValueError says that it is neither."""
    import transformers

    c = base.config
    plain = ViTConfig(embed_dim=c.embed_dim, num_heads=c.num_heads, depth=c.depth)
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


def torchvision_model(name: str, options: dict) -> nn.Module | None:
    """torchvision's model of that name, where it has one."""
    if name not in TORCHVISION or options or absent("torchvision"):
        return None
    import torchvision

    return getattr(torchvision.models, TORCHVISION[name])(weights=None)


def no_fast_path(base: nn.Module) -> str | None:
    """Why nn.TransformerEncoder's fast path would not run this model."""
    if base.config.num_heads % 2:
        return "the fast path refuses an odd number of heads"
    plain = base.config.replace(img_size=224, num_classes=1000, depth=12)
    known = ViTConfig(embed_dim=plain.embed_dim, num_heads=plain.num_heads, depth=12)
    if plain != known.replace(patch_size=plain.patch_size):
        return "only a plain ViT is one nn.TransformerEncoder"
    return None


def optimized(model: nn.Module) -> Arm:
    """What this package makes of a model that is not its own."""

    def build() -> Forward:
        converted = copy.deepcopy(model)
        optimize(converted)
        return Forward(converted)

    return built("optimized by us", None, build)
