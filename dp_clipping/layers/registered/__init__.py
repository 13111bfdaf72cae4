"""Layers of the user's own classes, with gradients computed by the user's functions.

Files:

    registry              classes and their functions
    norm_and_sum          factors of a layer whose functions never form per-sample gradients
    module                runs such a layer in a private step, and delivers its functions' results
    one_alone             compares these with autograd on one sample alone
"""
