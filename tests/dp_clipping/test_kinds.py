"""What counts as a number."""

from fractions import Fraction

import numpy as np
import pytest

from dp_clipping.kinds import is_number, number, plain


@pytest.mark.parametrize("value", [1, 2.5, Fraction(1, 3), np.float32(2), np.int64(3)])
def test_numbers(value):
    assert is_number(value)
    number("one").check("sigma", value)
    assert type(plain(value)) in (int, float)
