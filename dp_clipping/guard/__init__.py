"""Refuses networks, losses and state with which a sample's gradient depends on other samples.

What is checked is run again with other samples in some places, and compared: see `trials` for what
all checks share. Collate functions are checked in `sampling`, registered layers in `layers`.

Files:

    guard                 when the samples are looked for and checked, and with whose samples
    company               networks: beside other samples, and among one more
    exchange              losses: in their graph, and by the criterion with other samples
    lengths               networks and losses, for a sample with and without its padding
    carried               state that carries data from one batch to the next
    probe                 one run of the plain network: what each layer sees of each sample
    state, places         what a network holds at one moment, and where
"""
