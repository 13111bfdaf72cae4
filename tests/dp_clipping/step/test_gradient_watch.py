"""What else than private backwards changes `.grad` is noticed."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dp_clipping.criterion import PrivateCriterion
from tests.dp_clipping.conftest import private
from tests.support import zoo
from tests.support.backwards import computed_again


@pytest.mark.parametrize("way", ["freeze", "checkpoint", None, "after what is frozen"])
def test_a_backward_of_the_network_s_own_is_named(way):
    def again(x, layer):
        if way == "checkpoint":
            return checkpoint(layer, x, use_reentrant=False)
        return computed_again(x, layer)

    torch.manual_seed(0)
    network = zoo.Net(
        lambda net, x: net.last(again(net.first(x), net.middle)),
        **{name: nn.Linear(4, 4) for name in ("first", "middle", "last")},
    )
    network.middle.requires_grad_(way != "freeze")
    if way == "after what is frozen":  # autograd alone would not come to such a backward
        network.first.requires_grad_(False)
        network.first.register_forward_hook(lambda _, args, y: y.requires_grad_())
    model = private(network, "bookkeeping")
    criterion = PrivateCriterion(model, nn.CrossEntropyLoss(), "mean")
    loss = criterion(model(torch.randn(4, 4)), torch.arange(4))
    if way in ("freeze", "checkpoint"):
        loss.backward()
        assert model.first.weight.grad.abs().sum() > 0
        return
    with pytest.raises(RuntimeError, match=r"as reversible layers do.* middle\.weight, unclipped"):
        loss.backward()
