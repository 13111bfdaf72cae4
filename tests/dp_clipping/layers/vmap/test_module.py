"""Any other module under vmap: gradients are those of one backward per sample."""

import copy
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from torch import nn

from ddp_by_hand.experiments.verify_correctness import reference as oracle
from dp_clipping.capture import vmap_trial
from dp_clipping.layers.vmap.own import UnknownOperation
from tests.dp_clipping.conftest import (
    MODES,
    assert_close,
    assert_exact,
    assert_step,
    clipped_sums,
    private,
    unchecked,
)
from tests.support import zoo
from tests.support.turns import in_turn


def test_hooks_run_once_and_around_the_call():
    network, calls = nn.Sequential(nn.Conv1d(2, 2, 1)), []
    network[0].register_forward_hook(lambda *_: calls.append(1))
    model = unchecked(network, "bookkeeping")
    model(torch.randn(3, 2, 4))
    calls.clear()
    model(torch.randn(3, 2, 4))
    assert calls == [1]


class Rows(nn.Module):
    """Chooses by numbers which matrix a sample goes through, and writes row by row."""

    def __init__(self):
        super().__init__()
        self.w, self.layer = nn.Parameter(torch.randn(4, 4) / 2), nn.Linear(4, 4)

    def forward(self, x, mode="a", parts=()):
        y = torch.zeros_like(x)
        for n in range(len(x)):
            y[n] = x[n] @ self.w if x[n].sum() > 0 else self.layer(x[n])
        return {"parts": (y, [2 * y]), "mode": mode}


class Chosen(nn.Module):
    def __init__(self, is_tied=False):
        super().__init__()
        self.rows, self.end = Rows(), nn.Linear(4, 4)
        if is_tied:
            self.end.weight = self.rows.w

    def forward(self, x):
        found = self.rows(self.end(x), "b", parts=[1, None])
        assert found["mode"] == "b"
        y = found["parts"][0] + found["parts"][1][0]
        return self.end(self.rows(y)["parts"][0])


class Spectrum(nn.Module):
    """A layer of a Fourier neural operator, which writes the kept frequencies into zeros."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4, 2, 2) / 4)

    def forward(self, x):
        seen = torch.fft.rfft(x)
        kept = torch.zeros(seen.shape, dtype=seen.dtype)
        w = torch.view_as_complex(self.w)
        kept[..., :2] = torch.einsum("bim,iom->bom", seen[..., :2], w)
        return torch.fft.irfft(kept, n=x.shape[-1])


class Overwrites(nn.Module):
    """Writes to its input, which its caller reads afterwards."""

    def __init__(self):
        super().__init__()
        self.first, self.block = nn.Linear(4, 4), nn.Module()
        self.block = zoo.Net(self.written, w=nn.Parameter(torch.randn(4, 4)))

    @staticmethod
    def written(net, x):
        float(x.detach().sum())
        x.mul_(2)
        return x @ net.w

    def forward(self, x):
        h = self.first(x)
        return self.block(h) + h


# torch.vmap cannot run any of them as a whole; the operators of these parameters it can
TOGETHER = ("spectrum", "written input")
ONE_BY_ONE = {
    "rows": (Chosen, (4,)),
    "tied": (lambda: Chosen(is_tied=True), (4,)),
    "spectrum": (Spectrum, (4, 8)),
    "written input": (Overwrites, (4,)),
}


STYLES = [
    (mode, options)
    for options in ({}, {"clipping": "per_layer"}, {"rows_per_unit": 2})
    for mode in MODES
]


@pytest.mark.parametrize(("name", "style"), in_turn(ONE_BY_ONE, STYLES, fast=3))
def test_one_sample_after_another(name, style):
    mode, options = style
    make, shape = ONE_BY_ONE[name]
    network, k = make().double(), options.get("rows_per_unit", 1)
    model = private(copy.deepcopy(network), mode, 1e-3, **options)
    for size in (3, 1, 4):
        x = torch.randn(size * k, *shape, dtype=torch.float64)
        batch = x, torch.randn_like(network(x))
        examples = oracle.per_sample_gradients(network, batch, zoo.product)
        gradients = {n: g.unflatten(0, (size, k)).sum(1) for n, g in examples.items()}
        sums = clipped_sums(model, batch)
        if options.get("clipping") != "per_layer":
            assert_close(sums, oracle.clipped_sum(gradients, 1e-3), 1e-9)
        torch.testing.assert_close(
            model.per_sample_gradient_norms.double(), oracle.norms(gradients).double()
        )
        with torch.no_grad():
            for p in model.network.parameters():
                p.add_(0)  # as an optimizer's step
    if name in TOGETHER:
        assert not any(handle.one_by_one for handle in model.capture.handles)
    else:
        table = model.plan_table()
        assert "one sample after another: torch.vmap cannot run it (test_module.py:" in table
    assert model(torch.randn(0, *shape, dtype=torch.float64)).shape[0] == 0


class Counts(nn.Module):
    """Runs under vmap, and returns a number beside its rows."""

    def __init__(self, count):
        super().__init__()
        self.start, self.count = nn.Parameter(torch.randn(4)), count

    def forward(self, x):
        y = x.clone()
        y[:, 0] = self.start[0]
        return y, self.count(x)


@pytest.mark.parametrize("count", [len, lambda x: x.shape[-1]])
def test_a_number_that_is_returned_is_that_of_the_batch(count):
    """A module whose samples make another number runs with the one around it."""
    network = zoo.Net(
        lambda net, x: net.head((y := net.counts(x))[0] * y[1] / count(x)),
        counts=Counts(count), head=nn.Linear(4, 4),
    )  # fmt: skip
    assert_exact(network.double(), tuple(torch.randn(2, 3, 4, dtype=torch.float64)))


class Mixing(nn.Module):
    """Code that vmap cannot run, in which samples see each other."""

    def __init__(self, mix):
        super().__init__()
        self.w, self.mix = nn.Parameter(torch.randn(4, 4)), mix

    def forward(self, x):
        y = torch.zeros_like(x)
        y[:] = x @ self.w
        return self.mix(x, y)


def limited(x, y):
    """Half of the rows go through, as with experts of limited capacity."""
    kept = torch.zeros_like(y)
    rows = (x[:, 0] > -9).nonzero()[:, 0][: max(1, len(x) // 2)]
    kept[rows] = y[rows]
    return kept


@pytest.mark.parametrize(
    "mix", [lambda x, y: y - y.mean(0), lambda x, y: y * float(x.mean()), limited],
    ids=["mean", "number", "capacity"],
)  # fmt: skip
def test_samples_that_see_each_other_are_refused(mix):
    with pytest.raises(ValueError, match="no gradient of its own"):
        private(nn.Sequential(nn.Linear(4, 4), Mixing(mix)))(torch.randn(4, 4))


def test_each_sample_draws_its_own_dropout():
    network = nn.Sequential(Mixing(lambda x, y: nn.functional.dropout(y, 0.5)))
    y = private(network)(torch.ones(64, 4))
    assert len((y == 0).unique(dim=0)) > 2


def padded(padding_idx: int) -> nn.Module:
    """A table of its own with padding."""
    return zoo.Net(
        lambda net, ids: nn.functional.embedding(ids, net.table, padding_idx),
        table=nn.Parameter(torch.randn(6, 4)),
    )


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("padding_idx", [1, -5])
def test_padding_of_a_table_has_no_gradient(padding_idx, is_known):
    """By the operator itself, or with the module under vmap as a whole."""
    network = zoo.seeded(lambda: nn.Sequential(padded(padding_idx), nn.Linear(4, 3))).double()
    ids = torch.tensor([[1, 2, 3], [1, 1, 4], [2, 5, 1]])
    batch = ids, torch.randn(3, 3, 3, dtype=torch.float64)
    unknown = patch.object(vmap_trial, "learn", side_effect=UnknownOperation("nothing is known"))
    with nullcontext() if is_known else unknown:
        model = private(copy.deepcopy(network), max_grad_norm=1e6)
        assert_step(model, network, batch, limit=1e6)
    (state,) = [h for h in model.capture.handles if h.kind == "vectorized"]
    assert (state.operations is not None) == is_known
