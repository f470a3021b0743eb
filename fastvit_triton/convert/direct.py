"""Replaces our opaque ops in a graph by launches of their kernels, which the code that Inductor writes makes itself.

An op is opaque to AOTAutograd and its partitioner. Afterwards, in a pass of Inductor, the op's function runs on fake
tensors, and what it does is recorded: allocations, PyTorch's operators, and launches, which become nodes of
`triton_kernel_wrapper_functional`. The compiled code then calls each kernel's launcher and no function of this package.

Inductor launches kernels of tensors and integers. Each launch is therefore of a *flat* kernel, made here, that calls
ours: it makes tuples, pointers to views and float32 numbers, and holds the compile-time arguments.
"""

import contextlib
import functools
import itertools
import linecache
import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch._higher_order_ops import triton_kernel_wrap as wrap
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental import _config as shapes_config
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx, track_tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from ..kernels import launch, settings
from ..kernels.descriptor import takes_descriptors
from ..kernels.op import LIBRARY, REGISTERED
from ..kernels.tile import TRITON, Kernel, jit, tl

log = logging.getLogger(__name__)

PASS = "post_grad_custom_post_pass"
OPTIONS = ("num_warps", "num_stages")  # launch options that Inductor passes on
OLDEST = "2.13"  # PyTorch

_numbers = itertools.count(1)
_written: dict[tuple, list[str]] = {}  # by flat kernel and types: the parameters whose memory it writes


def with_lowering(options: dict | None) -> dict | None:
    """Inductor's options with the pass, if FASTVIT_TRITON_DIRECT is set and nothing else is that pass."""
    if not settings.direct:
        return options
    if torch.__version__ < OLDEST or getattr(config, PASS) is not None or PASS in (options or {}):
        log.info("operators stay opaque: PyTorch is %s and must be %s, or %s is set", torch.__version__, OLDEST, PASS)
        return options
    return {**(options or {}), PASS: Lowering()}


class Opaque(RuntimeError):
    """Why an op stays as it is."""


class Lowering(CustomGraphPass):
    """A pass over a functional graph of ATen's operators with fake tensors, forward or backward."""

    def __call__(self, graph: fx.Graph) -> None:
        """Replaces each op of ours whose launches Inductor can make; others stay, and the reasons are logged."""
        for node in list(graph.nodes):
            if node.op == "call_function" and getattr(node.target, "namespace", None) == LIBRARY.ns:
                name = node.target.name().split("::")[1]
                try:
                    traced, given = _traced(node, name)
                except (RuntimeError, TypeError) as error:  # a guard on a symbol, or a symbol that cannot be hashed
                    log.info("%s stays an opaque operator: %s", name, error)
                else:
                    _replace(node, traced, given)

    def uuid(self) -> None:
        """None: compiled graphs are not kept on the disk, as launches depend on the tables of launch parameters."""


def _traced(node: fx.Node, name: str) -> tuple[fx.Graph, list[fx.Node]]:
    """What the function of an op, named as in the library, does for this node, and the nodes that it is given."""
    if node.kwargs:
        raise Opaque("it has named arguments")
    nodes = [leaf for leaf in tree_leaves(node.args) if isinstance(leaf, fx.Node)]
    values = [each.meta["val"] for each in nodes]
    if launch.target is None and not any(isinstance(v, Tensor) and v.is_cuda for v in values):
        raise Opaque("its tensors are not on a GPU")
    fake: Any = detect_fake_mode(values)
    recorder = _Recorder()

    def run(*given: Any) -> Any:
        held = dict(zip(nodes, given, strict=True))
        with recorder, launch.overriding({}):  # in which no launch is cached, by sizes that may be symbols
            outputs = REGISTERED[name][0](*tree_map_only(fx.Node, held.__getitem__, node.args))
        return recorder.current(outputs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(fake)
        if fake.shape_env is not None:
            stack.enter_context(fake.shape_env.error_on_new_guards())
            shapes: Any = shapes_config
            stack.enter_context(shapes.patch(backed_size_oblivious=True))  # else metadata compare sizes with 1
        traced = make_fx(run, select_decomp_table())(*values).graph
    traced.eliminate_dead_code()  # views, in whose place launches have offsets
    return traced, nodes


def _replace(node: fx.Node, traced: fx.Graph, given: list[fx.Node]) -> None:
    """Replaces a node by the nodes of a graph, whose inputs are given."""
    graph = node.graph
    fake: Any = detect_fake_mode([each.meta["val"] for each in given])
    new = dict(zip(traced.find_nodes(op="placeholder"), given, strict=True))
    with graph.inserting_before(node), fake:
        for old in traced.nodes:
            if old.op not in ("placeholder", "output"):
                new[old] = copy = graph.node_copy(old, new.__getitem__)
                arguments, named = tree_map_only(fx.Node, lambda n: n.meta["val"], (copy.args, copy.kwargs))
                function: Any = copy.target
                copy.meta = node.meta | dict(val=function(*arguments, **named), eager_input_vals=(arguments, named))
    found = tree_map_only(fx.Node, new.__getitem__, traced.output_node().args[0])
    if isinstance(found, fx.Node):
        node.replace_all_uses_with(found)
    else:
        for user in list(node.users):  # of one output each
            user.replace_all_uses_with(found[user.args[1]])
            graph.erase_node(user)
    graph.erase_node(node)


class _Recorder(launch.LaunchRecorder):
    """Records the operators and launches of an op's function in the graph that `make_fx` is making, without writes."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, Tensor] = {}  # by storage: what the function allocated, whole
        self._writes: dict[int, int] = {}  # by storage: how often it was written
        self._views: dict[int, tuple[Tensor, Tensor, int]] = {}  # by id: a result, what it is a view of, writes before

    def __torch_dispatch__(
        self, function: Any, types: object, arguments: tuple = (), named: dict[str, Any] | None = None
    ) -> Any:
        arguments, named = self.current((arguments, named or {}))
        if function in (torch.ops.aten.zero_.default, torch.ops.aten.copy_.default):
            return self._fill(*arguments)
        if function._schema.is_mutable:
            raise Opaque(f"it calls {function}, which writes to a tensor")
        given = {_storage(t): self.whole(t) for t in tree_leaves((arguments, named)) if isinstance(t, Tensor)}
        outputs = function(*arguments, **named)
        for t in tree_leaves(outputs):
            if isinstance(t, Tensor) and id(t) not in self._views:
                whole = given[_storage(t)] if _storage(t) in given else self._made.setdefault(_storage(t), t)
                self._views[id(t)] = t, whole, self._writes.get(_storage(t), 0)
        return outputs

    def whole(self, t: Tensor) -> Tensor:
        """The argument or allocation that a tensor is a view of, or the tensor."""
        return self._views[id(t)][1] if id(t) in self._views else t

    def current(self, values: Any) -> Any:
        """The values, with new views in place of those that were made before a write to what they are views of."""

        def renewed(t: Tensor) -> Tensor:
            whole = self.whole(t)
            if t is whole or self._views[id(t)][2] == self._writes.get(_storage(t), 0):
                return t
            return torch.as_strided(whole, t.shape, t.stride(), t.storage_offset())

        return tree_map_only(Tensor, renewed, values)

    def _fill(self, t: Tensor, source: Tensor | None = None, *_: object) -> Tensor:
        """`t.zero_()` or `t.copy_(source)`, for a view of what the function allocated."""
        value = torch.zeros_like(t) if source is None else source.to(t.dtype).expand(t.shape)
        filled = torch.as_strided_scatter(self.whole(t), value, t.shape, t.stride(), t.storage_offset())
        self._write(self.whole(t), _tracer().unwrap_proxy(filled))
        return t

    def _write(self, whole: Tensor, proxy: fx.Proxy) -> None:
        """Lets a proxy stand for a tensor, whose memory was written."""
        if _storage(whole) not in self._made:
            raise Opaque("it writes to an argument")
        self._writes[_storage(whole)] = self._writes.get(_storage(whole), 0) + 1
        track_tensor(whole, proxy, constant=None, tracer=_tracer())

    def launched(self, kernel: Kernel, grid: tuple[int, ...], arguments: tuple, fixed: dict[str, object]) -> bool:
        if takes_descriptors(kernel):
            raise Opaque(f"{_name(kernel)} takes descriptors")
        flat = _Flat(kernel, self)
        call = ", ".join([*map(flat.spelled, arguments, kernel.params), *flat.constants(fixed)])
        made = _kernel(kernel, f"{kernel.__name__}({call})", tuple(flat.values), *flat.options(fixed))
        table = wrap.kernel_side_table  # torch._dynamo.reset empties it
        numbers = table.add_kernel(made), table.add_constant_args({})
        key = made, *(value.dtype if isinstance(value, Tensor) else int for value in flat.values.values())
        if key not in _written:
            with _disable_current_modes():  # Inductor makes the same analysis, and believes it
                _written[key] = wrap.get_mutated_tensors(*numbers, flat.values, {})
        written = _written[key]
        if not all(_storage(flat.values[name]) in self._made for name in written):
            raise Opaque(f"Triton's analysis says that {_name(kernel)} may write to an argument of the operator")
        named = dict(kernel_idx=numbers[0], constant_args_idx=numbers[1], grid=[(*grid, 1, 1)[:3]], kwargs=flat.values)
        named = tree_map(_tracer().unwrap_proxy, named) | dict(tma_descriptor_metadata={}, tensors_to_clone=written)
        outputs = _tracer().create_proxy("call_function", wrap.triton_kernel_wrapper_functional, (), named)
        for name in written:
            self._write(flat.values[name], outputs[name])
        return True


class _Flat:
    """The parameters of a flat kernel, and the expressions of the arguments in its call of the kernel."""

    def __init__(self, kernel: Kernel, recorder: _Recorder) -> None:
        self.values: dict[str, Any] = {}  # tensors and integers by parameter
        self._kernel = kernel
        self._recorder = recorder

    def spelled(self, value: Any, parameter: Any) -> str:
        """The expression of a run-time argument."""
        if isinstance(value, tuple):
            return f"({''.join(f'{self.spelled(each, parameter)}, ' for each in value)})"
        if isinstance(value, Tensor):
            return self._pointer(value)
        if value is None or isinstance(value, bool):
            return repr(value)
        if isinstance(value, float) and math.isfinite(value):
            return f"tl.full((), {value!r}, tl.float32)"  # Triton's dtype of a number; Inductor's may be float64
        if isinstance(value, int) and value == 1 and parameter.do_not_specialize:
            return "tl.full((), 1, tl.int32)"  # Inductor makes a constant of 1, which has no methods of a tensor
        if isinstance(value, (int, torch.SymInt)):
            return self._number(value)
        raise Opaque(f"an argument of {self._kernel.__name__} is {value!r}")

    def _number(self, value: Any) -> str:
        name = f"n{len(self.values)}"
        self.values[name] = value
        return name

    def _pointer(self, t: Tensor) -> str:
        """A pointer to what a tensor is a view of, plus an offset: Inductor sees each memory once and makes no view."""
        whole = self._recorder.whole(t)
        if whole.dtype != t.dtype:
            raise Opaque(f"{self._kernel.__name__} takes {whole.dtype} as {t.dtype}")
        name = next((name for name, value in self.values.items() if value is whole), f"p{len(self.values)}")
        self.values[name] = whole
        offset = t.storage_offset() - whole.storage_offset()
        if isinstance(offset, int):
            return f"{name} + {offset}" if offset else name
        return f"{name} + {self._number(offset)}"

    def constants(self, fixed: dict[str, object]) -> Iterator[str]:
        """The compile-time arguments, by name."""
        for name, value in fixed.items():
            if name in self._kernel.arg_names:
                if not (value is None or isinstance(value, (bool, int, str))):
                    raise Opaque(f"{name} of {self._kernel.__name__} is {value!r}")
                yield f"{name}={value!r}"

    def options(self, fixed: dict[str, Any]) -> tuple[int, int]:
        """(num_warps, num_stages); the other launch options must be Triton's defaults, which Inductor has."""
        usual = TRITON.make_backend(TRITON.driver.active.get_current_target()).parse_options({})
        for name in fixed.keys() - {*self._kernel.arg_names, *OPTIONS}:
            if getattr(usual, name) != fixed[name]:
                raise Opaque(f"{self._kernel.__name__} is compiled with {name}={fixed[name]!r}")
        warps, stages = (fixed.get(name, getattr(usual, name)) for name in OPTIONS)
        return warps, stages


@functools.cache
def _kernel(kernel: Kernel, call: str, parameters: tuple[str, ...], num_warps: int, num_stages: int) -> Kernel:
    """A flat kernel with these parameters that makes the call, with its launch options."""
    name = _name(kernel)
    source = f"def {name}({', '.join(parameters)}):\n    {call}\n"
    file = f"<fastvit_triton.convert.direct {next(_numbers)}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file  # where Triton reads it
    scope = {"tl": tl, kernel.__name__: kernel, "__name__": __name__}
    exec(compile(source, file, "exec"), scope)
    configs = [TRITON.Config({}, num_warps=num_warps, num_stages=num_stages)]
    return TRITON.autotune(configs, key=[])(jit(scope[name]))


def _name(kernel: Kernel) -> str:
    """Name of a flat kernel, such as linear_fwd_kernel."""
    return f"{kernel.fn.__module__.rpartition('.')[2]}_{kernel.__name__.strip('_')}"


def _tracer() -> Any:
    mode: Any = get_proxy_mode()
    return mode.tracer


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata
