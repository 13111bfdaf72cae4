"""Counts the privacy that a run spends, and states it.

Files:

    ledger            the engine's account, by noise key
    target_epsilon    the noise multiplier that ends a training at a given ε
    statement         the guarantee, with all that it depends on
"""
