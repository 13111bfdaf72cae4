"""Layers of the user's own classes, whose per-sample gradients a function of theirs computes.

Files:

    registry              `register_layer`: classes and their functions
    module                runs such a layer in a private step, and delivers what its function returns
    one_alone             compares that with autograd on one sample alone
"""
