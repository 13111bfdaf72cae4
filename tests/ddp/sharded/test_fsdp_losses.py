"""`fsdp`: losses that depend on more than what blocks return."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp import wrap
from ddp_by_hand.lm.rank_pool import Context
from tests.ddp.sharded.test_fsdp import Network, tokens
from tests.support.beside import Beside
from tests.support.on_ranks import on_ranks


class Keeping(nn.Module):
    """A block that keeps a part of the loss, of which its output knows nothing.

    In a dictionary of its own, or in `elsewhere`.
    """

    def __init__(self, elsewhere: list[Tensor] | None = None):
        super().__init__()
        self.keep = self.keep_here if elsewhere is None else elsewhere.append
        self.layer, self.side = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        output = torch.tanh(hidden)
        loss = self.side(hidden).square().mean() + self.layer.weight.square().mean()
        self.keep(loss)
        return output

    def keep_here(self, loss: Tensor) -> None:
        self.losses = {"side": [loss]}


def keeping_loss(model: nn.Module, rank: int) -> Tensor:
    network = getattr(model, "module", model)
    loss = model(tokens(0, rank)).square().mean()
    return loss + sum(block.losses["side"][0] for block in network.blocks)


@on_ranks(2)
def test_the_loss_depends_on_what_blocks_keep(context: Context) -> None:
    """Tests a loss that blocks keep, as experts keep their balance, after an evaluation."""
    network = Network()
    network.blocks = nn.ModuleList(Keeping() for _ in range(3))
    pair = Beside(context, "fsdp", network)
    pair.model.eval()
    with torch.no_grad():
        pair.model(tokens(0, context.rank))
    pair.model(tokens(0, context.rank))
    pair.model.train()
    for _ in range(3):
        pair.step(keeping_loss)


@on_ranks(2)
def test_the_loss_depends_on_what_is_kept_elsewhere(context: Context) -> None:
    """A parameter that is used nowhere else would be read while it has no values."""
    network = Network()
    losses: list[Tensor] = []
    network.blocks = nn.ModuleList(Keeping(losses) for _ in range(3))
    model = wrap("fsdp", network, process_group=context.group)
    losses.append(model(tokens(0, context.rank)).square().mean())
    with pytest.raises(RuntimeError, match=r"outside of its block.*return each tensor on which"):
        torch.stack(losses).sum().backward()


class InAnObject(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(x=super().forward(x))


@on_ranks(2)
def test_a_block_returns_an_object_of_an_unknown_class(context: Context) -> None:
    class Objects(Network):
        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.blocks[0](self.embedding(tokens)).x)

    network = Objects()
    network.blocks = nn.ModuleList([InAnObject(6, 6)])
    model = wrap("fsdp", network, process_group=context.group)
    with pytest.raises(RuntimeError, match=r"no tensor in the SimpleNamespace that blocks\.0"):
        model(tokens(0, context.rank))
