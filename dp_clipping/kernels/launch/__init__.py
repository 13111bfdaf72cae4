"""Launches matrix kernels: their tiles, their tables of operands, and the choice of tiles.

Files:

    launch                one launch, by what is known of the last one alike
    tiles                 reading of tiles, shared by all matrix kernels
    grouped_launch        one launch for many layers
    tuning                measures which tile is fastest on a GPU, and stores it in files
"""
