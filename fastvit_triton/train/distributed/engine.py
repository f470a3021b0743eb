"""DDP/FSDP wrapping, and gathering full state dicts from all ranks."""

import copy
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..step import Step
from . import World
from .checkpoint import full_state, load_full_state
from .parallel import ddp, fsdp

FULL_ON_CPU = StateDictOptions(full_state_dict=True, cpu_offload=True)
ENGINES = ("ddp", "fsdp")


@dataclass(frozen=True)
class Engine:
    """Gathers and loads the state of a distributed model. All methods are collective: every rank must call them."""

    name: str | None = None  # "ddp" or "fsdp"; None means one process, and methods gather and scatter nothing
    # on rank 0, a CPU copy of the model as it was before wrapping; gathered weights are loaded into it
    unwrapped: nn.Module | None = None

    def gather_model(self, model: nn.Module) -> nn.Module | None:
        """The unwrapped model with the trained weights; None on ranks other than 0."""
        if self.name is None:
            return model
        weights = get_model_state_dict(model, options=FULL_ON_CPU)
        if self.unwrapped is not None:
            self.unwrapped.load_state_dict(weights)
        return self.unwrapped

    def gather_state(self, state: dict, model: nn.Module, optimizer: Optimizer, step: Step) -> dict:
        """A copy of `make_state`'s result with full model, optimiser and EMA state; complete on rank 0 only."""
        if self.name is None:
            return state
        state = state | full_state(model, optimizer)
        if step.ema is not None:
            weights = get_model_state_dict(step.ema.module, options=FULL_ON_CPU)
            weights = {f"module.{name}": tensor for name, tensor in weights.items()}
            state["ema"] = {"n_averaged": step.ema.n_averaged, **weights}
        return state

    def load_state(self, state: dict, model: nn.Module, optimizer: Optimizer, step: Step) -> None:
        """Loads model, optimiser and EMA from a full state, which any engine and number of ranks may have written."""
        if self.name is not None:
            load_full_state(state, model, optimizer)
        else:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        if step.ema is not None and self.name is not None:
            ema = dict(state["ema"])
            step.ema.n_averaged.copy_(ema.pop("n_averaged"))
            weights = {name.removeprefix("module."): tensor for name, tensor in ema.items()}
            set_model_state_dict(step.ema.module, weights, options=StateDictOptions(full_state_dict=True))
        elif step.ema is not None:
            step.ema.load_state_dict(state["ema"])


def parallelize(
    name: str, model: nn.Module, step: Step, world: World, per_rank_batches: bool
) -> tuple[nn.Module, Step, Engine]:
    """Wraps a model, and its EMA if there is one, in DDP or FSDP, for the returned step; the engine has its state."""
    if name not in ENGINES:
        raise ValueError(f"parallel is {name!r}; use {' or '.join(map(repr, ENGINES))}")
    if name == "fsdp" and step.amp is torch.float16:
        raise ValueError("amp is float16, whose loss scaling needs unsharded gradients; use bfloat16 with fsdp")
    engine = Engine(name, copy.deepcopy(model).cpu() if world.is_main else None)
    step = replace(step, world=world, per_rank_batches=per_rank_batches)
    if name == "ddp":
        return ddp(model, world), step, engine
    if step.ema is not None:
        fsdp(step.ema.module, world, dtype=step.amp)
    return fsdp(model, world, dtype=step.amp), replace(step, amp=None), engine


def has_finite_weights(model: nn.Module, world: World) -> bool:
    """True if every weight on every rank is finite. Collective."""
    local = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    return all(world.all_gather(all(bool(weight.isfinite().all()) for weight in local)))
