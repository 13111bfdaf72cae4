"""`fsdp`: values, memory, and what is on the wire when."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp.sharded.fsdp import HandBuiltFSDP
from lm.rank_pool import Context


class Network(nn.Module):
    """An embedding, blocks of odd sizes with a norm, and a head, tied or not."""

    def __init__(self, width: int = 6, depth: int = 3, tied: bool = False, checkpointed=False):
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 7), nn.Tanh(), nn.Linear(7, width), nn.LayerNorm(width))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.checkpointed = checkpointed

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x))
        return self.head(x)


def tokens(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 11, (4, 5), generator=generator)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    logits = model(tokens(step, rank)).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens(step + 50, rank).flatten())


class Pair:
    """The wrapped network, and its reference on the data of all ranks."""

    def __init__(self, context: Context, network: nn.Module, **options):
        self.rank, self.world_size = context.rank, context.world_size
        self.reference = copy.deepcopy(network)
        self.model = HandBuiltFSDP(network, process_group=context.group, **options)
        self.scale = 1 if self.model.reduce == "sum" else 1 / self.world_size
        self.optimizer = self.model.make_optimizer(torch.optim.AdamW, lr=0.1)
        trained = [p for p in self.reference.parameters() if p.requires_grad]
        self.other = torch.optim.AdamW(trained, lr=0.1)

    def backward(self, step: int) -> None:
        loss_of(self.model, step, self.rank).backward()
        self.reference_backward(step)

    def reference_backward(self, step: int) -> None:
        for rank in range(self.world_size):
            (self.scale * loss_of(self.reference, step, rank)).backward()

    def finish(self, **tolerance: float) -> None:
        self.model.finish_gradient_synchronization()
        whole = self.model.whole_gradients()
        for (name, p), gradient in zip(self.reference.named_parameters(), whole, strict=True):
            assert (p.grad is None) == (gradient is None), name
            if p.grad is not None:
                torch.testing.assert_close(
                    gradient, p.grad, msg=lambda m, n=name: f"{n}: {m}", **tolerance
                )

    def step(self, **tolerance: float) -> None:
        self.optimizer.step()
        self.other.step()
        self.optimizer.zero_grad()
        self.other.zero_grad()
        state = self.model.state_dict()
        for name, value in self.reference.state_dict().items():
            torch.testing.assert_close(state[f"module.{name}"], value, **tolerance)


def trains(context: Context, make: Callable[[], nn.Module], **options) -> None:
    torch.manual_seed(context.rank)  # rank 0's values go to all
    network = make()
    torch.manual_seed(0)
    pair = Pair(context, network, **options)
    pair.reference.load_state_dict(make().state_dict())
    for step in range(3):
        pair.backward(step)
        pair.finish()
        pair.step()


def tied() -> nn.Module:
    return Network(tied=True)


def checkpointed() -> nn.Module:
    return Network(checkpointed=True)


@pytest.mark.parametrize("make", [Network, tied, checkpointed])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_it_trains_as_one_process_on_all_data(cpu_ranks, make, world_size):
    cpu_ranks.run(world_size, trains, make)
