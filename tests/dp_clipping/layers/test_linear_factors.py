"""16-bit factors of linear layers: what a sample adds to a sum is at most C."""

import pytest
import torch
from torch.nn import Parameter

from dp_clipping.clipping.accumulation import Weights
from dp_clipping.clipping.coefficients import coefficients
from dp_clipping.clipping.norms import Norms
from dp_clipping.layers.linear_factors import LinearFactors
from tests.dp_clipping.conftest import trained

B, LIMIT = 16, 0.5


def factors_of(cancels: bool) -> LinearFactors:
    a, y = torch.randn(2, B, 8, 64)
    a, y = a.bfloat16(), (y * torch.linspace(1, 2, B)[:, None, None]).bfloat16()
    if cancels:
        a, y = torch.cat([a, a], 1), torch.cat([y, -y * (1 + 2.0**-7)], 1)
    return LinearFactors(a, y, transposed=False)


@pytest.mark.parametrize("cancels", [False, True])
def test_a_sample_adds_at_most_the_threshold(cancels):
    factors = factors_of(cancels)
    norms = Norms(1, torch.zeros(B))
    norms.add(trained(Parameter(torch.zeros(64, 64))), factors.norm())
    (c,) = coefficients(norms.bounds(), torch.tensor([LIMIT]), "abadi")
    assert (c < 1).all() or cancels
    for only in torch.diag(c):
        found = float(factors.weighted_sum(Weights(only)).double().norm())
        assert found <= LIMIT
        assert cancels or found >= 0.98 * LIMIT
