"""Which examples are one unit, and which rows of a batch only fill one up."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from dp_clipping.sampling.loader import PoissonLoader
from dp_clipping.sampling.units import fill_of, units_of
from tests.support.draws import KEY, drawn, numbers

NAMES = ["ann", "bob", "ann", "cy", "bob", "ann", "dee"]


class TestUnits:
    def test_consecutive_examples_are_one(self):
        units = units_of(8, 4)
        assert units.members.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert (len(units), units.size, units.are_named) == (2, 4, False)

    def test_the_last_one_may_have_fewer(self):
        assert units_of(6, 4).members.tolist() == [[0, 1, 2, 3], [4, 5, 5, 5]]

    @pytest.mark.parametrize(
        "ids",
        [NAMES, tuple(NAMES), np.array(NAMES), torch.tensor([3, 9, 3, 0, 9, 3, 8])],
        ids=["list", "tuple", "array", "tensor"],
    )
    def test_ids_say_whose_an_example_is(self, ids):
        units = units_of(7, 3, ids)
        assert units.members.tolist() == [[0, 2, 5], [1, 4, 4], [3, 3, 3], [6, 6, 6]]
        assert units.are_named

    def test_a_unit_with_too_many_is_refused(self):
        with pytest.raises(ValueError, match="a unit has 3 examples, and examples_per_unit=2"):
            units_of(7, 2, NAMES)

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
            ([object() for _ in range(7)], "no other entry is equal to: give numbers or strings"),
            ([torch.ones(2)] * 7, "no other entry is equal to"),
            ([{"user": 1}] * 7, "no other entry is equal to"),
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


class TestFill:
    def test_what_a_unit_has_already_is_fill(self):
        rows = [4, 5, 5, 5, 0, 1, 2, 3]
        assert fill_of(rows, 4).tolist() == [False, False, True, True] + [False] * 4

    def test_the_same_index_in_another_unit_is_none(self):
        assert fill_of([1, 2, 2, 3], 2) is None

    @pytest.mark.parametrize(("rows", "size"), [([], 3), ([5, 5, 6], 1), ([0, 1, 2], 3)])
    def test_full_units_have_none(self, rows, size):
        assert fill_of(rows, size) is None


class TestLoader:
    def loader(self, **options):
        units = units_of(7, 3, NAMES)
        loader = DataLoader(numbers(7), batch_size=6)
        return PoissonLoader.from_data_loader(loader, key=KEY, units=units, **options)

    def test_whole_units_are_drawn(self):
        members = units_of(7, 3, NAMES).members.tolist()
        loader = self.loader(sample_rate=0.5, steps=40)
        batches = drawn(loader)
        counts = [0] * 4
        for batch in batches:
            units = [batch[i : i + 3] for i in range(0, len(batch), 3)]
            assert all(unit in members for unit in units)
            assert units == sorted(units, key=members.index)
            for unit in units:
                counts[members.index(unit)] += 1
        assert all(8 <= count <= 32 for count in counts), "half of 40 each"

    @pytest.mark.parametrize("workers", [0, 1])
    def test_the_batch_is_told_which_rows_are_fill(self, workers):
        units = units_of(7, 3, NAMES)
        loader = DataLoader(numbers(7), batch_size=6, num_workers=workers)
        loader = PoissonLoader.from_data_loader(
            loader, key=KEY, units=units, sample_rate=0.5, steps=6
        )
        for (batch,) in loader:
            expected = fill_of(batch.tolist(), 3)
            found = loader.usage.ticket.fill
            assert (found is None) == (expected is None)
            assert found is None or found.tolist() == expected.tolist()
            assert loader.usage.handed == len(batch)

    def test_ranks_have_other_units(self):
        shares = [self.loader(rank=r, world_size=2, sample_rate=1.0, steps=1) for r in range(2)]
        first, second = (drawn(loader)[0] for loader in shares)
        assert first == [0, 2, 5, 3, 3, 3]
        assert second == [1, 4, 4, 6, 6, 6]
