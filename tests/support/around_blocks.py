"""Networks whose root, or another module around their blocks, owns bare parameters."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from tests.support.zoo import Net, seeded

WIDTH, TOKENS, CLASSES = 4, 6, 3


class Block(nn.Module):
    """One block, with the shapes of a transformer's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        x = x if shift is None else x + shift
        return x + torch.tanh(self.layer(self.norm(x)))


class Scaled(nn.Module):
    """Blocks with parameters around them, inside of a network."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.gain, self.mix = Parameter(torch.ones(WIDTH)), Parameter(torch.eye(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.blocks
        return second(torch.tanh(first(x) * self.gain)) @ self.mix


class Linked(nn.Module):
    """Blocks that another module calls by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])


def run(net: Net, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = block(x)
    return x


def network(function: Callable, **members: nn.Module | Parameter | Tensor) -> nn.Module:
    """Returns embedding, two blocks and head, with more members; a function computes with them."""
    blocks = {"blocks": nn.ModuleList([Block(), Block()])} | members
    return Net(function, embed=nn.Linear(5, WIDTH), head=nn.Linear(WIDTH, CLASSES), **blocks)


def token(net: Net, x: Tensor) -> Tensor:
    """A vision transformer: a class token, a table of positions, a temperature."""
    x = torch.cat([net.token.expand(len(x), -1, -1), net.embed(x)], dim=1) + net.table
    return net.head(run(net, x)[:, 0]) * net.scale.exp()


def product(net: Net, x: Tensor) -> Tensor:
    """What no operator without vmap computes."""
    return net.head(F.layer_norm(run(net, net.embed(x)) @ net.mix, (WIDTH,), net.gain)).mean(1)


def twice(net: Net, x: Tensor) -> Tensor:
    return net.head(run(net, net.embed(x) * net.gain).mean(1) * net.gain)


def lists(net: Net, x: Tensor) -> Tensor:
    x = net.embed(x) + net.several[0]
    x = run(net, x) * net.named["gain"]
    return net.head((x + net.several[1]).mean(1))


def masked(net: Net, x: Tensor) -> Tensor:
    chosen = x[..., :1] > 0
    return net.head(run(net, torch.where(chosen, net.gain, net.embed(x))).mean(1))


def handed(net: Net, x: Tensor) -> Tensor:
    """A block is given the root's parameter."""
    first, second = net.blocks
    return net.head(second(first(net.embed(x), net.table), shift=net.table).mean(1))


def handed_expanded(net: Net, x: Tensor) -> Tensor:
    first, second = net.blocks
    table = net.table.expand(len(x), -1, -1)
    return net.head(second(first(net.embed(x), table), shift=table).mean(1))


def tied(net: Net, x: Tensor) -> Tensor:
    return net.head(run(net, net.embed(x)).mean(1) * (x @ net.table.t()).mean(1))


def named_twice(net: Net, x: Tensor) -> Tensor:
    return net.head(run(net, net.embed(x) * net.gain).mean(1) + net.other)


def linked(net: Net, x: Tensor) -> Tensor:
    x = net.embed(x) * net.gain
    for block in net.encoder.blocks:
        x = block(x)
    return net.head(x.mean(1))


def recomputed(function: Callable) -> Callable:
    """Blocks keep nothing for backward but their input."""

    def forward(net: Net, x: Tensor) -> Tensor:
        blocks = net.blocks
        object.__setattr__(
            net, "blocks", [partial(checkpoint, b, use_reentrant=False) for b in blocks]
        )
        try:
            return function(net, x)
        finally:
            object.__delattr__(net, "blocks")

    return forward


def _vit(function: Callable = token, **more: Parameter) -> nn.Module:
    return network(
        function,
        token=Parameter(torch.randn(1, 1, WIDTH)),
        table=Parameter(torch.randn(1, TOKENS + 1, WIDTH)),
        scale=Parameter(torch.zeros(1)),
        **more,
    )


def _gain(function: Callable, **more: nn.Module) -> nn.Module:
    return network(function, gain=Parameter(torch.ones(WIDTH)), **more)


def _product(function: Callable = product) -> nn.Module:
    mix, gain = Parameter(torch.eye(WIDTH)), Parameter(torch.ones(WIDTH))
    return network(function, mix=mix, gain=gain)


def _lists(function: Callable = lists) -> nn.Module:
    several = nn.ParameterList([torch.zeros(TOKENS, WIDTH), torch.zeros(WIDTH)])
    return network(function, several=several, named=nn.ParameterDict({"gain": torch.ones(WIDTH)}))


def _tied() -> nn.Module:
    net = network(tied)
    net.table = net.embed.weight
    return net


def _named_twice() -> nn.Module:
    net = _gain(named_twice)
    net.other = net.gain
    return net


def _frozen(name: str, build: Callable[[], nn.Module] = _vit) -> nn.Module:
    net = build()
    found = dict(net.named_parameters()).get(name)
    (net.get_submodule(name) if found is None else found).requires_grad_(False)
    return net


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "vit": _vit,
    "product": _product,
    "twice": lambda: _gain(twice),
    "masked": lambda: _gain(masked),
    "lists": _lists,
    "nested": lambda: _gain(twice, blocks=nn.ModuleList([Block(), Scaled(), Block()])),
    "handed_expanded": lambda: network(
        handed_expanded, table=Parameter(torch.randn(TOKENS, WIDTH))
    ),
    "tied": _tied,
    "named_twice": _named_twice,
    "linked": lambda: _gain(linked, encoder=Linked(), blocks=nn.Identity()),
    "frozen_block": lambda: _frozen("blocks.0"),
    "frozen_blocks": lambda: _frozen("blocks"),
    "frozen_parameter": lambda: _frozen("table"),
    "checkpointed": lambda: _vit(recomputed(token)),
    "checkpointed_product": lambda: _product(recomputed(product)),
    "checkpointed_lists": lambda: _lists(recomputed(lists)),
}


REFUSED: dict[str, Callable[[], nn.Module]] = {
    "handed": lambda: network(handed, table=Parameter(torch.randn(TOKENS, WIDTH)))
}
"""What blocks that ranks gather by themselves cannot be."""


def make(name: str) -> nn.Module:
    return seeded((NETWORKS | REFUSED)[name]).double()


def blocks(network: nn.Module) -> list[str]:
    """Returns the names of the modules that ranks gather by themselves."""
    return [name for name, m in network.named_modules() if isinstance(m, Block | Scaled)]
