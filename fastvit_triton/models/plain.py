"""Checkpoints of plain ViTs: the layouts of all families, in the order of the search, and how they are written."""

import dataclasses

from torch import Tensor, nn

from ..checkpoints.renaming import CheckpointFormats, Layout
from ..checkpoints.tensors import State, join, split, variant
from ..layers.embed import sides
from .clip import CLIP, OPEN_CLIP, OPEN_CLIP_TOWER
from .deit import DEIT
from .dinov2 import DINO, DINO_REGISTERS, DINOV2, DINOV2_REGISTERS
from .fit import fit, move_prefix, supporting
from .naflex import TIMM_NAFLEX
from .siglip import SIGLIP
from .transformer import VisionTransformer
from .vit import JAX, MAE, TIMM, TORCHVISION, VIT

TRANSFORMERS = (CLIP, SIGLIP, DINOV2_REGISTERS, DINOV2, DEIT, VIT)
LAYOUTS = (JAX, TORCHVISION, OPEN_CLIP, *TRANSFORMERS, MAE, DINO_REGISTERS, DINO, TIMM_NAFLEX, TIMM)
SAVED = {"timm": (TIMM,), "transformers": TRANSFORMERS}
SAVED |= {"open_clip": (OPEN_CLIP,), "open_clip_visual": (OPEN_CLIP_TOWER,)}


def choose(model: VisionTransformer, layouts: tuple[Layout, ...]) -> Layout:
    """The first layout that supports the model."""
    config = model.config
    state = model.state_dict()
    facts = dataclasses.asdict(config) | {
        "head_dim": None if config.head_dim in (None, config.embed_dim // config.num_heads) else config.head_dim,
        "final_norm": isinstance(model.norm, nn.LayerNorm),
        "fc_norm": isinstance(model.fc_norm, nn.LayerNorm),
        "distilled": "dist_token" in state,
        "hybrid": any(".backbone." in key for key in state),
        "registers": "reg_token" in state,
        "layer_scale": config.init_values is not None,
        "head_bias": "head.bias" in state and bool(state["head.bias"].any()),
        "head_after_map": "attn_pool.latent" in state and "head.weight" in state,
    }
    return supporting(layouts, facts, variant(model))


def write(model: VisionTransformer, state: State, layout: Layout) -> State:
    """Converts our tensors of a plain ViT to the names and shapes of a layout."""
    config = model.config
    if isinstance(model.pos_embed, Tensor):
        pos = model.pos_embed.detach().cpu()
        h, w = model.patch_embed.grid_size
        rows = (config.class_token + ("dist_token" in state)) if layout is not TIMM else model.num_prefix_tokens
        wanted = 0 if layout is TIMM and config.no_embed_class else rows
        state = move_prefix({**state, "pos_embed": pos}, pos.shape[1] - h * w, wanted)
    if config.patch_embed == "linear":
        weight = state["patch_embed.proj.weight"].unflatten(1, (*sides(config.patch_size), config.in_chans))
        state["patch_embed.proj.weight"] = weight.permute(0, 3, 1, 2)
    if layout is TIMM:
        return state
    swiglu = ("mlp.fc1", "mlp.fc2") if config.mlp == "swiglu" else ()
    whole = () if layout.packed else ("attn.qkv",)
    state = join(split(state, *whole, "attn_pool.kv", *swiglu), "attn_pool.qkv")
    return layout.convert(state, model.head_names, config.num_classes)


CHECKPOINTS = CheckpointFormats("a plain ViT", LAYOUTS, fit, SAVED, choose, write)
