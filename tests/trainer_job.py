"""Training by transformers' Trainer of a small ViT, which tests run in one process or, as a script, under torchrun."""

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


def same_weights(folder: str, make=vit, optimized=None, **options) -> Optimize:
    """Asserts that training with `Optimize` gives the bits of training without, with the backend "torch"."""
    optimized = optimized or Optimize()
    with using_backend("torch"):
        want, none, _ = train(folder, make, **options)
        got, ours, _ = train(folder, make, optimized, **options)
    assert none == {0} and min(ours) > 0
    before = make().state_dict()
    for (key, a), b in zip(got.state_dict().items(), want.state_dict().values(), strict=True):
        assert torch.equal(a, b), key
    assert any(not torch.equal(a, before[key]) for key, a in got.state_dict().items())
    return optimized


if __name__ == "__main__":
    same_weights(sys.argv[1], ddp_backend="gloo")
    assert torch.distributed.get_world_size() == 2
    torch.distributed.destroy_process_group()
