"""Exports a model to ONNX, OpenVINO, torch.export or AOTInductor, and compares the written file with PyTorch.

The programs contain standard operators only, so they run without this package and without Triton. They take images
[B, C, H, W], by default of one size and any B, already normalised; how images are prepared is in the file's metadata.
"""

import copy
import importlib
import importlib.util
import io
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
from ..preparation import bare, data_config

SUFFIXES = {"onnx": ".onnx", "openvino": ".xml", "torch-export": ".pt2", "aotinductor": ".pt2"}
WEIGHTS = ".bin"  # suffix of the second file of OpenVINO
OPSETS = range(17, 26)  # of ONNX; torch.onnx writes 18 and later, and onnx converts to 17, the first that has LayerNorm
OPSET = 20  # the first that has GELU
ONNX_LIMIT = 2**31  # bytes of a protobuf message
METADATA = "metadata.json"  # extra file of a torch.export program
BATCHES = (1, 3)  # sizes that are compared
AXES = {"batch": 0, "height": 2, "width": 3}  # of images, whose sizes may be free
THROUGH_ONNX = ("onnx", "openvino")
LOGGERS = ("torch.onnx", "onnxscript", "onnx_ir")  # they warn of what is not installed, and log what then raises
ERRORS = (RuntimeError, ValueError, TypeError, AssertionError)  # what torch.export raises for a model it cannot record

# A sum of K rounded terms in order has sqrt(K / log2 K) times the error of one in pairs: 16 for 3,000 terms, as in the
# MLP of ViT-B. So a correct program differs from PyTorch by at most about 16 times PyTorch's own error.
FACTOR = 16

Run = Callable[[Tensor], Tensor]
Files = dict[str, bytes]  # suffix → content


class Exported(NamedTuple):
    """What `export_model` wrote.

    Attributes:
        metadata: the file's metadata: model, input_size, interpolation, mean, std, crop_pct, crop_mode, free_sizes,
            versions, and where they are known classes and opset. ONNX and AOTInductor hold the JSON text of each value
            under its name, OpenVINO under "framework" in its runtime information, torch.export all of them in the extra
            file "metadata.json".
        difference: the largest from PyTorch's outputs, for 1 and for 3 random images, and where the height or width is
            free for one of twice the size; None if the file was not compared because onnxruntime is not installed.
        allowed: the difference up to which the file is accepted.
    """

    metadata: dict[str, Any]
    difference: float | None
    allowed: float

    def __str__(self) -> str:
        if self.difference is None:
            return f"{self.metadata['model']}, not compared with PyTorch"
        error = f"{self.difference:.1e} (rounding explains up to {self.allowed:.1e})"
        return f"{self.metadata['model']}, largest difference from PyTorch {error}"


def export_model(
    model: nn.Module,
    path: str | os.PathLike,
    to: str,
    *,
    preparation: Mapping[str, Any] | None = None,
    classes: Sequence[str] | None = None,
    opset: int = OPSET,
    free_sizes: Sequence[str] = ("batch",),
    device: str | torch.device = "cpu",
) -> Exported:
    """Writes a model's inference in float32 for other runtimes, atomically, after comparing the file with PyTorch.

    ONNX and OpenVINO programs have the input "images" and the output "logits".
    The model stays as it is: a copy is exported, without what `optimize`, `freeze` and torch.compile added, and without
    DataParallel. A NaFlex model is exported as the plain ViT with the same weights, for images of one size.

    Args:
        model: takes images [B, C, H, W] and returns one tensor; from `create_model`, timm or elsewhere.
        path: file to write; ends in ".onnx", for OpenVINO in ".xml" (the weights are beside it in ".bin"), else in
            ".pt2".
        to: "onnx", "openvino" (read from the ONNX program), "torch-export" (for `torch.export.load`) or "aotinductor"
            (compiled, for `torch._inductor.aoti_load_package` and C++, for processors that have all instructions of
            this one).
        preparation: how images are prepared, with keys of `data_config`, whose values it replaces; the size of images
            is read from the model.
        classes: names in the order of the logits; None takes those that are known of the weights.
        opset: version of ONNX's operators, 17 to 25; for ONNX and OpenVINO.
        free_sizes: which of "batch", "height" and "width" each call may choose; others are 1, and the size of images.
        device: device that AOTInductor compiles for and torch.export records; the other files have none.

    Raises:
        ValueError: an argument is invalid, the model cannot be exported, a package is missing, or the file's outputs
            differ from PyTorch's by more than rounding; a file at `path` is then unchanged.
        TypeError: the model is no nn.Module.
        OSError: the file cannot be written.
    """
    path = Path(path)
    _check(model, path, to, opset, free_sizes)
    model = bare(model)
    name = getattr(model, "variant", type(model).__name__)
    prepared = {**data_config(model), **(preparation or {})}
    names = class_names(model) if classes is None else classes
    metadata = {"model": name, **prepared} | ({"classes": list(names)} if names else {})
    metadata |= {"free_sizes": list(free_sizes)} | ({"opset": opset} if to in THROUGH_ONNX else {})
    metadata |= {"fastvit_triton": __version__, "torch": torch.__version__}
    model = _plain(model, name, prepared["input_size"]).to(device)
    inputs = [images.to(device) for images in _inputs(prepared["input_size"], free_sizes)]
    with torch.no_grad(), using_backend("torch"), _quiet():
        want, allowed = _outputs(model, inputs, name)
        program = _record(model, inputs[0], name, free_sizes)
        try:
            files = WRITERS[to](program, inputs[0], metadata)
        except RuntimeError as error:
            raise ValueError(f"{name} cannot be exported to {to}: {_reason(error)}") from error
        try:
            with ExitStack() as stack:
                written = [stack.enter_context(replacing(path.with_suffix(suffix))) for suffix in files]
                for temporary, content in zip(written, files.values(), strict=True):
                    temporary.write_bytes(content)
                run = LOADERS[to](*written)
                pairs = zip(inputs, want, strict=True)
                difference = None if run is None else max(float(_largest(run(x), y)) for x, y in pairs)
                if difference is not None and not difference <= allowed:  # NaN is a difference
                    raise ValueError(
                        f"the {to} program of {name} differs from PyTorch by {difference:.1e}, more than the "
                        f"{allowed:.1e} that rounding explains; {path} was not written"
                    )
        except OSError as error:
            raise OSError(f"cannot write {path}: {write_failure(error)}") from error
        except AssertionError as error:  # of a guard on a size
            raise ValueError(f"{name} does not take any {' and '.join(free_sizes)}: {_reason(error)}") from error
    return Exported(metadata, difference, allowed)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings of PyTorch and onnxscript about themselves: what fails is raised."""
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    try:
        for name in LOGGERS:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def _check(model: nn.Module, path: Path, to: str, opset: int, free_sizes: Sequence[str]) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}; give an nn.Module")
    if to not in SUFFIXES:
        raise ValueError(f"to is {to!r}; use one of {', '.join(SUFFIXES)}")
    if path.suffix != SUFFIXES[to]:
        raise ValueError(f"{path} is no name for {to}; name a file that ends in {SUFFIXES[to]}")
    if isinstance(free_sizes, str) or not set(free_sizes) <= AXES.keys():
        raise ValueError(f"free_sizes is {free_sizes!r}; give a sequence of {', '.join(AXES)}")
    if to not in THROUGH_ONNX:
        return
    if opset not in OPSETS:
        raise ValueError(f"opset is {opset}; use {OPSETS[0]} to {OPSETS[-1]}")
    if to == "openvino" and importlib.util.find_spec("openvino") is None:
        raise ValueError("openvino is not installed, which OpenVINO files need; pip install 'fastvit_triton[openvino]'")
    if importlib.util.find_spec("onnxscript") is None:
        raise ValueError("onnxscript is not installed, which ONNX files need; pip install 'fastvit_triton[export]'")
    size = 4 * sum(t.numel() for t in (*model.parameters(), *model.buffers()))
    if size >= ONNX_LIMIT:
        through = "" if to == "onnx" else ", from which OpenVINO reads them"
        raise ValueError(
            f"the weights take {size / 2**30:.1f} GiB, and an ONNX file{through} holds 2; export to torch-export"
        )


def _plain(model: nn.Module, name: str, size: Sequence[int]) -> nn.Module:
    """A copy in float32 and evaluation mode that takes images [B, C, H, W] and calls its own modules only."""
    for path, module in model.named_modules():
        tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        kinds = [f"has weights of type {type(t).__name__}" for t in tensors if type(t) not in (Tensor, nn.Parameter)]
        kinds += [f"is a quantised {type(module).__name__}"] * hasattr(module, "_packed_params")
        if kinds:
            raise ValueError(
                f"{name} cannot be exported: its {path or 'weight'} {kinds[0]}; export the plain model, and quantise "
                "the file, such as by onnxruntime.quantization"
            )
    model = copy.deepcopy(model).float().eval()
    for path, module in list(model.named_modules()):
        if path and bare(module) is not module:
            model.set_submodule(path, bare(module))
    revert(model)
    return model.for_images((size[1], size[2])) if isinstance(model, NaFlexVisionTransformer) else model


def _inputs(size: Sequence[int], free_sizes: Sequence[str]) -> list[Tensor]:
    """Random images to record and compare: several, then one, then one of twice the size, as far as sizes are free."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(max(BATCHES), *size, generator=generator)
    inputs = [images[:batch] for batch in sorted(BATCHES, reverse=True) if batch == 1 or "batch" in free_sizes]
    larger = [
        2 * side if axis in free_sizes else side for side, axis in zip(size[1:], ("height", "width"), strict=True)
    ]
    return inputs + [torch.randn(1, size[0], *larger, generator=generator)] * (larger != list(size[1:]))


def _outputs(model: nn.Module, inputs: Sequence[Tensor], name: str) -> tuple[list[Tensor], float]:
    """The outputs for each of the inputs, and the difference from them that rounding explains."""
    want: list[Any] = []
    for images in inputs:
        try:
            want.append(model(images))
        except ERRORS as error:
            first = images.shape[2:] == inputs[0].shape[2:]
            remedy = "give their input_size in preparation" if first else "leave height and width out of free_sizes"
            size = " x ".join(map(str, images.shape[1:]))
            raise ValueError(f"{name} cannot run on images of {size}: {_reason(error)}; {remedy}") from error
    if not isinstance(want[0], Tensor):
        raise ValueError(f"{name} returns a {type(want[0]).__name__}; give a model from images to one tensor")
    exact = copy.deepcopy(model).double()(inputs[0].double())
    rounding = torch.finfo(torch.float32).eps * exact.abs().max()
    return want, float(FACTOR * (_largest(want[0], exact) + rounding))


def _largest(y: Tensor, want: Tensor) -> Tensor:
    """The largest difference between two outputs; infinite if their shapes differ."""
    return (y.to(want) - want).abs().max() if y.shape == want.shape else torch.tensor(float("inf"))


def _record(model: nn.Module, images: Tensor, name: str, free_sizes: Sequence[str]) -> torch.export.ExportedProgram:
    """The model's operators; ValueError if they depend on the sizes that are free."""
    any_size = torch.export.Dim.DYNAMIC
    dims = {AXES[size]: torch.export.Dim("batch", min=1) if size == "batch" else any_size for size in free_sizes}
    try:
        return torch.export.export(model, (images,), dynamic_shapes=(dims,), strict=False)
    except ERRORS as error:
        free = f" for any {' and '.join(free_sizes)}" if free_sizes else ""
        raise ValueError(f"torch.export cannot record {name}{free}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """The first line of what caused it, after those with places in OpenVINO's source."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = (line for line in str(error).splitlines() if not line.startswith("Exception from "))
    return next(lines, type(error).__name__)


def _texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    return {key: json.dumps(value) for key, value in metadata.items()}


def _onnx(program: torch.export.ExportedProgram, images: Tensor, metadata: Mapping[str, Any]) -> Files:
    names: dict[str, Any] = dict(input_names=["images"], output_names=["logits"])
    names["dynamic_shapes"] = ({AXES[size]: size for size in metadata["free_sizes"]},)  # names of axes in the file
    options: dict[str, Any] = dict(dynamo=True, verbose=False, opset_version=metadata["opset"])
    onnx_program: Any = torch.onnx.export(program, (images,), **names, **options)
    version = onnx_program.model.opset_imports[""]
    if version != metadata["opset"]:
        raise RuntimeError(f"it has operators that opset {metadata['opset']} lacks; use opset {version} or later")
    for node in onnx_program.model.graph:
        node.metadata_props.clear()  # stack traces, with paths of this machine
    onnx_program.model.metadata_props.update(_texts(metadata))
    return {".onnx": onnx_program.model_proto.SerializeToString()}


def load_onnx(path: Path) -> Run | None:
    """The program in onnxruntime, with PyTorch's number of threads; None if onnxruntime is not installed."""
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    runtime: Any = importlib.import_module("onnxruntime")
    errors: Any = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.force_spinning_stop", "1")  # its threads wait busily after a call, too
    try:
        session = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except (errors.Fail, errors.InvalidGraph, errors.NotImplemented) as error:
        raise ValueError(f"onnxruntime {runtime.__version__} does not run the program: {_reason(error)}") from error
    return lambda images: torch.from_numpy(session.run(None, {"images": images.cpu().numpy()})[0])


def _openvino(program: torch.export.ExportedProgram, images: Tensor, metadata: Mapping[str, Any]) -> Files:
    openvino: Any = importlib.import_module("openvino")
    (content,) = _onnx(program, images, metadata).values()
    model = openvino.Core().read_model(io.BytesIO(content))
    for key, text in _texts(metadata).items():
        model.set_rt_info(text, ["framework", key])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.xml"
        openvino.save_model(model, path, compress_to_fp16=False)
        return {suffix: path.with_suffix(suffix).read_bytes() for suffix in (SUFFIXES["openvino"], WEIGHTS)}


def load_openvino(*files: Path) -> Run | None:
    """The program of an ONNX file, or of OpenVINO's two, in OpenVINO, in float32 and with PyTorch's number of threads.

    None if openvino is not installed.
    """
    if importlib.util.find_spec("openvino") is None:
        return None
    openvino: Any = importlib.import_module("openvino")
    settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
    core = openvino.Core()
    try:
        compiled = core.compile_model(core.read_model(*files), "CPU", settings)
    except RuntimeError as error:
        raise ValueError(f"OpenVINO {openvino.__version__} does not run the program: {_reason(error)}") from error
    return lambda images: torch.from_numpy(compiled(images.cpu().numpy())[0])


def _torch(program: torch.export.ExportedProgram, images: Tensor, metadata: Mapping[str, Any]) -> Files:
    buffer = io.BytesIO()  # to a full disk, PyTorch's writer aborts the process
    torch.export.save(program, buffer, extra_files={METADATA: json.dumps(metadata)})
    return {".pt2": buffer.getvalue()}


def _compiled(program: torch.export.ExportedProgram, images: Tensor, metadata: Mapping[str, Any]) -> Files:
    inductor: Any = importlib.import_module("torch._inductor")
    buffer = io.BytesIO()
    options = {"aot_inductor.metadata": _texts(metadata)}
    try:
        inductor.aoti_compile_and_package(program, package_path=buffer, inductor_configs=options)
    except RuntimeError as error:
        if "InvalidCxxCompiler" not in str(error):
            raise
        raise ValueError("AOTInductor needs a C++ compiler; install g++, or name one in CXX") from error
    return {".pt2": buffer.getvalue()}


WRITERS = {"onnx": _onnx, "openvino": _openvino, "torch-export": _torch, "aotinductor": _compiled}
LOADERS: dict[str, Callable[..., Run | None]] = {
    "onnx": load_onnx,
    "openvino": load_openvino,
    "torch-export": lambda path: torch.export.load(path).module(),
    "aotinductor": lambda path: importlib.import_module("torch._inductor").aoti_load_package(str(path)),
}
