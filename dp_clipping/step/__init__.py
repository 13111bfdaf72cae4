"""One private step: forward, backward, norms, clipped sums, `.grad`.

Files:

    context               what all steps of one model have in common
    forward_backward      runs the passes of a private model
    inputs                the arguments of a forward, and what their rows are
    private_step          one step: what layers talk to, and its phases
    slots                 inputs of compiled regions, at which what layers leave arrives
    sums/                 norms and clipped sums of what layers leave in its backward
    state                 phase, settings, norms and counts of a step, in one place
    gradient_buffer       `.grad` from `zero_grad` to the next, and what else changes it
    gradient_noise        adds noise to `.grad`, and divides it, by settings of the step
    gradient_hooks        users' hooks on parameters, called with the noisy gradient
"""
