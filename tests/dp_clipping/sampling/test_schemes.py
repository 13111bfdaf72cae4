"""Sampling schemes: what their accounts assume of them.

`properties/test_samplers.py` has what any scheme is, for any number of units, batches and ranks. Of
each statistical test here a mutant is known that it rejects.
"""

import math

import numpy as np
import pytest
import torch

from dp_clipping.sampling import schemes
from dp_clipping.sampling.poisson import Poisson
from dp_clipping.sampling.schemes import BallsInBins, Cyclic, TruncatedPoisson
from dp_clipping.sampling.words import words
from tests.support.draws import KEY

UNITS, BATCHES = 60, 8
PAIRS = ~torch.eye(UNITS, dtype=torch.bool)


def keys(count):
    return [bytes([i % 256, i // 256]) + bytes(30) for i in range(count)]


def members(scheme, key, numbers, units=UNITS):
    """Returns which units batches have, bool [batches, units]."""
    found = torch.zeros(len(numbers), units, dtype=torch.bool)
    for row, number in zip(found, numbers, strict=True):
        row[scheme.batch(key, number)] = True
    return found


def assert_chi_squared(counts, expected):
    """Fails unless counts of independent events are near a common expectation."""
    counts = np.asarray(counts, dtype=float)
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert abs(statistic - counts.size) < 6 * math.sqrt(2 * counts.size)


def assert_alike(counts, draws, share):
    """Fails unless each of these things has happened in about that share of the draws."""
    bound = 6 * math.sqrt(draws * share * (1 - share))
    assert ((counts - draws * share).abs() < bound).all()


class TestCyclic:
    @pytest.mark.parametrize(("units", "batches"), [(60, 8), (1, 1), (3, 7), (1003, 10), (64, 64)])
    def test_each_unit_is_once_in_an_epoch_at_its_place(self, units, batches):
        """The same one in each epoch; sizes are as equal as can be."""
        scheme = Cyclic(units, batches)
        epochs = members(scheme, KEY, range(3 * batches), units).view(3, batches, units)
        sizes = epochs[0].sum(1)
        assert (epochs.sum(1) == 1).all()
        assert torch.equal(epochs[0], epochs[1])
        assert torch.equal(epochs[0], epochs[2])
        assert sizes.max() - sizes.min() <= 1

    def test_the_split_is_random(self):
        """Over keys, each unit is in each batch alike often, and no two units go together."""
        count, scheme = 400, Cyclic(UNITS, BATCHES)
        seen = torch.stack([members(scheme, key, range(BATCHES)) for key in keys(count)]).double()
        per_place = seen.sum(0)  # [batches, units]
        assert_chi_squared(per_place, seen.mean(2).sum(0)[:, None].expand_as(per_place).numpy())
        together, sizes = torch.einsum("kbu,kbv->uv", seen, seen), seen.sum(2)
        likely = float((sizes * (sizes - 1)).sum(1).mean() / (UNITS * (UNITS - 1)))
        assert_alike(together[PAIRS], count, likely)


class TestBallsInBins:
    def test_each_unit_chooses_one_batch_of_each_epoch(self):
        """Any of them alike often, whatever all others do."""
        epochs, scheme = 1500, BallsInBins(UNITS, BATCHES)
        seen = members(scheme, KEY, range(epochs * BATCHES)).view(epochs, BATCHES, UNITS)
        assert (seen.sum(1) == 1).all()
        places, counts = seen.to(torch.int8).argmax(1), seen.sum(0).numpy()
        assert_chi_squared(counts.sum(1), UNITS * epochs / BATCHES)
        for unit in counts.T:
            assert_chi_squared(unit, epochs / BATCHES)
        variance = UNITS / BATCHES * (1 - 1 / BATCHES)  # of a size; its own is about 2σ⁴/n
        found = seen.sum(2)[:, 0].double().var()
        assert abs(found / variance - 1) < 5 * math.sqrt(2 / epochs)
        same = (places[:, :, None] == places[:, None]).sum(0)  # epochs with two units together
        assert_alike(same[PAIRS], epochs, 1 / BATCHES)
        assert_alike((places[1:] == places[:-1]).sum(0), epochs, 1 / BATCHES)

    @pytest.mark.parametrize("batches", [1, 2, 3, 7, 2**20])
    def test_no_batch_is_likelier_than_its_part(self, batches):
        part = 2**64 // batches
        edges = [0, part - 1, part, 2 * part - 1, batches * part - 1, batches * part, 2**64 - 1]
        edges = np.array([edge for edge in edges if edge < 2**64], dtype=np.uint64)
        found = BallsInBins(1, batches).places(edges)
        expected = [min(int(edge) // part, batches) for edge in edges] if batches > 1 else 0 * edges
        assert found.tolist() == list(expected)


RATE, MOST, DRAWS = 0.2, 12, 3000  # of 60 units 12 are expected, so that half of all are truncated


class TestTruncatedPoisson:
    def test_a_random_part_of_a_batch_that_is_too_large_is_kept(self):
        """Sizes are those of Poisson batches up to the cap; no unit and no pair is preferred."""
        seen = members(TruncatedPoisson(UNITS, RATE, MOST), KEY, range(DRAWS))
        sizes = seen.sum(1)
        likely = [math.comb(UNITS, n) * RATE**n * (1 - RATE) ** (UNITS - n) for n in range(MOST)]
        expected = DRAWS * np.array([*likely, 1 - sum(likely)])[4:]
        assert sizes.max() <= MOST
        counts = np.bincount(sizes.numpy(), minlength=MOST + 1)[4:]
        most = len(counts) + 6 * math.sqrt(2 * len(counts))
        assert ((counts - expected) ** 2 / expected).sum() <= most
        assert_chi_squared(seen.sum(0).numpy(), float(sizes.sum()) / UNITS)
        both = seen.double().T @ seen.double()
        share = float((sizes * (sizes - 1)).sum()) / (UNITS * (UNITS - 1)) / DRAWS
        assert_alike(both[PAIRS], DRAWS, share)

    def test_what_is_kept_is_of_the_poisson_batch(self):
        scheme, poisson = TruncatedPoisson(UNITS, RATE, MOST), Poisson(UNITS, RATE)
        for number in range(200):
            found, whole = (one.batch(KEY, number).tolist() for one in (scheme, poisson))
            assert len(found) == min(MOST, len(whole))
            assert set(found) <= set(whole)
            assert found == sorted(found)


# Written down once: a checkpoint of an earlier version must have the same batches.
FROZEN = [
    (Cyclic(60, 8), 5, [1, 5, 10, 13, 18, 22, 54, 55]),
    (BallsInBins(60, 8), 13, [4, 24, 26, 39, 40, 48]),
    (TruncatedPoisson(60, 0.3, 10), 5, [1, 3, 22, 26, 28, 30, 33, 46, 48, 57]),
]


@pytest.mark.parametrize(("scheme", "number", "expected"), FROZEN, ids=["cyclic", "bins", "cut"])
def test_batches_stay_the_same(scheme, number, expected):
    assert scheme.batch(KEY, number).tolist() == expected


@pytest.mark.parametrize("kind", [Cyclic, BallsInBins])
def test_the_batches_of_an_epoch_are_chosen_at_once(kind, monkeypatch):
    scheme, calls = kind(UNITS, BATCHES), []
    monkeypatch.setattr(schemes, "words", lambda *of: calls.append(of) or words(*of))
    for number in range(BATCHES):
        scheme.batch(KEY, number)
    assert len(calls) == 1
