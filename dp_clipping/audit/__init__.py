"""Audits: what an attacker can tell from a private run, and which ε that refutes.

Files:

    audits        `PrivacyEngine.audit` and `record_sums`
    canaries      units whose gradient is one coordinate of their own
    copies        copies of a user's network and optimizer
    attacks       guesses about which canaries were in the data
    bound         lower bounds on ε from guesses
    curve         ε(δ) as an account states it
    report        both beside each other
    noise         whether noise is independent, Gaussian and large enough
    records       one step on data with and without a unit
"""
