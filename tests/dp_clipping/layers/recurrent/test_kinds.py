"""Which modules have the arithmetic of recurrent layers."""

from torch import nn
from torch.nn.utils import parametrizations

from dp_clipping.layers.recurrent.kinds import is_plain


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
