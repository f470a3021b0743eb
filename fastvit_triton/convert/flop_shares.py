"""Shares of a model's work by module: of its FLOPs if the form of its input is known, otherwise of its weights.

FLOPs are those that PyTorch's `FlopCounterMode` counts in one call of a copy of the model on fake tensors, which have
shapes and no values: nothing is computed, and neither the model, its hooks nor any random number generator is used.
Weights are those of linear and convolution layers.
"""

import contextlib
import copy
import logging
import sys
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from ..engine.hooks import has_global_hooks
from ..kernels.backend import using_backend
from .example import arguments

LAYERS = (nn.Linear, nn.modules.conv._ConvNd)
PACKED = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")  # of nn.MultiheadAttention
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
WRAPPERS = ("torch.nn.parallel", "torch.distributed")  # their calls communicate
# PyTorch's counter knows the attention kernels of GPUs, not the one of CPUs, which fake tensors on a CPU select
CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

log = logging.getLogger(__name__)


class Shares(NamedTuple):
    """Work of each module, with that of the modules inside it.

    Attributes:
        of: "FLOPs", or "weights" of linear and convolution layers.
        amounts: path in the model → FLOPs of a call, or number of weights; modules without any may be missing. A shared
            module counts at its first path.
        total: of the model.
    """

    of: str
    amounts: Mapping[str, int]
    total: int

    def share(self, path: str) -> float:
        """The part of the total in [0, 1] that a module does; 0 if it is not in the model."""
        return self.amounts.get(path, 0) / self.total if self.total else 0.0


class Subject:
    """A converted model, as far as its report needs it: a weak reference, the form of its input, and its weights.

    It copies no weights and does not keep the model. Copies and pickles of it hold only the numbers of weights.
    """

    def __init__(self, model: nn.Module, example: Any = None) -> None:
        """Counts the weights of linear and convolution layers.

        Args:
            model: any model.
            example: an input, as for `optimize`: a tensor, a tuple of positional or a dictionary of keyword arguments;
                None if the model states its input size. Only shapes, dtypes and devices of its tensors are kept.
        """
        self._model: weakref.ref[nn.Module] | None = weakref.ref(model)
        self._example = tree_map_only(Tensor, _described, example)
        self._weights = weights(model)
        self._shares: Shares | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The state without the reference to the model."""
        return vars(self) | {"_model": None}

    @property
    def model(self) -> nn.Module | None:
        """The model; None if it was deleted, or for a copy."""
        return None if self._model is None else self._model()

    def example(self) -> Any:
        """The form of the input: as given, or of one image of the size that the model states; None if unknown."""
        model = self.model
        return self._example if self._example is not None or model is None else stated_input(model)

    def shares(self) -> Shares:
        """The shares of FLOPs if they can be counted, otherwise of weights; counted on the first call, then kept."""
        if self._shares is None:
            model = self.model
            example = self.example()
            counted = None if model is None or example is None else flops(model, example)
            self._shares = counted or self._weights
        return self._shares


def weights(model: nn.Module) -> Shares:
    """Shares of the weights of linear and convolution layers, without biases; a shared weight counts once."""
    amounts: dict[str, int] = {}
    counted: set[int] = set()
    for path, module in model.named_modules():
        names = (
            ("weight",) if isinstance(module, LAYERS) else PACKED if isinstance(module, nn.MultiheadAttention) else ()
        )
        tensors = [t for name in names if (t := module._parameters.get(name)) is not None and not is_lazy(t)]
        count = sum(t.numel() for t in tensors if id(t) not in counted)
        counted |= set(map(id, tensors))
        for inside in enclosing(path) if count else ():
            amounts[inside] = amounts.get(inside, 0) + count
    return Shares("weights", amounts, amounts.get("", 0))


def flops(model: nn.Module, example: Any) -> Shares | None:
    """Shares of the FLOPs of one inference call, as PyTorch's own code runs it; None if they cannot be counted.

    Args:
        model: it is not called, only its copy, without hooks and with fake tensors on the CPU.
        example: its input, of which only shapes, dtypes and integers outside of tensors are used.
    """
    if has_global_hooks() or any(_communicates(type(module)) for module in model.modules()):
        return None
    from torch.utils.flop_counter import FlopCounterMode  # here, as it takes a quarter of a second

    inputs, named = arguments(example)
    try:
        with _isolated(), FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
            twin = _twin(model)
            inputs, named = tree_map_only(Tensor, _fake, (inputs, named))
            with FlopCounterMode(display=False, custom_mapping={CPU_ATTENTION: _attention}) as counter:
                twin(*inputs, **named)
    # Any error: the code is the user's, and a report must print. The cause is logged.
    except Exception as error:
        log.debug("the FLOPs of %s cannot be counted: %r", type(model).__name__, error)
        return None
    root = type(model).__name__
    counts = {name: sum(of.values()) for name, of in counter.get_flop_counts().items()}
    amounts = {n.removeprefix(root).removeprefix("."): c for n, c in counts.items() if f"{n}.".startswith(f"{root}.")}
    for path, module in reversed(list(model.named_modules())):  # those that are not called, such as lists
        inside = sum(amounts.get(f"{path}.{name}", 0) for name, _ in module.named_children())
        if inside and path not in amounts:
            amounts[path] = inside
    return Shares("FLOPs", amounts, counter.get_total_flops()) if counter.get_total_flops() else None


def stated_input(model: nn.Module) -> tuple | dict[str, Any] | None:
    """One image of the size that the model states, on the meta device; None if it states none.

    Read from `config.img_size` (ours), `config.image_size` (transformers), `pretrained_cfg["input_size"]` or
    `default_cfg` (timm; `patch_embed`, if there is one, has the size and channels that the model was built for), or
    `image_size` (torchvision).
    """
    config: Any = getattr(model, "config", None)
    first = next((p for p in model.parameters() if p.is_floating_point()), None)
    dtype = torch.float32 if first is None else first.dtype
    channels = 3
    sides = getattr(model, "image_size", None)
    name = None
    timms = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    if hasattr(config, "img_size"):
        channels = getattr(config, "in_chans", 3)
        sides = config.img_size
    elif hasattr(config, "image_size") and getattr(model, "main_input_name", None) == "pixel_values":
        channels = getattr(config, "num_channels", 3)
        sides = config.image_size
        name = "pixel_values"
    elif isinstance(timms, Mapping) and timms.get("input_size"):
        channels, *sides = timms["input_size"]
        embed = getattr(model, "patch_embed", None)
        channels = getattr(getattr(embed, "proj", None), "in_channels", channels)
        sides = getattr(embed, "img_size", None) or sides
    sides = (sides, sides) if isinstance(sides, int) else sides
    if not isinstance(sides, (tuple, list)) or len(sides) != 2:
        return None
    try:
        image = torch.empty(1, channels, *sides, dtype=dtype, device="meta")
    except (TypeError, RuntimeError):  # these attributes mean something else
        return None
    return (image,) if name is None else {name: image}


def _attention(q: torch.Size, k: torch.Size, v: torch.Size, *_: Any, **named: Any) -> int:
    from torch.utils.flop_counter import sdpa_flop_count

    return sdpa_flop_count(q, k, v)


def enclosing(path: str) -> Iterator[str]:
    """The path, and those of the modules around it; the last is "", the model."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _communicates(cls: type) -> bool:
    return any(base.__module__.startswith(WRAPPERS) for base in cls.__mro__)


@contextlib.contextmanager
def _isolated() -> Iterator[None]:
    """Context in which nothing is compiled, no kernel of ours is selected, and warnings are not shown."""
    compiles = "torch._dynamo" in sys.modules
    stance = torch.compiler.set_stance("force_eager") if compiles else contextlib.nullcontext()
    with warnings.catch_warnings(), torch.inference_mode(False), using_backend("torch"), stance:
        warnings.simplefilter("ignore")
        yield


def _twin(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode with fake weights and buffers, and without hooks."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        facts = vars(module)
        tensors = *facts["_parameters"].values(), *facts["_buffers"].values(), *facts.values()
        memo |= {id(t): _fake(t) for t in tensors if isinstance(t, Tensor) and id(t) not in memo}
        memo |= {id(facts[name]): OrderedDict() for name in HOOKS}
    return copy.deepcopy(model, memo).eval()


def _fake(t: Tensor) -> Tensor:
    """A new tensor on the CPU of the same form; parameters need gradients, so that nn.MultiheadAttention runs its code.

    It would otherwise call an operator for the whole layer, whose FLOPs are not counted.
    """
    new = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu")
    return nn.Parameter(new, new.is_floating_point()) if isinstance(t, nn.Parameter) else new


def _described(t: Tensor) -> Tensor:
    """A tensor of the same form without memory; an empty one, with which no call is possible, if it is not strided."""
    if t.layout is not torch.strided or t.is_nested:
        return torch.empty(0, device="meta")
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
