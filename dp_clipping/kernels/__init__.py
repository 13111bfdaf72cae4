"""Triton kernels, one idea a file; each has a plain PyTorch twin that says what it computes."""

import os

import torch

from dp_clipping.kernels.tiles import DTYPES, triton

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels run on tensors of that device and dtype.

    On a GPU with Triton, or anywhere in Triton's interpreter, whose bfloat16 products are wrong.
    """
    if triton is None or dtype not in DTYPES:
        return False
    return device.type == "cuda" or (INTERPRETED and dtype != torch.bfloat16)
