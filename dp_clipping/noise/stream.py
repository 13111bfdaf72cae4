"""Addresses of noise: one stream per parameter, step and share."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

SECRET_BYTES = 32


@dataclass(frozen=True)
class NoiseStream:
    """One stream of 2⁶⁶ values: Philox's two key words and the high half of its counter, each
    below 2³². The words are as secret as the key that they come from, and are not printed."""

    key_0: int = field(repr=False)
    key_1: int = field(repr=False)
    counter_2: int = field(repr=False)
    counter_3: int = field(repr=False)

    @classmethod
    def derive(cls, secret: bytes, *, step: int, parameter: str, share: int) -> NoiseStream:
        """Returns the stream of one parameter in one step: 128 bits of BLAKE2b keyed with `secret`.

        Args:
            secret: 32 bytes from the operating system's entropy.
            step: the optimizer step, at least 0.
            parameter: its full name, the same on every rank.
            share: which of the data-parallel shares of the noise, 0 where there is one.

        Raises:
            ValueError: `secret` of another length, or a negative `step` or `share`.
        """
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"the noise key has {len(secret)} bytes, expected {SECRET_BYTES}")
        if step < 0 or share < 0:
            raise ValueError(f"step and share must not be negative, got {step} and {share}")
        # Fixed widths first and the name last, so that no two messages are equal.
        message = step.to_bytes(8, "little") + share.to_bytes(8, "little") + parameter.encode()
        digest = hashlib.blake2b(message, digest_size=16, key=secret, person=b"noise").digest()
        return cls(*(int.from_bytes(digest[i : i + 4], "little") for i in range(0, 16, 4)))
