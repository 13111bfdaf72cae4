"""The backend of a private step whose norms and sums run on the kernels, with few launches.

Files:

    backend               norms, coefficients and sums of a step
    layer_plans           the algorithm of each linear layer
    norm_queue            operands whose norms have not been taken yet
    coefficients          clip coefficients that stay on the device
    clipped_sums          clipped sums on the device
    launch_schedule       when queued work is launched
"""
