"""Layers of the user's own classes, with gradients computed by the user's functions.

Files:

    built_in              the kinds of layers that have arithmetic of the library's own
    registry              `register_layer`: classes and their functions
    norm_and_sum          factors of a layer whose functions never form per-sample gradients
    module                runs such a layer in a private step, and delivers its functions' results
    one_alone             compares these with autograd on one sample alone
"""
