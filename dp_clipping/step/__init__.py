"""One private step: forward, backward, norms, clipped sums, `.grad`.

Files:

    context               what all steps of one model have in common
    forward_backward      runs the passes of a private model
    private_step          one step in plain PyTorch
    fused_step            the same on the kernels, with few launches
    timed_step            the profiling switch: a step whose phases and layers are timed
    norm_queue            operands whose norms have not been taken yet
    clipped_sums          clipped sums on the device
    launch_schedule       when queued work is launched
    state                 phase, settings, norms and counts of a step: who asks, asks it
    gradient_buffer       `.grad` from `zero_grad` to the next
    rng_replay            a second backward draws the random numbers of the first
"""
