"""Parameters of `fsdp` outside of their block's forward: what is written, read, and refused."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ddp.sharded.fsdp import HandBuiltFSDP
from ddp.sharded.internals.divided import Divided
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

    def head(self, x: Tensor) -> Tensor:
        return self.out(self.blocks[0](x))


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


def through_data(network: Network) -> None:
    network.logit_scale.data.clamp_(0, 0.5)
    network.teacher.weight.data = 0.5 * network.teacher.weight.data + network.out.weight.data
    network.blocks[0].weight.data = F.normalize(network.blocks[0].weight.data, dim=1)
    network.blocks[1].weight.data.copy_(torch.ones(6, 6).double())
    network.blocks[1].bias.detach().zero_()
    network.out.weight.data[1].fill_(2)
    network.out.weight.data.t()[:, :1].view(-1).mul_(3)
    network.blocks[2].weight.data.view(-1)[3:5] = 9
    for part in network.blocks[2].bias.data.chunk(2):
        part.sub_(1)
    network.out.bias.data = torch.ones(2).double()


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


WRITES = [in_place, through_data, initialised, as_a_vector]


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
        if where == "outside":
            for network in (pair.model.module, pair.reference):
                torch.manual_seed(number)
                write(network)
            same(pair.model, pair.reference)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_written_outside_of_a_forward_takes_effect(cpu_ranks, world_size, write):
    cpu_ranks.run(world_size, written, write, "outside")


@torch.no_grad()
def momentum(network: Network) -> None:
    for own, other in zip(network.teacher.parameters(), network.out.parameters(), strict=True):
        own.mul_(0.5).add_(other, alpha=0.5)
    network.blocks[2].weight.data.mul_(0.9).add_(network.blocks[0].weight.data)  # not gathered yet


def momentum_through_data(network: Network) -> None:
    for own, other in zip(network.teacher.parameters(), network.out.parameters(), strict=True):
        own.data = 0.5 * own.data + 0.5 * other.data
    network.teacher.weight.data.mul_(0.9)  # which nothing counts
    network.blocks[2].bias.data = torch.ones(6).double()


def exchange(network: Network) -> None:
    """A parameter that is trained and one that is not."""
    own, other = network.out.weight, network.teacher.weight
    own.data, other.data = other.data.clone(), own.data.clone()


@pytest.mark.parametrize("write", [momentum, momentum_through_data, through_data, exchange])
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_a_forward_writes_is_kept(cpu_ranks, world_size, write):
    cpu_ranks.run(world_size, written, write, "in forward")


def written_ahead(context: Context) -> None:
    """Behind a step, which has started to gather what the next forward needs."""
    torch.manual_seed(0)
    pair = Pair(context, Network())
    step(pair, 0)
    pair.optimizer.step()  # without gradients
    for network in (pair.model.module, pair.reference):
        network.out.weight.data.mul_(3)
    step(pair, 1)


class UnitWeights(nn.Linear):
    """Divides its weight by its norm in each forward, also where that is computed again."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.div_(self.weight.norm(dim=1, keepdim=True))
        return super().forward(x)


def unit_weights(context: Context) -> None:
    backward_writes(context, UnitWeights)


class WritesInBackward(nn.Linear):
    """Adds one to its bias once backward has come to it."""

    @torch.no_grad()
    def write(self, _gradient: Tensor) -> None:
        self.bias += 1

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y.register_hook(self.write)
        return y.sin()


class Exchanges(nn.Linear):
    """Its two weights change places in each forward."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs)
        self.other = nn.Parameter(torch.randn(inputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data, self.other.data = self.other.data.t().clone(), self.weight.data.clone()
        return super().forward(x) @ self.other


class ReplacesInBackward(WritesInBackward):
    """Gives its bias other `.data` once backward has come to it."""

    def write(self, _gradient: Tensor) -> None:
        self.bias.data = self.bias.data + 1


def backward_writes(context: Context, kind: type[nn.Module] = WritesInBackward) -> None:
    torch.manual_seed(0)
    network = Network()
    network.blocks[1] = kind(6, 6).double()
    pair = Pair(context, network)
    for number in range(3):
        step(pair, number)
        same(pair.model, pair.reference)


def replaces_in_backward(context: Context) -> None:
    backward_writes(context, ReplacesInBackward)


def exchanges_in_a_block(context: Context) -> None:
    backward_writes(context, Exchanges)


def narrow(context: Context) -> None:
    """With `param_dtype` what was not written keeps the digits of the slices."""
    torch.manual_seed(0)
    network = Network(lambda network: network.blocks[1].weight.data[0].fill_(0.5))
    model = HandBuiltFSDP(network, process_group=context.group, param_dtype=torch.bfloat16)
    before = model.state_dict()
    before["module.blocks.1.weight"][0] = 0.5
    model(torch.randn(5, 6).double()).sum().backward()
    model.finish_gradient_synchronization()
    model.module.blocks[0].weight.data.mul_(1 + 2**-12)
    before["module.blocks.0.weight"].mul_(1 + 2**-12)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def of_another(network: Network) -> None:
    network.teacher.weight.data = network.out.weight.data


def of_a_stand_in(network: Network) -> None:
    network.out.weight.data = network.blocks[0].weight.data[:2]


def in_its_own_memory(network: Network) -> None:
    network.out.weight.data = network.out.weight.data.view(6, 2).t()


@pytest.mark.parametrize("write", [of_another, of_a_stand_in, in_its_own_memory])
@on_ranks(2)
def test_memory_that_is_freed_is_no_data_of_a_parameter(
    context: Context, write: Callable[[Network], None]
) -> None:
    model = HandBuiltFSDP(Network(write), process_group=context.group)
    with pytest.raises(RuntimeError, match=r"weight got .*: give it a copy, value\.clone\(\)"):
        model(torch.randn(5, 6).double())


@pytest.mark.parametrize(
    "body",
    [unit_weights, backward_writes, replaces_in_backward, exchanges_in_a_block, narrow,
     written_ahead],
)  # fmt: skip
def test_writes_of_blocks(cpu_ranks, body):
    cpu_ranks.run(2, body)


def penalty(network: nn.Module, out: Tensor) -> Tensor:
    return out.square().mean() + 0.1 * sum(p.square().sum() for p in network.parameters())


def of_the_out_layer(network: nn.Module, out: Tensor) -> Tensor:
    module = getattr(network, "module", network)
    views = module.blocks[1].weight.t()[1:, :2].sum() + module.out.weight.detach().sum()
    return out.square().mean() + views + module.out(torch.ones(6).double()).sum()


def losses(context: Context, loss: Callable[[nn.Module, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    pair = Pair(context, Network())
    xs = torch.randn(context.world_size, 5, 6).double()
    for _ in range(2):
        loss(pair.model, pair.model(xs[context.rank])).backward()
        loss(pair.reference, pair.reference(xs.flatten(0, 1))).backward()
        pair.finish()
        pair.step()


@pytest.mark.parametrize("loss", [penalty, of_the_out_layer])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loss_of_weights(cpu_ranks, world_size, loss):
    cpu_ranks.run(world_size, losses, loss)


def by_a_method(context: Context) -> None:
    """Parts of the network are called by themselves, in training and not."""
    torch.manual_seed(0)
    pair = Pair(context, Network(), find_unused_parameters=True)
    xs = torch.randn(2, 5, 6).double()
    for number in range(3):
        with torch.no_grad():
            for part in ("blocks.0", "teacher"):
                torch.testing.assert_close(
                    pair.model.module.get_submodule(part)(xs[0]),
                    pair.reference.get_submodule(part)(xs[0]),
                )
        with torch.inference_mode():
            torch.testing.assert_close(pair.model(xs[0]), pair.reference(xs[0]))
        pair.model.module.head(xs[context.rank]).square().mean().backward()
        pair.reference.head(xs.flatten(0, 1)).square().mean().backward()
        pair.finish()
        pair.step()
        step(pair, number)


def looks(context: Context) -> None:
    torch.manual_seed(0)
    pair = Pair(context, Network())
    step(pair, 0)
    for p, other in zip(pair.model.parameters(), pair.reference.parameters(), strict=True):
        assert isinstance(p, Divided)
        assert (p.shape, p.dtype, p.requires_grad) == (
            other.shape,
            other.dtype,
            other.requires_grad,
        )
        torch.testing.assert_close(p.norm().item(), other.norm().item())
        torch.testing.assert_close(p.detach().cpu().numpy(), other.detach().numpy())
        torch.testing.assert_close(p.flatten().tolist(), other.flatten().tolist())
        torch.testing.assert_close(torch.zeros_like(other).copy_(p.data), other.detach())
        assert "divided among ranks" in repr(p)
    copies = [copy.deepcopy(pair.model.module)]
    assert torch.equal(pickle.loads(pickle.dumps(p)), p)
    file = io.BytesIO()
    torch.save(pair.model.module.state_dict(), file)
    copies.append(Network())
    copies[-1].load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    for other in copies:
        assert not any(isinstance(p, Divided) for p in other.parameters())
        torch.testing.assert_close(
            dict(other.named_parameters()), dict(pair.reference.named_parameters())
        )
    step(pair, 1)


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


@pytest.mark.parametrize("body", [by_a_method, looks, inner_gradient])
def test_uses(cpu_ranks, body):
    cpu_ranks.run(2, body)


def refused(context: Context) -> None:
    torch.manual_seed(0)
    model = HandBuiltFSDP(Network(), process_group=context.group)
    network, before = model.module, model.state_dict()
    weight, bias = network.blocks[0].weight, network.out.bias
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        weight.zero_()
    with pytest.raises(RuntimeError, match=r"teacher\.weight\.resize_.* other memory"):
        network.teacher.weight.resize_(7)
    for value in (torch.zeros(3, 6), torch.zeros(6, 6, dtype=torch.float16)):
        with pytest.raises(RuntimeError, match="which fsdp has divided"):
            weight.data = value
    with pytest.raises(RuntimeError, match="build a new network"):
        model.bfloat16()
    model.double()
    inside = pytest.raises(RuntimeError, match=r"weight\.zero_.* inside of whole_parameters")
    with model.whole_parameters(), inside:
        weight.data.zero_()
    network.blocks[1].weight.register_hook(lambda _gradient: bias.norm())
    with pytest.raises(RuntimeError, match=r"out\.bias\.norm\(\) in a backward"):
        model(torch.randn(5, 6).double()).sum().backward()
    loss = model(torch.randn(5, 6).double()).square().mean()
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(loss, [weight], create_graph=True)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def views(context: Context) -> None:
    """What would be another's memory, or what `.data` was before, is no stand-in's."""
    torch.manual_seed(0)
    model = HandBuiltFSDP(Network(), process_group=context.group)
    network = model.module
    weight, scale = network.out.weight, network.logit_scale
    before = weight.data
    weight.data = torch.zeros(2, 6).double()
    with pytest.raises(RuntimeError, match=r"a view of what out\.weight was"):
        scale.data = before.sum()
    with pytest.raises(ValueError, match="read-only"):
        weight.detach().numpy()[:] = 1
    with pytest.raises(RuntimeError, match="would give its memory to others"):
        torch.from_dlpack(weight.detach())
    assert scale.cpu() is scale
    assert not weight.isnan().any()


def differs(context: Context) -> None:
    """Ranks write other values, or one of them alone writes or reads."""
    torch.manual_seed(0)
    model = HandBuiltFSDP(Network(), process_group=context.group)
    before = model.state_dict()
    weight, x = model.module.out.weight, torch.randn(5, 6).double()
    for value in (torch.full((2, 6), context.rank + 0.5), context.rank + 0.5):
        with pytest.raises(RuntimeError, match=r"out\.weight\.\w+_\(.* on rank 1"):
            (weight.data.copy_ if isinstance(value, Tensor) else weight.data.mul_)(value)
    for alone in (lambda: weight.norm(), lambda: weight.data.zero_()):
        with pytest.raises(RuntimeError, match=r"out\.weight\..* on rank 0, a forward") as error:
            alone() if context.rank == 0 else model(x)
        assert context.rank or "`with model.whole_parameters():`" in error.value.__notes__[0]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def wrapper_is_deleted(context: Context) -> None:
    network = Network()
    HandBuiltFSDP(network, process_group=context.group)
    with pytest.raises(RuntimeError, match=r"out\.weight has no values, because the wrapper"):
        network.out.weight.norm()


def memory(context: Context) -> None:
    """What C++ would read or write without telling: one process would give the memory away."""
    torch.manual_seed(0)
    pair = Pair(context, Network())
    network, group = pair.model.module, context.group
    weight, scale, bias = network.out.weight, network.logit_scale, network.teacher.bias.data
    x = torch.randn(5, 6).double()
    one = torch.zeros((), dtype=torch.float64)

    def of_network(network: nn.Module) -> dict[str, Tensor]:
        parameters = {name: p.detach() for name, p in network.named_parameters()}
        return torch.func.grad(lambda p: torch.func.functional_call(network, p, x).square().sum())(
            parameters
        )

    in_transform = r"weight in the arguments of a function of torch\.func.*whole_parameters"
    in_collective = r"in a function of torch\.distributed.*whole_parameters"
    for match, call in (
        (in_transform, lambda: torch.vmap(torch.sum)(weight)),
        (in_transform, lambda: torch.vmap(lambda p: p["w"], ({"w": 1},))({"w": weight.t()})),
        (in_transform, lambda: torch.vmap(Tensor.zero_)(weight.data)),
        (in_transform, lambda: torch.func.grad(torch.sum)(weight)),
        (in_transform, lambda: torch.func.jvp(torch.sum, (weight,), (x[:2],))),
        (in_transform, lambda: torch.func.jacrev(torch.sum)(weight)),
        ("arguments of a function of torch.func", lambda: torch.func.hessian(torch.exp)(scale)),
        ("arguments of a function of torch.func", lambda: of_network(network)),
        (
            "forward of a network that fsdp has divided, inside of a transform",
            lambda: torch.func.grad(lambda x: pair.model(x).sum())(x),
        ),
        (in_collective, lambda: dist.broadcast(scale.data, 0, group)),
        (in_collective, lambda: dist.all_reduce(bias, group=group)),
        (in_collective, lambda: dist.all_gather([one, one], scale.data, group=group)),
        ("Cannot access data pointer", lambda: scale.untyped_storage().fill_(1)),
        ("would give its memory", lambda: weight.storage()),
        ("would give its memory", lambda: weight.as_strided((2, 3), (3, 2))),
        ("would give its memory", lambda: weight.data.as_subclass(Tensor)),
    ):
        with pytest.raises(RuntimeError, match=match):
            call()
    seen = torch.Tensor._make_subclass(torch.Tensor, scale.data)  # as C++ sees it
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        seen.zero_()
    assert weight.data_ptr() == 0
    same(pair.model, pair.reference)
    torch.testing.assert_close(torch.vmap(torch.sum)(weight.clone()), weight.sum(1))
    whole, y = weight.detach().clone(), torch.randn(3, weight.shape[1]).double()
    for transform in (torch.vmap, lambda f: torch.func.grad(lambda y: f(y.T).square().sum())):
        found, expected = transform(lambda y: weight @ y)(y), transform(lambda y: whole @ y)(y)
        torch.testing.assert_close(found, expected)
    with pair.model.whole_parameters():
        torch.testing.assert_close(of_network(network), of_network(pair.reference))
        dist.broadcast(network.logit_scale.data, 0, group)
    step(pair, 0)


def exchanged(context: Context) -> None:
    torch.manual_seed(0)
    model = HandBuiltFSDP(Network(), process_group=context.group)
    weight = model.module.teacher.weight
    torch.utils.swap_tensors(weight, nn.Parameter(torch.ones(2, 6).double(), requires_grad=False))
    with pytest.raises(RuntimeError, match=r"teacher\.weight was exchanged for another tensor"):
        model(torch.randn(5, 6).double())


def gradients_of_views(context: Context) -> None:
    """Gradients with respect to a view, or to what was detached, are those of one process."""
    torch.manual_seed(0)
    pair = Pair(context, Network())

    def found(network: Network) -> list[Tensor]:
        weight, scale = network.out.weight, network.logit_scale
        view, leaf = weight.t()[1:], weight.detach().requires_grad_()
        view.retain_grad()
        hooked: list[Tensor] = []
        view.register_hook(hooked.append)
        ((view**2).sum() + (leaf.view(-1) ** 3).sum()).backward(inputs=[leaf, view])
        other = torch.zeros(()).double().copy_(scale.detach())
        functional = torch.autograd.functional
        return [
            view.grad,
            leaf.grad,
            *hooked,
            functional.jacobian(lambda w: (w**2).sum(1), weight),
            functional.hessian(lambda x: x**3, scale),
            functional.jvp(lambda w: (w**3).sum(), weight, torch.ones(2, 6).double())[1],
            other.mul_(2),  # of its own memory
            scale.detach(),
        ]

    for own, expected in zip(found(pair.model.module), found(pair.reference), strict=True):
        torch.testing.assert_close(own, expected)
    pair.model.zero_grad()
    pair.reference.zero_grad()
    step(pair, 0)


@pytest.mark.parametrize(
    "body", [refused, views, differs, wrapper_is_deleted, memory, exchanged, gradients_of_views]
)
def test_refusals(cpu_ranks, body):
    cpu_ranks.run(2, body)
