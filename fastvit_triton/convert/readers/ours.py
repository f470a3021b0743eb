"""Fused forwards for this package's layers that no other library has, which register on import.

Blocks, attention and MLPs with timm's attributes share timm's readers. `attach` binds them to a model of ours.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from ...engine import replay
from ...engine.attention import attend, attention_body
from ...engine.body import Body, Given, Output, normalize, project
from ...engine.branch import Branch, add_branches, add_branches_with_stats, completed
from ...engine.hooks import can_fuse, has_hooks
from ...engine.leaves import Foreign
from ...engine.ways import known_way, plainly
from ...kernels.attention import attention
from ...layers.attention import Attention
from ...layers.block import Block
from ...layers.scaled_block import ScaledBlock
from ..forwards import fused_body, fused_forward, fused_method
from ..third_party import head_norms, is_fusable
from .timm.blocks import block_branches, scaled_branches

CALL = nn.Module.__call__  # as PyTorch defines it; tracers and profilers patch it
BRANCHES: dict[type[nn.Module], Callable[[Any, Tensor], tuple[Branch, Branch]]] = {  # of blocks in a sequence
    Block: lambda block, x: block_branches(block),
    ScaledBlock: scaled_branches,
}


@fused_forward(
    "post-norm block",
    "fastvit_triton.layers.block.PostNormBlock",
    needs="norm1 attn ls1 drop_path1 norm2 mlp ls2 drop_path2",
)
def post_norm_block(self: Foreign, x: Tensor) -> Tensor:
    """Post-norm block; [B, N, D] → [B, N, D]."""
    x = normalize(add_branches(x, Branch(self.attn, None, self.ls1, self.drop_path1)), self.norm1)
    return normalize(add_branches(x, Branch(self.mlp, None, self.ls2, self.drop_path2)), self.norm2)


@fused_method("outputs", "fastvit_triton.layers.block.Blocks")
def outputs(
    self: Foreign,
    x: Tensor,
    after: Sequence[Callable[[Tensor], Tensor]] = (),
    recompute: bool = False,
    only_last: bool = False,
) -> Iterator[Tensor]:
    """Yields the output of each block; each passes the row statistics of its output to the next block's norm.

    If `only_last` is read, no other is yielded, and blocks may overwrite those before it.
    """
    if recompute or not can_fuse(x) or nn.Module.__call__ is not CALL:
        yield from type(self).outputs(self, x, after, recompute)
        return
    stats: Given | None = None
    blocks = list(self)
    changed = len(after)
    chained = [_is_chained(block) for block in blocks]
    chained.append(False)  # after the last block
    for i, block in enumerate(blocks):
        if chained[i]:
            next_norm = blocks[i + 1].norm1 if chained[i + 1] and i >= changed else None
            x, stats = run_chained(block, x, stats, next_norm, only_last and next_norm is not None)
        else:
            x = block(x)
            stats = None
        x = after[i](x) if i < changed else x
        if not only_last:
            yield x
    if only_last:
        yield x


def _is_chained(block: nn.Module) -> bool:
    """True if the block takes row statistics of x and returns those of its output.

    A hook expects one tensor, and a block that was compiled by itself, `block.compile()`, is called.
    """
    attached = "forward" in block.__dict__ and block._compiled_call_impl is None
    return type(block) in BRANCHES and attached and not has_hooks(block)


def run_chained(
    block: nn.Module, x: Tensor, stats: Given | None, next_norm: nn.Module | None, lends: bool = False
) -> tuple[Tensor, Given | None]:
    """(block(x), the statistics of its output for the next block's norm, or None); see `add_branches_with_stats`."""
    way, settings = known_way(block, x)
    if way == "plain":
        return plainly(type(block).forward, block, x if stats is None else completed(x, stats)), None
    if way is None:
        return _run(block, x, stats, next_norm, lends)
    return replay.call(settings, _run, block, x, stats, next_norm, lends)


def _run(block: nn.Module, x: Tensor, stats: Given | None, next_norm: nn.Module | None, lends: bool) -> Output:
    if not is_fusable(block, x):
        return plainly(type(block).forward, block, completed(x, stats)), None
    branches = BRANCHES[type(block)](block, x)
    return add_branches_with_stats(x, *branches, block=block, stats=stats, next_norm=next_norm, lends=lends)


@fused_body(
    "fastvit_triton.layers.attention.Attention",
    needs="qkv num_heads scale q_norm k_norm attn_drop proj proj_drop position",
)
def attention_parts(self: Foreign) -> Body:
    """The body of our attention; what no kernel computes runs between fused linear layers."""
    drops = (self.proj_drop,)
    overridden = type(self).attend is not Attention.attend
    dropped = self.attn_drop.training and self.attn_drop.p > 0
    if overridden or dropped or self.position is not None:

        def positioned(qkv: Tensor) -> Tensor:
            """`Attention.attend` with our kernel, unless probabilities are dropped."""
            q, k, v = self.heads(qkv)
            bias = None if self.position is None else self.scale * self.position(q)
            return attend(q, k, v, self.scale, self.attn_drop, True, bias)

        between = self.attend if overridden else positioned
        return Body("attention", (self.qkv,), between, self.proj, self.num_heads, drops=drops)
    norms = head_norms(self)
    return attention_body((self.qkv,), self.proj, self.num_heads, self.scale, norms=norms, drops=drops)


@fused_forward(
    "attention pooling",
    "fastvit_triton.layers.attention.AttentionPool",
    needs="latent q kv num_heads proj norm mlp",
    folds=lambda self: [(self.norm, self.mlp)],
)
def attention_pool(self: Foreign, x: Tensor) -> Tensor:
    """A learned query attends to all tokens, then an MLP; [B, N, D] → [B, D]."""
    q = self.q(self.latent).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # [1, H, 1, d]
    k, v = self.kv(x).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)  # [B, H, N, d]
    o = attention(q.expand(x.shape[0], -1, -1, -1), k, v).transpose(1, 2).flatten(2)
    return add_branches(project(o, (self.proj,)), Branch(self.mlp, self.norm))[:, 0]  # of [B, 1, D]
