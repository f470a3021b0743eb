"""Tests of models that torchao quantises before or after `optimize`. Oracle: the quantised model alone, bit for bit."""

import importlib.util
from pathlib import Path

import pytest
import timm
import torch
from commands import run_python
from torch import nn

from fastvit_triton import optimize

JOB = """
import copy, benchmarks, timm, torch
from torchao.quantization import Float8WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig
from torchao.quantization import quantize_
from fastvit_triton import optimize, revert

torch.manual_seed(0)
sizes = dict(img_size=32, patch_size=16, embed_dim=64, depth=2, num_heads=2, num_classes=3)
plain, images = timm.models.VisionTransformer(**sizes).eval(), torch.randn(2, 3, 32, 32)
with torch.no_grad():
    for config in (Int8WeightOnlyConfig(), Int8DynamicActivationInt8WeightConfig(), Float8WeightOnlyConfig()):
        alone = copy.deepcopy(plain)
        quantize_(alone, config)
        want = alone(images)
        assert not torch.equal(want, plain(images))
        for first in ("quantize", "optimize"):
            model = copy.deepcopy(plain)
            if first == "optimize":
                optimize(model)
                model(images)
            quantize_(model, config)
            report = optimize(model)
            for _ in range(3):  # the second call may replay the first
                assert torch.equal(model(images), want), (config, first)
            notes = [row.why for row in report.rows if row.why]
            kind = type(alone.blocks[0].mlp.fc1.weight).__name__
            assert any(f"Linear is called: its weight is of {kind}" in note for note in notes), notes
            revert(model)
            assert torch.equal(model(images), want)
print("same")
"""


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_quantised_layers_are_called_and_not_fused():
    """In a process of its own, as importing torchao changes what transformers and peft import."""
    assert run_python("-c", JOB, cwd=Path(__file__).parents[1]).endswith("same\n")


def test_the_report_names_weights_of_other_types():
    """Oracle: the sentence, for a tensor subclass as quantisation libraries have."""

    class Int3Tensor(torch.Tensor):
        """A weight of another type."""

    model = timm.models.VisionTransformer(img_size=32, patch_size=16, embed_dim=16, depth=2, num_heads=2)
    weight = model.blocks[0].attn.qkv.weight.detach()
    model.blocks[0].attn.qkv.weight = nn.Parameter(weight.as_subclass(Int3Tensor), requires_grad=False)
    assert isinstance(model.blocks[0].attn.qkv.weight, Int3Tensor)
    rows = {row.path: row.why for row in optimize(model).rows}
    assert rows["blocks.0.attn"] == (
        "Linear is called: its weight is of Int3Tensor, so that what would be fused with it runs in launches of its own"
    )
    assert rows["blocks.1.attn"] is None
