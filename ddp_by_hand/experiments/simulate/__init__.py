"""Predicts steps on other numbers of GPUs from traces: read `calibrate`, then `step`."""
