"""Tests of CUDA graphs of models, with a stand-in for the graph. Oracle: the model itself."""

import pytest
import torch
from patience import run_in_threads
from torch import nn
from torch.utils._pytree import tree_leaves

from fastvit_triton import create_model, cuda_graph, cuda_graph_packed, freeze, varlen_attention
from fastvit_triton.deploy import cuda_graph as graphs

pytestmark = pytest.mark.fast

SMALL = dict(img_size=8, patch_size=4, embed_dim=16, depth=1, num_heads=2, num_classes=3)


class Counted(nn.Module):
    """A linear layer that records the number of rows of each call."""

    def __init__(self):
        super().__init__()
        self.layer, self.rows = nn.Linear(4, 3), []

    def forward(self, x):
        self.rows.append(len(x))
        return {"y": self.layer(x), "rows": torch.tensor(len(x))}


@pytest.fixture
def captures(monkeypatch):
    """Replaces CUDA graphs: a replay repeats the call and writes to the same tensors. Yields the captured sizes."""
    made = []

    def capture(run, pool):
        outputs = run()
        made.append(len(tree_leaves(outputs)[0]))

        def replay():
            for static, t in zip(tree_leaves(outputs), tree_leaves(run()), strict=True):
                static.copy_(t)

        return outputs, replay

    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(graphs, "can_capture", lambda x: True)
    return made


def test_sizes_padding_and_eviction(captures):
    """Oracle: the model itself; by hand, the captured sizes and the number of rows of each call."""
    model = Counted().eval()
    graphed = cuda_graph(model, torch.randn(2, 4), batch_sizes=(8, 2), max_graphs=3)
    assert captures == [2, 8]
    for rows, run in ((8, 8), (7, 8), (2, 2), (1, 1), (1, 1), (5, 5), (5, 5), (6, 6), (8, 8)):
        x = torch.randn(rows, 4)
        model.rows.clear()
        found = graphed(x)
        assert model.rows[-1] == run and torch.equal(found["y"], model.layer(x)) and found["rows"] == run
    assert captures == [2, 8, 1, 5, 8]  # 6 was called once only; 5 and the second 8 each evicted a graph
    other = torch.randn(8, 4, dtype=torch.float64)
    assert torch.equal(cuda_graph(model.double(), other, (8,))(other)["y"], model.layer(other))


def test_copies_and_static_outputs(captures):
    """Oracle: a copied output keeps its values; without copies the next call writes to the same tensor."""
    model, x = Counted().eval(), torch.randn(4, 4)
    for copy in (True, False):
        graphed = cuda_graph(model, x, (4,), copy=copy)
        first = graphed(x)["y"]
        kept = first.clone()
        second = graphed(2 * x)["y"]
        assert torch.equal(first, kept) == copy and (first.data_ptr() == second.data_ptr()) != copy


def test_weights_that_change(captures):
    """Oracle: the model. In-place writes need no new graph; a parameter in other memory does; `reset` drops all."""
    model, x = create_model("vit_tiny_patch16_224", **SMALL).eval(), torch.randn(2, 3, 8, 8)
    graphed = cuda_graph(model, x, (2,))

    def agrees():
        with torch.no_grad():
            return torch.equal(graphed(x), model(x))

    assert agrees() and len(captures) == 1
    with torch.no_grad():
        model.head.weight.mul_(2)
    assert agrees() and len(captures) == 1
    model.head.weight.data = model.head.weight.data * 2
    assert agrees() and len(captures) == 2
    model.head.register_forward_hook(lambda *given: given[-1] + 1)
    graphed.reset()
    assert agrees() and len(captures) == 3


def test_frozen_models_fold_before_a_replay(captures):
    """Oracle: the number of calls; after each write, one call outside the graph folds a frozen model in place."""
    for frozen in (True, False):
        model, x = Counted().eval(), torch.randn(2, 4)
        if frozen:
            freeze(model)
        graphed = cuda_graph(model, x, (2,))
        for write in (False, True, False):
            if write:
                with torch.no_grad():
                    model.layer.weight.add_(1)
            model.rows.clear()
            graphed(x)
            assert len(model.rows) == 1 + (write and frozen)


def test_each_graph_of_a_frozen_model_folds_for_itself(captures):
    """Oracle: the number of calls of the model; a call of another size may have refreshed only its own folds."""
    model = Counted().eval()
    freeze(model)
    graphed = cuda_graph(model, torch.randn(2, 4), (2, 4))
    with torch.no_grad():
        model.layer.weight.add_(1)
    for rows, calls in ((2, 2), (4, 2), (2, 1), (4, 1), (3, 1)):
        model.rows.clear()
        graphed(torch.randn(rows, 4))
        assert len(model.rows) == calls, rows


def test_threads_share_a_runner(captures):
    """Oracle: the model, for eight threads that call it concurrently."""
    model, wrong = Counted().eval(), []
    graphed = cuda_graph(model, torch.randn(4, 4), (4,))

    def work():
        for _ in range(50):
            x = torch.randn(4, 4)
            if not torch.equal(graphed(x)["y"], nn.functional.linear(x, model.layer.weight, model.layer.bias)):
                wrong.append(x)

    run_in_threads(*[work] * 8)
    assert wrong == []


def test_invalid_calls(captures, monkeypatch):
    """Oracle: each error names the argument and suggests a remedy."""
    model, x = Counted(), torch.randn(2, 4)
    with pytest.raises(RuntimeError, match=r"call model\.eval\(\) first"):
        cuda_graph(model, x)
    graphed = cuda_graph(model.eval(), x, (2,))
    with pytest.raises(ValueError, match="same number of rows"):
        graphed(x, torch.randn(3, 4))
    model.train()
    with pytest.raises(RuntimeError, match="training mode"):
        graphed(x)
    model.eval()
    for options, message in (
        (dict(batch_sizes=(0, 2)), "batch_sizes must be positive"),
        (dict(batch_sizes=()), "batch_sizes must be positive"),
        (dict(max_graphs=0), "max_graphs must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            cuda_graph(model, x, **options)
    with pytest.raises(TypeError, match="example must be a tensor"):
        cuda_graph(model, [x])
    monkeypatch.undo()
    with pytest.raises(ValueError, match="example is on cpu"):
        cuda_graph(model, x)


class Packed(nn.Module):
    """Attention within each image of a packed batch; returns all tokens, and the first of each image."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(8, 24), []

    def forward(self, x, cu_seqlens, max_seqlen):
        self.calls.append((len(x), len(cu_seqlens) - 1, max_seqlen))
        q, k, v = self.layer(x).view(-1, 3, 2, 4).unbind(1)
        tokens = varlen_attention(q, k, v, cu_seqlens, max_seqlen).flatten(1)
        return dict(tokens=tokens, first=tokens[cu_seqlens[:-1].clamp(max=len(x) - 1)], all=tokens.new_tensor(0.0))


def packed(*sizes):
    cu_seqlens = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return torch.randn(sum(sizes), 8), cu_seqlens, max(sizes)


def test_packed_images_by_token_budgets(captures):
    """Oracle: the model without a graph; by hand, the budget, images and longest image of each call."""
    model = Packed().eval()
    graphed = cuda_graph_packed(model, packed(3, 5), token_budgets=(32, 12), max_images=4, max_graphs=3)
    assert [call[0] for call in model.calls] == [12, 32]
    cases = (
        ((3, 5), (12, 4, 8)), ((1,), (12, 4, 1)), ((12,), (12, 4, 12)), ((7, 7, 6), (32, 4, 8)),
        ((2, 2, 2, 3), (12, 4, 4)), ((2,) * 5, (10, 5, 2)), ((20, 20), (40, 2, 20)),
    )  # fmt: skip
    for sizes, call in cases:
        inputs = packed(*sizes)
        with torch.no_grad():
            want = model(*inputs)
        model.calls.clear()
        found = graphed(*inputs)
        assert model.calls[-1] == call, sizes
        for name in want:
            torch.testing.assert_close(found[name], want[name], rtol=1e-5, atol=1e-6)
            assert found[name].shape == want[name].shape


def test_values_of_another_call_do_not_leak(captures):
    """Oracle: no NaN, although the reference multiplies masked values by 0."""
    graphed = cuda_graph_packed(Packed().eval(), packed(3, 5), token_budgets=(32,), max_images=4)
    x, *rest = packed(8, 4)
    x[8:] = torch.nan
    assert graphed(x, *rest)["tokens"].isnan().any()
    assert not graphed(*packed(3, 5))["tokens"].isnan().any()


def test_invalid_packed_calls(captures, monkeypatch):
    """Oracle: each error names the argument and suggests a remedy."""
    model, inputs = Packed().eval(), packed(3, 5)
    for options, message in (
        (dict(token_budgets=()), "token_budgets must be positive"),
        (dict(token_budgets=(0, 4)), "token_budgets must be positive"),
        (dict(max_images=0), "max_images must be positive, got 0"),
        (dict(max_graphs=0), "max_graphs must be positive, got 0"),
        (dict(token_budgets=(65, 128)), "max_images is 64"),
    ):
        with pytest.raises(ValueError, match=message):
            cuda_graph_packed(model, inputs, **options)
    empty = inputs[1][:0]
    for wrong in (inputs[:2], (*inputs[:2], torch.tensor(5)), list(inputs), (inputs[0], empty, 5)):
        with pytest.raises(TypeError, match="cu_seqlens"):
            cuda_graph_packed(model, wrong)
    graphed = cuda_graph_packed(model, inputs, (32,))
    with pytest.raises(ValueError, match="same number of rows"):
        graphed(inputs[0], inputs[0][:2], *inputs[1:])
    monkeypatch.undo()
    with pytest.raises(ValueError, match="example is on cpu"):
        cuda_graph_packed(model, inputs)
