"""Norms, coefficients and clipped sums of one step, of what its layers leave in backward.

Files:

    work                  when norms and sums are formed
    sync_points           where ranks of a sharded model send norms and sums
    plain                 norms, coefficients and sums in plain PyTorch; several uses, joined
    fused, clipped_sums   the same on the kernels, with few launches
    layer_plans           how each linear layer is handled, on kernels
    backward_state        norms and versions of what one backward leaves
"""
