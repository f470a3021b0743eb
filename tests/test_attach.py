"""Tests of how fused forwards come to modules of this package: by `create_model`, or by `optimize` in other models."""

import copy
import pickle
import pkgutil
from functools import partial

import pytest
import torch
from interpreter import interpreting
from torch import nn

from benchmarks.launch_recorder import recording
from fastvit_triton import create_model, optimize, revert
from fastvit_triton.convert.forwards import FORWARDS, METHODS
from fastvit_triton.engine.hooks import is_our_forward
from fastvit_triton.engine.source import defines
from fastvit_triton.layers import Attention, Block, Blocks, Mlp, PatchEmbed
from fastvit_triton.layers.fusable import Fusable
from fastvit_triton.measure.compare import verdict

SMALL = dict(img_size=16, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=3)


class HandWritten(nn.Module):
    """A ViT of torch.nn around layers of ours, without positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = PatchEmbed((16, 16), (8, 8), 3, 32)
        self.blocks = nn.Sequential(*(Block(32, Attention(32, 2), Mlp(32, 64)) for _ in range(2)))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 3)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embed(image))).mean(1))


def run(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output and the gradients of all parameters, by name."""
    y = model(x)
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(y.square().sum(), parameters)
    return {"output": y.detach()} | dict(zip(names, gradients, strict=True))


def bound(model: nn.Module) -> list[str]:
    """Names of the modules whose forward is fused."""
    return [name for name, module in model.named_modules() if is_our_forward(module.__dict__.get("forward"))]


@pytest.mark.parametrize("copied", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_models_and_their_copies_are_attached(copied):
    """Oracle: blocks, attention and MLPs of every block; the forward of a copy is bound to the copy."""
    model = copied(create_model("vit_tiny_patch16_224", **SMALL))
    names = bound(model)
    for i in range(2):
        assert {f"blocks.{i}", f"blocks.{i}.attn", f"blocks.{i}.mlp"} <= set(names)
    for name in names:
        module = model.get_submodule(name)
        assert module.forward.args == (module,)


@pytest.mark.parametrize(
    "copied", [copy.copy, nn.Module._replicate_for_data_parallel, Block._replicate_for_data_parallel]
)
def test_shallow_copies_run_on_themselves(copied):
    """Oracle: the forward of a copy is bound to the copy; PyTorch's own method, called by name, leaves it as it is."""
    block = create_model("vit_tiny_patch16_224", **SMALL).blocks[0]
    other = copied(block)
    assert (other.forward.args == (other,)) == (copied is not nn.Module._replicate_for_data_parallel)
    assert block.forward.args == (block,)


def test_slices_of_blocks_stay_attached():
    """Oracle: the launches of a model with as many blocks; statistics are passed on in a slice, too."""
    found = []
    for depth in (2, 3):
        model = create_model("vit_tiny_patch16_224", **SMALL | dict(depth=depth)).eval().bfloat16()
        model.blocks = model.blocks[:2] if depth == 3 else model.blocks
        with recording("sm_90") as launches, torch.no_grad():
            model(torch.randn(64, 3, 16, 16).bfloat16())
        found.append([launch.name for launch in launches])
    assert found[0] == found[1] and len(found[0]) > 4


def test_a_compiled_block_is_called(monkeypatch):
    """Oracle: the function that `block.compile()` stores, and a patched `__call__`, run once for each call."""
    model, image, seen = create_model("vit_tiny_patch16_224", **SMALL).eval(), torch.randn(2, 3, 16, 16), []
    block = model.blocks[1]
    block._compiled_call_impl = lambda x: seen.append("compiled") or block.forward(x)
    with interpreting(), torch.no_grad():
        model(image)
    assert seen == ["compiled"]
    block._compiled_call_impl = None
    call = nn.Module.__call__
    monkeypatch.setattr(nn.Module, "__call__", lambda m, *x, **n: seen.append(type(m).__name__) or call(m, *x, **n))
    with interpreting(), torch.no_grad():
        model(image)
    assert seen.count("Block") == 2


def test_a_patched_method_of_a_class_runs(monkeypatch):
    """Oracle: the patch of `Blocks.outputs` runs once, in a model that was attached and called before."""
    model, image, seen = create_model("vit_tiny_patch16_224", **SMALL).eval(), torch.randn(2, 3, 16, 16), []
    outputs = Blocks.outputs
    with interpreting(), torch.no_grad():
        want = model(image)
        monkeypatch.setattr(Blocks, "outputs", lambda *given: seen.append(1) or outputs(*given))
        got = model(image)
    assert seen == [1] and got.shape == want.shape


def test_methods_of_our_types_are_those_of_their_files():
    """Oracle: the registry; without patches every fused method stands for what its class's file defines."""
    for name, (method, _) in METHODS.items():
        assert defines(pkgutil.resolve_name(name), method), name
    assert not defines(
        type("Patched", (Blocks,), dict(outputs=lambda *given: None, __module__=Blocks.__module__)), "outputs"
    )


def test_hand_written_models_fuse_after_optimize():
    """Oracle: float64 within twice the plain model's error; a block's launches, none before `optimize`."""
    model, image = HandWritten().eval(), torch.randn(2, 3, 16, 16)
    plain = run(model, image)
    exact = run(copy.deepcopy(model).double(), image.double())
    with recording("sm_90") as before, torch.no_grad():
        model(image)
    assert bound(model) == []
    optimize(model)
    assert [name for name in bound(model) if name.startswith("blocks.0")] == [
        "blocks.0",
        "blocks.0.attn",
        "blocks.0.mlp",
    ]
    with recording("sm_90") as after, torch.no_grad():
        model(image)
    kernels = [launch.name for launch in after]
    assert "attention_qkv._fwd_kernel" not in [launch.name for launch in before]
    assert any("attention" in name for name in kernels) and len(kernels) > len(before)
    with interpreting():
        fused = run(model, image)
    assert verdict(fused, exact, plain, torch.float32, deep=True).match


def test_the_report_says_what_fuses_without_conversion():
    """Oracle: the sentences, for layers of ours alone and beside a module that is converted."""
    block = Block(32, Attention(32, 2), Mlp(32, 64))
    assert (
        optimize(nn.Sequential(block, nn.LayerNorm(32))).headline()
        == "1 module of this package fuses without conversion."
    )
    model = nn.Sequential(block, nn.TransformerEncoderLayer(32, 2, 64, 0.0, norm_first=True, batch_first=True))
    found = optimize(model).headline()
    assert found.startswith("1 of 1 block ") and found.endswith(" 1 module of this package fuses without conversion.")


def test_an_activation_may_be_replaced_by_a_module():
    """Oracle: the MLP written out, and float64 within twice its error on the fused path."""
    mlp = Mlp(8, 16)
    mlp.act = nn.Softsign()
    x = torch.randn(2, 3, 8)
    assert torch.equal(mlp(x), mlp.fc2(nn.functional.softsign(mlp.fc1(x))))
    plain = run(mlp, x)
    exact = run(copy.deepcopy(mlp).double(), x.double())
    optimize(mlp)
    with interpreting():
        assert verdict(run(mlp, x), exact, plain, torch.float32, deep=True).match


def test_revert_leaves_models_of_ours_attached():
    """Oracle: the names before; modules of other packages are reverted."""
    model = create_model("vit_tiny_patch16_224", **SMALL)
    before = bound(model)
    optimize(model)
    revert(model)
    assert bound(model) == before


def test_a_forward_of_the_user_stays():
    """Oracle: the forward that was set before `optimize` is the one that runs."""
    model = HandWritten()
    calls = []

    def counted(mlp: Mlp, x: torch.Tensor) -> torch.Tensor:
        calls.append(x.shape)
        return Mlp.forward(mlp, x)

    mlp = model.blocks[0].mlp
    mlp.forward = partial(counted, mlp)
    optimize(model)
    with interpreting(), torch.no_grad():
        model(torch.randn(2, 3, 16, 16))
    assert calls == [torch.Size([2, 4, 32])]


def test_every_type_with_a_fused_forward_binds_its_copies():
    """Oracle: the registry; each type of this package in it is a `Fusable`, whose copies run on themselves."""
    names = [name for name in {*FORWARDS, *METHODS} if name.startswith("fastvit_triton.")]
    types = [pkgutil.resolve_name(name) for name in names]
    assert len(types) > 30 and [cls.__name__ for cls in types if not issubclass(cls, Fusable)] == []
