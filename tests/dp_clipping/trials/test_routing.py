"""Which operators pick or sort rows by values, and which tensors have such rows."""

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from dp_clipping.trials.routing import Routing


@pytest.mark.parametrize(
    ("call", "expected"), [(torch.Tensor.sort, False), (torch.Tensor.long, True)]
)
def test_operators_that_take_some_numbers_only(call, expected):
    with Routing() as routing:
        call(torch.tensor([3.0, 1.0]))
    assert routing.checks_values == expected


X = torch.tensor([[2.0, 1.0, 0.0], [1.0, 3.0, 0.0]])
ORDER = torch.tensor([1, 0])
CALLS = {
    "mask": (lambda x: x[x[:, 0] > 0], True),
    "mask of tokens": (lambda x: x[x > 1][:, None], True),
    "masked_select": (lambda x: x.masked_select(x > 1), True),
    "a random mask": (lambda x: x[torch.tensor([True, False])], True),
    "rows that it finds": (lambda x: x[torch.tensor([True, False]).nonzero()[:, 0]], True),
    "sorted numbers": (lambda x: x.sort(0).values, True),
    "sorted numbers of each": (lambda x: x.sort(1).values, False),
    "sorted rows": (lambda x: x[x[:, 0].argsort()], True),
    "selected rows": (lambda x: x.index_select(0, x[:, 0].argsort()), True),
    "rows in dimension 1": (lambda x: x.t()[:, x[:, 0].argsort()], True),
    "distinct numbers": (lambda x: x.unique(), True),
    "distinct rows": (lambda x: x.unique(dim=0), True),
    "distinct neighbours": (lambda x: x.unique_consecutive(), True),
    "distinct numbers back": (lambda x: (2 * x.unique())[x.unique(return_inverse=True)[1]], False),
    "a layer of them": (lambda x: torch.cat([x[x[:, 0] > 0]]).tanh()[:, 1:], True),
    "a token of sorted rows": (
        lambda x: x[x[:, 0].argsort()][torch.arange(2), x.argmax(1)], True),
    "picked rows in order": (lambda x: x[x > 1].view(2, 1)[x[:, 0].argsort()], True),
    "in place": (lambda x: torch.zeros(2, 3).copy_(x[x[:, 0] > 0]), True),
    "back in order": (lambda x: x[x[:, 0].argsort()][x[:, 0].argsort().argsort()], False),
    "in their places": (lambda x: torch.zeros_like(x).index_put(
        (x[:, 0].argsort(),), x[x[:, 0].argsort()]), False),
    "a dimension for the samples": (lambda x: x[x > 1].view(2, -1, 1), False),
    "a token of picked rows": (lambda x: x[x > 1].view(2, -1, 1)[:, -1], False),
    "sequences": (lambda x: pad_packed_sequence(pack_padded_sequence(
        x[..., None], (x > 0).sum(1), batch_first=True, enforce_sorted=False))[0], False),
    "their states": (lambda x: torch.stack(2 * [x[x[:, 0].argsort()]]).index_select(
        1, x[:, 0].argsort().argsort()), False),
    "one token of each": (lambda x: x[torch.arange(2), x.argmax(1)], False),
    "tokens of each": (lambda x: x.gather(1, x.argsort(1)), False),
    "a constant order": (lambda x: x[ORDER], False),
    "a table": (lambda x: torch.eye(4)[x.long()], False),
    "of their shape": (lambda x: torch.ones_like(x[x[:, 0] > 0]), False),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_which_rows_are_moved(name):
    call, expected = CALLS[name]
    with Routing(X, 2) as routing:
        y = call(X)
    assert routing.has_moved(y) == expected
    assert not routing.has_moved(X)
