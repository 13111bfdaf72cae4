"""The choice of an algorithm per linear layer, by predicted cost.

Files:

    cost_model            predicted time and memory of a layer
    plan                  chooses within a memory budget, and prints its table
"""
