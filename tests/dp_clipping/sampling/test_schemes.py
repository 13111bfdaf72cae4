"""Sampling schemes: what their accounts assume of them, in tests that reject wrong ones."""

import math

import numpy as np
import pytest
import torch

from dp_clipping.sampling import schemes
from dp_clipping.sampling.poisson import Poisson, PoissonSampler
from dp_clipping.sampling.schemes import FIXED, BallsInBins, Cyclic, TruncatedPoisson, scheme_of
from dp_clipping.sampling.words import words
from tests.support.draws import KEY, OTHER_KEY, joined

UNITS, BATCHES = 60, 8


def keys(count):
    return [bytes([i % 256, i // 256]) + bytes(30) for i in range(count)]


def members(scheme, key, numbers, units=UNITS):
    """Returns which units batches have, bool [batches, units]."""
    found = torch.zeros(len(numbers), units, dtype=torch.bool)
    for row, number in zip(found, numbers, strict=True):
        row[scheme.batch(key, number)] = True
    return found


def chi_squared_is_small(counts, expected):
    """Returns whether counts of independent events are near a common expectation."""
    counts = np.asarray(counts, dtype=float)
    statistic = ((counts - expected) ** 2 / expected).sum()
    return abs(statistic - counts.size) < 6 * math.sqrt(2 * counts.size)


# ---- what each scheme has to be ------------------------------------------------------------------


def is_cyclic(scheme, units=UNITS, batches=BATCHES):
    """Each unit in one batch of each epoch, the same one; sizes as equal as can be."""
    epochs = members(scheme, KEY, range(3 * batches), units).view(3, batches, units)
    sizes = epochs[0].sum(1)
    return bool(
        (epochs.sum(1) == 1).all()
        and torch.equal(epochs[0], epochs[1])
        and torch.equal(epochs[0], epochs[2])
        and sizes.max() - sizes.min() <= 1
    )


def splits_at_random(scheme, batches=BATCHES, count=400):
    """Over keys, each unit is in each batch alike often, and no two units go together."""
    seen = torch.stack([members(scheme, key, range(batches)) for key in keys(count)]).double()
    per_place = seen.sum(0)  # [batches, units]
    expected = seen.mean(2).sum(0)[:, None].expand_as(per_place)
    if not chi_squared_is_small(per_place, expected.numpy()):
        return False
    together = torch.einsum("kbu,kbv->uv", seen, seen)
    pairs = together[~torch.eye(len(together), dtype=torch.bool)]
    sizes = seen.sum(2)
    likely = float((sizes * (sizes - 1)).sum(1).mean() / (UNITS * (UNITS - 1)))
    bound = 6 * math.sqrt(count * likely * (1 - likely))
    return bool(((pairs - count * likely).abs() < bound).all())


class Reshuffled(Cyclic):
    """A wrong one: splits the data anew in each epoch, as `shuffle=True` does."""

    def batch(self, key, number):
        epoch, place = divmod(number, self.batches)
        order = np.argsort(words(key, b"cyclic", epoch, self.units))
        start, stop = (self.units * i // self.batches for i in (place, place + 1))
        return torch.from_numpy(np.sort(order[start:stop]))


class InOrderOfIndex(Cyclic):
    """A wrong one: neighbours in the data set are in the same batch, whatever the key."""

    def batch(self, key, number):
        return torch.arange(self.units)[number % self.batches :: self.batches]


class LeavesOut(Cyclic):
    """A wrong one: drops the last units, as `drop_last=True` does."""

    def batch(self, key, number):
        return super().batch(key, number)[: self.units // self.batches]


class AnyPlace(Cyclic):
    """A wrong one: each unit chooses its batch by itself, so sizes vary."""

    def batch(self, key, number):
        places = words(key, b"cyclic", 0, self.units) % self.batches
        return torch.from_numpy(np.nonzero(places == number % self.batches)[0])


class TestCyclic:
    def test_each_unit_is_once_in_an_epoch_at_its_place(self):
        assert is_cyclic(Cyclic(UNITS, BATCHES))

    @pytest.mark.parametrize("wrong", [Reshuffled, LeavesOut, AnyPlace])
    def test_a_wrong_one_is_rejected(self, wrong):
        assert not is_cyclic(wrong(UNITS, BATCHES))

    def test_the_split_is_random(self):
        assert splits_at_random(Cyclic(UNITS, BATCHES))
        assert not splits_at_random(InOrderOfIndex(UNITS, BATCHES))

    @pytest.mark.parametrize(("units", "batches"), [(1, 1), (3, 7), (1003, 10), (64, 64)])
    def test_any_number_of_units_and_batches(self, units, batches):
        assert is_cyclic(Cyclic(units, batches), units, batches)

    def test_is_a_pure_function_and_stays_the_same(self):
        # Written down once: a checkpoint of an earlier version must have the same batches.
        assert Cyclic(60, 8).batch(KEY, 5).tolist() == FROZEN
        scheme = Cyclic(60, 8)
        for key, number in ((KEY, 5), (OTHER_KEY, 5), (KEY, 13)):  # whatever was asked for before
            assert torch.equal(scheme.batch(key, number), Cyclic(60, 8).batch(key, number))


FROZEN = [1, 5, 10, 13, 18, 22, 54, 55]


def is_balls_in_bins(scheme, batches=BATCHES, epochs=1500):
    """Each unit in one batch of each epoch, any of them alike often, whatever all others do."""
    seen = members(scheme, KEY, range(epochs * batches)).view(epochs, batches, UNITS)
    if not (seen.sum(1) == 1).all():
        return False
    places = seen.to(torch.int8).argmax(1)  # [epochs, units]
    expected = epochs / batches
    counts = seen.sum(0).numpy()  # [batches, units]
    if not chi_squared_is_small(counts.sum(1), UNITS * expected):
        return False
    if not all(chi_squared_is_small(unit, expected) for unit in counts.T):
        return False
    variance = UNITS / batches * (1 - 1 / batches)  # of a size; that of a variance is about 2σ⁴/n
    if abs(seen.sum(2)[:, 0].double().var() / variance - 1) > 5 * math.sqrt(2 / epochs):
        return False
    same = (places[:, :, None] == places[:, None]).sum(0)  # epochs in which two units are together
    pairs = same[~torch.eye(UNITS, dtype=torch.bool)]
    bound = 6 * math.sqrt(epochs / batches * (1 - 1 / batches))
    if ((pairs - expected).abs() > bound).any():
        return False
    stays = (places[1:] == places[:-1]).sum(0)  # in the same batch as in the epoch before
    return bool(((stays - expected).abs() < bound).all())


class EqualBins(Cyclic):
    """A wrong one: a new permutation in each epoch, so that the batches have equal sizes."""

    batch = Reshuffled.batch


class Pairs(BallsInBins):
    """A wrong one: neighbours in the data set choose together."""

    def places(self, words):
        return np.repeat(super().places(words)[::2], 2)[: len(words)]


class Uneven(BallsInBins):
    """A wrong one: the first batch has an eighth more than its part."""

    def places(self, words):
        places = super().places(words)
        return np.where((places == 1) & (words % 8 == 0), 0, places)


class Skips(BallsInBins):
    """A wrong one: some units are in no batch of an epoch."""

    def places(self, words):
        return np.where(words % 16 == 0, self.batches, super().places(words))


class Once(BallsInBins):
    """A wrong one: each unit chooses once for all epochs."""

    def batch(self, key, number):
        return super().batch(key, number % self.batches)


class TestBallsInBins:
    def test_each_unit_chooses_one_batch_of_each_epoch(self):
        assert is_balls_in_bins(BallsInBins(UNITS, BATCHES))

    @pytest.mark.parametrize("wrong", [EqualBins, Pairs, Uneven, Skips, Once, Cyclic, AnyPlace])
    def test_a_wrong_one_is_rejected(self, wrong):
        assert not is_balls_in_bins(wrong(UNITS, BATCHES))

    def test_poisson_batches_are_rejected(self):
        assert not is_balls_in_bins(Poisson(UNITS, 1 / BATCHES))

    @pytest.mark.parametrize("batches", [1, 2, 3, 7, 2**20])
    def test_no_batch_is_likelier_than_its_part(self, batches):
        part = 2**64 // batches
        edges = [0, part - 1, part, 2 * part - 1, batches * part - 1, batches * part, 2**64 - 1]
        edges = np.array([edge for edge in edges if edge < 2**64], dtype=np.uint64)
        found = BallsInBins(1, batches).places(edges)
        expected = [min(int(edge) // part, batches) for edge in edges] if batches > 1 else 0 * edges
        assert found.tolist() == list(expected)

    def test_is_a_pure_function_and_stays_the_same(self):
        # Written down once: a checkpoint of an earlier version must have the same batches.
        assert BallsInBins(60, 8).batch(KEY, 13).tolist() == FROZEN_BINS
        scheme = BallsInBins(60, 8)
        for key, number in ((KEY, 5), (OTHER_KEY, 5), (KEY, 13), (KEY, 5)):
            assert torch.equal(scheme.batch(key, number), BallsInBins(60, 8).batch(key, number))


FROZEN_BINS = [4, 24, 26, 39, 40, 48]


RATE, MOST, DRAWS = 0.2, 12, 3000  # of 60 units 12 are expected, so that half of all are truncated


def is_truncated_poisson(scheme, most=MOST):
    """Sizes are those of Poisson batches up to the cap; no unit and no pair is preferred."""
    seen = members(scheme, KEY, range(DRAWS))
    sizes = seen.sum(1)
    likely = [math.comb(UNITS, n) * RATE**n * (1 - RATE) ** (UNITS - n) for n in range(most)]
    likely.append(1 - sum(likely))
    if sizes.max() > most:
        return False
    counts = np.bincount(sizes.numpy(), minlength=most + 1)[4:]
    expected = DRAWS * np.array(likely)[4:]
    if ((counts - expected) ** 2 / expected).sum() > len(counts) + 6 * math.sqrt(2 * len(counts)):
        return False
    if not chi_squared_is_small(seen.sum(0).numpy(), float(sizes.sum()) / UNITS):
        return False
    both = seen.double().T @ seen.double()
    pairs = both[~torch.eye(UNITS, dtype=torch.bool)]
    share = float((sizes * (sizes - 1)).sum()) / (UNITS * (UNITS - 1)) / DRAWS
    bound = 6 * math.sqrt(DRAWS * share * (1 - share))
    return bool(((pairs - DRAWS * share).abs() < bound).all())


class KeepsTheFirst(TruncatedPoisson):
    """A wrong one: what comes first in the data set stays."""

    def batch(self, key, number):
        return Poisson(self.units, self.rate).batch(key, number)[: self.max_batch_size]


class KeepsAlike(TruncatedPoisson):
    """A wrong one: the same units are preferred in every batch."""

    def batch(self, key, number):
        drawn = Poisson(self.units, self.rate).batch(key, number)
        lots = words(key, b"truncation", 0, self.units)[drawn.numpy()]
        return drawn[np.sort(np.argsort(lots)[: self.max_batch_size])]


class DrawsAgain(TruncatedPoisson):
    """A wrong one: draws until a batch is small enough."""

    def batch(self, key, number):
        for turn in range(99):
            drawn = Poisson(self.units, self.rate).batch(key, 99 * number + turn)
            if len(drawn) <= self.max_batch_size:
                return drawn
        raise AssertionError


class AlwaysFull(TruncatedPoisson):
    """A wrong one: each batch has a fixed size."""

    def batch(self, key, number):
        lots = words(key, b"truncation", number, self.units)
        return torch.from_numpy(np.sort(np.argsort(lots)[: self.max_batch_size]))


class TestTruncatedPoisson:
    def test_a_random_part_of_a_batch_that_is_too_large_is_kept(self):
        assert is_truncated_poisson(TruncatedPoisson(UNITS, RATE, MOST))

    @pytest.mark.parametrize("wrong", [KeepsTheFirst, KeepsAlike, DrawsAgain, AlwaysFull])
    def test_a_wrong_one_is_rejected(self, wrong):
        assert not is_truncated_poisson(wrong(UNITS, RATE, MOST))

    def test_poisson_batches_are_rejected(self):
        assert not is_truncated_poisson(Poisson(UNITS, RATE))

    def test_what_is_kept_is_of_the_poisson_batch(self):
        scheme, poisson = TruncatedPoisson(UNITS, RATE, MOST), Poisson(UNITS, RATE)
        for number in range(200):
            found, whole = (one.batch(KEY, number).tolist() for one in (scheme, poisson))
            assert len(found) == min(MOST, len(whole))
            assert set(found) <= set(whole)
            assert found == sorted(found)

    def test_is_a_pure_function_and_stays_the_same(self):
        # Written down once: a checkpoint of an earlier version must have the same batches.
        assert TruncatedPoisson(60, 0.3, 10).batch(KEY, 5).tolist() == FROZEN_TRUNCATED


FROZEN_TRUNCATED = [1, 3, 22, 26, 28, 30, 33, 46, 48, 57]


# ---- of all schemes ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Cyclic, BallsInBins])
def test_the_batches_of_an_epoch_are_chosen_at_once(kind, monkeypatch):
    scheme, calls = kind(UNITS, BATCHES), []
    monkeypatch.setattr(schemes, "words", lambda *of: calls.append(of) or words(*of))
    for number in range(BATCHES):
        scheme.batch(KEY, number)
    assert len(calls) == 1


SCHEMES = ["truncated_poisson", "balls_in_bins", "cyclic"]


@pytest.mark.parametrize("sampling", SCHEMES)
class TestSampler:
    def sampler(self, sampling, **changes):
        most = 15 if sampling == "truncated_poisson" else None
        scheme = scheme_of(sampling, units=103, sample_rate=1 / 6, max_batch_size=most)
        options = dict(num_samples=103, sample_rate=1 / 6, steps=6, key=KEY, scheme=scheme)
        return PoissonSampler(**options | changes)

    @pytest.mark.parametrize("world_size", [2, 3, 5])
    def test_ranks_are_disjoint_alike_and_together_one_process(self, sampling, world_size):
        alone = self.sampler(sampling)
        for number in range(12):
            shares = self.sampler(sampling, world_size=world_size).shares(number)
            (whole,) = alone.shares(number)
            assert sorted(joined(shares)) == whole
            assert len(set(whole)) == len(whole)
            sizes = list(map(len, shares))
            assert max(sizes) - min(sizes) <= 1

    def test_nothing_depends_on_other_randomness(self, sampling):
        before = self.sampler(sampling).shares(3)
        torch.manual_seed(1)
        np.random.seed(1)
        assert self.sampler(sampling).shares(3) == before
        assert self.sampler(sampling, key=OTHER_KEY).shares(3) != before

    def test_numbers_count_from_where_the_key_came_into_use(self, sampling):
        sampler = self.sampler(sampling)
        first = [sampler.shares(number) for number in range(6)]
        sampler.rekey(KEY, start=4)
        later = [sampler.shares(number) for number in range(4, 10)]
        assert (later == first) == sampler.scheme.in_order == (sampling in FIXED)
