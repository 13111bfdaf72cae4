"""Trees with mappings and dataclasses that PyTorch does not open."""

import weakref
from collections import UserDict, namedtuple
from dataclasses import dataclass

import pytest
import torch

from dp_clipping.capture.samples.trees import closed, opened
from tests.support.engine import build


@dataclass
class Plain:
    x: object
    more: object = None


@dataclass(frozen=True, slots=True)
class Frozen:
    x: object
    more: object = None


class Mapping(dict):
    __getattr__ = dict.__getitem__


Pair = namedtuple("Pair", "a b")
X, Y = torch.ones(2), torch.zeros(3)
TREES = {
    "tuples": ((X, [Y, 3], {"a": "b"}), [X, Y, 3, "b"]),
    "dataclass": (Plain(X, {"y": Y}), [X, Y]),
    "frozen, with slots": ([Frozen(X, 5), Y], [X, 5, Y]),
    "dict of its own": ((Mapping(x=X, n=1), Y), [X, 1, Y]),
    "mapping": ({"a": UserDict(x=X)}, [X]),
    "in each other": (Pair(Plain(Mapping(x=[X, Frozen(Y)])), 1), [X, Y, None, None, 1]),
    "nothing in it": ([Mapping(), X], [Mapping(), X]),
}


@pytest.mark.parametrize("name", TREES)
def test_leaves_are_found_in_order_and_put_into_a_copy(name):
    tree, leaves = TREES[name]
    found, structure = opened(tree)
    assert found == leaves
    numbers = list(range(len(leaves)))
    made = closed(numbers, structure)
    assert type(made) is type(tree)
    assert opened(made)[0] == numbers
    assert opened(tree)[0] == leaves


def test_structures_are_equal_for_the_same_classes_and_keys():
    structures = [
        opened(tree)[1]
        for tree in ((Plain(X), X), (Plain(Y), Y), (Frozen(X), X), (Plain(X, [X]), X))
    ]
    assert structures[0] == structures[1]
    assert len({*structures}) == 3


def test_a_structure_holds_no_leaf():
    x = torch.ones(2)
    structure, still = opened(Plain([x]))[1], weakref.ref(x)
    del x
    assert structure is not None
    assert still() is None


@pytest.mark.parametrize("way", ["itself", "as a parent"])
def test_what_holds_itself_is_named(way):
    one = Plain(X)
    one.more = one if way == "itself" else [Frozen(Y, {"parent": one})]
    with pytest.raises(ValueError, match=r"a Plain of a batch holds itself.*give the model"):
        opened((one, Y))
    assert opened((Plain(one.x), Y, Plain(X)))[0] == [X, None, Y, X, None]


@pytest.mark.parametrize("kind", [list, dict])
def test_a_list_that_holds_itself_is_no_argument(kind):
    one: list | dict = [X]
    one.append({"parent": one})
    one = one if kind is list else one[1]
    model = build().model
    with pytest.raises(ValueError, match=r"a list or dict of a batch holds itself.*give the model"):
        model(one)
