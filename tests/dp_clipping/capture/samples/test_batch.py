"""The samples in a forward's arguments."""

import copy
from collections import UserDict
from collections.abc import MutableMapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from ddp_by_hand.experiments.verify_correctness import reference as oracle
from dp_clipping.capture.samples.batch import (
    Batch,
    Constants,
    are_samples,
    map_tensors,
    tensors_of,
)
from tests.dp_clipping.conftest import criterion_of, private
from tests.support import zoo

TABLE = torch.arange(8.0).view(4, 2)


@dataclass
class Output:
    logits: Tensor
    name: str = "x"


class Named(dict):
    __getattr__ = dict.__getitem__


def rows(*values: float) -> Tensor:
    return torch.tensor(values)[:, None].repeat(1, 2)


def test_tensors_are_found_in_order_and_changed_in_copies():
    tree = {"a": [torch.ones(1), 2], "b": Output(torch.ones(2))}
    assert [x.numel() for x in tensors_of(tree)] == [1, 2]
    changed = map_tensors(lambda x: x + 1, tree)
    assert changed["b"].logits.tolist() == [2, 2]
    assert tree["b"].logits.tolist() == [1, 1]
    assert changed["a"][1] == 2


@pytest.mark.parametrize(
    ("args", "batch_first", "size"),
    [
        ((torch.ones(3, 2), torch.ones(1, 4)), True, 3),
        ((torch.ones(5, 3), torch.ones(3)), False, 3),
        ((torch.ones(0, 2), torch.ones(1, 4)), True, 0),
        ((torch.ones(4),), True, 4),
        ((torch.ones(3, 2), torch.ones(7)), True, 3),
    ],
)
def test_sizes(args, batch_first, size):
    assert Batch(args, {}, batch_first).size == size


def test_no_tensor_no_batch():
    with pytest.raises(ValueError, match="forward got no tensor"):
        Batch((3, "x"), {}, True)


def test_other_samples():
    shared = torch.ones(1, 2)
    batch = Batch((rows(0, 1, 2),), {"scale": shared, "flag": True}, True)
    args, kwargs = batch.with_rows([2, 0])
    assert torch.equal(args[0], rows(2, 0))
    assert kwargs["scale"] is shared
    assert torch.equal(batch.with_samples(5)[0][0], rows(0, 1, 2, 0, 1))
    assert torch.equal(batch.first(1).args[0], rows(0))


class Reads(nn.Module):
    """Gets one tensor, or something that holds one."""

    def __init__(self, read):
        super().__init__()
        self.read, self.linear = read, nn.Linear(3, 2)

    def forward(self, given):
        return self.linear(given if isinstance(given, Tensor) else self.read(given)).tanh()


class Kept(MutableMapping):
    """Keeps what it holds in a dict, which a shallow copy shares."""

    def __init__(self, **held):
        self._held = held

    def __getitem__(self, key):
        return self._held[key]

    def __setitem__(self, key, value):
        self._held[key] = value

    def __delitem__(self, key):
        del self._held[key]

    def __iter__(self):
        return iter(self._held)

    def __len__(self):
        return len(self._held)


HOLDERS = {
    "mapping of its own": (lambda x: Kept(x=x), lambda given: given["x"]),
    "dataclass": (lambda x: Output(x), lambda given: given.logits),
    "mapping": (lambda x: UserDict(x=[x]), lambda given: given["x"][0]),
    "dict of its own": (lambda x: Named(x=x), lambda given: given.x),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_samples_in_dataclasses_and_mappings(name):
    """Their gradients are exact, also of an empty batch, and samples that mix are seen."""
    hold, read = HOLDERS[name]
    network = Reads(read).double()
    model = private(copy.deepcopy(network))
    for size in (4, 0, 3):
        x, y = torch.randn(size, 3).double(), torch.randn(size, 2).double()
        model.clear_gradients()
        criterion = criterion_of(model, zoo.product)
        criterion(model(hold(x)), y).backward()
        assert model.per_sample_gradient_norms.shape == (size,)
        if size:
            norms = oracle.norms(oracle.per_sample_gradients(network, (x, y), zoo.product))
            torch.testing.assert_close(model.per_sample_gradient_norms, norms.double())
    mixing = private(Reads(lambda given: read(given) * read(given).mean()))
    with pytest.raises(ValueError, match="depends on the other samples of the batch"):
        mixing(hold(torch.randn(4, 3)))


def test_the_batch_in_dimension_1():
    batch = Batch((torch.arange(6.0).view(2, 3),), {}, False)
    assert batch.with_rows([1])[0][0].tolist() == [[1], [4]]


def test_one_sample_made_larger():
    numbers = torch.arange(3)
    larger = Batch((rows(1.0, 1, 1), numbers), {}, True).with_factor(1, 8.0)
    assert torch.equal(larger.args[0], rows(1.0, 8, 1))
    assert torch.equal(larger.args[1], numbers)


def test_distinct_samples():
    batch = Batch((rows(1, 1, 2, torch.nan, torch.nan, 3),), {}, True)
    assert batch.distinct(9) == [0, 2, 3, 5]
    assert batch.distinct(2) == [0, 2]


def test_an_empty_batch_has_a_row_that_goes_again():
    batch = Batch((torch.ones(0, 2),), {}, True)
    args, _ = batch.stand_in()
    assert torch.equal(args[0], torch.zeros(1, 2))
    lengths = Batch((torch.ones(0, 2), torch.zeros(0, dtype=torch.long)), {}, True)
    assert lengths.with_a_row_of_zeros()[0][1].tolist() == [1]  # no sequence has none
    assert batch.without_rows({"y": torch.ones(1, 5)})["y"].shape == (0, 5)


@pytest.mark.parametrize(
    ("x", "is_listed"),
    [
        ([rows(1), rows(1)], True), ((rows(1, 2, 3), rows(1)), True),
        ([{"a": rows(1), "b": 2}, {"a": rows(1, 2), "b": 3}], True),
        ([rows(1, 2), rows(1, 2), rows(1)], False), ([TABLE[:2], TABLE[:2]], False),
        ([rows(1), rows(1.0)], False), ([1, 2], False), (torch.ones(2, 3), False),
    ],
)  # fmt: skip
def test_a_list_of_samples(x, is_listed):
    assert are_samples(x, 2) is is_listed
    assert not are_samples(x, None)


def test_what_is_expected_comes_before_what_is_largest():
    mask = torch.ones(7, 7)

    def size(expected, *args):
        return Batch(args, {}, True, expected=expected).size

    assert size(3, torch.ones(3, 2), mask) == size(3, mask, torch.ones(3, 2)) == 3
    assert size(1, torch.ones(1, 2), mask) == 1
    assert size(5, torch.ones(0, 2), mask) == 0
    assert size(5, torch.ones(3, 2), mask) == size(None, torch.ones(3, 2), mask) == 7
    batch = Batch((torch.ones(3, 2), mask, mask[0], 2), {}, True, expected=3)
    assert batch.others == {batch.key(1): 7, batch.key(2): 7}


def test_rows_of_a_batch_of_another_size_are_of_no_sample():
    constants, table = Constants(), torch.ones(3, 2)

    def found(size, *others, **named):
        args = torch.ones(size, 2), *others
        return Batch(args, named, True, constants=constants, expected=size)

    def run(batch):
        constants.now = batch.others

    assert len(found(3, table).rows()) == 2
    run(found(5, table))
    assert len(found(3, table).rows()) == len(found(2, table[:2]).rows()) == 1  # in other runs
    assert found(5, table).first(2).size == 2  # it is not the largest one either
    constants.now = {}
    run(found(3, table))
    constants.keep()
    assert not constants.seen  # the losses of the batch before were others
    run(found(5, torch.ones(1, 2), torch.ones(5, 2)))
    constants.keep()
    assert len(found(3, table).rows()) == 2
    run(found(5, table))
    constants.keep()
    constants.now = {}
    for size in (2, 3, 4):
        assert found(size, table).size == size
        # Rows that it has not had before may be of samples.
        assert len(found(size, torch.ones(size, 2)).rows()) == (1 if size == 3 else 2)
    assert len(found(3, named=table).rows()) == 2  # another argument
    constants.forget()
    assert len(found(3, table).rows()) == 2


@pytest.mark.parametrize(
    ("later", "is_refused"),
    [
        (TABLE, False), (TABLE[:3], False), (torch.cat((TABLE, TABLE)), False),
        (TABLE + 1, True), (TABLE[1:], True), (TABLE[:2] + 1, False),
        (TABLE * torch.nan, True),
    ],
)  # fmt: skip
def test_more_rows_than_samples_are_the_same_in_all_batches(later, is_refused):
    constants = Constants()

    def changed(x):
        return constants.changed(Batch((torch.ones(2, 3), x), {}, True, expected=2))

    assert changed(TABLE) is None
    assert ("other values" in (changed(later) or "")) is is_refused


@pytest.mark.parametrize("value", [torch.nan, torch.inf, True, 3])
def test_a_table_of_any_values_is_the_same_in_all_batches(value):
    constants, table = Constants(), torch.full((4, 2), value)
    for _ in range(2):
        assert constants.changed(Batch((torch.ones(2, 3), table), {}, True, expected=2)) is None


def test_vectors_are_compared_beside_vectors_alone():
    for x, is_refused in ((torch.ones(2, 3), False), (torch.ones(2), True)):
        constants = Constants()
        found = [
            constants.changed(Batch((x, y), {}, True, expected=2))
            for y in (torch.zeros(4), torch.ones(4))
        ]
        assert found[0] is None
        assert (found[1] is not None) is is_refused
