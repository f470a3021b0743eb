"""Model cards and `push`: metadata that the Hub's client reads, code that runs as printed, and what is refused."""

import importlib.util
import io
import json
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import huggingface_hub
import pytest
import torch
from commands import prints, refused
from hub_server import HubServer
from huggingface_hub import constants
from scipy.stats import binomtest
from test_hub import SMALL, hub, picture, randomize  # noqa: F401  (hub is a fixture)

from fastvit_triton import create_model, load_model
from fastvit_triton.cli import main
from fastvit_triton.models.weights.load import save_weights
from fastvit_triton.models.weights.publish import save_pretrained

NAME = "vit_tiny_patch16_224"
CLASSES = ["a*b", "caf\u00e9 cup", "_temple_"]
TRAINING = {
    "classes": CLASSES,
    "data": "/home/me/photos",
    "recipe": "folder",
    "weights": "/home/me/first.safetensors",
    "train_images": 120,
    "test_images": 24,
    "test_accuracy": 23 / 24,
}


def header(**changes: object) -> dict[str, str]:
    return {"training": json.dumps(TRAINING | changes)}


def trained(folder: Path, **changes: object) -> Path:
    """A file of weights as `train` writes it."""
    model = randomize(create_model(NAME, **SMALL, num_classes=3))
    model.pretrained_cfg = {"label_names": CLASSES, "mean": (0.5,) * 3, "std": (0.5,) * 3}
    folder.mkdir()
    save_weights(model, folder / "model.safetensors", metadata=header(**changes))
    return folder


def executed(card: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the code of a card prints, run as it is printed, in a folder with photo.jpg."""
    ((language, code),) = re.findall(r"```(\w+)\n(.*?)```", card, re.DOTALL)
    picture(50, 40).save(folder / "photo.jpg")
    monkeypatch.chdir(folder)
    page = io.StringIO()
    with redirect_stdout(page):
        if language == "python":
            exec(code, {"__name__": "card"})
        else:
            assert main(code.split()[1:]) == 0
    return page.getvalue()


@pytest.mark.fast
def test_metadata_of_a_card(tmp_path: Path):
    """Oracle: huggingface_hub's reader, and SciPy's interval of 23 of 24 images."""
    model, metadata = load_model(trained(tmp_path / "run"))
    model.save_pretrained(tmp_path / "photos", metadata=metadata, license="mit")
    card = huggingface_hub.ModelCard.load(tmp_path / "photos" / "README.md")
    assert (card.data.license, card.data.library_name, card.data.pipeline_tag) == (
        ("mit", "fastvit_triton", "image-classification")
    )
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_name) == ("accuracy", 0.9583, "photos")
    low, high = binomtest(23, 24).proportion_ci(method="wilson")
    facts = result.metric_args
    assert facts["test_images"] == 24 and facts["interval_95"] == [round(low, 4), round(high, 4)]
    text = card.text
    assert "| accuracy | 96 % | 80 to 99 % |" in text and "On 24 test images of photos." in text
    assert r"3, in the order of the outputs: a\*b, café cup, \_temple\_" in text
    assert "- Data set: photos\n- Training images: 120\n" in text and "- Trained from: first.safetensors" in text
    assert "- Licence: mit" in text and "/home" not in str(card)


@pytest.mark.fast
def test_cards_state_what_is_unknown(tmp_path: Path):
    """Oracle: by hand: without header, licence, test images or classes; a data set of the Hub; a detector."""
    create_model(NAME, **SMALL, num_classes=0).save_pretrained(tmp_path / "a")
    text = (tmp_path / "a" / "README.md").read_text(encoding="utf-8")
    assert 'license: "apache-2.0"' in text  # of the published weights of that name
    assert "None is recorded" in text and "no classifier" in text and "Data set: unknown" in text
    metadata = header(data="hf:me/pets:train,test", test_images=None)
    create_model(NAME, **SMALL, num_classes=3).save_pretrained(tmp_path / "b", metadata=metadata)
    card = huggingface_hub.ModelCard.load(tmp_path / "b" / "README.md")
    assert card.data.license == "unknown" and card.data.datasets == ["me/pets"] and "Licence: unknown;" in card.text
    assert "| accuracy | 95.8 % | - |" in card.text and "interval" not in card.text.split("Test scores")[1][30:]
    scores = dict(test_ap=0.5, test_ap50=0.75, test_ap_low=0.375, test_ap_high=0.625, test_accuracy=None)
    create_model("detr_digits").save_pretrained(tmp_path / "c", metadata=header(**scores))
    card = huggingface_hub.ModelCard.load(tmp_path / "c" / "README.md")
    kinds = {result.metric_type: result for result in card.data.eval_results}
    assert kinds.keys() == {"mean_average_precision", "ap50"} and card.data.pipeline_tag == "object-detection"
    assert kinds["mean_average_precision"].metric_args["interval_95"] == [0.375, 0.625]
    assert "| AP | 50 % | 38 to 62 % |" in card.text and "a bootstrap over images" in card.text


@pytest.mark.parametrize("layout", ["fastvit_triton", "timm", "transformers"])
def test_the_code_of_a_card_runs_in_its_folder(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Oracle: the model's own logits or probabilities of the photo, from what the code prints."""
    from fastvit_triton import predict

    model, metadata = load_model(trained(tmp_path / "run"))
    save_pretrained(model, tmp_path / "out", metadata, layout)
    text = executed((tmp_path / "out" / "README.md").read_text(encoding="utf-8"), tmp_path / "out", monkeypatch)
    ((best, share), *_) = predict(model, tmp_path / "out" / "photo.jpg")[0]
    if layout == "fastvit_triton":
        assert text.splitlines()[0] == f"{best}: {100 * share:.1f} %" and len(text.splitlines()) == 3
    else:
        logits = [float(number) for number in re.findall(r"-?\d+\.\d+(?:e-?\d+)?", text)]
        assert len(logits) == 3 and CLASSES[torch.tensor(logits).argmax()] == best


@pytest.mark.full
@pytest.mark.parametrize("name", ["detr_digits", "igpt_small", "setr_digits", "vit_digits_patch2_8"])
def test_the_code_of_other_tasks_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Oracle: none of the results; the code ends without an error, and prints or writes something."""
    small = {
        "igpt_small": dict(img_size=4, depth=1, embed_dim=16, num_heads=2),
        "vit_digits_patch2_8": dict(num_classes=0),
    }
    model = create_model(name, **small.get(name, {}))
    model.save_pretrained(tmp_path / "out", metadata={"training": "{}"})
    text = executed((tmp_path / "out" / "README.md").read_text(encoding="utf-8"), tmp_path / "out", monkeypatch)
    assert text and (tmp_path / "out" / "samples.png").exists() == (name == "igpt_small")


@pytest.fixture
def login(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:  # noqa: F811
    """A function that logs in with a token, or out."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)

    def set_token(token: str | None) -> None:
        monkeypatch.delenv("HF_TOKEN", raising=False) if token is None else monkeypatch.setenv("HF_TOKEN", token)

    return set_token


def test_push(hub: HubServer, login, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):  # noqa: F811
    """Oracle: the files that a server has then, whose code loads the model from it; no folder of this machine."""
    run = trained(tmp_path / "run")
    login("hf_good")
    said = prints(capsys, "push", run, "me/photos", "--license", "mit")
    assert f"published as {hub.url}/me/photos/commit/" in said and "--checkpoint hf-hub:me/photos" in said
    files = hub.repositories["me/photos"]["main"]
    assert set(files) >= {"README.md", "config.json", "model.safetensors"}
    assert not any(b"/home/me" in content for content in files.values())
    card = files["README.md"].decode()
    assert 'license: "mit"' in card and "hf-hub:me/photos" in card and "this folder" not in card
    (tmp_path / "elsewhere").mkdir()
    text = executed(card, tmp_path / "elsewhere", monkeypatch)
    assert sorted(line.split(": ")[0] for line in text.splitlines()) == sorted(CLASSES)


def test_push_refuses_in_one_sentence(hub: HubServer, login, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):  # noqa: F811
    """Oracle: the sentence that names what is missing: a name, a run, a token that may write, a user, the package."""
    run = trained(tmp_path / "run")
    assert "REPO is 'photos'; use USER/NAME" in refused(capsys, "push", run, "photos")
    assert "there is no checkpoint" in refused(capsys, "push", tmp_path / "no.safetensors", "me/photos")
    remedy = "set HF_TOKEN to a token that may write, or run hf auth login"
    for token, name, sentence in [
        (None, "me/photos", f"there is no token; {remedy}"),
        ("hf_bad", "me/photos", f"the Hub does not know the token; {remedy}"),
        ("hf_read", "me/photos", "the token may not write there; use a name of your own"),
        ("hf_good", "nobody/photos", "the Hub has no such user, organisation, repository or branch"),
    ]:
        login(token)
        assert f"{name} was not published: {sentence}" in refused(capsys, "push", run, name)
    assert not hub.repositories
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'fastvit_triton[hub]'" in refused(capsys, "push", run, "me/photos")
