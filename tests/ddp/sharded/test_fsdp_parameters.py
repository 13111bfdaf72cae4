"""Parameters of `fsdp` outside of their block's forward: what is written, read, and refused."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ddp.sharded.fsdp import HandBuiltFSDP
from ddp.sharded.internals.stand_in import StandIn
from ddp_by_hand.lm.rank_pool import Context
from tests.ddp.sharded.test_fsdp import Pair
from tests.support.on_ranks import on_ranks


class Network(nn.Module):
    """A student and a teacher, each in no block and in blocks; `write` is called in forward."""

    def __init__(self, write: Callable[["Network"], None] | None = None):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.out, self.teacher = nn.Linear(6, 2), nn.Linear(6, 2).requires_grad_(False)
        self.logit_scale = nn.Parameter(torch.tensor(0.7))
        self.blocks[2].requires_grad_(False)
        self.write = write
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if self.write is not None:
            self.write(self)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return (self.out(x) - self.teacher(x)) * self.logit_scale.exp()


@torch.no_grad()
def in_place(network: Network) -> None:
    nn.init.zeros_(network.out.bias)
    nn.init.constant_(network.blocks[0].bias, 2.0)
    network.out.weight.fill_(3)
    network.blocks[1].bias.zero_()
    network.blocks[0].weight.masked_fill_(torch.eye(6, dtype=torch.bool), 0.5)
    network.logit_scale.clamp_(0, 0.5)
    network.teacher.weight.mul_(0.5).add_(network.out.weight, alpha=0.5)
    network.teacher.bias.lerp_(network.out.bias, 0.1)
    network.blocks[1].weight[2] = 7
    network.blocks[2].weight += 1
    network.blocks[2].bias.uniform_(-1, 1)
    torch._foreach_mul_([network.blocks[1].weight, network.teacher.weight], 0.5)
    torch.mul(network.out.weight, 2, out=network.out.weight)


@torch.no_grad()
def initialised(network: Network) -> None:
    torch.manual_seed(1)
    for parameter in network.parameters():
        if parameter.dim() == 2:
            nn.init.orthogonal_(parameter)
    nn.init.kaiming_uniform_(network.out.weight)
    nn.init.trunc_normal_(network.blocks[0].weight)
    network.blocks[2].reset_parameters()
    network.blocks[1].load_state_dict(network.blocks[0].state_dict())


@torch.no_grad()
def as_a_vector(network: Network) -> None:
    vector = parameters_to_vector(network.parameters())
    vector_to_parameters(vector.mul(2).add(1), network.parameters())


def same(model: nn.Module, reference: nn.Module) -> None:
    state = model.state_dict()
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(
            state[f"module.{name}"], value, msg=lambda m, name=name: f"{name}: {m}"
        )


def step(pair: Pair, number: int) -> None:
    torch.manual_seed(number)
    xs = torch.randn(pair.world_size, 5, 6).double()
    pair.model(xs[pair.rank]).square().mean().backward()
    pair.reference(xs.flatten(0, 1)).square().mean().backward()
    pair.finish()
    pair.step()


def written(context: Context, write: Callable[[Network], None], where: str) -> None:
    torch.manual_seed(0)
    pair = Pair(context, Network(write if where == "in forward" else None))
    for number in range(3):
        step(pair, number)
        same(pair.model, pair.reference)
        if where == "whole":
            with pair.model.whole_parameters():
                for network in (pair.model.module, pair.reference):
                    torch.manual_seed(number)
                    write(network)
            same(pair.model, pair.reference)


@torch.no_grad()
def momentum(network: Network) -> None:
    for own, other in zip(network.teacher.parameters(), network.out.parameters(), strict=True):
        own.mul_(0.5).add_(other, alpha=0.5)


def momentum_through_data(network: Network) -> None:
    for own, other in zip(network.teacher.parameters(), network.out.parameters(), strict=True):
        own.data.mul_(0.5).add_(other.data, alpha=0.5)  # which nothing counts
    network.out.weight.data[1].fill_(2)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("write", "where"),
    [
        *((write, "whole") for write in (in_place, initialised, as_a_vector)),
        *((write, "in forward") for write in (momentum, momentum_through_data)),
    ],
)
def test_what_is_written_takes_effect(cpu_ranks, world_size, write, where):
    cpu_ranks.run(world_size, written, write, where)


class UnitWeights(nn.Linear):
    """Divides its weight by its norm in each forward, also where that is computed again."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.div_(self.weight.norm(dim=1, keepdim=True))
        return super().forward(x)


class WritesInBackward(nn.Linear):
    """Adds one to its bias once backward has come to it."""

    @torch.no_grad()
    def write(self, _gradient: Tensor) -> None:
        self.bias += 1

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y.register_hook(self.write)
        return y.sin()


@pytest.mark.parametrize("kind", [UnitWeights, WritesInBackward])
@on_ranks(2)
def test_what_a_backward_writes_is_kept(context: Context, kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    network = Network()
    network.blocks[1] = kind(6, 6).double()
    pair = Pair(context, network)
    for number in range(3):
        step(pair, number)
        same(pair.model, pair.reference)


@on_ranks(2)
def test_what_was_not_written_keeps_the_digits_of_the_slices(context: Context) -> None:
    torch.manual_seed(0)
    network = Network(lambda network: network.out.weight.data[0].fill_(0.5))
    model = HandBuiltFSDP(network, process_group=context.group, param_dtype=torch.bfloat16)
    before = model.state_dict()
    before["module.out.weight"][0] = 0.5
    model(torch.randn(5, 6).double()).sum().backward()
    model.finish_gradient_synchronization()
    with model.whole_parameters():
        model.module.blocks[0].weight.data.mul_(1 + 2**-12)
    before["module.blocks.0.weight"].mul_(1 + 2**-12)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def of_another(network: Network) -> None:
    network.out.weight.data = network.teacher.weight.data


def of_its_own(network: Network) -> None:
    network.out.weight.data = 2 * network.out.weight.data


def in_its_own_memory(network: Network) -> None:
    network.out.weight.data = network.out.weight.data.view(6, 2).t()


@pytest.mark.parametrize("write", [of_another, of_its_own, in_its_own_memory])
@on_ranks(2)
def test_other_memory_of_a_parameter_is_refused(
    context: Context, write: Callable[[Network], None]
) -> None:
    model = HandBuiltFSDP(Network(write), process_group=context.group)
    with pytest.raises(RuntimeError, match=r"out\.weight has got other memory .*data\.copy_"):
        model(torch.randn(5, 6).double()).sum().backward()


def inner_gradient(context: Context) -> None:
    """A forward that differentiates with regard to its input, as adversarial training does."""

    class Inner(Network):
        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                (gradient,) = torch.autograd.grad(super().forward(x).sum(), x)
            return super().forward(x.detach() + 0.1 * gradient.sign())

    torch.manual_seed(0)
    pair = Pair(context, Inner())
    for number in range(3):
        step(pair, number)


def looks(context: Context) -> None:
    """Allows what needs no values, and refuses what does, on one rank alone too."""
    torch.manual_seed(0)
    pair = Pair(context, Network())
    step(pair, 0)
    network, x = pair.model.module, torch.randn(5, 6).double()
    for p, other in zip(pair.model.parameters(), pair.reference.parameters(), strict=True):
        assert isinstance(p, StandIn)
        for of in ("shape", "dtype", "device", "requires_grad", "ndim", "is_leaf"):
            assert getattr(p, of) == getattr(other, of)
        assert p.numel() == other.numel()
        assert torch.zeros_like(p).shape == p.data.shape
        assert p.cpu() is p
        assert "divided among ranks" in f"{p!r} {p}"
    weight, one = network.out.weight, torch.zeros((), dtype=torch.float64)
    uses = [
        *(weight.norm, weight.tolist, weight.detach, weight.t, weight.zero_, weight.float),
        *(lambda: weight.data.sum(), lambda: weight[0], lambda: weight + 1, lambda: 1 - weight),
        *(lambda: torch.stack([weight]), lambda: torch.equal(weight, x), weight.storage),
        *(lambda: setattr(weight, "data", x), lambda: nn.init.zeros_(weight)),
        *(lambda: network.out(x), lambda: network.blocks[0](x), lambda: copy.deepcopy(network)),
        *(lambda: copy.deepcopy(weight), lambda: pickle.dumps(weight), network.state_dict),
        *(lambda: torch.save(weight, io.BytesIO()), lambda: one.copy_(network.logit_scale)),
        network.bfloat16,
        lambda: torch._foreach_mul_([weight], 2),
        lambda: torch.mul(x[:2], 2, out=weight),
        lambda: torch.optim.SGD(network.parameters(), lr=0.1).step(),
    ]
    for p in pair.model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    for use in uses[: None if context.rank == 0 else 3]:
        with pytest.raises(RuntimeError, match=r"fsdp has divided .*`with model\.whole_parameters"):
            use()
    with pytest.raises(RuntimeError):  # in PyTorch's words with torch 2.11
        dist.broadcast(weight, 0, context.group)
    network.double()
    pair.model.zero_grad()
    same(pair.model, pair.reference)
    step(pair, 1)


def memory(context: Context) -> None:
    """C++ that asks no class reads NaN, and cannot write."""
    model = HandBuiltFSDP(Network(), process_group=context.group)
    weight, before = model.module.out.weight, model.state_dict()
    seen = torch.Tensor._make_subclass(torch.Tensor, weight)
    assert seen.isnan().all()
    for write in (
        seen.view(-1)[:1].zero_,
        lambda: weight.untyped_storage().fill_(1),
    ):
        with pytest.raises(RuntimeError, match="Cannot access data pointer"):
            write()
    assert torch.vmap(torch.sum)(weight).isnan().all()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("body", [looks, memory, inner_gradient])
def test_uses(cpu_ranks, body):
    cpu_ranks.run(2, body)
