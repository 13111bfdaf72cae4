"""Sharded models: which rank holds which part, and how norms and clipped sums are exchanged.

Files:

    detect                what has sharded a module
    sharding              which ranks share samples or parameters, as data
    dtensor               helpers for DTensors and for names that FSDP has changed
    placement             where a rank's part lies in the whole parameter
    norm_reduce           per-sample squared norms over ranks, of the global batch too
    gradient_reduce       clipped sums to their shards, and what stands in `.grad` before
    torch_compat          interfaces of PyTorch for all of these without public names
    fsdp1                 FSDP1's flat parameters
    agreement             the settings of a step, compared over all ranks
"""
