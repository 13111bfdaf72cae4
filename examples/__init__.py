"""Whole programs to start from: `python -m examples.private_text`."""

from lm.interrupt import end_quietly_when_interrupted

end_quietly_when_interrupted()
