"""Tests of shards and folders on several ranks. Oracle: each sample once per epoch, for any ranks and resume point."""

import io
import itertools
import tarfile
from pathlib import Path

import pytest
import torch
from PIL import Image
from sampling import marked
from webdataset import tariterators

from fastvit_triton.cli import main
from fastvit_triton.train.data.folder import FolderBatches, scan_folder
from fastvit_triton.train.data.shards import pack, scan_shards, windowed
from fastvit_triton.train.data.transform import Transform
from fastvit_triton.train.distributed import World
from fastvit_triton.train.recipes import FOLDER, override_recipe
from fastvit_triton.train.rng import get_rng_state, set_rng_state
from fastvit_triton.train.sources import load

COUNT, BATCH = 67, 8  # 67 images make 9 batches of 8, the last of 3, which no number of processes divides evenly
TRANSFORM = Transform((4, 4), (0.0,), (1.0,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder in which image i has grey level 3 i and class i mod 3."""
    root = tmp_path_factory.mktemp("images")
    for split, count in (("train", COUNT), ("val", 5)):
        for i in range(count):
            place = root / split / f"class {i % 3}"
            place.mkdir(parents=True, exist_ok=True)
            Image.new("L", (5, 4), 3 * i).save(place / f"{i:03d}.png")
    return root


@pytest.fixture(scope="module")
def packed(folder, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "100% shards"
    pack(folder, out, per_shard=10)
    return out


def batches(root: Path, world: World, workers: int = 0, crop: dict | None = None) -> FolderBatches:
    crop = {"min_area": 1.0} if crop is None else crop
    if (root / "classes.txt").exists():
        images = scan_shards(root, "train")
    else:
        images = scan_folder(root, "train")
    return FolderBatches(root, images, TRANSFORM, batch_size=BATCH, crop=crop, workers=workers, world=world)


def seen(stream) -> list[list[tuple[int, int]]]:
    """(image, class) of each batch, recovered from the pixels."""
    return [
        [
            (round(image.mean().item() * 255) // 3, target)
            for image, target in zip(images, targets.tolist(), strict=True)
        ]
        for images, targets in stream
    ]


def all_ranks(root: Path, size: int, workers: int, start: int = 0, stop: int | None = None) -> list:
    """What `size` ranks read in one epoch, rank by rank, batch by batch, from the same random state."""
    here, found = get_rng_state(), []
    for rank in range(size):
        set_rng_state(here)
        found.append(seen(itertools.islice(batches(root, World(rank, size), workers).iter_from(start), stop)))
    return found


WHOLE = {(i, i % 3) for i in range(COUNT)}


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", ["folder", "packed"])
@pytest.mark.parametrize("size", marked([1, 2, 3, 5, 11], pytest.mark.fast, lambda size: size <= 3))
@pytest.mark.parametrize("workers", [0, 2])
def test_each_sample_is_seen_once(kind, size, workers, request):
    """Oracle: the images written. Batches are those of one process, cut into slices whose sizes differ by one."""
    root = request.getfixturevalue(kind)
    torch.manual_seed(3)
    alone = all_ranks(root, 1, 0)[0]
    torch.manual_seed(3)
    found = all_ranks(root, size, workers)
    assert [len(rank) for rank in found] == [9] * size
    for number, ranks in enumerate(zip(*found, strict=True)):
        assert [sample for rank in ranks for sample in rank] == alone[number]
        assert max(map(len, ranks)) - min(map(len, ranks)) <= 1
    flat = [sample for rank in found for batch in rank for sample in batch]
    assert len(flat) == COUNT and set(flat) == WHOLE


@pytest.mark.fast
@pytest.mark.parametrize("kind", ["folder", "packed"])
def test_an_epoch_continues_with_another_number_of_processes(kind, request):
    """Oracle: one process's order: three processes stop after four batches and two continue; no repeats, no gaps."""
    root = request.getfixturevalue(kind)
    torch.manual_seed(4)
    began = get_rng_state()
    alone = all_ranks(root, 1, 0)[0]
    set_rng_state(began)
    first = all_ranks(root, 3, 0, stop=4)
    set_rng_state(began)
    rest = all_ranks(root, 2, 0, start=4)
    joined = [[s for rank in ranks for s in rank] for ranks in (*zip(*first, strict=True), *zip(*rest, strict=True))]
    assert joined == alone


def test_epochs_differ_and_seeds_repeat(packed):
    """Oracle: the same seed gives the same epochs, and the second epoch differs from the first."""
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        source = batches(packed, World())
        runs.append([seen(source), seen(source)])
    assert runs[0] == runs[1] and runs[0] != runs[2]
    assert runs[0][0] != runs[0][1]
    assert all({sample for batch in epoch for sample in batch} == WHOLE for run in runs for epoch in run)


@pytest.mark.fast
def test_windows_open_few_shards():
    """Oracle: a permutation in which a window's samples come from no more shards than the window has."""
    counts = [4, 0, 7, 1, 5, 5, 3]
    order = windowed(counts, window=2)
    assert sorted(order.tolist()) == list(range(sum(counts)))
    owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))[order].tolist()
    runs = [owner.index(shard) for shard in dict.fromkeys(owner)]
    last = [len(owner) - 1 - owner[::-1].index(shard) for shard in dict.fromkeys(owner)]
    open_shards = [sum(a <= i <= b for a, b in zip(runs, last, strict=True)) for i in range(len(owner))]
    assert max(open_shards) == 2
    torch.manual_seed(0)
    draws = torch.stack([windowed([3, 3, 3], window=3) for _ in range(4000)])
    share = (draws[:, :1] == torch.arange(9)).double().mean(0)  # each sample comes first with probability 1/9
    assert ((share - 1 / 9).abs() < 5 * (1 / 9 * 8 / 9 / 4000) ** 0.5).all()


@pytest.mark.fast
def test_webdataset_reads_our_shards(folder, packed):
    """Oracle: the webdataset package's reading of the same files, and the bytes of the folder's images."""
    samples, targets, classes, decode = scan_shards(packed, "train")[:4]
    assert classes == ("class 0", "class 1", "class 2") and len(samples) == COUNT
    urls = [str(path) for path in sorted((packed / "train").glob("*.tar"))]
    assert len(urls) == 7
    theirs = []
    for url in urls:
        with open(url, "rb") as stream:
            theirs += tariterators.group_by_keys(tariterators.tar_file_expander([{"url": url, "stream": stream}]))
    for name, target, sample in zip(samples, targets, theirs, strict=True):
        first, count = map(int, name.parent.name.split("+"))
        assert name.parent.parent.read_bytes()[first : first + count] == sample["png"]
        assert target == int(sample["cls"]) and name.name == sample["__key__"] + ".png"
        assert decode(name).getpixel((0, 0)) == Image.open(io.BytesIO(sample["png"])).getpixel((0, 0))
    whole = {path.read_bytes() for path in (folder / "train").rglob("*.png")}
    assert {sample["png"] for sample in theirs} == whole and len(whole) == COUNT


def test_load_takes_shards(folder, packed, tmp_path, capsys):
    """Oracle: `pack` and `--data` give the same classes and test images as the packed folder."""
    assert main(["pack", str(folder), str(tmp_path / "out"), "--per-shard", "30"]) == 0
    assert capsys.readouterr().out.endswith("holds 3 of train/ and 1 of val/ shards\n")
    assert main(["pack", str(folder), str(tmp_path / "none"), "--per-shard", "0"]) == 2
    assert "--per-shard is 0" in capsys.readouterr().err and not (tmp_path / "none").exists()
    recipe = override_recipe(FOLDER, img_size=8, batch_size=4)
    data = load(str(packed), recipe)
    assert data.classes == ("class 0", "class 1", "class 2") and len(data.train) == 17
    assert sum(len(targets) for _, targets in data.test) == 5
    assert data.test.display_image(0).shape == (3, 8, 8)


def tar(path: Path, **members: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name.replace("_", "."))
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


@pytest.mark.fast
def test_invalid_shards_raise(folder, packed, tmp_path):
    """Oracle: one sentence each: no shards, no class number, damaged or foreign file, few names, existing folder."""
    png = next((folder / "train").rglob("*.png")).read_bytes()
    with pytest.raises(ValueError, match="holds no shards"):
        scan_shards(tmp_path, "train")
    tar(tmp_path / "a/train/0.tar", x_png=png)
    with pytest.raises(ValueError, match=r"0.tar has x.png without a class number; add /?x.cls"):
        scan_shards(tmp_path / "a", "train")
    tar(tmp_path / "b/train/0.tar", x_cls=b"1")
    with pytest.raises(ValueError, match="holds no images"):
        scan_shards(tmp_path / "b", "train")
    whole = (packed / "train/000000.tar").read_bytes()
    for name, content in {"cut": whole[: len(whole) // 2 + 100], "foreign": png}.items():
        place = tmp_path / name / "train/0.tar"
        place.parent.mkdir(parents=True)
        place.write_bytes(content)
        with pytest.raises(ValueError, match="damaged or not a plain tar file"):
            scan_shards(tmp_path / name, "train")
    tar(tmp_path / "c/train/0.tar", x_png=png, x_cls=b"7")
    assert scan_shards(tmp_path / "c", "train").classes == tuple("01234567")
    (tmp_path / "c/classes.txt").write_text("one\n")
    with pytest.raises(ValueError, match="class number 7, but only 1 class names"):
        scan_shards(tmp_path / "c", "train")
    with pytest.raises(ValueError, match="exists; give a new folder"):
        pack(folder, packed)
