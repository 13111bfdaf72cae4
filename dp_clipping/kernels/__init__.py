"""Triton kernels, one idea a file; each has a reference implementation beside it.

Files:

    gradient              per-sample gradients of a linear layer and their norms, in one pass
    gram                  norms of linear layers from Gram matrices of tokens
    embedding             rows of equal tokens, and their norms
    norm_layer_gradients  per-sample gradients of RMSNorm and LayerNorm
    squared_norms         norms of per-sample gradients that another operator has formed
    coefficients          squared norms to clipping coefficients
    sorted_coefficients   coefficients in the order in which `weighted_product` takes samples
    weighted_product      clipped sum of a linear layer from its factors
    weighted_sum          clipped sum of kept per-sample gradients
    grouped_launch        one launch for many layers
    tiles                 what the matrix kernels share
    tuning/               which tile is fastest on this machine's GPU
"""

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
