"""Which modules have the arithmetic of a kind of layer: those that compute exactly what it does."""

import pytest
from opacus.layers import DPGRU, DPLSTM, DPRNN
from opacus.layers.dp_rnn import DPLSTMCell, DPRNNBase
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from dp_clipping.capture.layer_kinds import kind_of
from tests.support.registered_layers import Gate


class Named(nn.LSTM):
    pass


class First(nn.LSTM):
    def forward(self, x):
        return super().forward(x)[0]


class Doubled(nn.GRUCell):
    def forward(self, input, hx=None):
        return 2 * super().forward(input, hx)


class Forgetful(DPLSTMCell):
    def forward(self, input, hx=None, batch_size_t=None):
        return super().forward(input, None, batch_size_t)


class Outputs(nn.MultiheadAttention):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)[0]


class Other(Gate):
    """Is not registered with its base."""

    def forward(self, x):
        return 2 * super().forward(x)


def changed(layer: nn.Module, change) -> nn.Module:
    change(layer)
    return layer


def compute_a_weight(cell: nn.RNNCell) -> None:
    """Replaces a weight by a tensor that is computed of another parameter, as a hook does."""
    raw = cell.weight_hh
    del cell.weight_hh
    cell.register_parameter("raw", raw)
    cell.weight_hh = 2 * raw


def own_weight(layer: DPLSTM) -> None:
    layer.l0.ih.weight = nn.Parameter(layer.l0.ih.weight.detach().clone())


KINDS = {
    "linear": [nn.Linear(2, 2)],
    "embedding": [nn.Embedding(2, 2)],
    "layer_norm": [nn.LayerNorm(2)],
    "recurrent": [
        Named(2, 2),
        *(kind(2, 2, 2, bidirectional=True)
          for kind in (DPLSTM, DPGRU, DPRNN, nn.LSTM, nn.GRU, nn.RNN)),
    ],
    "cell": [nn.LSTMCell(2, 2, bias=False), nn.GRUCell(2, 2), nn.RNNCell(2, 2)],
    "attention": [nn.MultiheadAttention(4, 2)],
    "registered": [Gate(2, 2)],
    "vectorized": [
        nn.Bilinear(2, 2, 2),
        First(2, 2), parametrizations.weight_norm(nn.LSTM(2, 2), "weight_hh_l0"),
        Doubled(2, 2), parametrizations.weight_norm(nn.LSTMCell(2, 2), "weight_hh"),
        changed(nn.RNNCell(2, 2), compute_a_weight),
        DPLSTM(2, 2, 2, dropout=0.5), DPRNNBase(Forgetful, 2, 2),
        changed(DPLSTM(2, 2), lambda layer: layer.l0.hh.register_forward_hook(lambda *_: None)),
        changed(DPGRU(2, 2), lambda layer: setattr(layer.l0, "forward", lambda *_: None)),
        changed(DPLSTM(2, 2), own_weight),
        changed(DPLSTM(2, 2), lambda layer: parametrizations.weight_norm(layer.l0.ih)),
        Outputs(4, 2),
        Other(2, 2), changed(Gate(2, 2), lambda layer: setattr(layer, "forward", lambda x: x)),
        changed(Gate(2, 2), lambda layer: parametrize.register_parametrization(
            layer, "weight", nn.Identity()
        )),
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind):
    assert [kind_of(layer) for layer in KINDS[kind]] == [kind] * len(KINDS[kind])
