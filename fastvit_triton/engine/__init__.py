"""How a block runs: in place of its modules' forwards, in as few launches as the modules allow.

In goes what `convert` read of a block: a `Body` (projections, what runs between them, output) or `MlpBody`, which hold
the block's own modules; x goes through it. `kernels.choose.way_of` decides how (fused, mixed, onednn, plain), which
`ways` caches by block, `leaves` reads weights, `hooks` and `source` tell whether they may be read, `freeze` keeps
folded weights, `replay` repeats recorded launches.

Begin with `body` and `branch`; `replay` has a page of its own.
"""
