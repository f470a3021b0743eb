"""Replays the launches of a block without the Python that chose them.

A module's call is recorded once it has been seen with the same inputs and settings before; from then on its launches
and PyTorch operators are called again in the same order, on the same places of memory: those of the inputs, of the
module's tensors, and of one buffer for what launches leave to each other. With gradients the backward pass is recorded
with it, and both are one node of autograd's graph.

A replay needs all that decided the recorded call to be as it was: layouts of inputs and parameters, global settings,
and what the modules hold; each call checks them (`guard`). A call is not recorded if a module in it comes from an
unknown package or has hooks, or if the call reads a value on the host or writes to a tensor that was there before.
FASTVIT_TRITON_REPLAY=0 turns replays off.
"""

from .calls import call

__all__ = ["call"]
