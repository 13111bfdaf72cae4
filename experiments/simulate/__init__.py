"""Predicts steps on other numbers of GPUs from traces.

In the order of reading: `calibrate`, `cost`, `plan`, `step`, `validate`.
"""
