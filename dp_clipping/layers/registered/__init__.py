"""Layers of the user's own classes, whose per-sample gradients a function of theirs computes.

Files:

    registry              `register_layer`: classes and their functions
    module                runs such a layer in a private step, and delivers its function's results
    one_alone             compares these with autograd on one sample alone
"""
