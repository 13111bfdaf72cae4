"""Finds the samples in a network's arguments.

Files:

    batch                 how many there are, and arguments with others of them
    bags                  samples that lie one after another, as ids with offsets do
    padded                samples that are padded, and arguments without their padding
    trees                 what is in tuples, lists, dicts, other mappings and dataclasses
    packed                packed sequences, and sequences with rows in their places
    refusals              what errors of the search say of bags and packed sequences
"""
