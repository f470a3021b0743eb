"""Shares of a model's work by module: of its FLOPs if the form of its input is known, otherwise of its weights.

FLOPs are those of one call of a copy of the model, by PyTorch's formulas. Floating-point tensors have shapes and no
values, so almost nothing is computed; integers have values, as positions and masks decide shapes. Neither the model,
its hooks nor any random number generator is used. The FLOPs that the kernels replace are those of operators in their
references. Weights are those of linear and convolution layers.
"""

import contextlib
import copy
import logging
import sys
import warnings
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from .. import kernels
from ..engine.hooks import has_global_hooks, is_our_forward
from ..engine.replay.recorder import ALLOCATE, READERS
from ..engine.values import described, has_values, is_known, mark, positions, reserved, written_arguments
from ..kernels.backend import using_backend
from .example import arguments, same_random_states

LAYERS = (nn.Linear, nn.modules.conv._ConvNd)
PACKED = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")  # of nn.MultiheadAttention
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
WRAPPERS = ("torch.nn.parallel", "torch.distributed")  # their calls communicate

KERNELS = str(Path(kernels.__file__).parent)

log = logging.getLogger(__name__)

Parts = Callable[[nn.Module], Mapping[str, float]]


class Shares(NamedTuple):
    """Work of each module, with that of the modules inside it."""

    of: str  # "FLOPs", or "weights" of linear and convolution layers
    # path → FLOPs of a call, or weights; modules without any may be missing, and a shared one counts at its first path
    amounts: Mapping[str, int]
    total: int  # of the model
    # path → the part of its amount that the kernels, or oneDNN, can replace; None if it is not known
    replaced: Mapping[str, int] | None = None

    def share(self, path: str) -> float:
        """The part of the total in [0, 1] that a module does; 0 if it is not in the model."""
        return self.amounts.get(path, 0) / self.total if self.total else 0.0

    def replaced_share(self, path: str) -> float:
        """The part of the total that operators do which the kernels can replace, in a module."""
        return (self.replaced or {}).get(path, 0) / self.total if self.total else 0.0


class CountedModel:
    """A converted model, as far as its report needs it: a weak reference, the form of its input, and its weights.

    It keeps neither the model nor floating-point values. Copies and pickles of it hold only the numbers of weights.
    """

    def __init__(self, model: nn.Module, example: Any = None, parts: Parts = lambda model: {}) -> None:
        """Counts the weights of linear and convolution layers; for `parts` see `flops`."""
        self._model: weakref.ref[nn.Module] | None = weakref.ref(model)
        self._example = tree_map_only(Tensor, lambda t: _described(t) if t.is_floating_point() else _fake(t), example)
        self._parts = parts
        self._weights = weights(model)
        self._shares: Shares | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The state without the reference to the model."""
        return vars(self) | {"_model": None, "_parts": None}

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
            counted = None if model is None or example is None else flops(model, example, self._parts)
            self._shares = counted or self._weights
        return self._shares


def weights(model: nn.Module) -> Shares:
    """Shares of the weights of linear and convolution layers, without biases; a shared weight counts once."""
    amounts: dict[str, int] = {}
    counted: set[int] = set()
    for path, module in model.named_modules():
        names = ("weight",) if isinstance(module, LAYERS) else PACKED
        if names == PACKED and not isinstance(module, nn.MultiheadAttention):
            continue
        tensors = [t for name in names if (t := module._parameters.get(name)) is not None and not is_lazy(t)]
        count = sum(t.numel() for t in tensors if id(t) not in counted)
        counted |= set(map(id, tensors))
        for inside in enclosing(path) if count else ():
            amounts[inside] = amounts.get(inside, 0) + count
    return Shares("weights", amounts, amounts.get("", 0))


def flops(model: nn.Module, example: Any, parts: Parts = lambda model: {}) -> Shares | None:
    """Shares of the FLOPs of one inference call; None if they cannot be counted.

    `parts` gives, by path, the part of a captured block's FLOPs that its graph gives to the kernels.
    """
    bases = {base for module in model.modules() for base in type(module).__mro__}
    if has_global_hooks() or any(base.__module__.startswith(WRAPPERS) for base in bases):
        return None
    whole, converted = _Counter(), _Counter()
    if not _ran(model, example, whole, "torch", _as_written) or not whole.amounts:
        return None
    replaced = None
    if _ran(model, example, converted, "torch"):
        left = converted.amounts - converted.replaced
        for path, part in parts(model).items():
            more = round((1 - part) * whole.amounts[path]) - left[path]
            for place in enclosing(path):
                left[place] += more
        replaced = {path: max(amount - left[path], 0) for path, amount in whole.amounts.items()}
    return Shares("FLOPs", whole.amounts, whole.amounts[""], replaced)


def _as_written(model: nn.Module) -> None:
    """Removes the fused forwards, so that all modules are called and counted."""
    for module in model.modules():
        if is_our_forward(module.__dict__.get("forward")):
            del module.__dict__["forward"]


def runs_on_shapes(model: nn.Module, example: Any, prepare: Callable[[nn.Module], object] = id) -> bool:
    """True if a copy of the model, prepared and in inference, could be called on shapes alone."""
    return _ran(model, example, _Counter(), "auto", prepare)


def _ran(
    model: nn.Module, example: Any, counter: "_Counter", backend: str, prepare: Callable[[nn.Module], object] = id
) -> bool:
    """True if a copy of the model could be called with tensors of the example's form."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it is one operator for an encoder layer
    try:
        with _isolated(), using_backend(backend), torch.no_grad():
            prepare(twin := _twin(model))
            args, named = tree_map_only(Tensor, _fake, arguments(example))
            counter.paths = {module: path for path, module in reversed(list(twin.named_modules()))}
            with counter:
                twin(*args, **named)
    # Any error: the code is the user's, and a report must print. The cause is logged.
    except Exception as error:
        log.debug("the FLOPs of %s cannot be counted: %r", type(model).__name__, error)
        return False
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return True


class _Counter(TorchDispatchMode):
    """Runs a model on shapes alone; counts FLOPs by module, of all operators and of those in references of kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.amounts: Counter[str] = Counter()
        self.replaced: Counter[str] = Counter()
        self.paths: dict[nn.Module, str] = {}

    def __torch_dispatch__(self, function: Any, kinds: object, arguments: tuple = (), named: dict | None = None) -> Any:
        from torch.utils.flop_counter import flop_registry  # here, as it takes a quarter of a second

        named = named or {}
        name = function.name().split("::")[1].split(".")[0]
        tensors = [t for t in tree_leaves((arguments, named)) if isinstance(t, Tensor)]
        masks = [t for t in tensors if name == "index" and t.dtype == torch.bool]
        if not all(map(has_values, tensors if name in READERS else masks)):
            raise RuntimeError(f"{name} reads a value that depends on weights or images")
        if masks:
            arguments = (arguments[0], positions(arguments[1]))
        if function.is_view:
            return function(*arguments, **named)
        if name in ALLOCATE or is_known(function, name, tensors):
            known = name not in ALLOCATE
            return tree_map_only(Tensor, lambda t: mark(t, known, not known), function(*arguments, **named))
        named = named | {key: torch.device("meta") for key in ("device",) if named.get(key) is not None}
        on_meta = tree_map_only(Tensor, described, (arguments, named))
        results = function(*on_meta[0], **on_meta[1])
        if (count := (flop_registry | ATTENTION_FLOPS).get(function.overloadpacket)) is not None:
            path, in_kernel = self._place()
            flops = count(*on_meta[0], **on_meta[1], out_val=results)
            for place in enclosing(path):
                self.amounts[place] += flops
                self.replaced[place] += flops * in_kernel
        if function._schema.is_mutable:
            return written_arguments(function, arguments, named, results)
        return tree_map_only(Tensor, reserved, results)

    def _place(self) -> tuple[str, bool]:
        """Path of the innermost module that calls, and whether a reference of a kernel is called on the way."""
        frame: FrameType | None = sys._getframe(2)
        in_kernel = False
        while frame is not None:
            in_kernel |= frame.f_code.co_filename.startswith(KERNELS)
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and module in self.paths:
                return self.paths[module], in_kernel
            frame = frame.f_back
        return "", in_kernel


def stated_input(model: nn.Module) -> tuple | dict[str, Any] | None:
    """One image of the size that the model states, on the meta device; None if it states none.

    Read from `config.img_size` (ours), `config.image_size` (transformers), `pretrained_cfg["input_size"]` or
    `default_cfg` (timm; its first convolution and `patch_embed`, if there are any, have the channels and the size that
    the model was built for), or `image_size` (torchvision).
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
        path = timms.get("first_conv") or "patch_embed.proj"  # of the layer that takes the image
        weight = dict(model.named_parameters()).get(f"{path}.weight")
        channels = channels if weight is None or weight.dim() != 4 else weight.shape[1]
        sides = getattr(getattr(model, "patch_embed", None), "img_size", None) or sides
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


@contextlib.contextmanager
def _isolated() -> Iterator[None]:
    """Context in which nothing is compiled or random, and no warning is shown; see `example`."""
    compiles = "torch._dynamo" in sys.modules
    stance = torch.compiler.set_stance("force_eager") if compiles else contextlib.nullcontext()
    with warnings.catch_warnings(), same_random_states(), torch.inference_mode(False), stance:
        warnings.simplefilter("ignore")
        yield


def _twin(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode with fake weights and buffers, and without hooks."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        facts = vars(module)
        tensors = (t for t in tree_leaves(facts) if isinstance(t, Tensor))
        memo |= {id(t): _fake(t) for t in tensors if id(t) not in memo}
        memo |= {id(facts[name]): OrderedDict() for name in HOOKS}
    return copy.deepcopy(model, memo).eval()


def _fake(t: Tensor) -> Tensor:
    """A new tensor on the CPU of the same form, of integers with the same values, or 0 if they are not known.

    Parameters need gradients, so that nn.MultiheadAttention runs its code. It would otherwise call an operator for the
    whole layer, whose FLOPs are not counted.
    """
    if not t.is_floating_point() and t.layout is torch.strided and not t.is_nested:
        return torch.zeros(t.shape, dtype=t.dtype) if t.is_meta else t.detach().to("cpu", copy=True)
    new = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu")
    return nn.Parameter(new, new.is_floating_point()) if isinstance(t, nn.Parameter) else new


def _described(t: Tensor) -> Tensor:
    """A tensor of the same form without memory; an empty one, with which no call is possible, if it is not strided."""
    if t.layout is not torch.strided or t.is_nested:
        return torch.empty(0, device="meta")
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
