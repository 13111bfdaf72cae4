"""Finds what a loss is made of, in its autograd graph."""

import warnings
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dp_clipping.torch_compat import shape_at, will_run

AFTER_NOISE = (
    "{names}: in the loss itself, where no gradient per sample is captured. If no sample is in "
    "that term, as in a penalty on the weights (L2, FedProx), leave it out of the loss and add its "
    "gradient after the noise: loss.backward(); optimizer.pre_step(); for p, g in zip(parameters, "
    "torch.autograd.grad(term, parameters)): p.grad += g; optimizer.step()"
)
THROUGH = (
    "the loss trains another network through the private one, which is no private step: call "
    "model.requires_grad_(False) before the forward for it, an ordinary criterion, as "
    "nn.BCEWithLogitsLoss()(model(generator(z)), y).backward(), and model.requires_grad_(True) "
    "after that"
)
NOT_OWN = (
    "the loss uses parameters of shapes {shapes} that are not the private network's, in the "
    "criterion or behind the network, and they get no gradient: let the module that make_private "
    "gets own and use them, or freeze them, requires_grad_(False)"
)
SUMS = ("AddBackward", "SubBackward", "RsubBackward")


def leaves_of(loss: Tensor, ends: Iterable[Tensor] = ()) -> set[Tensor]:
    """Returns the tensors without a graph of their own that a backward of the loss would reach.

    It does not look behind `ends`.
    """
    nodes = _nodes(loss.grad_fn, [y.grad_fn for y in ends])
    found = {node.variable for node in nodes if hasattr(node, "variable")}
    return found | ({loss} if loss.requires_grad and loss.is_leaf else set())


def warn_of_others(losses: Tensor, outputs: Iterable[Tensor], own: Collection[Tensor]) -> None:
    """Warns of parameters between outputs and losses that are not the network's own."""
    others = [p for p in leaves_of(losses, outputs) if isinstance(p, Parameter) and p not in own]
    if others:
        shapes = sorted(str(tuple(p.shape)) for p in others)
        warnings.warn(NOT_OWN.format(shapes=", ".join(shapes[:3])), stacklevel=2)


def is_reached(leaf: Tensor) -> bool:
    """Returns whether the backward under way comes to a leaf that it was not asked for."""
    with torch.enable_grad():
        view: Any = leaf.view_as(leaf)
    return will_run(view.grad_fn.next_functions[0][0])


def penalized(loss: Tensor, parameters: Collection[Tensor]) -> set[Tensor]:
    """Returns the parameters of which the loss has a term of one number that no other leaf is in.

    Such a term is the same for each sample, as a penalty on the weights is.
    """
    own, found = set(parameters), set()
    for node in _nodes(loss.grad_fn):
        for part, number in node.next_functions if node.name().startswith(SUMS) else ():
            if part is None or shape_at(part, number) != ():
                continue
            leaves = {x.variable for x in _nodes(part) if hasattr(x, "variable")}
            if leaves and leaves <= own:
                found |= leaves
    return found


def _nodes(root: Any, ends: Iterable[Any] = ()) -> list[Any]:
    """Returns the nodes of an autograd graph that are before some of them."""
    seen, found, nodes = {None, *ends}, [root], []
    while found:
        node = found.pop()
        if node not in seen:
            seen.add(node)
            nodes.append(node)
            for part, _ in node.next_functions:
                found.append(part)
    return nodes
