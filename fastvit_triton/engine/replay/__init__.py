"""Replays the kernel launches of a block without the Python code that selected them.

The second call of a module with the same input layouts and settings is recorded (`record`, `recorder`). In later calls
a generated function (`build`, `emit`) repeats its launches and PyTorch operators in the same order, on the inputs, the
module's tensors, and one buffer for intermediate results. With gradients the backward pass is recorded too, and both
passes are one node of the autograd graph. `sources` returns the generated functions of a module.

Each call checks that nothing the recording depends on has changed: layouts of inputs and parameters, global settings,
and the state of the modules (`guard`). A call is not recorded if a module in it has hooks or comes from an unknown
package, or if it reads a value on the host or writes to a tensor that existed before the call.
FASTVIT_TRITON_REPLAY=0 disables replays.
"""

from .calls import call, call_block, call_branches, call_module, call_plain, repeated, sources

__all__ = ["call", "call_block", "call_branches", "call_module", "call_plain", "repeated", "sources"]
