"""The parts of `ddp.base.DataParallel`, one per concern; a first reading can skip them.

- replicas.py: every rank has the same model and the values of rank 0
- gradients.py, dtypes.py: what each `.grad` holds, and in which dtype
- hooks.py: how autograd reports gradients
- step.py, unused.py: incomplete and failed steps, parameters without a gradient
- lookups.py: which rows of an embedding's gradient can differ from zero
- watch.py: parameters that change when they must not
- ownership.py: several wrappers of one network
- wrapper.py: copies, pickles, statistics
- manual_gradients.py: the seam for private training
- optimizer.py: the optimizer of a replicated network, and the norm of its gradient
"""
