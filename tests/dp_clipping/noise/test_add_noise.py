"""Noise on clipped sums: by the address of each value, whatever the layout."""

import pytest
import torch

from dp_clipping.distributed.placement import spans_of
from dp_clipping.noise.add_noise import add_noise, add_noise_to_all
from dp_clipping.noise.gaussian import NoiseStream, standard_normal

STREAM = NoiseStream.derive(bytes(32), step=3, parameter="weight", share=0)


def test_the_definition():
    total = torch.arange(12.0).view(3, 4)
    z = standard_normal(12, STREAM, device="cpu").view(3, 4)
    expected = (total + 0.5 * z) / 8
    assert torch.allclose(add_noise(total, STREAM, std=0.5, divisor=8), expected, rtol=1e-6)
    rounded = add_noise(total, STREAM, std=0.5, divisor=8, dtype=torch.bfloat16)
    assert torch.equal(rounded, add_noise(total, STREAM, std=0.5, divisor=8).bfloat16())


def test_a_part_gets_the_noise_of_its_place():
    whole = add_noise(torch.zeros(6, 8), STREAM, std=1.0)
    place = spans_of(((2, 3), (4, 4)), (6, 8))
    part = add_noise(torch.zeros(3, 4), STREAM, std=1.0, place=place)
    assert torch.equal(part, whole[2:5, 4:])


def test_all_of_them_are_each_of_them():
    streams = [NoiseStream.derive(bytes(32), step=3, parameter=n, share=0) for n in "ab"]
    totals = [torch.ones(5), torch.ones(2, 3)]
    expected = [add_noise(x, s, std=2.0, divisor=4) for x, s in zip(totals, streams, strict=True)]
    dtypes = [torch.float32, torch.float32]
    found = add_noise_to_all(totals, streams, std=2.0, divisor=4, dtypes=dtypes)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"std": -1.0}, "std must be finite"),
        ({"std": 1.0, "divisor": 0.0}, "divisor must be finite and positive"),
        ({"std": 1.0, "offset": -1}, "must not be negative"),
        ({"std": 1.0, "dtype": torch.int64}, "would be cut off"),
        ({"std": 1.0, "place": ()}, "the place has 0 elements, the sum 3"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        add_noise(torch.zeros(3), STREAM, **options)
    with pytest.raises(ValueError, match="noise joins a float32 sum"):
        add_noise(torch.zeros(3, dtype=torch.bfloat16), STREAM, std=1.0)
