"""Counts the privacy that a run spends, and states it.

Files:

    history           lists of steps, as Opacus's accountants keep them
    ledger            the engine's account, by noise key
    pld               ε of Gaussian noise on Poisson batches: the default accountant
    mechanism         noise and sampling together: what an account's steps release
    truncated_poisson ε of truncated Poisson batches
    balls_in_bins     ε of balls-in-bins batches
    cyclic            ε of cyclic batches
    target_epsilon    the noise multiplier that ends a training at a given ε
    tradeoff          what an attacker can achieve, from ε at many δ
    proofs            which page of `docs/proofs` covers a run, and what none covers
    statement         the guarantee, with all that it depends on
"""
