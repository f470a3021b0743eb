"""Fused forwards for vit-pytorch's ViT and SimpleViT, whose attention and MLP contain their norms."""

from torch import Tensor, nn

from ..layers.body import AttentionParts, MlpParts
from ..layers.branch import Branch, add_branches
from ..layers.hooks import has_hooks, type_name
from ..layers.module_parts import DROPOUTS, IDENTITIES, Foreign, is_inactive
from .forwards import fused_body, fused_forward, original
from .from_torch import sequential_parts
from .third_party import is_fusable


@fused_body("vit_pytorch.vit.Attention", "vit_pytorch.simple_vit.Attention")
def attention_parts(self: Foreign) -> AttentionParts | str:
    """Parts of an attention: norm, packed qkv, and a projection with optional dropout."""
    if not is_inactive(getattr(self, "dropout", None)):
        return f"attention dropout {self.dropout.p}" if type_name(self.dropout) in DROPOUTS else "dropout was replaced"
    if has_hooks(self.attend) or has_hooks(self.to_out):
        return "attend or to_out has a hook"
    proj, drop = self.to_out, None
    if isinstance(proj, nn.Sequential):
        proj, drop = proj
    return AttentionParts(
        (self.to_qkv,),
        None if type_name(proj) in IDENTITIES else proj,
        self.heads,
        self.scale,
        first=self.norm,
        drops=(drop,),
    )


@fused_body("vit_pytorch.vit.FeedForward", "vit_pytorch.simple_vit.FeedForward")
def feed_forward_parts(self: Foreign) -> MlpParts | str:
    """Parts of an MLP: LayerNorm, Linear, GELU, Linear in a Sequential."""
    return "net has a hook" if has_hooks(self.net) else sequential_parts(self.net)


@fused_forward("blocks and last norm", "vit_pytorch.vit.Transformer", "vit_pytorch.simple_vit.Transformer")
def transformer(self: Foreign, x: Tensor) -> Tensor:
    """Runs all blocks and the final norm; [B, N, D] → [B, N, D]."""
    if not is_fusable(self, x):
        return original(self, x)
    x = add_branches(x, *(Branch(body) for pair in self.layers for body in pair))
    return self.norm(x)
