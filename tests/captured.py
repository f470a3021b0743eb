"""Small graphs, one for each pattern that the compile backend rewrites, with example values as Dynamo gives them."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

from fastvit_triton.convert import backend, region
from fastvit_triton.convert.graph import rewrite

D = 8


def linear_norm(x, g, b, w, c):
    """LayerNorm and linear layer."""
    return F.linear(F.layer_norm(x, (D,), g, b), w, c)


def linear_ends(x, w, c, layer, sample, residual):
    """Linear layer with LayerScale, drop-path factor and residual."""
    return residual + F.linear(x, w, c) * layer * sample


def mlp(x, g, b, w1, c1, w2, c2, layer):
    """MLP with LayerNorm, LayerScale and residual."""
    h = F.gelu(F.linear(F.layer_norm(x, (D,), g, b), w1, c1))
    return torch.add(x, F.dropout(F.linear(h, w2, c2), 0.5, False) * layer)


def gated(x, w1, w2):
    """SwiGLU of the halves of one projection."""
    gate, up = F.linear(x, w1).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, w2)


def quick(x, g, w, c):
    """Linear layer and x · sigmoid(1.702 x)."""
    h = F.linear(F.layer_norm(x, (D,), g), w, c)
    return h * torch.sigmoid(1.702 * h)


def three_layers(x, g, w1, w2, w3, c):
    """Three linear layers that read one LayerNorm."""
    h = F.layer_norm(x, (D,), g)
    return F.linear(h, w1) + F.linear(h, w2, c), F.linear(h, w3, c)


def sdpa(q, k, v, mask):
    """Fused attention with a mask."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.5)


def written_out(q, k, v, mask):
    """Attention as two products and a softmax."""
    weights = torch.softmax(torch.matmul(q, torch.transpose(k, dim0=2, dim1=3)) * 0.5 + mask, dim=-1)
    return torch.matmul(weights, v)


def windowed(q, k, v, bias, mask):
    """Attention in windows with a bias and a mask of each window, two images of two windows."""
    scores = q @ k.transpose(2, 3) + bias
    return (scores.view(2, 2, 2, 3, 3) + mask).view(4, 2, 3, 3).softmax(-1) @ v


def windowed_only(q, k, v, mask):
    """The same without the bias."""
    return ((q @ k.transpose(2, 3)).view(2, 2, 2, 3, 3) + mask).view(4, 2, 3, 3).softmax(-1) @ v


def packed(x, w, c, bias):
    """Projection to queries, keys and values, attention, and merged heads."""
    q, k, v = torch.permute(F.linear(x, w, c).reshape(2, 3, 3, 2, 4), dims=(2, 0, 3, 1, 4)).unbind(0)
    o = F.scaled_dot_product_attention(q, k, v, bias)
    return torch.reshape(torch.transpose(o, dim0=1, dim1=2), shape=(2, 3, D))


def patches(x, w, c, prefix, positions):
    """Patch convolution, class token and positions."""
    tokens = torch.transpose(torch.flatten(F.conv2d(x, w, c, stride=2), start_dim=2), dim0=1, dim1=2)
    return torch.cat((prefix.expand(2, -1, -1), tokens), dim=1) + positions


def multihead(x, w1, c1, w2, c2):
    """`nn.MultiheadAttention` on queries that are also keys and values."""
    x = x.transpose(0, 1)
    options = dict(bias_k=None, bias_v=None, add_zero_attn=False, dropout_p=0.0, out_proj_weight=w2, out_proj_bias=c2)
    y = F.multi_head_attention_forward(x, x, x, D, 2, w1, c1, training=False, need_weights=False, **options)
    return y[0].transpose(0, 1)


def encoder_layer(x, w1, c1, w2, c2, g, b, w3, c3, w4, c4):
    """`nn.TransformerEncoderLayer` in inference."""
    return torch._transformer_encoder_layer_fwd(
        x, D, 2, w1, c1, w2, c2, True, True, 1e-5, g, b, b, g, w3, c3, w4, c4, None, None
    )


# pattern → shapes of its tensors, and the functions that it is rewritten to
PATTERNS: dict[Callable, tuple[tuple[tuple[int, ...], ...], set[str]]] = {
    linear_norm: (((2, 3, D), (D,), (D,), (6, D), (6,)), {"linear"}),
    linear_ends: (((2, 3, D), (D, D), (D,), (D,), (2, 1, 1), (2, 3, D)), {"linear"}),
    mlp: (((2, 3, D), (D,), (D,), (6, D), (6,), (D, 6), (D,), (D,)), {"mlp"}),
    gated: (((2, 3, D), (12, D), (D, 6)), {"mlp"}),
    quick: (((2, 3, D), (D,), (6, D), (6,)), {"linear"}),
    three_layers: (((2, 3, D), (D,), (6, D), (6, D), (6, D), (6,)), {"linear"}),
    sdpa: (((2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 4), (2, 1, 3, 5)), {"attention"}),
    written_out: (((2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 4), (3, 5)), {"attention"}),
    windowed_only: (((4, 2, 3, 4), (4, 2, 3, 4), (4, 2, 3, 4), (1, 2, 1, 3, 3)), {"attention"}),
    windowed: (((4, 2, 3, 4), (4, 2, 3, 4), (4, 2, 3, 4), (2, 3, 3), (1, 2, 1, 3, 3)), {"attention"}),
    packed: (((2, 3, D), (3 * D, D), (3 * D,), (1, 2, 3, 3)), {"attention_qkv"}),
    patches: (((2, 3, 4, 4), (6, 3, 2, 2), (6,), (1, 1, 6), (1, 5, 6)), {"patch_embed"}),
    multihead: (((2, 3, D), (3 * D, D), (3 * D,), (D, D), (D,)), {"attention_qkv"}),
    encoder_layer: (
        ((2, 3, D), (3 * D, D), (3 * D,), (D, D), (D,), (D,), (D,), (6, D), (6,), (D, 6), (D,)),
        {"attention_qkv", "mlp"},
    ),
}


def make(shapes: tuple[tuple[int, ...], ...], seed: int = 0) -> list[torch.Tensor]:
    """Normally distributed tensors of these shapes."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


class _Examples(fx.Interpreter):
    """Stores the value of every node as its example value."""

    def run_node(self, node):
        node.meta["example_value"] = found = super().run_node(node)
        return found


def annotate(graph: fx.GraphModule, tensors: list[torch.Tensor]) -> None:
    """Gives each node of a graph its example value, a fake tensor, for these inputs."""
    with FakeTensorMode() as mode:
        _Examples(graph).run(*(mode.from_tensor(t) for t in tensors))


def captured(function: Callable, tensors: list[torch.Tensor]) -> fx.GraphModule:
    """The graph of a pattern, with example values; raises what the function raises."""
    graph = fx.symbolic_trace(function)
    annotate(graph, tensors)
    return graph


def as_on_gpu(patch: pytest.MonkeyPatch) -> None:
    """Makes the CPU count as a GPU while graphs are rewritten; the rewritten calls run the references."""

    def why_not(device, dtype, head_dim=0):
        return "float64 runs on PyTorch" if dtype == torch.float64 else None

    for module in (backend, rewrite):
        patch.setattr(module, "why_not", why_not)


def rewritten(graph: fx.GraphModule) -> tuple[fx.GraphModule, set[str]]:
    """A rewritten copy of a graph with example values, and the functions in it that replaced something."""
    twin = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    return twin, {row.became for row in backend.rewrite(twin).rows if row.became is not None}


def outputs(run: Callable, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Outputs of a function on copies of its inputs, and those copies as it leaves them."""
    given = [t.clone() for t in tensors]
    found = run(*given)
    return [*(found if isinstance(found, tuple) else (found,)), *given]


def same(got: list[torch.Tensor], want: list[torch.Tensor], dtype: torch.dtype) -> bool:
    """True if all tensors agree in dtype, and in values up to sums of a few dozen terms in another order."""
    return all(
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.isnan(), b.isnan())
        and (a.nan_to_num() - b.nan_to_num()).norm() <= 64 * torch.finfo(dtype).eps * b.nan_to_num().norm()
        if a.is_floating_point() or a.is_complex()
        else torch.equal(a, b)
        for a, b in zip(got, want, strict=True)
    )


def calls(graph: fx.GraphModule) -> Iterator[fx.Node]:
    """The calls of a graph."""
    return (node for node in graph.graph.nodes if node.op in ("call_function", "call_method"))


def without_inductor(patch: pytest.MonkeyPatch) -> dict[str, int]:
    """Makes regions run AOTAutograd's graphs operator by operator; counts what is compiled, and the calls of it."""
    seen = {"compiled": 0, "called": 0}

    def compiled(graph: fx.GraphModule, inputs: list, *_: object) -> Callable:
        seen["compiled"] += 1
        with backend.compiling():
            function = aot_autograd(fw_compiler=lambda part, _: make_boxed_func(part.forward))(graph, inputs)

        def call(*inputs: object) -> object:
            seen["called"] += 1
            return function(*inputs)

        return call

    patch.setattr(region, "compiled", compiled)
    return seen
