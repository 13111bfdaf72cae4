"""The secret that noise and sampling come from.

Whoever holds it can generate the same noise and subtract it. So it comes from the operating system,
not from a seed; it is in no `state_dict`, log or result; and it has a file of its own beside a
checkpoint. All ranks hold the same secret: replicas add the same noise to the same sum, and each
rank can compute which samples the others have.
"""

import hashlib
import hmac
import os
import re
import secrets
import stat
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist

from dp_clipping.files import replacing

KEY_BYTES = 32
MODE = 0o600
LINE = re.compile(r"(drawn|fixed) ([0-9a-f]{64})")


@dataclass(frozen=True)
class Keys:
    """One secret, two derived keys. `fixed`: chosen by a caller, so that ε means nothing."""

    master: bytes = field(repr=False)
    fixed: bool = False

    @property
    def noise(self) -> bytes:
        return self._derive(b"noise key")

    @property
    def sampling(self) -> bytes:
        return self._derive(b"sampling key")

    @cached_property
    def fingerprint(self) -> str:
        """Returns a fingerprint that identifies the key and reveals nothing about it."""
        return self._derive(b"fingerprint").hex()

    def mac(self, digest: str) -> str:
        """Authenticates a checkpoint's digest; it cannot be computed without the key."""
        return hmac.digest(self._derive(b"checkpoint key"), digest.encode(), "sha256").hex()

    def _derive(self, purpose: bytes) -> bytes:
        return hashlib.blake2b(purpose, key=self.master, digest_size=KEY_BYTES).digest()


def fresh_keys(group: dist.ProcessGroup | None, device: torch.device) -> Keys:
    """Returns new keys from the operating system's entropy, rank 0's on every rank of the group."""
    return Keys(from_rank_0(secrets.token_bytes(KEY_BYTES), group, device))


def fixed_keys(
    generator: torch.Generator,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> Keys:
    """Derives keys from a generator's seed, rank 0's on every rank.

    For tests only: such keys protect nothing.
    """
    seed = generator.initial_seed().to_bytes(16, "little", signed=True)
    master = hashlib.blake2b(seed, digest_size=KEY_BYTES).digest()
    return Keys(from_rank_0(master, group, device), fixed=True)


def from_rank_0(here: bytes, group: dist.ProcessGroup | None, device: torch.device | str) -> bytes:
    """Returns the bytes that rank 0 has, on every rank of the group."""
    if group is None:
        return here
    message = torch.tensor(list(here), dtype=torch.uint8, device=device)
    dist.broadcast(message, group=group, group_src=0)
    return bytes(message.tolist())


def read_keys(path: Path) -> list[Keys]:
    """Returns the keys in a key file, a line each; none if there is no such file.

    Raises:
        ValueError: for anything else than keys. What the file holds is in no message.
    """
    try:
        *lines, rest = path.read_bytes().decode("ascii", "replace").split("\n")
    except FileNotFoundError:
        return []
    except IsADirectoryError:
        lines, rest = [], ""
    found = [LINE.fullmatch(line) for line in lines]
    if rest or not lines or not all(found):
        raise ValueError(f"{path} is not a key file, or is cut short: move it away or restore it")
    return [Keys(bytes.fromhex(match[2]), fixed=match[1] == "fixed") for match in found]


def write_keys(path: Path, keys: list[Keys]) -> None:
    """Writes exactly these keys to a file that its owner alone can read; atomic.

    A file that is so already is left alone.
    """
    if read_keys(path) == keys and stat.S_IMODE(os.stat(path).st_mode) == MODE:
        return
    lines = (f"{'fixed' if k.fixed else 'drawn'} {k.master.hex()}\n" for k in keys)
    with replacing(path, mode=MODE) as file:
        file.write("".join(lines).encode())
