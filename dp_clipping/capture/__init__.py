"""The layers of a network, captured so that they deliver per-sample gradients.

Files:

    capture               replaces the layers' forwards; the parameters, their groups and slots
    network               a captured network as steps and searches know it; its modules
    batch                 the samples in a forward's arguments
    layout_search         where the samples are in each layer's tensors
    sample_independence   refuses networks and losses that mix samples
    discovery             when these are looked for, and with whose samples
    observation           what each layer sees of each sample, forward and backward
    summaries             a sample's part of a tensor in a few numbers, to be compared
    randomness            the same random numbers in two runs, or none
    backward              frees what a backward that failed has left
    losses                refuses losses that depend on other samples
    state, carried        where a network holds values, and refuses those that carry data
    compile_forecast      what a compiled region must be told beforehand
"""
