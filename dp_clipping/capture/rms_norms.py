"""Recognises RMS norms that other libraries define, by what their forward computes.

174 classes of transformers 5.23 compute one of four formulas, and so do copies in users' code. A
class is tried once, on an object with a small random weight: it is of a kind if all its outputs
are equal, bit for bit, to that kind's formula. A class that computes something else (another cast,
a mean that is subtracted), or needs more than weight and epsilon, runs under vmap.
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from dp_clipping.kinds import is_number
from dp_clipping.trials.randomness import same_randomness

Formula = Callable[[Tensor, Tensor, float], Tensor]

WIDTH, EPS = 6, 0.03
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _normalized(x: Tensor, wide: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def _llama(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Rounds x̂ to the input's dtype before it is scaled: Llama, Qwen, Mistral and others."""
    return weight * _normalized(x.float(), x.float(), eps).to(x.dtype)


def _t5(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Rounds x̂ to the weight's dtype, if that has 16 bits: T5 and its descendants."""
    y = _normalized(x, x.float(), eps)
    return weight * (y.to(weight.dtype) if weight.dtype.itemsize == 2 else y)


def _olmo(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The product is rounded to the input's dtype: OLMo 2 and gpt-oss."""
    return (weight * _normalized(x.float(), x.float(), eps)).to(x.dtype)


def _gemma(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The product with 1 + w is rounded to the input's dtype: Gemma 1 to 3 and Qwen3-Next."""
    return (_normalized(x.float(), x.float(), eps) * (1.0 + weight.float())).to(x.dtype)


FORMULAS: dict[str, tuple[str, Formula]] = {
    "llama_rms_norm": ("variance_epsilon", _llama),
    "t5_rms_norm": ("variance_epsilon", _t5),
    "olmo_rms_norm": ("variance_epsilon", _olmo),
    "gemma_rms_norm": ("eps", _gemma),
}
"""Kinds of `layers.norm.COPIES` -> the attribute with epsilon, and what they compute."""


def rms_norm_kind(module: nn.Module, plain: type) -> str | None:
    """Returns the kind of RMS norm that a module is; None if it is none of the known kinds.

    Args:
        plain: its class (`plain_type`), of which the module has replaced no method.
    """
    weight: Any = getattr(module, "weight", None)
    if getattr(module, "bias", None) is not None or weight.dim() != 1:
        return None
    if not any(is_number(getattr(module, name, None)) for name, _ in FORMULAS.values()):
        return None
    kind = _kind_of_class(plain)
    return kind if kind and is_number(getattr(module, FORMULAS[kind][0], None)) else None


@lru_cache(maxsize=1024)
def _kind_of_class(plain: Any) -> str | None:
    return next((kind for kind in FORMULAS if _computes(plain, *FORMULAS[kind])), None)


def _computes(plain: Any, name: str, formula: Formula) -> bool:
    """Returns whether objects of a class that have weight and epsilon compute a formula."""
    draw = torch.Generator().manual_seed(0)
    cases = product(DTYPES, DTYPES, ((WIDTH,), (3, WIDTH), (2, 3, WIDTH)), (True, False))
    try:
        layer = plain.__new__(plain)
        nn.Module.__init__(layer)
        setattr(layer, name, EPS)
        with torch.no_grad(), same_randomness():
            for of_weight, of_input, shape, is_training in cases:
                weight = torch.randn(WIDTH, generator=draw).to(of_weight)
                layer.weight, layer.training = nn.Parameter(weight), is_training
                x = (3 * torch.randn(shape, generator=draw)).to(of_input)
                y, expected = plain.forward(layer, x.clone()), formula(x, weight, EPS)
                if y.dtype != expected.dtype or not torch.equal(y, expected):
                    return False
    except Exception:  # it needs more than these
        return False
    return True
