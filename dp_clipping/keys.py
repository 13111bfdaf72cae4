"""The secret that noise and sampling are drawn from.

Whoever holds it can draw the same noise and subtract it, so it comes from the operating system and
not from a seed, it is in no `state_dict`, log or result, and it has a file of its own beside a
checkpoint. All ranks hold the same one: replicas add the same noise to the same sum, and each rank
knows which samples the others draw.
"""

import hashlib
import secrets
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

KEY_BYTES = 32


@dataclass(frozen=True)
class Keys:
    """One secret, two derived keys. `fixed`: chosen by a caller, so that ε means nothing."""

    master: bytes = field(repr=False)
    fixed: bool = False

    def __post_init__(self) -> None:
        if len(self.master) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(self.master)}")

    @property
    def noise(self) -> bytes:
        return self._derive(b"noise key")

    @property
    def sampling(self) -> bytes:
        return self._derive(b"sampling key")

    def _derive(self, purpose: bytes) -> bytes:
        return hashlib.blake2b(purpose, key=self.master, digest_size=KEY_BYTES).digest()


def fresh_keys(group: dist.ProcessGroup | None, device: torch.device) -> Keys:
    """New keys from the operating system's entropy, rank 0's on every rank of the group."""
    master = secrets.token_bytes(KEY_BYTES)
    if group is not None:
        message = torch.tensor(list(master), dtype=torch.uint8, device=device)
        dist.broadcast(message, group=group, group_src=0)
        master = bytes(message.tolist())
    return Keys(master)


def fixed_keys(generator: torch.Generator) -> Keys:
    """Keys from a generator's seed: for tests, where nothing is private."""
    seed = generator.initial_seed().to_bytes(16, "little", signed=True)
    return Keys(hashlib.blake2b(seed, digest_size=KEY_BYTES).digest(), fixed=True)
