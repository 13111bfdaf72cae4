"""Which examples are one unit, and which rows of a batch only fill one up."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from dp_clipping.sampling.loader import PoissonLoader
from dp_clipping.sampling.units import fill_of, units_of
from tests.support.draws import KEY, numbers

NAMES = ["ann", "bob", "ann", "cy", "bob", "ann", "dee"]


def rows_of(units, key=KEY, number=0):
    """Returns the rows of a batch of all units, those of each in a list."""
    rows = units.examples(torch.arange(len(units)), key, number)
    return [rows[i : i + units.size] for i in range(0, len(rows), units.size)]


class TestUnits:
    def test_consecutive_examples_are_one(self):
        units = units_of(8, 4)
        assert rows_of(units) == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert (len(units), units.size, units.are_named) == (2, 4, False)

    def test_the_last_one_may_have_fewer(self):
        assert rows_of(units_of(6, 4)) == [[0, 1, 2, 3], [4, 5, 5, 5]]

    @pytest.mark.parametrize(
        "ids",
        [NAMES, tuple(NAMES), np.array(NAMES), torch.tensor([3, 9, 3, 0, 9, 3, 8])],
        ids=["list", "tuple", "array", "tensor"],
    )
    def test_ids_say_whose_an_example_is(self, ids):
        units = units_of(7, 3, ids)
        assert rows_of(units) == [[0, 2, 5], [1, 4, 4], [3, 3, 3], [6, 6, 6]]
        assert units.are_named

    def test_each_example_has_a_unit(self):
        with pytest.raises(ValueError, match="unit_ids has 7 entries, and the data set 8 examples"):
            units_of(8, 3, NAMES)

    @pytest.mark.parametrize("ids", ["abcdefg", torch.zeros(7, 1)], ids=["text", "matrix"])
    def test_ids_are_one_for_each_example(self, ids):
        with pytest.raises(ValueError, match="unit_ids has no entry for each example"):
            units_of(7, 7, ids)

    def test_tensors_of_one_number_are_that_number(self):
        ids = list(torch.tensor([3, 9, 3, 0, 9, 3, 8]))
        assert torch.equal(units_of(7, 3, ids).members, units_of(7, 3, NAMES).members)
        pairs = [(one, "a") for one in ids]
        assert torch.equal(units_of(7, 3, pairs).members, units_of(7, 3, NAMES).members)

    @pytest.mark.parametrize(
        ("ids", "message"),
        [
            ([object() for _ in range(7)], "may be no other's equal: give numbers or strings"),
            ([torch.ones(2)] * 7, "may be no other's equal"),
            ([{"user": 1}] * 7, "may be no other's equal"),
            (iter(range(7)), r"is read once: give a list, as unit_ids=list\(\.\.\)"),
            (np.array([1, np.nan, 1, 2, 3, np.nan, 4]), "has nan, and examples whose unit is not"),
            ([None, 1, 1, 1, 1, None, 1], "has None, and examples whose unit is not known"),
            ([(float("nan"), 1)] * 7, "has nan, and examples whose unit"),
            ([1.5, float("nan")] * 3 + [0.0], "give each a unit, one of its own or one for all"),
        ],
        ids=[
            "objects",
            "vectors",
            "dicts",
            "iterator",
            "array with NaN",
            "None",
            "NaN in tuples",
            "list with NaN",
        ],
    )
    def test_entries_that_say_nothing_are_refused(self, ids, message):
        with pytest.raises(ValueError, match=message):
            units_of(7, 7, ids)


def choice(units, unit, number, key=KEY):
    """Returns the places of a unit's examples that a batch has: 0 is its first example."""
    own = units.members[units.starts[unit] : units.starts[unit + 1]].tolist()
    return [own.index(row) for row in units.examples(torch.tensor([unit]), key, number)]


class TestDrawn:
    """With `examples_per_step` a batch has m of a unit's examples."""

    SIZES = (1, 5, 2, 4)
    IDS = tuple(np.repeat(range(4), SIZES))

    @pytest.mark.parametrize("m", [1, 2, 3])
    def test_each_set_of_examples_is_as_likely(self, m):
        units, batches = units_of(12, None, self.IDS, m), 700
        counts = [Counter() for _ in self.SIZES]
        for number in range(batches):
            for unit, rows in enumerate(rows_of(units, number=number)):
                own = [i for i, of in enumerate(self.IDS) if of == unit]
                kept = min(m, len(own))
                assert rows == sorted(rows)
                assert set(rows) <= set(own)
                assert rows[kept:] == rows[kept - 1 : kept] * (m - kept), "fill"
                assert len(set(rows)) == kept, "without replacement"
                counts[unit][tuple(rows[:kept])] += 1
        for size, found in zip(self.SIZES, counts, strict=True):
            sets = math.comb(size, min(m, size))
            spread = 5 * math.sqrt(batches / sets)
            assert len(found) == sets
            assert all(abs(count - batches / sets) < spread for count in found.values())

    def test_each_example_is_as_likely(self):
        """With probability 10 / 40, in a unit that needs more than one block of words."""
        units, batches = units_of(40, 40, None, 10), 800
        counts = torch.zeros(40)
        for number in range(batches):
            counts[choice(units, 0, number)] += 1
        assert (counts - batches / 4).abs().max() < 5 * math.sqrt(batches * 3 / 16)

    @pytest.mark.parametrize("m", [1, 3, 9])
    def test_other_units_have_no_influence(self, m):
        """Neither how many there are nor how many examples they have."""
        alone = units_of(20, None, ["x"] * 20, m)
        others = units_of(30, None, ["x"] * 15 + [*range(10)] + ["x"] * 5, m)
        larger = units_of(99, None, ["x"] * 10 + ["y"] * 50 + ["z"] * 29 + ["x"] * 10, m)
        for number in range(20):
            expected = choice(alone, 0, number)
            assert choice(others, 0, number) == choice(larger, 0, number) == expected

    def test_units_batches_and_keys_draw_apart(self):
        units = units_of(60, 30, None, 5)
        drawn = [choice(units, *at) for at in ((0, 3), (0, 4), (1, 3), (0, 3, b"k" * 32))]
        assert len(set(map(tuple, drawn))) == 4

    def test_the_digest_is_of_the_division_alone(self):
        plain = units_of(7, 3, NAMES)
        assert plain.digest() == units_of(7, 3, NAMES, 2).digest()
        free, other = (units_of(7, None, ids, 2).digest() for ids in (NAMES, [*NAMES[1:], "ann"]))
        assert len({plain.digest(), free, other}) == 3


class TestFill:
    def test_what_a_unit_has_already_is_fill(self):
        rows = [4, 5, 5, 5, 0, 1, 2, 3]
        assert fill_of(rows, 4).tolist() == [False, False, True, True] + [False] * 4

    def test_the_same_index_in_another_unit_is_none(self):
        assert fill_of([1, 2, 2, 3], 2) is None

    @pytest.mark.parametrize(
        ("rows", "size"), [([], 3), ([5, 5, 6], 1), (["a"], 1), ([0, 1, 2], 3)]
    )
    def test_full_units_have_none(self, rows, size):
        assert fill_of(rows, size) is None


class TestLoader:
    @pytest.mark.parametrize("workers", [0, 1])
    def test_the_batch_is_told_which_rows_are_fill(self, workers):
        units = units_of(7, 3, NAMES)
        loader = DataLoader(numbers(7), batch_size=6, num_workers=workers)
        loader = PoissonLoader(loader, key=KEY, units=units, sample_rate=0.5, steps=6)
        for (batch,) in loader:
            expected = fill_of(batch.tolist(), 3)
            found = loader.usage.ticket.fill
            assert (found is None) == (expected is None)
            assert found is None or found.tolist() == expected.tolist()
            assert loader.usage.handed == len(batch)
