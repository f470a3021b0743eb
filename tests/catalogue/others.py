"""Small models of torchvision, vit-pytorch and torch, with random weights."""

from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from .entry import SIDE, Entry, Given, Sizes, images


def tokens(dtype: torch.dtype, sizes: Sizes = ()) -> Tensor:
    """Two sequences of five tokens."""
    return torch.randn(2, 5, 24, dtype=dtype)


def torchvision_swin(version: str, window: list[int]) -> nn.Module:
    file = import_module("torchvision.models.swin_transformer")
    parts = dict(
        block=getattr(file, f"SwinTransformerBlock{version}"), downsample_layer=getattr(file, f"PatchMerging{version}")
    )
    return file.SwinTransformer([4, 4], 16, [2, 2], [2, 4], window, 2.0, 0.0, 0.0, 0.0, num_classes=5, **parts)


def torchvision_vit() -> nn.Module:
    return import_module("torchvision.models").VisionTransformer(SIDE, 16, 2, 2, 24, 48, num_classes=5)


TINY = dict(image_size=SIDE, patch_size=16, dim=24, depth=2, heads=2, mlp_dim=48, dim_head=12, num_classes=5)


def vit_pytorch(path: str, **options: Any) -> nn.Module:
    """The class "file.Class" of vit-pytorch with these options."""
    file, cls = path.split(".")
    return getattr(import_module(f"vit_pytorch.{file}"), cls)(**options)


def sized(path: str, **changed: Any) -> partial[nn.Module]:
    """Makes the class "file.Class" with the options TINY and these changes; None removes one."""
    return partial(vit_pytorch, path, **{key: value for key, value in (TINY | changed).items() if value is not None})


COMMON = {
    "torchvision_vit": Entry(torchvision_vit, 11),
    "torchvision_swin": Entry(lambda: torchvision_swin("", [4, 4]), 22),
    "torchvision_swin_ragged": Entry(lambda: torchvision_swin("", [3, 5]), 22),
    "torchvision_swin_v2": Entry(lambda: torchvision_swin("V2", [4, 4]), 17),
    "torchvision_swin_v2_ragged": Entry(lambda: torchvision_swin("V2", [3, 5]), 17),
    "vit_pytorch_vit": Entry(sized("vit.ViT"), 11),
    "vit_pytorch_simple": Entry(sized("simple_vit.SimpleViT"), 11),
    "torch_encoder_layer": Entry(
        lambda: nn.TransformerEncoderLayer(24, 2, 48, 0.0, "gelu", batch_first=True), 2, tokens
    ),
    "torch_encoder_layer_first": Entry(
        lambda: nn.TransformerEncoderLayer(24, 3, 48, 0.0, nn.SiLU(), norm_first=True), 4, tokens
    ),
    "torch_multihead": Entry(lambda: nn.MultiheadAttention(24, 3, batch_first=True), 1, tokens),
    "mlp_sequential": Entry(
        lambda: nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24)), 2, tokens
    ),
}

CCT = dict(img_size=16, kernel_size=3, stride=2, padding=1, embedding_dim=24, num_layers=2, num_heads=2, mlp_ratio=2)
CCT |= dict(num_classes=5, positional_embedding="learnable", attention_dropout=0.0)
CROSS = dict(sm_dim=24, lg_dim=16, depth=1, image_size=32, sm_patch_size=8, lg_patch_size=16, num_classes=5)
CROSS |= {
    f"{which}_{name}": value
    for which in ("sm_enc", "lg_enc", "cross_attn")
    for name, value in dict(depth=1, heads=2, mlp_dim=32, dim_head=12).items()
    if (which, name) != ("cross_attn", "mlp_dim")
}
STAGES = dict(emb_dim=(16, 24, 32), emb_stride=(2, 2, 1), depth=(1, 1, 1), heads=(1, 1, 2), kv_proj_stride=(2, 1, 2))
CVT = {f"s{i + 1}_{name}": values[i] for name, values in STAGES.items() for i in range(3)}
STAGES = dict(emb_dim=(8, 16, 16, 8), patch_size=(2, 1, 1, 2), local_patch_size=(2, 2, 2, 1), global_k=(2, 2, 1, 1))
TWINS = {f"s{i + 1}_{name}": values[i] for name, values in STAGES.items() for i in range(4)}
LEVIT = dict(image_size=80, dim=(16, 24, 32), depth=(1, 2, 1), heads=(2, 2, 3), mlp_mult=2, dim_key=4, dim_value=8)
LEVIT |= dict(num_classes=5)
MAPS = {  # models of maps → paths in them to which a hook is attached
    "levit": "0.layers.0.0.to_q 0.layers.0.0.to_v.0 0.layers.0.0.to_k.1 0.layers.0.0.attend 0.layers.0.0.pos_bias "
    "1.layers.0.0.to_out 1.layers.0.0.to_out.0 1.layers.0.0.to_out.1 1.layers.0.0.to_out.2 2.layers.1.1 "
    "2.layers.1.1.net 2.layers.1.1.net.1 2.layers.1.1.net.3 backbone.2",
    "cvt": "1.2.layers.0.0 1.2.layers.0.0.norm 1.2.layers.0.0.attend 1.2.layers.0.0.to_q 1.2.layers.0.0.to_kv.net "
    "1.2.layers.0.0.to_kv.net.0 1.2.layers.0.0.to_q.net.1 1.2.layers.0.0.to_q.net.2 1.2.layers.0.0.to_out.0 "
    "2.2.layers.0.1.net.0 2.2.layers.0.1.net.4 layers.2.1",
    "twins": "0.0.proj.0 0.1.layers.0.0 0.1.layers.0.0.fn 0.1.layers.0.0.fn.norm 0.1.layers.0.0.fn.to_kv "
    "1.1.layers.0.0.fn.to_out.0 1.1.layers.0.2.fn.to_q 1.1.layers.0.2.fn.to_kv 1.1.layers.0.3.fn.net.2 1.2.proj "
    "1.2.proj.fn 3.1.layers.0.0",
}


def of_sizes(dtype: torch.dtype, sizes: Sizes = ()) -> Given:
    """Three images, two of which NaViT takes as one sequence."""
    return [[torch.randn(3, *side, dtype=dtype) for side in row] for row in ([(32, 16), (8, 24)], [(16, 16)])]


def of_maps(name: str, path: str, fused: int, *sides: int, own: tuple[str, ...] = (), **options: Any) -> Entry:
    """A model whose blocks take maps."""
    hooked = tuple(MAPS[name].split())
    return Entry(partial(vit_pytorch, path, **options), fused, images(*sides), own=own, batched=True, hooked=hooked)


MORE = {
    "vit_pytorch_cct": Entry(partial(vit_pytorch, "cct.CCT", **CCT, stochastic_depth_rate=0.3), 6, images(16, 16)),
    "vit_pytorch_cait": Entry(sized("cait.CaiT", cls_depth=1), 17),
    "vit_pytorch_deepvit": Entry(sized("deepvit.DeepViT"), 11),
    "vit_pytorch_crossvit": Entry(
        partial(vit_pytorch, "cross_vit.CrossViT", **CROSS, dropout=0.0, emb_dropout=0.0), 16, left=("ProjectInOut",)
    ),
    "vit_pytorch_pit": Entry(sized("pit.PiT", patch_size=8, depth=(1, 1)), 12),
    "vit_pytorch_t2t": Entry(sized("t2t.T2TViT", patch_size=None, t2t_layers=((7, 4), (3, 2))), 17),
    "vit_pytorch_navit": Entry(sized("na_vit.NaViT", patch_size=8), 6, of_sizes, left=("LayerNorm",)),
    "vit_pytorch_levit": of_maps(
        "levit", "levit.LeViT", 17, 80, 80, own=("Transformer",), **LEVIT, num_distill_classes=3
    ),
    "vit_pytorch_cvt": of_maps("cvt", "cvt.CvT", 9, 20, 28, **CVT, num_classes=5),
    "vit_pytorch_twins": of_maps(
        "twins", "twins_svt.TwinsSVT", 40, 8, 12, **TWINS, num_classes=5, s3_depth=1, s4_depth=1
    ),
    "vit_pytorch_parallel": Entry(sized("parallel_vit.ViT"), 21),
    "vit_pytorch_registers": Entry(sized("simple_vit_with_register_tokens.SimpleViT"), 11),
}
