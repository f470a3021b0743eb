"""Tests of the memory that a CUDA graph reads. Oracle: what outlives the capture, by its storage.

A graph reads the same addresses at each replay, so what the captured call reads and did not make must live as long as
the graph: parameters, buffers, folds of a frozen model, the graph's inputs. Captures are repeated calls on the CPU;
launches of kernels do nothing, but their tensors and addresses are seen.
"""

import copy

import pytest
import torch
from catalogue import COMMON, build, inputs
from catalogue.ours import CASES
from catalogue.timm import MORE
from test_graphs import Packed, packed
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.no_device import no_device
from fastvit_triton import create_model, cuda_graph, cuda_graph_packed, freeze, optimize
from fastvit_triton.deploy import cuda_graph as graphs
from fastvit_triton.engine.freeze import kept_folds
from fastvit_triton.kernels import settings
from fastvit_triton.kernels.op import REGISTERED
from fastvit_triton.kernels.settings import forcing
from fastvit_triton.kernels.sizes import WAYS

MODES = {  # dtype of the weights, whether autocast is on
    "float32": (torch.float32, False),
    "autocast": (torch.float32, True),
    "bfloat16": (torch.bfloat16, False),
}


class Reads(TorchDispatchMode):
    """Context that notes which memory operators and launches read without having made it.

    Attributes:
        tensors: a tensor of each storage that was read and not made, and by what.
        addresses: those that replayed launches got.
    """

    def __init__(self):
        super().__init__()
        self._depth = 0  # of nested contexts
        self.forget()

    def forget(self):
        """Forgets what was read and made."""
        self.tensors, self.addresses = {}, set()
        self._made, self._alive = set(), []

    def __enter__(self):
        self._depth += 1
        return super().__enter__()

    def __exit__(self, *error):
        self._depth -= 1
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, kinds, arguments=(), named=None):
        if function.namespace == "fastvit_triton":
            with self:
                return REGISTERED[function.name().split("::")[1].split(".")[0]][0](*arguments, **(named or {}))
        for value in tree_leaves((arguments, named)):
            if isinstance(value, Tensor) and function is not torch.ops.aten.lift_fresh.default:  # of torch.tensor(...)
                self._read(value, function.name())
        results = function(*arguments, **(named or {}))
        for t in tree_leaves(results):
            if isinstance(t, Tensor):
                self._alive.append(t)  # so that its memory is not used again
                self._made.add(t.untyped_storage()._cdata)
        return results

    def launched(self, x, y, z, stream, function, metadata, *rest):
        """Stands in for Triton's launcher."""
        if self._depth:
            for value in tree_leaves(rest):
                if isinstance(value, Tensor):
                    self._read(value, "a launch")
                elif type(value) is int and value >= 2**32:
                    self.addresses.add(value)

    def _read(self, t, by):
        if t.untyped_storage()._cdata not in self._made:
            self.tensors.setdefault(t.untyped_storage()._cdata, (t, by))

    def strangers(self, lasting):
        """Descriptions of what was read and not made, and does not belong to the lasting tensors."""
        storages = {t.untyped_storage()._cdata for t in lasting}
        found = [f"{by} reads {t.dtype} {tuple(t.shape)}" for s, (t, by) in self.tensors.items() if s not in storages]
        known = [t.untyped_storage() for t in (*lasting, *self._alive)]
        spans = [(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in known]
        lost = [a for a in self.addresses if not any(start <= a < end for start, end in spans)]
        return found + [f"a launch reads address {address:#x}" for address in lost]


def ours(name):
    """One of our families, small, and two images."""
    case = CASES[name]
    return create_model(case.name, **{"img_size": case.sizes[0], **case.options}), torch.randn(2, 3, *case.sizes[0])


FAMILIES = {f"ours {name}": lambda name=name: ours(name) for name in CASES}
FAMILIES |= {
    name: lambda name=name: (build(name, torch.float32), inputs(name, torch.float32))
    for name in COMMON | MORE
    if name not in ("hf_siglip2", "timm_naflex", "torch_multihead")  # which take more than one tensor
}


SAMPLE = "ours swin", "ours cct", "timm_vit", "timm_dinov3", "hf_clip"
OWN_CACHES = {  # models whose own code keeps tensors elsewhere: parts of their names, and how many
    "hf_dinov3": 1,  # coordinates of patches, in a cache of 32 sizes of images
    "hf_beit": 1,  # indices of relative positions, in a cache of 10 sizes of images
    "hf_data2vec": 1,  # as BEiT
    "vit_pytorch_simple": 1,  # positions, an attribute of the model
    "timm_levit": 3,  # biases of each attention, until `train` is called, in plain blocks; also the next two
    "timm_efficientformer": 1,
    "timm_tiny_vit": 2,
}


@pytest.fixture
def reads(monkeypatch):
    """What captured calls read; a capture is a call, with blocks replayed as in a graph."""
    found = Reads()

    def capture(run, pool):
        for _ in range(graphs.WARMUPS):
            run()
        with found, pytest.MonkeyPatch.context() as patch:
            patch.setattr(settings, "is_observed", lambda: False)  # by `found`
            return run(), lambda: None

    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(graphs, "can_capture", lambda x: True)
    return found


def lasting(graph):
    """The tensors that live as long as a model and its only graph."""
    (one,) = graph._graphs.values()
    folds = [t for fold in kept_folds(graph.model.modules()) for t in fold.kept.folded[:3]]
    inputs = [t for t in one.inputs if isinstance(t, Tensor)]
    return [*graph.model.parameters(), *graph.model.buffers(), *folds, *inputs]


@pytest.mark.few(3)
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # of Gemma 4 in bfloat16
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SAMPLE else pytest.mark.full) for n in FAMILIES])
def test_graphs_read_what_outlives_them(reads, name):
    """Oracle: in every way, or frozen, and with a dtype for each, all that is read and not made lives as long as the
    model; models take the pairs of a way and a dtype in turn.
    """
    made, x = FAMILIES[name]()
    first, modes = list(FAMILIES).index(name), list(MODES.items())
    for i, way in enumerate((*WAYS, "frozen")):
        mode, (dtype, autocast) = modes[(first + i) % len(modes)]
        model = copy.deepcopy(made).to(dtype).eval()
        if not name.startswith("ours"):
            optimize(model)
        if way == "frozen":
            freeze(model)
        reads.forget()
        forced = forcing("fused" if way == "frozen" else way)
        with no_device(reads.launched), forced, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            graph = cuda_graph(model, x.to(dtype), batch_sizes=(2,))
        strangers = reads.strangers(lasting(graph))
        allowed = next((count for part, count in OWN_CACHES.items() if part in name), 0)
        assert len(strangers) <= allowed, (mode, way, strangers)
        assert reads.tensors or reads.addresses
        assert reads.addresses or name not in SAMPLE or way == "plain", "blocks are replayed"


def test_packed_graphs_read_what_outlives_them(reads):
    """Oracle: as above, of a model on packed images."""
    with torch.autocast("cpu", torch.bfloat16):
        graph = cuda_graph_packed(Packed().eval(), packed(3, 5), token_budgets=(32,), max_images=4)
    assert reads.tensors and reads.strangers(lasting(graph)) == []


class Caches(nn.Module):
    """A model that keeps a tensor of its last call."""

    def __init__(self):
        super().__init__()
        self.layer, self.kept = nn.Linear(4, 4), {}

    def forward(self, x):
        """[B, 4] → [B, 4]."""
        if x.shape not in self.kept:
            self.kept = {x.shape: torch.arange(4.0)}
        return self.layer(x) + self.kept[x.shape]


def test_what_a_model_keeps_is_found(reads):
    """Oracle: by hand, one tensor that another size of input frees, and its operator."""
    graph = cuda_graph(Caches().eval(), torch.randn(2, 4), batch_sizes=(2,))
    assert reads.strangers(lasting(graph)) == ["aten::add.Tensor reads torch.float32 (4,)"]


def test_autocast_caches_casts_again_after_a_capture(reads):
    """Oracle: the setting before, also after an error."""

    class Broken(nn.Module):
        def forward(self, x):
            assert not torch.is_autocast_cache_enabled()
            raise RuntimeError("broken")

    for before in (True, False):
        torch.set_autocast_cache_enabled(before)
        try:
            with pytest.raises(RuntimeError, match="broken"):
                cuda_graph(Broken().eval(), torch.randn(2, 4), batch_sizes=(2,))
            assert torch.is_autocast_cache_enabled() == before
        finally:
            torch.set_autocast_cache_enabled(True)
