"""Keeps the sharded variants right in unusual cases, one concern a file.

A first reading can skip them.

- gradients.py, stand_in.py: what `.grad` is once a rank has only its slice of a gradient
- interface.py: the methods that a training loop and the optimizer call
- agreement.py: ranks tell each other what they are about to do
- state.py: whole checkpoints of an optimizer
- elementwise.py: which optimizers can step slices
- views.py: parameters are views of a flat buffer, also where code gives them other memory
- blocks.py, of `fsdp`: which modules are blocks, and in which order they are called, in forward and
  in backward, on every rank, also where it has failed
- divided.py, whole.py, of `fsdp`: parameters outside of their block's forward, and all at once
"""
