"""Handles parameters that take no part in a backward, on some ranks or on all."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter


def parameters_reached_by(output: Any) -> set[Parameter]:
    """Returns the leaves of the autograd graphs behind every tensor in `output`.

    Looks into tuples, lists, dictionaries and dataclasses. A leaf hidden inside a custom
    `autograd.Function` is not seen; the wrapper then learns of it when its gradient arrives.
    """
    stack = [t.grad_fn for t in tensors_in(output) if t.grad_fn is not None]
    seen, reached = set(stack), set()
    while stack:
        node = stack.pop()
        leaf = getattr(node, "variable", None)  # only AccumulateGrad nodes have one
        if leaf is not None:
            reached.add(leaf)
        for next_node, _ in node.next_functions:
            if next_node is not None and next_node not in seen:
                seen.add(next_node)
                stack.append(next_node)
    return reached


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in tuples, lists, sets, dictionaries and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in([getattr(value, field.name) for field in fields(value)])


def agree_on_use(
    parameters: Sequence[Parameter], used: set[int], late: bool, group: dist.ProcessGroup
) -> tuple[set[int], bool]:
    """Returns which parameters any rank has used in this step, and whether any rank was late.

    A rank is late if a gradient arrived after its bucket was launched. It needs one more round, in
    which all ranks take part.
    """
    flags = torch.zeros(len(parameters) + 1, dtype=torch.int32, device=parameters[0].device)
    flags[list(used)] = 1
    flags[-1] = int(late)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    *by_anyone, anyone_late = flags.tolist()
    return {i for i, flag in enumerate(by_anyone) if flag}, bool(anyone_late)
