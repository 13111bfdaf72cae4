"""Recognises recurrent layers of PyTorch or Opacus, and their cells.

Opacus's `DPLSTM`, `DPGRU` and `DPRNN` compute what `nn.LSTM`, `nn.GRU` and `nn.RNN` do, in a loop
over modules of their own. Their weights are parameters of the layer too, under PyTorch's names.
"""

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from dp_clipping.distributed.dtensor import plain_type
from dp_clipping.torch_compat import hooks_of, own_parameters

LAYERS, CELLS = (nn.LSTM, nn.GRU, nn.RNN), (nn.LSTMCell, nn.GRUCell, nn.RNNCell)
OWN = ("forward", "permute_hidden")
WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
OF_OPACUS = ("forward", "forward_layer", "iterate_layers")
MODES = {"DPLSTMCell": "LSTM", "DPGRUCell": "GRU"}  # of the kind of an Opacus layer's cells


def is_plain(module: nn.Module) -> bool:
    """Returns whether a layer computes what PyTorch's does, with parameters of its own."""
    if _is_of_opacus(module):
        return _is_plain_of_opacus(module)
    return _is_plain(module, LAYERS, OWN) and _reads_parameters(
        module, [weight for layer in module.all_weights for weight in layer]
    )


def mode_of(layer: Any) -> str:
    """Returns the mode of a plain layer, as `nn.RNNBase` has it: `"LSTM"`, for example."""
    if isinstance(layer, nn.RNNBase):
        return layer.mode
    mode = MODES.get(layer.cell_type.__name__)
    return mode or f"RNN_{layer.cells[0].nonlinearity.upper()}"


def _is_of_opacus(module: nn.Module) -> bool:
    opacus = sys.modules.get("opacus.layers.dp_rnn")
    return opacus is not None and isinstance(module, opacus.DPRNNBase)


def _is_plain_of_opacus(layer: Any) -> bool:
    """Returns whether one of Opacus's layers is plain.

    A layer with dropout is not, because dropout also acts between time steps. Neither is one with a
    hook on a cell or on a module in it, because the hook would not be called.
    """
    opacus = sys.modules["opacus.layers.dp_rnn"]
    kind, kinds = plain_type(layer), (opacus.DPLSTMCell, opacus.DPGRUCell, opacus.DPRNNCell)
    products = [product for cell in layer.cells for product in (cell.ih, cell.hh)]
    return (
        layer.cell_type in kinds
        and not layer.dropout
        and all(getattr(kind, name) is getattr(opacus.DPRNNBase, name) for name in OF_OPACUS)
        and all(type(cell) is layer.cell_type for cell in layer.cells)
        and all(type(product) is opacus.RNNLinear for product in products)
        and len({getattr(cell, "nonlinearity", None) for cell in layer.cells}) == 1
        and not any(hooks_of(m) or "forward" in vars(m) for m in (*layer.cells, *products))
        and all(getattr(layer, own, None) is weight for own, weight in _weights_of_cells(layer))
    )


def _weights_of_cells(layer: Any) -> Iterator[tuple[str, Any]]:
    """Yields the name of each parameter of the layer, and the tensor that its cell uses."""
    count = 2 if layer.bidirectional else 1
    for n, cell in enumerate(layer.cells):
        place = f"l{n // count}{'_reverse' if n % count else ''}"
        for name in ("ih", "hh"):
            product = getattr(cell, name)
            yield f"weight_{name}_{place}", product.weight
            yield f"bias_{name}_{place}", product.bias


def is_plain_cell(module: nn.Module) -> bool:
    """Returns whether a cell is PyTorch's own, with parameters of its own."""
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
    """Returns whether all weights are parameters, so that no hook computes one from others."""
    own = set(map(id, own_parameters(module).values()))
    return all(weight is None or id(weight) in own for weight in weights)
