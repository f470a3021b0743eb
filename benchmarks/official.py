"""How much of official ViT code, which no list names, `optimize(model, example=…)` fuses, and whether it is exact.

    python -m benchmarks.coverage official --sources FOLDER [--only PATTERN] [--out benchmarks/results]

FOLDER holds a checkout of each repository under its name, such as FOLDER/dinov2. Each model is built at a small width
with random weights. Counted: the FLOPs of operators that the kernels replace, of all of the model's, as in the report,
if its calls can be traced; the weights of linear layers in fused calls, of all of the model's; and the attention
products in them. Compared: outputs and all gradients in float64 with those of the original, as the largest difference
divided by the largest value, in evaluation and in training mode, where stochastic depth and dropout are 0.

official_speed.py counts some of them at their usual size. ViT-5's rope.py calls `.cuda()`, which its checkout must not.
"""

import copy
import json
import re
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fastvit_triton import optimize, set_backend
from fastvit_triton.convert.captured import captures_of, is_bound
from fastvit_triton.convert.reporting import Report
from fastvit_triton.measure.timeout import one_line

from . import official_speed
from .checkouts import commit, sources
from .official_speed import depth_anything_3, intern_vit, pi3
from .result_file import as_json, origin, write_text
from .tables import official_markdown

ATTENTION = ("scaled_dot_product_attention", "softmax", "multi_head_attention")


class Official(NamedTuple):
    """A model of a repository.

    Attributes:
        repository: "owner/name" on GitHub.
        model: which one.
        build: () → (model, example), with the repository on the path.
        folder: of the sources, inside the repository.
        single: True for code that rounds to float32, so that float64 does not run.
    """

    repository: str
    model: str
    build: Callable[[], tuple[nn.Module, Any]]
    folder: str = ""
    single: bool = False


def images(side: int, batch: int = 2) -> Tensor:
    """Random images [B, 3, side, side]."""
    return torch.randn(batch, 3, side, side)


def dinov2(**options: Any) -> tuple[nn.Module, Any]:
    """DINOv2's ViT."""
    from dinov2.models.vision_transformer import DinoVisionTransformer

    return DinoVisionTransformer(
        img_size=28, patch_size=14, embed_dim=48, depth=2, num_heads=3, init_values=1.0, **options
    ), images(42)


def dinov3(**options: Any) -> tuple[nn.Module, Any]:
    """DINOv3's ViT."""
    from dinov3.models.vision_transformer import DinoVisionTransformer

    model = DinoVisionTransformer(
        img_size=32, patch_size=16, embed_dim=48, depth=2, num_heads=3, n_storage_tokens=4, mask_k_bias=True, **options
    )
    model.init_weights()
    return model, images(48)


def segment_anything() -> tuple[nn.Module, Any]:
    """The image encoder of SAM, with windows and with global attention."""
    from segment_anything.modeling.image_encoder import ImageEncoderViT

    return ImageEncoderViT(
        img_size=96, patch_size=16, embed_dim=48, depth=2, num_heads=3, out_chans=16, use_rel_pos=True, window_size=4,
        global_attn_indexes=(1,),
    ), images(96)  # fmt: skip


def segment_anything_decoder() -> tuple[nn.Module, Any]:
    """The two-way transformer of SAM's mask decoder."""
    from segment_anything.modeling.transformer import TwoWayTransformer

    model = TwoWayTransformer(depth=2, embedding_dim=32, num_heads=4, mlp_dim=64)
    return model, (torch.randn(2, 32, 5, 6), torch.randn(2, 32, 5, 6), torch.randn(2, 7, 32))


def sam2_hiera() -> tuple[nn.Module, Any]:
    """The image encoder of SAM 2."""
    from sam2.modeling.backbones.hieradet import Hiera

    return Hiera(
        embed_dim=32, num_heads=1, stages=(1, 2, 2, 1), global_att_blocks=(4,), window_spec=(8, 4, 4, 4),
        window_pos_embed_bkg_spatial_size=(7, 7),
    ), images(128)  # fmt: skip


def sam2_memory() -> tuple[nn.Module, Any]:
    """The memory attention of SAM 2, with rotary positions in two axes."""
    from sam2.modeling.memory_attention import MemoryAttention, MemoryAttentionLayer
    from sam2.modeling.sam.transformer import RoPEAttention

    options = dict(rope_theta=10000.0, feat_sizes=(4, 4), embedding_dim=32, num_heads=1, downsample_rate=1, dropout=0.0)
    layer = MemoryAttentionLayer(
        activation="relu", cross_attention=RoPEAttention(**options, rope_k_repeat=True, kv_in_dim=16), d_model=32,
        dim_feedforward=64, dropout=0.0, pos_enc_at_attn=False, pos_enc_at_cross_attn_keys=True,
        pos_enc_at_cross_attn_queries=False, self_attention=RoPEAttention(**options),
    )  # fmt: skip
    model = MemoryAttention(d_model=32, pos_enc_at_input=True, layer=layer, num_layers=2)
    tokens, memory = torch.randn(16, 2, 32), torch.randn(36, 2, 16)
    return model, dict(
        curr=tokens, memory=memory, curr_pos=torch.randn(16, 2, 32), memory_pos=torch.randn(36, 2, 16),
        num_obj_ptr_tokens=4,
    )  # fmt: skip


def clip() -> tuple[nn.Module, Any]:
    """OpenAI's CLIP, both towers."""
    from clip.model import CLIP

    tokens = torch.randint(1, 100, (2, 12))
    tokens[:, -1] = 101
    return CLIP(32, 64, 2, 64, 32, 12, 102, 48, 4, 2), (images(64), tokens)


def open_clip() -> tuple[nn.Module, Any]:
    """open_clip's image and text towers."""
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    vision = CLIPVisionCfg(layers=2, width=64, head_width=16, patch_size=32, image_size=64)
    text = CLIPTextCfg(context_length=12, vocab_size=102, width=48, heads=4, layers=2)
    tokens = torch.randint(1, 100, (2, 12))
    tokens[:, -1] = 101
    return CLIP(32, vision, text), (images(64), tokens)


def perception(**options: Any) -> tuple[nn.Module, Any]:
    """The Perception Encoder."""
    from core.vision_encoder.pe import VisionTransformer

    return VisionTransformer(
        patch_size=16, width=64, layers=2, heads=4, mlp_ratio=4, output_dim=32, image_size=64, **options
    ), images(64)


def mae() -> tuple[nn.Module, Any]:
    """MAE's encoder and decoder."""
    import models_mae

    block = models_mae.Block  # of a release of timm, and NumPy's name of a release, which later ones do not have
    models_mae.Block = lambda *sizes, qk_scale, **named: block(*sizes, **named)
    with patch.object(np, "float", float, create=True):
        return models_mae.MaskedAutoencoderViT(
        img_size=64, patch_size=16, embed_dim=48, depth=2, num_heads=3, decoder_embed_dim=32, decoder_depth=2,
        decoder_num_heads=2,
    ), images(64)  # fmt: skip


def dino() -> tuple[nn.Module, Any]:
    """DINO's ViT."""
    from vision_transformer import VisionTransformer

    return VisionTransformer(img_size=[32], patch_size=8, embed_dim=48, depth=2, num_heads=3, qkv_bias=True), images(40)


def ijepa() -> tuple[nn.Module, Any]:
    """I-JEPA's encoder."""
    from src.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=[32], patch_size=8, embed_dim=48, depth=2, num_heads=3, qkv_bias=True, predictor_embed_dim=24
    ), images(32)


def vjepa2() -> tuple[nn.Module, Any]:
    """V-JEPA 2's encoder, with rotary positions in three axes and SwiGLU."""
    from src.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=(32, 32), patch_size=8, num_frames=4, embed_dim=96, depth=2, num_heads=2, qkv_bias=True, use_rope=True,
        use_silu=True,
    ), torch.randn(2, 3, 4, 32, 32)  # fmt: skip


def depth_anything() -> tuple[nn.Module, Any]:
    """Depth Anything's DINOv2."""
    from vision_transformer import DinoVisionTransformer

    return DinoVisionTransformer(
        img_size=28, patch_size=14, embed_dim=48, depth=2, num_heads=3, init_values=1.0, block_chunks=0
    ), images(42)


def hiera() -> tuple[nn.Module, Any]:
    """Hiera."""
    from hiera.hiera import Hiera

    return Hiera(
        input_size=(64, 64), embed_dim=32, num_heads=1, stages=(1, 1, 2, 1), num_classes=10, mask_unit_size=(4, 4)
    ), images(64)


def swin() -> tuple[nn.Module, Any]:
    """Swin Transformer."""
    from models.swin_transformer import SwinTransformer

    return SwinTransformer(
        img_size=64, patch_size=4, embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4, num_classes=10,
        drop_path_rate=0.0,
    ), images(64)  # fmt: skip


def detr() -> tuple[nn.Module, Any]:
    """DETR's encoder and decoder, with padded keys."""
    from models.transformer import Transformer

    model = Transformer(
        d_model=48, nhead=3, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=96, dropout=0.0,
        return_intermediate_dec=True,
    )  # fmt: skip
    padded = torch.zeros(2, 5, 6, dtype=torch.bool)
    padded[1, :, 4:] = True
    return model, (torch.randn(2, 48, 5, 6), padded, torch.randn(7, 48), torch.randn(2, 48, 5, 6))


def deit(block: str) -> tuple[nn.Module, Any]:
    """DeiT III's ViT with blocks of this class."""
    import models_v2

    return models_v2.vit_models(
        img_size=32, patch_size=8, num_classes=5, embed_dim=48, depth=2, num_heads=3, qkv_bias=True,
        block_layers=getattr(models_v2, block),
    ), images(32)  # fmt: skip


def dit() -> tuple[nn.Module, Any]:
    """DiT."""
    from models import DiT

    model = DiT(input_size=16, patch_size=4, hidden_size=48, depth=2, num_heads=3, num_classes=5)
    return model, (torch.randn(2, 4, 16, 16), torch.rand(2) * 10, torch.tensor([1, 2]))


def u_vit() -> tuple[nn.Module, Any]:
    """U-ViT."""
    from libs.uvit import UViT

    model = UViT(img_size=32, patch_size=8, num_classes=5, embed_dim=48, depth=3, num_heads=3)
    return model, (images(32), torch.rand(2) * 10, torch.tensor([1, 2]))


def videomae() -> tuple[nn.Module, Any]:
    """VideoMAE's encoder."""
    from modeling_finetune import VisionTransformer

    return VisionTransformer(
        img_size=32, patch_size=8, num_classes=5, embed_dim=48, depth=2, num_heads=3, qkv_bias=True, all_frames=4,
        tubelet_size=2,
    ), torch.randn(2, 3, 4, 32, 32)  # fmt: skip


def beit() -> tuple[nn.Module, Any]:
    """BEiT 2, with positions relative by pair."""
    from modeling_finetune import VisionTransformer

    return VisionTransformer(
        img_size=32, patch_size=8, num_classes=5, embed_dim=48, depth=2, num_heads=3, qkv_bias=True, init_values=0.1,
        use_rel_pos_bias=True, use_abs_pos_emb=False, norm_layer=nn.LayerNorm,
    ), images(32)  # fmt: skip


def ibot() -> tuple[nn.Module, Any]:
    """iBOT's ViT."""
    from models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=[32], patch_size=8, embed_dim=48, depth=2, num_heads=3, qkv_bias=True, init_values=0.1
    ), images(40)


def pvt() -> tuple[nn.Module, Any]:
    """PVT v2."""
    from pvt_v2 import PyramidVisionTransformerV2

    return PyramidVisionTransformerV2(
        img_size=64, patch_size=4, num_classes=5, embed_dims=[16, 32, 48, 64], num_heads=[1, 2, 3, 4],
        mlp_ratios=[2] * 4, qkv_bias=True, depths=[1] * 4, sr_ratios=[8, 4, 2, 1],
    ), images(64)  # fmt: skip


def tiny_vit() -> tuple[nn.Module, Any]:
    """TinyViT."""
    from models.tiny_vit import TinyViT

    return TinyViT(
        img_size=64, num_classes=5, embed_dims=[16, 32, 48, 64], depths=[1, 1, 2, 1], num_heads=[1, 2, 3, 4],
        window_sizes=[4, 4, 4, 2], drop_path_rate=0.0,
    ), images(64)  # fmt: skip


def croco() -> tuple[nn.Module, Any]:
    """CroCo with RoPE in two axes, whose tables have the length of the largest position."""
    from models.croco import CroCoNet

    return CroCoNet(
        img_size=32, patch_size=8, mask_ratio=0.5, enc_embed_dim=48, enc_depth=2, enc_num_heads=2, dec_embed_dim=32,
        dec_depth=2, dec_num_heads=2, pos_embed="RoPE100",
    ), (images(32), images(32))  # fmt: skip


def small_intern_vit() -> tuple[nn.Module, Any]:
    """InternViT, with RMSNorms of queries and keys that span all heads."""
    return intern_vit(
        hidden_size=48, num_attention_heads=3, image_size=32, patch_size=8, intermediate_size=96, num_hidden_layers=2,
        qk_normalization=True, norm_type="rms_norm",
    ), images(32)  # fmt: skip


MODELS = (
    Official("facebookresearch/dinov2", "ViT", lambda: dinov2(block_chunks=0)),
    Official("facebookresearch/dinov2", "ViT, chunked", lambda: dinov2(block_chunks=2)),
    Official("facebookresearch/dinov2", "ViT, SwiGLU", lambda: dinov2(block_chunks=0, ffn_layer="swiglufused")),
    Official("facebookresearch/dinov3", "ViT", lambda: dinov3(layerscale_init=1.0)),
    Official("facebookresearch/dinov3", "ViT, SwiGLU", lambda: dinov3(layerscale_init=1.0, ffn_layer="swiglu")),
    Official("facebookresearch/segment-anything", "image encoder", segment_anything),
    Official("facebookresearch/segment-anything", "mask decoder", segment_anything_decoder),
    Official("facebookresearch/sam2", "image encoder", sam2_hiera),
    Official("facebookresearch/sam2", "memory attention", sam2_memory),
    Official("openai/CLIP", "CLIP", clip, single=True),
    Official("mlfoundations/open_clip", "CLIP", open_clip, "src"),
    Official("facebookresearch/perception_models", "encoder", perception),
    Official("facebookresearch/perception_models", "encoder, LayerScale", lambda: perception(ls_init_value=0.5)),
    Official("facebookresearch/mae", "MAE", mae),
    Official("facebookresearch/dino", "ViT", dino),
    Official("facebookresearch/ijepa", "encoder", ijepa),
    Official("facebookresearch/vjepa2", "encoder", vjepa2),
    Official("LiheYoung/Depth-Anything", "DINOv2", depth_anything, "torchhub/facebookresearch_dinov2_main"),
    Official("facebookresearch/hiera", "Hiera", hiera),
    Official("microsoft/Swin-Transformer", "Swin", swin),
    Official("facebookresearch/detr", "transformer", detr),
    Official("facebookresearch/deit", "DeiT III", lambda: deit("Layer_scale_init_Block")),
    Official("facebookresearch/deit", "DeiT III, parallel", lambda: deit("Layer_scale_init_Block_paralx2")),
    Official("facebookresearch/DiT", "DiT", dit, single=True),
    Official("baofff/U-ViT", "U-ViT", u_vit, single=True),
    Official("MCG-NJU/VideoMAE", "encoder", videomae),
    Official("microsoft/unilm", "BEiT 2", beit, "beit2"),
    Official("bytedance/ibot", "ViT", ibot),
    Official("whai362/PVT", "PVT v2", pvt, "classification"),
    Official("microsoft/Cream", "TinyViT", tiny_vit, "TinyViT"),
    Official("naver/croco", "CroCo", croco),
    Official(
        "ByteDance-Seed/Depth-Anything-3",
        "views",
        lambda: (
            depth_anything_3(
                img_size=42, embed_dim=48, depth=4, num_heads=3, alt_start=2, qknorm_start=2, rope_start=2
            ),
            torch.randn(2, 2, 3, 42, 42),
        ),
        "src",
    ),
    Official("yyfz/Pi3", "decoder", lambda: (pi3(48, 2, 3, 4, 5), torch.randn(2, 2, 20, 48))),
    Official("OpenGVLab/InternVL", "InternViT", small_intern_vit, "internvl_chat/internvl/model"),
)


def randomise(model: nn.Module) -> None:
    """Gives all floating-point parameters random values, so that none hides another."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
            base = 0.0 if parameter.dim() > 1 else 0.5
            with torch.no_grad():
                parameter.copy_(base + scale * torch.randn(parameter.shape, generator=generator))


def results(model: nn.Module, example: Any, train: bool) -> list[Tensor]:
    """Outputs of a call, and the gradients of all parameters and inputs for random cotangents."""
    model.train(train)
    example = tree_map_only(Tensor, lambda t: t.clone().requires_grad_(t.is_floating_point()), example)
    args, named = ((), example) if isinstance(example, dict) else (example, {}) if isinstance(example, tuple) else (
        (example,), {})  # fmt: skip
    torch.manual_seed(0)  # of MAE's masks
    outputs = [t for t in tree_leaves(model(*args, **named)) if isinstance(t, Tensor) and t.requires_grad]
    leaves = [t for t in (*model.parameters(), *tree_leaves(example)) if isinstance(t, Tensor) and t.requires_grad]
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in outputs]
    grads = torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)
    return [*outputs, *(torch.zeros_like(t) if g is None else g for t, g in zip(leaves, grads, strict=True))]


def difference(got: list[Tensor], want: list[Tensor]) -> float:
    """Largest difference of any tensor, divided by its largest value.

    Some gradients are zero but for rounding, such as that of a key's bias: the divisor is at least 1e-6 of the largest
    value of all tensors.
    """
    floor = 1e-6 * max(float(b.abs().max()) for b in want)
    return max(float((a - b).abs().max()) / max(float(b.abs().max()), floor) for a, b in zip(got, want, strict=True))


def fused(model: nn.Module, report: Report) -> dict[str, Any]:
    """The share of FLOPs that the kernels replace; weights of linear layers, and those and attention in fused calls."""
    paths = {row.path for row in report.rows if row.became is not None and not row.bare}

    def inside(path: str, tops: set[str]) -> bool:
        return any(path == top or path.startswith(f"{top}.") or not top for top in tops)

    shares = report.shares()
    assert shares is not None  # as there is a model
    flops = None if shares.replaced is None else round(shares.replaced_share(""), 4)
    uncaptured: dict[str, None] = {}
    attention_left: list[str] = []
    attention = 0
    for path, module in model.named_modules():
        if is_bound(module):
            capture = captures_of(module)[0]
            prefix = f"{path}." if path else ""
            uncaptured |= {f"{prefix}{row.path}": None for row in capture.left if row.type == "linear"}
            attention_left += [f"{prefix}{row.path}: {row.why}" for row in capture.left if row.type in ATTENTION]
            attention += sum(n for name, n in capture.calls.items() if "attention" in name)
    attention += sum("attention" in (row.became or "") and "captured" not in row.became for row in report.rows)
    total = weights = 0
    unfused: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.MultiheadAttention)):
            size = sum(p.numel() for p in module.parameters(recurse=False) if p.dim() == 2)
            total += size
            if inside(path, paths) and path not in uncaptured:
                weights += size
            else:
                unfused.append(path)
    return dict(
        flops=flops, weights=total, fused_weights=weights, left=unfused,
        attention=attention, attention_left=attention_left,
    )  # fmt: skip


def row_of(entry: Official, folder: Path) -> dict[str, Any]:
    """The row of one model; with the error if it fails."""
    row: dict[str, Any] = dict(repository=entry.repository, model=entry.model)
    root = folder / entry.repository.partition("/")[2]
    with sources(root / entry.folder):
        try:
            torch.manual_seed(0)
            model, example = entry.build()
            dtype = torch.float32 if entry.single else torch.float64
            model = model.to(dtype).eval()
            randomise(model)
            example = tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, example)
            original = copy.deepcopy(model)
            report = optimize(model, example=example)
            row |= fused(model, report)
            row["why"] = {f"{r.path} ({r.type})": r.why for r in report.rows if r.became is None}
            for mode in ("eval", "train"):
                want = results(original, example, mode == "train")
                results(model, example, mode == "train")  # captures calls with gradients
                row[mode] = difference(results(model, example, mode == "train"), want)
        # Any error: the row states it, and the other models are tried.
        except Exception as error:
            row["error"] = one_line(error)
    return row


def numbered(number: int, folder: Path) -> dict[str, Any]:
    """The row of the model of this number, of those here and then those of official_speed."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    set_backend("torch")
    entry = (*MODELS, *official_speed.MODELS)[number]
    row = row_of(entry, folder) if isinstance(entry, Official) else official_speed.row_of(entry, folder)
    return row | dict(commit=commit(folder, entry.repository))


def main(folder: Path, only: str, out: Path | None) -> None:
    """Counts and compares the models, prints a line for each, and writes coverage-official.json and .md.

    Args:
        folder: with a checkout of each repository.
        only: regular expression for repository and model.
        out: folder of the results; None to write none.
    """
    rows, speeds = [], []
    for number, entry in enumerate((*MODELS, *official_speed.MODELS)):
        if not re.search(only, f"{entry.repository} {entry.model}"):
            continue
        # A process for each model: graphs of Dynamo and free memory that malloc keeps would add up.
        with ProcessPoolExecutor(1, mp_context=torch.multiprocessing.get_context("spawn")) as pool:
            try:
                row = pool.submit(numbered, number, folder).result()
            except BrokenProcessPool as error:  # killed, such as for memory
                row = dict(repository=entry.repository, model=entry.model, error=one_line(error))
                row |= dict(commit=commit(folder, entry.repository))
        (rows if isinstance(entry, Official) else speeds).append(row)
        print(*(f"{name}={value}" for name, value in row.items() if name != "why"), flush=True)
    if out is not None:
        text = as_json(origin(), rows=rows, speeds=speeds)
        write_text(out / "coverage-official.json", text)
        write_text(out / "coverage-official.md", official_markdown(json.loads(text)))
