"""Norms and clipped sums of a step."""
