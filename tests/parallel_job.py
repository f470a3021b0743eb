"""The job that each process of `tests/test_parallel.py` runs under torchrun: it measures and writes one JSON file.

    torchrun --nproc-per-node 2 tests/parallel_job.py <folder> [compiled]

The error of a gradient or weight is listed as (‖got − float64‖, the same for one process without engines, ‖float64‖).
"""

import faulthandler
import functools
import json
import shutil
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fastvit_triton import create_model, optimize
from fastvit_triton.train import checkpoint
from fastvit_triton.train.data import Data, TensorBatches
from fastvit_triton.train.data.transform import Transform
from fastvit_triton.train.distributed import World, process_group
from fastvit_triton.train.distributed.checkpoint import (
    full_state,
    load_full_state,
    load_sharded,
    newest_sharded,
    save_sharded,
)
from fastvit_triton.train.distributed.parallel import checkpoint_blocks, ddp, find_blocks, fsdp
from fastvit_triton.train.recipes import Recipe
from fastvit_triton.train.run import Run
from fastvit_triton.train.sources import load
from fastvit_triton.train.trainer import build_trainer

LR, STEPS = 0.5, 3
CLIP = 1.0


class Foreign(nn.Module):
    """A third-party model with blocks that `optimize` recognises."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 4, 4)
        options = dict(dim_feedforward=32, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, **options) for _ in range(2))
        self.head = nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images).flatten(2).mT
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def ours() -> nn.Module:
    torch.manual_seed(0)
    return create_model("vit_digits_patch2_8", embed_dim=16, depth=2, num_heads=2)


def small() -> nn.Module:
    torch.manual_seed(0)
    return create_model("vit_digits_patch2_8", embed_dim=16, depth=1, num_heads=1, patch_size=4)


def foreign() -> nn.Module:
    torch.manual_seed(0)
    return Foreign()


def batch(count: int, step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1 + step)
    return torch.randn(count, 1, 8, 8, generator=generator), torch.randint(10, (count,), generator=generator)


def share(world: World, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, int]:
    """This rank's slice of a batch; if it is empty, one image with weight 0."""
    mine = images.tensor_split(world.world_size)[world.rank], targets.tensor_split(world.world_size)[world.rank]
    return (*mine, len(mine[0])) if len(mine[0]) else (images[:1], targets[:1], 0)


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().double().clone()  # clipping writes to gradients


def bare(model: nn.Module) -> nn.Module:
    return getattr(model, "module", model)


def train(model: nn.Module, world: World, images: int = 10, steps: int = STEPS) -> tuple[dict, dict]:
    """(gradients of the first step, weights after the last step) by name."""
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        x, y, count = share(world, *batch(images, step))
        optimizer.zero_grad()
        world.rescale_mean(F.cross_entropy(model(x.to(dtype)), y), count).backward()
        if step == 0:
            grads = {name: whole(p.grad) for name, p in bare(model).named_parameters()}
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return grads, {name: whole(p) for name, p in bare(model).named_parameters()}


@functools.cache
def references(make, images: int) -> tuple:
    """Results in float64 and float32 on one process."""
    steps = 1 if images == 2 else STEPS
    return train(make().double(), World(), images, steps), train(make(), World(), images, steps)


def errors(make, got: tuple[dict, dict], images: int) -> dict[str, list]:
    exact, plain = references(make, images)
    table = {}
    for kind, ours, single, want in zip(("grad", "weight"), got, plain, exact, strict=True):
        for name, value in want.items():
            norms = (ours[name] - value, single[name] - value, value)
            table[f"{kind} {name}"] = [norm.norm().item() for norm in norms]
    return table


class Half(nn.Module):
    """`ours` computed with weights rounded to bfloat16 and float32 gradients, like FSDP2's mixed precision."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = ours()

    def forward(self, images: Tensor) -> Tensor:
        rounded = {name: parameter.bfloat16() for name, parameter in self.inner.named_parameters()}
        return torch.func.functional_call(self.inner, rounded, images.bfloat16()).float()


def half_errors(model: nn.Module, world: World) -> dict[str, list]:
    """Like `errors`, in bfloat16."""
    plain = [{name.removeprefix("inner."): t for name, t in part.items()} for part in train(Half(), World())]
    exact, _ = references(ours, 10)
    table = {}
    for kind, got, single, want in zip(("grad", "weight"), train(model, world), plain, exact, strict=True):
        for name, value in want.items():
            norms = (got[name] - value, single[name] - value, value)
            table[f"{kind} {name}"] = [norm.norm().item() for norm in norms]
    return table


def compiled(model: nn.Module, parts: list[nn.Module]) -> nn.Module:
    for part in parts:
        part.compile(backend="fastvit_triton")
    return model


def optimised() -> nn.Module:
    model = foreign()
    optimize(model)
    return model


def cases(world: World) -> dict:
    """name → (factory of the plain model, factory of the wrapped model, number of images)."""
    found = {
        "ddp": (ours, lambda: ddp(ours(), world), 10),
        "fsdp": (ours, lambda: fsdp(ours(), world), 10),
        "ddp, few images": (ours, lambda: ddp(ours(), world), 3),
        "fsdp, few images": (ours, lambda: fsdp(ours(), world), 3),
        "ddp, recomputed": (ours, lambda: ddp(checkpoint_blocks(ours()), world), 10),
        "fsdp, recomputed": (ours, lambda: fsdp(checkpoint_blocks(ours()), world), 10),
        "ddp, foreign, optimised": (foreign, lambda: ddp(optimised(), world), 10),
        "fsdp, foreign, optimised": (foreign, lambda: fsdp(optimised(), world), 10),
    }
    if world.world_size == 4:
        return {name: found[name] for name in ("ddp", "fsdp", "ddp, few images", "fsdp, few images")}
    return found


def compiled_cases(world: World) -> dict:
    """`cases` compiled with Inductor."""
    import fastvit_triton.convert.backend  # noqa: F401  (registers the backend's name)

    return {
        "fsdp, compiled": (small, lambda: fsdp(compiled(m := small(), find_blocks(m)), world), 10),
        "ddp, compiled": (small, lambda: ddp(compiled(m := small(), [m]), world), 10),
    }


def compare(table: dict, world: World) -> dict[str, dict]:
    """`errors` of each case of a table."""
    return {name: errors(make, train(wrap(), world, images), images) for name, (make, wrap, images) in table.items()}


def trained(wrap, world: World) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = wrap(ours(), world)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    for step in range(2):
        x, y, count = share(world, *batch(10, step))
        world.rescale_mean(F.cross_entropy(model(x), y), count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def fresh(wrap, world: World) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(9)
    model = wrap(create_model("vit_digits_patch2_8", embed_dim=16, depth=2, num_heads=2), world)
    return model, torch.optim.AdamW(model.parameters(), 1e-2, fused=True)


def checkpoints(folder: Path, world: World) -> dict:
    """Two processes write checkpoints; every process then reads them, sharded and unsharded."""
    report = {}
    for name, wrap in {"ddp": ddp, "fsdp": fsdp}.items():
        place = folder / name
        if world.world_size == 2:
            if world.is_main:
                place.mkdir()
            world.barrier()
            model, optimizer = trained(wrap, world)
            state = full_state(model, optimizer)
            for step in (5, 6, 7):
                save_sharded(place, step, model, optimizer, world, extra={"step": step}, per_rank=world.rank)
            if world.is_main:
                torch.save(state, folder / f"{name}.pt")
                report[name, "kept"] = sorted(path.name for path in place.iterdir())
        world.barrier()
        model, optimizer = fresh(wrap, world)
        path, damaged = newest_sharded(place, world)
        extra, own = load_sharded(path, model, optimizer, world)
        report[name, "own"] = world.all_gather(own)
        report[name, "read"] = [path.name, len(damaged), extra]
        report[name, "sharded"] = same(full_state(model, optimizer), folder / f"{name}.pt")
        model, optimizer = fresh(wrap, world)
        load_full_state(torch.load(folder / f"{name}.pt", mmap=True), model, optimizer)
        report[name, "whole"] = same(full_state(model, optimizer), folder / f"{name}.pt")
    return {" ".join(key): value for key, value in report.items()}


RECIPE = Recipe(
    model="vit_digits_patch2_8",
    img_size=8,
    epochs=2,
    batch_size=8,
    lr=1e-2,
    clip=1.0,
    label_smoothing=0.1,
    mixup=0.4,
    erasing=0.25,
    ema_decay=0.5,
)


class Double(nn.Module):
    """A model in float64 that takes float32 images."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.double()

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images.double())


def task() -> Data:
    """21 training and 13 test images: the last batches have 5, which no number of processes divides evenly."""
    images, targets = batch(34)
    transform = Transform((8, 8), (0.0,), (1.0,))
    train = TensorBatches(images[:21], targets[:21], transform, 8, lambda x: x.roll(int(torch.randint(3, ())), 3))
    return Data("noise", tuple("0123456789"), transform, train, TensorBatches(images[21:], targets[21:], transform, 8))


def run(
    out: Path,
    world: World,
    engine: str | None = None,
    stop: int | None = None,
    wrap=lambda model: model,
    image_folder: Path | None = None,
    **options,
) -> dict[str, Tensor]:
    """Weights after a run: a new one of two epochs, the one in `out` continued to its end, or one stopped at step five.

    Uses noise, or image files without mixing, because each rank would mix its own images.
    """
    recipe, data = RECIPE, task() if image_folder is None else None
    if image_folder is not None:
        recipe = replace(RECIPE, mixup=0.0, erasing=0.0, mean=(0.5,), std=(0.5,))
    if world.is_main:
        out.mkdir(exist_ok=True)
    world.barrier()
    state = checkpoint.newest_state(out)[0] if list(out.iterdir()) else None
    world.barrier()
    torch.manual_seed(0)
    small = {"embed_dim": 16, "depth": 2, "num_heads": 2} | options
    model = wrap(create_model("vit_digits_patch2_8", **small))
    data = data or load(str(image_folder), recipe, world=world, skip_bad_images=True)
    built = build_trainer(model, data, recipe, grad_accum_steps=2, parallel=engine, world=world)
    torch.manual_seed(5)
    step = 0 if state is None else 5
    models: Any = SimpleNamespace(save_weights=save_state_dict)
    started = Run(trainer=built, out=out, settings={}, models=models, state=state)
    for progress in started.steps(save_every=None if stop is None else 1):
        step += not progress.done
        if step == stop or (progress.done and progress.epoch == RECIPE.epochs):
            break
    world.barrier()
    return load_file(out / "model.safetensors") if progress.done and world.is_main else {}


def save_state_dict(model: nn.Module, path: Path, metadata: dict) -> None:
    accuracy = torch.tensor(json.loads(metadata["training"])["test_accuracy"])
    save_file(model.state_dict() | {"accuracy": accuracy}, path)


def keep(weights: dict, path: Path) -> None:
    if weights:
        torch.save(weights, path)


def paint(root: Path) -> Path:
    """Writes 21 noise images for training, 13 for testing, and one damaged image in each split."""
    noise = torch.randint(256, (36, 9, 10), generator=torch.Generator().manual_seed(2)).byte().numpy()
    for i in range(36):
        place = root / ("train" if i < 22 else "val") / str(i % 10)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise[i]).save(place / f"{i:02d}.png")
        if i in (5, 27):
            content = (place / f"{i:02d}.png").read_bytes()
            (place / f"{i:02d}.png").write_bytes(content[: len(content) // 2])
    return root


def runs(folder: Path, world: World) -> dict:
    """Two processes train and stop within an epoch; two and four continue. Weights are saved in the folder."""
    report = {}
    if world.is_main and world.world_size == 2:
        paint(folder / "images")
    world.barrier()
    for engine in ("ddp", "fsdp"):
        if world.world_size == 2:
            keep(run(folder / f"{engine}-2", world, engine), folder / f"{engine}-2.pt")
            run(folder / f"{engine}-part", world, engine, stop=5)
            drop = {"drop_path_rate": 0.5, "proj_drop_rate": 0.2}
            whole = run(folder / f"{engine}-drop", world, engine, **drop)
            run(folder / f"{engine}-drop-part", world, engine, stop=5, **drop)
            again = run(folder / f"{engine}-drop-part", world, engine, **drop)
            report[engine] = all(torch.equal(tensor, again[name]) for name, tensor in whole.items()) and len(whole)
        elif world.is_main:
            shutil.copytree(folder / f"{engine}-part", folder / f"{engine}-{world.world_size}")
        if world.world_size == 2:
            trained = run(folder / f"{engine}-images", world, engine, image_folder=folder / "images")
            keep(trained, folder / f"{engine}-images.pt")
        else:
            world.barrier()
            keep(
                run(folder / f"{engine}-{world.world_size}", world, engine), folder / f"{engine}-{world.world_size}.pt"
            )
    return report


def same(state: dict, path: Path) -> bool:
    """True if weights and optimiser state equal those in the file bit by bit; known on rank 0 only."""
    if not state:
        return True
    got, want = (torch.utils._pytree.tree_flatten_with_path(s)[0] for s in (state, torch.load(path)))
    pairs = list(zip(sorted(got, key=str_key), sorted(want, key=str_key), strict=True))
    return all(
        str_key(a) == str_key(b) and torch.equal(torch.as_tensor(a[1]), torch.as_tensor(b[1]))
        for a, b in pairs
        if a[1] is not None
    )


def str_key(entry: tuple) -> str:
    return str(entry[0])


def measured(folder: Path, world: World) -> dict:
    """Everything that is compared with one process, except compiled models."""
    report = {"errors": compare(cases(world), world)}
    model = fsdp(ours(), world, dtype=torch.bfloat16)
    report["errors"]["fsdp, bfloat16"] = half_errors(model, world)
    if world.world_size == 2:  # also runs the kernels, because FSDP2 frees and gathers the weights that they read
        from interpreter import interpreting

        references(small, 2)
        model = fsdp(small(), world)
        with interpreting():
            got = train(model, world, 2, steps=1)
        report["errors"]["fsdp, kernels"] = errors(small, got, 2)
    report["checkpoints"] = checkpoints(folder, world)
    report["runs"] = runs(folder, world)
    report["broadcast"] = world.all_gather(world.broadcast(world.rank))
    return report


def main() -> None:
    folder, compiling = Path(sys.argv[1]), sys.argv[2:] == ["compiled"]
    warnings.simplefilter("ignore")
    faulthandler.dump_traceback_later(240, exit=True)  # prints stack traces on a deadlock
    torch.set_num_threads(1)
    with process_group("cpu") as world:
        report = {"errors": compare(compiled_cases(world), world)} if compiling else measured(folder, world)
        if world.is_main:
            name = "compiled" if compiling else world.world_size
            (folder / f"report-{name}.json").write_text(json.dumps(report))
    assert not torch.distributed.is_initialized()


if __name__ == "__main__":
    main()
