"""Layers whose input all samples share, before code that counts dimensions from the front."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.dp_clipping.conftest import assert_exact, private
from tests.support.turns import in_turn
from tests.support.zoo import Net

T, C = 3, 4
ROWS = torch.arange(T)


def own(*shape: int) -> nn.Module:
    """Returns its own parameter."""
    return Net(lambda net: net.table, table=nn.Parameter(torch.randn(shape)))


def gated() -> nn.Module:
    """Adds nothing at first."""
    return Net(
        lambda net, x: x + net.factor * F.normalize(net.rows(ROWS)),
        rows=nn.Embedding(T, C), factor=nn.Parameter(torch.zeros(1)),
    )  # fmt: skip


def network(function) -> nn.Module:
    torch.manual_seed(0)
    net = Net(
        function, rows=nn.Embedding(T, C), own=own(T, C), square=own(C, C), gated=gated(),
        layer=nn.Linear(C, C), zero=nn.Linear(C, C), end=nn.Linear(C, 2),
    )  # fmt: skip
    with torch.no_grad():
        net.zero.weight.zero_()
        net.zero.bias.zero_()
    return net.double()


def batch(size: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(size)
    x, y = (torch.randn(size, T, c, generator=draw, dtype=torch.float64) for c in (C, 2))
    return x, y


def grid(net: nn.Module) -> Tensor:
    return net.layer(torch.eye(C, dtype=torch.float64)[:T])


WAYS = {
    "normalize": lambda net, x: net.end(x * F.normalize(net.rows(ROWS))),
    "normalize a parameter": lambda net, x: net.end(x * F.normalize(net.own())),
    "normalize a grid": lambda net, x: net.end(x * F.normalize(grid(net))),
    "softmax": lambda net, x: net.end(x * net.rows(ROWS).softmax(1)),
    "squeeze, softmax": lambda net, x: net.end(x * net.rows(ROWS[None]).squeeze(0).softmax(1)),
    "cumsum": lambda net, x: net.end(x + net.rows(ROWS).cumsum(1)),
    "flip": lambda net, x: net.end(x + net.rows(ROWS).flip(1)),
    "dim": lambda net, x: net.end(x + net.own() / net.own().dim()),
    "shape": lambda net, x: net.end(x + net.rows(ROWS) / net.rows(ROWS).shape[1]),
    "first row": lambda net, x: net.end(x + net.rows(ROWS)[0]),
    "first row of a parameter": lambda net, x: net.end(x + net.own()[0]),
    "mean": lambda net, x: net.end(x + net.own().mean(0)),
    "product with samples": lambda net, x: net.end(x[:, 0] @ net.square())[:, None],
    "unsqueeze": lambda net, x: net.end(x + net.rows(ROWS).unsqueeze(0)),
    "before a zero factor": lambda net, x: net.end(net.gated(x)),
    "random numbers": lambda net, x: net.end(x + F.normalize(net.own()) + 0 * torch.randn(T, C)),
}


STYLES = {"bookkeeping-5": ("bookkeeping", 5), "ghost-1": ("ghost", 1),
          "ghost-5": ("ghost", 5), "bookkeeping-1": ("bookkeeping", 1)}  # fmt: skip


@pytest.mark.parametrize(("way", "style"), in_turn(WAYS, STYLES))
def test_shared_values_keep_their_shape(way, style):
    mode, size = style
    assert_exact(network(WAYS[way]), batch(size), mode)


def kinds_after_a_forward(net: nn.Module) -> dict[str, str]:
    model = private(net, "bookkeeping")
    model(batch(5)[0])
    return {handle.name: handle.kind for handle in model.capture.handles}


def test_values_that_broadcast_keep_the_fast_way():
    net = Net(lambda net, x: net.end(x + net.rows(ROWS)), rows=nn.Embedding(T, C),
              end=nn.Linear(C, 2))  # fmt: skip
    assert kinds_after_a_forward(net.double()) == {"rows": "embedding", "end": "linear"}


def test_zero_weights_that_hide_a_difference():
    """No gradient tells in the first step, and later ones do."""
    net = network(lambda net, x: net.end(x + net.zero(net.zero(x * F.normalize(net.rows(ROWS))))))
    assert "rows" not in kinds_after_a_forward(net)


def test_only_the_caller_runs_under_vmap():
    def block(function) -> nn.Module:
        return Net(function, rows=nn.Embedding(T, C), end=nn.Linear(C, C))

    net = nn.Sequential(
        block(lambda net, x: net.end(x + net.rows(ROWS))),
        block(lambda net, x: net.end(x * F.normalize(net.rows(ROWS)))),
        block(lambda net, x: net.end(x * net.rows(ROWS))),
    ).double()
    assert kinds_after_a_forward(net) == {
        "0.rows": "embedding", "0.end": "linear", "1": "vectorized", "1.end": "linear",
        "2.rows": "embedding", "2.end": "linear",
    }  # fmt: skip
    assert_exact(net, (batch(5)[0], torch.randn(5, T, C, dtype=torch.float64)))


@pytest.mark.parametrize("is_rounding", [True, False])
def test_a_difference_in_16_bits_is_repeated_in_float64(is_rounding):
    """Another shape is another kernel, which rounds otherwise."""

    def forward(net, x):
        rows = net.rows(ROWS)
        if rows.dim() == 3 and not (is_rounding and rows.dtype == torch.float64):
            rows = rows * 1.05
        return net.end(x * rows)

    torch.manual_seed(0)
    net = Net(forward, rows=nn.Embedding(T, C), end=nn.Linear(C, 2)).bfloat16()
    before = {name: (p.data_ptr(), p.clone()) for name, p in net.named_parameters()}
    model = private(net)
    model(batch(5)[0].bfloat16())
    kinds = {handle.name: handle.kind for handle in model.capture.handles}
    assert ("rows" in kinds) == is_rounding
    for name, p in net.named_parameters():
        assert p.dtype == torch.bfloat16
        assert p.data_ptr() == before[name][0]
        assert torch.equal(p, before[name][1])


class Tempered(nn.Module):
    """Returns a parameter beside what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.temperature = nn.Linear(C, C), nn.Parameter(torch.tensor([1.5]))

    def forward(self, x):
        return self.layer(x), self.temperature


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("mode", ["bookkeeping", "ghost"])
def test_a_module_that_returns_its_parameter(mode, size):
    def forward(net, x):
        y, temperature = net.head(x)
        return net.end(y * temperature)

    net = Net(forward, head=Tempered(), end=nn.Linear(C, 2)).double()
    assert_exact(net, batch(size), mode)
    private(net, mode)(batch(size)[0])
    assert not net.head.temperature._backward_hooks
