"""Which variables of modules a function names, and whose code it is."""

import collections
import json

import pytest
import torch
import transformers
from torch import nn

from dp_clipping.capture.checks.code_names import (
    function_of,
    is_data,
    is_users_function,
    is_users_module,
    names_in,
)
from lm.model import Transformer

COUNT = 0


def count(x):
    global COUNT
    COUNT = COUNT + len(TABLE)
    return [x + json.decoder for _ in range(3) if (lambda: OTHER)()]


TABLE = OTHER = ()


class Methods:
    @property
    def a(self): ...

    @staticmethod
    def b(): ...

    @classmethod
    def c(cls): ...

    def d(self): ...


def test_names_of_functions_within_count():
    names = names_in(count.__code__)
    assert {"TABLE", "OTHER", "COUNT", "json"} <= names.read
    assert names.written == {"COUNT"}
    assert names.attributes == {"decoder"}
    assert not names_in(Methods.d.__code__).read


def test_functions_of_methods():
    assert all(function_of(vars(Methods)[name]) is not None for name in "abcd")
    assert function_of(3) is None


def test_code_is_no_data():
    assert all(map(is_data, (3, None, [], torch.ones(1), Methods())))
    assert not any(map(is_data, (json, count, Methods, len, Methods().d)))


@pytest.mark.parametrize(
    ("module", "is_users"),
    [(__name__, True), ("lm.model", True), ("__main__", True), ("a_notebook", True),
     ("torch.nn", False), ("json", False), ("itertools", False), ("builtins", False),
     ("transformers", False), ("pytest", False), ("dp_clipping.engine", False)],
)  # fmt: skip
def test_whose_module_it_is(module, is_users):
    assert is_users_module(module) == is_users


def test_whose_function_it_is():
    assert is_users_function(count)
    assert is_users_function(Transformer.forward)
    others = nn.Linear.forward, json.loads, transformers.PreTrainedModel.post_init
    assert not any(map(is_users_function, (*others, collections.namedtuple)))
