"""Exports a model to ONNX, torch.export or AOTInductor, and compares the written file with PyTorch.

The programs contain PyTorch's operators only, so they run without this package and without Triton. They take images
[B, C, H, W] of one size and any B, already normalised; how images are prepared is in the file's metadata.
"""

import copy
import importlib
import importlib.util
import io
import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import __version__
from ..convert import revert
from ..files import replacing, write_failure
from ..kernels.backend import using_backend
from ..models.naflex import NaFlexVisionTransformer
from ..models.weights.pretrained import class_names
from ..preparation import data_config

SUFFIXES = {"onnx": ".onnx", "torch-export": ".pt2", "aotinductor": ".pt2"}
OPSETS = range(18, 26)  # of ONNX; torch.onnx converts to no others
OPSET = 20  # the first that has GELU
ONNX_LIMIT = 2**31  # bytes of a protobuf message
METADATA = "metadata.json"  # extra file of a torch.export program
BATCHES = (1, 3)  # sizes that are compared
ERRORS = (RuntimeError, ValueError, TypeError, AssertionError)  # what torch.export raises for a model it cannot record

# A sum of K rounded terms in order has sqrt(K / log2 K) times the error of one in pairs: 16 for 3,000 terms, as in the
# MLP of ViT-B. So a correct program differs from PyTorch by at most about 16 times PyTorch's own error.
FACTOR = 16

Run = Callable[[Tensor], Tensor]


class Exported(NamedTuple):
    """What `export_model` wrote.

    Attributes:
        metadata: the file's metadata: model, input_size, interpolation, mean, std, crop_pct, crop_mode, versions, and
            where they are known classes and opset. ONNX and AOTInductor hold the JSON text of each value under its
            name, torch.export all of them in the extra file "metadata.json".
        difference: the largest from PyTorch's outputs, for 1 and for 3 random images; None if the file was not
            compared because onnxruntime is not installed.
        allowed: the difference up to which the file is accepted.
    """

    metadata: dict[str, Any]
    difference: float | None
    allowed: float


def export_model(
    model: nn.Module,
    path: str | os.PathLike,
    to: str,
    *,
    preparation: Mapping[str, Any] | None = None,
    classes: Sequence[str] | None = None,
    opset: int = OPSET,
    device: str | torch.device = "cpu",
) -> Exported:
    """Writes a model's inference in float32 for other runtimes, atomically, after comparing the file with PyTorch.

    An ONNX program has the input "images" and the output "logits".
    The model stays as it is: a copy is exported, without what `optimize` and `freeze` added. A NaFlex model is exported
    as the plain ViT with the same weights, for images of one size.

    Args:
        model: takes images [B, C, H, W] and returns one tensor; from `create_model`, timm or elsewhere.
        path: file to write; ends in ".onnx", else in ".pt2".
        to: "onnx", "torch-export" (for `torch.export.load`) or "aotinductor" (compiled, for
            `torch._inductor.aoti_load_package` and C++, for processors that have all instructions of this one).
        preparation: how images are prepared, with keys of `data_config`, whose values it replaces.
        classes: names in the order of the logits; None takes those that are known of the weights.
        opset: version of ONNX's operators, 18 to 25.
        device: device that AOTInductor compiles for and torch.export records; an ONNX file has none.

    Raises:
        ValueError: an argument is invalid, the model cannot be exported, a package is missing, or the file's outputs
            differ from PyTorch's by more than rounding; a file at `path` is then unchanged.
        TypeError: the model is no nn.Module.
        OSError: the file cannot be written.
    """
    path = Path(path)
    name = getattr(model, "variant", type(model).__name__)
    _check(model, path, to, opset)
    prepared = {**data_config(model), **(preparation or {})}
    names = class_names(model) if classes is None else classes
    metadata = {"model": name, **prepared} | ({"classes": list(names)} if names else {})
    metadata |= {"opset": opset} if to == "onnx" else {}
    metadata |= {"fastvit_triton": __version__, "torch": torch.__version__}
    model = _plain(model, prepared["input_size"]).to(device)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(max(BATCHES), *prepared["input_size"], generator=generator).to(device)
    with torch.no_grad(), using_backend("torch"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own, of what it deprecates
        want, allowed = _outputs(model, images, name)
        program = _record(model, images, name)
        try:
            content = WRITERS[to](program, images, metadata)
        except RuntimeError as error:
            raise ValueError(f"{name} cannot be exported to {to}: {_reason(error)}") from error
        try:
            with replacing(path) as temporary:
                temporary.write_bytes(content)
                run = LOADERS[to](temporary)
                difference = None if run is None else max(float(_largest(run(images[: len(y)]), y)) for y in want)
                if difference is not None and not difference <= allowed:  # NaN is a difference
                    raise ValueError(
                        f"the {to} program of {name} differs from PyTorch by {difference:.1e}, more than the "
                        f"{allowed:.1e} that rounding explains; {path} was not written"
                    )
        except OSError as error:
            raise OSError(f"cannot write {path}: {write_failure(error)}") from error
    return Exported(metadata, difference, allowed)


def _check(model: nn.Module, path: Path, to: str, opset: int) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}; give an nn.Module")
    if to not in SUFFIXES:
        raise ValueError(f"to is {to!r}; use one of {', '.join(SUFFIXES)}")
    if path.suffix != SUFFIXES[to]:
        raise ValueError(f"{path} is no name for {to}; name a file that ends in {SUFFIXES[to]}")
    if to != "onnx":
        return
    if opset not in OPSETS:
        raise ValueError(f"opset is {opset}; use {OPSETS[0]} to {OPSETS[-1]}")
    if importlib.util.find_spec("onnxscript") is None:
        raise ValueError("onnxscript is not installed, which ONNX files need; pip install 'fastvit_triton[export]'")
    size = 4 * sum(t.numel() for t in (*model.parameters(), *model.buffers()))
    if size >= ONNX_LIMIT:
        raise ValueError(f"the weights take {size / 2**30:.1f} GiB, and an ONNX file holds 2; export to torch-export")


def _plain(model: nn.Module, size: Sequence[int]) -> nn.Module:
    """A copy in float32 and evaluation mode that takes images [B, C, H, W] and calls its own modules only."""
    model = copy.deepcopy(model).float().eval()
    revert(model)
    return model.for_images((size[1], size[2])) if isinstance(model, NaFlexVisionTransformer) else model


def _outputs(model: nn.Module, images: Tensor, name: str) -> tuple[list[Tensor], float]:
    """The outputs for each of `BATCHES`, and the difference from them that rounding explains."""
    try:
        want = [model(images[:batch]) for batch in BATCHES]
    except ERRORS as error:
        size = " x ".join(map(str, images.shape[1:]))
        raise ValueError(
            f"{name} cannot run on images of {size}: {_reason(error)}; give their input_size in preparation"
        ) from error
    if not isinstance(want[0], Tensor):
        raise ValueError(f"{name} returns a {type(want[0]).__name__}; give a model from images to one tensor")
    exact = copy.deepcopy(model).double()(images.double())
    rounding = torch.finfo(torch.float32).eps * exact.abs().max()
    return want, float(FACTOR * (_largest(want[-1], exact) + rounding))


def _largest(y: Tensor, want: Tensor) -> Tensor:
    """The largest difference between two outputs; infinite if their shapes differ."""
    return (y.to(want) - want).abs().max() if y.shape == want.shape else torch.tensor(float("inf"))


def _record(model: nn.Module, images: Tensor, name: str) -> torch.export.ExportedProgram:
    shapes = ({0: torch.export.Dim("batch", min=1)},)
    try:
        return torch.export.export(model, (images,), dynamic_shapes=shapes, strict=False)
    except ERRORS as error:
        raise ValueError(f"torch.export cannot record {name} for any number of images: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """The first line of what caused it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return next(iter(str(error).splitlines()), type(error).__name__)


def _texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    return {key: json.dumps(value) for key, value in metadata.items()}


def _onnx(program: torch.export.ExportedProgram, images: Tensor, metadata: Mapping[str, Any]) -> bytes:
    names: dict[str, Any] = dict(input_names=["images"], output_names=["logits"])
    names["dynamic_shapes"] = ({0: "batch"},)  # the name of the axis in the file
    options: dict[str, Any] = dict(dynamo=True, verbose=False, opset_version=metadata["opset"])
    onnx_program: Any = torch.onnx.export(program, (images,), **names, **options)
    for node in onnx_program.model.graph:
        node.metadata_props.clear()  # stack traces, with paths of this machine
    onnx_program.model.metadata_props.update(_texts(metadata))
    return onnx_program.model_proto.SerializeToString()


def _load_onnx(path: Path) -> Run | None:
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    runtime: Any = importlib.import_module("onnxruntime")
    errors: Any = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")
    try:
        session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    except (errors.Fail, errors.InvalidGraph, errors.NotImplemented) as error:
        raise ValueError(f"onnxruntime {runtime.__version__} does not run the program: {_reason(error)}") from error
    return lambda images: torch.from_numpy(session.run(None, {"images": images.cpu().numpy()})[0])


def _torch(program: torch.export.ExportedProgram, images: Tensor, metadata: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()  # to a full disk, PyTorch's writer aborts the process
    torch.export.save(program, buffer, extra_files={METADATA: json.dumps(metadata)})
    return buffer.getvalue()


def _compiled(program: torch.export.ExportedProgram, images: Tensor, metadata: Mapping[str, Any]) -> bytes:
    inductor: Any = importlib.import_module("torch._inductor")
    buffer = io.BytesIO()
    options = {"aot_inductor.metadata": _texts(metadata)}
    try:
        inductor.aoti_compile_and_package(program, package_path=buffer, inductor_configs=options)
    except RuntimeError as error:
        if "InvalidCxxCompiler" not in str(error):
            raise
        raise ValueError("AOTInductor needs a C++ compiler; install g++, or name one in CXX") from error
    return buffer.getvalue()


WRITERS = {"onnx": _onnx, "torch-export": _torch, "aotinductor": _compiled}
LOADERS: dict[str, Callable[[Path], Run | None]] = {
    "onnx": _load_onnx,
    "torch-export": lambda path: torch.export.load(path).module(),
    "aotinductor": lambda path: importlib.import_module("torch._inductor").aoti_load_package(str(path)),
}
