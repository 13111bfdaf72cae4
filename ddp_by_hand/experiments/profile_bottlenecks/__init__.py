"""Finds what bounds a private step: `python -m ddp_by_hand.experiments.profile_bottlenecks`."""
