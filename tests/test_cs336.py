"""The adapters of docs/cs336.md do what CS336's tests ask of them."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_by_hand.lm.rank_pool import Context

PAGE = Path(__file__).parents[1] / "docs" / "cs336.md"


def adapters() -> SimpleNamespace:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names: dict = {"__name__": "adapters"}
    exec(compile(code, str(PAGE), "exec"), names)
    return SimpleNamespace(**names)


class Toy(nn.Module):
    def __init__(self, tied: bool = False):
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6)
        if tied:
            self.down.weight = self.up.weight
        self.fixed = nn.Parameter(torch.tensor([2.0, 2.0]), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.norm(self.embedding(tokens)))))


def losses(model: nn.Module, step: int, ranks: range) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 10, (4 * dist.get_world_size(), 3), generator=generator)
    mine = tokens[4 * ranks.start : 4 * ranks.stop]
    return model(mine).float().square().mean()


def stepped(
    context: Context, model: nn.Module, reference: nn.Module, optimizers: list, reduce=None, steps=3
) -> Iterator[None]:
    """Steps beside a network that sees all data; yields once gradients are there.

    With `reduce`, which is called after the backward, a rank's model sees its own data alone.
    """
    ranks = range(dist.get_world_size())
    own = ranks if reduce is None else ranks[context.rank : context.rank + 1]
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses(model, step, own).backward()
        if reduce is not None:
            reduce(model, optimizers[0])
        losses(reference, step, ranks).backward()
        yield
        for optimizer in optimizers:
            optimizer.step()


def check(model: nn.Module, reference: nn.Module) -> None:
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def ddp(context: Context) -> None:
    given = adapters()
    for tied in (False, True):
        torch.manual_seed(context.rank)
        model = given.get_ddp(Toy(tied))
        torch.manual_seed(0)
        reference = Toy(tied)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
        for _ in stepped(context, model, reference, optimizers, given.ddp_on_after_backward):
            check(model.module, reference)
        check(model.module, reference)


def fsdp(context: Context) -> None:
    given = adapters()
    for dtype, tolerance in ((None, {}), (torch.float16, {"rtol": 1e-3, "atol": 1e-3})):
        torch.manual_seed(0)
        reference = Toy()
        model = given.get_fsdp(copy.deepcopy(reference), compute_dtype=dtype)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, reference)]
        for _ in stepped(context, model, reference, optimizers, given.fsdp_on_after_backward):
            for p in model.module.parameters():
                if p.requires_grad:
                    assert (p.grad.shape, p.grad.dtype) == (p.data.shape, p.data.dtype)
                    everyone = [torch.zeros_like(p.grad) for _ in range(dist.get_world_size())]
                    dist.all_gather(everyone, p.grad)
                    assert all(torch.equal(other, p.grad) for other in everyone)
        full = given.fsdp_gather_full_params(model)
        for name, p in reference.named_parameters():
            torch.testing.assert_close(full[name], p.detach(), **tolerance)


def sharded_optimizer(context: Context) -> None:
    given = adapters()
    for tied in (False, True):
        torch.manual_seed(0)
        reference = Toy(tied)
        model = copy.deepcopy(reference)
        options = {"lr": 0.1, "weight_decay": 0.1}
        optimizers = [
            given.get_sharded_optimizer(model.parameters(), torch.optim.AdamW, **options),
            torch.optim.AdamW(reference.parameters(), **options),
        ]
        for _ in stepped(context, model, reference, optimizers, steps=4):
            pass
        check(model, reference)


@pytest.mark.parametrize("body", [ddp, fsdp, sharded_optimizer])
def test_adapters(cpu_ranks, body):
    cpu_ranks.run(cpu_ranks.size, body)
