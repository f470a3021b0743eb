"""Tests of `benchmarks.coverage` on tiny models. Oracle: counts by hand, and those of `benchmarks.launches`."""

import json
import sys

import pytest

from benchmarks import capture_only, coverage
from benchmarks.launches import Setting, figures, trace
from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.kernels.settings import forcing

TINY = """
# a comment
timm vit_tiny_patch16_224 {"depth": 1}  # another
transformers ViTForImageClassification pixel_values=Bx3x32x32 {"hidden_size": 24, "num_hidden_layers": 1,\
 "num_attention_heads": 2, "intermediate_size": 48, "image_size": 32, "num_labels": 5}
transformers models.qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel\
 hidden_states=32x1176 grid_thw=[[1,4,4],[1,2,8]] {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 32}
transformers NoModel pixel_values=Bx3x32x32
vit_pytorch pit.PiT x=Bx3x32x32 {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 24, "depth": [1, 1],\
 "heads": 2, "mlp_dim": 48, "dim_head": 12}
""".replace("\\\n", "")


def test_entries():
    """Oracle: the words of each line; a line of one word raises."""
    found = coverage.entries(TINY)
    assert [entry.name.rpartition(".")[2].rpartition(":")[2] for entry in found] == [
        "vit_tiny_patch16_224",
        "ViTForImageClassification",
        "Qwen2VisionTransformerPretrainedModel",
        "NoModel",
        "PiT",
    ]
    assert found[0].inputs == () and json.loads(found[0].options) == {"depth": 1}
    assert found[2].inputs == (("hidden_states", "32x1176"), ("grid_thw", "[[1,4,4],[1,2,8]]"))
    assert coverage.entries("timm a  # {}\n") == [coverage.Entry("timm", "a")]
    with pytest.raises(ValueError, match="has one word; give a package, a model"):
        coverage.entries("timm")
    listed = coverage.entries(coverage.MODELS.read_text())
    assert len({entry.name for entry in listed}) == len(listed) >= 25


@pytest.mark.full
def test_rows():
    """Oracle: launches and bytes of `benchmarks.launches`; parameters of linear layers by hand."""
    timm, hf, qwen, missing, pit = map(coverage.guarded, coverage.entries(TINY))
    setting = Setting("timm:vit_tiny_patch16_224", 8, arch="sm_90", frozen=True, depth=1)
    with forcing("fused"):
        fused = trace(setting)[0].count
    default = figures(setting)
    assert timm["eager"] == [default["eager_launches"], default["eager_bytes"]]
    assert timm["fused"] == [fused.launches, fused.nbytes] and timm["default"] == [
        default["launches"],
        default["bytes"],
    ]
    assert sum(timm["plan"].values()) == 2 and timm["left"] == [] and timm["candidates"][0] == timm["candidates"][1]
    block, head = 12 * 192 * 192 + 9 * 192, 193 * 1000
    assert timm["inside"] == round(block / (block + head), 4) and timm["products"] > 0.99
    block, head = 4 * 24 * 25 + 24 * 48 + 48 + 48 * 24 + 24, 25 * 5
    assert hf["inside"] == round(block / (block + head), 4) and hf["fused"][0] < hf["eager"][0]
    assert "error" not in qwen and qwen["eager"][0] > 0
    assert pit["left"] == [[1, "Pool: unknown type"]]
    assert pit["fused"][0] < pit["eager"][0] and sum(pit["plan"].values()) == 4
    assert missing == {"model": "transformers:NoModel", "error": missing["error"]} and "NoModel" in missing["error"]


def test_towers(tmp_path, monkeypatch):
    """Oracle: models listed once, reasons for every exclusion, a share counted by hand, and no figures of a call."""
    listed = coverage.entries(coverage.TOWERS.read_text())
    assert len({entry.name for entry in listed}) == len(listed) >= 280
    assert all(entry.package in ("timm", "transformers") for entry in listed)
    reasons = coverage.excluded(coverage.EXCLUDED.read_text())
    assert len(reasons.keys() & {entry.name for entry in listed}) >= 15
    with pytest.raises(ValueError, match="has no reason; give package:model: reason"):
        coverage.excluded("timm:a")
    (tmp_path / "towers.txt").write_text(
        'timm vit_tiny_patch16_224 - {"depth": 1, "num_classes": 0}\ntimm resnet18 -\ntransformers ASTModel -\n'
    )
    monkeypatch.setattr(coverage, "TOWERS", tmp_path / "towers.txt")
    monkeypatch.setattr(sys, "argv", ["coverage", "towers", "--out", str(tmp_path), "--package", "timm"])
    coverage.main()
    rows = json.loads((tmp_path / "coverage-towers.json").read_text())["rows"]
    assert [row["model"] for row in rows] == ["timm:vit_tiny_patch16_224", "timm:resnet18"]
    assert rows[0]["inside"] == 1.0 and rows[1]["inside"] == 0.0 and "eager" not in rows[0]
    assert "| timm | 2 | 0 | 2 | 1 |" in (tmp_path / "coverage-towers.md").read_text()


DETECTOR = """
transformers ConditionalDetrForObjectDetection pixel_values=Bx3x128x64 pixel_mask=B*[[1,1],[1,0]] {"d_model": 32,\
 "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,\
 "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_queries": 5, "use_timm_backbone": false, "backbone": null,\
 "backbone_config": {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8, 8, 16],\
 "depths": [1, 1, 1, 1], "layer_type": "basic", "out_features": ["stage4"]}}
""".replace("\\\n", "")


@pytest.mark.full
def test_detection(tmp_path, monkeypatch):
    """Oracle: no reader knows these decoder layers, which are captured; eager PyTorch launches what it does without."""
    listed = coverage.entries(coverage.DETECTION.read_text())
    assert len({entry.name for entry in listed}) == len(listed) >= 12
    (entry,) = coverage.entries(DETECTOR)
    _, named = coverage.inputs_of(entry, coverage.build(entry))
    example = coverage.example_of(named)
    assert (
        named["pixel_mask"].shape == (coverage.BATCH, 2, 2) and example["pixel_mask"].tolist() == [[[1, 1], [1, 0]]] * 2
    )
    assert example["pixel_values"].shape == (2, 3, 64, 32)
    (tmp_path / "detection.txt").write_text(DETECTOR)
    monkeypatch.setattr(coverage, "DETECTION", tmp_path / "detection.txt")
    monkeypatch.setattr(sys, "argv", ["coverage", "detection", "--out", str(tmp_path)])
    coverage.main()
    (row,) = json.loads((tmp_path / "coverage-detection.json").read_text())["rows"]
    known = coverage.row_of(entry)
    assert [what for _, what in known["left"] if "Layer: it needs an example" in what]
    assert not [what for _, what in row["left"] if "Layer" in what]
    assert row["eager"] == known["eager"] and row["fused"][0] < known["fused"][0] < row["eager"][0]
    assert row["inside"] > known["inside"] and row["products"] > known["products"]


@pytest.mark.full
def test_capture_only(tmp_path, monkeypatch):
    """Oracle: by hand, two blocks of five launches, and around them four, or five if PyTorch computes the stem.

    The weights are random, so the outputs of two conversions that compute another function would differ.
    """
    case = next(case for case in capture_only.CASES if case.name == "timm:vit_tiny_patch16_224")
    monkeypatch.setattr(
        capture_only,
        "CASES",
        (case, case._replace(name="broken", build={"_target_": "operator.truediv", "_args_": [1, 0]})),
    )
    with using_backend("torch"):
        capture_only.main("", tmp_path)
    row, broken = json.loads((tmp_path / "coverage-capture.json").read_text())["rows"]
    for way, stem in (("readers", 4), ("captured", 5)):
        assert row[way]["launches"] == 2 * 5 + stem and row[way]["products"] == 1 and row[way]["attention"] == [2, 2]
        assert row[way]["error"] < 1e-12
    assert row["captured"]["seconds"] > row["readers"]["seconds"] and min(row["calls"]) > 5
    assert broken == dict(model="broken", error="ZeroDivisionError: division by zero")
    cells = (tmp_path / "coverage-capture.md").read_text().split("| --: |\n")[1].split(" | ")
    assert cells[:4] == ["| timm:vit_tiny_patch16_224", "100% → 100%", "2 of 2 → 2 of 2", "14 → 15"]


def test_command(tmp_path, monkeypatch, capsys):
    """Oracle: the rows in the file, the cells of the table and the provenance; --only selects by name."""
    (tmp_path / "models.txt").write_text(TINY)
    monkeypatch.setattr(coverage, "MODELS", tmp_path / "models.txt")
    monkeypatch.setattr(sys, "argv", ["coverage", "--out", str(tmp_path), "--only", "timm|NoModel"])
    coverage.main()
    result = json.loads((tmp_path / "coverage.json").read_text())
    assert [row["model"] for row in result["rows"]] == ["timm:vit_tiny_patch16_224", "transformers:NoModel"]
    assert {"command", "date", "commit", "packages", "note"} <= result.keys()
    row, text = result["rows"][0], (tmp_path / "coverage.md").read_text()
    assert (
        f"| {row['eager'][0]} → {row['fused'][0]} (" in text
        and f"| transformers:NoModel | {result['rows'][1]['error']}" in text
    )
    assert capsys.readouterr().out.count("\n") == 2
    monkeypatch.setattr(sys, "argv", ["coverage", "--only", "nothing"])
    with pytest.raises(SystemExit):
        coverage.main()
    assert "--only nothing matches no model" in capsys.readouterr().err
