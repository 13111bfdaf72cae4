"""Layers that are right without arithmetic of their own, and those that are refused by name."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.data import DataLoader, TensorDataset

from dp_clipping import PrivacyEngine
from dp_clipping.capture.layer_kinds import kind_of
from dp_clipping.verification import reference as oracle
from dp_clipping.verification.report import gradient_errors
from tests.dp_clipping.conftest import private, private_loss
from tests.support import zoo

SAMPLES = 6


class Through(nn.Module):
    """A layer, called by a function, between an input and three logits."""

    def __init__(self, layer: nn.Module, width: int, call: Callable | None = None):
        super().__init__()
        self.layer, self.head, self.call = layer, nn.Linear(width, 3), call

    def forward(self, *inputs: Tensor) -> Tensor:
        y = self.call(self.layer, *inputs) if self.call else self.layer(*inputs)
        return self.head(y if y.dim() == 2 else y.flatten(1, -2).mean(1))


def dora() -> nn.Module:
    peft = pytest.importorskip("peft")
    network = nn.Sequential(nn.Linear(4, 5), nn.Tanh())
    network = peft.get_peft_model(
        network, peft.LoraConfig(r=2, target_modules=["0"], use_dora=True)
    )
    for name, parameter in network.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return network


def adaptive() -> nn.Module:
    return nn.AdaptiveLogSoftmaxWithLoss(4, 10, [3, 6])  # the last projection has width 0


def rows(*shape: int) -> Tensor:
    return torch.randn(SAMPLES, *shape)


def ids() -> Tensor:
    return torch.randint(0, 9, (SAMPLES, 7))


class Masked(nn.Module):
    """Attention with a mask that is trained."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.bias = nn.Parameter(torch.randn(7, 7))

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, attn_mask=self.bias, need_weights=False)[0]


def one_weight_in_two_layers() -> nn.LSTM:
    lstm = nn.LSTM(4, 4, num_layers=2, batch_first=True)
    lstm.weight_hh_l1 = lstm.weight_hh_l0
    return lstm


def one_weight_of_two_projections() -> nn.MultiheadAttention:
    attention = nn.MultiheadAttention(4, 2, batch_first=True, vdim=3)
    attention.k_proj_weight = attention.out_proj.weight = attention.q_proj_weight
    return attention


def repeated(layer: nn.Module, x: Tensor) -> Tensor:
    return x + layer(torch.arange(7)[None]).repeat(len(x), 1, 1)


def products(weights: nn.ParameterList, x: Tensor) -> Tensor:
    return sum((x @ weight).tanh() for weight in weights)


def to_itself(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x, x.flip(1))


def time_first(layer: nn.Module, x: Tensor) -> Tensor:
    x = x.transpose(0, 1)
    return layer(x, x.flip(0)).transpose(0, 1)


RIGHT = {
    "rows that all share, repeated": lambda: (
        Through(nn.Embedding(9, 5), 5, repeated),
        rows(7, 5),
    ),
    "two names in an LSTM": lambda: (
        Through(one_weight_in_two_layers(), 4, lambda lstm, x: lstm(x)[0]),
        rows(7, 4),
    ),
    "two names in attention": lambda: (
        Through(one_weight_of_two_projections(), 4, lambda a, x: a(x, x, x[..., :3])[0]),
        rows(7, 4),
    ),
    "a mask that is trained": lambda: (Through(Masked(), 4), rows(7, 4)),
    "weight_norm without bias": lambda: (
        Through(parametrizations.weight_norm(nn.Linear(4, 5, bias=False)), 5),
        rows(4),
    ),
    "weight_norm of an embedding": lambda: (
        Through(parametrizations.weight_norm(nn.Embedding(9, 5)), 5),
        ids(),
    ),
    "DoRA": lambda: (Through(dora(), 5), rows(4)),
    "width 0": lambda: (Through(adaptive(), 10, lambda layer, x: layer.log_prob(x)), rows(4)),
    "EmbeddingBag": lambda: (Through(nn.EmbeddingBag(9, 5, mode="max"), 5), ids()),
    "Bilinear": lambda: (Through(nn.Bilinear(4, 4, 5), 5, lambda b, x: b(x, x.flip(1))), rows(4)),
    "GRUCell": lambda: (
        Through(nn.GRUCell(4, 5), 5, lambda c, x: c(x[:, 1], c(x[:, 0]))),
        rows(2, 4),
    ),
    "PReLU": lambda: (Through(nn.PReLU(4), 5), rows(4, 5)),
    "ParameterList": lambda: (
        Through(nn.ParameterList(torch.randn(4, 5) for _ in range(3)), 5, products),
        rows(7, 4),
    ),
    "orthogonal": lambda: (Through(parametrizations.orthogonal(nn.Linear(4, 5)), 5), rows(7, 4)),
    "orthogonal by reflections": lambda: (
        Through(parametrizations.orthogonal(nn.Linear(4, 5), orthogonal_map="householder"), 5),
        rows(7, 4),
    ),
    "Transformer": lambda: (
        Through(nn.Transformer(4, 2, 1, 1, 8, 0.0, batch_first=True), 4, to_itself),
        rows(7, 4),
    ),
    "Transformer, time first": lambda: (
        Through(nn.Transformer(4, 2, 1, 1, 8, 0.0), 4, time_first),
        rows(7, 4),
    ),
    "Fold": lambda: (
        Through(nn.Sequential(nn.Unfold(2), nn.Conv1d(12, 12, 1), nn.Fold((5, 5), 2)), 5),
        rows(3, 5, 5),
    ),
    "LocalResponseNorm": lambda: (
        Through(nn.Sequential(nn.Conv2d(3, 4, 2), nn.LocalResponseNorm(2)), 4),
        rows(3, 5, 5),
    ),
    "Upsample": lambda: (
        Through(nn.Sequential(nn.Conv2d(3, 4, 2), nn.Upsample(scale_factor=2)), 8),
        rows(3, 5, 5),
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_layers_that_are_right(name):
    torch.manual_seed(0)
    network, x = RIGHT[name]()
    batch = (x, torch.randn(SAMPLES, 3))
    model = private(copy.deepcopy(network))
    private_loss(model, batch, zoo.product).backward()
    gradients = oracle.per_sample_gradients(network, batch, zoo.product)
    expected = oracle.norms(gradients).double()
    assert torch.allclose(model.per_sample_gradient_norms.double(), expected, rtol=1e-5)


def old_weight_norm() -> nn.Module:
    return nn.utils.weight_norm(nn.Linear(4, 4))


def with_pruning() -> nn.Module:
    return prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5)


def with_spectral_norm() -> nn.Module:
    return parametrizations.spectral_norm(nn.Linear(4, 4))


def complex_linear() -> nn.Module:
    return nn.Linear(4, 4, dtype=torch.complex64)


REFUSED = {
    "LSTMCell": (
        lambda: parametrizations.weight_norm(nn.LSTMCell(4, 4), "weight_ih"),
        r"0 \(ParametrizedLSTMCell\).*something else than nn.LSTMCell",
    ),
    "complex": (complex_linear, "complex parameters.*torch.complex"),
    "lazy": (lambda: nn.LazyLinear(4), "without a shape.*run the network once"),
    "weight_norm": (old_weight_norm, "parametrizations.weight_norm"),
    "pruned": (with_pruning, "prune.remove"),
    "spectral_norm": (with_spectral_norm, r"remove_parametrizations\(layer, \"weight\"\)"),
    "spectral_norm by a hook": (
        lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
        r"remove_spectral_norm\(layer\)",
    ),
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm(4), "use nn.GroupNorm"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_are_refused(name):
    make, message = REFUSED[name]
    network = nn.Sequential(make(), nn.Linear(4, 3))
    assert not PrivacyEngine.is_compatible(module=network)
    with pytest.raises(ValueError, match=message):
        PrivacyEngine.validate(module=network)


def test_a_frozen_one_is_not():
    network = nn.Sequential(*(make() for make, _ in (REFUSED["LSTMCell"], REFUSED["complex"])))
    network.requires_grad_(False)
    assert PrivacyEngine.is_compatible(module=nn.Sequential(network, nn.Linear(4, 3)))


class Late(nn.Module):
    """Reads a layer's weight, and calls the layer only once `calls` is set."""

    def __init__(self, bias: bool):
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 4, bias)
        self.calls = False

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(self.embedding(x), self.head.weight)
        return (self.head(y) if self.calls else y).mean(1)


def test_a_layer_whose_weight_is_read_before_it_is_first_called():
    """The step that finds it out begins anew: nothing of what was prepared for it stays."""
    torch.manual_seed(0)
    network, batch = Late(bias=False), (ids(), torch.randn(SAMPLES, 4))
    model = private(copy.deepcopy(network), "per_sample")
    for calls in (False, True):
        network.calls = model.network.calls = calls
        model.clear_gradients()
        private_loss(model, batch, zoo.product).backward()
        expected = oracle.norms(oracle.per_sample_gradients(network, batch, zoo.product)).double()
        assert torch.allclose(model.per_sample_gradient_norms.double(), expected, rtol=1e-5)


def test_a_bias_that_such_a_call_is_the_first_to_use_is_named():
    batch = ids(), torch.randn(SAMPLES, 4)
    model = private(Late(bias=True), "per_sample")
    private_loss(model, batch, zoo.product).backward()
    model.network.calls = True
    model.clear_gradients()
    with pytest.raises(RuntimeError, match=r"head\.bias: used outside of the module"):
        private_loss(model, batch, zoo.product).backward()


class Dropped(nn.Module):
    """Weights that a hook computes of a parameter."""

    def __init__(self, layer: nn.Module, name: str):
        super().__init__()
        self.layer, weight = layer, getattr(layer, name)
        delattr(layer, name)
        self.raw = nn.Parameter(weight.detach().clone())
        setattr(layer, name, self.raw * 1)
        layer.register_forward_pre_hook(lambda layer, _: setattr(layer, name, self.raw * 0.9))

    def forward(self, x: Tensor) -> Tensor:
        inputs = (x, x, x) if isinstance(self.layer, nn.MultiheadAttention) else (x,)
        return self.layer(*inputs)[0]


def test_a_weight_that_a_hook_computes_is_not_the_layer_s_own():
    lstm = Dropped(nn.LSTM(4, 4, batch_first=True), "weight_hh_l0")
    with pytest.raises(ValueError, match=r"something else than nn\.LSTM"):
        PrivacyEngine.validate(module=lstm)
    attention = Dropped(nn.MultiheadAttention(4, 2, batch_first=True), "in_proj_weight")
    assert kind_of(attention.layer) != "attention"


class Several(nn.Module):
    """One output, or two."""

    def __init__(self):
        super().__init__()
        self.scale, self.count = nn.Parameter(torch.ones(4)), 1

    def forward(self, x):
        return (torch.maximum(x, self.scale),) * self.count


def test_another_number_of_outputs_is_named():
    model = private(nn.Sequential(Several()))
    for _ in range(2):  # in these the samples are looked for
        model(torch.randn(3, 4))
    model.network[0].count = 2
    with pytest.raises(ValueError, match=r"0 \(Several\) returns 2 tensors, and 1 when"):
        model(torch.randn(3, 4))


# ---- what surrounds the model --------------------------------------------------------------------


@pytest.fixture
def model():
    return private(nn.Sequential(nn.Linear(4, 3)))


@pytest.mark.parametrize("how", ["torch.compile", "compile"])
def test_a_private_model_is_not_compiled(model, how):
    called = model
    if how == "compile":
        model.compile(backend="eager")
    else:
        called = torch.compile(model, backend="eager")
    with pytest.raises(RuntimeError, match=r"before make_private, as network.compile\(\)"):
        called(rows(4))
    torch.compiler.reset()


def make_private(optimizer: type) -> None:
    network = nn.Linear(4, 3)
    PrivacyEngine().make_private(
        module=network,
        optimizer=optimizer(network.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(rows(4)), batch_size=2),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )


def test_a_loss_of_the_network_s_own_names_the_criterion(model):
    with pytest.raises(RuntimeError, match=r"criterion\(model\(\*\*batch\).logits, labels\)"):
        model(rows(4)).square().mean().backward()


def test_a_sum_where_there_should_be_none_is_no_division_by_zero():
    parameter = nn.Parameter(torch.zeros(3))
    found, nothing = {parameter: torch.ones(3)}, {parameter: torch.zeros(3, dtype=torch.float64)}
    assert gradient_errors(found, nothing, 1e-3)[parameter] == torch.inf
    assert gradient_errors({parameter: None}, nothing, 1e-3)[parameter] == 0
