"""`freeze`: marks weights as final, and tells what that does and what to expect of it."""

import weakref
from dataclasses import dataclass, field

import torch
from torch import nn

from ..engine.freeze import freeze as freeze_weights
from ..engine.hooks import is_our_forward
from ..kernels import onednn
from ..kernels.backend import why_not
from . import on_cpu
from .conversion import engine_layers, folded_norms
from .flop_shares import stated_input

BYTES = {"bf16": (2, 2), "int8": (1, 8)}  # of a packed weight, and of an output's bias, in int8 and its scale


@dataclass(frozen=True)
class Frozen:
    """What `freeze` did; prints as one or two lines, for which it counts the blocks of a model on a CPU.

    Attributes:
        precision: of the linear layers on a CPU.
        norms: number of norms that are folded into the linear layers after them where blocks run fused on a GPU.
        layers: number of linear layers whose weights are packed where oneDNN runs them on a CPU.
        nbytes: bytes of these packed weights, at most.
    """

    precision: str
    norms: int
    layers: int
    nbytes: int
    _model: "weakref.ref[nn.Module]" = field(repr=False, compare=False)

    def __str__(self) -> str:
        """What was frozen, and on a CPU what was measured of such a model."""
        model = self._model()
        parameter = None if model is None else next(model.parameters(), None)
        if model is None or parameter is None:
            return "Frozen."
        if why_not(parameter.device, parameter.dtype) is None:
            norms = "1 norm is" if self.norms == 1 else f"{self.norms} norms are"
            saved = "which saves a launch or two in each such block"
            return f"Frozen: {norms} folded once, in the next inference call, where blocks run fused, {saved}."
        rule = onednn.rule(parameter.device, parameter.dtype)
        if not rule.runs and self.precision == "float32":
            return f"Frozen, which changes nothing here, as PyTorch runs all linear layers: {rule.why}."
        example = stated_input(model)
        numbers = on_cpu.numbers_of(model, example, parameter.dtype, self.precision)
        packed = f"{self.layers} linear layers keep packed weights, at most {self.nbytes / 1e6:.1f} MB"
        if not any(is_our_forward(module.__dict__.get("forward")) for module in model.modules()):
            return "Frozen, which changes nothing here, as the model is not converted; call optimize first."
        if not self.layers:
            return "Frozen, which changes nothing here, as no linear layer can keep packed weights."
        if numbers is None:
            sizes = " where their sizes in a call say so" if self.precision == "float32" else ""
            runs = f"linear layers run by oneDNN{on_cpu.NAMES[self.precision]}{sizes}"
        elif not numbers.frozen:
            batch = on_cpu.batch_of(example)
            return f"Frozen, which changes nothing here, as PyTorch's products are faster for batch {batch}."
        else:
            runs = f"{numbers.said(numbers.frozen, self.precision)} in inference"
        done = f"Frozen: {runs}; {packed}."
        macs = None if numbers is None else numbers.products
        is_measured = parameter.dtype == torch.float32
        return f"{done}\n{on_cpu.evidence(macs, self.precision)}" if is_measured else done


def freeze(model: nn.Module, precision: str = "float32") -> Frozen:
    """Marks a model's weights as final: its LayerNorms are folded once, in the next inference call, and stay folded.

    In fused blocks this saves the launch that otherwise folds both LayerNorms in each call, or the two LayerNorm
    launches of a batch with few rows; a captured block also keeps all else that it computes from weights alone, for
    which one that was compiled before is captured and compiled anew in its next call; other blocks have nothing to
    fold. Each call checks that the weights are the same tensors at the same addresses, with the same dtype and no
    writes counted by PyTorch. If not, it folds again, into the same memory. Writes that PyTorch does not count (through
    `.data`, NumPy, DLPack, the storage, or to inference tensors) are not detected: call `freeze` again after them.
    Calls in training mode or with gradients for the weights fold in each call.

    Until `unfreeze`, the folds take about 58 % of the memory of a fused block's weights. Captured blocks keep more, and
    once for each mode and form of a graph (replayed or compiled) that is called. A CUDA graph reads them at fixed
    addresses: run the frozen model once before the capture, and do not unfreeze it while the graph is in use. Copies
    and pickles of a model are not frozen, and a compiled model folds in each call. On a CPU, linear layers that run by
    oneDNN keep a copy of their weights in its layout, with LayerScale multiplied in, from their next inference call on;
    this takes at most the memory of these weights once more. Nothing else is kept there.

    Args:
        model: one of ours, or one that `optimize` converted.
        precision: of the linear layers of fused blocks of a float32 model on a CPU, in inference: "float32"; "bf16",
            operands and results rounded to bfloat16; or "int8", operands rounded to 8 bits, with one scale for each row
            of x, found in each call, and one for each output of the weight. Sums are in float32 or int32; everything
            else stays float32. Compare a model's accuracy before you use them.

    Returns:
        Frozen: what was frozen and what to expect of it, as one or two lines when it is printed.

    Raises:
        TypeError: model is not an nn.Module.
        ValueError: the precision is unknown, or this CPU or the model's device or dtype does not support it.
    """
    freeze_weights(model, precision)
    layers = engine_layers(model)
    nbytes = 0
    for weight in (layer.weight for layer in layers):
        of_weight, of_bias = BYTES.get(precision, (weight.element_size(),) * 2)
        nbytes += weight.numel() * of_weight + weight.shape[0] * of_bias
    return Frozen(precision, len(folded_norms(model)), len(layers), nbytes, weakref.ref(model))
