"""Faults of private training on purpose, for `examples.audit` and the tests of audits.

Each is a context: inside, the library is broken in one place, on the CPU in mode `bookkeeping`.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from dp_clipping.clipping.norms import Norms
from dp_clipping.noise.add_noise import AddressedNoise
from dp_clipping.sampling import poisson
from dp_clipping.step.gradient_noise import GradientNoise
from dp_clipping.step.sums import plain

Fault = Callable[[], AbstractContextManager]


@contextmanager
def noise_changed(change: Callable[..., list[Tensor]]) -> Iterator[None]:
    """Lets `change(add, totals, names, **how)` add the noise, where `add` does so rightly."""
    right = AddressedNoise.add

    def add(self: Any, totals: list[Tensor], names: Any, **how: Any) -> list[Tensor]:
        return change(lambda *args, **more: right(self, *args, **more), totals, names, **how)

    with patch.object(AddressedNoise, "add", add):
        yield


def half_noise() -> AbstractContextManager:
    """σ is half of what is stated."""
    return noise_changed(lambda add, *sums, std, **how: add(*sums, std=std / 2, **how))


def noise_of_microbatches() -> AbstractContextManager:
    """The noise of four microbatches is averaged: its standard deviation is divided by 2."""

    def average(add: Any, totals: Any, names: Any, *, std: float, step: int, **how: Any) -> Any:
        clean = add([t.clone() for t in totals], names, std=0.0, step=step, **how)
        parts = [
            add([t.clone() for t in totals], names, std=std, step=4 * step + part, **how)
            for part in range(4)
        ]
        return [
            c + sum(noisy - c for noisy in each) / 4
            for c, *each in zip(clean, *parts, strict=True)
        ]  # fmt: skip

    return noise_changed(average)


def no_noise_on_one_shard() -> AbstractContextManager:
    """The first half of each parameter, as of a rank that forgets it, gets no noise."""

    def forget(add: Any, totals: Any, names: Any, *, std: float, **how: Any) -> Any:
        clean = add([t.clone() for t in totals], names, std=0.0, **how)
        noisy = add(totals, names, std=std, **how)
        for without, total in zip(clean, noisy, strict=True):
            half = total.numel() // 2
            total.view(-1)[:half] = without.view(-1)[:half]
        return noisy

    return noise_changed(forget)


def reused_noise() -> AbstractContextManager:
    """Each step has the noise of step 0."""
    return noise_changed(lambda add, *sums, step, **how: add(*sums, step=0, **how))


def noise_from_data() -> AbstractContextManager:
    """The key of the noise is a hash of the sums."""

    def seeded(add: Any, totals: Any, names: Any, *, key: bytes, **how: Any) -> Any:
        said = b"".join(t.detach().cpu().numpy().tobytes() for t in totals)
        return add(totals, names, key=hashlib.blake2b(said, digest_size=32).digest(), **how)

    return noise_changed(seeded)


def no_clipping() -> AbstractContextManager:
    """Sums are of whole gradients."""
    return patch.object(plain, "coefficients", lambda squares, *_: torch.ones_like(squares))


def clipping_of_the_mean() -> AbstractContextManager:
    """One coefficient for all samples, from the mean of their norms."""
    right = plain.coefficients

    def of_mean(squares: Tensor, *rest: Any) -> Tensor:
        mean = squares.sqrt().mean(1, keepdim=True).square()
        return right(mean, *rest).expand_as(squares).contiguous()

    return patch.object(plain, "coefficients", of_mean)


@contextmanager
def clipping_of_the_sum() -> Iterator[None]:
    """The sum of whole gradients is clipped, not each of them."""
    right = GradientNoise._add_to_sums

    def add(self: Any, *given: Any) -> None:
        gradients = [p.grad for p in self.model.capture.parameters]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        for gradient in gradients:
            gradient.mul_((self.model.step_state.sensitivity / norm).clamp(max=1.0))
        right(self, *given)

    with no_clipping(), patch.object(GradientNoise, "_add_to_sums", add):
        yield


def norm_without_weights() -> AbstractContextManager:
    """The norms that clip leave out all matrices of more than one column."""
    right = Norms.add_rows

    def add_rows(self: Any, records: Any, squares: Tensor, *rest: Any) -> None:
        is_matrix = [len(one.shape) > 1 and one.shape[1] > 1 for one in records]
        right(self, records, squares.masked_fill(torch.tensor(is_matrix)[:, None], 0), *rest)

    return patch.object(Norms, "add_rows", add_rows)


def every_sample_twice() -> AbstractContextManager:
    """A batch has each of its samples twice."""
    right = poisson.PoissonSampler.shares

    def shares(self: Any, step: int) -> list[list[int]]:
        return [[index for index in share for _ in range(2)] for share in right(self, step)]

    return patch.object(poisson.PoissonSampler, "shares", shares)


def same_batch_always() -> AbstractContextManager:
    """The sampler is not random: each step has the batch of step 0."""
    right = poisson.included
    return patch.object(poisson, "included", lambda key, step, *rest: right(key, 0, *rest))


def twice_the_rate() -> AbstractContextManager:
    """A sample is in a batch with twice the probability that is accounted."""
    right = poisson.included

    def included(key: bytes, step: int, n: int, rate: float, *more: Any) -> Any:
        return right(key, step, n, min(1.0, 2 * rate), *more)

    return patch.object(poisson, "included", included)


def divided_by_batch() -> AbstractContextManager:
    """The sum is divided by the size of the batch, which depends on the data."""
    right = GradientNoise._add_to_sums

    def add_to_sums(self: Any, *given: Any) -> None:
        rows = sum(len(batch.norms) for batch in self.model.step_state.norms)
        add = partial(self.source.add, divisor=float(max(1, rows)))
        once = lambda *args, divisor, **rest: add(*args, **rest)  # noqa: E731
        with patch.object(self.source, "add", once):
            right(self, *given)

    return patch.object(GradientNoise, "_add_to_sums", add_to_sums)


AUDIT, RECORD = "audit", "record_sums"
FAULTS: dict[str, tuple[Fault, tuple[str, ...]]] = {
    "half-noise": (half_noise, (AUDIT, RECORD)),
    "noise-of-microbatches": (noise_of_microbatches, (AUDIT, RECORD)),
    "no-noise-on-one-shard": (no_noise_on_one_shard, (AUDIT, RECORD)),
    "reused-noise": (reused_noise, (AUDIT, RECORD)),
    "noise-from-data": (noise_from_data, (RECORD,)),
    "no-clipping": (no_clipping, (AUDIT, RECORD)),
    "clipping-of-the-mean": (clipping_of_the_mean, (RECORD,)),
    "clipping-of-the-sum": (clipping_of_the_sum, (RECORD,)),
    "norm-without-weights": (norm_without_weights, (RECORD,)),
    "every-sample-twice": (every_sample_twice, (AUDIT, RECORD)),
    "same-batch-always": (same_batch_always, (AUDIT,)),
    "twice-the-rate": (twice_the_rate, (AUDIT,)),
    "divided-by-batch": (divided_by_batch, (RECORD,)),
}
"""Name -> what breaks the library, and the methods of the engine that find it."""
