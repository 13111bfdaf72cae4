"""Which modules are recurrent layers as PyTorch has them."""

from typing import Any

from torch import nn

from dp_clipping.distributed.dtensor import plain_type
from dp_clipping.torch_compat import own_parameters

OWN = ("forward", "permute_hidden")


def is_plain(module: nn.Module) -> bool:
    """Returns whether it computes what PyTorch's does, with parameters of its own."""
    kind: Any = plain_type(module)
    base = next((base for base in (nn.LSTM, nn.GRU, nn.RNN) if issubclass(kind, base)), None)
    if base is None or nn.utils.parametrize.is_parametrized(module):
        return False
    own = set(map(id, own_parameters(module).values()))
    if not all(id(weight) in own for layer in module.all_weights for weight in layer):
        return False  # a hook computes a weight of other parameters
    return all(getattr(kind, name) is getattr(base, name) for name in OWN)
