"""Keeps the sharded variants right in unusual cases, one concern a file.

A first reading can skip them.

- stand_in.py: tensors of which this rank has a slice only, and no values
- views.py: parameters are views of a flat buffer, and what is written to them
- gradients.py: what `.grad` is once a gradient is divided
- interface.py: the methods that a training loop and the optimizer call
- agreement.py: ranks tell each other what they are about to do
- state.py: whole checkpoints of an optimizer
- blocks.py, of `fsdp`: which modules are blocks, and in which order they are called, in forward and
  in backward, on every rank, also where it has failed
- whole.py, of `fsdp`: calls of blocks, whole parameters, checkpoints, and failures
"""
