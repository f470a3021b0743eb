"""A run on several processes: the engine around its model, and whole weights and states out of everybody's parts."""

import copy
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .parallel import World, ddp, fsdp
from .sharded import full_state, load_full_state
from .step import Step

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
ENGINES = ("ddp", "fsdp")


@dataclass(frozen=True)
class Engine:
    """What is done to a model that several processes train, and undone to save it. All processes must make each call.

    Attributes:
        name: "ddp" or "fsdp"; None, for one process, hands everything through.
        bare: the model as it was, on the CPU of the first process.
    """

    name: str | None = None
    bare: nn.Module | None = None

    def weights(self, model: nn.Module) -> nn.Module | None:
        """The trained model without its engine; None on other processes than the first."""
        if self.name is None:
            return model
        weights = get_model_state_dict(model, options=WHOLE)
        if self.bare is not None:
            self.bare.load_state_dict(weights)
        return self.bare

    def state(self, state: dict, model: nn.Module, optimizer: Optimizer, step: Step) -> dict:
        """What `state_of` would be on one process; complete on the first."""
        if self.name is None:
            return state
        state = state | full_state(model, optimizer)
        if step.average is not None:
            weights = get_model_state_dict(step.average.module, options=WHOLE)
            weights = {f"module.{name}": tensor for name, tensor in weights.items()}
            state["average"] = {"n_averaged": step.average.n_averaged, **weights}
        return state

    def load(self, state: dict, model: nn.Module, optimizer: Optimizer, step: Step) -> None:
        """Puts back weights, optimiser and average out of a whole state, whoever wrote it."""
        if self.name is not None:
            load_full_state(state, model, optimizer)
        else:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        if step.average is not None and self.name is not None:
            average = dict(state["average"])
            step.average.n_averaged.copy_(average.pop("n_averaged"))
            weights = {name.removeprefix("module."): tensor for name, tensor in average.items()}
            set_model_state_dict(step.average.module, weights, options=StateDictOptions(full_state_dict=True))
        elif step.average is not None:
            step.average.load_state_dict(state["average"])


def engage(name: str, model: nn.Module, step: Step, world: World, dealt: bool) -> tuple[nn.Module, Step, Engine]:
    """Puts an engine around a model, and its average where one is kept, so that `step` trains it on all processes.

    Args:
        name: "ddp", or "fsdp", which computes in `step.amp` with weights of that dtype, in place of autocast.
        model: on `world.device`; changed in place by "fsdp". Make the optimiser afterwards, over its parameters.
        step: as one process would have it.
        world: from `join`.
        dealt: batches come in parts.

    Returns:
        The model to call, the step, and the engine.

    Raises:
        ValueError: another engine, or one that the step's dtype is not for.
    """
    if name not in ENGINES:
        raise ValueError(f"parallel is {name!r}; use {' or '.join(map(repr, ENGINES))}")
    if name == "fsdp" and step.amp is torch.float16:
        raise ValueError("amp is float16, whose loss scaling needs whole gradients; use bfloat16 with fsdp")
    engine = Engine(name, copy.deepcopy(model).cpu() if world.first else None)
    step = replace(step, world=world, dealt=dealt)
    if name == "ddp":
        return ddp(model, world), step, engine
    if step.average is not None:
        fsdp(step.average.module, world, dtype=step.amp)
    return fsdp(model, world, dtype=step.amp), replace(step, amp=None), engine


def sound(model: nn.Module, world: World) -> bool:
    """Whether every weight is finite, on all processes."""
    parts = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    return all(world.gather(all(bool(part.isfinite().all()) for part in parts)))
