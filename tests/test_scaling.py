"""Tests of the predicted scaling table. Oracle: its formulas computed by hand."""

import math

import pytest

from benchmarks import scaling

pytestmark = pytest.mark.fast


def test_shapes():
    """Oracle: the parameters of ViT-B/16, and its flops counted by hand: 12 blocks of width 768 on 197 tokens."""
    base = scaling.shape("vit_base_patch16_224")
    assert base.parameters == 86_567_656 and (base.tokens, base.dim, base.depth, base.heads) == (197, 768, 12, 12)
    blocks = 12 * (2 * 197 * 12 * 768**2 + 4 * 197**2 * 768)
    assert base.flops == blocks + 2 * 196 * 768 * 768


def test_bytes_sent():
    """Oracle: by hand, for a model of a million parameters, 2 blocks, 10 tokens of 8 channels in 4 heads."""
    model = scaling.Shape("x", 1_000_000, 10**9, 10, 8, 2, 4)
    for gpus in (8, 64):
        ring = (gpus - 1) / gpus
        ddp, fsdp = (scaling.predict(model, 4, gpus, engine) for engine in ("DDP", "FSDP2"))
        assert math.isclose(ddp.sent, 8e6 * ring) and math.isclose(fsdp.sent, 8e6 * ring)
        assert ddp.state == 16e6 and fsdp.state == 16e6 / gpus
        rate = 0.8 * (450e9 if gpus == 8 else 400e9)
        assert math.isclose(ddp.sending, ddp.sent / rate) and math.isclose(ddp.compute, 12e9 / (0.4 * 989e12))
    tp = scaling.predict(model, 4, 8, "TP")
    activations = 4 * 4 * 10 * 8 * 2  # images of a group of 4, tokens, channels, bytes
    assert tp.width == 4 and math.isclose(tp.sent, 2 * 4 * 2 * activations * 3 / 4 + 2 * 4 * 1e6 / 4 / 2)


@pytest.mark.parametrize("engine", ["DDP", "FSDP2"])
def test_communication_is_hidden_from_a_batch_size_on(engine):
    """Oracle: just below `hidden_from`, more than the part that never overlaps is exposed; just above, no more."""
    model = scaling.shape("vit_gigantic_patch14_224")
    edge = scaling.predict(model, 32, 64, engine).hidden_from
    floor = scaling.predict(model, 1000, 64, engine).exposed
    assert scaling.predict(model, math.floor(edge) // 2, 64, engine).exposed > floor
    assert scaling.predict(model, math.ceil(edge), 64, engine).exposed == floor
    assert scaling.predict(model, 10**6, 64, engine).efficiency > scaling.predict(model, 4, 64, engine).efficiency
