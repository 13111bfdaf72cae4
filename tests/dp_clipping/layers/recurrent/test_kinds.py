"""Which modules have the arithmetic of recurrent layers."""

import pytest
from opacus.layers import DPGRU, DPLSTM, DPRNN
from opacus.layers.dp_rnn import DPLSTMCell, DPRNNBase
from torch import nn
from torch.nn.utils import parametrizations

from dp_clipping.layers.recurrent.kinds import is_plain, is_plain_cell, mode_of


class Named(nn.LSTM):
    pass


class Other(nn.LSTM):
    def forward(self, x):
        return super().forward(x)[0]


def test_which_modules_have_it():
    assert is_plain(Named(2, 2))
    assert not is_plain(Other(2, 2))
    assert not is_plain(nn.LSTMCell(2, 2))
    assert not is_plain(parametrizations.weight_norm(nn.LSTM(2, 2), "weight_hh_l0"))


class Doubled(nn.GRUCell):
    def forward(self, input, hx=None):
        return 2 * super().forward(input, hx)


def test_which_cells_have_it():
    assert all(is_plain_cell(kind(2, 2)) for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell))
    assert is_plain_cell(nn.LSTMCell(2, 2, bias=False))
    assert not is_plain_cell(nn.LSTM(2, 2))
    assert not is_plain_cell(Doubled(2, 2))
    assert not is_plain_cell(parametrizations.weight_norm(nn.LSTMCell(2, 2), "weight_hh"))
    cell = nn.RNNCell(2, 2)
    raw = cell.weight_hh
    del cell.weight_hh
    cell.register_parameter("raw", raw)
    cell.weight_hh = 2 * raw  # as a hook leaves it
    assert not is_plain_cell(cell)


@pytest.mark.parametrize("kind", [DPLSTM, DPGRU, DPRNN, nn.LSTM, nn.GRU, nn.RNN])
def test_opacus_layers_have_the_mode_of_pytorchs(kind):
    layer = kind(2, 2, 2, bidirectional=True)
    assert is_plain(layer)
    assert mode_of(layer) == getattr(nn, kind.__name__.removeprefix("DP"))(2, 2).mode
    assert mode_of(DPRNN(2, 2, nonlinearity="relu")) == "RNN_RELU"


class Forgetful(DPLSTMCell):
    def forward(self, input, hx=None, batch_size_t=None):
        return super().forward(input, None, batch_size_t)


def test_opacus_layers_that_compute_otherwise():
    assert not is_plain(DPLSTM(2, 2, 2, dropout=0.5))
    assert not is_plain(DPRNNBase(Forgetful, 2, 2))
    hooked, other, apart = DPLSTM(2, 2), DPGRU(2, 2), DPLSTM(2, 2)
    hooked.l0.hh.register_forward_hook(lambda *_: None)
    other.l0.forward = lambda *_: None
    apart.l0.ih.weight = nn.Parameter(apart.l0.ih.weight.detach().clone())
    assert not any(map(is_plain, (hooked, other, apart)))
    assert not is_plain(parametrized())


def parametrized() -> nn.Module:
    layer = DPLSTM(2, 2)
    parametrizations.weight_norm(layer.l0.ih)
    return layer
