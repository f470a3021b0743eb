"""Small models of transformers' vision towers with random weights, on which `optimize` is tested.

Each is a class of benchmarks/coverage_towers.txt, made small by those of these options that its configuration has.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from foreign import redraw
from torch import Tensor, nn

Sizes = Sequence[tuple[int, int]]
SMALL = dict(hidden_size=24, embed_dim=24, intermediate_size=48, mlp_ratio=2.0, num_hidden_layers=2, num_layers=2)
SMALL |= dict(num_attention_heads=2, attention_heads=2, image_size=32, patch_size=16, vocab_size=9, projection_dim=8)
SMALL |= dict(num_key_value_heads=2, head_dim=12, num_frames=4, tubelet_size=2, max_position_embeddings=9)
SMALL |= dict(depth=2, num_heads=2)
DROPS = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout"), 0.0)
DROPS["drop_path_rate"] = 0.0
STAGES = dict(depths=[1, 1, 1], num_hidden_layers=3, num_group_tokens=[4, 2, 0], num_output_groups=[4, 2, 2])
MLLAMA = dict(num_global_layers=1, max_num_tiles=2, supported_aspect_ratios=[[1, 1], [1, 2]])
MLLAMA |= dict(intermediate_layers_indices=[0], vision_output_dim=48)
TOWERS = {  # class, or model.Class where transformers does not export it: options besides SMALL
    "Aimv2VisionModel": dict(hidden_act="silu", use_head=True),
    "AltCLIPVisionModel": {},
    "Blip2VisionModel": dict(qkv_bias=True),
    "BlipVisionModel": {},
    "ChineseCLIPVisionModel": {},
    "CLIPSegVisionModel": {},
    "DPTModel": dict(is_hybrid=False, backbone_out_indices=[0, 1, 1, 1]),
    "FlavaImageModel": {},
    "GitVisionModel": {},
    "GroupViTVisionModel": STAGES,
    "HunYuanVLVisionTransformer": dict(out_hidden_size=24, max_image_size=64),
    "idefics2.Idefics2VisionTransformer": {},
    "Idefics3VisionTransformer": {},
    "IJepaModel": {},
    "InstructBlipVideoVisionModel": {},
    "InstructBlipVisionModel": {},
    "InternVLVisionModel": dict(image_size=[32, 32], patch_size=[16, 16], use_qk_norm=True),
    "JanusVisionModel": {},
    "kosmos2.Kosmos2VisionModel": {},
    "kosmos2.Kosmos2VisionTransformer": {},
    "MetaClip2VisionModel": {},
    "MLCDVisionModel": dict(num_key_value_groups=1),
    "MllamaVisionModel": MLLAMA,
    "Molmo2VisionModel": dict(image_size=[32, 32], num_position_embeddings=5),
    "owlv2.Owlv2VisionTransformer": {},
    "OwlViTVisionModel": {},
    "PixioModel": dict(mlp_ratio=2),
    "QianfanOCRVisionModel": dict(image_size=[32, 32], patch_size=[16, 16]),
    "RadioModel": {},
    "Sapiens2Model": dict(pos_embed_rescale=None),
    "SmolVLMVisionTransformer": {},
    "Step3p7VisionModel": {},
    "Tipsv2VisionModel": {},
    "VideoMAEModel": {},
    "ViTMSNModel": {},
    "VivitModel": dict(tubelet_size=[2, 16, 16]),
    "YolosModel": dict(image_size=[32, 32], num_detection_tokens=3),
    "ViltModel": {},
    "XCLIPVisionModel": {},
}
PATCH4 = dict(patch_size=4, image_size=32, out_hidden_size=24)
PACKED = {  # images of different sizes in one sequence
    "CohereCompassVisionModel": PATCH4 | dict(deepstack_visual_indexes=[0], num_position_embeddings=64),
    "Cosmos3EdgeVisionModel": PATCH4,
    "Ernie4_5_VLMoeVisionTransformerPretrainedModel": PATCH4,
    "Exaone4_5_VisionModel": PATCH4 | dict(fullatt_block_indexes=[1], window_size=16),
    "Glm4vMoeVisionModel": PATCH4,
    "Glm4vVisionModel": PATCH4,
    "Glm5NextVisionModel": PATCH4,
    "GlmImageVisionModel": PATCH4,
    "GlmOcrVisionModel": PATCH4,
    "Inkling2VisionModel": PATCH4,
    "Kimi_K25VisionModel": PATCH4,
    "minicpmv4_6.MiniCPMV4_6VisionModel": PATCH4 | dict(insert_layer_id=0),
    "MuseGlimmerVisionModel": PATCH4,
    "MuseSparkVisionModel": PATCH4,
    "PaddleOCRVisionTransformer": PATCH4,
    "qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel": PATCH4 | dict(fullatt_block_indexes=[1], window_size=16),
    "qwen2_5_omni.Qwen2_5OmniVisionEncoder": PATCH4 | dict(fullatt_block_indexes=[1], window_size=16),
    "qwen2_vl.Qwen2VisionTransformerPretrainedModel": PATCH4 | dict(mlp_ratio=2),
    "Qwen3_5VisionModel": PATCH4 | dict(num_position_embeddings=64),
    "qwen3_omni_moe.Qwen3OmniMoeVisionEncoder": PATCH4 | dict(deepstack_visual_indexes=[0], num_position_embeddings=64),
    "Qwen3VLVisionModel": PATCH4 | dict(deepstack_visual_indexes=[0], num_position_embeddings=64),
    "VideoLlama3VisionModel": PATCH4,
}
TOWERS |= PACKED
ROUNDED = (
    "HunYuanVLVisionTransformer",
    "InternVLVisionModel",
    "Sapiens2Model",
    "MLCDVisionModel",
    "Step3p7VisionModel",
    "Aimv2VisionModel",
    "GitVisionModel",
)  # in the original


def build(name: str, dtype: torch.dtype = torch.float64, more: dict | None = None) -> nn.Module:
    """The named tower with random parameters; its options besides SMALL are `more`, or those of TOWERS."""
    package, _, cls = name.rpartition(".")
    home = import_module(f"transformers.models.{package}.modeling_{package}" if package else "transformers")
    model = getattr(home, cls)
    known = model.config_class().to_dict()
    options = {key: value for key, value in (SMALL | DROPS).items() if key in known}
    options |= TOWERS[name] if more is None else more
    made = redraw(model(model.config_class(**options)))
    return made._apply(lambda t: t.to(dtype) if t.is_floating_point() else t)  # complex buffers remain complex


def inputs(model: nn.Module, dtype: torch.dtype = torch.float64, sizes: Sizes = ()) -> dict[str, Tensor]:
    """Two images; videos for VideoMAE and X-CLIP, tiles for Mllama, and words with them for ViLT.

    Other `sizes` are rows and columns of patches of packed images; models of one size take as many images.
    """
    kind, side, B = type(model).__name__, 32, len(sizes) or 2
    image = torch.randn(B, 3, side, side, dtype=dtype)
    if kind == "MllamaVisionModel":
        tiles = torch.randn(B, 1, 2, 3, side, side, dtype=dtype)
        ids, mask = torch.ones(B, 1, dtype=torch.long), torch.ones(B, 1, 2, dtype=torch.long)
        ids[1:], mask[0, 0, 1] = 2, 0
        return {"pixel_values": tiles, "aspect_ratio_ids": ids, "aspect_ratio_mask": mask}
    if kind in ("VideoMAEModel", "VivitModel"):
        return {"pixel_values": torch.randn(B, 4, 3, side, side, dtype=dtype)}
    if kind == "XCLIPVisionModel":
        return {"pixel_values": torch.randn(2 * B, 3, side, side, dtype=dtype)}
    if kind == "Molmo2VisionModel":
        return {"pixel_values": torch.randn(B, 5, 16 * 16 * 3, dtype=dtype)}
    if kind == "HunYuanVLVisionTransformer":
        grid = torch.tensor([[1, *size] for size in sizes or ((2, 2), (2, 4))])
        return {"pixel_values": torch.randn(int(grid.prod(1).sum()), 16 * 16 * 3, dtype=dtype), "grid_thw": grid}
    if kind == "Inkling2VisionModel":  # tokens of 2 × 2 patches
        grid = torch.tensor([[1, *size] for size in sizes or ((2, 4), (4, 2))])
        return {"pixel_values": torch.randn(int(grid.prod(1).sum()), 8, 8, 3, dtype=dtype), "image_grid_thw": grid}
    if kind == "MiniCPMV4_6VisionModel":
        shapes = torch.tensor(sizes or ((4, 8), (8, 4)), dtype=torch.int32)
        return {
            "pixel_values": torch.randn(1, 3, 4, 4 * int(shapes.prod(1).sum()), dtype=dtype),
            "target_sizes": shapes,
        }
    if any("grid_thw" in name for name in signature(type(model).forward).parameters):
        return packed(model, dtype, sizes)
    if kind == "ViltModel":
        words = torch.tensor([[1, 2, 3], [4, 5, 0]])[torch.arange(B) % 2]
        return {"input_ids": words, "attention_mask": words.ne(0).long(), "pixel_values": image}
    return {"pixel_values": image}


def packed(model: nn.Module, dtype: torch.dtype, sizes: Sizes) -> dict[str, Tensor]:
    """Images of these sizes, or of 4 × 8 and 8 × 4 patches, the last for some models with two frames."""
    kind, (_, first, *others) = type(model).__name__, signature(type(model).forward).parameters
    conv = next(m for n, m in model.named_modules() if "patch_embed" in n and getattr(m, "weight", None) is not None)
    name, grid = next(n for n in others if "grid_thw" in n), torch.tensor([[1, *s] for s in sizes or ((4, 8), (8, 4))])
    grid[-1, 0] += "Qwen" in kind and not sizes
    pixels = torch.randn(int(grid.prod(1).sum()), conv.weight[0].numel(), dtype=dtype)
    if kind in ("Kimi_K25VisionModel", "PaddleOCRVisionTransformer"):
        pixels = pixels.unflatten(1, (3, 4, 4))
    more = {"merge_sizes": torch.full((len(grid),), 2)} if "merge_sizes" in others else {}
    return {first: pixels[None] if "Paddle" in kind else pixels, name: grid, **more}


@contextmanager
def unrounded() -> Iterator[None]:
    """Context in which float64 is not cast to float32, as transformers' norms and rotations cast it."""
    narrow, cast = Tensor.float, Tensor.to
    wide = torch.float64

    def to(t: Tensor, *to: Any, **more: Any) -> Tensor:
        return t if t.dtype == wide and to and to[0] is torch.float32 else cast(t, *to, **more)

    Tensor.float, Tensor.to = lambda t, **more: t if t.dtype == wide else narrow(t, **more), to
    try:
        yield
    finally:
        Tensor.float, Tensor.to = narrow, cast


def outputs(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    """All floating-point outputs of the model, in one vector."""
    found = [t for t in _leaves(model(**given)) if isinstance(t, Tensor) and t.is_floating_point()]
    return torch.cat([t.flatten() for t in found])


def _leaves(y: object) -> list[object]:
    """The values in nested outputs, lists and tuples."""
    if isinstance(y, Tensor) or not (hasattr(y, "values") or isinstance(y, (list, tuple))):
        return [y]
    return [leaf for part in (y.values() if hasattr(y, "values") else y) for leaf in _leaves(part)]
