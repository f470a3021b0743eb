"""The model of expected time: launches and bytes counted from shapes, and times from rates; nothing runs.

Shapes or a model without weights go in; counts and predicted microseconds come out, and rows of ways for the kernels'
tables. No process that runs a model imports this room. `rates.json` has the rates of each GPU with their sources.

Begin with `count`, which predicts a model, and `trace`; rows of ways are made from `blocks` and `ops`.
"""
