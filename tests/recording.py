"""Context that records which operators run."""

from torch.utils._python_dispatch import TorchDispatchMode


class Recorder(TorchDispatchMode):
    """Records the operators that run in its context, with their arguments and named arguments, in `calls`."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, kinds, arguments=(), named=None):
        self.calls.append((function, arguments, named or {}))
        return function(*arguments, **(named or {}))

    @property
    def ops(self):
        """The names of all operators."""
        return [function.name() for function, *_ in self.calls]

    @property
    def found(self):
        """(operator, arguments) of the calls of our operators."""
        return [(function, given) for function, given, _ in self.calls if function.namespace == "fastvit_triton"]

    @property
    def ours(self):
        """The names of our operators, by their last part."""
        return [function.name().split("::")[1] for function, _ in self.found]
