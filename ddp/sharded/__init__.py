"""The course's second part: what every rank holds in common is divided among the ranks.

In the order of reading, with the bytes that each of W ranks holds per parameter of a network in
float32 under Adam, as parameters + gradients + optimizer state:

    ddp_bucketed    4 + 4 + 8
    1. zero1.py     4 + 4 + 8/W      each rank steps its slice only
    2. zero2.py     4 + 4/W + 8/W    and keeps its slice of the gradients only
    3. fsdp.py      4/W + 4/W + 8/W  and its slice of the parameters only, but for two blocks

What the variants have in common:

- layout.py: how parameters lie in a flat buffer of which a rank owns a slice
- base.py: gradients are reduced into slices
- slices.py: the optimizer's step of these slices
- optimizer.py: what it is to a training loop; the ranks agree on each step before

What `fsdp` has beside: units.py, the memory of a block's parameters, which comes and goes.

Skip at the first reading: internals/ (robustness, one concern a file), and torch_compat.py (PyTorch
interfaces without a public name). What PyTorch has beside the variants is in ddp/torch_ddp.py
(ZeroRedundancyOptimizer) and ddp/torch_fsdp.py (fully_shard).
"""
