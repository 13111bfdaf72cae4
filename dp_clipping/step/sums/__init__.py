"""Norms, coefficients and clipped sums of one step, of what its layers leave in backward.

Files:

    work                  when norms and sums are formed
    sync_points           where ranks of a sharded model send norms and sums
    plain                 norms, coefficients and sums in plain PyTorch
    fused, clipped_sums   the same on the kernels, with few launches
    uses                  what several uses of a parameter leave, joined
    layer_plans           how each linear layer is handled
    step_norms            norms of one backward, and their sums over ranks
"""
