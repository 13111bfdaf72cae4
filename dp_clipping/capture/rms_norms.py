"""Recognises RMS norms that other libraries define, by the byte code of their forward.

174 classes of transformers 5.23 have one of four bodies, and so have copies in users' code. Each
body is written here once and compiled by the same interpreter. A class with another body (another
cast, a mean that is subtracted) is not recognised, and runs under vmap.
"""

from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from dp_clipping.kinds import is_number


class _Llama:
    """Rounds x̂ to the input's dtype before it is scaled: Llama, Qwen, Mistral and others."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class _T5:
    """Rounds x̂ to the weight's dtype, if that has 16 bits: T5 and its descendants."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            hidden_states = hidden_states.to(self.weight.dtype)
        return self.weight * hidden_states


class _Olmo:
    """The product is rounded to the input's dtype: OLMo 2 and gpt-oss."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return (self.weight * hidden_states).to(input_dtype)


class _Gemma:
    """The product with 1 + w is rounded to the input's dtype: Gemma 1 to 3 and Qwen3-Next."""

    weight: Tensor
    eps: float

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        output = self._norm(x.float())
        output = output * (1.0 + self.weight.float())
        return output.type_as(x)


REFERENCES: dict[str, type] = {
    "llama_rms_norm": _Llama,
    "t5_rms_norm": _T5,
    "olmo_rms_norm": _Olmo,
    "gemma_rms_norm": _Gemma,
}  # the kinds of `layers.norm.COPIES`


def rms_norm_kind(module: nn.Module, plain: type) -> str | None:
    """Returns the kind of RMS norm that a module is; None if it is none of the known kinds.

    Args:
        plain: its class (`plain_type`), of which the module has replaced no method.
    """
    kind, weight = _kind_of_class(plain), getattr(module, "weight", None)
    if kind is None or getattr(module, "bias", None) is not None or weight.dim() != 1:
        return None
    name = "eps" if kind == "gemma_rms_norm" else "variance_epsilon"
    return kind if is_number(getattr(module, name, None)) else None


@lru_cache(maxsize=1024)
def _kind_of_class(plain: Any) -> str | None:
    for kind, reference in REFERENCES.items():
        methods = [m for m in vars(reference).items() if isinstance(m[1], FunctionType)]
        if all(_is_same(getattr(plain, name, None), method) for name, method in methods):
            return kind
    return None


def _is_same(function: Any, reference: FunctionType) -> bool:
    """Returns whether a function computes what the reference does: code, and what it names."""
    if not isinstance(function, FunctionType) or function.__defaults__ or function.__closure__:
        return False
    if function.__globals__.get("torch") is not torch:
        return False
    return _body(function) == _body(reference)


def _body(function: FunctionType) -> tuple:
    """Returns the code of a function without its docstring and the names of its variables."""
    code = function.__code__
    constants = [(type(c), c) for c in code.co_consts[1:]]
    arguments = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    return code.co_code, code.co_exceptiontable, code.co_names, constants, arguments
