"""`nn.MultiheadAttention`: outputs are PyTorch's, and gradients those of one sample at a time."""

import copy

import pytest
import torch
from torch import Tensor, nn

from dp_clipping.layers.attention.module import is_plain
from tests.dp_clipping.conftest import (
    MODES,
    assert_exact,
    criterion_of,
    private,
    private_loss,
    unchecked,
)
from tests.dp_clipping.step.test_on_gpu import compare_with_oracle
from tests.support import zoo

B, L, S, E = 4, 3, 5, 8


class Attention(nn.Module):
    """Queries x[:, :L], keys and values made of x, between linear layers."""

    def __init__(self, how: str, call: dict | None = None, **options) -> None:
        super().__init__()
        options = {"batch_first": True} | options
        self.layer, self.how, self.call = nn.MultiheadAttention(E, 2, **options), how, call or {}
        self.project = nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        layer, length = self.layer, L
        x = torch.tanh(self.project(x))
        query, key, value = x[:, :L], x, x
        if self.how == "self":
            query, length = x, S
        elif self.how == "three":
            key, value = x.sin()[..., : layer.kdim], x.cos()[..., : layer.vdim]
        call = dict(self.call)
        if call.pop("padding", False):
            call["key_padding_mask"] = x[..., 0] > 0.3
        if call.pop("mask", False) is not False:
            call["attn_mask"] = torch.triu(torch.ones(length, S, dtype=torch.bool), 2)
        if "numbers" in call:
            call["attn_mask"] = torch.linspace(-1, 1, length * S).view(length, S).to(x)
            del call["numbers"]
        if not layer.batch_first:
            query, key, value = (y.transpose(0, 1) for y in (query, key, value))
            key = query if self.how == "self" else key
            value = key if self.how != "three" else value
        elif self.how != "three":
            value = key
        y, weights = layer(query, key, value, **call)
        y = y if layer.batch_first else y.transpose(0, 1)
        return y.flatten(1) if weights is None else torch.cat([y.flatten(1), weights.flatten(1)], 1)


NO = {"need_weights": False}
CASES = {
    "self": lambda: Attention("self"),
    "self, causal": lambda: Attention("self", {"mask": True, "is_causal": True} | NO),
    "self, time major": lambda: Attention("self", NO | {"padding": True}, batch_first=False),
    "memory": lambda: Attention("memory", {"numbers": True, "padding": True}),
    "memory, time major": lambda: Attention("memory", NO | {"mask": True}, batch_first=False),
    "memory, no bias": lambda: Attention("memory", NO, bias=False),
    "three": lambda: Attention("three", {"average_attn_weights": False, "padding": True}),
    "three, other widths": lambda: Attention("three", NO, kdim=6, vdim=4),
    "three, widths, no bias": lambda: Attention("three", NO, kdim=6, vdim=4, bias=False),
    "more keys": lambda: Attention(
        "memory", {"padding": True, "mask": True}, add_bias_kv=True, add_zero_attn=True
    ),
    "more keys, time major": lambda: Attention(
        "self", NO | {"padding": True}, add_bias_kv=True, batch_first=False
    ),
}


def network_and_batch(name: str, dtype: torch.dtype = torch.float64) -> tuple:
    torch.manual_seed(0)
    network = zoo.seeded(CASES[name]).to(dtype)
    x = torch.randn(B, S, E, dtype=dtype)
    with torch.no_grad():
        outputs = network(x)
    return network, (x, torch.randn_like(outputs)), outputs


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", MODES)
def test_gradients(name, mode):
    network, batch, _ = network_and_batch(name)
    assert assert_exact(network, batch, mode) == {"attention", "linear"}


@pytest.mark.parametrize("name", CASES)
def test_outputs_are_pytorchs(name):
    network, (x, _), expected = network_and_batch(name, torch.float32)
    torch.testing.assert_close(unchecked(network)(x), expected, rtol=1e-5, atol=1e-6)


def test_in_bfloat16():
    network, batch, _ = network_and_batch("memory", torch.bfloat16)
    assert_exact(network, batch, tolerance=6e-2)


def frozen() -> nn.Module:
    network = Attention("memory")
    network.layer.in_proj_weight.requires_grad_(False)
    return network


def only_out_proj() -> nn.Module:
    network = Attention("memory")
    network.layer.requires_grad_(False)
    network.layer.out_proj.weight.requires_grad_(True)
    return network


def tied() -> nn.Module:
    network = Attention("self", NO)
    network.project.weight = network.layer.out_proj.weight
    return network


def reused() -> nn.Module:
    def twice(net, x):
        y = net.layer(x, x, x, need_weights=False)[0]
        return net.layer(y, x, x, need_weights=False)[0]

    return zoo.Net(twice, layer=nn.MultiheadAttention(E, 2, batch_first=True))


def windows() -> nn.Module:
    return zoo.Net(
        lambda net, x: net.layer(*[x.unflatten(2, (2, -1)).flatten(0, 1)] * 3)[0].unflatten(
            0, x.shape[:2]
        ),
        layer=nn.MultiheadAttention(4, 2, batch_first=True, add_bias_kv=True),
    )  # fmt: skip


def one_of_each() -> nn.Module:
    return zoo.Net(
        lambda net, x: net.layer(*[x[:, :1, :1]] * 3)[0],
        layer=nn.MultiheadAttention(1, 1, batch_first=True),
    )


def beside_a_parameter() -> nn.Module:
    def run(net, x):
        x = torch.cat([net.token.expand(len(x), 1, -1), x], 1)
        return net.layer(x, x, x, need_weights=False)[0][:, 0]

    return zoo.Net(
        run, token=nn.Parameter(torch.randn(1, 1, E)),
        layer=nn.MultiheadAttention(E, 2, batch_first=True),
    )  # fmt: skip


@pytest.mark.parametrize(
    "build", [frozen, only_out_proj, tied, reused, windows, one_of_each, beside_a_parameter]
)
def test_other_networks(build):
    network = zoo.seeded(build).double()
    x = torch.randn(B, S, E, dtype=torch.float64)
    assert "attention" in assert_exact(network, (x, torch.randn_like(network(x))))


def test_what_all_samples_share_is_run_under_vmap():
    def run(net, x):
        query = torch.linspace(-1, 1, 2 * E).view(1, 2, E).to(x)
        return x.sum(1, keepdim=True) * net.layer(query, query, query)[0]

    network = zoo.Net(run, layer=nn.MultiheadAttention(E, 2, batch_first=True)).double()
    x = torch.randn(B, S, E, dtype=torch.float64)
    assert assert_exact(network, (x, torch.randn_like(network(x)))) == {"vectorized"}


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_decoder_layer(batch_first):
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerDecoderLayer(E, 2, 12, 0.0, batch_first=batch_first)

        def forward(self, x: Tensor) -> Tensor:
            x = x if batch_first else x.transpose(0, 1)
            target = x[:, :L] if batch_first else x[:L]
            y = self.layer(target, x, tgt_mask=nn.Transformer.generate_square_subsequent_mask(L))
            return y if batch_first else y.transpose(0, 1)

    network = zoo.seeded(Decoder).double()
    batch = torch.randn(B, S, E, dtype=torch.float64), torch.randn(B, L, E, dtype=torch.float64)
    assert assert_exact(network, batch) == {"attention", "linear", "layer_norm"}


def test_under_autocast_outputs_are_pytorchs():
    network, (x, y), _ = network_and_batch("memory", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = network(x)
        model = private(network)
        outputs = model(x)
        torch.testing.assert_close(outputs, expected, rtol=2e-2, atol=2e-2)
        criterion_of(model, zoo.product)(outputs, y).backward()
    assert model.per_sample_gradient_norms.isfinite().all()


def test_dropout_draws_what_pytorch_draws():
    network = zoo.Net(
        lambda net, x: net.layer(x, x, x)[0],
        layer=nn.MultiheadAttention(E, 2, dropout=0.5, batch_first=True),
    )
    x = torch.randn(B, S, E)
    model = unchecked(copy.deepcopy(network))
    model(x)
    torch.manual_seed(0)
    outputs = model(x)
    torch.manual_seed(0)
    torch.testing.assert_close(outputs, network(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
def test_one_sample_contributes_at_most_c(mode, dtype):
    torch.manual_seed(0)
    for name in ("self", "memory, no bias", "three, other widths", "more keys"):
        network = CASES[name]().to(dtype)
        x = torch.randn(1, S, E).to(dtype)
        outputs = network(x)
        model = unchecked(network, mode, max_grad_norm=0.1)
        private_loss(model, (x, torch.randn_like(outputs)), zoo.product).backward()
        squares = [p.grad.double().square().sum() for p in network.parameters()]
        found = torch.stack(squares).sum().sqrt().item() / 0.1
        assert 0.9 < found <= 1 + 1e-6, name


def test_which_modules_have_it():
    class Other(nn.MultiheadAttention):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)[0]

    assert is_plain(nn.MultiheadAttention(4, 2), nn.MultiheadAttention)
    assert not is_plain(Other(4, 2), Other)
    assert not is_plain(nn.Linear(4, 2), nn.Linear)


def check_on_kernels() -> None:
    for mode in ("flash", "flash_bookkeeping"):
        compare_with_oracle(zoo.BY_NAME["encoder_layer"], "cpu", torch.float32, mode)


def test_on_kernels_in_the_interpreter(interpreter):
    interpreter.run(check_on_kernels)
