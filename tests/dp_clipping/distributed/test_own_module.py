"""`wrap_model=False` on sharded networks and replicas: the user's own module is trained."""

from functools import partial
from inspect import signature

import pytest
import torch
from torch import Tensor

from ddp_by_hand.lm.rank_pool import Context
from tests.support import zoo
from tests.support.ranks import LAYOUTS
from tests.support.replicas import build, train
from tests.support.sharded_steps import whole


def own_module(context: Context, name: str, path: str) -> list[Tensor]:
    """Parameters after three steps of the network itself, copied, saved and loaded in between."""
    case = zoo.BY_NAME["transformer"]
    plain = list(case.build().state_dict())
    runs = [
        build(
            context,
            shard=partial(LAYOUTS[name].place, context),
            name="transformer",
            wrap_model=wraps,
        )
        for wraps in (False, True)
    ]
    own, wrapped = runs
    network = own.model
    assert type(network) is not type(wrapped.model)
    assert isinstance(network, type(case.build()))
    assert list(network.state_dict()) == list(wrapped.model.state_dict()) == plain
    assert signature(network.forward) == signature(case.build().forward)
    train(own, 1)
    state = {name: x.clone() for name, x in network.state_dict().items()}
    own.engine.save_checkpoint(
        path=path, module=network, optimizer=own.optimizer, data_loader=own.loader
    )
    train(own, 2)
    wrapped.model.load_state_dict(state)  # keys are the same both ways
    network.load_state_dict(wrapped.model.state_dict())
    own.engine.load_checkpoint(
        path=path, module=network, optimizer=own.optimizer, data_loader=own.loader
    )
    network.eval()
    with torch.no_grad():  # plain calls while it does not train, on every rank
        outputs = network(*case.batch(2)[:-1])
    assert outputs.isfinite().all()
    network.train()
    train(own, 2)
    return [whole(p).detach().clone() for p in network.parameters()]


@pytest.mark.parametrize("name", ["fsdp2 block", "fsdp2 root", "tensor"])
def test_the_module_itself_comes_back(cpu_ranks, name, tmp_path):
    alone = build(name="transformer")
    train(alone, 3)
    for found in cpu_ranks.run(2, own_module, name, str(tmp_path / "checkpoint")):
        for one, other in zip(found, alone.model.network.parameters(), strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=0, atol=2e-5)
