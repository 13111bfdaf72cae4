"""The course's second part: what every rank holds in common is divided among the ranks.

In the order of reading, with the bytes that each of W ranks holds per parameter of a network in
float32 under Adam, as parameters + gradients + optimizer state:

    ddp_bucketed    4 + 4 + 8
    1. zero1.py     4 + 4 + 8/W      each rank steps its slice only
    2. zero2.py     4 + 4/W + 8/W    and keeps its slice of the gradients only
    3. fsdp.py      4/W + 4/W + 8/W  and its slice of the parameters only, but for two blocks

What the variants have in common:

- layout.py: how parameters lie in a flat buffer, and which part of it a rank owns
- optimizer.py: an optimizer whose ranks step their own slices, and agree on it before
- elementwise.py: which optimizers can step slices
- state.py: its whole checkpoint, to be skipped at the first reading
- interface.py: the methods that a training loop calls

What `fsdp` has beside, with units.py to be read first:

- units.py: the memory of a block's parameters, which comes and goes, and its gradients
- call_order.py: blocks are called in one order, and backward goes through them in its reverse, on
  every rank, also where it has failed
- whole.py: whole parameters on demand: where they are used outside of their block's forward, for
  evaluation, and for checkpoints

torch_compat.py has interfaces of PyTorch without a public name. What PyTorch has beside them is in
ddp/torch_zero1.py (ZeroRedundancyOptimizer) and ddp/torch_fsdp.py (fully_shard).
"""
