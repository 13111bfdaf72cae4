"""Refuses padding that changes the loss of a sample: it would depend on the longest other one."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

LOOKED_AT = 32
TOLERANCE, TOLERANCE_16_BIT = 2e-5, 3e-2
CHANGED = (
    "the loss of a sample changes from {alone:.6g} to {beside:.6g} when it is padded to the length "
    "of another one, so its gradient would depend on who else is in the batch: let data_collator "
    "pad on the right and give an attention_mask, or let it pad to a fixed length "
    '(padding="max_length")'
)


@torch.no_grad()
def refuse_padding(
    dataset: Any, collate: Callable[[list], Any], loss: Callable[[Any], float], dtype: torch.dtype
) -> None:
    """Compares the loss of a short sample alone with its loss in a batch with a long one.

    The shortest and the longest of the first `LOOKED_AT` samples are taken. A collator that makes
    another batch of the same samples each time (that masks tokens at random) is not looked at.

    Args:
        loss: a function that returns the loss of a batch of one sample, by the model in evaluation.
        dtype: the dtype of the model's parameters.

    Raises:
        ValueError: if they differ.
    """
    samples = [dataset[i] for i in range(min(LOOKED_AT, len(dataset)))]
    batches = [collate([copy.deepcopy(sample)]) for sample in samples]
    if not all(isinstance(batch, Mapping) for batch in batches):
        return
    sizes = [sum(x.numel() for x in batch.values() if isinstance(x, Tensor)) for batch in batches]
    short, long = sizes.index(min(sizes)), sizes.index(max(sizes))
    alone = batches[short]
    again = collate([copy.deepcopy(samples[short])])
    if sizes[short] == sizes[long] or not _are_equal(alone, again):
        return
    both = collate([copy.deepcopy(samples[short]), copy.deepcopy(samples[long])])
    first, beside = loss(alone), loss({name: _first_row(x) for name, x in both.items()})
    tolerance = TOLERANCE if dtype.itemsize >= 4 else TOLERANCE_16_BIT
    if abs(first - beside) > tolerance * max(abs(first), abs(beside)):  # not if one is NaN
        raise ValueError(CHANGED.format(alone=first, beside=beside))


def _first_row(x: Any) -> Any:
    return x[:1] if isinstance(x, Tensor) and x.dim() and len(x) == 2 else x


def _are_equal(one: Mapping, other: Mapping) -> bool:
    return all(
        x.shape == other[name].shape and bool((x == other[name]).all())
        for name, x in one.items()
        if isinstance(x, Tensor)
    )
