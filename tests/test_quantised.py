"""Tests of models that torchao quantises before or after `optimize`. Oracle: the quantised model alone, bit for bit."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

JOB = """
import copy, benchmarks, timm, torch
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_
from fastvit_triton import optimize, revert

torch.manual_seed(0)
sizes = dict(img_size=32, patch_size=16, embed_dim=64, depth=2, num_heads=2, num_classes=3)
plain, images = timm.models.VisionTransformer(**sizes).eval(), torch.randn(2, 3, 32, 32)
with torch.no_grad():
    for config in (Int8WeightOnlyConfig(), Int8DynamicActivationInt8WeightConfig()):
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
            assert "Linear is called: replaced, quantised or hooked" in notes, notes
            revert(model)
            assert torch.equal(model(images), want)
print("same")
"""


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_quantised_layers_are_called_and_not_fused():
    """In a process of its own, as importing torchao changes what transformers and peft import."""
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", JOB], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0 and done.stdout.endswith("same\n"), done.stderr[-2000:]
