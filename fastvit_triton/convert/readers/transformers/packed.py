"""Fused forwards for transformers' towers whose images are packed into one sequence, with boundaries in cu_seqlens.

Their own forwards call attention once for each image or window, unless flash attention is installed. Patch mergers and
the RMSNorm of these towers are here, too.
"""

import itertools
from typing import Any

import torch
from torch import Tensor

from ....engine import ways
from ....engine.attention import attention_body
from ....engine.body import Body, normalize, project
from ....engine.hooks import are_plain_tensors
from ....engine.leaves import RMS_FORWARDS, VOLUME_CONVOLUTIONS, Foreign, activation_of, is_patch_conv
from ....engine.mlp import MlpBody
from ....engine.packing import longest, one_call
from ....kernels import choose
from ....kernels.argument import Varlen
from ....kernels.linear import linear
from ....kernels.rms_norm import rms_norm
from ...forwards import fused_body, fused_forward, known_type, original
from ...third_party import classes
from .blocks import CLIP, LAMBDAS, Names, register_transformers
from .vit import attention_reason, first_of

PLAIN = Names("norm1", "attn", "norm2", "mlp")
INTERLEAVED = classes("inkling2.Inkling2VisionAttention")  # rotate channel pairs (2i, 2i + 1)
TOWERS = classes(
    "cohere_compass.CohereCompassVisionModel",
    "cosmos3_edge.Cosmos3EdgeEncoder",
    "dots3_note.Dots3NoteVisionModel",
    "ernie4_5_vl_moe.Ernie4_5_VLMoeVisionTransformerPretrainedModel",
    "exaone4_5.Exaone4_5_VisionModel",
    "glm4v.Glm4vVisionModel",
    "glm4v_moe.Glm4vMoeVisionModel",
    "glm5_next.Glm5NextVisionModel",
    "glm_image.GlmImageVisionModel",
    "glm_ocr.GlmOcrVisionModel",
    "hunyuan_vl.HunYuanVLVisionTransformer",
    "inkling2.Inkling2VisionModel",
    "kimi_k25.Kimi_K25VisionModel",
    "minicpm_ocr.MiniCPMOcrVisionModel",
    "minicpmv4_6.MiniCPMV4_6VisionModel",
    "minicpmv4_7.MiniCPMV4_7VisionModel",
    "muse_glimmer.MuseGlimmerVisionModel",
    "muse_spark.MuseSparkVisionModel",
    "paddleocr_vl.PaddleOCRVisionEncoder",
    "qwen2_5_omni.Qwen2_5OmniVisionEncoder",
    "qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel",
    "qwen2_vl.Qwen2VisionTransformerPretrainedModel",
    "qwen3_5.Qwen3_5VisionModel",
    "qwen3_5_moe.Qwen3_5MoeVisionModel",
    "qwen3_omni_moe.Qwen3OmniMoeVisionEncoder",
    "qwen3_vl.Qwen3VLVisionModel",
    "qwen3_vl_moe.Qwen3VLMoeVisionModel",
    "qwen4_exp.Qwen4ExpVisionModel",
    "video_llama_3.VideoLlama3VisionModel",
)


@fused_forward("", *TOWERS, by_name=True, checked=False)
def tower(self: Foreign, *inputs: Any, **named: Any) -> Any:
    """The tower's own forward, in which the lengths of the packed images are read once."""
    if torch.compiler.is_compiling():  # a trace reads no lengths
        return NotImplemented
    with one_call():
        return original(self, *inputs, **named)


@fused_forward("", *classes("pixtral.PixtralVisionModel"), needs="patch_size config")
def pixtral(self: Foreign, pixel_values: Tensor, image_sizes: Any = None, **named: Any) -> Any:
    """The tower's own forward, with the boundaries of images beside its mask of all pairs of tokens."""
    if self.config._attn_implementation not in ("eager", "sdpa"):
        return NotImplemented
    (B, _, *shape), p = pixel_values.shape, self.patch_size
    sizes = [shape] * B if image_sizes is None else [[int(n) for n in size] for size in image_sizes]
    lengths = [min(h, shape[0]) // p * (min(w, shape[1]) // p) for h, w in sizes[:B]]
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32).to(pixel_values.device)
    return original(self, pixel_values, image_sizes, cu_seq_lens_q=ends, max_length_q=max(lengths), **named)


NEEDS = "qkv|q_proj|q proj|out_proj|o_proj num_heads|head_dim scaling|scale config"
PRECOMPUTED = {"interp_indices", "interp_weights", "bilinear_indices", "bilinear_weights", "merged_shape"}  # of a tower
TAKES = "cu_seqlens position_embeddings max_seqlen attention_mask rotary_pos_emb"


@fused_body(
    *classes(
        "qwen2_vl.VisionAttention",
        "qwen2_5_omni.Qwen2_5OmniVisionAttention",
        "glm_image.GlmImageVisionAttention",
        "glm_ocr.GlmOcrVisionAttention",
        "kimi_k25.Kimi_K25VisionAttention",
        "cosmos3_edge.Cosmos3EdgeVisionAttention",
        "exaone4_5.Exaone4_5_VisionAttention",
    ),
    needs=NEEDS,
)
@fused_body(
    *classes(
        "paddleocr_vl.PaddleOCRVisionAttention",
        "minicpmv4_6.MiniCPMV4_6VisionAttention",
        "hunyuan_vl.HunYuanVLVisionAttention",
    ),
    *INTERLEAVED,
    needs=NEEDS,
    after=(None,),
)  # these return attention weights, too
def packed_parts(
    self: Foreign,
    *,
    cu_seqlens: Tensor | None = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    max_seqlen: int | None = None,
    attention_mask: Tensor | None = None,
    rotary_pos_emb: Tensor | None = None,
    **more: object,
) -> Body | str:
    """Parts of an attention within packed images; without cu_seqlens, of its layers alone."""
    rotary: Any = rotary_pos_emb if position_embeddings is None else position_embeddings
    if isinstance(rotary, Tensor):  # angles, in older releases
        angles = torch.cat((rotary, rotary), -1)
        position_embeddings = angles.cos(), angles.sin()
    drop = getattr(self, "attention_dropout", getattr(self, "dropout", 0.0))
    more = {name: value for name, value in more.items() if name not in PRECOMPUTED}  # which some pass on
    why = attention_reason(self, drop, None, False, more)
    if why is None and attention_mask is not None:
        why = "a mask besides cu_seqlens"
    if why is None and getattr(self, "kv_dim", None) != getattr(self, "q_dim", None):
        why = "grouped-query attention"
    if why is not None:
        return why
    projections = (self.qkv,) if hasattr(self, "qkv") else tuple(first_of(self, f"{name}_proj", name) for name in "qkv")
    width = sum(getattr(layer, "out_features", 0) for layer in projections) // 3
    rope = None if position_embeddings is None else (*position_embeddings, known_type(self) in INTERLEAVED)
    return attention_body(
        projections,
        first_of(self, "proj", "out_proj", "o_proj"),
        self.num_heads if hasattr(self, "num_heads") else width // self.head_dim,
        self.scaling if hasattr(self, "scaling") else self.scale,
        rope=rope,
        norms=(self.q_norm, self.k_norm) if hasattr(self, "q_norm") else None,
        varlen=None if cu_seqlens is None else Varlen(cu_seqlens, max_seqlen or longest(cu_seqlens)),
    )


BLOCKS = {
    "qwen2_vl.Qwen2VLVisionBlock": PLAIN,
    "qwen2_5_vl.Qwen2_5_VLVisionBlock": PLAIN,
    "qwen2_5_omni.Qwen2_5OmniVisionBlock": PLAIN,
    "glm_image.GlmImageVisionBlock": PLAIN,
    "paddleocr_vl.PaddleOCRVisionEncoderLayer": CLIP,
    "hunyuan_vl.HunYuanVLVisionBlock": CLIP,
    "cosmos3_edge.Cosmos3EdgeVisionEncoderLayer": CLIP,
    "inkling2.Inkling2VisionEncoderLayer": LAMBDAS._replace(attn="self_attn"),
}
register_transformers({name: names._replace(takes=TAKES) for name, names in BLOCKS.items()})


def _merged(self: Foreign, x: Tensor, mlp: MlpBody, y: Tensor) -> Tensor:
    """mlp(y) of a merger's input x, or the merger's own forward if that is chosen."""
    way = ways.choose_way(None, y, (mlp.sizes(),)) if choose.has_ways(y) else "reference"
    return ways.plainly(type(self).forward, self, x) if way == "plain" else mlp(y, way=way)


@fused_forward(
    "patch merger",
    *classes("qwen3_vl.Qwen3VLVisionPatchMerger", "qwen3_omni_moe.Qwen3OmniMoeVisionPatchMerger"),
    needs="norm|ln_q linear_fc1|mlp.0 act_fn|mlp.1 linear_fc2|mlp.2 hidden_size use_postshuffle_norm",
)
def merger(self: Foreign, x: Tensor) -> Tensor:
    """Norm of patches, or of merged patches, then an MLP of merged patches, perhaps in a list; [T, D] → [T / 4, F]."""
    listed = hasattr(self, "mlp")
    layers: Any = self.mlp if listed else (self.linear_fc1, self.act_fn, self.linear_fc2)
    if len(layers) != 3:
        return NotImplemented
    norm = self.ln_q if listed else self.norm
    after, (fc1, act, fc2) = self.use_postshuffle_norm, layers
    mlp = MlpBody((fc1,), activation_of(act), fc2, first=norm if after else None)
    return _merged(self, x, mlp, (x if after else normalize(x, norm)).reshape(-1, self.hidden_size))


@fused_forward(
    "patch merger",
    *classes("glm4v.Glm4vVisionPatchMerger"),
    needs="proj post_projection_norm act1 gate_proj up_proj act_fn down_proj",
)
def gated_merger(self: Foreign, x: Tensor) -> Tensor:
    """A layer, a norm, an activation, then a gated MLP; [T, D] → [T, D]."""
    if activation_of(self.act_fn) != "silu":
        return NotImplemented
    y = self.act1(normalize(project(x, (self.proj,)), self.post_projection_norm))
    return _merged(self, x, MlpBody((self.gate_proj, self.up_proj), "swiglu", self.down_proj), y)


def _volume_reason(self: Foreign) -> str | None:
    sides = (self.temporal_patch_size, self.patch_size, self.patch_size)
    plain = is_patch_conv(self.proj, VOLUME_CONVOLUTIONS) and self.proj.kernel_size == sides
    return None if plain else "its convolution was replaced or is no patch projection"


@fused_forward(
    "patch projection",
    *classes("qwen2_vl.PatchEmbed"),
    needs="proj in_channels temporal_patch_size patch_size embed_dim",
    reason=_volume_reason,
    products=False,
)
def flat_patches(self: Foreign, hidden_states: Tensor) -> Tensor:
    """A convolution with one output place for each patch, as a matmul; [T, K] → [T, D]."""
    weight = self.proj.weight.flatten(1)
    return linear(hidden_states.view(-1, weight.shape[1]).to(weight.dtype), weight, self.proj.bias)


@fused_forward("RMSNorm", *classes("llama.LlamaRMSNorm"), needs="weight variance_epsilon", products=False)
def llama_norm(self: Foreign, hidden_states: Tensor) -> Tensor:
    """RMSNorm; [..., D] → [..., D]."""
    weight = self.weight
    if hidden_states.dtype != weight.dtype or not are_plain_tensors(weight):
        return NotImplemented
    return rms_norm(hidden_states, weight, self.variance_epsilon)


RMS_FORWARDS[llama_norm] = "variance_epsilon"
