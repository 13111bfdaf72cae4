"""Whole programs to start from: `python -m examples.private_text`."""
