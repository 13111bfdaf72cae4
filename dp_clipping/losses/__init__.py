"""Losses of private training: one per sample, also where the network computes them itself.

Files:

    private_loss  a batch's losses as one number, whose `backward` clips
    in_network    lets `model(**batch).loss` be one: its means are taken for each sample
"""
