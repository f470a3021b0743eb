"""Fused forwards of CaiT, DeepViT and Refiner of this package: mixed maps, and attention of the class token."""

from functools import partial

import torch
from torch import Tensor

from ...engine.attention import attend
from ...engine.body import Body, normalize, project
from ...engine.branch import Branch, add_branches, runs_plain
from ...engine.hooks import PACKAGE, has_hooks
from ...engine.leaves import Foreign
from ...engine.ways import plainly
from ..forwards import fused_body, fused_forward, original
from ..third_party import is_fusable

MODELS = f"{PACKAGE}.models"


@fused_body(
    f"{MODELS}.cait.TalkingHeads",
    f"{MODELS}.deepvit.ReAttention",
    needs="qkv num_heads proj proj_drop",
    takes="",
)
def mixed_parts(self: Foreign) -> Body:
    """Parts of an attention whose maps [B, H, N, N] are formed and mixed by PyTorch."""
    return Body("attention", (self.qkv,), self.attend, self.proj, self.num_heads, drops=(self.proj_drop,))


@fused_forward(
    "class attention",
    f"{MODELS}.cait.ClassAttention",
    needs="q k v num_heads scale attn_drop proj proj_drop",
    takes="",
)
def class_attention(self: Foreign, x: Tensor) -> Tensor:
    """The class token attends to all tokens; [B, N, D] → [B, 1, D]."""
    if not is_fusable(self, x):
        return original(self, x)
    tokens = project(x[:, :1], (self.q,)), *project(x, (self.k, self.v)).chunk(2, -1)
    q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in tokens)
    return self.proj_drop(self.proj(attend(q, k, v, self.scale, self.attn_drop, True)))


@fused_forward(
    "class-token block",
    f"{MODELS}.cait.ClassBlock",
    needs="norm1 attn gamma_1 norm2 mlp gamma_2",
    takes="token",
    folds=lambda self: [(self.norm2, self.mlp)],
)
def class_block(self: Foreign, x: Tensor, token: Tensor) -> Tensor:
    """Patches [B, N, D], class token [B, 1, D] → class token [B, 1, D]."""
    if not is_fusable(self, x):
        return original(self, x, token)
    y = self.attn(normalize(torch.cat((token, x), 1), self.norm1))
    token = token + (y if self.gamma_1 is None else self.gamma_1 * y)
    return add_branches(token, Branch(self.mlp, self.norm2, layer_scale=self.gamma_2))


@fused_forward(
    "pre-norm block",
    f"{MODELS}.refiner.RefinedBlock",
    needs="norm1 attn drop_path1 norm2 mlp drop_path2 factor",
    takes="previous",
    folds=lambda self: [(self.norm1, self.attn), (self.norm2, self.mlp)],
)
def refined_block(self: Foreign, x: Tensor, previous: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """[B, N, D] and the map [B, H, N, N] of the block before, or None → [B, N, D], map."""
    if not is_fusable(self, x):
        return original(self, x, previous)
    attn = self.attn
    passed: list[Tensor] = []
    between = partial(attn.attend_with, previous, passed)
    body = Body("attention", (attn.qkv,), between, attn.proj, attn.num_heads, drops=(attn.proj_drop,))
    call = dict(previous=previous, passed=passed) if has_hooks(attn) else None
    branches = (
        Branch(body if call is None else attn, self.norm1, None, self.drop_path1, self.scale(x, None), call=call),
        Branch(self.mlp, self.norm2, None, self.drop_path2, self.scale(x, self.mlp.scale_channel)),
    )
    if runs_plain(x, *branches, block=self):
        return plainly(original, self, x, previous)
    return add_branches(x, *branches, block=self), passed[-1]
