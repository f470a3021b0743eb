"""Tests of our models in timm's registry. Oracle: timm, and `fastvit_triton.create_model`."""

import copy
import importlib
import sys

import pytest
import timm
import torch
from timm.models import _registry as registry

import fastvit_triton
from fastvit_triton.checkpoints.tensors import WeightsError
from fastvit_triton.integrations import timm as ours

NAME = "vit_tiny_patch16_224"
TABLES = [name for name, value in vars(registry).items() if name.startswith("_mod") and isinstance(value, dict | set)]


@pytest.fixture
def before(monkeypatch):
    """timm's tables before our models are registered; as they were again afterwards."""
    kept = {name: getattr(registry, name) for name in TABLES}
    for name, table in kept.items():
        kept[name] = copy.copy(table)
        for key in [key for key in table if key.startswith(("fvt_", ours.MODULE))]:  # of an earlier test
            kept[name].remove(key) if isinstance(table, set) else kept[name].pop(key)
        monkeypatch.setattr(registry, name, copy.copy(kept[name]))
    monkeypatch.delitem(sys.modules, ours.MODULE, raising=False)
    yield kept
    sys.modules.pop(ours.MODULE, None)


OPTIONS = {
    "usual": {},
    "with norms": dict(qk_norm=True, proj_drop_rate=0.1),
    "with dropout": dict(attn_drop_rate=0.5),
    "without biases": dict(qkv_bias=False, proj_bias=False),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_attention_by_name(before, monkeypatch, options):
    """Oracle: timm's model with the same weights, output and gradients; keys, types, `revert`, and timm's own kinds.

    The attention alone equals timm's also with a mask, and causal.
    """
    kinds = dict(timm.models.vision_transformer.ATTN_LAYERS)
    monkeypatch.setattr(timm.models.vision_transformer, "ATTN_LAYERS", dict(kinds))
    ours.register()
    now = timm.models.vision_transformer.ATTN_LAYERS
    assert {name: now[name] for name in kinds} == kinds and now.keys() - kinds.keys() <= {"fastvit_triton"}
    sizes = dict(embed_dim=48, depth=2, num_heads=3, img_size=32, num_classes=5) | options
    theirs = timm.create_model(NAME, **sizes)
    model = timm.create_model(NAME, attn_layer="fastvit_triton", **sizes)
    model.load_state_dict(theirs.state_dict())
    assert [type(block.attn) for block in model.blocks] == [type(block.attn) for block in theirs.blocks]
    assert all("forward" in vars(block.attn) for block in model.blocks)
    images = torch.randn(2, 3, 32, 32)
    for module in (model, theirs):
        torch.manual_seed(0)
        with fastvit_triton.kernels.backend.using_backend("torch"):
            module.train()(images).square().sum().backward()
    for (name, a), (_, b) in zip(model.named_parameters(), theirs.named_parameters(), strict=True):
        assert (a.grad - b.grad).norm() <= 256 * torch.finfo(torch.float32).eps * b.grad.norm().clamp(min=1e-6), name
    tokens, later = torch.randn(2, 5, 48), torch.ones(5, 5, dtype=torch.bool).triu(1)
    for given in ({}, dict(attn_mask=~later), dict(attn_mask=later * -1.5), dict(is_causal=True)):
        with fastvit_triton.kernels.backend.using_backend("torch"), torch.no_grad():
            got, want = (module.eval().blocks[0].attn(tokens, **given) for module in (model, theirs))
        assert (got - want).norm() <= 64 * torch.finfo(torch.float32).eps * want.norm(), given
    fastvit_triton.revert(model)
    assert not any("forward" in vars(block.attn) for block in model.blocks)


def test_timms_entries_are_unchanged(before):
    """Oracle: every entry of every table of timm's registry before; new entries are ours; a second call adds none."""
    names = ours.register()
    others = {
        name for name in fastvit_triton.list_models() if name.startswith(("igpt", "image_transformer", "ipt", "setr"))
    }
    others |= set(fastvit_triton.list_models("*detr_*"))  # models whose output are no classes
    assert set(names) == {f"fvt_{name}" for name in fastvit_triton.list_models() if name not in others}
    sizes = {name: len(getattr(registry, name)) for name in before}
    assert ours.register() == names and sizes == {name: len(getattr(registry, name)) for name in before}
    for table, entries in before.items():
        now = getattr(registry, table)
        assert now is not entries and all(key in now for key in entries)
        if isinstance(entries, dict):
            assert all(now[key] is value for key, value in entries.items()), table
        added = set(now) - set(entries)
        assert (added or "deprecated" in table) and all(str(key).startswith(("fvt_", ours.MODULE)) for key in added), (
            table
        )
    assert timm.list_models(module=ours.MODULE) == timm.list_models("fvt_*")


def test_configurations_are_timms(before):
    """Oracle: timm's default_cfg of the same name; ours also states the size that the model was built for."""
    ours.register()
    options = dict(num_classes=3, img_size=32, drop_rate=0.0, drop_path_rate=0.1)
    model, theirs = (timm.create_model(name, **options) for name in (f"fvt_{NAME}", NAME))
    for name in (f"fvt_{NAME}", f"fvt_{NAME}.augreg_in21k"):
        got, want = (timm.get_pretrained_cfg(n).to_dict() for n in (name, name.removeprefix("fvt_")))
        same = ("tag", "mean", "std", "input_size", "crop_pct", "interpolation", "num_classes", "hf_hub_id")
        assert {key: got[key] for key in same} == {key: want[key] for key in same}
    assert timm.is_model_pretrained(f"fvt_{NAME}.augreg_in21k") and not timm.is_model_pretrained("fvt_attention_conv")
    assert timm.data.resolve_model_data_config(model) == timm.data.resolve_model_data_config(theirs) | {
        "input_size": (3, 32, 32)
    }
    assert model.default_cfg["classifier"] == theirs.default_cfg["classifier"] == "head"
    assert model.default_cfg is model.pretrained_cfg and model.num_classes == 3
    assert model.config.drop_path_rate == 0.1
    assert model.state_dict().keys() == theirs.state_dict().keys()


def test_a_model_that_timm_has_not(before):
    """Oracle: its own size, classes and channels."""
    ours.register()
    cfg = timm.get_pretrained_cfg("fvt_vit_digits_patch2_8")
    assert (cfg.input_size, cfg.num_classes, cfg.fixed_input_size) == ((1, 8, 8), 10, True)
    model = timm.create_model("fvt_vit_digits_patch2_8", drop_rate=0.0)
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_weights_come_from_a_checkpoint_or_the_tag(before, tmp_path, monkeypatch):
    """Oracle: the tensors of timm's model; and the name that `create_model` is asked for."""
    ours.register()
    theirs = timm.create_model(NAME, img_size=32)
    torch.save(theirs.state_dict(), tmp_path / "vit.pth")
    model = timm.create_model(f"fvt_{NAME}", img_size=32, checkpoint_path=str(tmp_path / "vit.pth"))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), theirs.parameters(), strict=True))
    asked = []
    monkeypatch.setattr(ours, "create_model", lambda name, **options: asked.append((name, options)) or model)
    timm.create_model(f"fvt_{NAME}.augreg_in21k", pretrained=True)
    timm.create_model(f"fvt_{NAME}", pretrained=True, num_classes=2)
    assert asked[0] == (f"{NAME}.augreg_in21k", {"pretrained": True})
    assert asked[1] == (f"{NAME}.augreg_in21k_ft_in1k", {"pretrained": True, "num_classes": 2})
    with pytest.raises(WeightsError, match="takes no file; load the weights by checkpoint_path"):
        timm.create_model(f"fvt_{NAME}", pretrained=True, pretrained_cfg_overlay={"file": "x.npz"})


def test_scripts_of_timm_find_our_models(before, tmp_path, monkeypatch, capsys):
    """Oracle: what a script prints that makes, trains and saves a model as timm's train.py does, with its arguments."""
    (tmp_path / "train.py").write_text(
        """import sys, timm, torch
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3
model = timm.create_model(sys.argv[1], pretrained=False, in_chans=None, num_classes=2, drop_rate=0.0, drop_path=None,
                          drop_block_rate=None, global_pool=None, bn_momentum=None, scriptable=False, img_size=32)
size = timm.data.resolve_data_config({}, model=model)["input_size"]
ema, optimiser = ModelEmaV3(model), create_optimizer_v2(model, opt="adamw", lr=1e-2, layer_decay=0.75)
before = [p.clone() for p in model.parameters()]
torch.nn.functional.cross_entropy(model(torch.randn(2, *size)), torch.tensor([0, 1])).backward()
optimiser.step(); ema.update(model)
print(__name__, size, any(not torch.equal(a, b) for a, b in zip(model.parameters(), before)))
"""
    )
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    ours.main([str(tmp_path / "train.py"), f"fvt_{NAME}"])
    assert capsys.readouterr().out == "__main__ (3, 32, 32) True\n"
    with pytest.raises(SystemExit, match=r"give a script of timm and its arguments, such as train\.py --model"):
        ours.main([])


def test_importing_the_integration_leaves_timm_alone(before):
    """Oracle: the registry's tables."""
    importlib.reload(ours)
    assert all(set(getattr(registry, name)) == set(entries) for name, entries in before.items())
