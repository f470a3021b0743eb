"""vit-pytorch's ViT and SimpleViT, whose attention and MLP hold their own norms."""

from torch import Tensor, nn

from .forwards import original, whole
from .from_torch import sequential_parts
from .fused import Branch, add, body, fuses
from .parts import DROPOUT, IDENTITY, Attention, Mlp, idle, kind, watched


@body("vit_pytorch.vit.Attention", "vit_pytorch.simple_vit.Attention")
def attention_parts(self: nn.Module) -> Attention | str:
    """Norm, packed qkv, attention, and a projection that may end in a dropout."""
    if not idle(getattr(self, "dropout", None)):
        return f"attention dropout {self.dropout.p}" if kind(self.dropout) in DROPOUT else "dropout was replaced"
    if watched(self.attend) or watched(self.to_out):
        return "attend or to_out is watched"
    proj, drop = self.to_out, None
    if isinstance(proj, nn.Sequential):
        proj, drop = proj
    return Attention(
        (self.to_qkv,),
        None if kind(proj) in IDENTITY else proj,
        self.heads,
        self.scale,
        first=self.norm,
        drops=(drop,),
    )


@body("vit_pytorch.vit.FeedForward", "vit_pytorch.simple_vit.FeedForward")
def feed_forward_parts(self: nn.Module) -> Mlp | str:
    """LayerNorm, Linear, GELU, Linear in a Sequential."""
    return "net is watched" if watched(self.net) else sequential_parts(self.net)


@whole("blocks and last norm", "vit_pytorch.vit.Transformer", "vit_pytorch.simple_vit.Transformer")
def transformer(self: nn.Module, x: Tensor) -> Tensor:
    """All blocks and the last norm; [B, N, D] → [B, N, D]."""
    if not fuses(self, x):
        return original(self, x)
    x = add(x, *(Branch(body) for pair in self.layers for body in pair))
    return self.norm(x)
