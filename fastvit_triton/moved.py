"""Modules that were moved in 0.2: importing an old name raises an ImportError that gives the new one.

Pickles of whole models name modules too, so one that an earlier version wrote is refused by the same sentence.
"""

import sys
from importlib.abc import MetaPathFinder

MOVED = {  # old name → new name, both without "fastvit_triton."; a package's modules moved with it unless listed
    "convert.from_timm": "convert.readers.timm",
    "convert.from_torch": "convert.readers.torch",
    "convert.from_torchvision": "convert.readers.torchvision",
    "convert.from_transformers": "convert.readers.transformers",
    "convert.from_vit_pytorch": "convert.readers.vit_pytorch.tokens",
    "convert.from_vit_pytorch_maps": "convert.readers.vit_pytorch.maps",
    "export": "deploy.export",
    "graphs": "deploy.cuda_graph",
    "layers.body": "engine.body",
    "layers.boxes": "models.lvvit",
    "layers.branch": "engine.branch",
    "layers.compact": "models.cct",
    "layers.composed": "engine.attention",
    "layers.conv_projection": "models.cvt",
    "layers.cross": "models.crossvit",
    "layers.enhanced": "models.ceit",
    "layers.freeze": "engine.freeze",
    "layers.hooks": "engine.hooks",
    "layers.inner": "models.tnt",
    "layers.levit": "models.levit",
    "layers.mixing": "layers.head_mixing",
    "layers.module_parts": "engine.leaves",
    "layers.one_query": "models.cait",
    "layers.packing": "engine.packing",
    "layers.parted": "engine.body",
    "layers.pooling": "models.pit",
    "layers.quadratic": "models.attention_conv",
    "layers.rel2d": "models.botnet",
    "layers.replay": "engine.replay",
    "layers.soft_split": "models.t2t",
    "layers.source": "engine.source",
    "layers.spatial": "engine.attention",
    "layers.visual_tokens": "models.vt",
    "layers.ways": "engine.ways",
    "models.compact": "models.cct",
    "packed_graphs": "deploy.packed_graphs",
    "warm_up": "deploy.warm_up",
    "weights": "models.weights",
    "weights.adapt": "checkpoints.tensors",
    "weights.convolutional": "models.cvt",
    "weights.layouts": "checkpoints.renaming",
    "weights.one_scale": "models.cct",
    "weights.places": "checkpoints.locations",
    "weights.pyramid": "models.swin",
    "weights.reading": "checkpoints.reading",
    "weights.stems": "models.pit",
    "weights.vit": "models.fit",
}
PACKAGE = __package__


class Finder(MetaPathFinder):
    """Raises ImportError for modules that were moved; consulted after the finders that load modules."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """Returns None for every module that was not moved."""
        name = fullname.removeprefix(f"{PACKAGE}.")
        if name in MOVED and fullname != name:
            inside = [f"{new} for {old}" for old, new in MOVED.items() if old.startswith(f"{name}.")]
            others = f" ({', '.join(inside)})" if inside else ""
            text = f"{fullname} was moved in version 0.2; import {PACKAGE}.{MOVED[name]}{others}"
            raise ImportError(text, name=fullname)


def install() -> None:
    """Adds the finder to those of the interpreter, once."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.append(Finder())
