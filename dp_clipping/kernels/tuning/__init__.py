"""Measurements of this machine's GPU, and what is chosen by them.

Files:

    choice                which tile a matrix kernel takes
    timing                times of calls that can be compared with each other
    cache                 what was measured, in files for later runs
"""
