"""Parameter names of plain ViTs in other libraries: one table per layout, and functions that convert shapes.

Our names are timm's; `adapt.PARTS` names tensors that other libraries store separately. A table maps our names to
theirs; module names stand for their .weight and .bias, and braces expand as in a shell. Names that differ between
versions of a library are separated by spaces: all are read, the first is written.

Sources: state dicts of transformers 4.56 and 5.23, torchvision 0.28 and timm 1.0.31; google-research/vision_transformer
(vit_jax/models_vit.py, checkpoint.py), google-research/big_vision (models/vit.py), facebookresearch/deit (models.py),
facebookresearch/dinov2 (models/vision_transformer.py, layers/swiglu_ffn.py), facebookresearch/mae (util/pos_embed.py).
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from .adapt import State, read_dinov2, read_jax, read_naflex, write_clip, write_dinov2, write_tower


def _same(tensors: State) -> State:
    return tensors


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Parameter names and shapes of a ViT in one library.

    Attributes:
        name: name in reports and errors.
        mark: key that distinguishes this layout from those after it in `LAYOUTS`; it may follow a prefix.
        beside: second required key after the same prefix, if other architectures also have the mark.
        resize: interpolation of positions in this library: a mode of `resize_pos_embed`, or "dinov2".
        number: changes their key first, where stages are numbered in another way than ours.
        stem: our name → theirs, outside the blocks.
        home: our path of a block; {} is its number, or those of its stage and in it.
        blocks: their paths of a block.
        block: our name → theirs, inside a block.
        read: converts their tensors to our shapes, under their names.
        write: the inverse of `read` and `number`.
        base: prefix of all keys except the classifier's in the class with a classifier.
        needs: settings of the models that this library supports; a tuple lists alternatives.
    """

    name: str
    mark: str
    beside: str = ""
    resize: str
    number: Callable[[str], str] = str
    stem: dict[str, str] = field(default_factory=dict)
    home: str = "blocks.{}"
    blocks: str = "blocks.{}"
    block: dict[str, str] = field(default_factory=dict)
    read: Callable[[State], State] = _same
    write: Callable[[State], State] = _same
    base: str = ""
    needs: dict[str, object] = field(default_factory=dict)

    def ours(self, key: str) -> str:
        """Converts their key, without prefix, to ours; keys that are in no table are unchanged."""
        key = self.number(key)
        for path in self.blocks.split():
            pattern = re.escape(path).replace(r"\{\}", r"(\d+)") + r"\.(.+)"
            if found := re.fullmatch(pattern, key):
                *numbers, rest = found.groups()
                home = self.home.format(*numbers[-self.home.count("{}") :])
                return f"{home}.{_look_up({their: our for our, their in _rows(self.block)}, rest)}"
        return _look_up({their: our for our, their in _rows(self.stem)}, key)

    def theirs(self, key: str) -> str:
        """Converts our key to theirs, without prefix; uses the first of several names."""
        if found := re.fullmatch(re.escape(self.home).replace(r"\{\}", r"(\d+)") + r"\.(.+)", key):
            *numbers, rest = found.groups()
            path = self.blocks.split()[0].format(*numbers)
            return f"{path}.{_look_up(dict(reversed([*_rows(self.block)])), rest)}"
        return _look_up(dict(reversed([*_rows(self.stem)])), key)

    def convert(self, state: State, heads: tuple[str, ...], classes: int) -> State:
        """Converts the tensors of a model with these heads to theirs, in the class with a classifier if it has one."""
        tensors = self.write({self.theirs(key): tensor for key, tensor in state.items()})
        outside = tuple(self.theirs(f"{head}.") for head in heads)
        base = self.base if classes else ""
        return {key if base and key.startswith(outside) else base + key: tensor for key, tensor in tensors.items()}

    def unmet(self, facts: dict[str, object]) -> list[str]:
        """Descriptions of the entries of `needs` that a model does not satisfy."""
        needs = {key: need if isinstance(need, tuple) else (need,) for key, need in self.needs.items()}
        wrong = {key: need for key, need in needs.items() if facts[key] not in need}
        return [f"{key}={' or '.join(map(repr, need))}, not {facts[key]!r}" for key, need in wrong.items()]


def first(model: Any, layouts: tuple[Layout, ...]) -> Layout:
    """The first layout, for models that have no other."""
    return layouts[0]


def unchanged(model: Any, state: State, layout: Layout) -> State:
    """The tensors as they are, for layouts with our names and shapes."""
    return state


class Spelling(NamedTuple):
    """The layouts of an architecture's checkpoints, and functions that convert to and from them.

    Attributes:
        name: of the architecture, in errors.
        layouts: layouts that can be read, in the order in which their marks are searched.
        fit: adapts renamed tensors to a model, see `vit.fit`.
        saved: layouts that can be written, by name.
        choose: (model, layouts) → the first of the layouts under a name that supports the model.
        write: (model, tensors, layout) → the tensors under the layout's names, with its shapes.
    """

    name: str
    layouts: tuple[Layout, ...]
    fit: Callable[..., tuple[list[str], str]]
    saved: Mapping[str, tuple[Layout, ...]] = MappingProxyType({})
    choose: Callable[..., Layout] = first
    write: Callable[..., State] = unchanged

    def convert(self, model: Any, state: State, name: str) -> State:
        """Converts a model's tensors to a layout of `saved`.

        Raises:
            WeightsError: no layout of this name supports the model.
        """
        return self.write(model, state, self.choose(model, self.saved[name]))


def _rows(table: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yields (our name, their name) for each of their names and each option in braces."""
    for our, spellings in table.items():
        for their in spellings.split():
            yield from zip(_expand(our), _expand(their), strict=True)


def _expand(name: str) -> list[str]:
    """Expands braces: norm{1,2} → norm1, norm2."""
    head, _, rest = name.partition("{")
    options, _, tail = rest.partition("}")
    return [f"{head}{option}{tail}" for option in options.split(",")]


def _look_up(table: dict[str, str], key: str) -> str:
    """Looks up the whole key, else its module, and keeps the last component; unknown keys are unchanged."""
    if key in table:
        return table[key]
    module, _, leaf = key.rpartition(".")
    return f"{table[module]}.{leaf}" if module in table else key


BASIC: dict[str, Any] = dict(norm="pre", head_dim=None, pre_logits=False, patch_embed=("conv", "linear"))
TOWER = dict(BASIC, final_norm=True, fc_norm=False, qk_norm=False, proj_bias=True, distilled=False)
TOWER |= dict(pos_embed=("learned", "sincos1d", "sincos2d"), hybrid=False)
PLAIN = dict(TOWER, registers=False, layer_scale=False, mlp="mlp")
TOKEN = dict(class_token=True, global_pool="token", pre_norm=False)

TIMM = Layout(
    name="timm",
    mark="patch_embed.proj.weight",
    beside="blocks.0.norm1.weight",
    resize="bicubic_antialias",
    block={"ls{1,2}.gamma": "ls{1,2}.gamma gamma_{1,2}"},  # gamma_1 in the official DeiT III
    needs=dict(BASIC, pos_embed=("learned", "sincos1d", "sincos2d", "none")),
)
JAX = Layout(
    name="JAX",
    mark="embedding.kernel",
    resize="bilinear_align_corners",
    stem={
        "cls_token": "cls",
        "pos_embed": "Transformer.posembed_input.pos_embedding Transformer.pos_embedding pos_embedding",
        "patch_embed.proj": "embedding",
        "norm": "Transformer.encoder_norm",
        "pre_logits.fc": "pre_logits",
        "attn_pool.latent": "MAPHead_0.probe",
        "attn_pool.{q,k,v,proj}": "MAPHead_0.MultiHeadDotProductAttention_0.{query,key,value,out}",
        "attn_pool.norm": "MAPHead_0.LayerNorm_0",
        "attn_pool.mlp.fc{1,2}": "MAPHead_0.MlpBlock_0.Dense_{0,1}",
    },
    blocks="Transformer.encoderblock_{}",
    block={
        "norm{1,2}": "LayerNorm_{0,2} LayerNorm_{0,1}",
        "attn.{q,k,v,proj}": "MultiHeadDotProductAttention_1.{query,key,value,out} "
        "MultiHeadDotProductAttention_0.{query,key,value,out}",
        "mlp.fc{1,2}": "MlpBlock_3.Dense_{0,1} MlpBlock_0.Dense_{0,1}",
    },
    read=read_jax,
)
TORCHVISION = Layout(
    name="torchvision",
    mark="encoder.pos_embedding",
    resize="bicubic_align_corners",
    stem={
        "cls_token": "class_token",
        "pos_embed": "encoder.pos_embedding",
        "patch_embed.proj": "conv_proj",
        "norm": "encoder.ln",
        "pre_logits.fc": "heads.pre_logits",
        "head": "heads.head",
    },
    blocks="encoder.layers.encoder_layer_{}",
    block={
        "norm{1,2}": "ln_{1,2}",
        "attn.qkv.{weight,bias}": "self_attention.in_proj_{weight,bias}",
        "attn.proj": "self_attention.out_proj",
        "mlp.fc{1,2}": "mlp.{0,3} mlp.linear_{1,2}",
    },
)
VIT = Layout(
    name="transformers ViT",
    mark="embeddings.patch_embeddings.projection.weight",
    resize="bicubic",
    stem={
        "cls_token": "embeddings.cls_token",
        "pos_embed": "embeddings.position_embeddings",
        "patch_embed.proj": "embeddings.patch_embeddings.projection",
        "norm": "layernorm",
        "head": "classifier",
    },
    blocks="layers.{} encoder.layer.{}",
    block={
        "norm{1,2}": "layernorm_{before,after}",
        "attn.{q,k,v}": "attention.{q,k,v}_proj attention.attention.{query,key,value}",
        "attn.proj": "attention.o_proj attention.output.dense",
        "mlp.fc{1,2}": "mlp.fc{1,2} {intermediate,output}.dense",
    },
    base="vit.",
    needs=PLAIN | TOKEN,
)
DEIT = replace(
    VIT,
    name="transformers DeiT",
    mark="embeddings.distillation_token",
    stem={
        **VIT.stem,
        "dist_token": "embeddings.distillation_token",
        "head": "cls_classifier classifier",
        "head_dist": "distillation_classifier",
    },
    base="deit.",
    needs=dict(VIT.needs, distilled=True),
)
DINOV2 = replace(
    VIT,
    name="transformers Dinov2",
    mark="encoder.layer.0.layer_scale1.lambda1",
    stem={**VIT.stem, "reg_token": "embeddings.register_tokens"},
    blocks="encoder.layer.{}",
    block={
        **{our: VIT.block[our] for our in ("attn.{q,k,v}", "attn.proj")},
        "ls{1,2}.gamma": "layer_scale{1,2}.lambda1",
        "mlp.fc1": "mlp.fc1 mlp.weights_in",
        "mlp.{gate,up,down}": "mlp.{gate,up,down}_proj",
        "mlp.fc2": "mlp.fc2 mlp.weights_out",
    },
    read=read_dinov2,
    write=write_dinov2,
    base="dinov2.",
    needs=dict(TOWER | TOKEN, registers=False, layer_scale=True),
)
DINOV2_REGISTERS = replace(
    DINOV2,
    name="transformers Dinov2WithRegisters",
    mark="embeddings.register_tokens",
    resize="bicubic_antialias",
    base="dinov2_with_registers.",
    needs=dict(DINOV2.needs, registers=True),
)
SIGLIP = Layout(
    name="transformers SigLIP",
    mark="embeddings.patch_embedding.weight",
    resize="bicubic",
    stem={
        "pos_embed": "embeddings.position_embedding.weight",
        "patch_embed.proj": "embeddings.patch_embedding",
        "norm": "post_layernorm",
        "head": "classifier",
        "attn_pool.latent": "head.probe",
        "attn_pool.qkv.{weight,bias}": "head.attention.in_proj_{weight,bias}",
        "attn_pool.proj": "head.attention.out_proj",
        "attn_pool.norm": "head.layernorm",
        "attn_pool.mlp.fc{1,2}": "head.mlp.fc{1,2}",
    },
    blocks="encoder.layers.{}",
    block={"norm{1,2}": "layer_norm{1,2}", "attn.{q,k,v}": "self_attn.{q,k,v}_proj", "attn.proj": "self_attn.out_proj"},
    write=write_tower,
    base="vision_model.",
    needs=dict(
        PLAIN, class_token=False, global_pool=("avg", "map"), pre_norm=False, qkv_bias=True, head_after_map=False
    ),
)
CLIP = replace(
    SIGLIP,
    name="transformers CLIP",
    mark="embeddings.class_embedding",
    stem={
        **{our: SIGLIP.stem[our] for our in ("pos_embed", "patch_embed.proj", "norm")},
        "cls_token": "embeddings.class_embedding",
        "norm_pre": "pre_layrnorm",
        "head": "visual_projection",
    },
    write=write_clip,
    needs=dict(PLAIN | TOKEN, pre_norm=True, qkv_bias=True, head_bias=False),
)
DINO = replace(
    TIMM,
    name="DINOv2",
    mark="mask_token",
    beside="",
    resize="dinov2",
    stem={"reg_token": "register_tokens"},
    blocks="blocks.{}.{} blocks.{}",  # in FSDP chunks, the second number is the block's index over all chunks
    block={"mlp.fc{1,2}": "mlp.w{12,3}"},
)
TIMM_NAFLEX = replace(
    TIMM,
    name="timm NaFlexViT",
    mark="embeds.pos_embed",
    stem={
        "cls_token": "embeds.cls_token",
        "reg_token": "embeds.reg_token",
        "pos_embed": "embeds.pos_embed",
        "patch_embed.proj": "embeds.proj",
    },
    read=read_naflex,
)
TRANSFORMERS = (CLIP, SIGLIP, DINOV2_REGISTERS, DINOV2, DEIT, VIT)
LAYOUTS = (
    *(JAX, TORCHVISION, *TRANSFORMERS),
    replace(TIMM, name="MAE", mark="decoder_embed.weight", beside="", resize="bicubic"),
    replace(DINO, name="DINOv2 with registers", mark="register_tokens", resize="bicubic_antialias"),
    *(DINO, TIMM_NAFLEX, TIMM),
)
