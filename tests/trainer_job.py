"""Training by transformers' Trainer of a small ViT, which tests run in one process or, as a script, under torchrun."""

import copy
import sys

import torch

import benchmarks  # noqa: F401  (must precede transformers)

# isort: split
import transformers
from torch.utils.data import Dataset

from fastvit_triton.engine.hooks import is_our_forward
from fastvit_triton.integrations.transformers import Optimize
from fastvit_triton.kernels.backend import using_backend

CLASSES, STEPS = 3, 2


class Images(Dataset):
    """Random images with labels."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        drawn = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(i))
        return {"pixel_values": drawn, "labels": i % CLASSES}


class Look(transformers.TrainerCallback):
    """Notes, in every step, how many modules have a forward of ours, and how the model is wrapped."""

    def __init__(self):
        self.seen = set()

    def on_step_end(self, args, state, control, model=None, **_):
        self.seen.add(sum(is_our_forward(m.__dict__.get("forward")) for m in model.modules()))


def vit() -> transformers.PreTrainedModel:
    """A ViT of two layers with random weights that are the same in every call."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    config = transformers.ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=CLASSES)
    return transformers.ViTForImageClassification(config)


def train(folder: str, make, *callbacks, **options):
    """(the model after training, the number of modules with our forward in its steps, the Trainer)."""
    look = Look()
    arguments = transformers.TrainingArguments(
        **dict(output_dir=folder, max_steps=STEPS, per_device_train_batch_size=2, report_to=[], use_cpu=True)
        | dict(disable_tqdm=True, save_strategy="no", logging_strategy="no", dataloader_pin_memory=False)
        | options
    )
    given = {"model_init": make} if options.get("seed") else {"model": make()}
    trainer = transformers.Trainer(args=arguments, train_dataset=Images(), callbacks=[*callbacks, look], **given)
    trainer.train()
    return trainer.model, look.seen, trainer


def same_weights(folder: str, make=vit, optimized=None, wrapper="", **options) -> Optimize:
    """Asserts that training with `Optimize` gives the bits of training without, with the backend "torch".

    The class of what the Trainer calls begins with `wrapper`.
    """
    optimized = optimized or Optimize()
    with using_backend("torch"):
        want, none, _ = train(folder, make, **options)
        got, ours, trainer = train(folder, make, optimized, **options)
    assert type(trainer.model_wrapped).__name__.startswith(wrapper)
    assert none == {0} and min(ours) > 0
    before, got, want = (whole(model) for model in (make(), got, want))
    for (key, a), b in zip(got.items(), want.values(), strict=True):
        assert torch.equal(a, b), key
    assert any(not torch.equal(a, before[key]) for key, a in got.items())
    return optimized


def whole(model) -> dict[str, torch.Tensor]:
    """The state dict of a model, gathered if it is sharded."""
    state = model.state_dict()
    return {key: t.full_tensor() if hasattr(t, "full_tensor") else t for key, t in state.items()}


def wrapped_alike(folder: str, engine: str) -> None:
    """Asserts that `Optimize` converts a wrapped model, of `model_init`, as one that it optimises before wrapping.

    Stage 3 of ZeRO has hooks at each layer, so that layers are called there, and no rows are compared.
    """
    own = ({}, {"seed": 7})
    reports = [same_weights(folder, ddp_backend="gloo", **copy.deepcopy(ENGINES[engine]), **o).report for o in own]
    rows = [[(row.path, row.type, row.became, row.within) for row in report.rows] for report in reports]
    assert reports[0].fused and (rows[0] == rows[1] or engine == "zero3")


def shard_on_cpus() -> None:
    """Makes accelerate shard models on CPUs, where it otherwise ignores the plugin, as it does on GPUs."""
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    own = AcceleratorState.__init__

    def init(self, *arguments, fsdp_plugin=None, **named):
        own(self, *arguments, fsdp_plugin=fsdp_plugin, **named)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    AcceleratorState.__init__ = init


SIZES = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
ENGINES = {  # name -> options of TrainingArguments, with the class that wraps the model
    "ddp": {"wrapper": "DistributedDataParallel"},
    "fsdp2": {"wrapper": "FSDP", "fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["ViTLayer"]}},
    "zero2": {"wrapper": "DeepSpeedEngine", "deepspeed": {"zero_optimization": {"stage": 2}, **SIZES}},
    "zero3": {"wrapper": "DeepSpeedEngine", "deepspeed": {"zero_optimization": {"stage": 3}, **SIZES}},
}


if __name__ == "__main__":
    from accelerate.state import AcceleratorState

    shard_on_cpus()
    folder, *engines = sys.argv[1:]
    for engine in engines:
        wrapped_alike(folder, engine)
        AcceleratorState._reset_state()  # keeps the process group
    assert torch.distributed.get_world_size() == 2
    torch.distributed.destroy_process_group()
