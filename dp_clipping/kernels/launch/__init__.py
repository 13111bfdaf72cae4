"""How kernels are launched.

Files:

    tiles                 what the matrix kernels share
    grouped_launch        one launch for many layers
    tuning                which tile is fastest on this machine's GPU, kept in files
"""
