"""Commands that measure, or verify, private training; each is `python -m experiments.NAME`."""

from lm.interrupt import end_quietly_when_interrupted

end_quietly_when_interrupted()
