"""The error that a test allows, derived from float64, PyTorch's own error and the sums of an op; never a literal.

Also `telling`, which refuses expectations that prove nothing: a comparison with zeros passes for a model that computes
nothing.
"""

import math

import torch
from interpreter import interpreting, poisoned
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

UNIT = 2.0**-24  # the rounding unit of float32, in which kernels sum
C = 1.0  # see `Budget`
DRAWS = 4


def telling(want: Tensor, constant: bool = False) -> Tensor:
    """The expectation of a comparison, which must not be constant.

    Args:
        want: what a test expects; one value must not be 0, of several at least two must differ.
        constant: True where a constant or empty tensor is right, such as a gradient that vanishes in exact arithmetic.

    Raises:
        AssertionError: the expectation is empty or constant, so that a comparison with it proves little.
    """
    if not constant and want.device.type != "meta":
        values = want.detach().flatten()
        assert len(values), "the expectation is empty"
        assert bool((values != values[0]).any()) if len(values) > 1 else bool(values[0]), "the expectation is constant"
    return want


def allowed(own: float, size: float, dtype: torch.dtype) -> float:
    """The error of a whole model that a test allows: twice PyTorch's own against float64 and one rounding.

    Args:
        own: PyTorch's error in this dtype.
        size: of the exact result, in the same norm.
        dtype: in which the result is computed.
    """
    return 2 * (own + torch.finfo(dtype).eps * size)


def assert_within_budget(
    got: dict[str, Tensor], own: dict[str, Tensor], truth: dict[str, Tensor], dtype: torch.dtype = torch.float32
) -> None:
    """Asserts that the output and each gradient of a model are as close to float64 as PyTorch's, see `allowed`.

    Some gradients cancel (those of key biases vanish in exact arithmetic), so one rounding is relative to the model's
    largest gradient.

    Args:
        got: the result called "output" and gradients by name.
        own: the same of the original in this dtype.
        truth: the same of the original in float64.
        dtype: of the model, or of autocast.
    """
    largest_gradient = max((float(g.norm()) for n, g in truth.items() if n != "output"), default=0.0)
    assert got.keys() == truth.keys()
    telling(truth["output"])
    for name, want in truth.items():
        size = float(want.norm()) if name == "output" else largest_gradient
        theirs = float((own[name] - want).norm())
        assert theirs <= torch.finfo(dtype).eps ** 0.5 * size, f"{name}: the original is not an oracle"
        error, most = float((got[name] - want).norm()), allowed(theirs, size, dtype)
        assert got[name].isfinite().all() and error <= most, (name, error, most)


def leaves(value):
    """The tensors inside nested tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from leaves(item)


def converted(value, dtype):
    """The same structure with floating-point tensors in another dtype, as leaves of a new graph."""
    if isinstance(value, Tensor):
        return value.detach().to(dtype).requires_grad_(value.requires_grad) if value.is_floating_point() else value
    return tuple(converted(v, dtype) for v in value) if isinstance(value, tuple) else value


def largest(values):
    """The largest magnitude; 0 if there are no values."""
    return values.abs().max() if values.numel() else torch.tensor(0.0)


def root_mean_square(values):
    """The root mean square; 0 if there are no values."""
    return values.square().mean().sqrt() if values.numel() else torch.tensor(0.0)


def sizes(values):
    """The largest magnitude of the values, and their root mean square."""
    return torch.stack((largest(values), root_mean_square(values))).double()


# what rounding a result to nearest changes, in ε of its size; its largest element may be just above a power of two
ROUNDINGS = torch.tensor((1.0, 0.5), dtype=torch.float64)


def results(function, arguments, layout=lambda cotangent: cotangent):
    """Outputs and gradients by name, for fixed random cotangents in the given memory layout."""
    outputs = [t for t in leaves(function(**arguments)) if t.is_floating_point()]
    found = {f"output {i}": t.detach().double() for i, t in enumerate(outputs)}
    learning = [(n, i, t) for n, v in arguments.items() for i, t in enumerate(leaves(v)) if t.requires_grad]
    generator = torch.Generator().manual_seed(7)
    outputs = [t for t in outputs if t.requires_grad]
    cotangents = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype) for t in outputs]
    grads = torch.autograd.grad(outputs, [t for *_, t in learning], [layout(t) for t in cotangents])
    return found | {f"gradient of {n}[{i}]": g.double() for (n, i, _), g in zip(learning, grads, strict=True)}


def perturbed(value, generator):
    """The same structure with each number times 1 + UNIT or 1 − UNIT at random, as leaves of a new graph."""
    if isinstance(value, Tensor) and value.is_floating_point():
        signs = 2 * torch.randint(0, 2, value.shape, generator=generator, dtype=torch.float64) - 1
        return (value.detach() * (1 + UNIT * signs)).requires_grad_(value.requires_grad)
    return tuple(perturbed(v, generator) for v in value) if isinstance(value, tuple) else value


class Perturbing(TorchDispatchMode):
    """Perturbs what each operator makes, as `perturbed` does, because another operator sums it.

    Numbers that float32 represents, such as masks and indices, are not rounded and therefore not perturbed.
    """

    def __init__(self, generator):
        super().__init__()
        self.generator = generator

    def __torch_dispatch__(self, function, kinds, arguments=(), named=None):
        made = function(*arguments, **named or {})
        if any(result.alias_info is not None for result in function._schema.returns):  # a view, or written in place
            return made
        with _disable_current_modes():
            return tree_map(self._perturbed, made)

    def _perturbed(self, made):
        if not (isinstance(made, Tensor) and made.is_floating_point()):
            return made
        return torch.where(made.float() == made, made, perturbed(made, self.generator))


class Budget:
    """The error that each result of one call of an op may have against float64.

    The error of a result is measured in two norms: by its largest element, which shows a wrong element, and by its root
    mean square, which shows a loss of precision in all. Neither may exceed

        max(2 · own, C · √K · 2⁻²⁴ · ‖terms‖₂) + one rounding of the dtype.

    own is PyTorch's error for the same arguments in the same dtype. It depends on the order in which this CPU's
    libraries sum, and is small by chance on some CPUs. The second arm does not depend on a CPU. In a sum of K terms of
    random signs, the partial sum of k terms has the size √(k/K) · ‖terms‖₂, and adding the next term rounds it by a
    relative error of at most 2⁻²⁴, with standard deviation 2⁻²⁴/√3. If all terms are added one after the other, the
    standard deviation of the whole error is therefore √(K/6) · 2⁻²⁴ · ‖terms‖₂; any other order, such as that of tiles,
    has a smaller error. C = 1 is 2.4 standard deviations, which leaves room for roundings within elementwise functions:
    with C = 1/2, the derivative of GELU's tanh form at large pre-activations exceeds its budget.

    K is the longest of the sums behind a result, see `SUMS`. For y = Σ aᵢ · ∂y/∂aᵢ, ‖terms‖₂ is the standard deviation
    of y under independent relative perturbations of its operands aᵢ: 2⁻²⁴ · ‖terms‖₂ is the change of y in float64 when
    each number of the arguments, of the cotangents and of what PyTorch computes in between is multiplied by 1 ± 2⁻²⁴.
    What is in between also gives a size to gradients whose sums vanish. The change is measured in the same norm as the
    error, and its root mean square over DRAWS draws is taken; the largest error of many elements is thus compared with
    the largest change.

    Arguments in 16 bits are rounded before the float64 reference sees them. What a kernel rounds in between (weights,
    probabilities) PyTorch rounds as well, which `own` contains.
    """

    def __init__(self, op, case, dtype, **changed):
        self.op = op
        self.arguments = {n: converted(v, dtype) for n, v in (op.inputs(case, dtype, "cpu") | changed).items()}
        wide = {n: converted(v, torch.float64) for n, v in self.arguments.items()}
        self.truth, plain = results(op.reference, wide), results(op.reference, self.arguments)
        squares = dict.fromkeys(self.truth, 0.0)
        generator = torch.Generator().manual_seed(5)
        for _ in range(DRAWS):
            operands = {n: perturbed(v, generator) for n, v in wide.items()}
            with Perturbing(generator), sdpa_kernel(SDPBackend.MATH):  # whose sums are operators
                drawn = results(op.reference, operands, lambda t: perturbed(t, generator).detach())
            for name, want in self.truth.items():
                squares[name] += sizes(drawn[name] - want).square() / DRAWS
        self.own, self.sums, self.most = {}, {}, {}  # by name of a result, in each norm
        for name, want in self.truth.items():
            self.own[name] = sizes(plain[name] - want)
            self.sums[name] = C * math.sqrt(longest_sum(op, case, name)) * squares[name].sqrt()
            self.most[name] = torch.maximum(2 * self.own[name], self.sums[name])
            self.most[name] += torch.finfo(dtype).eps * ROUNDINGS * sizes(want)

    def run(self):
        """The results of the kernels; newly allocated memory is filled with NaN."""
        with interpreting(), poisoned():
            return results(self.op.run, self.arguments)

    def ratios(self, got):
        """The error of each result divided by what is allowed, in the norm in which that is more; NaN counts as ∞."""
        found = {}
        for name, want in self.truth.items():
            error = sizes(got[name] - want)
            # a result that is exact in PyTorch must be exact
            ratio = torch.where(error == 0, 0.0, error / self.most[name])
            found[name] = float(ratio.nan_to_num(math.inf, math.inf).max())
        return found


def outside(op, case, dtype, **changed):
    """Names of results of the kernels that are not within their budget; `changed` replaces arguments of the case."""
    budget = Budget(op, case, dtype, **changed)
    return [name for name, ratio in budget.ratios(budget.run()).items() if not ratio <= 1]


def longest_sum(op, case, result):
    """The number of terms of the longest sum behind a result: "output 0" or "gradient of x[0]"."""
    found = SUMS[op.name](case)
    kind = "output" if result.startswith("output") else result.removeprefix("gradient of ").split("[")[0]
    return found.get(kind, found["gradient"])


def _attention(case):
    keys, widths = case["Nk"], max(case["D"], case["Dv"])
    gradient = max(keys, widths, case["Nq"], case["B"])
    return dict(output=max(keys, case["D"]), q=max(keys, widths), gradient=gradient)


def _attention_qkv(case):
    tokens = max(case["N"], case["D"])
    return dict(output=tokens, qkv=tokens, gradient=max(tokens, case["B"] * case["H"] * case["N"]))


def _rows(case):
    return dict(output=case["D"], x=case["D"], residual=case["D"], gradient=max(case["D"], case["B"] * case["N"]))


def _linear(case):
    widths = max(case["K"], case["F"] * (2 if "gated" in case else 1))
    return dict(output=case["K"], x=widths, residual=1, gradient=max(widths, case["B"] * case["N"]))


def _mlp(case):
    widths = max(case["D"], case["F"] * (2 if "gated" in case else 1))
    return dict(output=max(case["D"], case["F"]), x=widths, residual=1, gradient=max(widths, case["B"] * case["N"]))


def _patch_embed(case):
    patches = case["B"] * (case["H"] // case["P"]) * (case["W"] // case["P"])
    return dict(output=case["C"] * case["P"] ** 2, image=case["D"], gradient=patches)


def _depthwise(case):
    taps = case["K"] ** 2
    return dict(output=taps, x=taps, gradient=max(taps, case["B"] * case["H"] * case["W"]))


def _window(case):
    window = case["h"] * case["w"]
    found, pixels = max(window, case["D"]), case["B"] * case["H"] * case["W"]
    return dict(output=found, qkv=found, scale=max(found, pixels * window), gradient=max(found, pixels))


def _deformable(case):
    points = case["P"] * sum(f"h{i}" in case for i in range(3))
    channels = max(case["D"], points)
    return dict(output=4 * points, value=case["Nq"] * points, reference=case["H"] * channels, gradient=channels)


# op → (case → number of terms of the longest sum behind the outputs, behind the gradients of some arguments, and behind
# those of all others)
SUMS = {
    "attention": _attention,
    "varlen_attention": lambda case: dict(gradient=max(case["D"], case["a"], case["b"], case["c"])),
    "attention_qkv": _attention_qkv,
    **dict.fromkeys(("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"), _rows),
    "fold": lambda case: dict(output=case["K"], gradient=max(case["K"], case["F"] * case["parts"])),
    "linear": _linear,
    "linear_with_statistics": lambda case: dict(gradient=max(case["K"], case["F"], case["B"] * case["N"])),
    "mlp": _mlp,
    "patch_embed": _patch_embed,
    "depthwise": _depthwise,
    "window_attention": _window,
    "deformable_attention": _deformable,
    "batch_norm_act": lambda case: dict(output=1, x=1, residual=1, gradient=case["B"] * case["H"] * case["W"]),
}
