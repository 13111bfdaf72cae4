"""Which modules are recurrent layers, or cells of them, as PyTorch has them."""

from typing import Any

from torch import nn

from dp_clipping.distributed.dtensor import plain_type
from dp_clipping.torch_compat import own_parameters

LAYERS, CELLS = (nn.LSTM, nn.GRU, nn.RNN), (nn.LSTMCell, nn.GRUCell, nn.RNNCell)
OWN = ("forward", "permute_hidden")
WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


def is_plain(module: nn.Module) -> bool:
    """Returns whether a layer computes what PyTorch's does, with parameters of its own."""
    return _is_plain(module, LAYERS, OWN) and _reads_parameters(
        module, [weight for layer in module.all_weights for weight in layer]
    )


def is_plain_cell(module: nn.Module) -> bool:
    """Returns the same of a cell."""
    return _is_plain(module, CELLS, ("forward",)) and _reads_parameters(
        module, [getattr(module, name) for name in WEIGHTS]
    )


def _is_plain(module: nn.Module, bases: tuple[type, ...], methods: tuple[str, ...]) -> bool:
    kind: Any = plain_type(module)
    base = next((base for base in bases if issubclass(kind, base)), None)
    if base is None or nn.utils.parametrize.is_parametrized(module):
        return False
    return all(getattr(kind, name) is getattr(base, name) for name in methods)


def _reads_parameters(module: nn.Module, weights: list[Any]) -> bool:
    """Returns whether these are parameters, and none is computed of others by a hook."""
    own = set(map(id, own_parameters(module).values()))
    return all(weight is None or id(weight) in own for weight in weights)
