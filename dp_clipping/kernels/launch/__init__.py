"""Launches matrix kernels: their tiles, their tables of operands, and the choice of tiles.

Files:

    tiles                 one launch, and the reading of tiles, shared by all matrix kernels
    grouped_launch        one launch for many layers
    tuning                measures which tile is fastest on a GPU, and stores it in files
"""
