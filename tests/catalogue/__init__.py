"""Small models of other packages with random weights, on which conversion is tested: name → `Entry`.

Packages are imported when a model is built, so that a release without some of the models can still be tested.
`catalogue.ours` has the families of this package that are no plain ViT, whose oracles are models of others.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from . import others, timm, transformers
from .entry import Entry, Given, Sizes, redraw

# models on which all that `optimize` does is tested; on the others conversion is
COMMON: dict[str, Entry] = timm.COMMON | transformers.COMMON | others.COMMON
MODELS: dict[str, Entry] = COMMON | timm.MORE | transformers.MORE | others.MORE
KINDS = ("swin", "twins", "pvt", "tnt", "crossvit", "pit", "segformer", "glpn")
PYRAMIDS = [name for name in COMMON if any(kind in name for kind in KINDS)]
# plain models all of whose modules, with other settings, others of the list have, too
REPEATS = """timm_deit_distilled timm_deit3 timm_clip timm_beit_shared timm_eva hf_vit_eager hf_deit hf_mae hf_dinov2
hf_beit_shared hf_dinov3_gated hf_data2vec vit_pytorch_simple""".split()
SPREADS = {
    "levit": (2.0, 4.0)
}  # of running statistics: without norms between its blocks, smaller ones make scores large


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The named model with random parameters and statistics."""
    model = redraw(MODELS[name].make())
    for key, buffer in model.named_buffers():
        if key.endswith(("running_mean", "running_var")):
            buffer.uniform_(*((2.0, 4.0) if name.startswith("hf_") else (0.5, 1.5)))
        if key.endswith(("_min", "_max")):  # of clipped layers
            buffer.fill_(-0.9 if key.endswith("min") else 0.8)
    return model._apply(lambda t: t.to(dtype) if t.is_floating_point() else t)  # complex buffers remain complex


def inputs(name: str, dtype: torch.dtype = torch.float64, sizes: Sizes = ()) -> Given:
    """Inputs of the named model: two images, or tokens.

    Args:
        sizes: rows and columns of patches of packed images; models of one size take as many images.
    """
    return MODELS[name].inputs(dtype, sizes)


def outputs(model: nn.Module, given: Given) -> Tensor:
    """All floating-point outputs of the model; in one vector, unless there is one tensor."""
    if isinstance(model, nn.MultiheadAttention):
        pairs = ((given, given), (given[:, :1], given))
        return torch.cat([model(q, kv, kv, need_weights=False)[0] for q, kv in pairs], 1)
    more = {"noise": torch.arange(4.0).expand(2, -1)} if type(model).__name__ == "ViTMAEModel" else {}
    y = model(**given) if isinstance(given, dict) else model(given, **more)
    return y if isinstance(y, Tensor) else joined(y)


def joined(y: Any) -> Tensor:
    """All floating-point tensors in nested outputs, or of gradients, as one vector."""
    return torch.cat([t.flatten() for t in leaves(y) if isinstance(t, Tensor) and t.is_floating_point()])


def leaves(y: Any) -> Iterator[Any]:
    """The values in nested dictionaries, lists and tuples."""
    if isinstance(y, Tensor) or not (hasattr(y, "values") or isinstance(y, (list, tuple))):
        yield y
        return
    for part in y.values() if hasattr(y, "values") else y:
        yield from leaves(part)
