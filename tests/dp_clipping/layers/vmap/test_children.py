"""Child layers of a module that owns bare parameters have their own arithmetic."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._dynamo import convert_frame

from ddp_by_hand.experiments.verify_correctness import reference as oracle
from tests.dp_clipping.conftest import MODES, assert_exact, assert_step, private, private_loss
from tests.support import zoo
from tests.support.turns import in_turn
from tests.support.zoo import Net


class WithoutRule(torch.autograd.Function):
    """A sine that has no rule for vmap."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, gy):
        return gy * ctx.saved_tensors[0].cos()


def bare(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def embeddings(net: Net, x: torch.Tensor) -> torch.Tensor:
    """Embeds images [B, 3, 8, 8] with a token and positions, as a Vision Transformer does."""
    patches = net.patches(x).flatten(2).transpose(1, 2)
    tokens = torch.cat([net.token.expand(len(x), -1, -1), patches], dim=1)
    return net.dropout(tokens + net.positions)


def vision() -> nn.Module:
    first = Net(
        embeddings, patches=nn.Conv2d(3, 6, 4, 4), token=bare(1, 1, 6), positions=bare(1, 5, 6),
        dropout=nn.Dropout(0.0),
    )  # fmt: skip
    rest = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    return Net(lambda net, x: net.rest(net.first(x)[:, 0]), first=first, rest=rest)


def scaled_block() -> nn.Module:
    """Builds blocks with a layer scale, one in another, as in ConvNeXt."""

    def run(net, x):
        return x + net.scale * net.mix(net.norm(net.depthwise(x).movedim(1, -1))).movedim(-1, 1)

    def block(**others):
        return Net(
            run, depthwise=nn.Conv2d(4, 4, 3, padding=1, groups=4), norm=nn.LayerNorm(4),
            scale=bare(4, 1, 1), **others,
        )  # fmt: skip

    inner = Net(
        lambda net, x: net.gate * torch.tanh(net.linear(x)), linear=nn.Linear(4, 4), gate=bare(4)
    )
    return nn.Sequential(nn.Conv2d(3, 4, 2, 2), block(mix=inner), nn.Flatten(), nn.Linear(64, 3))


def without_rule() -> nn.Module:
    child = Net(lambda net, x: WithoutRule.apply(net.linear(x)), linear=nn.Linear(192, 3))
    return Net(lambda net, x: net.child(x.flatten(1)) * net.scale, child=child, scale=bare(3))


def structured() -> nn.Module:
    """A child that takes and returns dictionaries, lists and a number."""

    def child(net, things):
        return {"y": [net.linear(things["x"][0])], "n": 2}

    def run(net, x):
        found = net.child({"x": [x.flatten(1), 3]})
        return found["n"] * found["y"][0] * net.scale

    child = Net(child, linear=nn.Linear(192, 3))
    return Net(run, child=child, scale=bare(3))


OWN = {"vectorized", "convolution", "linear", "layer_norm"}
APART = {
    vision: OWN, scaled_block: OWN, without_rule: {"vectorized", "linear"},
    structured: {"vectorized", "linear"},
}  # fmt: skip


def batch_of(build: Callable[[], nn.Module]) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return x, torch.randn_like(zoo.seeded(build)(x))


@pytest.mark.parametrize(
    ("build", "mode"), in_turn([pytest.param(b, id=b.__name__) for b in APART], MODES)
)
def test_gradients_are_those_of_one_sample_at_a_time(build, mode):
    batch = oracle.move(batch_of(build), dtype=torch.float64)
    assert assert_exact(zoo.seeded(build).double(), batch, mode) == APART[build]


@pytest.mark.parametrize("build", [vision, scaled_block], ids=lambda build: build.__name__)
def test_norms_in_16_bit_are_near_those_in_float64(build):
    batch = batch_of(build)
    wide = oracle.move(batch, dtype=torch.float64)
    exact = oracle.norms(oracle.per_sample_gradients(zoo.seeded(build).double(), wide, zoo.product))
    for dtype in (torch.float32, torch.bfloat16):
        model = private(zoo.seeded(build))
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            private_loss(model, batch, zoo.product).backward()
        rtol = 1e-4 if dtype == torch.float32 else 5e-2
        found = model.per_sample_gradient_norms
        torch.testing.assert_close(found.double(), exact, rtol=rtol, atol=0)


def test_a_network_compiled_takes_children_along():
    network = zoo.seeded(vision).double()
    network.first.compile(backend="eager")
    model = private(network)
    assert model.capture.apart == []
    batch = oracle.move(batch_of(vision), dtype=torch.float64)
    assert_step(model, zoo.seeded(vision).double(), batch)


def test_only_a_users_code_is_compiled_where_samples_run_one_after_another(monkeypatch):
    """Our own code beside a loop over samples would be compiled anew for each name and size."""
    compiled, compile_frame = set(), convert_frame._compile

    def noted(code, *args, **kwargs):
        compiled.add(code.co_filename.partition("/dp_clipping/")[2])
        return compile_frame(code, *args, **kwargs)

    def asks(net, x):
        y = net.layer(x) * net.scale
        return y if y.detach().isfinite().all() else x

    torch.compiler.reset()
    monkeypatch.setattr(convert_frame, "_compile", noted)
    network = Net(asks, layer=nn.Linear(4, 4), scale=nn.Parameter(torch.ones(4))).double()
    plain = copy.deepcopy(network)
    network.compile(backend="eager")
    model = private(network)
    x, y = (torch.randn(3, 4, dtype=torch.float64) for _ in range(2))
    assert_step(model, plain, (x, y))
    assert model.capture.handles[0].one_by_one
    assert "layers/vmap/samples.py" in compiled
    assert not any(file.startswith("trials/") for file in compiled)


def called_with(tensors: Callable) -> nn.Module:
    """A network that calls a layer with other tensors in the place of its parameters."""

    def function(net: Net, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(net.layer, tensors(net, x), (x,)).tanh()

    factors = nn.Parameter(torch.rand(4, 4) + 0.5)
    return Net(function, layer=nn.Linear(4, 4), factors=factors).double()


OTHERS = {
    "of the same": lambda net, x: {name: p * 2 for name, p in net.layer.named_parameters()},
    "of another": lambda net, x: {"weight": net.factors},
    "of both": lambda net, x: {"weight": net.layer.weight * net.factors},
    "the same": lambda net, x: dict(net.layer.named_parameters()),
}


@pytest.mark.parametrize("tensors", OTHERS)
def test_other_tensors_in_the_place_of_parameters(tensors):
    """Gradients are those of the parameters that these are computed of."""
    batch = tuple(torch.randn(2, 3, 5, 4, dtype=torch.float64))
    assert_exact(called_with(OTHERS[tensors]), batch)


def a_step(net: Net, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the weight after a step on the whole batch."""
    loss = net.layer(x).square().sum()
    (gradient,) = torch.autograd.grad(loss, net.layer.weight, create_graph=True)
    return {"weight": net.layer.weight - gradient}


def test_other_tensors_that_the_whole_batch_makes_are_refused():
    call = lambda net, x: torch.func.functional_call(net.layer, a_step(net, x), (x,))  # noqa: E731
    model = private(Net(call, layer=nn.Linear(4, 4)).double())
    with pytest.raises(ValueError, match=r"^layer \(Linear\) is called with another tensor"):
        model(torch.randn(3, 4, dtype=torch.float64))
