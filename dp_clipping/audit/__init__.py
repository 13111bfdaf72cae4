"""Audits: what an attacker can tell from a private run, and which ε that refutes.

Files:

    bound         lower bounds on ε from guesses about canaries
"""
