"""The gate of `diloco`: by what two rounds have moved the parameters, beside one process.

Ranks step with gradients of their own, so that there is no gradient to compare. One process takes
the steps of all ranks, one rank after another, and the outer step behind them. All of it is in
float64: in float32 a move is small beside the rounding of what is moved.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ddp_by_hand.bench.parts import Batch
from ddp_by_hand.bench.settings import Settings, Subject
from ddp_by_hand.bench.training import build_network, wrap_network
from ddp_by_hand.lm.model import forward_loss
from ddp_by_hand.lm.runtime import Worker

EVERY, ROUNDS = 2, 2
LOCAL_LR = 0.1  # of plain SGD
OUTER = {"outer_lr": 0.7, "outer_momentum": 0.9}

BatchOf = Callable[[int, int], Batch]
"""`batch(step, rank)`: on this rank's device."""


def moves(settings: Settings, worker: Worker, subject: Subject, batch: BatchOf) -> list[Tensor]:
    """Returns by what the rounds have moved each parameter of the wrapped network."""
    network = build_network(settings, worker.device, "float32").double()
    begin = [p.detach().to("cpu", copy=True) for p in network.parameters()]
    sizes = {"bucket_size_mb": settings.bucket_size_mb, "every": EVERY, **OUTER}
    model = wrap_network(subject.implementation, network, sizes)
    optimizer = model.make_optimizer(torch.optim.SGD, lr=LOCAL_LR)
    for step in range(ROUNDS * EVERY):
        forward_loss(model, batch(step, worker.rank)).backward()
        model.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().cpu() - start for p, start in zip(network.parameters(), begin, strict=True)]


def expected_moves(network: nn.Module, ranks: int, batch: BatchOf) -> list[Tensor]:
    """Returns by what one process moves the parameters of a float64 network, with plain code."""
    parameters = list(network.parameters())
    start = [nn.Parameter(p.detach().clone()) for p in parameters]
    begin = [p.detach().to("cpu", copy=True) for p in parameters]
    outer = torch.optim.SGD(
        start, lr=OUTER["outer_lr"], momentum=OUTER["outer_momentum"], nesterov=True
    )
    for round_ in range(ROUNDS):
        ends = [torch.zeros_like(p) for p in parameters]
        for rank in range(ranks):
            with torch.no_grad():
                for p, value in zip(parameters, start, strict=True):
                    p.copy_(value)
            local = torch.optim.SGD(parameters, lr=LOCAL_LR)
            for step in range(round_ * EVERY, (round_ + 1) * EVERY):
                forward_loss(network, batch(step, rank)).backward()
                local.step()
                local.zero_grad()
            for end, p in zip(ends, parameters, strict=True):
                end.add_(p.detach(), alpha=1 / ranks)
        for p, end in zip(start, ends, strict=True):
            p.grad = p.detach() - end
        outer.step()
    return [p.detach().cpu() - first for p, first in zip(start, begin, strict=True)]
