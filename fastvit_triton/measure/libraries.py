"""Models of other libraries as variants, with our weights: timm, transformers, torchvision, nn.TransformerEncoder."""

import contextlib
import copy
import importlib
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ..convert import optimize
from ..models.config import ViTConfig
from ..models.transformer import VisionTransformer
from ..models.weights.load import save_weights
from .compare import leaves
from .timeout import capturing
from .variants import Variant, absent, compiled

TORCHVISION = {"vit_base_patch16_224": "vit_b_16", "vit_large_patch16_224": "vit_l_16"}
MEDIUM = 'torch.set_float32_matmul_precision("medium")'


class ModelCall:
    """Callable of a variant: runs a module in `contexts` and returns the first output tensor.

    It takes images as `image`, which the module takes as its positional input, or under the module's own names.
    """

    def __init__(self, module: nn.Module, *contexts: Callable, run: Callable | None = None) -> None:
        self.module = module
        self._contexts = contexts
        self._run = module if run is None else run

    def __call__(self, image: torch.Tensor | None = None, **named: torch.Tensor) -> torch.Tensor:
        with contextlib.ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context())
            return next(leaves(self._run(*(() if image is None else (image,)), **named)))


@contextlib.contextmanager
def medium() -> Iterator[None]:
    """Context of PyTorch's float32 products in lower precision, such as TF32, or bfloat16 on CPUs that have it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def medium_variant(module: nn.Module, dtype: torch.dtype, *contexts: Callable) -> Variant:
    """PyTorch's own operators in `contexts` and in `medium`; it is timed also if its result does not match."""
    why = None if dtype == torch.float32 else "its products are not float32"
    return Variant(MEDIUM, why, ModelCall(module, *contexts, medium), reduced=True)


class Encoder(nn.Module):
    """A plain ViT with its blocks replaced by an nn.TransformerEncoder with the same weights, for its fast path."""

    def __init__(self, vit: VisionTransformer) -> None:
        super().__init__()
        D = vit.embed_dim
        H = vit.config.num_heads
        blocks = list[Any](vit.blocks)
        layer = nn.TransformerEncoderLayer(
            D, H, 4 * D, 0.0, "gelu", layer_norm_eps=blocks[0].norm1.eps, batch_first=True, norm_first=True
        )
        self.vit = vit
        self.encoder = nn.TransformerEncoder(layer, len(blocks), enable_nested_tensor=False)
        for theirs, ours in zip(self.encoder.layers, blocks, strict=True):
            attention, mlp = ours.attn, ours.mlp
            theirs.self_attn.in_proj_weight = attention.qkv.weight
            theirs.self_attn.in_proj_bias = attention.qkv.bias
            theirs.self_attn.out_proj = attention.proj
            theirs.linear1 = mlp.fc1
            theirs.linear2 = mlp.fc2
            theirs.norm1 = ours.norm1
            theirs.norm2 = ours.norm2

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        vit = self.vit
        x = vit.patch_embed(image, vit.positions(vit.patch_embed.grid_of(image)), torch.cat(vit.prefix(), 1))
        return vit.forward_head(vit.norm(self.encoder(x)))


def build_variant(name: str, reason: str | None, build: Callable[[], Callable]) -> Variant:
    """Builds a variant; if it cannot run or building fails, the variant has the reason."""
    if reason is not None:
        return Variant(name, reason)
    errors: dict[str, str] = {}
    with capturing(errors, name):
        return Variant(name, None, build())
    return Variant(name, errors[name])


def timm_variants(
    name: str, options: dict, base: VisionTransformer, dtype: torch.dtype, device: torch.device
) -> Iterator[Variant]:
    """timm's model in dtype, under autocast, optimized by this package, and compiled by its backend."""
    why = absent("timm")
    if why is None:
        timm = importlib.import_module("timm")
        why = None if timm.is_model(name) else "timm has no such model"

    def theirs(kind: torch.dtype) -> nn.Module:
        model = timm.create_model(name, **({"num_classes": 0} if not base.num_classes else {}), **options)
        model.load_state_dict(base.state_dict())
        return model.to(kind)

    yield build_variant("timm", why, lambda: ModelCall(theirs(dtype)))
    if dtype != torch.float32:
        amp = partial(torch.autocast, device.type, dtype)
        yield build_variant("timm AMP", why, lambda: ModelCall(theirs(torch.float32), amp))
    if why is None:
        yield optimized_variant(theirs(dtype))

    def backend() -> ModelCall:
        model = theirs(dtype)
        return ModelCall(model, run=compiled(model, ours=True))

    yield build_variant("compiled, our backend", why, backend)


def transformers_model(base: VisionTransformer, dtype: torch.dtype) -> ModelCall:
    """transformers' ViT or DINOv2 with the weights of `base`."""
    transformers = importlib.import_module("transformers")
    c = base.config
    plain = ViTConfig(embed_dim=c.embed_dim, num_heads=c.num_heads, depth=c.depth)
    plain = plain.replace(img_size=c.img_size, patch_size=c.patch_size, num_classes=c.num_classes)
    sizes: dict[str, Any] = dict(hidden_size=c.embed_dim, num_hidden_layers=c.depth, num_attention_heads=c.num_heads)
    sizes |= dict(image_size=c.img_size, patch_size=c.patch_size, layer_norm_eps=c.eps, attn_implementation="sdpa")
    if c == plain:
        config = transformers.ViTConfig(**sizes, intermediate_size=4 * c.embed_dim, num_labels=c.num_classes)
        model = transformers.ViTForImageClassification(config)
        pick = "logits"
    elif c == plain.replace(init_values=c.init_values) and not c.num_classes:
        model = transformers.Dinov2Model(transformers.Dinov2Config(**sizes))
        pick = "pooler_output"
    else:
        raise ValueError("only plain ViT and DINOv2 are compared with transformers")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_weights(base, path, layout="transformers")
        model.load_state_dict(load_file(path))
    return ModelCall(model.to(dtype), run=lambda image: getattr(model(pixel_values=image), pick))


def torchvision_model(name: str, options: dict) -> nn.Module | None:
    """torchvision's model of that name; None if it has none with these options."""
    if name not in TORCHVISION or options or absent("torchvision"):
        return None
    import torchvision

    return getattr(torchvision.models, TORCHVISION[name])(weights=None)


def no_fast_path(base: VisionTransformer) -> str | None:
    """Why the fast path of nn.TransformerEncoder does not support this model; None if it does."""
    if base.config.num_heads % 2:
        return "the fast path does not support an odd number of heads"
    plain = base.config.replace(img_size=224, num_classes=1000, depth=12)
    supported = ViTConfig(embed_dim=plain.embed_dim, num_heads=plain.num_heads, depth=12)
    if plain != supported.replace(patch_size=plain.patch_size):
        return "only a plain ViT equals an nn.TransformerEncoder"
    return None


def optimized_variant(model: nn.Module, example: Tensor | None = None) -> Variant:
    """A copy of a model, converted by `optimize`, for blocks that no reader knows with an example."""

    def build() -> ModelCall:
        converted = copy.deepcopy(model)
        optimize(converted, example=example)
        return ModelCall(converted)

    return build_variant("optimized by us", None, build)
