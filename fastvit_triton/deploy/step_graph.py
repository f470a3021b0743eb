"""A CUDA graph of a training step, which removes the host overhead of small models.

The first calls train without a graph, on a stream of their own, which compiles kernels; the next one is captured. A
graph repeats the same kernels on the same addresses, so batches and learning rates are copied into static tensors.
Whatever else a graph depends on, such as the weight decay, is compared in each call; if it changed, the step is
captured again.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import SGD, Optimizer
from torch.optim.swa_utils import AveragedModel

from ..kernels import settings
from ..layers import DropPath
from . import cuda_graph as graphs
from .cuda_graph import WARMUPS, without_cached_casts


class GraphedStep:
    """A training step by a CUDA graph; created by `cuda_graph_step`."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Tensor], Tensor],
        optimizer: Optimizer,
        batch: tuple[Tensor, Tensor],
        amp: torch.dtype | None,
        scaler: GradScaler,
        clip: float | None,
        ema: AveragedModel | None,
    ) -> None:
        self.model = model
        self.loss = loss
        self.optimizer = optimizer
        self.amp = amp
        self.scaler = scaler
        self.clip = clip
        self.ema = ema
        self._batch = tuple(map(torch.empty_like, batch))
        self._rates = [_rate(group["lr"], batch[0].device) for group in optimizer.param_groups]
        self._pool, self._stream = graphs.pool(), graphs.new_stream()
        self._key: tuple = ()
        self._warmups = WARMUPS
        self._replay: Callable[[], None] | None = None
        self._loss: Tensor = torch.empty(0)
        self._gradients: list[Tensor | None] = []

    def __call__(self, images: Tensor, targets: Tensor) -> Tensor:
        """One training step on a batch; returns its loss, a 0-d tensor, before the update.

        A batch of another size or dtype than the example's is a step without a graph. Gradients remain in `.grad`.
        """
        _check_mode(self.model)
        batch = images, targets
        if any(_layout(x) != _layout(static) for x, static in zip(batch, self._batch, strict=True)):
            loss = self._run(batch).clone()
        else:
            loss = self._on_static(batch)
        if self.ema is not None:
            self.ema.update_parameters(self.model)
        return loss

    def _on_static(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The step by the graph; without one until the kernels are compiled."""
        for static, x in zip(self._batch, batch, strict=True):
            static.copy_(x, non_blocking=True)
        if (key := self._state()) != self._key:
            self._key, self._warmups, self._replay = key, WARMUPS, None
        with self._rates_as_tensors(), without_cached_casts():
            if self._replay is None and self._warmups:
                self._warmups -= 1
                return graphs.on_stream(lambda: self._run(self._batch), self._stream).clone()
            if self._replay is None:
                self._capture()
        parameters = list(self.model.parameters())
        if any(
            p.grad is not g for p, g in zip(parameters, self._gradients, strict=True)
        ):  # after a step without a graph
            for p, g in zip(parameters, self._gradients, strict=True):
                p.grad = g
        assert self._replay is not None
        self._replay()
        return self._loss.clone()

    def _capture(self) -> None:
        try:
            self._loss, self._replay = graphs.capture(lambda: self._run(self._batch), self._pool, 0, self._stream)
        except RuntimeError as error:
            raise RuntimeError(
                f"the training step cannot be captured, as an operation in it waits for the GPU or the host: {error}"
            ) from error
        self._gradients = [p.grad for p in self.model.parameters()]

    def _run(self, batch: tuple[Tensor, ...]) -> Tensor:
        images, targets = batch
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(images.device.type, self.amp, enabled=self.amp is not None):
            loss = self.loss(self.model(images), targets)
        self.scaler.scale(loss).backward()
        if self.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def _state(self) -> tuple:
        """What a graph depends on: addresses, modes, settings, and all hyperparameters but the learning rates."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        groups = ([v for k, v in g.items() if k not in ("params", "lr")] for g in self.optimizer.param_groups)
        places = [(t.data_ptr(), t.requires_grad) for t in tensors]
        modes = [module.training for module in self.model.modules()]
        kind = self._batch[0].device.type
        return places, modes, settings.choices(kind), settings.operators(), [str(values) for values in groups]

    @contextlib.contextmanager
    def _rates_as_tensors(self) -> Iterator[None]:
        """Context in which the optimiser reads its learning rates from static tensors, as they are now."""
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group, rate, static in zip(groups, rates, self._rates, strict=True):
            if static is not rate:
                static.fill_(rate)
                group["lr"] = static
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate


def cuda_graph_step(
    model: nn.Module,
    loss: Callable[[Any, Tensor], Tensor],
    optimizer: Optimizer,
    batch: tuple[Tensor, Tensor],
    *,
    amp: torch.dtype | None = None,
    scaler: GradScaler | None = None,
    clip: float | None = None,
    ema: AveragedModel | None = None,
) -> GraphedStep:
    """A function of (images, targets) that trains a model by a CUDA graph: one launch for a whole step.

        g = ∇ loss(model(images), targets);   weights ← optimizer(clip(g));   EMA

    The first three calls, which train as well, run without a graph; the fourth is captured. Schedulers may write the
    learning rate as usual, which is rounded to float32; after other changes of the optimiser, or of a parameter's
    address, the step is captured again. The average of the weights is updated after the graph, without it.

    Args:
        model: on one GPU, in training mode.
        loss: from the model's output and the targets to a 0-d tensor, such as `F.cross_entropy`.
        optimizer: of PyTorch, created with `capturable=True`, or `SGD(..., fused=True)`.
        batch: (images, targets) on the GPU, with the shapes and dtypes of the batches to come; its values are not read.
        amp: autocast dtype; None computes in the weights' dtype.
        scaler: loss scaling for float16; needs an optimiser created with `fused=True`.
        clip: maximum norm of the gradient; None does not clip.
        ema: moving average of the weights, such as `train.ema_model`.

    Returns:
        The step: `loss = step(images, targets)`.

    Raises:
        TypeError: batch is not a pair of tensors.
        ValueError: the batch is not on a GPU, or the model, optimiser or scaler cannot be captured.
        RuntimeError: the model is in evaluation mode.
    """
    if not (isinstance(batch, tuple) and len(batch) == 2 and all(isinstance(x, Tensor) for x in batch)):
        raise TypeError(f"batch is {type(batch).__name__}; give a tuple of two tensors, images and targets")
    if not all(map(graphs.can_capture, batch)):
        raise ValueError(f"batch is on {batch[0].device}; CUDA graphs need a model and a batch on a GPU")
    scaler = GradScaler(batch[0].device.type, enabled=False) if scaler is None else scaler
    for reason in (_refusal_of_model(model), _refusal_of_optimizer(optimizer, scaler)):
        if reason is not None:
            raise ValueError(reason)
    _check_mode(model)
    return GraphedStep(model, loss, optimizer, batch, amp, scaler, clip, ema)


def _refusal_of_model(model: nn.Module) -> str | None:
    """Why a step of this model cannot be captured, or None."""
    for path, module in model.named_modules():
        name = f"{path or 'the model'} is {type(module).__name__}"
        if isinstance(module, (DataParallel, DistributedDataParallel, FSDPModule)):
            return f"{name}; give a model on one GPU, as a step over several is not captured"
        if isinstance(module, nn.SyncBatchNorm):
            return f"{name}, which waits for other processes; use BatchNorm"
        if isinstance(module, DropPath) and module.skip and module.p > 0:
            return f"{name} with skip=True, which computes another number of images in each step; set skip=False"
    return None


def _refusal_of_optimizer(optimizer: Optimizer, scaler: GradScaler) -> str | None:
    """Why a step of this optimiser cannot be captured, or None."""
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        if not (group.get("capturable") or (isinstance(optimizer, SGD) and group.get("fused"))):
            what = "fused=True" if isinstance(optimizer, SGD) else "capturable=True"
            without = "" if what.partition("=")[0] in group else f" has no {what.partition('=')[0]} form;"
            if without:
                return f"the optimizer {name}{without} use one of torch.optim's with capturable=True, such as AdamW"
            return f"the optimizer {name} is not captured as it is; create it with {what}"
    if scaler.is_enabled() and not getattr(optimizer, "_step_supports_amp_scaling", False):
        return f"the scaler needs an optimizer that skips steps on the GPU; create {name} with fused=True"
    return None


def _check_mode(model: nn.Module) -> None:
    if not model.training:
        raise RuntimeError("the model is in evaluation mode; call model.train() before a training step")


def _rate(rate: float | Tensor, device: torch.device) -> Tensor:
    """The static tensor of a learning rate: itself if it is a tensor on the device."""
    if isinstance(rate, Tensor) and rate.device == device:
        return rate
    return torch.full((), float(rate), device=device)


def _layout(x: Tensor) -> tuple:
    return tuple(x.shape), x.dtype, x.device
