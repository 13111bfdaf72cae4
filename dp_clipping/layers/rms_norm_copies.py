"""RMS norms that other libraries define, which are recognised by what their forward computes.

174 classes of transformers 5.23 compute one of four formulas (`COPIES`), and so do
copies in users' code. A class is tried once, on an object with a small random weight: it is of a
kind if all its outputs are equal, bit for bit, to what is computed for that kind. A class that
computes something else (another cast, a mean that is subtracted), or needs more than weight and
epsilon, runs under vmap.
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from dp_clipping.kinds import is_number
from dp_clipping.torch_compat import fused_rms_norm
from dp_clipping.trials.randomness import same_randomness

WIDTH, EPS = 6, 0.03
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LOW_PRECISION = (torch.float16, torch.bfloat16)
# The attribute with epsilon, and input and weight -> what scales x̂, the dtype that x̂ is rounded to
# before (None: none), and that of the output (None: the product's).
COPIES: dict[str, tuple[str, Callable[[Tensor, Tensor], tuple]]] = {
    "llama_rms_norm": ("variance_epsilon", lambda x, w: (w, x.dtype, None)),  # Qwen, Mistral too
    "t5_rms_norm": (
        "variance_epsilon", lambda x, w: (w, w.dtype if w.dtype in LOW_PRECISION else None, None),
    ),
    "olmo_rms_norm": ("variance_epsilon", lambda x, w: (w, None, x.dtype)),  # OLMo 2, gpt-oss
    # Gemma 1 to 3 and Qwen3-Next
    "gemma_rms_norm": ("eps", lambda x, w: (1.0 + w.float(), None, x.dtype)),
}  # fmt: skip


def copied(kind: str, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what an RMS norm of `COPIES` computes, what scales x̂ in it, and rstd."""
    scale, inner, outer = COPIES[kind][1](x, weight)
    if x.is_cuda and x.dtype == (inner or torch.float32) != torch.float64:
        normalized, rstd = fused_rms_norm(x, x.shape[-1:], None, eps)
    else:
        wider = x.to(torch.float32)
        rstd = torch.rsqrt(wider.pow(2).mean(-1, keepdim=True) + eps)
        normalized = (x if kind == "t5_rms_norm" else wider) * rstd
    y = scale * normalized.to(inner or normalized.dtype)
    return y.to(outer or y.dtype), scale, rstd


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
                weight = torch.randn(WIDTH, generator=draw, device="cpu").to(of_weight)
                layer.weight, layer.training = nn.Parameter(weight), is_training
                x = (3 * torch.randn(shape, generator=draw, device="cpu")).to(of_input)
                y, expected = plain.forward(layer, x.clone()), copied(kind, x, weight, EPS)[0]
                if y.dtype != expected.dtype or not torch.equal(y, expected):
                    return False
    except Exception:  # it needs more than these
        return False
    return True
