"""Fused forwards for the vision towers of transformers' multimodal models: attention and MLPs; blocks are in a table.

Most towers run the code of CLIP, SigLIP or ViT with other names of attributes; the other files here have their readers.
No reader here supports causal or grouped attention, and only Pixtral's images packed with cu_seqlens: else the
module's own forward runs.
"""

from typing import Any, NamedTuple

from torch import Tensor, nn

from ....engine.attention import attention_body
from ....engine.body import Body, project
from ....engine.hooks import has_hooks, type_name
from ....engine.leaves import LAYER_SCALES, Foreign, activation_of, is_identity
from ....engine.mlp import MlpBody
from ....kernels.argument import Varlen
from ....kernels.attention import attention
from ...forwards import fused_body, fused_forward
from ...third_party import classes, dropout_reason, four_axes, head_norms
from .vit import attention_parts, attention_reason, first_of, gated_parts

LAYER_SCALES |= dict.fromkeys(
    classes(
        "dinov2.Dinov2LayerScale",
        "dinov2_with_registers.Dinov2WithRegistersLayerScale",
        "dinov3_vit.DINOv3ViTLayerScale",
        "rf_detr.RfDetrDinov2LayerScale",
        "radio.RadioLayerScale",
        "tipsv2.Tipsv2VisionLayerScale",
        "eomt.EomtLayerScale",
        "eomt_dinov3.EomtDinov3LayerScale",
        "videomt.VideomtLayerScale",
        "sapiens2.Sapiens2LayerScale",
    ),
    "lambda1",
)

fused_body(
    *classes("altclip.AltCLIPAttention", "chinese_clip.ChineseCLIPVisionAttention", "git.GitVisionAttention"),
    *classes(
        "kosmos2.Kosmos2VisionAttention",
        "idefics2.Idefics2VisionAttention",
        "owlvit.OwlViTAttention",
        "owlv2.Owlv2Attention",
    ),
    *classes("granite_docling.GraniteDoclingVisionAttention", "mlcd.MLCDAttention", "radio.RadioAttention"),
    *classes("phi4_multimodal.Phi4MultimodalVisionAttention"),
    needs="q_proj k_proj v_proj o_proj|out_proj num_attention_heads|num_heads scaling|scale attention_dropout|dropout "
    "is_causal config",
    takes="attention_mask position_embeddings cu_seqlens",
    after=(None,),
)(attention_parts)


class NormedLinear(NamedTuple):
    """A linear layer followed by a norm of all its outputs; it is called, as no kernel has such a norm."""

    linear: Foreign  # whose sizes are read
    norm: nn.Module

    def __call__(self, x: Tensor) -> Tensor:
        """[..., K] → [..., F]."""
        return self.norm(self.linear(x))


@fused_body(
    *classes("internvl.InternVLVisionAttention", "qianfan_ocr.QianfanOCRVisionAttention", "janus.JanusVisionAttention"),
    needs="q_proj k_proj v_proj q_norm k_norm projection_layer projection_dropout num_heads scale attention_dropout "
    "is_causal config",
    after=(None,),
)
def wide_norm_parts(self: Foreign, attention_mask: Tensor | None = None, **more: object) -> Body | str:
    """Parts of an attention whose queries and keys may be normalised over all heads, before they are split."""
    why = attention_reason(self, self.attention_dropout, attention_mask, None, more)
    norms = self.q_norm, self.k_norm
    if why is None and any(type_name(norm).endswith(".LayerNorm") for norm in norms):
        why = "a norm of the whole width, applied to a head"  # Janus: its own forward fails
    if why is not None:
        return why
    queries_keys: Any = (
        layer if is_identity(norm) else NormedLinear(layer, norm)
        for layer, norm in zip((self.q_proj, self.k_proj), norms, strict=True)
    )
    projections = (*queries_keys, self.v_proj)
    mask = four_axes(attention_mask)
    drops = (self.projection_dropout,)
    return attention_body(projections, self.projection_layer, self.num_heads, self.scale, mask, drops=drops)


@fused_body(
    *classes("mllama.MllamaVisionAttention", "molmo2.Molmo2VisionAttention", "sapiens2.Sapiens2Attention"),
    *classes("step3p7.Step3p7VisionAttention", "pixtral.PixtralAttention"),
    needs="q_proj k_proj v_proj o_proj|out_proj head_dim scaling|scale config",
    takes="attention_mask position_embeddings encoder_hidden_states",
    after=(None,),
)
def head_dim_parts(
    self: Foreign,
    *,
    attention_mask: Tensor | None = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    **more: object,
) -> Body | str:
    """Parts of an attention known by the width of its heads, with optional norms of heads and rotary positions."""
    drop = first_of(self, "attention_dropout", "dropout") or 0.0
    if getattr(self, "num_key_value_groups", 1) != 1:
        return "grouped-query attention"
    varlen = None
    keys = more.pop("cu_seq_lens_k", cu_seq_lens_q)
    if cu_seq_lens_q is not None and keys is cu_seq_lens_q:  # then a mask says the same
        varlen = Varlen(cu_seq_lens_q, max_length_q)
        more = {name: value for name, value in more.items() if name != "max_length_k"}
    why = attention_reason(self, drop, attention_mask, getattr(self, "is_causal", False), more)
    if why is not None:
        return why
    rope = None
    if position_embeddings is not None:  # [N, D], or [B, N, D] to be broadcast over the heads
        cos, sin = (t[:, None] if t.dim() == 3 else t for t in position_embeddings)
        rope = cos, sin, False
    plain = type(self.q_proj) is nn.Linear  # which ignores out_features
    width = len(self.q_proj.weight) if plain else self.q_proj.out_features
    return attention_body(
        (self.q_proj, self.k_proj, self.v_proj),
        self.o_proj if hasattr(self, "o_proj") else self.out_proj,
        width // self.head_dim,
        self.scaling if hasattr(self, "scaling") else self.scale,
        None if varlen is not None else four_axes(attention_mask),
        rope,
        head_norms(self),
        varlen=varlen,
    )


@fused_body(
    *classes("blip.BlipAttention", "blip_2.Blip2Attention"),
    needs="qkv projection num_heads scale dropout|attention_dropout config",
    after=(None,),
)
def packed_parts(self: Foreign, head_mask: Tensor | None = None, **more: object) -> Body | str:
    """Parts of an attention with packed qkv; BLIP's weights, which it returns, are None as with "sdpa"."""
    drop = self.dropout if hasattr(self, "dropout") else None
    if (why := dropout_reason(drop, "dropout was replaced")) is not None:
        return why
    if drop is not None and (self._forward_hooks or has_hooks(self)):
        return "its attention weights have a hook"
    dropout = 0.0 if drop is not None else self.attention_dropout
    more = dict(more, head_mask=head_mask)
    why = attention_reason(self, dropout, None, getattr(self, "is_causal", False), more)
    return why or attention_body((self.qkv,), self.projection, self.num_heads, self.scale)


@fused_body(
    *classes("groupvit.GroupViTAttention"),
    needs="q_proj k_proj v_proj out_proj num_heads scale dropout config",
    takes="attention_mask encoder_hidden_states",
    after=(None,),
)
def written_out_parts(self: Foreign, attention_mask: Tensor | None = None, **more: object) -> Body | str:
    """Parts of an attention with softmax written out, which is not called for another model's tokens."""
    if self._forward_hooks or has_hooks(self):
        return "its attention weights have a hook"
    why = attention_reason(self, self.dropout, attention_mask, False, more)
    projections = self.q_proj, self.k_proj, self.v_proj
    return why or attention_body(projections, self.out_proj, self.num_heads, self.scale, four_axes(attention_mask))


@fused_body(
    *classes("sam.SamMLPBlock", "seggpt.SegGptMlp", "qwen2_vl.VisionMlp", "qwen3_vl.Qwen3VLVisionMLP"),
    *classes("vjepa2.VJEPA2MLP", "janus.JanusVisionMLP", "mgp_str.MgpstrMlp", "vitdet.VitDetMlp"),
    *classes("inkling2.Inkling2VisionMerger", "llava.LlavaMultiModalProjector"),
    needs="fc1|lin1|linear_fc1|linear_1 act|act_fn|activation|activation_fn fc2|lin2|linear_fc2|linear_2",
)
def mlp_parts(self: Foreign) -> MlpBody:
    """Parts of an MLP: a layer, an activation, another layer; and optional dropouts after both layers."""
    fc1, fc2 = (first_of(self, f"fc{i}", f"lin{i}", f"linear_fc{i}", f"linear_{i}") for i in (1, 2))
    act = first_of(self, "act", "act_fn", "activation", "activation_fn")
    drops = tuple(first_of(self, f"dropout{i}", "drop") for i in (1, 2))
    return MlpBody((fc1,), activation_of(act), fc2, drops)


fused_body(*classes("qwen2_5_vl.Qwen2_5_VLMLP"), needs="gate_proj up_proj act_fn down_proj", takes="")(gated_parts)


@fused_forward(
    "attention pooling",
    *classes("aimv2.Aimv2AttentionPoolingHead"),
    needs="k_proj v_proj cls_token output_proj num_heads",
)
def class_pooling(self: Foreign, hidden_states: Tensor) -> Tensor:
    """A learned query attends to all tokens; [B, N, D] → [B, D]."""
    keys = project(hidden_states, (self.k_proj, self.v_proj)).chunk(2, -1)
    heads = [t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in keys]
    query = self.cls_token.to(heads[0].dtype).expand(len(hidden_states), -1, -1)
    query = query.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
    return self.output_proj(attention(query, *heads).transpose(1, 2).flatten(2)[:, 0])
