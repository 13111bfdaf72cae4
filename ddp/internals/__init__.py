"""Keeps a step of `ddp.base.DataParallel` right in unusual cases, one concern a file.

A first reading can skip them.

- interface.py: the objects below, and the methods of a wrapper that take no part in a step
- ranks.py: what ranks tell each other
- replicas.py: every rank has the same model and the values of rank 0
- gradients.py: what each `.grad` holds, and in which dtype
- hooks.py: how autograd reports gradients, to one of several wrappers of a network
- step.py, unused.py: what a step has sent; incomplete and failed steps, parameters without a
  gradient
- watch.py: parameters that change when they must not
- kernels.py: two kernels, of `ddp_copy_engine` and of `fsdp`
- rounds.py: options and state of `diloco`
- states.py: states of all ranks, for checkpoints
"""
