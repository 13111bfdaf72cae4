"""What else than private backwards changes `.grad` is noticed."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dp_clipping.criterion import PrivateCriterion
from tests.dp_clipping.conftest import private
from tests.support import zoo
from tests.support.backwards import computed_again


class AsksForAll(torch.autograd.Function):
    """A layer computed again in backward; gradients of its parameters are results of that."""

    @staticmethod
    def forward(ctx, x, layer, *parameters):
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            of = [x, *ctx.layer.parameters()]
            of_x, *others = torch.autograd.grad(ctx.layer(x), of, gradient)
        return of_x, None, *others


def three_layers(again):
    """Returns a network of which `again(x, layer)` runs the middle layer."""
    return zoo.Net(
        lambda net, x: net.last(again(net.first(x), net.middle)),
        **{name: nn.Linear(4, 4) for name in ("first", "middle", "last")},
    )


@pytest.mark.parametrize("way", ["freeze", "checkpoint", None, "after what is frozen"])
def test_a_backward_of_the_network_s_own_is_named(way):
    """Refuses it by name; the checkpoint that the message gives works."""

    def again(x, layer):
        if way == "checkpoint":
            return checkpoint(layer, x, use_reentrant=False)
        return computed_again(x, layer)

    torch.manual_seed(0)
    network = three_layers(again)
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
    match = r"reversible layers do: let checkpoint\(block.* middle\.weight, unclipped"
    with pytest.raises(RuntimeError, match=match):
        loss.backward()


def test_a_backward_of_the_network_s_own_that_asks_for_parameters_is_named():
    """PyTorch's own error says `allow_unused=True`, with which nothing would train them."""
    network = three_layers(lambda x, one: AsksForAll.apply(x, one, *one.parameters()))
    x = torch.randn(4, 4)
    network(x).sum().backward()
    assert network.middle.weight.grad is not None
    network.zero_grad()
    model = private(network, "bookkeeping")
    criterion = PrivateCriterion(model, nn.CrossEntropyLoss(), "mean")
    with pytest.raises(ValueError, match=r"reversible layers has it.* let checkpoint\(block, x"):
        criterion(model(x), torch.arange(4)).backward()
