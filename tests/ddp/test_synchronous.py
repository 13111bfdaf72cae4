"""The version that a learner writes first, beside the one on the common base.

It knows the default process group only, so all ranks of the pool take part.
"""

import torch
from torch import nn

from ddp.synchronous import NaiveDDP, SynchronousDDP
from ddp_by_hand.lm.rank_pool import Context
from tests.support.on_ranks import on_ranks


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


@on_ranks(4)
def test_the_naive_version_equals_the_robust_one(context: Context) -> None:
    """From different initial values on, both train alike, bit for bit."""
    models = []
    for cls in (NaiveDDP, SynchronousDDP):
        torch.manual_seed(context.rank)
        models.append(cls(network()))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for step in range(3):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * step + context.rank))
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model.eval()(x).square().sum().backward()  # running statistics stay as they are
            model.finish_gradient_synchronization()
            optimizer.step()
        naive, robust = (model.module for model in models)
        for p, q in zip(naive.parameters(), robust.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
            assert torch.equal(p, q)


@on_ranks(4)
def test_only_the_robust_version_names_what_is_missing(context: Context) -> None:
    """Where they differ: one names the parameter that got no gradient."""
    outcome = {}
    for cls in (NaiveDDP, SynchronousDDP):
        model = cls(nn.ModuleDict({"used": nn.Linear(2, 1), "idle": nn.Linear(2, 1)}))
        model.module["used"](torch.ones(1, 2)).sum().backward()
        try:
            model.finish_gradient_synchronization()
        except Exception as error:
            outcome[cls] = str(error)
    assert "idle" not in outcome[NaiveDDP]
    assert "idle.weight, idle.bias got no gradient" in outcome[SynchronousDDP]
