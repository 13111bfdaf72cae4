"""Handles packed sequences among a network's arguments and outputs.

In them a sample has no rows of its own. `opened` puts `Sequences` in their places, which have some,
and all that looks for samples works with these. The network is called with packed ones again: its
hooks (`repacking`) pack what it is given, and open what it returns to the length of what it was
given, however long the sequences of these samples are.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from dp_clipping.capture.samples.trees import HOLDS_ITSELF
from dp_clipping.torch_compat import tree_leaves, tree_map


class Sequences(NamedTuple):
    """Packed sequences, opened.

    Attributes:
        x: [B, T, ..], or [T, B, ..] without `batch_first`, zero behind the end of a sequence.
        lengths: [B], on the host.
    """

    x: Tensor
    lengths: Tensor


def packed_in(tree: Any) -> list[PackedSequence]:
    """Returns the packed sequences in a tree.

    Raises:
        ValueError: a list, tuple or dict in it holds itself.
    """
    try:
        leaves = tree_leaves(tree, is_leaf=lambda x: isinstance(x, PackedSequence))
    except RecursionError as error:
        raise ValueError(HOLDS_ITSELF.format(what="a list or dict")) from error
    return [leaf for leaf in leaves if isinstance(leaf, PackedSequence)]


def opened(tree: Any, batch_first: bool, total_length: int | None = None) -> Any:
    """Returns the tree with `Sequences` for packed ones, of at least `total_length` steps."""

    def leaf(x: Any) -> Any:
        if not isinstance(x, PackedSequence):
            return x
        if not len(x.batch_sizes):  # a batch without samples
            shape = (0, 1) if batch_first else (1, 0)
            return Sequences(x.data.new_zeros(*shape, *x.data.shape[1:]), x.batch_sizes)
        length = None if total_length is None else max(total_length, len(x.batch_sizes))
        return Sequences(*pad_packed_sequence(x, batch_first, total_length=length))

    return tree_map(leaf, tree, is_leaf=lambda x: isinstance(x, PackedSequence))


def packed(tree: Any, batch_first: bool, given: Sequence[PackedSequence] = ()) -> Any:
    """Returns the tree with packed sequences for `Sequences`.

    Args:
        given: tokens lie as they do in one of these, if it has the same lengths.
    """

    def leaf(sequences: Any) -> Any:
        if not isinstance(sequences, Sequences):
            return sequences
        x, lengths = sequences.x, sequences.lengths.cpu()
        x = x if batch_first else x.transpose(0, 1)
        if not len(lengths):
            return PackedSequence(x.flatten(0, 1), lengths)
        for one in given:
            if torch.equal(_lengths(one), lengths):
                order = one.sorted_indices
                if order is not None:
                    x, lengths = x.index_select(0, order), lengths[order.cpu()]
                return one._replace(data=pack_padded_sequence(x, lengths, True).data)
        return pack_padded_sequence(x, lengths, True, enforce_sorted=False)

    return tree_map(leaf, tree, is_leaf=lambda x: isinstance(x, Sequences))


def _lengths(one: PackedSequence) -> Tensor:
    """Returns the lengths [B], in the order of the batch."""
    places = torch.arange(int(one.batch_sizes[:1].sum()), device="cpu")[:, None]
    lengths = (one.batch_sizes > places).sum(1)
    return lengths if one.unsorted_indices is None else lengths[one.unsorted_indices.cpu()]


@contextmanager
def repacking(network: nn.Module, batch_first: bool) -> Iterator[None]:
    """A context in which a network that is called with `Sequences` gets packed ones, and returns
    `Sequences` for those that it makes."""
    lengths: list[int] = []  # of the call in progress

    def before(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        leaves = tree_leaves((args, kwargs), is_leaf=lambda x: isinstance(x, Sequences))
        steps = [s.x.shape[1 if batch_first else 0] for s in leaves if isinstance(s, Sequences)]
        lengths[:] = [max(steps)] if steps else []
        return packed((args, kwargs), batch_first)

    def after(module: nn.Module, args: tuple, kwargs: dict, outputs: Any) -> Any:
        return opened(outputs, batch_first, lengths[0]) if lengths else outputs

    hooks = (
        network.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        network.register_forward_hook(after, with_kwargs=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
