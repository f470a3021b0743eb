"""Fused forwards for timm's blocks and stems: VisionTransformer, BEiT, EVA, DINOv3, NaFlexViT, CaiT."""

from torch import Tensor, nn

from ....engine.body import finish, project
from ....engine.branch import Branch, add_branches
from ....engine.hooks import PACKAGE
from ....engine.leaves import Foreign, is_patch_conv
from ....kernels.attention import attention
from ....kernels.patch_embed import patch_embed
from ....layers.scaled_block import ScaledBlock
from ...forwards import arguments, fused_forward
from ...third_party import four_axes
from ..two_branches import TIMM, register_blocks
from .attention import scale_of


def both_norms(block: Foreign) -> list[tuple[nn.Module, nn.Module]]:
    """The norm of each branch and the body after it."""
    return [(block.norm1, block.attn), (block.norm2, block.mlp)]


def _given(block: Foreign, **call: object) -> dict[str, object]:
    """Arguments that a block passes on to its attention, limited to those its release supports."""
    taken = arguments(type(block))
    return {name: value for name, value in call.items() if name in taken}


def drop_paths(block: Foreign) -> tuple[nn.Module, nn.Module]:
    """Stochastic depth of both branches; older releases use one module twice."""
    return (block.drop_path1, block.drop_path2) if hasattr(block, "drop_path1") else (block.drop_path,) * 2


@fused_forward(
    "pre-norm block",
    "timm.models.vision_transformer.Block",
    "fastvit_triton.layers.block.Block",
    "timm.models.nest.TransformerLayer",
    "timm.models.volo.Transformer",
    "timm.models.volo.Outlooker",
    needs="norm1 attn drop_path1|drop_path norm2 mlp drop_path2|drop_path",
    folds=both_norms,
)
def block(self: Foreign, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """Pre-norm block; [B, ..., D] → [B, ..., D]."""
    return add_branches(x, *block_branches(self, attn_mask, is_causal), block=self)


def block_branches(block: Foreign, attn_mask: Tensor | None = None, is_causal: bool = False) -> tuple[Branch, Branch]:
    """Attention and MLP of a pre-norm block, with their norms and factors."""
    call, (drop1, drop2) = _given(block, attn_mask=attn_mask, is_causal=is_causal), drop_paths(block)
    scale1, scale2 = (block.ls1, block.ls2) if hasattr(block, "ls1") else (None, None)
    attn = Branch(block.attn, block.norm1, scale1, drop1, call=call)
    return attn, Branch(block.mlp, block.norm2, scale2, drop2)


EVA = TIMM._replace(takes="rope attn_mask is_causal")
register_blocks(
    {
        "timm.models.eva.EvaBlock": EVA._replace(scales=("gamma_1", "gamma_2")),
        "timm.models.eva.EvaBlockPostNorm": EVA._replace(post_norms=True),
        "timm.models.deepseek_vit.DeepseekVitBlock": TIMM._replace(takes="rope"),
        "timm.models.vision_transformer.ResPostBlock": TIMM._replace(takes="attn_mask is_causal", post_norms=True),
        "timm.models.convit.Block": TIMM._replace(drop_paths=("drop_path", "drop_path")),
    }
)


@fused_forward(
    "pre-norm block",
    "timm.models.beit.Block",
    needs="norm1 attn gamma_1 drop_path1|drop_path norm2 mlp gamma_2 drop_path2|drop_path",
    folds=both_norms,
)
def beit_block(self: Foreign, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
    """Pre-norm block with relative positions; [B, N, D] → [B, N, D]."""
    call, (drop1, drop2) = dict(shared_rel_pos_bias=shared_rel_pos_bias), drop_paths(self)
    attn = Branch(self.attn, self.norm1, None, drop1, self.gamma_1, call=call)
    return add_branches(x, attn, Branch(self.mlp, self.norm2, None, drop2, self.gamma_2), block=self)


@fused_forward(
    "pre-norm block",
    "timm.models.cait.LayerScaleBlock",
    f"{PACKAGE}.layers.scaled_block.ScaledBlock",
    needs="norm1 attn gamma_1 drop_path1|drop_path norm2 mlp gamma_2",
    folds=both_norms,
)
def scaled_block(self: Foreign, x: Tensor) -> Tensor:
    """Pre-norm block whose branches are multiplied by factors; [B, N, D] → [B, N, D]."""
    return add_branches(x, *scaled_branches(self, x), block=self)


def scaled_branches(block: Foreign, x: Tensor) -> tuple[Branch, Branch]:
    """Attention and MLP of a pre-norm block, with their norms and factors, for x [B, N, D]."""
    first, second = factors(block, x)
    drop1, drop2 = drop_paths(block)
    attn = Branch(block.attn, block.norm1, None, drop1, first)
    return attn, Branch(block.mlp, block.norm2, None, drop2, second)


def factors(block: Foreign, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """What both branches of x [B, N, D] are multiplied by, [D]; None for 1."""
    return block.factors(x) if isinstance(block, ScaledBlock) else (block.gamma_1, block.gamma_2)


@fused_forward(
    "attention pooling",
    "timm.layers.attention_pool.AttentionPoolLatent",
    needs="latent pos_embed q kv q_norm k_norm num_heads scale proj proj_drop norm mlp pool",
    folds=lambda self: [(self.norm, self.mlp)],
)
def attention_pool(self: Foreign, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    """Learned queries attend to all tokens, then an MLP; [B, N, D] → [B, D]."""
    x = x if self.pos_embed is None else x + self.pos_embed[None].to(x.dtype)
    q = self.q(self.latent.expand(x.shape[0], -1, -1)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
    k, v = project(x, (self.kv,)).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    q = self.q_norm(q)
    k = self.k_norm(k)
    o = attention(q, k, v, four_axes(attn_mask), scale_of(self)).transpose(1, 2).flatten(2)
    x = finish(o, self.proj, drop=self.proj_drop)
    x = x if self.mlp is None else add_branches(x, Branch(self.mlp, self.norm))
    return x[:, 0] if self.pool == "token" else x.mean(1) if self.pool == "avg" else x


def _patch_reason(self: Foreign) -> str | None:
    form = getattr(self, "output_fmt", "NCHW")
    if not self.flatten and form != "NHWC":
        return f"its output is {getattr(form, 'value', form)}, not tokens"
    return None if is_patch_conv(self.proj) else "its projection was replaced or has a hook"


@fused_forward(
    "patch projection",
    "timm.layers.patch_embed.PatchEmbed",
    "timm.models.layers.patch_embed.PatchEmbed",
    needs="proj norm img_size patch_size flatten",
    reason=_patch_reason,
    products=False,
)
def patches(self: Foreign, x: Tensor) -> Tensor:
    """Patch projection; image [B, C, H, W] → tokens [B, N, D], or [B, h, w, D] for timm's NHWC format."""
    if x.dim() != 4 or not _divides(self, (x.shape[2], x.shape[3])):
        return NotImplemented
    tokens = patch_embed(x, self.proj.weight, self.proj.bias)
    return self.norm(tokens if self.flatten else tokens.unflatten(1, (x.shape[2] // self.patch_size[0], -1)))


def _divides(self: Foreign, size: tuple[int, int]) -> bool:
    """True if the module accepts images of this size and the patch size divides them."""
    strict = self.img_size is not None and getattr(self, "strict_img_size", True)
    divided = all(side % patch == 0 for side, patch in zip(size, self.patch_size, strict=True))
    return divided and (not strict or size == tuple(self.img_size))
