"""Relative differences that may be rounding: of two runs, and of a step and its reference."""

from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

ITEMSIZE = attrgetter("itemsize")


@dataclass(frozen=True)
class Tolerance:
    """The largest relative difference that is no finding, by the bytes of a number.

    Attributes:
        two: of float16 and bfloat16, and of numbers that are shorter.
        four: of float32.
        eight: of float64.
    """

    two: float
    four: float
    eight: float

    def of(self, *dtypes: torch.dtype) -> float:
        """Returns that of the shortest of these dtypes."""
        shortest = min(map(ITEMSIZE, dtypes))
        return self.two if shortest < 4 else self.four if shortest < 8 else self.eight


# One batch twice, in one shape, so mostly by the same kernels: a GPU's atomic operations add in
# another order.
REPEATED = Tolerance(1e-2, 1e-5, 1e-5)
# A sample beside others, or among more of them: the kernels may be others. Relative to the norm of
# what the sample has in a tensor. Float32 products are full ones: TensorFloat-32 differs by 5e-4.
BESIDE = Tolerance(1e-2, 1e-4, 1e-4)
# Sums of whole numbers in float64: only norms round, by the order of their sum.
WHOLE = 1e-12
# A sample of another length: reductions over fewer numbers, and attention by other kernels.
SHORTER = Tolerance(3e-2, 2e-4, 2e-4)
SHORTER_IN_FLOAT64 = 1e-4  # that it is no rounding: it stays in float64
# A registered function beside autograd on one sample, which may be another formula altogether.
ALONE = Tolerance(5e-2, 1e-3, 1e-6)
# A step beside one ordinary backward per sample: a sample's norm, and a parameter's clipped sum.
NORM = Tolerance(6e-2, 1e-4, 1e-4)
SUM = Tolerance(1e-1, 2e-4, 2e-4)
FLOOR = Tolerance(1e-2, 1e-3, 1e-3)  # a smaller part of the largest value may be rounding alone
# Times the error of one sample's own backward: kernels of batches round otherwise.
OF_BATCHES = Tolerance(5, 10, 10)

# A difference is a finding if it is so many times larger than those that errors of the size of
# rounding, or other random numbers, cause.
TIMES = 4.0
# In a repeated run with such errors, what changes by so many times its tolerance is no rounding.
RANDOM = 100


def are_close(found: list[Tensor], wanted: list[Tensor]) -> bool:
    """Returns whether tensors are equal up to what kernels of several layers round.

    In 16 bit that adds up. What is not finite counts as zero: one sample of the first batch may
    have such values.
    """
    for a, b in zip(found, wanted, strict=False):
        if a.shape != b.shape:
            return False
        if not (a.is_floating_point() or a.is_complex()):
            if not torch.equal(a, b):
                return False
            continue
        is_short = a.itemsize < 4 or torch.is_autocast_enabled(a.device.type)
        a, b = (torch.view_as_real(y) if y.is_complex() else y for y in (a, b))
        a, b = (y.double().nan_to_num(0, 0, 0) for y in (a, b))
        if (a - b).norm() > (5e-2 if is_short else 1e-2) * b.norm():
            return False
    return len(found) == len(wanted)
