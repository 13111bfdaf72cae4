"""Whole programs to start from: `python -m examples.private_text`."""

from lm.interrupt import begin_program

begin_program()
