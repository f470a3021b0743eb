"""What official code costs at its usual size on an H100 that need not be present, beside torch.compile of the model.

A model is captured on the CPU from two images, or clips, and counted for BATCH of them in bfloat16: launches and bytes
of inference, and of a forward and backward pass. torch.compile is estimated by the rule of expected.inductor; times are
predicted by expected.times. Nothing is measured.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastvit_triton import optimize
from fastvit_triton.convert.captured import counting
from fastvit_triton.expected.count import Prediction, traced
from fastvit_triton.expected.events import Count
from fastvit_triton.expected.gpus import gpus
from fastvit_triton.expected.inductor import inductor_count
from fastvit_triton.expected.trace import Trace
from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.measure.timeout import one_line

from .checkouts import sources, without_init

BATCH, GPU = 64, "h100"


class Usual(NamedTuple):
    """A model of a repository at its usual size.

    Attributes:
        repository: "owner/name" on GitHub.
        model: which one.
        build: () → it, with the repository on the path.
        shape: of one input, [C, H, W] or [C, T, H, W].
        folder: of the sources, inside the repository.
        autocast: True for code that needs float32 weights, under autocast.
    """

    repository: str
    model: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...] = (3, 224, 224)
    folder: str = ""
    autocast: bool = False


def dinov2() -> nn.Module:
    """DINOv2's ViT-B/14."""
    from dinov2.models.vision_transformer import vit_base

    return vit_base(img_size=518, patch_size=14, init_values=1.0, block_chunks=0)


def dinov3(name: str) -> nn.Module:
    """DINOv3's ViTs with registers."""
    from dinov3.models import vision_transformer

    build = getattr(vision_transformer, name)
    model = build(img_size=224, n_storage_tokens=4, mask_k_bias=True, layerscale_init=1.0)
    model.init_weights()
    return model


def vit5() -> nn.Module:
    """ViT-5-Small."""
    from models_vit5 import vit5_small

    return vit5_small()


def open_clip() -> nn.Module:
    """open_clip's image tower of ViT-B/16."""
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    vision = CLIPVisionCfg(layers=12, width=768, head_width=64, patch_size=16, image_size=224)
    text = CLIPTextCfg(context_length=12, vocab_size=102, width=64, heads=1, layers=1)
    return CLIP(512, vision, text).visual


def perception() -> nn.Module:
    """Perception Encoder, PE-Core-B16-224."""
    from core.vision_encoder.pe import VisionTransformer

    return VisionTransformer(
        patch_size=16, width=768, layers=12, heads=12, mlp_ratio=4, output_dim=1024, image_size=224, use_cls_token=True
    )


def dino() -> nn.Module:
    """DINO's ViT-S/16."""
    from vision_transformer import vit_small

    return vit_small(patch_size=16)


def ijepa() -> nn.Module:
    """I-JEPA's encoder, ViT-B/16."""
    from src.models.vision_transformer import vit_base

    return vit_base(patch_size=16)


def vjepa2() -> nn.Module:
    """V-JEPA 2's ViT-L/16 for clips of 16 frames."""
    from src.models.vision_transformer import vit_large_rope

    return vit_large_rope(img_size=(256, 256), patch_size=16, num_frames=16, use_silu=False)


def depth_anything() -> nn.Module:
    """Depth Anything's ViT-S/14."""
    from vision_transformer import vit_small

    return vit_small(img_size=518, patch_size=14, init_values=1.0, block_chunks=0)


def hiera() -> nn.Module:
    """Hiera-B."""
    from hiera.hiera import Hiera

    return Hiera(embed_dim=96, num_heads=1, stages=(2, 3, 16, 3))


def swin() -> nn.Module:
    """Swin-T."""
    from models.swin_transformer import SwinTransformer

    return SwinTransformer(drop_path_rate=0.0)


def deit() -> nn.Module:
    """DeiT III's ViT-B/16."""
    import models_v2

    return models_v2.vit_models(
        embed_dim=768, depth=12, num_heads=12, qkv_bias=True, block_layers=models_v2.Layer_scale_init_Block
    )


def beit() -> nn.Module:
    """BEiT 2's ViT-B/16, with positions relative by pair."""
    from modeling_finetune import VisionTransformer

    return VisionTransformer(
        embed_dim=768, depth=12, num_heads=12, qkv_bias=True, init_values=0.1, use_rel_pos_bias=True,
        use_abs_pos_emb=False, norm_layer=nn.LayerNorm,
    )  # fmt: skip


def pvt() -> nn.Module:
    """PVT v2-B2."""
    from pvt_v2 import PyramidVisionTransformerV2

    return PyramidVisionTransformerV2(
        patch_size=4, embed_dims=[64, 128, 320, 512], num_heads=[1, 2, 5, 8], mlp_ratios=[8, 8, 4, 4], qkv_bias=True,
        depths=[3, 4, 6, 3], sr_ratios=[8, 4, 2, 1],
    )  # fmt: skip


class Views(nn.Module):
    """The features of some views that a tower of Depth Anything 3 hands to its heads."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, x: Tensor) -> Any:
        """Features of the last two blocks of [B, S, 3, H, W]."""
        depth = len(self.tower.blocks)
        return self.tower.get_intermediate_layers(x, [depth - 2, depth - 1])


def depth_anything_3(**options: Any) -> nn.Module:
    """Depth Anything 3's ViT: within views and across them in turn, with RoPE and norms on heads."""
    without_init("depth_anything_3.model")
    from depth_anything_3.model.dinov2.vision_transformer import DinoVisionTransformer

    return Views(DinoVisionTransformer(patch_size=14, init_values=1.0, **options))


def intern_vit(**options: Any) -> nn.Module:
    """InternViT; it computes norms in float32."""
    without_init("internvl_chat")
    from internvl_chat.modeling_intern_vit import InternVisionConfig, InternVisionModel

    config = InternVisionConfig(use_flash_attn=False, drop_path_rate=0.0, **options)
    model = InternVisionModel(config)
    model.encoder.gradient_checkpointing = False
    return model


class Decoder(nn.Module):
    """Pi3's blocks, called as its `decode` does, on two views of a grid of patches."""

    positions: Tensor

    def __init__(self, blocks: nn.ModuleList, rows: int, columns: int) -> None:
        super().__init__()
        self.blocks = blocks
        self.register_buffer("positions", torch.cartesian_prod(torch.arange(rows), torch.arange(columns)))

    def forward(self, x: Tensor) -> Tensor:
        """[B, 2, N, D] → [B, 2, N, D], within views and across them in turn."""
        batch, views, _, width = x.shape
        for i, block in enumerate(self.blocks):
            groups = batch * views if i % 2 == 0 else batch
            positions = self.positions.repeat(groups, batch * views // groups, 1)
            x = block(x.reshape(groups, -1, width), xpos=positions)
        return x.reshape(batch, views, -1, width)


def pi3(dim: int, depth: int, heads: int, rows: int, columns: int) -> nn.Module:
    """Pi3's decoder, with RoPE and norms on heads."""
    from pi3.models.dinov2.layers import Mlp
    from pi3.models.layers.attention import FlashAttentionRope
    from pi3.models.layers.block import BlockRope
    from pi3.models.layers.pos_embed import RoPE2D

    rope = RoPE2D(freq=100.0)
    block = dict(mlp_ratio=4, qkv_bias=True, proj_bias=True, ffn_bias=True, drop_path=0.0, act_layer=nn.GELU)
    block |= dict(ffn_layer=Mlp, init_values=0.01, qk_norm=True, attn_class=FlashAttentionRope, rope=rope)
    norm = partial(nn.LayerNorm, eps=1e-6)
    return Decoder(nn.ModuleList(BlockRope(dim, heads, norm_layer=norm, **block) for _ in range(depth)), rows, columns)


class Encoder(nn.Module):
    """CroCo's encoder of a whole image, as downstream models call it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """[B, 3, H, W] → [B, N, D]."""
        return self.model._encode_image(x)[0]


def croco() -> nn.Module:
    """CroCo v2's ViT-B/16 with RoPE in two axes."""
    from models.croco import CroCoNet

    return Encoder(CroCoNet(pos_embed="RoPE100", dec_depth=1))


MODELS = (
    Usual("facebookresearch/dinov2", "ViT-B/14", dinov2),
    Usual("facebookresearch/dinov3", "ViT-S/16", lambda: dinov3("vit_small")),
    Usual("facebookresearch/dinov3", "ViT-B/16", lambda: dinov3("vit_base")),
    Usual("facebookresearch/dinov3", "ViT-L/16", lambda: dinov3("vit_large")),
    Usual("wangf3014/ViT-5", "ViT-5-Small", vit5, autocast=True),
    Usual("mlfoundations/open_clip", "ViT-B/16", open_clip, folder="src"),
    Usual("facebookresearch/perception_models", "PE-Core-B16", perception),
    Usual("facebookresearch/dino", "ViT-S/16", dino),
    Usual("facebookresearch/ijepa", "ViT-B/16", ijepa),
    Usual("facebookresearch/vjepa2", "ViT-L/16", vjepa2, (3, 16, 256, 256)),
    Usual(
        "LiheYoung/Depth-Anything", "ViT-S/14", depth_anything, (3, 518, 518), "torchhub/facebookresearch_dinov2_main"
    ),
    Usual("facebookresearch/hiera", "Hiera-B", hiera),
    Usual("microsoft/Swin-Transformer", "Swin-T", swin),
    Usual("facebookresearch/deit", "DeiT III, ViT-B/16", deit),
    Usual("microsoft/unilm", "BEiT 2, ViT-B/16", beit, folder="beit2"),
    Usual("whai362/PVT", "PVT v2-B2", pvt, folder="classification"),
    Usual("naver/croco", "CroCo v2, ViT-B/16", croco),
    Usual(
        "ByteDance-Seed/Depth-Anything-3",
        "DA3-Base, 2 views",
        lambda: depth_anything_3(
            img_size=518, embed_dim=768, depth=12, num_heads=12, alt_start=4, qknorm_start=4, rope_start=4
        ),
        (2, 3, 252, 252),
        "src",
    ),
    Usual("yyfz/Pi3", "decoder, 2 views", lambda: pi3(1024, 36, 16, 16, 16), (2, 256, 1024)),
    Usual(
        "OpenGVLab/InternVL",
        "InternViT-300M",
        lambda: intern_vit(
            hidden_size=1024,
            num_attention_heads=16,
            image_size=448,
            patch_size=14,
            intermediate_size=4096,
            num_hidden_layers=24,
            qk_normalization=False,
            qkv_bias=True,
            norm_type="layer_norm",
        ),
        (3, 448, 448),
        "internvl_chat/internvl/model",
    ),
)


def row_of(entry: Usual, folder: Path) -> dict[str, Any]:
    """The figures of one model; with the error if it fails.

    `inference` and `training` have [launches, bytes] of eager PyTorch, torch.compile, `optimize`, and torch.compile
    with our backend; `ms` has their times by phase, those of inference also of mode max-autotune.
    """
    row: dict[str, Any] = dict(repository=entry.repository, model=entry.model)
    dtype = torch.float32 if entry.autocast else torch.bfloat16
    root = folder / entry.repository.partition("/")[2]
    casting = torch.autocast("cpu", torch.bfloat16) if entry.autocast else contextlib.nullcontext()
    with sources(root / entry.folder), casting, counting(), using_backend("auto"):
        try:
            torch.manual_seed(0)
            model = entry.build().to(dtype).eval()
            example = torch.randn(2, *entry.shape, dtype=dtype)
            report = optimize(model, example=example, compile=True)
            with torch.no_grad():
                model(example)  # fills what it caches by size, such as tables of rotations
            images = torch.empty(BATCH, *entry.shape, dtype=dtype, device="meta")
            shares = report.shares()
            row["flops"] = None if shares is None or shares.replaced is None else round(shares.replaced_share(""), 4)
            eager, ours = _traces(model, images)
            row["inference"] = _counts(eager, ours)
            row["ms"] = dict(inference=_ms(eager, ours))
            with torch.enable_grad():
                for _ in range(2):
                    model.train()(example)  # captures calls with gradients
            eager, ours = _traces(model, images)
            row["training"] = _counts(eager, ours)
            row["ms"]["training"] = _ms(eager, ours)[:4]  # what templates compute in a backward pass is not known
        # Any error: the row states it, and the other models are tried.
        except Exception as error:
            row["error"] = one_line(error)
    return row


def _traces(model: nn.Module, images: Tensor) -> tuple[Trace, Trace]:
    """Traces of a call of eager PyTorch and of ours, in the mode that the model is in."""
    return traced(model, None, model.training, (images,), {}), traced(model, gpus()[GPU], model.training, (images,), {})


def _counts(eager: Trace, ours: Trace) -> list[tuple[int, int]]:
    def pair(count: Count) -> tuple[int, int]:
        return count.launches, count.nbytes

    whole = inductor_count(ours.events)
    return [*map(pair, (eager.count, inductor_count(eager.events), ours.count, whole))]


def _ms(eager: Trace, ours: Trace) -> list[float]:
    counts = eager.count, inductor_count(eager.events), ours.count, None
    one = Prediction(*counts, choices=(), gpu=gpus()[GPU], training=False, traces=(eager, ours))
    us = one.eager_us(), one.compiled_us(), one.ours_us()[1], one.backend_us(), one.compiled_us("max-autotune")
    return [round(each / 1e3, 3) for each in us]
