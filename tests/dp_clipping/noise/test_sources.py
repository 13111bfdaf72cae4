"""Where the noise of a step comes from."""

import pytest
import torch

from dp_clipping.distributed.placement import spans_of
from dp_clipping.noise.add_noise import AddressedNoise, source_of
from dp_clipping.noise.gaussian import NoiseStream, standard_normal

KEY = bytes(range(32))
HOW = {"key": KEY, "std": 2.0, "divisor": 4.0}


def z(parameter: str, step: int, numel: int) -> torch.Tensor:
    stream = NoiseStream.derive(KEY, step=step, parameter=parameter, share=0)
    return standard_normal(numel, stream, device="cpu")


def test_each_parameter_gets_the_noise_of_its_name_and_step():
    totals = [torch.randn(3, 4), torch.randn(5)]
    dtypes = [torch.float32, torch.float64]
    expected = [
        (total + 2 * z(name, 7, total.numel()).view_as(total)) / 4
        for total, name in zip(totals, "ab", strict=True)
    ]
    found = source_of("gaussian").add(
        [t.clone() for t in totals], ["a", "b"], step=7, dtypes=dtypes, **HOW
    )
    assert [f.dtype for f in found] == dtypes
    for ours, right in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.float(), right)


def test_a_part_gets_the_noise_of_its_place():
    place = spans_of(((1, 2), (2, 3)), (4, 6))
    (found,) = AddressedNoise().add(
        [torch.zeros(2, 3)], ["w"], step=1, dtypes=[torch.float32], places=[place], **HOW
    )
    torch.testing.assert_close(found, 0.5 * z("w", 1, 24).view(4, 6)[1:3, 2:5])


def test_a_mechanism_that_nobody_registered():
    with pytest.raises(ValueError, match="noise_mechanism 'laplace' is unknown"):
        source_of("laplace")
