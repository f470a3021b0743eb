"""Small models of transformers' vision towers with random weights, on which `optimize` is tested.

Each is a class of benchmarks/coverage_towers.txt, made small by those of these options that its configuration has.
"""

from importlib import import_module

import torch
from foreign import redraw
from torch import Tensor, nn

SMALL = dict(hidden_size=24, embed_dim=24, intermediate_size=48, mlp_ratio=2.0, num_hidden_layers=2, num_layers=2)
SMALL |= dict(num_attention_heads=2, attention_heads=2, image_size=32, patch_size=16, vocab_size=9, projection_dim=8)
SMALL |= dict(num_key_value_heads=2, head_dim=12, num_frames=4, tubelet_size=2, max_position_embeddings=9)
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
    "YolosModel": dict(image_size=[32, 32], num_detection_tokens=3),
    "ViltModel": {},
    "XCLIPVisionModel": {},
}
ROUNDED = ("MLCDVisionModel", "Step3p7VisionModel", "Aimv2VisionModel", "GitVisionModel")  # in the original


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


def inputs(model: nn.Module, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Two images; videos for VideoMAE and X-CLIP, tiles for Mllama, and words with them for ViLT."""
    kind, side = type(model).__name__, 32
    image = torch.randn(2, 3, side, side, dtype=dtype)
    if kind == "MllamaVisionModel":
        tiles = torch.randn(2, 1, 2, 3, side, side, dtype=dtype)
        ids, mask = torch.tensor([[1], [2]]), torch.tensor([[[1, 0]], [[1, 1]]])
        return {"pixel_values": tiles, "aspect_ratio_ids": ids, "aspect_ratio_mask": mask}
    if kind == "VideoMAEModel":
        return {"pixel_values": torch.randn(2, 4, 3, side, side, dtype=dtype)}
    if kind == "XCLIPVisionModel":
        return {"pixel_values": torch.randn(4, 3, side, side, dtype=dtype)}
    if kind == "Molmo2VisionModel":
        return {"pixel_values": torch.randn(2, 5, 16 * 16 * 3, dtype=dtype)}
    if kind == "HunYuanVLVisionTransformer":
        grid = torch.tensor([[1, 2, 2], [1, 2, 4]])
        return {"pixel_values": torch.randn(12, 16 * 16 * 3, dtype=dtype), "grid_thw": grid}
    if kind == "ViltModel":
        words = torch.tensor([[1, 2, 3], [4, 5, 0]])
        return {"input_ids": words, "attention_mask": words.ne(0).long(), "pixel_values": image}
    return {"pixel_values": image}


def outputs(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    """All floating-point outputs of the model, in one vector."""
    found = [t for t in _leaves(model(**given)) if isinstance(t, Tensor) and t.is_floating_point()]
    return torch.cat([t.flatten() for t in found])


def _leaves(y: object) -> list[object]:
    """The values in nested outputs, lists and tuples."""
    if isinstance(y, Tensor) or not (hasattr(y, "values") or isinstance(y, (list, tuple))):
        return [y]
    return [leaf for part in (y.values() if hasattr(y, "values") else y) for leaf in _leaves(part)]
