"""Runs something again and compares: what all such checks share.

Files:

    probe                 runs a subject twice, and tells what differs by more than chance
    seen                  what a run shows of each sample, and what differs in another one
    schedule              which calls are checked: 1, 2, 4, 8, ...
    perturb               which samples another run has in place of those of the first
    randomness            states of random generators, saved and restored
    objects               what networks and arguments hold, to see what a run leaves and put it back
    places                the containers in which they hold it
    holders               what mappings and dataclasses hold, and copies that hold other things
    values                values of tensors, to find writes and to undo them
    draws                 runs without dropout, or with expected values for some random numbers
    routing               operators that pick or sort rows by values, and where these rows are
    tolerances            the differences that may be rounding
"""
