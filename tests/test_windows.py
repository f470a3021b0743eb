"""Tests of converted pyramids: windows of any grid, draws, hooks, replaced layers, launches, frozen tables.

Oracle: the untouched module, unless a test names another.
"""

import copy
import re
from functools import partial

import pytest
import torch
from catalogue import PYRAMIDS as EVERY
from catalogue import build, inputs, outputs
from recording import Recorder
from sampling import sampled
from test_convert import LowRank, results, same
from test_windows_hf import LAYERS, NAMES, equal
from timm.models import crossvit, pvt_v2, swin_transformer, swin_transformer_v2, tnt, twins
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torchvision.models import swin_transformer as torchvision_swin

from benchmarks.launch_recorder import recording
from fastvit_triton import freeze, optimize
from fastvit_triton.convert import forwards
from fastvit_triton.convert.readers.timm import tnt as tnt_readers
from fastvit_triton.engine import attention as attention_bodies
from fastvit_triton.engine import mlp as mlp_bodies
from fastvit_triton.kernels import mlp
from fastvit_triton.kernels.depthwise import depthwise
from fastvit_triton.kernels.window import window_attention

PYRAMIDS = [n for n in EVERY if not n.startswith("hf_")]
GRIDS = [(8, 8), (7, 5), (3, 9), (4, 4), (2, 3)]
TIMM_SWIN = {1: swin_transformer.SwinTransformerBlock, 2: swin_transformer_v2.SwinTransformerV2Block}
TORCHVISION_SWIN = {1: torchvision_swin.SwinTransformerBlock, 2: torchvision_swin.SwinTransformerBlockV2}


def redrawn(module):
    """The module in float64 with random parameters."""
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape) * 0.3)
    return module.double()


def compared(plain, *given, seed=None):
    """(result of the optimised module, that of the original), with the same seed."""
    model, results = copy.deepcopy(plain), []
    optimize(model)
    for owner in (model, plain):
        torch.manual_seed(seed or 0)
        results.append(owner(*given))
    return results


@pytest.fixture
def own_forwards(monkeypatch):
    """The modules that run their own forward."""
    kept = []
    for file in (forwards, tnt_readers):
        own = file.original
        monkeypatch.setattr(file, "original", lambda m, *x, own=own, **more: kept.append(m) or own(m, *x, **more))
    return kept


@pytest.mark.parametrize("options", [{}, dict(always_partition=True), dict(dynamic_mask=True)], ids=str)
@pytest.mark.parametrize("shift", [0, 2])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("version", [1, 2])
def test_timm_rolls_then_pads(version, grid, shift, options, references, own_forwards):
    """timm clips the window to the grid, and pads after it rolled."""
    plain = redrawn(TIMM_SWIN[version](8, grid, 2, window_size=4, shift_size=shift, **options)).eval()
    assert same(*compared(plain, torch.randn(2, *grid, 8, dtype=torch.float64)))
    assert not own_forwards


@pytest.mark.few(48)
@pytest.mark.parametrize("shift", [[0, 0], [2, 2], [0, 1], [3, 0]], ids=str)
@pytest.mark.parametrize("window", [[4, 4], [3, 5]], ids=str)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("version", [1, 2])
def test_torchvision_pads_then_rolls(version, grid, window, shift, references, own_forwards):
    """torchvision does not shift along an axis with a single window."""
    shift = [min(s, w - 1) for s, w in zip(shift, window, strict=True)]
    plain = redrawn(TORCHVISION_SWIN[version](8, 2, window, shift)).eval()
    assert same(*compared(plain, torch.randn(2, *grid, 8, dtype=torch.float64)))
    assert not own_forwards


@pytest.mark.filterwarnings("ignore::UserWarning")  # of timm's interpolation of tables
def test_other_sizes_of_images(references, own_forwards):
    """A model whose input size was changed; a block whose mask is of another size runs its own forward."""
    plain = build("timm_swin")
    plain.set_input_size((48, 40), window_size=(3, 5))
    assert same(*compared(plain.eval(), torch.randn(1, 3, 48, 40, dtype=torch.float64)))
    assert not own_forwards
    block = TIMM_SWIN[1](8, (8, 8), 2, window_size=4, shift_size=2)
    optimize(block)
    block(torch.randn(2, 8, 4, 8))
    assert own_forwards[0] is block


def test_windows_with_a_mask(references):
    """The attentions alone, called on windows with and without the mask of a shifted grid."""
    for version in TIMM_SWIN:
        block = redrawn(TIMM_SWIN[version](8, (8, 8), 2, window_size=4, shift_size=2)).eval()
        windows = torch.randn(8, 16, 8, dtype=torch.float64)
        for mask in (None, block.attn_mask):
            assert same(*compared(block.attn, windows, mask))


TOKENS, MAP = (torch.randn(6, 35, 8).double(), (7, 5)), (torch.randn(6, 8, 4, 8).double(),)
BLOCKS = {
    "swin": (lambda **p: TIMM_SWIN[1](8, (8, 4), 2, window_size=4, shift_size=2, **p), MAP),
    "swin_v2": (lambda **p: TIMM_SWIN[2](8, (8, 4), 2, window_size=4, shift_size=2, **p), MAP),
    "twins_local": (lambda **p: twins.Block(8, 2, ws=4, **p), TOKENS),
    "twins_global": (lambda **p: twins.Block(8, 2, ws=1, sr_ratio=2, **p), TOKENS),
    "twins_full": (lambda **p: twins.Block(8, 2, ws=1, sr_ratio=1, **p), TOKENS),
    "pvt": (lambda **p: pvt_v2.Block(8, 2, sr_ratio=2, **p), TOKENS),
    "pvt_linear": (lambda **p: pvt_v2.Block(8, 2, linear_attn=True, **p), TOKENS),
    "cross": (lambda **p: crossvit.CrossAttentionBlock(8, 2, **p), (TOKENS[0],)),
    "tnt": (lambda **p: tnt.Block(8, 12, 5, 2, 3, **p), (TOKENS[0][:, :5], torch.randn(3, 3, 12).double())),
}
RATES = ["drop_path", "proj_drop", "attn_drop"]


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("name", BLOCKS)
def test_draws_equal_the_original(name, rate, references, own_forwards):
    """The original with the same seed; drop path and dropouts of tokens leave a block fused."""
    make, given = BLOCKS[name]
    plain = redrawn(make(**{rate: 0.4})).train()
    got, want = compared(plain, *given, seed=7)
    got, want = (torch.cat([t.flatten() for t in y]) if isinstance(y, tuple) else y for y in (got, want))
    assert same(got, want)
    kept = {type(m).__name__ for m in own_forwards}
    assert bool(kept) == (rate == "attn_drop" or (rate == "proj_drop" and "swin" in name)), kept


@pytest.mark.parametrize("rate", ["stochastic_depth_prob", "dropout", "attention_dropout"])
@pytest.mark.parametrize("version", [1, 2])
def test_draws_equal_torchvision(version, rate, references, own_forwards):
    """The original with the same seed."""
    plain = redrawn(TORCHVISION_SWIN[version](8, 2, [4, 4], [2, 2], **{rate: 0.4})).train()
    assert same(*compared(plain, *MAP, seed=7))
    assert bool(own_forwards) == (rate != "stochastic_depth_prob")
    whole = redrawn(TORCHVISION_SWIN[version](8, 2, [4, 4], [2, 2], stochastic_depth_prob=0.5)).train()
    whole.stochastic_depth.mode = "batch"
    assert same(*compared(whole, *MAP, seed=7))


HOOKED = {"timm_deit3": "blocks.0"} | LAYERS  # model → path of a module, whose parts have hooks


def note(calls, path, module, given, y):
    """A hook; what it notes is copied, as the original may change it in place."""
    calls.append((path, tree_map_only(Tensor, torch.clone, y)))


@pytest.mark.few(5)
@pytest.mark.parametrize("name", sampled([*PYRAMIDS, *HOOKED], 5))
def test_hooks_on_each_module_fire(name, references):
    """The same hooks on each module of the original in turn, and on all: the same calls with the same tensors."""
    model, given = build(name).train(name == "timm_deit3"), inputs(name)
    plain, top = copy.deepcopy(model), HOOKED.get(name, "")
    optimize(model)
    paths = [path for path, _ in plain.get_submodule(top).named_modules(prefix=top) if path]
    for chosen in [*([path] for path in paths), paths]:
        seen = []
        for owner in (model, plain):
            calls = []
            with torch.set_grad_enabled(name in HOOKED):
                for path in chosen:
                    owner.get_submodule(path).register_forward_hook(partial(note, calls, path))
                calls.append(("", outputs(owner, given)))
            for module in owner.modules():
                module._forward_hooks.clear()
            seen.append(calls)
        assert [path for path, _ in seen[0]] == [path for path, _ in seen[1]], chosen
        assert all(equal(got, want) for (_, got), (_, want) in zip(*seen, strict=True)), chosen


ADAPTED = ["timm_swin_ragged", "timm_swin_v2", "timm_twins_svt", "timm_pvt_v2", "timm_tnt"]


@pytest.mark.few(12)
@pytest.mark.parametrize("name", [*ADAPTED, *NAMES])
def test_replaced_layers_are_called(name, references):
    """The same adapters around every linear layer of the original, or in place of queries and values."""
    model, given = build(name).eval(), inputs(name)
    torch.manual_seed(2)
    for path, module in list(model.named_modules()):
        part = path.rpartition(".")[2]
        inside = part in ("q_proj", "v_proj", "query", "value")
        if name in ADAPTED:  # not what computes a bias; the weight of qkv is read by the original of Swin V2
            read = path.endswith(("head", "head.fc")) or "cpb_mlp" in path or ("swin_v2" in name and part == "qkv")
            inside = not read
        if type(module) is nn.Linear and inside:
            model.set_submodule(path, LowRank(module).double())
    plain = copy.deepcopy(model)
    assert optimize(model).fused
    assert same(outputs(model, given), outputs(plain, given))


@pytest.mark.few(9)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("name", ["timm_swin", "timm_swin_v2", "timm_pvt_v2", "timm_tnt", *NAMES])
def test_checkpointing_gives_the_same_gradients(name, references):
    """The original with checkpointing."""
    model, given = build(name).train(), inputs(name)
    if hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing(True)
    elif not model.supports_gradient_checkpointing:
        pytest.skip("it has no checkpointing")
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    plain = copy.deepcopy(model)
    optimize(model)
    got, want = results(model, given), results(plain, given)
    largest = max(float(g.norm()) for g in want.values())
    assert got.keys() == want.keys()
    assert all(float((got[n] - g).norm()) <= 84 * torch.finfo(torch.float64).eps * largest for n, g in want.items())


@pytest.mark.parametrize("name", PYRAMIDS)
def test_report_leaves_nothing(name):
    """Attention, MLPs and blocks are all fused."""
    report = optimize(build(name).eval())
    assert not report.left, str(report)


# launches of each block: row statistics, qkv, attention, proj, fc1, fc2; or a norm, queries, the smaller map and its
# statistics, keys and values, attention, proj; norms after the branches; one more for a convolution in the MLP
LAUNCHES = {
    "timm_swin": [6] * 3,
    "timm_swin_ragged": [6] * 4,
    "timm_swin_v2": [7] * 3,
    "timm_twins_svt": [6, 9, 6, 6],
    "timm_twins_pcpvt": [9] * 4,
    "timm_pvt_v2": [10, 7, 7],
    "timm_tnt": [15, 15],  # two pairs of branches; statistics, projection and norm between them
    "torchvision_swin": [6] * 4,
    "torchvision_swin_v2": [7] * 4,
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_launches_of_a_frozen_block(name, monkeypatch):
    """Oracle: the plan, launch by launch. Rows this narrow would also merge the last two."""
    monkeypatch.setattr(mlp, "runs_in_one_launch", lambda *_: False)
    model, seen = build(name, torch.bfloat16).eval(), []
    optimize(model, freeze=True)
    given = inputs(name, torch.bfloat16)
    with torch.no_grad(), recording("sm_90") as found:
        for file, own in (
            (attention_bodies, window_attention),
            (mlp_bodies, depthwise),
        ):  # one launch each, whatever runs on this machine
            monkeypatch.setattr(file, own.__name__, lambda *x, own=own, **more: once(found, own, *x, **more))
        outputs(model, given)  # folds weights and expands tables, which frozen models keep
        for block in (m for m in model.modules() if type(m).__name__.endswith(("Block", "BlockV2"))):
            block.register_forward_pre_hook(lambda *_: seen.append(len(found)))
            block.register_forward_hook(lambda *_: seen.append(len(found) - seen.pop()))
        outputs(model, given)
    assert seen == LAUNCHES[name]


def once(found, own, *given, **named):
    """own(...), recorded as one launch."""
    before = len(found)
    result = own(*given, **named)
    found[before:] = [own]
    return result


CHANGES = {
    "timm_swin": ["attn.relative_position_bias_table"],
    "timm_swin_v2": ["attn.cpb_mlp.0.weight", "attn.logit_scale", "attn.q_bias", "attn.v_bias"],
    "torchvision_swin": ["attn.relative_position_bias_table"],
    "torchvision_swin_v2": ["attn.cpb_mlp.2.weight", "attn.logit_scale", "attn.qkv.bias"],
    "timm_beit": ["attn.relative_position_bias_table", "attn.q_bias"],
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_weights_change_the_next_call(name, references):
    """Oracle: a copy that has kept nothing; writes that PyTorch does not count are seen if the model is not frozen."""
    for frozen, write in ((True, lambda p: p.mul_(0.5)), (False, lambda p: p.data.mul_(0.5))):
        model, given = build(name, torch.float32).eval(), inputs(name, torch.float32)
        optimize(model, freeze=frozen)
        with torch.no_grad():
            for end in CHANGES[name]:
                before = outputs(model, given)
                write(next(p for n, p in model.named_parameters() if n.endswith(end)))
                after = outputs(model, given)
                assert torch.equal(after, outputs(copy.deepcopy(model), given)) and not torch.equal(after, before), end


@pytest.mark.parametrize("name", [*CHANGES, "hf_swin", "hf_swinv2", "hf_beit"])
def test_frozen_tables_are_computed_once(name, references):
    """Also the operators of the second frozen call: no table is indexed, no scale computed and no bias packed."""
    model, given = build(name).eval(), inputs(name)
    plain, found = copy.deepcopy(model), []
    optimize(model)
    with torch.no_grad():
        for _ in range(2):
            with Recorder() as run:
                got = outputs(model, given)
            found.append([op for op in run.ops if re.match(r"aten::(index\.|clamp$|sigmoid$|upsample)", op)])
            freeze(model)
            outputs(model, given)
    assert same(got, outputs(plain, given)) and found[0] and not found[1]
