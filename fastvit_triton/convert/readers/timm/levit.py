"""Fused forwards for timm's LeViT, EfficientFormer and TinyViT: keys narrower than values, and a table of biases."""

from torch import Tensor, nn

from ....engine.attention import merged_heads
from ....engine.batch_norm import normed
from ....engine.body import Body, finish, project
from ....engine.branch import Branch, add_branches
from ....engine.freeze import derived
from ....engine.hooks import has_hooks, is_our_forward, is_plain_module, type_name
from ....engine.leaves import Foreign, Packed, activation_of
from ....engine.mlp import MlpBody
from ....engine.replay import call_branches
from ....kernels.attention import attention
from ...batch_norm import UNFOLDED, folded_mlp
from ...forwards import Reader, fused_body, fused_forward
from ...third_party import is_fusable
from ..two_branches import TIMM, register_blocks
from .attention import fused_heads, is_own, scale_of

MAPPED = "its activation or dropout reads a map: it was replaced or has a hook"


def distance_bias(attn: Foreign) -> Tensor:
    """The bias [1, H, Nq, Nk] from a table [H, distances], and an index of pairs or the size of the grid."""
    table = attn.attention_biases
    if not hasattr(attn, "attention_bias_idxs"):
        return derived(attn, "bias", (table,), attn.get_attention_biases)[None]
    index = attn.attention_bias_idxs
    return derived(attn, "bias", (table, index), lambda: table[:, index])[None]


def attend_narrow(attn: Foreign, qkv: Tensor, num_heads: int, value_dim: int) -> Tensor:
    """Attention of projections [B, N, H · (2 · D + Dv)], packed for each head, → [B, N, H · Dv]."""
    sizes: list[int] = [attn.key_dim, attn.key_dim, value_dim]
    q, k, v = qkv.unflatten(-1, (num_heads, -1)).transpose(1, 2).split(sizes, -1)
    return merged_heads(attention(q, k, v, distance_bias(attn), scale_of(attn)), qkv.shape[1:-1])


def attend_fewer(attn: Foreign, q: Tensor, kv: Tensor, num_heads: int, value_dim: int) -> Tensor:
    """Attention of queries [B, Nq, H · D] to keys and values [B, Nk, H · (D + Dv)], → [B, Nq, H · Dv]."""
    q, kv = (t.unflatten(-1, (num_heads, -1)).transpose(1, 2) for t in (q, kv))
    k, v = kv.split([attn.key_dim, value_dim], -1)
    return attention(q, k, v, distance_bias(attn), scale_of(attn)).transpose(1, 2).flatten(2)


@fused_heads(
    "timm.models.efficientformer.Attention",
    needs="qkv proj num_heads scale key_dim val_dim attention_biases attention_bias_idxs",
    reason=None,
)
def efficientformer_heads(self: Foreign, qkv: Tensor) -> Tensor:
    """EfficientFormer's attention; [B, N, H · (2 · D + Dv)] → [B, N, H · Dv]."""
    return attend_narrow(self, qkv, self.num_heads, self.val_dim)


register_blocks(
    {"timm.models.efficientformer.MetaBlock1d": TIMM._replace(attn="token_mixer", layer_scales=("ls1", "ls2"))}
)


@fused_heads(
    "timm.models.tiny_vit.Attention",
    needs="norm qkv proj num_heads scale key_dim val_dim attention_biases attention_bias_idxs",
    reason=None,
    first="norm",
)
def tiny_vit_heads(self: Foreign, qkv: Tensor) -> Tensor:
    """TinyViT's attention, with its norm, in windows [B · windows, N, ...]."""
    return attend_narrow(self, qkv, self.num_heads, self.val_dim)


@fused_body("timm.models.tiny_vit.NormMlp", needs="norm fc1 act drop1 fc2 drop2")
def tiny_vit_mlp_parts(self: Foreign) -> MlpBody:
    """Parts of TinyViT's MLP with its norm."""
    return MlpBody((self.fc1,), activation_of(self.act), self.fc2, (self.drop1, self.drop2), first=self.norm)


def _levit_reason(self: Foreign) -> str | None:
    """Why LeViT's attention must run its own forward now, or None."""
    if not _is_sequence(self.proj, "act", "ln") or (hasattr(self, "q") and not _is_sequence(self.q, "down", "ln")):
        return "q or proj was replaced or has a hook"
    if not _has_maps(self):
        return None
    if not isinstance(activation_of(self.proj.act), str):
        return MAPPED
    layers = (self.q.ln, self.kv, self.proj.ln) if hasattr(self, "q") else (self.qkv, self.proj.ln)
    return None if all(type(normed(layer)) is Packed for layer in layers) else UNFOLDED


def _has_maps(attn: Foreign) -> bool:
    """True if an attention takes maps, not tokens; ours takes tokens."""
    return getattr(attn, "use_conv", False)


def _is_sequence(module: nn.Module, *names: str) -> bool:
    """True for a plain nn.Sequential of modules with these names."""
    return is_plain_module(module, ("torch.nn.modules.container.Sequential",)) and tuple(module._modules) == names


@fused_body(
    "timm.models.levit.Attention",
    "fastvit_triton.models.levit.DistanceAttention",
    needs="qkv proj.act proj.ln num_heads scale key_dim val_dim attention_biases attention_bias_idxs|grid "
    "use_conv|grid",
    takes="",
    call=lambda self: {"tokens": True},
)
def levit_parts(self: Foreign, tokens: bool = False) -> Body | str:
    """Parts of LeViT's attention, with an activation before the last layer; maps only as `tokens`, by the block."""
    if _has_maps(self) and not tokens:
        return "a map"
    layers = (normed(self.qkv), normed(self.proj.ln))

    def between(qkv: Tensor) -> Tensor:
        return self.proj.act(attend_narrow(self, qkv, self.num_heads, self.val_dim))

    return _levit_reason(self) or Body("attention", layers[:1], between, layers[1], self.num_heads)


@fused_forward(
    "attention with fewer queries",
    "timm.models.levit.AttentionDownsample",
    "fastvit_triton.models.levit.DistanceDownsample",
    needs="q.down q.ln kv proj.act proj.ln num_heads scale key_dim val_dim attention_biases attention_bias_idxs|grid "
    "use_conv|grid",
    reason=_levit_reason,
)
def levit_downsample(self: Foreign, x: Tensor) -> Tensor:
    """LeViT's attention between stages; [B, N, D] → [B, N', D'], or [B, D, H, W] → [B, D', H', W']."""
    few = self.q.down(x)
    grid = few.shape[2:] if _has_maps(self) else None
    q = project(_tokens(few), (normed(self.q.ln),))
    kv = project(_tokens(x), (normed(self.kv),))
    o = attend_fewer(self, q, kv, self.num_heads, self.val_dim)
    return _map(finish(self.proj.act(o), normed(self.proj.ln)), grid)


@fused_body(
    "timm.models.levit.LevitMlp",
    "fastvit_triton.models.levit.NormedMlp",
    needs="ln1 act drop ln2",
    takes="",
    call=lambda self: {"tokens": True},
)
def levit_mlp_parts(self: Foreign, tokens: bool = False) -> MlpBody | str:
    """Parts of LeViT's MLP, with the BatchNorms folded into its layers; maps only as `tokens`, by the block."""
    first = normed(self.ln1)
    last = normed(self.ln2)
    if is_own(self):  # a layer whose BatchNorm is not folded is called
        return MlpBody((first,), activation_of(self.act), last, (self.drop, None))
    is_map = not type_name(self.ln1).endswith("LinearNorm")
    if is_map and not tokens:
        return "a map"
    if is_map and (has_hooks(self.drop) or not isinstance(activation_of(self.act), str)):
        return MAPPED
    return folded_mlp(first, self.act, last, (self.drop, None))


def _tokens(x: Tensor) -> Tensor:
    """Tokens [B, N, D] of a map [B, D, H, W], or as they are."""
    return x.flatten(2).transpose(1, 2) if x.dim() == 4 else x


def _map(x: Tensor, grid: tuple[int, ...] | None) -> Tensor:
    """The reverse of `_tokens`; a map is a view in which channels are the last axis in memory."""
    return x if grid is None else x.transpose(1, 2).unflatten(2, grid)


def _branches(*bodies: tuple[Foreign, Reader, nn.Module], maps: bool) -> list[Branch] | None:
    """A branch of tokens for each (module, its reader, drop path); None if one of them must be called with a map."""
    if not maps:
        return [Branch(body, drop_path=drop_path) for body, _, drop_path in bodies]
    if not all(is_our_forward(body.__dict__.get("forward")) for body, *_ in bodies):
        return None
    if any(has_hooks(module) for body, _, drop_path in bodies for module in (body, drop_path)):
        return None
    branches = []
    for body, read, drop_path in bodies:
        parts = read(body, tokens=True)
        if isinstance(parts, str):
            return None
        branches.append(Branch(parts, drop_path=drop_path))
    return branches


def _block_reason(self: Foreign) -> str | None:
    """Why a block must run its own forward now, or None."""
    attn = self.attn_downsample if hasattr(self, "attn_downsample") else self.attn
    return _levit_reason(attn) if _has_maps(attn) else None


@fused_forward(
    "block",
    "timm.models.levit.LevitBlock",
    "fastvit_triton.models.levit.NormedBlock",
    needs="attn.use_conv|attn.grid drop_path1 mlp drop_path2",
    reason=_block_reason,
    checked=False,
)
def levit_block(self: Foreign, x: Tensor) -> Tensor:
    """LeViT's block, whose norms are BatchNorms inside its branches; shape as x: tokens [B, N, D] or a map."""
    attn = (self.attn, levit_parts, self.drop_path1)
    mlp = (self.mlp, levit_mlp_parts, self.drop_path2)
    branches = _branches(attn, mlp, maps=x.dim() == 4) if is_fusable(self, x) else None
    if branches is None:
        return NotImplemented
    return _map(add_branches(_tokens(x), *branches, block=self), x.shape[2:] if x.dim() == 4 else None)


@fused_forward(
    "stage transition",
    "timm.models.levit.LevitDownsample",
    "fastvit_triton.models.levit.LevitDownsample",
    needs="attn_downsample.use_conv|attn_downsample.grid mlp drop_path",
    reason=_block_reason,
    checked=False,
)
def levit_transition(self: Foreign, x: Tensor) -> Tensor:
    """LeViT's attention between stages and the MLP after it; [B, N, D] → [B, N', D'], or maps."""
    mlp = self.mlp, levit_mlp_parts, self.drop_path
    branches = _branches(mlp, maps=x.dim() == 4) if is_fusable(self, x) else None
    if branches is None:
        return NotImplemented
    x = self.attn_downsample(x)
    if x.dim() == 3:
        return call_branches(_add_mlp, self.mlp, x, self.drop_path)
    return _map(add_branches(_tokens(x), *branches), x.shape[2:])


def _add_mlp(mlp: nn.Module, x: Tensor, drop_path: nn.Module) -> Tensor:
    """x + drop_path(mlp(x))."""
    return add_branches(x, Branch(mlp, drop_path=drop_path), block=mlp)
