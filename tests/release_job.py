"""Tests `optimize` on one release of timm or transformers in a process of its own, and prints the results as JSON."""

import copy
import inspect
import json
import platform
import sys
from collections.abc import Callable
from importlib import import_module, metadata

import torch
from budget import allowed, telling
from catalogue import COMMON, build, inputs, outputs, redraw
from catalogue.comparison import FEW, unrounded
from catalogue.entry import SIDE, images
from catalogue.timm import TIMM
from interpreter import interpreting
from torch import nn

import benchmarks  # noqa: F401  (must precede timm)
from fastvit_triton import optimize, revert
from fastvit_triton.convert.reporting import Report
from fastvit_triton.kernels import backend

ROUNDINGS = 84  # as in test_models.py
RATES = dict(drop_path_rate=0.2)


def fitted(module: str, name: str, **options: object) -> nn.Module:
    """An instance of the class, with only the options that this release accepts."""
    cls = getattr(import_module(f"timm.models.{module}"), name)
    known = set()
    for base in cls.__mro__:
        known |= set(inspect.signature(base.__init__).parameters) if base not in (nn.Module, object) else set()
    return cls(**{key: value for key, value in options.items() if key in known})


def deit() -> nn.Module:
    """DeiT with its distillation token, which older releases build by an argument of VisionTransformer."""
    try:
        return fitted("deit", "VisionTransformerDistilled", **TIMM, **RATES)
    except ImportError:
        return fitted("vision_transformer", "VisionTransformer", **TIMM, **RATES, distilled=True)


SWIN = dict(img_size=32, patch_size=4, embed_dim=16, depths=(2, 1), num_heads=(2, 4), window_size=4, num_classes=5)
PIT = dict(img_size=SIDE, patch_size=8, stride=4, base_dims=(12, 12), depth=(1, 1), heads=(2, 4), mlp_ratio=2)
EVA = dict(qkv_fused=False, swiglu_mlp=True, scale_mlp=True, use_rot_pos_emb=True, scale_attn_inner=True)
HF_MODELS = [n for n, entry in COMMON.items() if n.startswith("hf_") and not entry.single]
TIMM_MODELS = {
    "vit": lambda: fitted("vision_transformer", "VisionTransformer", **TIMM, **RATES),
    "deit": deit,
    "deit3": lambda: import_module("timm.models.vision_transformer").VisionTransformer(
        **TIMM, **RATES, init_values=0.1
    ),
    "siglip": lambda: import_module("timm.models.vision_transformer").VisionTransformer(
        **TIMM, **RATES, class_token=False, global_pool="map"
    ),
    "eva02": lambda: fitted("eva", "Eva", **TIMM, **RATES, **EVA),
    "beit": lambda: fitted("beit", "Beit", **TIMM, **RATES, use_rel_pos_bias=True, init_values=0.1),
    "swin": lambda: fitted("swin_transformer", "SwinTransformer", **SWIN, **RATES),
    "pit": lambda: fitted("pit", "PoolingVisionTransformer", **PIT, **RATES, num_classes=5),
    "cait": lambda: fitted("cait", "Cait", **TIMM, **RATES, init_values=0.1),
}
FAMILIES = {  # name → constructor and inputs
    "timm": {name: (make, images(SIDE, SIDE)) for name, make in TIMM_MODELS.items()},
    "transformers": {n.removeprefix("hf_"): (COMMON[n].make, COMMON[n].inputs) for n in HF_MODELS},
}
# towers of transformers whose submodules were nested otherwise in older releases, and packed ones
TOWERS = (
    "IJepaModel", "ViTMSNModel", "VivitModel", "VideoMAEModel", "YolosModel", "DPTModel", "ViltModel",
    "FlavaImageModel", "PixioModel", "BlipVisionModel", "InternVLVisionModel", "Idefics3VisionTransformer",
    "Glm4vVisionModel", "Qwen3VLVisionModel", "qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel",
    "qwen2_vl.Qwen2VisionTransformerPretrainedModel", "qwen2_5_omni.Qwen2_5OmniVisionEncoder",
)  # fmt: skip


def gradients(model: nn.Module, given: object) -> dict[str, torch.Tensor]:
    """The output and every gradient, with the same random numbers each time."""
    torch.manual_seed(1)
    y = outputs(model, given)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=y.dtype)
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad((y * weights).sum(), list(learning.values()), allow_unused=True)
    return {"output": y.detach()} | {n: g for n, g in zip(learning, found, strict=True) if g is not None}


def differs(model: nn.Module, plain: nn.Module, given: object) -> str | None:
    """Names the first difference between the two models in float64, on PyTorch; None if there is none."""
    for train in (False, True):
        got, want = (gradients(m.train(train), given) for m in (model, plain))
        if got.keys() != want.keys():
            return f"gradients of {sorted(got.keys() ^ want.keys())[0]}"
        largest = max(float(g.norm()) for name, g in want.items() if name != "output")
        telling(want["output"])
        for name, t in want.items():
            size = float(t.norm()) if name == "output" else largest
            if not float((got[name] - t).norm()) <= ROUNDINGS * torch.finfo(t.dtype).eps * size:
                return f"{name} in {'training' if train else 'inference'}"
    return None


def strays(model: nn.Module, plain: nn.Module, exact: object) -> str | None:
    """Says if the kernels' float32 output is further from float64 than twice PyTorch's own error; else None."""
    given = (
        {k: v.float() if v.is_floating_point() else v for k, v in exact.items()} if isinstance(exact, dict) else None
    )
    given = exact.float() if given is None else given
    truth, plain, model = plain.eval(), copy.deepcopy(plain).float().eval(), model.float().eval()
    with torch.no_grad():
        torch.manual_seed(1)
        want = outputs(truth, exact)
        torch.manual_seed(1)
        own = (outputs(plain, given) - want).norm()
        torch.manual_seed(1)
        with interpreting():
            error = (outputs(model, given) - want).norm()
    most = allowed(own, telling(want).norm(), torch.float32)
    return None if error <= most else f"the kernels' output by {float(error):.2g} of {float(most):.2g}"


def tried(make: Callable[[], nn.Module], draw: Callable[..., object]) -> dict[str, object]:
    """The outcome for one model family with these inputs, and whether its results are unchanged."""
    torch.manual_seed(0)
    try:
        plain = redraw(make()).double()
    except Exception as error:  # this release lacks the model
        return {"absent": sentence(error)}
    given = draw(torch.float64)
    return compared(plain, given)


def tower(name: str) -> dict[str, object]:
    """As `tried` for a tower of the catalogue, whose outputs in inference are compared."""
    torch.manual_seed(0)
    try:
        plain = build(f"hf_{name}").eval()
    except Exception as error:  # this release lacks the model
        return {"absent": sentence(error)}
    model = copy.deepcopy(plain)
    row = counted(optimize(model))
    try:
        given = inputs(f"hf_{name}")
        with torch.no_grad(), unrounded(), backend.using_backend("torch"):
            torch.manual_seed(1)
            want = outputs(plain, given)
            torch.manual_seed(1)
            error = (outputs(model, given) - want).norm() / want.norm()
        wrong = None if error <= FEW else f"output by {float(error):.2g}"
    except Exception as error:
        wrong = sentence(error)
    return row | {"equal": True if wrong is None else wrong}


def counted(report: Report) -> dict[str, object]:
    """What the report says was converted, and why the rest was not."""
    left = sorted({f"{r.type}: {r.why}" for r in report.left})
    return {"fused": len(report.fused), "norms": len(report.norms), "left": left}


def compared(plain: nn.Module, given: object) -> dict[str, object]:
    """The outcome for a model that can be built."""
    model = copy.deepcopy(plain)
    before = {path: dict(m.__dict__) for path, m in model.named_modules()}
    row = counted(optimize(model))
    try:
        with backend.using_backend("torch"):
            wrong = differs(model, plain, given)
        revert(model)
        same = all(m.__dict__.keys() == before[path].keys() for path, m in model.named_modules())
        optimize(model)
        wrong = wrong or strays(model, plain, given) or (None if same else "attributes after revert")
    except Exception as error:
        wrong = sentence(error)
    return row | {"equal": True if wrong is None else wrong}


def sentence(error: Exception) -> str:
    """The error as one line, without local paths."""
    return f"{type(error).__name__}: {error}".splitlines()[0].split(" (/")[0]


def main(package: str) -> None:
    """Prints the results for this release."""
    versions = {"torch": torch.__version__, "triton": metadata.version("triton"), "python": platform.python_version()}
    record = {"package": package, "version": metadata.version(package), **versions}
    try:
        import_module(package)
        import_module("timm.models" if package == "timm" else "transformers.models.vit.modeling_vit")
    except Exception as error:
        record["error"] = sentence(error)
    else:
        record["families"] = {name: tried(*row) for name, row in FAMILIES[package].items()}
        if package == "transformers":
            record["families"] |= {name.rpartition(".")[2]: tower(name) for name in TOWERS}
    print(json.dumps(record))


if __name__ == "__main__":
    main(sys.argv[1])
