"""Refuses networks, losses and state with which a sample's gradient depends on other samples.

`trials.probe` runs a subject as it is, and with other samples in some places, and compares what it
shows of the samples that stay. These are the subjects:

    guard                 when the samples are looked for and checked, and with whose samples
    network               a network, beside other samples and among one more
    observer              subject: a network, and what each layer in it sees of each sample
    rounding              errors of the size of rounding, with which runs are repeated
    losses                subjects: a criterion, and the graph of its losses
    lengths               subject: a sample with and without its padding
    carried               subject: state that carries data from one batch to the next, and objects
                          in arguments that do

Collate functions are checked in `sampling`, registered layers in `layers`.
"""
