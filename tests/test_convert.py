"""Tests of `optimize` on other packages' models. Oracle: outputs, gradients, keys, hooks, draws of the original."""

import contextlib
import copy
import gc
import io
import itertools
import math
import pickle
import re
import sys
import types
from functools import partial

import agreement
import pytest
import timm
import torch
import transformers
import vit_pytorch
from agreement import ROUNDINGS, normal, seeded
from budget import allowed, assert_within_budget, telling
from catalogue import COMMON, PYRAMIDS, REPEATS, build, inputs, outputs, redraw
from catalogue.timm import TIMM
from catalogue.transformers import HF
from commands import run_python
from interpreter import interpreting
from recording import Recorder
from sampling import marked, sampled
from timm.models import beit
from torch import nn
from torch.utils._pytree import tree_leaves
from torchvision.models import VisionTransformer

from benchmarks.launch_recorder import recording
from fastvit_triton import optimize, revert
from fastvit_triton.convert import forwards
from fastvit_triton.convert.forwards import FORWARDS, known_type
from fastvit_triton.convert.reporting import NOTHING
from fastvit_triton.engine import hooks
from fastvit_triton.engine.leaves import activation_of
from fastvit_triton.kernels import backend, fold, measured, mlp, onednn
from fastvit_triton.kernels.activation import ACTIVATIONS
from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.kernels.settings import forcing


@pytest.fixture
def meta_is_a_gpu(monkeypatch):
    """Makes the meta device count as one with kernels: shapes and dtypes propagate, nothing is computed."""
    monkeypatch.setattr(backend, "why_not", lambda device, *_: None if device.type == "meta" else "a CPU")
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # autocast does not support the meta device


def same(got, want, dtype=None):
    """True if ‖got − want‖ is rounding of sums of at most a few hundred terms, in another order."""
    got, want = got.detach(), telling(want.detach())
    return bool((got - want).norm() <= ROUNDINGS * torch.finfo(dtype or want.dtype).eps * want.norm())


results = partial(agreement.results, outputs)


def twins(name, train):
    """(original in float64, original in float32, copy to optimise) with the same weights, and their inputs."""
    truth = build(name).train(train)
    plain = copy.deepcopy(truth).float()
    truth.load_state_dict({k: v.double() if v.is_floating_point() else v for k, v in plain.state_dict().items()})
    given = inputs(name)
    if isinstance(given, dict):
        return truth, plain, copy.deepcopy(plain), given, {k: single(v) for k, v in given.items()}
    return truth, plain, copy.deepcopy(plain), given.float().double(), given.float()


def single(t):
    return t.float() if t.is_floating_point() else t


USUAL = ("timm_swin", "timm_pvt_v2", "timm_tnt", "torchvision_swin_v2_ragged")  # pyramids that show every part
HEAVY = [*REPEATS, *(n for n in PYRAMIDS if n not in USUAL)]


EACH = [pytest.param(n, marks=pytest.mark.full if n in HEAVY else ()) for n in COMMON]
EACH = marked(EACH, pytest.mark.fast, lambda name: name == "timm_vit")


@pytest.mark.full
@pytest.mark.parametrize("name", sampled(EACH, 4))
def test_kernels_equal_the_original(name):
    """Oracle: as above, through the Triton kernels in the interpreter."""
    truth, plain, model, exact, given = twins(name, True)
    optimize(model)
    baseline, want = results(plain, given), results(truth, exact)
    with interpreting(), Recorder() as run:
        got = results(model, given)
    assert run.ours
    assert_within_budget(got, baseline, want, torch.float32)


@pytest.mark.fast
@pytest.mark.parametrize("name", ["timm_deit3", "timm_swin", "hf_dinov3", "torchvision_vit", "vit_pytorch_vit"])
def test_keys_parameters_and_classes_are_unchanged(name):
    """Oracle: identities before `optimize`; `revert` restores each instance's dictionary."""
    model = build(name)
    dictionaries = {path: dict(module.__dict__) for path, module in model.named_modules()}
    parameters, state = dict(model.named_parameters()), list(model.state_dict())
    classes = [type(m) for m in model.modules()]
    own = {type(m): type(m).forward for m in model.modules()}
    optimize(model)
    optimize(model)  # a second call changes nothing
    assert list(model.state_dict()) == state and [type(m) for m in model.modules()] == classes
    assert all(p is parameters[n] for n, p in model.named_parameters()) and len(parameters) == len(
        list(model.parameters())
    )
    assert all(cls.forward is forward for cls, forward in own.items())
    build(name).load_state_dict(model.state_dict())
    revert(model)
    for path, module in model.named_modules():
        assert module.__dict__.keys() == dictionaries[path].keys()
        assert all(module.__dict__[k] is v for k, v in dictionaries[path].items())


def test_training_a_deepcopy_leaves_the_original_unchanged(references):
    """Oracle: training the deepcopy changes its own output but not the original's."""
    model, given = build("timm_deit3"), inputs("timm_deit3")
    optimize(model)
    before = outputs(model, given)
    twin = copy.deepcopy(model)
    outputs(twin, given).square().sum().backward()
    assert all(p.grad is None for p in model.parameters()) and all(p.grad is not None for p in twin.parameters())
    with torch.no_grad():
        for p in twin.parameters():
            p -= 0.1 * p.grad
    assert torch.equal(outputs(model, given), before) and not torch.equal(outputs(twin, given), before)
    revert(twin)
    assert not any("forward" in m.__dict__ for m in twin.modules())
    assert all("forward" in block.__dict__ for block in model.blocks)


@pytest.mark.parametrize("name", ["timm_deit3", "hf_vit"])
def test_pickle_keeps_the_fused_forwards(name, references):
    """Oracle: the model that was pickled, by pickle and by torch.save."""
    model, given = build(name), inputs(name)
    optimize(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert torch.equal(outputs(twin, given), outputs(model, given))
        assert [hooks.is_our_forward(m.__dict__.get("forward")) for m in twin.modules()] == [
            hooks.is_our_forward(m.__dict__.get("forward")) for m in model.modules()
        ]
        assert all(m.__dict__["forward"].args[-1] is m for m in twin.modules() if "forward" in m.__dict__)


class LowRank(nn.Module):
    """An adapter around a linear layer, like those of fine-tuning libraries."""

    def __init__(self, base):
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Halved(torch.Tensor):
    """A weight of a tensor subclass, like those of quantisation libraries."""


def replace_qkv(block):
    block.attn.qkv = LowRank(block.attn.qkv).double()


def parametrize_fc2(block):
    torch.nn.utils.parametrizations.weight_norm(block.mlp.fc2)


def quantise_proj(block):
    block.attn.proj.weight = nn.Parameter(block.attn.proj.weight.detach().as_subclass(Halved), requires_grad=False)


def wrap_mlp(block):
    block.mlp = nn.Sequential(block.mlp, nn.Identity())


def other_norm(block):
    block.norm2 = nn.RMSNorm(24, dtype=torch.float64)


def replace_forward(block):
    own = block.mlp.forward
    block.mlp.forward = lambda x: 2 * own(x)


@pytest.mark.fast
@pytest.mark.parametrize("change", [replace_qkv, parametrize_fc2, quantise_proj, wrap_mlp, other_norm, replace_forward])
@pytest.mark.parametrize("when", ["before", "after"])
def test_replaced_submodules_are_called(change, when, references):
    """Oracle: the same change on the original, made before or after `optimize`."""
    model, given = build("timm_deit3"), inputs("timm_deit3")
    plain = copy.deepcopy(model)
    if when == "after":
        optimize(model)
    for owner in (model, plain):
        torch.manual_seed(5)
        change(owner.blocks[1])
    report = optimize(model)
    changed = [row for row in report.rows if row.path.startswith("blocks.1") and (row.why or row.type == "RMSNorm")]
    assert changed or change in (wrap_mlp, other_norm)
    got, want = outputs(model, given), outputs(plain, given)
    assert same(got, want)


def test_meta_then_to_empty_then_load(references):
    """Oracle: the model whose weights are loaded."""
    theirs, given = build("timm_deit3"), inputs("timm_deit3")
    with torch.device("meta"):
        model = COMMON["timm_deit3"].make().double()
    optimize(model)
    model.to_empty(device="cpu").load_state_dict(theirs.state_dict())
    assert same(outputs(model, given), outputs(theirs, given))


def test_moving_to_a_gpu_after_optimize_uses_the_kernels(meta_is_a_gpu):
    """Oracle: the operators that run before and after `.cuda()` is called on an optimised model."""
    model, given = build("timm_vit", torch.float32).eval(), inputs("timm_vit", torch.float32)
    optimize(model)
    with torch.no_grad(), Recorder() as run:
        outputs(model, given)
    assert not run.ours
    model.to("meta")
    with torch.no_grad(), Recorder() as run, forcing("fused"):
        assert outputs(model, given.to("meta")).shape == (2, 5)
    assert run.ours.count("attention_fwd") == 2


NO_BLOCKS = ("torch_multihead", "mlp_sequential", "timm_cait", "timm_naflex")  # naflex needs its own input
BLOCKS = [n for n in COMMON if n not in (*NO_BLOCKS, *PYRAMIDS)]  # pyramids: test_windows.py


# launches beyond a plain block's, (frozen, fold, norms): separate queries, keys and values are packed if there is no
# fold, and so are a gate and its partner; rotary positions, or norms of queries and keys; inner norms, each with a fold
# and statistics; norms after the branches
SEPARATE = ("vit", "vit_eager", "deit", "mae", "dinov2", "dinov2_swiglu", "clip", "siglip", "siglip2", "beit")
SEPARATE += ("beit_shared", "data2vec")
MORE = {f"hf_{name}": (0, 0, 1) for name in SEPARATE} | dict.fromkeys(("timm_dinov3", "timm_rope_vit"), (1, 1, 1))
MORE |= {"hf_dinov2_swiglu": (0, 0, 2), "hf_dinov3": (1, 1, 2), "hf_dinov3_gated": (1, 1, 3)}
MORE |= {"timm_vit_qk_norm": (3, 5, 3), "timm_eva02": (3, 5, 5)}
MORE |= {"torch_encoder_layer": (1, 0, 0)}
WAYS = ("frozen", "fold", "norms")


@pytest.mark.few(14)
@pytest.mark.parametrize("name, way", sampled(itertools.product(BLOCKS, WAYS), 2))
def test_a_block_makes_six_to_eight_launches(name, way, monkeypatch):
    """Oracle: the plan: row statistics, LN → qkv, attention, proj + residual, LN → fc1 → act, fc2 + residual.

    One more launch folds both LayerNorms if folds are not kept. If the norms run instead, there are no row statistics,
    and one more launch packs separate queries, keys and values. Rows this narrow would also merge the last two.
    """
    monkeypatch.setattr(mlp, "runs_in_one_launch", lambda *_: False)
    monkeypatch.setitem(fold.SPACE, "border", dict(ROWS_PER_OUTPUT=0 if way == "fold" else math.inf))
    model, seen = build(name, torch.bfloat16).eval(), []
    optimize(model, freeze=way == "frozen")
    kinds = ("Block", "EvaBlock", "EncoderBlock", "Transformer", "TransformerEncoderLayer")
    blocks = [m for m in model.modules() if type(m).__name__ in kinds or type(m).__name__.endswith("Layer")]
    given = inputs(name, torch.bfloat16)
    with torch.no_grad(), recording("sm_90") as found:
        outputs(model, given)  # folds weights, which frozen models keep
        for block in blocks:
            block.register_forward_pre_hook(lambda *_: seen.append(len(found)))
            block.register_forward_hook(lambda *_: seen.append(len(found) - seen.pop()))
        outputs(model, given)
    if type(blocks[0]).__name__ == "Transformer":  # two blocks and a norm; the second block has statistics
        expected = {"frozen": 6 + 5 + 1, "fold": 7 + 6 + 1, "norms": 7 + 7 + 1}[way]
    else:
        expected = {"frozen": 6, "fold": 7, "norms": 7}[way] + MORE.get(name, (0, 0, 0))[WAYS.index(way)]
    assert seen == [expected] * len(blocks)


@pytest.mark.fast
@pytest.mark.parametrize("rate", ["drop_path_rate", "proj_drop_rate", "attn_drop_rate", "patch_drop_rate"])
def test_dropout_draws_equal_the_original(rate, references):
    """Oracle: the original with the same seed; drop path is always on."""
    plain = timm.models.VisionTransformer(**TIMM, **{"drop_path_rate": 0.4} | {rate: 0.3}).train().double()
    model = copy.deepcopy(plain)
    report = optimize(model)
    given = torch.randn(8, 3, 32, 32, dtype=torch.float64)
    assert same(*(seeded(owner, given) for owner in (model, plain)))
    assert any("attention dropout 0.3" in str(row.why) for row in report.rows) == (rate == "attn_drop_rate")


def encoder(first, norm_first):
    """nn.TransformerEncoder of two layers with dropout everywhere but in the attention."""
    options = dict(dropout=0.3, batch_first=first, norm_first=norm_first)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 2, 48, **options), 2, enable_nested_tensor=False)
    for layer in model.layers:
        layer.self_attn.dropout = 0.0
    return model


class Decoder(nn.Module):
    """nn.TransformerDecoderLayer twice, which applies dropout to what nn.MultiheadAttention returns."""

    def __init__(self, first):
        super().__init__()
        layer = nn.TransformerDecoderLayer(24, 2, 48, dropout=0.3, batch_first=first)
        layer.self_attn.dropout = layer.multihead_attn.dropout = 0.0
        self.decoder = nn.TransformerDecoder(layer, 2)

    def forward(self, x):
        return self.decoder(x, x.flip(1))


TORCHVISION = 32, 16, 3, 2, 24, 48  # image, patch, layers, heads, widths
DRAWING = {  # models with dropout, and the shape of their input
    "hf_hidden": (lambda: transformers.ViTModel(transformers.ViTConfig(**HF, hidden_dropout_prob=0.3)), (2, 3, 32, 32)),
    "hf_attention": (
        lambda: transformers.ViTModel(transformers.ViTConfig(**HF, attention_probs_dropout_prob=0.3)),
        (2, 3, 32, 32),
    ),
    "torchvision": (lambda: VisionTransformer(*TORCHVISION, dropout=0.3), (3, 3, 32, 32)),
    "torchvision_attention": (lambda: VisionTransformer(*TORCHVISION, attention_dropout=0.3), (3, 3, 32, 32)),
    "vit_pytorch": (
        lambda: vit_pytorch.ViT(
            image_size=32, patch_size=16, num_classes=5, dim=24, depth=2, heads=2, mlp_dim=48, dropout=0.3
        ),
        (2, 3, 32, 32),
    ),
    **{
        f"torch_encoder_{'batch' if first else 'tokens'}_first_{'pre' if norm_first else 'post'}_norm": (
            lambda first=first, norm_first=norm_first: encoder(first, norm_first),
            (3, 5, 24),
        )
        for first in (True, False)
        for norm_first in (True, False)
    },
    "torch_decoder_batch_first": (lambda: Decoder(True), (3, 5, 24)),
    "torch_decoder_tokens_first": (lambda: Decoder(False), (3, 5, 24)),
}


@pytest.mark.fast
@pytest.mark.parametrize("name", DRAWING)
def test_dropout_draws_of_other_packages_equal_the_original(name, references):
    """Oracle: the original with the same seed, with drawn weights, as torchvision's head is initialised with zeros."""
    make, shape = DRAWING[name]
    plain = normal(make().double().train())
    model, given = copy.deepcopy(plain), torch.randn(shape, dtype=torch.float64)
    assert optimize(model).fused
    got, want = (seeded(outputs, owner, given) for owner in (model, plain))
    assert same(got, want) and not same(outputs(plain, given), want)  # other random numbers are seen


def test_dropout_of_vit_pytorch_is_named_in_the_report():
    """A dropout of a known type is named with its rate; any other module in its place counts as replaced."""
    plain = vit_pytorch.vit.Attention(24, heads=2, dim_head=12, dropout=0.3)
    replaced = copy.deepcopy(plain)
    replaced.dropout = nn.AlphaDropout(0.3)
    assert [optimize(model).rows[0].why for model in (plain, replaced)] == [
        "attention dropout 0.3",
        "dropout was replaced",
    ]


@pytest.mark.fast
@pytest.mark.parametrize("name", ["hf_dinov2", "hf_dinov3"])
def test_transformers_drop_path_draws_equal_the_original(name, references):
    """Oracle: the original with the same seed."""
    plain = build(name).train()
    for module in plain.modules():
        if hasattr(module, "drop_path"):
            file = sys.modules[type(module).__module__]
            kind = file.Dinov2DropPath if name == "hf_dinov2" else file.Dinov3ViTDropPath
            module.drop_path = kind(0.4)
    model, given = copy.deepcopy(plain), inputs(name)
    optimize(model)
    assert same(*(seeded(outputs, owner, given) for owner in (model, plain)))


AUTOCAST = ["timm_vit", "timm_deit3", "timm_eva02", "hf_dinov2", "torch_encoder_layer_first"]
CASES = [(n, kernels) for n in AUTOCAST for kernels in (False, True)]
CASES += [(n, False) for n in PYRAMIDS]  # as on a GPU, the kernel of their first norm returns float32


@pytest.mark.few(6)
@pytest.mark.parametrize("name, kernels", sampled(CASES, 3))
def test_autocast_dtypes_equal_the_original(name, kernels, references):
    """Oracle: the dtype of every block's output in the original, a float32 model under bfloat16 autocast."""
    truth, plain, model, exact, given = twins(name, False)
    optimize(model)
    dtypes = {True: [], False: []}
    for owner, ours in ((model, True), (plain, False)):
        for module in owner.modules():
            if type(module).__name__.endswith(("Block", "BlockV2", "Layer")):
                module.register_forward_hook(
                    lambda m, i, o, ours=ours: dtypes[ours].extend(
                        t.dtype for t in tree_leaves(o) if torch.is_tensor(t)
                    )
                )
    with torch.autocast("cpu", torch.bfloat16):
        baseline = outputs(plain, given)
        with interpreting() if kernels else contextlib.nullcontext():
            got = outputs(model, given)
    assert dtypes[True] == dtypes[False] and dtypes[True]
    assert got.dtype == baseline.dtype
    want = telling(outputs(truth, exact))
    assert (got - want).norm() <= allowed((baseline - want).norm(), want.norm(), torch.bfloat16)


@pytest.mark.fast
def test_report_lists_each_candidate():
    """Oracle: the rows written out by hand, for one module of each outcome."""
    model = nn.Module()
    model.block = timm.models.vision_transformer.Block(24, 2, attn_drop=0.1, act_layer=nn.Mish)
    model.gated = timm.layers.Attention(24, 2, gated=True)
    model.hooked = nn.LayerNorm(24)
    model.hooked.register_forward_hook(lambda *_: None)
    model.taken = nn.LayerNorm(24)
    model.taken.forward = lambda x: x
    model.other = type("StrangeAttention", (nn.Module,), {})()
    model.left = nn.LayerNorm(24)
    model.again = model.hooked
    model.mlp = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24))
    model.tail = nn.Sequential(nn.Linear(24, 48), nn.Linear(48, 24))
    model.eval()
    report = optimize(model, filter_fn=lambda module, path: path != "left")
    rows = {row.path: (row.became, row.within, row.why) for row in report.rows}
    assert rows == {
        "block": ("fused pre-norm block", None, None),
        "block.norm1": ("fused LayerNorm", "block", None),
        "block.attn": ("fused attention", "block", "own forward while training: attention dropout 0.1"),
        "block.norm2": ("fused LayerNorm", "block", None),
        "block.mlp": ("fused MLP, Mish", "block", "activation Mish is called"),
        "gated": (None, None, "gated attention"),
        "hooked": ("LayerNorm kernel", None, "it has a hook, so it is called"),
        "taken": (None, None, "its forward was replaced"),
        "other": (None, None, "unknown type"),
        "left": (None, None, "excluded by filter_fn"),
        "again": ("LayerNorm kernel", None, "the same module as hooked"),
        "mlp": ("fused MLP, gelu", None, None),
    }
    assert [row.path for row in report.norms] == ["hooked", "again"]
    assert len(report.fused) == 6 and len(report.left) == 4
    line = r"^  block\.attn \(Attention\) +converted .* · own forward while training: attention dropout 0\.1$"
    assert re.search(line, str(report), re.MULTILINE)
    assert "forward" not in model.left.__dict__ and "need a CUDA or ROCm GPU, this is cpu" in report.device


def test_hard_activations_are_read():
    """Oracle: the module's own output, and its type's name in our table; others are called."""
    from timm.layers.activations import HardSwish
    from timm.layers.activations_me import HardSwishMe

    x = torch.linspace(-8, 8, 101, dtype=torch.float64)
    pairs = {HardSwish: "hardswish", HardSwishMe: "hardswish", nn.Hardswish: "hardswish", nn.ReLU6: "relu6"}
    for module, name in ((made(), name) for made, name in pairs.items()):
        assert activation_of(module) == name
        torch.testing.assert_close(ACTIVATIONS[name](x), module(x))
    assert isinstance(activation_of(nn.Hardtanh()), nn.Hardtanh)


GPU = "On a GPU: Triton, where it is expected to be faster."
UNKNOWN_CPU = f"On this CPU: PyTorch, because there is no row for this CPU: {onednn.REMEDY}. {GPU}"
NO_ONEDNN = onednn.why_not(torch.device("cpu"), torch.float32)


@pytest.mark.skipif(NO_ONEDNN is not None, reason="PyTorch has no oneDNN here")
def test_report_says_how_linear_layers_run_on_a_cpu():
    """Oracle: the backend, rows and measurements that are given; a block that states no size of its input."""
    by_size = (
        f"On this CPU: oneDNN or PyTorch, by the sizes of each call; optimize(model, example=images) says which. {GPU}"
    )
    slower = f"On this CPU: PyTorch, because `fastvit-triton tune` measured that PyTorch's products are faster. {GPU}"
    cases = [
        (dict(), UNKNOWN_CPU),
        (dict(row={"float32": dict(inference=1e6, training=0.0)}), by_size),
        (dict(ways={"a": "plain"}), slower),
        (dict(dtype=torch.float64), "On this CPU: PyTorch, because torch.float64 always runs on PyTorch."),
        (dict(switch="torch"), "FASTVIT_TRITON_BACKEND is torch, so the original code runs."),
    ]

    def said(switch="auto", row=None, ways=None, dtype=torch.float32):
        table = measured.Measured(ways=ways or {})
        with onednn.using_row(row or {}), measured.using(table), using_backend(switch):
            block = timm.models.vision_transformer.Block(16, 2).to(dtype)
            return str(optimize(block)).splitlines()[1]

    for given, want in cases:
        assert said(**given) == want


@pytest.mark.fast
def test_report_prints_a_table():
    """Oracle: the text; blocks with identical rows share a line."""
    model = COMMON["timm_cait"].make()
    with onednn.using_row({}):
        lines = str(optimize(model)).splitlines()
    more = "over 99 % with the other modules that are converted"
    layers = f"60 % of the weights of linear and convolution layers ({more})"
    assert lines[:2] == [f"4 of 4 blocks are converted, {layers}.", UNKNOWN_CPU]
    assert [re.sub(" {2,}", "|", re.sub(r"[\d.]+ %  ", " ", line)) for line in lines[2:7]] == [
        "",
        "module|way|share of weights|reason",
        "patch_embed (PatchEmbed)|converted|patch projection",
        "blocks.* ×2 (LayerScaleBlock)|converted|pre-norm block",
        "|blocks.*.attn ×2 (TalkingHeadAttn)|converted|projections of talking heads",
    ]
    assert str(optimize(nn.Linear(2, 2))) == f"The model {NOTHING}."
    assert [row.why for row in optimize(nn.RMSNorm(2)).left] == ["its ε is None"]


@pytest.mark.fast
def test_on_a_cpu_the_original_runs():
    """Oracle: the untouched model, bit by bit; none of our operators runs."""
    model = build("timm_deit3", torch.float32)
    given = inputs("timm_deit3", torch.float32)
    want = outputs(model, given)
    optimize(model)
    with Recorder() as run:
        assert torch.equal(outputs(model, given), want)
    assert not run.ours


MASKS = {
    "padding": dict(key_padding_mask=torch.tensor([[False] * 5, [False] * 3 + [True] * 2])),
    "bool": dict(attn_mask=torch.eye(5, dtype=torch.bool)),
    "float": dict(attn_mask=torch.linspace(-1, 1, 25, dtype=torch.float64).view(5, 5)),
    "heads": dict(attn_mask=torch.linspace(-1, 1, 150, dtype=torch.float64).view(6, 5, 5)),
    "both": dict(
        attn_mask=torch.eye(5, dtype=torch.bool),
        key_padding_mask=torch.tensor([[False] * 5, [False] * 3 + [True] * 2]),
    ),
}


@pytest.mark.fast
@pytest.mark.parametrize("first", [False, True], ids=["batch_second", "batch_first"])
@pytest.mark.parametrize("masks", [{}, *MASKS.values()], ids=["none", *MASKS])
def test_multihead_masks_equal_the_original(masks, first, references):
    """Oracle: the untouched nn.MultiheadAttention, and an nn.TransformerEncoderLayer that contains it."""
    x = torch.randn((2, 5, 24) if first else (5, 2, 24), dtype=torch.float64)
    plain = nn.MultiheadAttention(24, 3, batch_first=first, dtype=torch.float64)
    model = copy.deepcopy(plain)
    optimize(model)
    with Recorder():
        got, weights = model(x, x, x, need_weights=False, **masks)
    assert weights is None and same(got, plain(x, x, x, need_weights=False, **masks)[0])
    assert torch.equal(model(x, x, x, **masks)[1], plain(x, x, x, **masks)[1])  # with attention weights
    renamed = {{"attn_mask": "src_mask"}.get(k, "src_key_padding_mask"): v for k, v in masks.items()}
    for norm_first in (False, True):
        plain = nn.TransformerEncoderLayer(24, 3, 32, 0.0, batch_first=first, norm_first=norm_first).double()
        model = copy.deepcopy(plain)
        optimize(model)
        assert same(model(x, **renamed), plain(x, **renamed))


@pytest.mark.parametrize(
    "options, why",
    [
        (dict(dropout=0.3), "attention dropout 0.3"),
        pytest.param(dict(add_bias_kv=True), "added keys", marks=pytest.mark.fast),
        pytest.param(dict(add_zero_attn=True), "added keys", marks=pytest.mark.fast),
        pytest.param(dict(kdim=6), "keys or values of another width", marks=pytest.mark.fast),
        (dict(bias=False), None),
    ],
    ids=str,
)
def test_unusual_multihead_attention_equals_the_original(options, why, references):
    """Oracle: the untouched module with the same seed."""
    plain = nn.MultiheadAttention(24, 3, batch_first=True, **options).double()
    model, query = copy.deepcopy(plain), torch.randn(2, 5, 24, dtype=torch.float64)
    key = torch.randn(2, 7, options.get("kdim", 24), dtype=torch.float64)
    value = torch.randn(2, 7, 24, dtype=torch.float64)
    assert optimize(model).rows[0].why == why
    assert same(*(seeded(owner, query, key, value, need_weights=False)[0] for owner in (model, plain)))


ANGLES = torch.linspace(0, 1, 4 * 12, dtype=torch.float64).view(4, 12)
ROPE = torch.cat((ANGLES.sin(), ANGLES.cos()), -1)  # of four tokens; the prefix token has no rotary position
PARTS = {
    "gated": (lambda: timm.layers.Attention(24, 2, gated=True), {}),
    "differential": (lambda: timm.layers.DiffAttention(24, 2), {}),
    "grouped_query": (
        lambda: timm.layers.AttentionRope(24, 2, qkv_fused=False, num_kv_heads=1),
        {"rope": ROPE},
    ),
    "rope_per_head": (lambda: timm.layers.AttentionRope(24, 2), {"rope": ROPE.expand(2, -1, -1)}),
    "rope_per_image": (lambda: timm.layers.AttentionRope(24, 2), {"rope": ROPE.expand(2, 1, -1, -1)}),
    "rms_normed_heads": (lambda: timm.layers.AttentionRope(24, 2, qk_norm=True, norm_layer=timm.layers.RmsNorm), {}),
    "beit_two_tables": (
        lambda: beit.Attention(24, 2, window_size=(2, 2), qkv_bias=True),
        {"shared_rel_pos_bias": torch.randn(1, 2, 5, 5, dtype=torch.float64)},
    ),
    "beit_separate_bias": (lambda: beit.Attention(24, 2, qkv_bias=True, qkv_bias_separate=True), {}),
    "glu": (lambda: timm.layers.GluMlp(24, 48), {}),
    "glu_gate_last": (lambda: timm.layers.GluMlp(24, 48, act_layer=nn.SiLU), {}),
    "glu_gate_first_gelu": (lambda: timm.layers.GluMlp(24, 48, act_layer=nn.GELU, gate_last=False), {}),
    "glu_normed": (lambda: timm.layers.GluMlp(24, 48, act_layer=nn.SiLU, gate_last=False, norm_layer=nn.LayerNorm), {}),
    "swiglu_of_gelu": (lambda: timm.layers.SwiGLU(24, 48, act_layer=nn.GELU), {}),
    "mlp_mish": (lambda: timm.layers.Mlp(24, 48, act_layer=nn.Mish), {}),
    "mlp_no_bias": (lambda: timm.layers.Mlp(24, 48, bias=False), {}),
    "pool_positions": (lambda: timm.layers.AttentionPoolLatent(24, num_heads=2, feat_size=5, pos_embed="abs"), {}),
    "pool_mean_of_three": (
        lambda: timm.layers.AttentionPoolLatent(24, num_heads=2, latent_len=3, pool_type="avg", q_proj=False),
        {},
    ),
    "pool_bare": (lambda: timm.layers.AttentionPoolLatent(24, out_features=0, num_heads=2), {}),
    "one_wide_head": (lambda: vit_pytorch.vit.Attention(24, heads=1, dim_head=24), {}),
    "norm_of_two_axes": (lambda: nn.LayerNorm((5, 24)), {}),
    "norm_without_weights": (lambda: nn.LayerNorm(24, elementwise_affine=False), {}),
    "relu_sequential": (lambda: nn.Sequential(nn.Linear(24, 9), nn.ReLU(), nn.Dropout(0.1), nn.Linear(9, 3)), {}),
}


@pytest.mark.parametrize("name", PARTS)
def test_unusual_modules_equal_the_original(name, references):
    """Oracle: the untouched module, whether it is converted or not."""
    make, call = PARTS[name]
    plain = make().double().eval()
    with torch.no_grad():
        for p in plain.parameters():
            p.add_(torch.randn_like(p), alpha=0.3)
    model, x = copy.deepcopy(plain), torch.randn(2, 5, 24, dtype=torch.float64)
    optimize(model)
    assert same(model(x, **call), plain(x, **call))


def gated(model, name, **config):
    """A gated MLP of transformers with a configuration of these attributes."""
    module = getattr(transformers.models, model)
    return getattr(getattr(module, f"modeling_{model}"), name)(types.SimpleNamespace(**config))


WIDTHS = dict(hidden_size=24, intermediate_size=48)
GATED_MLPS = {  # by the function that reads them
    "glu_parts": lambda: timm.layers.GluMlp(24, 96, gate_last=False, norm_layer=nn.LayerNorm),
    "swiglu_parts": lambda: timm.layers.SwiGLU(24, 48, norm_layer=nn.LayerNorm),
    "vitamin_parts": lambda: timm.models.vitamin.GeGluMlp(24, 48, norm_layer=nn.LayerNorm),
    "gemma_mlp_parts": lambda: timm.models.gemma4_vit.Gemma4GatedMlp(24, 48),
    "gated_parts": lambda: gated("dinov3_vit", "DINOv3ViTGatedMLP", **WIDTHS, mlp_bias=True, hidden_act="silu"),
    "gemma4_mlp_parts": lambda: gated(
        "gemma4", "Gemma4VisionMLP", **WIDTHS, hidden_activation="silu", use_clipped_linears=False
    ),
    "pix2struct_mlp_parts": lambda: gated(
        "pix2struct", "Pix2StructVisionMlp", hidden_size=24, d_ff=48, dropout_rate=0.0, dense_act_fn="gelu"
    ),
}


@pytest.mark.parametrize("reader", GATED_MLPS)
def test_gated_mlps_of_any_activation_equal_the_original(reader, references):
    """Oracle: the untouched module with Mish, which no kernel has, so that PyTorch multiplies gate and value; forward
    and gradients."""
    plain = redraw(GATED_MLPS[reader]().double().eval())
    setattr(plain, "act_fn" if hasattr(plain, "act_fn") else "act", nn.Mish())
    model, x = copy.deepcopy(plain), torch.randn(2, 4, 24, dtype=torch.float64)
    rows = optimize(model).rows
    assert rows[0].became == "fused gated MLP", rows
    got, want = results(model, x), results(plain, x)
    assert got.keys() == want.keys() and all(same(got[name], want[name]) for name in want)


def test_every_reader_of_gated_mlps_is_tested():
    """Oracle: the registered functions that call `gated_mlp_body`."""
    readers = [forward.read for forwards in FORWARDS.values() for forward in forwards if forward.read is not None]
    assert {read.__name__ for read in readers if "gated_mlp_body" in read.__code__.co_names} == GATED_MLPS.keys()


@pytest.mark.fast
def test_timm_masks_equal_the_original(references):
    """Oracle: the untouched block with each kind of mask, also the causal one."""
    plain = timm.models.vision_transformer.Block(24, 2).double()
    model, x = copy.deepcopy(plain), torch.randn(2, 5, 24, dtype=torch.float64)
    optimize(model)
    keep = torch.eye(5, dtype=torch.bool) | (torch.arange(5) < 3)
    for mask in (
        keep,
        keep[None, None].expand(2, 1, 5, 5),
        torch.zeros(5, 5).masked_fill(~keep, torch.finfo().min).double(),
    ):
        assert same(model(x, attn_mask=mask), plain(x, attn_mask=mask))
    assert same(model(x, is_causal=True), plain(x, is_causal=True))


BOTH = "timm_deit3 timm_eva02 timm_swin hf_vit hf_dinov3 torchvision_vit vit_pytorch_vit torch_encoder_layer".split()
COMPILED = [(name, backend) for name in BOTH for backend in ("auto", "kernels")]
COMPILED += [pytest.param(n, "kernels", marks=pytest.mark.full) for n in PYRAMIDS if n != "timm_swin"]
# without kernels, test_backend.py compiles the other hierarchical models
COMPILED += [pytest.param(n, "auto", marks=pytest.mark.full(one_in=4)) for n in PYRAMIDS if "hf_" in n]


@pytest.mark.full
@pytest.mark.parametrize("name, backend", sampled(COMPILED, 8))
def test_compiles_as_one_graph(name, backend):
    """Oracle: the same model uncompiled; fullgraph=True raises on any graph break."""
    model, given = build(name, torch.float32).eval(), inputs(name, torch.float32)
    optimize(model)
    with interpreting() if backend == "kernels" else contextlib.nullcontext(), torch.no_grad():
        want = outputs(model, given)
        got = outputs(torch.compile(model, backend="aot_eager", fullgraph=True), given)
    torch._dynamo.reset()
    assert same(got, want)


@pytest.mark.full
def test_compiled_training_with_dynamic_batches(name="timm_deit3"):
    """Oracle: the same model uncompiled, outputs and gradients, for two batch sizes."""
    model, given = build(name, torch.float32).train(), inputs(name, torch.float32)
    optimize(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    parameters = [p for p in model.parameters() if p.requires_grad]
    for images in (given, torch.cat((given, given, given))):
        with interpreting():
            got, want = outputs(compiled, images), outputs(model, images)
            grads = [torch.autograd.grad(y.square().sum(), parameters, allow_unused=True) for y in (got, want)]
        assert same(got, want)
        largest = max(float(g.norm()) for g in grads[1] if g is not None)
        for a, b in zip(*grads, strict=True):
            assert (a is None) == (b is None)
            assert a is None or (a - b).norm() <= ROUNDINGS * torch.finfo(torch.float32).eps * largest
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_other_tracers_trace_the_original(references):
    """Oracle: the model itself; torch.fx traces proxies, and nn.TransformerEncoder passes nested tensors on."""
    model, given = build("torchvision_vit").eval(), inputs("torchvision_vit")
    optimize(model)
    assert same(torch.fx.symbolic_trace(model)(given), model(given))
    layer = nn.TransformerEncoderLayer(24, 2, 32, batch_first=True)
    plain = nn.TransformerEncoder(layer, 2).eval()
    model, x = copy.deepcopy(plain), torch.randn(2, 5, 24)
    optimize(model)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        got, want = (m(x, src_key_padding_mask=padding) for m in (model, plain))
    assert torch.equal(got, want)


@pytest.mark.parametrize("shape", [(2, 3, 33, 32), (3, 32, 32), (2, 3, 48, 48)])
def test_invalid_images_raise_as_in_the_original(shape, references):
    """Oracle: the untouched model's result or error."""
    plain = build("timm_vit")
    model, image = copy.deepcopy(plain), torch.randn(shape, dtype=torch.float64)
    optimize(model)
    with pytest.raises((AssertionError, ValueError)) as want:
        plain(image)
    with pytest.raises(want.type) as got:
        model(image)
    assert str(got.value) == str(want.value)
    conv = VisionTransformer(32, 16, 1, 2, 24, 48).double()
    optimize(conv)
    assert same(conv.conv_proj(image), type(conv.conv_proj).forward(conv.conv_proj, image))


def test_cpu_exports_hold_no_custom_op():
    """Oracle: the model itself; the exported program contains none of our operators."""
    model, given = build("timm_deit3", torch.float32).eval(), inputs("timm_deit3", torch.float32)
    optimize(model)
    program = torch.export.export(model, (given,))
    assert not any("fastvit_triton" in str(node.target) for node in program.graph.nodes)
    assert torch.equal(program.module()(given), model(given))


def test_transformers_checkpointing_still_works(references):
    """Oracle: gradients without checkpointing; each layer's forward runs again in the backward pass."""
    model, given = build("hf_vit").train(), inputs("hf_vit")
    optimize(model)
    grads, calls = [], []
    model.layers[0].mlp.fc1.register_forward_hook(lambda *_: calls.append(1))
    kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"  # older transformers
    for verb in ("disable", "enable"):
        getattr(model, f"{kind}_checkpointing_{verb}")()
        model.zero_grad()
        outputs(model, given).square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True)) and len(calls) == 3


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_transformers_returns_hidden_states_and_attentions(implementation, references):
    """Oracle: the untouched model's hidden states and attention maps; afterwards the blocks are fused again."""
    config = transformers.ViTConfig(**HF, attn_implementation=implementation)
    plain = transformers.ViTModel(config).double().eval()
    model, given = copy.deepcopy(plain), inputs("hf_vit")
    optimize(model)
    got, want = (
        m(given, output_hidden_states=True, output_attentions=implementation == "eager") for m in (model, plain)
    )
    for a, b in zip(
        got.hidden_states + (got.attentions or ()), want.hidden_states + (want.attentions or ()), strict=True
    ):
        assert same(a, b, torch.float32)  # eager attention computes softmax in float32
    assert len(got.hidden_states) == 3 and (implementation == "sdpa" or len(got.attentions) == 2)
    assert hooks.has_hooks(model.layers[0].attention) is False


def test_attention_interface_of_transformers():
    """Oracle: the model with "sdpa", also CLIP's text tower, which is causal."""
    optimize(nn.Identity())
    for name in ("hf_vit", "hf_dinov3"):
        model, given = build(name, torch.float32).eval(), inputs(name, torch.float32)
        want = outputs(model, given)
        model.set_attn_implementation("fastvit_triton")
        assert torch.equal(outputs(model, given), want)  # on a CPU
        with interpreting(), torch.no_grad(), Recorder() as run:
            got = outputs(model, given)
        assert run.ours == ["attention_fwd"] * 2
        assert same(got, want)
    sizes = dict(hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48, vocab_size=9)
    text = transformers.CLIPTextModel(transformers.CLIPTextConfig(**sizes, eos_token_id=8)).eval()
    tokens = torch.tensor([[1, 2, 3, 8]])
    want = text(tokens).last_hidden_state
    text.set_attn_implementation("fastvit_triton")
    optimize(text)
    with interpreting(), torch.no_grad(), Recorder() as run:
        got = text(tokens).last_hidden_state
    assert run.ours.count("attention_fwd") == 1 and same(got, want)


@pytest.fixture
def process_group():
    """A group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    gc.collect()  # an engine freed after the group joins threads that may wait for the GIL
    torch.distributed.destroy_process_group()


@pytest.mark.few(1)
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_data_parallel_wrappers(wrap, references, process_group):
    """Oracle: gradients of the unwrapped model; the wrappers do their work even with one process."""
    from torch.distributed.fsdp import fully_shard

    plain, given = build("timm_deit3").train(), inputs("timm_deit3")
    model = copy.deepcopy(plain)
    optimize(model)
    if wrap == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
    else:
        for block in model.blocks:
            fully_shard(block)
        wrapped = fully_shard(model)
    wrapped(given).square().sum().backward()
    torch.distributed.barrier()
    plain(given).square().sum().backward()
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        grad = q.grad.to_local() if wrap == "fsdp2" else q.grad
        assert same(grad, p.grad), name


@pytest.mark.full
def test_models_that_fsdp2_sharded_are_converted_alike(process_group):
    """Oracle: report and operators of the model that is not sharded; classes and parameters are put back."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard
    from torch.distributed.tensor import DTensor

    found = []
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("outer", "inner"))
    for shards in (None, mesh["inner"], mesh):  # the last is sharded and replicated
        model = build("timm_deit3", torch.float32).eval()
        for module in () if shards is None else (*model.blocks, model):
            fully_shard(module, mesh=shards)
        rows = optimize(model).rows
        assert isinstance(model.blocks[0], FSDPModule) is (shards is not None)
        assert all(isinstance(parameter, DTensor) is (shards is not None) for parameter in model.parameters())
        with interpreting(), torch.no_grad(), Recorder() as run:
            model(inputs("timm_deit3", torch.float32))
        found.append(([(row.path, row.type, row.became, row.within) for row in rows], run.ours))
    assert found[0] == found[1] == found[2] and any(row[2] for row in found[0][0]) and found[0][1]


@pytest.mark.full
def test_layers_whose_weights_stay_sharded_in_the_forward_are_called(process_group):
    """Oracle: by hand; FSDP2 gathers neither parameters that tensor parallelism splits nor those in ignored_params."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("outer", "inner"))
    model = build("timm_deit3", torch.float32).eval()
    split, ignored = model.blocks[0].mlp.fc1, model.blocks[1].attn.proj
    split.weight = nn.Parameter(distribute_tensor(split.weight, mesh["inner"], [Shard(0)]))
    ignored.weight = nn.Parameter(distribute_tensor(ignored.weight, mesh["inner"], [Replicate()]))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["outer"], ignored_params={ignored.weight})
    called = [row.path for row in optimize(model).rows if (row.why or "").startswith("Linear is called")]
    assert called == ["blocks.0.mlp", "blocks.1.attn"]


PROBE = """
import importlib.metadata, sys, torch, fastvit_triton
model = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.TransformerEncoderLayer(4, 2, 8)).eval()
report = fastvit_triton.optimize(model)
assert (len(report.fused), len(report.norms)) == (2, 3)
installed = importlib.metadata.entry_points(group='torch_dynamo_backends', name='fastvit_triton')
for name in ('timm', 'transformers', 'torchvision', 'vit_pytorch', *(['torch._dynamo'] if installed else [])):
    assert name not in sys.modules, name
"""


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["mixer_s32_224", "pvt_v2_b0", "mobilevit_xxs", "crossvit_9_240"])
def test_an_unknown_model_is_partly_fused(name, references):
    """Oracle: the untouched model; its LayerNorms, MLPs and known attention are fused, and the rest is reported."""
    plain = redraw(timm.create_model(name, num_classes=5)).double().eval()
    model, side = copy.deepcopy(plain), plain.default_cfg["input_size"][-1]
    report = optimize(model)
    image = torch.randn(1, 3, side, side, dtype=torch.float64)
    with torch.no_grad():
        assert same(model(image), plain(image))
    assert (report.fused or report.norms) and all(row.why for row in report.left)


def test_filtered_modules_are_called():
    """Oracle: the operators that run; a fused block calls a filtered attention as a module."""
    model, given = build("timm_vit", torch.float32).eval(), inputs("timm_vit", torch.float32)
    want = outputs(model, given)
    optimize(model, filter_fn=lambda module, path: not path.startswith("blocks.0.attn"))
    with interpreting(), torch.no_grad(), Recorder() as run:
        assert same(outputs(model, given), want)
    assert run.ours.count("attention_fwd") == 1


def named_alike(module, bases, **members):
    """A class that `optimize` mistakes for the module's own class, as written by another release of its package."""
    cls = type(module)
    return type(cls.__name__, bases, members | {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


def rename(module):
    """Wraps the module in one of the same name without its attributes."""
    other = named_alike(module, (nn.Module,), forward=lambda self, *x, **more: self.hidden[0](*x, **more))()
    other.hidden, other.gradient_checkpointing = (module,), False  # a tuple hides it from modules()
    return other


def extend(module):
    """The module with one more argument in its forward."""
    own = type(module).forward
    module.__class__ = named_alike(
        module, (type(module),), forward=lambda self, *x, later=None, **more: own(self, *x, **more)
    )
    return module


TOWERS = ["hf_vit", "hf_dinov2_swiglu", "hf_dinov3", "hf_siglip"]
PLACES = [(t, {hooks.type_name(m): n for n, m in COMMON[t].make().named_modules()}) for t in TOWERS]
DECLARED = [(t, n, f) for t, names in PLACES for k, n in names.items() for f in FORWARDS.get(k, [])[:1]]
OTHER_RELEASES = [(t, n, rename, "it has no ") for t, n, f in DECLARED if f.needs]
OTHER_RELEASES += [("hf_siglip", "embeddings", rename, "it has no patch_embedding")]
OTHER_RELEASES += [(t, n, extend, "it takes later") for t, n, f in DECLARED if f.takes is not None]


@pytest.mark.few(3)
@pytest.mark.parametrize("name, path, change, why", sampled(OTHER_RELEASES, 5))
def test_a_module_of_another_release_is_not_fused(name, path, change, why):
    """Oracle: the model before the change; only that module runs its own forward, by itself and in a fused block."""
    model, given = build(name, torch.float32).eval(), inputs(name, torch.float32)
    want, usual = outputs(model, given), {row.path: row.became is None for row in optimize(copy.deepcopy(model)).rows}
    module = model.get_submodule(path)
    model.set_submodule(path, change(module))
    report = optimize(model)
    (row,) = (row for row in report.left if row.path == path)
    assert row.why.startswith(why) and ", which its fused forward " in row.why
    assert "forward" not in model.get_submodule(path).__dict__
    rows = {row.path: row.became is None for row in report.rows if row.path != path}
    assert rows.items() <= usual.items()
    with interpreting(), torch.no_grad():
        assert same(outputs(model, given), want)


@pytest.mark.full
@pytest.mark.parametrize("change", [rename, pytest.param(extend, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ["hf_vit", *(pytest.param(name, marks=pytest.mark.full) for name in TOWERS[1:])])
def test_models_with_modules_of_another_release_compile(name, change):
    """Oracle: the model before the changes of the test above, made to all modules at once and to the first layer."""
    model, given = build(name, torch.float32).eval(), inputs(name, torch.float32)
    want = outputs(model, given)
    paths = {re.sub(r"\.1$", ".0", path) for tower, path, how, _ in OTHER_RELEASES if (tower, how) == (name, change)}
    for path in sorted(paths, key=len, reverse=True):
        model.set_submodule(path, change(model.get_submodule(path)))
    left = {row.path for row in optimize(model).left}
    assert paths - left <= {"head.mlp"}  # hidden inside a renamed head
    with interpreting(), torch.no_grad():
        assert same(outputs(torch.compile(model, backend="aot_eager", fullgraph=True), given), want)
    torch._dynamo.reset()


class PackedGate(nn.Module):
    """DINOv2's SwiGLU as in older transformers: gate and value in one linear layer."""

    def __init__(self):
        super().__init__()
        self.weights_in, self.weights_out = nn.Linear(24, 96), nn.Linear(48, 24)

    def forward(self, hidden_state):
        gate, value = self.weights_in(hidden_state).chunk(2, dim=-1)
        return self.weights_out(nn.functional.silu(gate) * value)


def gate():
    own = transformers.models.dinov2.modeling_dinov2.Dinov2SwiGLUFFN
    return type(own.__name__, (PackedGate,), {"__module__": own.__module__, "__qualname__": own.__qualname__})()


def nested(drop=0.0):
    """An attention of nested modules whose classes have other names than those that are listed."""
    config = transformers.DPTConfig(**HF | dict(hidden_dropout_prob=drop), attn_implementation="sdpa")
    model = transformers.models.dpt.modeling_dpt.DPTViTAttention(config)
    for module in (model, model.attention, model.output):
        own = type(module)
        module.__class__ = type(f"Copied{own.__name__}", (own,), {"__module__": own.__module__})
    return model


class OtherSelfAttention(transformers.models.dpt.modeling_dpt.DPTSelfAttention):
    """The same submodules with another forward."""

    def forward(self, hidden_states, **more):
        return 2 * self.value(hidden_states), None


MASK = torch.linspace(-1, 1, 25, dtype=torch.float64).view(1, 1, 5, 5)


@pytest.mark.parametrize(
    "make, call",
    [(nested, {}), (lambda: nested(0.3), {}), (nested, {"head_mask": MASK}), (gate, {})],
    ids=["attention", "dropout", "head_mask", "gate"],
)
def test_modules_of_older_transformers_are_fused(make, call, references, monkeypatch):
    """Oracle: the modules' own forwards with the same seed; they run only where a mask is given."""
    own = forwards.original
    monkeypatch.setattr(forwards, "original", lambda *x, **more: calls.append(x[0]) or own(*x, **more))
    plain, x, calls = make().double().train(), torch.randn(2, 5, 24, dtype=torch.float64), []
    model = copy.deepcopy(plain)
    (row,) = optimize(model).fused
    assert row.path == "" and row.why in (None, f"it runs the code of {known_type(model).rpartition('.')[2]}")
    assert same(*(seeded(owner, x, **call) for owner in (model, plain))) and calls == ([model] if call else [])


def test_unknown_and_hooked_inner_modules_are_named():
    """Oracle: the sentences; an inner module that runs other code, or has a hook, is called."""
    model = nested()
    model.attention.__class__ = OtherSelfAttention
    assert "the code of OtherSelfAttention is not known" in str(optimize(model))
    model = nested()
    model.output.register_forward_hook(lambda *_: None)
    assert "CopiedDPTViTSelfOutput has a hook" in str(optimize(model))


def test_layer_norm_under_autocast_on_a_gpu(meta_is_a_gpu, monkeypatch):
    """Oracle: autocast's list for CUDA, where layer_norm runs in float32; half-precision inputs give float32 output."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda *_: torch.bfloat16)  # the meta device has none
    norm = nn.LayerNorm(8).to("meta")
    optimize(norm)
    for dtype in (torch.bfloat16, torch.float32):
        assert norm(torch.empty(2, 8, device="meta", dtype=dtype)).dtype == torch.float32


@pytest.mark.full
def test_no_other_package_is_imported():
    """Oracle: sys.modules of a fresh interpreter that optimises torch's modules: no other known package is imported."""
    run_python("-W", "error", "-c", PROBE)


def test_invalid_arguments_raise():
    """Oracle: one sentence that names the argument, states what was given and suggests a remedy."""
    for call in (optimize, revert):
        with pytest.raises(TypeError, match=r"model is str; give an nn.Module"):
            call("vit_base_patch16_224")
    with pytest.raises(TypeError, match="filter_fn is 3; give a function"):
        optimize(nn.Linear(2, 2), filter_fn=3)
    with pytest.raises(TypeError, match="verify is True; give an example input of the model"):
        optimize(nn.Linear(2, 2), verify=True)


@pytest.mark.parametrize("affine", [True, False])
def test_rms_norm_in_float32(affine, meta_is_a_gpu, monkeypatch):
    """Oracle: timm's RmsNormFp32, whose result has the dtype of x; a dtype that the kernel lacks runs as it is."""
    layer = timm.layers.norm.RmsNormFp32(24, affine=affine)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 5, 24, dtype=torch.float16)
    optimize(layer)
    for dtype in (torch.float32, torch.float16):  # of the weight
        layer.to(dtype)
        plain = type(layer).forward(layer, x)
        with using_backend("torch"):
            y = layer(x)
        assert y.dtype == plain.dtype == x.dtype and same(y, plain)
        assert torch.equal(layer(x.double()), type(layer).forward(layer, x.double()))
    assert torch.equal(layer(x.float()), type(layer).forward(layer, x.float()))
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda *_: torch.bfloat16)  # the meta device has none
    assert layer.to("meta")(x.to("meta")).dtype == x.dtype
