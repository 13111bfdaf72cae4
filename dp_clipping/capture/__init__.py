"""The layers of a network, captured so that they deliver per-sample gradients.

Files:

    capture               replaces the layers' forwards
    ownership             whose parameters are whose, and which methods a module has of its own
    vmap_trial            whether modules under vmap can leave their child layers outside
    callers               modules whose code needs weights that other layers own
    layer_kinds           which arithmetic a layer gets
    network               a captured network as steps and searches know it: parameters, sessions
    unchanged             refuses layers and parameters that were changed meanwhile
    samples/              the samples in a forward's arguments
    layout_search         where the samples are in each layer's tensors
    checks/               what steps and checks compare
    calls                 whose calls are private steps, and whose copies are plain
    compile_forecast      what a compiled region must be told beforehand
"""
