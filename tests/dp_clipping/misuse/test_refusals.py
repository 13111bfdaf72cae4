"""Rows of what is refused: a name, a snippet, the type of its error and what the message says.

A snippet is a function without arguments that does the wrong thing last. What must hold after a
refusal, where it is more than that nothing happened, has a test of its own elsewhere.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune, rnn

from dp_clipping import PrivacyEngine, register_layer
from tests.support import engine, zoo
from tests.support.engine import UNCLIPPED
from tests.support.registered_layers import (
    Apart,
    Dense,
    Gate,
    dense_gradients,
    gate_gradients,
    gate_norms,
    gate_sums,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:the batch of this step did not come from"),
    pytest.mark.filterwarnings("ignore:.*weight_norm"),
]
Row = tuple[str, Callable[[], object], type[Exception], str]


def trained_once() -> SimpleNamespace:
    run = engine.build()
    engine.step(run)
    return run


def model_of(network: nn.Module, **options) -> nn.Module:
    return engine.build(module=network, **options).model


# Settings that change between steps


def set_max_grad_norm(value: object) -> None:
    engine.build().optimizer.max_grad_norm = value


def set_one_of_two_thresholds() -> None:
    run = engine.build(clipping="per_layer", max_grad_norm=[0.5, 0.5])
    run.optimizer.max_grad_norm = [0.5]


def change_a_threshold_in_its_list() -> None:
    run = engine.build(clipping="per_layer", max_grad_norm=[0.5, 0.5])
    run.optimizer.max_grad_norm[0] = 0.0
    engine.step(run)


SETTINGS: list[Row] = [
    *((f"max_grad_norm {value}", lambda value=value: set_max_grad_norm(value), ValueError,
       "max_grad_norm is") for value in (-1.0, 0.0, math.nan, math.inf, [0.5], [])),
    ("one of two thresholds", set_one_of_two_thresholds, ValueError,
     "1 thresholds for 2 clipping groups"),
    ("a threshold in its list", change_a_threshold_in_its_list, ValueError,
     r"max_grad_norm is \[0\.0, 0\.5\]"),
    *((f"delta {value}", lambda value=value: engine.build().engine.get_epsilon(value), ValueError,
       "delta is") for value in (0, 1, -1e-5, 2, math.nan)),
]  # fmt: skip


# Parameters and gradients that change between steps


def freeze_later(is_trained: bool) -> None:
    network = engine.network()
    network[2].bias.requires_grad_(not is_trained)
    run = engine.build(module=network)
    engine.step(run)
    network[2].bias.requires_grad_(is_trained)
    engine.step(run)


def add_a_parameter_later() -> None:
    run = trained_once()
    run.model.network[0].late = nn.Parameter(torch.zeros(2))
    engine.step(run)


def ordinary_gradient_before_the_private_one() -> None:
    run = engine.build()
    engine.ordinary_backward(run)
    engine.backward(run, engine.data()[:5])


def keep_gradients_of_the_last_step() -> None:
    run = engine.build()
    engine.backward(run, engine.data()[:5])
    run.optimizer.step()
    engine.backward(run, engine.data()[:5])


def step_without_a_backward() -> None:
    trained_once().optimizer.step()


def backward_of_a_loss_of_the_user() -> None:
    engine.build().model(engine.data()[:5][0]).square().mean().backward()


def assign(net: nn.Module) -> None:
    net.load_state_dict({n: t.clone() for n, t in net.state_dict().items()}, assign=True)


REPLACE: dict[str, Callable[[nn.Module], object]] = {
    "loaded by assignment": assign,
    "assigned to a child": lambda net: assign(net[0]),
    "of a new layer": lambda net: setattr(net, "2", nn.Linear(5, 3)),
    "gone with its layer": lambda net: delattr(net, "2"),
    "a new parameter": lambda net: setattr(net[2], "weight", nn.Parameter(torch.zeros(3, 5))),
    "in the list of the layer": lambda net: net[2]._parameters.update(
        weight=nn.Parameter(torch.zeros(3, 5))
    ),
}


def train_after(replace: Callable[[nn.Module], object]) -> None:
    run = trained_once()
    replace(run.model.network)
    engine.step(run)


def freeze_what_something_else_stands_for() -> None:
    """As FSDP has other objects in the place of the parameters between forward and backward."""
    run = trained_once()
    layer = run.model.network[2]
    own = layer.bias
    layer._parameters["bias"] = nn.Parameter(own.detach().clone())
    own.requires_grad_(False)
    engine.step(run)


def let_a_parameter_go() -> None:
    run = trained_once()
    group = run.optimizer.param_groups[0]
    group["params"] = group["params"][1:]
    engine.step(run)


GRADIENTS: list[Row] = [
    ("frozen later", lambda: freeze_later(False), RuntimeError,
     r"2\.bias \(frozen now\): freeze and unfreeze before"),
    ("trained later", lambda: freeze_later(True), RuntimeError,
     r"2\.bias \(trainable now\): freeze and unfreeze before"),
    ("a late parameter", add_a_parameter_later, RuntimeError,
     r"0\.late \(trainable now\): freeze and"),
    ("frozen while another stands for it", freeze_what_something_else_stands_for, RuntimeError,
     r"2\.bias \(frozen now\): freeze and unfreeze before"),
    *((f"a parameter {name}", lambda replace=replace: train_after(replace), RuntimeError,
       "of the network is another tensor than at make_private")
      for name, replace in REPLACE.items()),
    ("an optimizer that let one go", let_a_parameter_go, RuntimeError,
     r"no longer holds 0\.weight"),
    ("an ordinary gradient before", ordinary_gradient_before_the_private_one, RuntimeError,
     UNCLIPPED),
    ("no zero_grad", keep_gradients_of_the_last_step, ValueError,
     "gradients of the last step are still there"),
    ("no backward", step_without_a_backward, RuntimeError, "without a backward since the last one"),
    ("no private criterion", backward_of_a_loss_of_the_user, RuntimeError,
     r"criterion\(model\(\*\*batch\).logits, labels\)"),
]  # fmt: skip


# Layers


def validate(layer: nn.Module) -> None:
    network = nn.Sequential(layer, nn.Linear(4, 3))
    assert not PrivacyEngine.is_compatible(module=network)
    PrivacyEngine.validate(module=network)


class Dropped(nn.Module):
    """A weight that a hook computes of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 4, batch_first=True)
        weight = self.layer.weight_hh_l0
        del self.layer.weight_hh_l0
        self.raw = nn.Parameter(weight.detach().clone())
        self.layer.weight_hh_l0 = self.raw * 1
        self.layer.register_forward_pre_hook(
            lambda layer, _: setattr(layer, "weight_hh_l0", self.raw * 0.9)
        )


def packed(ids: torch.Tensor, lengths: torch.Tensor, **options) -> rnn.PackedSequence:
    return rnn.pack_padded_sequence(ids, lengths.cpu(), True, **options)


def recurrent(how: Callable) -> nn.Module:
    return zoo.Net(how, lstm=nn.LSTM(4, 5, batch_first=True), head=nn.Linear(5, 3))


def longest(net: nn.Module, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    y, _ = net.lstm(packed(x, lengths, enforce_sorted=False))
    return net.head(rnn.pad_packed_sequence(y, batch_first=True)[0])


def in_order(net: nn.Module, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    lengths = lengths.sort(descending=True).values if len(lengths) == 4 else lengths
    return net.head(net.lstm(packed(x, lengths))[1][0][0])


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False).eval()


FIXED = {"track_running_stats": False}
REFUSED_LAYERS: list[tuple[str, Callable[[], nn.Module], str]] = [
    ("batch norm", lambda: nn.BatchNorm1d(4), r"0 \(BatchNorm1d\).*use nn.GroupNorm"),
    ("no running statistics", lambda: frozen(nn.BatchNorm1d(4, **FIXED)), "use nn.GroupNorm"),
    ("SyncBatchNorm", lambda: nn.SyncBatchNorm(4), "use nn.GroupNorm"),
    ("instance norm", lambda: nn.InstanceNorm1d(4, track_running_stats=True),
     r"0 \(InstanceNorm1d\).*track_running_stats"),
    ("a sparse embedding", lambda: nn.Embedding(3, 2, sparse=True), "sparse=False"),
    ("max_norm", lambda: frozen(nn.Embedding(3, 2, max_norm=1.0)), "max_norm=None"),
    ("by frequency", lambda: nn.Embedding(3, 2, scale_grad_by_freq=True), "scale_grad_by_freq"),
    ("a cell with weight_norm",
     lambda: parametrizations.weight_norm(nn.LSTMCell(4, 4), "weight_ih"),
     r"0 \(ParametrizedLSTMCell\).*something else than nn.LSTMCell.*without parametrizations"),
    ("an LSTM with weight_norm",
     lambda: parametrizations.weight_norm(nn.LSTM(4, 4), "weight_hh_l0"),
     "without parametrizations"),
    ("complex parameters", lambda: nn.Linear(4, 4, dtype=torch.complex64),
     r"complex parameters.*real and imaginary parts.*torch\.complex"),
    ("a lazy layer", lambda: nn.LazyLinear(4), "without a shape.*run the network once"),
    ("the old weight_norm", lambda: nn.utils.weight_norm(nn.Linear(4, 4)),
     "parametrizations.weight_norm"),
    ("a pruned layer", lambda: prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5),
     "prune.remove.*register_parametrization"),
    ("spectral_norm", lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
     r"remove_parametrizations\(layer, \"weight\"\)"),
    ("spectral_norm by a hook", lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
     r"remove_spectral_norm\(layer\)"),
    ("replicas", lambda: nn.DataParallel(nn.Linear(4, 4)), r"0 \(DataParallel\).*ddp.wrap"),
]  # fmt: skip
LENGTHS = torch.tensor([3, 6, 1, 4])
LAYERS: list[Row] = [
    *((name, lambda make=make: validate(make()), ValueError, message)
      for name, make, message in REFUSED_LAYERS),
    ("batch norm of a network in evaluation",
     lambda: PrivacyEngine.validate(module=nn.Sequential(nn.BatchNorm1d(4)).eval()), ValueError,
     "use nn.GroupNorm"),
    ("a weight of a hook", lambda: PrivacyEngine.validate(module=Dropped()), ValueError,
     r"something else than nn\.LSTM"),
    ("packed to the longest", lambda: model_of(recurrent(longest))(torch.randn(4, 6, 4), LENGTHS),
     ValueError, "total_length=x.shape"),
    ("packed in another order",
     lambda: model_of(recurrent(in_order))(torch.randn(4, 6, 4), LENGTHS), ValueError,
     "enforce_sorted=False"),
]  # fmt: skip


# `register_layer`


def register_new(**given: object) -> None:
    register_layer(type("New", (Gate,), {}), **given)


ANOTHER = "with another function: register a subclass"
REGISTERED: list[Row] = [
    ("another function", lambda: register_layer(Gate, dense_gradients), ValueError, ANOTHER),
    ("another norm",
     lambda: register_layer(Apart, norm=gate_sums, weighted_sum=gate_sums), ValueError, ANOTHER),
    ("one function for two", lambda: register_layer(Apart, gate_gradients), ValueError, ANOTHER),
    *((f"a class that has its own {kind.__name__}",
       lambda kind=kind: register_layer(kind, gate_gradients), ValueError,
       "per-sample gradients already: leave register_layer out")
      for kind in (nn.Linear, nn.Conv2d, nn.LSTM, nn.GroupNorm)),
    *((f"no class and function {n}", lambda wrong=wrong: register_layer(*wrong), ValueError,
       "give a subclass of nn.Module and a function: regis")
      for n, wrong in enumerate([(Dense, None), (Gate(2, 2), gate_gradients), (int, print)])),
    *((f"functions {n}", lambda given=given: register_new(**given), ValueError,
       r"or two: register_layer\(Scale, norm=\.\., weighted_s")
      for n, given in enumerate([
          {}, {"norm": gate_norms}, {"weighted_sum": gate_sums}, {"norm": 1, "weighted_sum": 2},
          {"fn": gate_gradients, "norm": gate_norms, "weighted_sum": gate_sums},
      ])),
]  # fmt: skip


# The engine, its optimizer and its criterion


def loss_over_the_batch() -> None:
    engine.step(engine.build(criterion=lambda y, t: F.cross_entropy(y, t)))


OBJECTS: list[Row] = [
    ("no make_private", lambda: PrivacyEngine().privacy_statement(1e-3), RuntimeError,
     r"call engine.make_private\(..\) before"),
    ("a late group", lambda: engine.build().optimizer.add_param_group({"params": []}), RuntimeError,
     "before make_private"),
    ("a method of Opacus", lambda: engine.build().optimizer.add_noise(), AttributeError,
     r"no attribute 'add_noise'.*from_opacus\.md"),
    ("a criterion before the forward",
     lambda: engine.build().criterion(torch.randn(2, 3), torch.tensor([0, 1])), RuntimeError,
     "before the private model's forward"),
    ("a loss over the batch", loss_over_the_batch, ValueError, "it must return one per sample"),
]  # fmt: skip

ROWS = [*SETTINGS, *GRADIENTS, *LAYERS, *REGISTERED, *OBJECTS]


@pytest.mark.parametrize(
    ("snippet", "error", "message"),
    [pytest.param(*row[1:], id=row[0].replace(" ", "-")) for row in ROWS],
)
def test_it_is_refused(snippet, error, message):
    with pytest.raises(error, match=message) as caught:
        snippet()
    assert "\n" not in str(caught.value).strip()
