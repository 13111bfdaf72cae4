"""RMS norms that other libraries define: `capture.rms_norms` recognises them, `norm` runs them."""

from collections.abc import Callable

import torch
from torch import Tensor

from dp_clipping.torch_compat import fused_rms_norm

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
