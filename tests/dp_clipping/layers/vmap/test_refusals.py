"""What code under vmap cannot do: it runs sample by sample, and the line is named."""

import copy
import re
from collections import deque

import pytest
import torch
from torch import Tensor, nn

from dp_clipping.layers.vmap.refusals import escape_of, refusal_of
from tests.dp_clipping.conftest import assert_exact, private, private_loss
from tests.support import zoo

LOOKS = {
    "item": lambda y: y.sum().item(),
    "if": lambda y: 1 if y.sum() > 0 else 2,
    "numpy": lambda y: y.detach().numpy(),
    "data_ptr": lambda y: y.data_ptr(),
    "nonzero": lambda y: y.nonzero(),
    "mask": lambda y: y[y > 0],
    "deepcopy": lambda y: copy.deepcopy(y.detach()),
    "written into another": lambda y: torch.zeros(y.shape, dtype=y.dtype).add_(y),
    "hook": lambda y: y.register_hook(lambda g: g),
    "requires_grad": lambda y: y.detach().requires_grad_(),
    "range": lambda y: list(range((y > 0).sum())),
}


class Scaled(nn.Module):
    """Looks at what it computes with a parameter of its own."""

    def __init__(self, look):
        super().__init__()
        self.scale, self.look = nn.Parameter(torch.ones(4)), look

    def forward(self, x: Tensor) -> Tensor:
        y = torch.maximum(x, self.scale)
        y[:, 0] = self.scale[0]  # which the whole batch's operators do not write
        self.look(y)
        return y


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LOOKS)
def test_what_needs_numbers_runs_sample_by_sample_and_is_named(name):
    x, y = torch.randn(2, 4, 4, dtype=torch.float64)
    network = nn.Sequential(nn.Linear(4, 4), Scaled(LOOKS[name])).double()
    assert_exact(network, (x, y))
    model = private(network)
    model(x)
    table = model.plan_table()
    line = r"^1: one sample after another: torch\.vmap cannot run it \(test_refusals\.py:\d+, "
    assert re.match(line, table)


class LooksUpOnce(nn.Module):
    """Looks up each token of the batch once."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        ids, places = tokens.unique(return_inverse=True)
        return self.head(self.table(ids)[places].mean(1))


def test_tokens_of_the_batch_may_be_looked_up_once():
    batch = torch.randint(9, (4, 5)), torch.randn(4, 4, dtype=torch.float64)
    assert_exact(LooksUpOnce().double(), batch)


def test_an_error_of_vmap_is_explained():
    error = RuntimeError("vmap: it looks like you're calling .item()\nmore")
    refusal = refusal_of(error, "1", nn.Linear(1, 1))
    assert str(refusal).startswith("1 (Linear) cannot be run under torch.vmap")
    assert refusal_of(RuntimeError("size mismatch"), "1", nn.Linear(1, 1)) is None


class Keeping(nn.Module):
    """Keeps what it computes in a variable, which its caller reads, or not."""

    def __init__(self, reads: bool):
        super().__init__()
        self.inner, self.reads = Scaled(KEPT.append), reads

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y + KEPT.pop() if self.reads else y


KEPT = deque(maxlen=1)


def test_a_tensor_that_outlives_vmap_is_named():
    x = torch.randn(4, 4)
    with pytest.raises(ValueError, match=r"a variable holds what a module.*return y, att"):
        private(nn.Sequential(Keeping(reads=True)))(x)
    private(nn.Sequential(Keeping(reads=False)))(x)
    assert escape_of(RuntimeError("another")) is None


class Computed(nn.Module):
    """A hook computes the weight that it uses of its own parameter."""

    def __init__(self):
        super().__init__()
        self.raw = nn.Parameter(torch.ones(4))
        self.register_forward_pre_hook(lambda module, _: setattr(module, "w", module.raw * 2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w


def test_a_hook_that_computes_a_weight_is_told_where_to_compute_it():
    model = private(Computed())
    with pytest.raises(RuntimeError, match=r"^raw: used outside.*in forward what a hook computes"):
        private_loss(model, (torch.randn(4, 4), torch.randn(4, 4)), zoo.product).backward()
