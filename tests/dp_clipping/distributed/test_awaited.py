"""Tests the placeholder in `.grad` of a sharded parameter: its use raises, it has no memory."""

import copy
import pickle

import pytest
import torch
from torch import nn

from dp_clipping.distributed.gradient_reduce import awaited_sum
from dp_clipping.torch_compat import version_of


def standing_in(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(4, 3, dtype=dtype))
    if dtype != torch.float32:
        parameter.grad_dtype = torch.float32
    parameter.grad = awaited_sum(parameter, lambda _, part: part)
    return parameter


USES = {
    "clip_grad_norm_": lambda p: nn.utils.clip_grad_norm_([p], 1.0),
    "clip_grad_norm_, foreach": lambda p: nn.utils.clip_grad_norm_([p], 1.0, foreach=True),
    "clip_grad_value_": lambda p: nn.utils.clip_grad_value_([p], 1.0),
    "zero_": lambda p: p.grad.zero_(),
    "data": lambda p: p.grad.data.mul_(2),
    "detach": lambda p: p.grad.detach(),
    "norm": lambda p: p.grad.norm(),
    "item": lambda p: p.grad.sum().item(),
    "clone": lambda p: p.grad.clone(),
    "copy": lambda p: copy.deepcopy(p.grad),
    "pickle": lambda p: pickle.dumps(p.grad),
    "step": lambda p: torch.optim.SGD([p], lr=0.1).step(),
    "Adam": lambda p: torch.optim.Adam([p]).step(),
}


@pytest.mark.parametrize("use", USES)
def test_a_use_raises(use):
    with pytest.raises(RuntimeError, match="not there"):
        USES[use](standing_in())


def test_adding_to_it_moves_its_version():
    parameter = standing_in()
    before = version_of(parameter.grad)
    parameter.grad += 1
    assert version_of(parameter.grad) > before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_looks_like_a_gradient(dtype):
    parameter = standing_in(dtype)
    assert parameter.grad.shape == (4, 3)
    assert parameter.grad.dtype == torch.float32
    assert "pre_step" in repr(parameter.grad)
    parameter.grad = None
