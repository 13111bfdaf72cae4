"""`sparse_embeddings=True`: exchanges those rows of an embedding's gradient that some rank used.

The problem with every variant so far: the token embedding's gradient is the last one, so nothing
hides its exchange. It is also large and nearly empty: with a vocabulary of 32,000 and 4,096 tokens
per rank at least 87 % of a rank's rows are zero.

The idea: which rows are used is known before the backward begins, from the token ids.

    mask      with the first bucket of a backward, each rank sends a mask of the rows that it looked
              up: one byte per row, combined by a maximum. It arrives during the backward
    pack      the gradient is final: the used rows [U, D] are copied into one buffer
    reduce    this buffer, as any bucket's
    unpack    the sums are copied back into `.grad`, whose other rows are zero on every rank

`.grad` stays dense, and the result is the same as without the option. It does not depend on luck: a
rank that cannot prove which rows its gradient has (ddp/internals/lookups.py) marks all, and where
more than half are marked the gradient is exchanged whole. All ranks see the same mask, so they
decide alike. Whole is: a weight that is tied to another layer, or used in another way in the first
step; one of several forwards of one backward; what is added to a gradient that was reduced or
zeroed in place (`zero_grad(set_to_none=False)`); private gradients. Gradients that accumulate
under `no_sync` are exchanged by rows, with those of all their forwards.

The number of used rows is read by the host when it launches this last bucket. The mask has left the
GPU a backward earlier: the host waits only if it is that far ahead, and the GPU never does.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import record_function

from ddp.base import DataParallel
from ddp.buckets import Bucket, Gradient, plan_buckets
from ddp.internals.lookups import Lookups
from ddp.internals.step import Record

UNPROVEN = (
    "sparse_embeddings=True: {name} has a gradient that does not come from one look-up of the "
    "nn.Embedding alone, as it did in the first step (a further use of the weight, or a hook that "
    "changes its gradient), and other ranks exchange the rows of tokens: wrap the network with "
    "sparse_embeddings=False"
)


@dataclass(frozen=True)
class Packed:
    """The used rows of a gradient: their numbers [U], and the buffer [U, D] that is reduced."""

    gradient: Tensor
    rows: Tensor
    buffer: Tensor


class SparseEmbeddings(DataParallel):
    """A variant with buckets, which can exchange the used rows of embeddings alone.

    Args:
        bucket_size_mb: see the variant.
        sparse_embeddings: exchange those rows of the gradient of an `nn.Embedding` that some rank
            looked up, where this is less than half of them. `.grad` stays dense.
    """

    options = (*DataParallel.options, "bucket_size_mb", "sparse_embeddings")

    def __init__(self, module: nn.Module, *, sparse_embeddings: bool = False, **options):
        self._wanted = sparse_embeddings
        self._lookups: dict[int, Lookups] = {}  # gradient -> what is known of its rows
        self._is_agreed = False  # since the end of the first step: which weights they are
        self._observed: Record | None = None  # the first step, of which the first round decides
        self._promised: dict[int, bool] = {}
        self._proven: dict[int, bool] = {}
        self._mask: UsedRows | None = None
        self._packed: dict[Bucket, Packed] = {}
        super().__init__(module, **options)
        if self._wanted:  # a subclass with a plan of its own, which knows nothing of embeddings
            raise TypeError(f"{type(self).__name__} has no option sparse_embeddings: leave it out")

    def plan_with_embeddings(
        self, gradients: list[Gradient], order: list[int], bucket_bytes: int | None
    ) -> list[Bucket]:
        """Returns a plan in which each embedding that may be sparse has a bucket of its own."""
        if self._wanted:  # the first plan
            self._wanted, index = False, self.gradients.index
            weights = [weight for weight in embeddings_of(self.module) if weight in index]
            self._lookups = {index[weight]: Lookups(weight) for weight in weights}
        return plan_buckets(gradients, order, bucket_bytes, alone=self._lookups)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._observing():
            return super().forward(*args, **kwargs)

    def after_accumulation(self, i: int) -> None:
        if i in self._lookups:
            self._lookups[i].accumulated()
        super().after_accumulation(i)

    def may_be_sparse(self, i: int) -> bool:
        """Returns whether gradient `i` stays where autograd left it until it is launched."""
        return i in self._lookups

    def pack(self, bucket: Bucket) -> Tensor | None:
        """Returns the used rows of the bucket's gradient in one flat buffer; None: all of it.

        Called for each bucket when it is launched.
        """
        if bucket is self.schedule.buckets[0]:
            self._begin_round()
        i = bucket.members[0]
        if i not in self._lookups:
            return None
        is_kept = self._lookups[i].settle()
        if not self._is_agreed:
            self._proven.setdefault(i, self._promised[i] and is_kept)
            return None
        rows = self._mask.rows(i)
        if rows is None:
            return None
        if not is_kept:
            raise RuntimeError(UNPROVEN.format(name=self.gradients.name(i)))
        gradient = self.gradient(i)
        buffer = self.allocate_rows(bucket, len(rows) * gradient[0].numel())
        packed = Packed(gradient, rows, buffer.view(len(rows), *gradient.shape[1:]))
        torch.index_select(gradient, 0, rows, out=packed.buffer)
        self._packed[bucket] = packed
        return buffer

    def unpack(self, bucket: Bucket) -> None:
        """Copies reduced rows back, if the bucket was packed."""
        if (packed := self._packed.pop(bucket, None)) is not None:
            packed.gradient.index_copy_(0, packed.rows, packed.buffer)

    def allocate_rows(self, bucket: Bucket, numel: int) -> Tensor:
        """Returns an uninitialised buffer for rows of the bucket's gradient."""
        gradient = self.gradient(bucket.members[0])
        return gradient.new_empty(numel)

    def agree(self) -> None:
        """Keeps, at the end of the first step, those embeddings that were sparse on every rank."""
        if not self._is_agreed and self._lookups:
            device = self.gradients.parameters[0].device
            proven = [self._proven.get(i, False) for i in self._lookups]
            flags = torch.tensor(proven, dtype=torch.uint8, device=device)
            dist.all_reduce(flags, op=dist.ReduceOp.MIN, group=self.process_group)
            for i, is_proven in zip(list(self._lookups), flags.tolist(), strict=True):
                if not is_proven:
                    self._lookups.pop(i).close()
        self._is_agreed = True

    def _begin_round(self) -> None:
        """Sends the mask; in the first step, notes what could have been promised."""
        promises = {i: lookups.promise() for i, lookups in self._lookups.items()}
        if not self._is_agreed:
            if self._observed is not self.step.record:  # an earlier one was discarded
                self._observed, self._proven = self.step.record, {}
            self._promised = {i: mask is not None for i, mask in promises.items()}
        elif promises:
            masks = {
                i: self._lookups[i].mask(fill=1) if mask is None or self.step.by_hand else mask
                for i, mask in promises.items()
            }
            self._mask = UsedRows(masks, self.process_group)
            self.count(collectives=1, nbytes=self._mask.nbytes)
            self.step.record.noted += self._mask.nbytes  # it belongs to no bucket

    @contextmanager
    def _observing(self) -> Iterator[None]:
        """Registers hooks for one forward only: networks are pickled and copied without them."""
        with ExitStack() as hooks:
            for lookups in self._lookups.values() if torch.is_grad_enabled() else ():
                for module in embeddings_of(self.module).get(lookups.weight, ()):
                    hook = module.register_forward_hook(lookups.observe, with_kwargs=True)
                    hooks.callback(hook.remove)
            yield


class UsedRows:
    """The rows of some gradients that any rank uses, on their way to all ranks.

    On a GPU what follows the all-reduce runs on a side stream, which alone waits for other ranks.
    """

    def __init__(self, masks: dict[int, Tensor], group: dist.ProcessGroup):
        self._places = {i: place for place, i in enumerate(masks)}
        self._sizes = [len(mask) for mask in masks.values()]
        self._flat = torch.cat(list(masks.values()))
        self.nbytes = self._flat.nbytes
        self._work = dist.all_reduce(self._flat, op=dist.ReduceOp.MAX, group=group, async_op=True)
        self._counts: list[int] = []  # once it has arrived
        self._event: Any = None
        if self._flat.is_cuda:
            self._arrive_on_side_stream()

    def rows(self, i: int) -> Tensor | None:
        """Returns the used rows of gradient `i`, in order; None if they are more than half."""
        if not self._counts:
            self._arrive()
        place = self._places[i]
        count, size = max(1, self._counts[place]), self._sizes[place]
        return self._sorted[place][:count] if 2 * count <= size else None

    def _arrive(self) -> None:
        if self._flat.is_cuda:
            self._event.synchronize()  # recorded a backward ago
            torch.cuda.current_stream().wait_event(self._event)
        else:
            self._work.wait()
            self._host_counts = self._sort()
        self._counts = self._host_counts.tolist()

    def _arrive_on_side_stream(self) -> None:
        stream = _side_stream(self._flat.device)
        stream.wait_stream(torch.cuda.current_stream())
        self._flat.record_stream(stream)
        with torch.cuda.stream(stream):
            self._work.wait()  # holds this stream, not the host
            with record_function("communication: used rows"):
                counts = self._sort()
                self._host_counts = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
                self._host_counts.copy_(counts, non_blocking=True)
            self._event = stream.record_event()

    def _sort(self) -> Tensor:
        """Sorts row numbers, used ones first; returns how many are used."""
        masks = self._flat.split(self._sizes)
        self._sorted = [mask.argsort(descending=True, stable=True) for mask in masks]
        return torch.stack([mask.sum() for mask in masks])


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


def embeddings_of(module: nn.Module) -> dict[nn.Parameter, list[nn.Module]]:
    """Returns the weights that belong to embeddings alone, of dense gradients, and these."""
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            owners.setdefault(parameter, []).append(part)
    return {
        parameter: parts
        for parameter, parts in owners.items()
        if all(isinstance(part, nn.Embedding) and not part.sparse for part in parts)
    }
