"""Which modules have the arithmetic of recurrent layers."""

from torch import nn
from torch.nn.utils import parametrizations

from dp_clipping.layers.recurrent.kinds import is_plain, is_plain_cell


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
