"""Launching of kernels: tiles, tables of operands, and their tuning.

Files:

    tiles                 what the matrix kernels share
    grouped_launch        one launch for many layers
    tuning                which tile is fastest on this machine's GPU, kept in files
"""
