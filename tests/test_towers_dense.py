"""Tests of the conversion of transformers' towers whose images are not packed. Oracle: the original, in float64."""

import copy
import pickle

import pytest
import torch

pytest.importorskip("transformers")
from interpreter import interpreting
from test_towers import EXACT, FEW, SINGLE, distance, joined, run
from towers import build, outputs

from fastvit_triton import optimize, revert
from fastvit_triton.kernels.backend import using_backend

AXES = dict(image_size=80, window_size=4, global_attn_indexes=[1], mlp_dim=32, output_channels=8, num_pos_feats=4)
SEGGPT = dict(image_size=[64, 32], pretrain_image_size=32, mlp_dim=32, intermediate_hidden_state_indices=[0, 1])
SEGGPT |= dict(merge_index=0, decoder_hidden_size=8)
VITDET = dict(image_size=64, pretrain_image_size=64, window_size=3, window_block_indices=[0], mlp_ratio=2)
VITDET |= dict(use_relative_position_embeddings=True)
IMAGE, PAIR = dict(pixel_values=(2, 3, 80, 80)), dict.fromkeys(("pixel_values", "prompt_pixel_values"), (2, 3, 32, 32))
TOWERS = {  # class: options besides those of towers.py, and the shapes of the inputs
    "sam.SamVisionEncoder": (AXES, IMAGE),
    "got_ocr2.GotOcr2VisionEncoder": (AXES, IMAGE),
    "SegGptModel": (SEGGPT, PAIR | dict(prompt_masks=(2, 3, 32, 32))),
    "VitDetModel": (VITDET, dict(pixel_values=(2, 3, 64, 80))),
}
ROUNDED = ("got_ocr2.GotOcr2VisionEncoder", "SegGptModel")  # to float32, in the original
FULL = ()  # run in the full test only
NAMES = [pytest.param(n, marks=pytest.mark.full if n in FULL else ()) for n in TOWERS]


def made(name, dtype=torch.float64):
    """The model and its inputs."""
    torch.manual_seed(1)
    options, shapes = TOWERS[name]
    given = {key: torch.randn(shape, dtype=dtype) for key, shape in shapes.items()}
    return build(name, dtype, options), given


@pytest.mark.parametrize("name", NAMES)
def test_tower(name):
    """Outputs and gradients equal the original's up to rounding, to float32 where the original rounds to it."""
    model, given = made(name)
    original, tolerance = copy.deepcopy(model.train()), FEW if name in ROUNDED else EXACT
    report = optimize(model)
    assert report.fused and all("LayerNorm" in row.type for row in report.left)
    want = run(original, given)
    with using_backend("torch"):
        got = run(model, given)
    assert [g is None for g in got[1]] == [g is None for g in want[1]]
    assert distance(got[0], want[0]) <= tolerance and distance(joined(got[1]), joined(want[1])) <= tolerance
    with using_backend("torch"):
        again = run(pickle.loads(pickle.dumps(model)), given)
    assert torch.equal(again[0], got[0])
    revert(model)
    assert not any("forward" in vars(m) for m in model.modules())


@pytest.mark.full
@pytest.mark.parametrize("name", TOWERS)
def test_kernels(name):
    """The kernels in the interpreter equal the original up to float32 rounding."""
    model, given = made(name, torch.float32)
    torch.manual_seed(2)
    want = outputs(model.eval(), given)
    optimize(model)
    torch.manual_seed(2)
    with interpreting(), torch.no_grad():
        assert distance(outputs(model, given), want) <= SINGLE
