"""Recognises RMS norms that other libraries define, by what their forward computes.

174 classes of transformers 5.23 compute one of four formulas (`COPIES`), and so do
copies in users' code. A class is tried once, on an object with a small random weight: it is of a
kind if all its outputs are equal, bit for bit, to what is computed for that kind. A class that
computes something else (another cast, a mean that is subtracted), or needs more than weight and
epsilon, runs under vmap.
"""

from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import nn

from dp_clipping.kinds import is_number
from dp_clipping.layers.rms_norm_copies import COPIES, copied
from dp_clipping.trials.randomness import same_randomness

WIDTH, EPS = 6, 0.03
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rms_norm_kind(module: nn.Module, plain: type) -> str | None:
    """Returns the kind of RMS norm that a module is; None if it is none of the known kinds.

    Args:
        plain: its class (`plain_type`), of which the module has replaced no method.
    """
    weight: Any = getattr(module, "weight", None)
    if getattr(module, "bias", None) is not None or weight.dim() != 1:
        return None
    if not any(is_number(getattr(module, name, None)) for name, _ in COPIES.values()):
        return None
    kind = _kind_of_class(plain)
    return kind if kind and is_number(getattr(module, COPIES[kind][0], None)) else None


@lru_cache(maxsize=1024)
def _kind_of_class(plain: Any) -> str | None:
    return next((kind for kind in COPIES if _computes(plain, kind)), None)


def _computes(plain: Any, kind: str) -> bool:
    """Returns whether objects of a class that have weight and epsilon are of a kind."""
    draw = torch.Generator().manual_seed(0)
    cases = product(DTYPES, DTYPES, ((WIDTH,), (3, WIDTH), (2, 3, WIDTH)), (True, False))
    try:
        layer = plain.__new__(plain)
        nn.Module.__init__(layer)
        setattr(layer, COPIES[kind][0], EPS)
        with torch.no_grad(), same_randomness():
            for of_weight, of_input, shape, is_training in cases:
                weight = torch.randn(WIDTH, generator=draw).to(of_weight)
                layer.weight, layer.training = nn.Parameter(weight), is_training
                x = (3 * torch.randn(shape, generator=draw)).to(of_input)
                y, expected = plain.forward(layer, x.clone()), copied(kind, x, weight, EPS)[0]
                if y.dtype != expected.dtype or not torch.equal(y, expected):
                    return False
    except Exception:  # it needs more than these
        return False
    return True
