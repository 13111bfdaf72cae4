"""Finds the samples in a tensor by comparing two batch sizes; never guesses.

A size that equals the batch size proves nothing: T, p and B may coincide, and a batch of one sample
looks like a position id. So the network is run on two and on three samples, and each layer's inputs
are compared: the dimension that grew is the batch.

A unit of privacy of k examples (`examples_per_unit`) is a sample of k times as many positions:
`of_units` says where these are. So each layer's arithmetic serves units as it serves samples.
"""

from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

FEW, MORE = 2, 3  # samples in the two runs
FLATTENED = ("sample_major", "time_major")


@dataclass(frozen=True)
class Layout:
    """Describes how B samples lie in a tensor.

    | kind | shape | meaning |
    | --- | --- | --- |
    | `dimension` | [.., B, ..] | `dim` counts the samples |
    | `sample_major` | [.., B·T, ..] | flattened into `dim`, a sample's tokens side by side |
    | `time_major` | [.., T·B, ..] | flattened into `dim`, the samples of a token side by side |
    | `unit` | [.., B·k, ..] | `dim` counts examples, the k of a sample side by side |
    | `shared` | [..] | no batch: every sample uses the same values (position ids); `dim` is 1 if
    the first dimension is a batch of one, to be broadcast |
    | `alone` | [B, ..] | the samples are laid behind each other, as copies of a parameter |
    """

    kind: str = "dimension"
    dim: int = 0

    def batch_first(self, x: Tensor, batch_size: int) -> Tensor:
        """Returns a view or copy of x whose first dimension is the sample."""
        if self.kind == "dimension":
            return x.movedim(self.dim, 0) if self.dim else x
        if self.kind == "shared":
            raise ValueError("a shared tensor has no samples")
        return self.split(x, batch_size).movedim(self.dim + 1, 1)

    def batch_tokens(self, x: Tensor, batch_size: int) -> Tensor:
        """Returns x [.., features] as [B, T, features]."""
        if self.kind != "dimension":
            x = self.batch_first(x, batch_size)
        elif self.dim:
            x = x.movedim(self.dim, 0)
        if x.ndim == 3:
            return x
        return x.unsqueeze(1) if x.ndim == 2 else x.flatten(1, -2)

    def restore(self, x: Tensor) -> Tensor:
        """Returns the inverse of `batch_first`."""
        if self.kind == "dimension":
            return x.movedim(0, self.dim) if self.dim else x  # no view: it may be changed in place
        if self.kind == "shared":
            raise ValueError("a shared tensor has no samples")
        return self.joined(x.movedim(1, self.dim + 1))

    def split(self, x: Tensor, batch_size: int) -> Tensor:
        """Returns a view [B, ..] of x: each sample as x would be of a batch of one."""
        dim = self.dim
        if self.kind == "dimension":
            return x.movedim(dim, 0).unsqueeze(dim + 1)
        if self.kind == "time_major":
            return x.unflatten(dim, (x.shape[dim] // batch_size, batch_size)).movedim(dim + 1, 0)
        return x.unflatten(dim, (batch_size, x.shape[dim] // batch_size)).movedim(dim, 0)

    def joined(self, y: Tensor) -> Tensor:
        """Returns the inverse of `split`."""
        dim = self.dim
        if self.kind == "alone":
            return y
        if self.kind == "dimension":
            return y.squeeze(dim + 1).movedim(0, dim)
        return y.movedim(0, dim + (self.kind == "time_major")).flatten(dim, dim + 1)

    def of_units(self, what: str) -> "Layout":
        """Returns the layout of units of k examples, from that of examples.

        Raises:
            ValueError: naming `what`, where the examples of a unit are not side by side.
        """
        if self.kind == "time_major":
            raise ValueError(
                f"{what or 'the network'} gets the samples of each token side by side, flattened "
                "with the tokens, and examples_per_unit takes a unit's examples side by side: give "
                "the layer [tokens, batch, features], as x.unflatten(0, (tokens, -1))"
            )
        return Layout("unit", self.dim) if self.kind == "dimension" else self


TRIMMED = (
    "has another length for a sample beside other samples of the batch, as from "
    "x[:, :lengths.max()] in forward, so it shows how long those are: trim before the network, in "
    "the DataLoader's collate_fn, as by def collate(samples): x, y = default_collate(samples); "
    "return x[:, : (x != padding).sum(1).max()], y"
)


CHANGED = (
    "per-sample gradients need every sample's own rows; if the way it is called has changed, call "
    "model.reset_batch_layouts()"
)
AT_ONCE = "call it with all samples of the batch at once"


class NoLayout(ValueError):
    """Samples have no place in a layer's tensor; what calls the layer may run on single ones."""


class LayoutUnknown(Exception):
    """A layer was called in a way that the search for the batch dimension has not seen.

    Attributes:
        arguments: of the forward, where it is not that of the user's batch.
    """

    arguments: tuple[tuple, dict] | None = None

    def on_ranks(self) -> ValueError:
        """Returns the error for a sharded model, with what a module has computed otherwise."""
        why = f" ({self.__cause__})" if self.__cause__ else ""
        return ValueError(
            f"{str(self) or 'the network'} is called in a way that was not seen in the first batch"
            f"{why}, or returns other tensors, and other ranks cannot repeat the search now: call "
            "model.reset_batch_layouts() on every rank before a forward that differs, or let ranks "
            'have whole parameters, by wrap("zero2", network)'
        )

    def lasting(self) -> ValueError:
        """Returns the error where further searches have not helped."""
        return ValueError(
            f"{str(self) or 'the network'} is called in a way that depends on more than the "
            "batch: where its samples are cannot be established"
        )


class UsedMore(LayoutUnknown):
    """A layer, or a parameter, is used more often than before, which no search has looked for."""


class NeedsVmap(ValueError):
    """A layer has no per-sample gradients as it is called; it may where its caller is under vmap.

    Attributes:
        layers: its name, and those of other such layers.
    """

    def __init__(self, layer: str, message: str):
        super().__init__(message)
        self.layers = {layer}


class SomeSamples(ValueError):
    """A layer got rows of some samples of the batch and not of all, as of `x.split(32)`.

    It runs under vmap, with its caller, after a search that is told so.

    Args:
        fact: the first part of the message.

    Attributes:
        layer: its name.
        arguments: as of `LayoutUnknown`.
    """

    arguments: tuple[tuple, dict] | None = None

    def __init__(self, layer: str, fact: str):
        super().__init__(f"{fact}: {CHANGED}")
        self.layer, self._fact = layer, fact

    def on_ranks(self) -> ValueError:
        """Returns the error for a sharded model, none of whose layers runs under vmap later."""
        return ValueError(
            f"{self._fact}: {AT_ONCE}, as self.layer(x) in place of for part in x.split(32), and "
            "let dp_clipping.BatchMemoryManager split the batches"
        )

    def lasting(self) -> ValueError:
        """Returns the error where searches in which its caller splits them have not helped."""
        return SomeSamples(self.layer, self._fact)


class CalledDifferently(ValueError):
    """A layer is called with other tensors for some samples than for others."""

    def __init__(self, layer: str):
        super().__init__(
            f"{layer} is called with more tensors for some samples than for others (a mask that is "
            "left out where nothing is padded, for example), so where its samples are cannot be "
            "established: call it alike for all samples, or give a first batch in which more "
            "samples are padded"
        )


def rows_unknown(layer: str) -> NeedsVmap:
    """Returns the error of a module whose rows are those of a batch that it was not given."""
    return NeedsVmap(
        layer,
        f"{layer or 'the network'} returns rows for each sample, and none of its arguments has "
        "them: give it a tensor with a row for each sample, as x in place of len(x)",
    )


def find_layout(
    few: Tensor, more: Tensor, what: str, other: Tensor | None = None, unsure: str = ""
) -> Layout:
    """Returns the layout of a tensor seen with `FEW` samples and again with one more.

    Args:
        other: seen with `FEW` samples, of which the last is another one: where noise is added, two
            tensors of one shape have the same, and tell apart what two shapes cannot.
        unsure: the kind of a flattened tensor whose values do not tell; "": refuse it.

    Raises:
        ValueError: naming `what`, where two dimensions grew, one grew by something else than whole
            samples, or a flattened tensor has neither order.
    """
    if few.dim() != more.dim():
        raise ValueError(f"{what} changes its number of dimensions with the batch size")
    grown = [d for d in range(few.dim()) if few.shape[d] != more.shape[d]]
    if not grown:
        return Layout("shared", int(few.dim() > 1 and few.shape[0] == 1))
    if len(grown) > 1:
        of_samples = [d for d in grown if (few.shape[d], more.shape[d]) == (FEW, MORE)]
        if len(of_samples) == 1:
            raise ValueError(f"{what} {TRIMMED}")
        raise ValueError(
            f"{what} has more than one dimension that grows with the batch "
            f"({tuple(few.shape)} for {FEW} samples, {tuple(more.shape)} for {MORE}): samples are "
            "mixed there, and no per-sample gradient exists"
        )
    dim = grown[0]
    length, rest = divmod(few.shape[dim], FEW)
    if rest or more.shape[dim] != MORE * length:
        raise NoLayout(
            f"{what} has {few.shape[dim]} rows for {FEW} samples and {more.shape[dim]} for {MORE}: "
            "rows that do not belong to a sample each (a part of the batch, as of x.chunk(2), a "
            "capacity- or balance-limited expert, a batch statistic, a PackedSequence: pad it) "
            f"have no per-sample gradient: {AT_ONCE}, a row or as many tokens for each"
        )
    if length == 1:
        return Layout("dimension", dim)
    if dim and (few.is_meta or more.is_meta):  # values that would tell the order were not kept
        raise ValueError(
            f"{what} is flattened into dimension {dim}: flatten batch and tokens in front"
        )
    if other is not None and other.shape == few.shape:
        other = other.movedim(dim, 0)
    few, more = few.movedim(dim, 0), more.movedim(dim, 0)
    return Layout(_flattened_order(few, more, length, what, other, unsure), dim)


def _flattened_order(
    few: Tensor, more: Tensor, length: int, what: str, other: Tensor | None, unsure: str
) -> str:
    """Returns which of the two orders; both runs start with the same samples, so values tell."""
    sample_major = _is_close(more[: FEW * length], few)
    by_time = rearrange(more, "(t b) ... -> t b ...", b=MORE)[:, :FEW].flatten(0, 1)
    time_major = _is_close(by_time, few)
    if not sample_major and not time_major and other is not None and other.shape == few.shape:
        changed = (other != few).reshape(len(few), -1).any(1)
        if changed.any() and few.isfinite().all():
            sample_major = not changed[:length].any()
            time_major = not changed.unflatten(0, (length, FEW))[:, 0].any()
    if sample_major == time_major:
        if unsure:
            return unsure
        why = "fits both orders" if sample_major else "fits neither order (samples are mixed)"
        kind = NoLayout if sample_major else ValueError
        raise kind(
            f"{what} is flattened to {tuple(few.shape)} and its content {why}: give the layer "
            "[batch, tokens, features]"
        )
    return "sample_major" if sample_major else "time_major"


def _is_close(a: Tensor, b: Tensor) -> bool:
    """Returns whether both are equal up to what kernels of another batch size round.

    What is not finite counts as zero: one sample of the first batch may have such values.
    """
    if not a.is_floating_point():
        return torch.equal(a, b)
    a, b = (x.double().nan_to_num(0, 0, 0) for x in (a, b))
    return bool((a - b).norm() <= 1e-2 * b.norm())


def first_tokens(packed: PackedSequence) -> Tensor:
    """Returns [N, 1, 1, ..]: the first token of each of N sequences, in the order of the batch.

    Four dimensions and more: no tensor that a recurrent layer takes in place of it has so many.
    """
    rows = packed.data[: int(packed.batch_sizes[0])]
    if packed.unsorted_indices is not None:
        rows = rows.index_select(0, packed.unsorted_indices)
    return rows[:, None, None]


def all_tokens(packed: PackedSequence) -> Tensor:
    """Returns [N, T, 1, ..]: all tokens of N sequences, in the order of the batch, and zeros."""
    return pad_packed_sequence(packed, batch_first=True)[0].unsqueeze(2)


def bag_tensors(args: tuple, kwargs: dict, has_last: bool, whole: bool) -> list[Tensor]:
    """Returns the layouts of the bags in a call of `nn.EmbeddingBag`.

    Ids [N, T], and weights of them, as they are. Of those with offsets, [N, 1, 1, 1]: where each of
    N bags starts; or, if it is to be `whole`, [N, 1 + T, 1, 1]: how many ids, and these, and zeros.
    """
    names = ("input", "offsets", "per_sample_weights")
    given = dict(zip(names, args, strict=False)) | kwargs
    ids, offsets, weights = (given.get(name) for name in names)
    found = [x for x in (ids, weights) if isinstance(x, Tensor)]
    if not isinstance(ids, Tensor) or ids.dim() != 1 or not isinstance(offsets, Tensor):
        return found
    if not whole:
        starts = offsets[:-1] if has_last else offsets
        return [starts.reshape(-1, 1, 1, 1)] * len(found)
    lengths, rows = rows_of_bags(found, offsets, has_last)
    return [torch.cat((lengths[:, None].to(x), x), 1)[:, :, None, None] for x in rows]


def rows_of_bags(
    tensors: list[Tensor], offsets: Tensor, has_last: bool
) -> tuple[Tensor, list[Tensor]]:
    """Returns the lengths [N] of bags, and tensors with a number for each id as [N, T].

    T is the length of the longest one, or 1; zeros follow in the rows of others.
    """
    if not has_last:
        offsets = torch.cat((offsets, offsets.new_tensor([len(tensors[0])])))
    lengths = offsets.diff().clamp(min=0)
    table = torch.arange(max([1, *lengths.tolist()]), device=offsets.device)
    is_there = table < lengths[:, None]
    places = (offsets[:-1, None] + table)[is_there]
    rows = [x.new_zeros(is_there.shape) for x in tensors]
    for x, row in zip(tensors, rows, strict=True):
        row[is_there.to(x.device)] = x[places.to(x.device)]
    return lengths, rows


def expand_shared(x: Tensor, batch_size: int) -> Tensor:
    """Returns x [1, ..] as [B, ..]; anything else gets a new first dimension."""
    x = x if x.dim() > 1 and x.shape[0] == 1 else x.unsqueeze(0)
    return x.expand(batch_size, *x.shape[1:])


def has_rows(x: Tensor, layout: Layout, handle: Any, batch_size: int) -> bool:
    """Returns whether a tensor has the rows of every sample where the layout says."""
    if layout.kind == "shared":
        return not layout.dim or x.shape[0] == 1
    if x.dim() <= layout.dim:
        return False
    if layout.kind == "unit":
        return x.shape[layout.dim] == batch_size * handle.examples_per_unit
    if layout.kind in FLATTENED:
        return x.shape[layout.dim] % batch_size == 0
    return x.shape[layout.dim] == batch_size


def check_size(x: Tensor, layout: Layout, handle: Any, batch_size: int) -> None:
    """Refuses an input without rows of its own for every sample.

    The number of rows does not tell that of flattened samples, the number of calls does. Where
    another search finds as many calls, the layer has all samples in each, as in a longer loop.

    Raises:
        UsedMore: it is called more often than before, and no search has looked for that.
        SomeSamples: it may have those of some samples.
        ValueError: it has more rows.
    """
    is_flattened, fact = layout.kind in FLATTENED, ""
    if not has_rows(x, layout, handle, batch_size):
        fact = f"got an input of shape {tuple(x.shape)} for a batch of {batch_size} samples"
    elif is_flattened and torch.is_grad_enabled():
        step = handle.private_step
        if step is None or step.is_in_forward:  # in backward checkpointing runs it again
            handle.calls += 1
        if handle.calls > max(handle.flattened, handle.sought):
            handle.sought = handle.calls
            raise UsedMore(handle.name)
        if handle.calls > handle.flattened:
            fact = f"is called more often for a batch of {batch_size} samples than before"
    if fact:  # no other code reads the name, which compiled code would be made for
        rows = x.shape[layout.dim] if x.dim() > layout.dim else batch_size
        fact = f"{handle.name or 'the network'} {fact}, and its samples were seen as {layout} in "
        fact += "an earlier batch"
        if is_flattened or rows < batch_size:
            raise SomeSamples(handle.name, fact)
        raise ValueError(f"{fact}: {CHANGED}")
