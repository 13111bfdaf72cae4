"""Modules without arithmetic of their own, run under `torch.vmap`.

Files:

    module                every sample with a copy of the parameters
    whole_batch           a module that adds or multiplies with its own parameters: without vmap
    objects               what calls leave in objects: put back after trials
    children              child layers of such a module, which run outside of vmap
    attention             attention in such a module, which runs outside of vmap
    refusals              names what code under vmap cannot do
"""
