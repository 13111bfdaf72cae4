"""Addresses of noise: each parameter, step and share has a stream of its own."""

import itertools

import pytest

from dp_clipping.noise.stream import SECRET_BYTES, NoiseStream

SECRET = bytes(range(SECRET_BYTES))


def derive(secret=SECRET, step=0, parameter="w", share=0) -> NoiseStream:
    return NoiseStream.derive(secret, step=step, parameter=parameter, share=share)


def test_everything_tells_streams_apart():
    other = bytes(SECRET_BYTES)
    addresses = itertools.product((SECRET, other), (0, 1, 256), ("w", "w2", ""), (0, 1))
    streams = [NoiseStream.derive(s, step=n, parameter=p, share=k) for s, n, p, k in addresses]
    assert len(set(streams)) == len(streams) == 36


def test_no_two_addresses_are_one_message():
    """Step, share and name have fixed places."""
    assert derive(step=1, share=0) != derive(step=0, share=1)
    assert derive(parameter="\0w") != derive(step=0, parameter="w")


def test_the_same_address_is_the_same_stream():
    assert derive(step=3) == derive(step=3)


def test_words_fit_the_generator():
    stream = derive()
    words = (stream.key_0, stream.key_1, stream.counter_2, stream.counter_3)
    assert all(0 <= word < 2**32 for word in words)
    assert len(set(words)) == 4


def test_nothing_is_printed():
    assert repr(derive()) == "NoiseStream()"


def test_refusals():
    with pytest.raises(ValueError, match="the noise key has 16 bytes, expected 32"):
        derive(bytes(16))
    for wrong in ({"step": -1}, {"share": -1}):
        with pytest.raises(ValueError, match="must not be negative"):
            derive(**wrong)
