"""The reference: a convolution's weight gradient of one sample at a time."""

import pytest
import torch

from dp_clipping.kernels.convolution.geometry import is_narrow, patches
from tests.support.convolution_cases import NARROW, WIDE, operands


@pytest.mark.parametrize("case", WIDE + NARROW, ids=str)
def test_gradients_are_autograds_of_each_sample(case):
    _, pictures, channels, *_, geometry = case
    x, y, found = operands(case, torch.float64, "cpu")
    for i, (own, left) in enumerate(zip(x.split(pictures), y.split(pictures), strict=True)):
        shape = y.shape[1], channels // geometry.groups, *geometry.taps
        weight = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
        options = geometry.stride, geometry.padding, geometry.dilation, geometry.groups
        torch.conv3d(own, weight, None, *options).backward(left)
        torch.testing.assert_close(found[i], weight.grad.flatten(2))


def test_patches_are_a_view():
    x = torch.randn(1, 2, 1, 6, 6)
    geometry = WIDE[0][-1]
    found = patches(x, geometry, (1, 6, 6))
    assert found.shape == (1, 2, 1, 6, 6, 1, 3, 3)
    assert torch.equal(found[..., 0, 1, 1], x)


def test_few_channels_of_a_group_are_narrow():
    for cases, are_narrow in ((NARROW, True), (WIDE, False)):
        for _, _, channels, outputs, _, geometry in cases:
            shape = torch.Size((outputs, channels // geometry.groups, *geometry.taps))
            assert is_narrow(shape, geometry.groups) is are_narrow
