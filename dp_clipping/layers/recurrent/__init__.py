"""`nn.LSTM`, `nn.GRU` and `nn.RNN`, also on packed sequences.

Files:

    module                layers and directions of a module, one after the other
    recurrence            all time steps of one of them as one autograd function
    cells                 one time step, forward and backward
"""
