"""Commands that measure, or verify, private training; each is `python -m experiments.NAME`."""
