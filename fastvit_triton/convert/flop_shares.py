"""Shares of a model's work by module: of its FLOPs if the form of its input is known, otherwise of its weights.

FLOPs are those that PyTorch's `FlopCounterMode` counts in one call of a copy of the model on fake tensors, which have
shapes and no values: nothing is computed, and neither the model, its hooks nor any random number generator is used. A
second call, of the converted code, counts those that the kernels replace: of the operators in their references. Weights
are those of linear and convolution layers.
"""

import contextlib
import copy
import logging
import sys
import warnings
import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from .. import kernels
from ..engine.hooks import has_global_hooks
from ..kernels.backend import using_backend
from .example import arguments, same_random_states

LAYERS = (nn.Linear, nn.modules.conv._ConvNd)
PACKED = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")  # of nn.MultiheadAttention
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
WRAPPERS = ("torch.nn.parallel", "torch.distributed")  # their calls communicate

KERNELS = str(Path(kernels.__file__).parent)

log = logging.getLogger(__name__)


class Shares(NamedTuple):
    """Work of each module, with that of the modules inside it.

    Attributes:
        of: "FLOPs", or "weights" of linear and convolution layers.
        amounts: path in the model → FLOPs of a call, or number of weights; modules without any may be missing. A shared
            module counts at its first path.
        total: of the model.
        replaced: path → the part of its amount that the kernels, or oneDNN, can replace; None if it is not known.
    """

    of: str
    amounts: Mapping[str, int]
    total: int
    replaced: Mapping[str, int] | None = None

    def share(self, path: str) -> float:
        """The part of the total in [0, 1] that a module does; 0 if it is not in the model."""
        return self.amounts.get(path, 0) / self.total if self.total else 0.0

    def replaced_share(self, path: str) -> float:
        """The part of the total that operators do which the kernels can replace, in a module."""
        return (self.replaced or {}).get(path, 0) / self.total if self.total else 0.0


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

    counter = FlopCounterMode(display=False, custom_mapping=ATTENTION_FLOPS)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        if not _ran(model, example, counter):
            return None
    root = type(model).__name__
    counts = {name: sum(of.values()) for name, of in counter.get_flop_counts().items()}
    amounts = {n.removeprefix(root).removeprefix("."): c for n, c in counts.items() if f"{n}.".startswith(f"{root}.")}
    for path, module in reversed(list(model.named_modules())):  # those that are not called, such as lists
        inside = sum(amounts.get(f"{path}.{name}", 0) for name, _ in module.named_children())
        if inside and path not in amounts:
            amounts[path] = inside
    total = counter.get_total_flops()
    return Shares("FLOPs", amounts, total, _replaced(model, example, amounts)) if total else None


def _replaced(model: nn.Module, example: Any, amounts: Mapping[str, int]) -> Mapping[str, int] | None:
    """The amounts without what the converted model leaves to other operators; None if it cannot be called."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it is one operator for an encoder layer
    left = _Left()
    try:
        with torch.no_grad():
            if not _ran(model, example, left):
                return None
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    for path, part in _captured_parts(model).items():
        more = round((1 - part) * amounts.get(path, 0)) - left.amounts[path]
        for place in enclosing(path):
            left.amounts[place] += more
    return {path: max(amount - left.amounts[path], 0) for path, amount in amounts.items()}


def _ran(model: nn.Module, example: Any, mode: Any) -> bool:
    """True if a copy of the model could be called with tensors of the example's form in this mode."""
    try:
        with _isolated():
            twin = _twin(model)
            args, named = tree_map_only(Tensor, _fake, arguments(example))
            if isinstance(mode, _Left):
                mode.paths = {module: path for path, module in reversed(list(twin.named_modules()))}
            with mode:
                twin(*args, **named)
    # Any error: the code is the user's, and a report must print. The cause is logged.
    except Exception as error:
        log.debug("the FLOPs of %s cannot be counted: %r", type(model).__name__, error)
        return False
    return True


def _captured_parts(model: nn.Module) -> dict[str, float]:
    """Path of each block that was captured → the part of its FLOPs that its graph gives to the kernels."""
    from . import captured  # here, as it imports this file

    bound = {path: module for path, module in model.named_modules() if captured.is_bound(module)}
    parts = {path: [one.replaced for one in captured.captures_of(module)] for path, module in bound.items()}
    return {path: max(found) for path, found in parts.items() if found}


class _Left(TorchDispatchMode):
    """Runs a model on shapes alone; counts FLOPs of operators that no reference of a kernel calls, by module."""

    def __init__(self) -> None:
        super().__init__()
        self.amounts: Counter[str] = Counter()
        self.paths: dict[nn.Module, str] = {}

    def __torch_dispatch__(self, function: Any, kinds: object, arguments: tuple = (), named: dict | None = None) -> Any:
        from torch.utils.flop_counter import flop_registry

        named = named or {}
        tensors = [t for t in tree_leaves((arguments, named)) if isinstance(t, Tensor)]
        if function.is_view or not any(t.is_floating_point() for t in tensors):
            return function(*arguments, **named)
        on_meta = tree_map_only(Tensor, _described, (arguments, named))
        results = function(*on_meta[0], **on_meta[1])
        count = (flop_registry | ATTENTION_FLOPS).get(function.overloadpacket)
        if count is not None and (path := self._place()) is not None:
            flops = count(*on_meta[0], **on_meta[1], out_val=results)
            for place in enclosing(path):
                self.amounts[place] += flops
        if function._schema.is_mutable:
            return named["out"] if "out" in named else arguments[0]
        return tree_map_only(Tensor, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype), results)

    def _place(self) -> str | None:
        """Path of the innermost module that calls; None if a reference of a kernel is called on the way."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_filename.startswith(KERNELS):
                return None
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and module in self.paths:
                return self.paths[module]
            frame = frame.f_back
        return ""


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


def attention_flops(q: Any, k: Any, v: Any, *_: Any, **named: Any) -> int:
    """FLOPs of attention of queries, keys and values, tensors or their sizes."""
    from torch.utils.flop_counter import sdpa_flop_count

    return sdpa_flop_count(*(t.shape if isinstance(t, Tensor) else t for t in (q, k, v)))


# PyTorch's counter knows the attention kernels of GPUs, not the one of CPUs, which fake tensors on a CPU select
CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
ATTENTION_FLOPS = {CPU_ATTENTION: attention_flops}


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
    """Context in which nothing is compiled, no kernel of ours is selected, and no warning is shown; see `example`."""
    compiles = "torch._dynamo" in sys.modules
    stance = torch.compiler.set_stance("force_eager") if compiles else contextlib.nullcontext()
    with (
        warnings.catch_warnings(),
        same_random_states(),
        torch.inference_mode(False),
        using_backend("torch"),
        stance,
    ):
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
