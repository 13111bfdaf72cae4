"""Counts what a step sends."""

from dataclasses import dataclass, field

from ddp.buckets import Bucket


@dataclass(frozen=True)
class Launch:
    """A bucket that was launched once `ready` gradients had arrived; names in bucket order."""

    ready: int
    nbytes: int
    names: tuple[str, ...]


@dataclass
class Record:
    """A step's collectives and bytes, and each launch with the gradients ready by then."""

    collectives: int = 0
    nbytes: int = 0
    buckets: int = 0
    launches: list[tuple[int, Bucket]] = field(default_factory=list)
