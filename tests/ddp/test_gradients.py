"""Every variant against one process that sees the whole global batch."""

import pytest
import torch
from torch import nn

from ddp import wrap
from ddp_by_hand.lm.rank_pool import Context
from tests.support.beside import assert_same_gradients, make_optimizer, whole_values


class OddModel(nn.Module):
    """Odd shapes, a tied weight, a frozen parameter, and one larger than a small bucket."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(17, 13)
        self.norm = nn.LayerNorm(13)
        self.wide = nn.Linear(13, 131)
        self.frozen = nn.Linear(131, 131)
        self.frozen.requires_grad_(False)
        self.narrow = nn.Linear(131, 13, bias=False)
        self.head = nn.Linear(13, 17, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.norm(self.embedding(tokens))
        return self.head(self.narrow(self.frozen(torch.relu(self.wide(x)))))


def loss_of(model, tokens):
    logits = model(tokens)
    return nn.functional.cross_entropy(logits.flatten(0, -2), tokens.roll(-1, -1).flatten())


def global_batch(step: int, rows: int) -> torch.Tensor:
    return torch.randint(17, (rows, 5), generator=torch.Generator().manual_seed(step))


def train_beside_reference(context: Context, name: str, optimizer_name: str, reduce: str) -> None:
    """Several steps; after each, gradients and parameters equal the single process's."""
    rows = 3
    torch.manual_seed(context.rank)  # rank 0's values must win
    model = wrap(name, OddModel().to(context.device), reduce=reduce, process_group=context.group)
    torch.manual_seed(0)
    reference = OddModel().to(context.device)
    cls, options = {
        "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    }[optimizer_name]
    optimizer, reference_optimizer = (make_optimizer(m, cls, **options) for m in (model, reference))
    scale = context.world_size if reduce == "sum" else 1
    for step in range(4):
        batch = global_batch(step, rows * context.world_size).to(context.device)
        mine = batch[context.rank * rows : (context.rank + 1) * rows]
        loss_of(model, mine).backward()
        model.finish_gradient_synchronization()
        (loss_of(reference, batch) * scale).backward()
        compare(model, reference)
        for o in (optimizer, reference_optimizer):
            o.step()
            o.zero_grad(set_to_none=step % 2 == 0)


def compare(model: nn.Module, reference: nn.Module) -> None:
    names = [name for name, _ in model.named_parameters()]
    for name, p, q in zip(names, whole_values(model), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q.detach(), msg=lambda m, name=name: f"{name}: {m}")
    assert_same_gradients(model, reference)


@pytest.mark.parametrize(
    ("world_size", "optimizer", "reduce"),
    [(1, "sgd", "mean"), (2, "adamw", "mean"), (3, "sgd", "sum"), (4, "adamw", "mean")],
)
def test_training_equals_one_process(ranks, implementation, world_size, optimizer, reduce):
    ranks.run(world_size, train_beside_reference, implementation, optimizer, reduce)
