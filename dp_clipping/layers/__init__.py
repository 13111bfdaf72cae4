"""Layers by kind: per-sample gradient, norm and clipped sum of each of their uses.

Files:

    handle                the state of a captured layer, and how it is used
    recorder              the interface of a private step for layers
    batch_layout          finds the dimension of a tensor that counts samples
    linear, convolution, norm, attention    layers with arithmetic of their own
    rms_norm_copies       RMS norms that other libraries define
    embedding/            nn.Embedding and nn.EmbeddingBag
    recurrent/            LSTM, GRU and RNN, and their cells
    projection            a linear layer, or one that is part of another layer; its norms and sums
                          from inputs and output gradients
    inner_call            a subclass of a layer, whose own forward calls the layer's
    registered/           layers of the user's own classes, given to `register_layer`
    vmap/                 any other module
    tensor_parallel       layers whose parameters are DTensors
"""
