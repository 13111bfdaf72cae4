"""`nn.LSTM`, `nn.GRU` and `nn.RNN`, also on packed sequences, and their cells.

Files:

    module                layers of a module, one after the other
    recurrence            what a layer's backward leaves of its weights' per-sample gradients
    kernel                all time steps of a layer, on PyTorch's own kernel
    packing               where tokens of packed sequences are
    cells                 `nn.LSTMCell`, `nn.GRUCell` and `nn.RNNCell`
    kinds                 which modules have this arithmetic
"""
