"""Stands in `.grad` of sharded parameters between a backward and the step, and raises when used."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from dp_clipping.distributed.dtensor import local
from dp_clipping.torch_compat import without_memory

REMEDY = (
    "between backward() and optimizer.step(), and the noise is scaled to the sum as it was: to "
    "clip or scale it, call optimizer.pre_step() first, then clip_grad_norm_(..) and "
    "optimizer.step(); if it was zeroed, or an ordinary backward has added to it, call "
    "optimizer.zero_grad() to drop the step"
)


class AwaitedSum(Tensor):
    """A tensor without memory, for a sum that the step puts into `.grad` when all ranks have it.

    What adds to it, as an ordinary backward does in the midst of FSDP2's collectives, only raises
    its version: the step refuses that.
    """

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):  # type: ignore[override]
        if function is torch.ops.aten.add_.Tensor and isinstance(args[0], cls):
            return args[0]
        raise RuntimeError(
            "the gradient of a sharded parameter was used, and is not there before the step; it "
            f"would be changed {REMEDY}"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return "AwaitedSum(there after optimizer.pre_step() or optimizer.step())"

    def __reduce_ex__(self, _: Any) -> NoReturn:
        raise RuntimeError("a sum that is not there cannot be saved: call optimizer.step() first")


def awaited_sum(parameter: Tensor, like: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Returns one for a parameter's gradient; `like` gives a part the parameter's layout."""
    part, dtype = local(parameter.detach()), parameter.grad_dtype or parameter.dtype
    like(parameter, part.new_empty((), dtype=dtype).expand(part.shape))  # finds the layout
    return like(parameter, without_memory(AwaitedSum, part, dtype))
