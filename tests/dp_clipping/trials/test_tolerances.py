"""The shortest number says what may be rounding."""

import torch

from dp_clipping.trials.tolerances import Tolerance


def test_the_shortest_number_counts():
    tolerance = Tolerance(2.0, 4.0, 8.0)
    assert tolerance.of(torch.float64) == 8.0
    assert tolerance.of(torch.float64, torch.float32) == 4.0
    assert tolerance.of(torch.float32, torch.bfloat16) == 2.0
    assert tolerance.of(torch.float8_e4m3fn) == 2.0
    assert tolerance.of(torch.complex64) == 8.0
