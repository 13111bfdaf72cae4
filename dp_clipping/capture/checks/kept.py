"""Compares values of what a backward keeps, where the losses of a batch are checked.

`Tensor.data`, NumPy and kernels of other libraries write without a new version, which every step
compares (`step.sums.backward_state.Kept`). Here values are noted on arrival, and compared before
norms and before sums are formed, also between two backwards.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from dp_clipping.capture.checks.summaries import summary
from dp_clipping.layers.batch_layout import Layout
from dp_clipping.layers.recorder import Trainable
from dp_clipping.trials.seen import Summary, differ
from dp_clipping.trials.tolerances import BESIDE, WHOLE
from dp_clipping.trials.values import checksum
from dp_clipping.trials.values import others as other_sums


class KeptValues:
    """The values of the tensors that one step keeps."""

    def __init__(self) -> None:
        self._values: dict[Trainable, list[Tensor]] = {}  # checksums
        self._arrived: dict[Trainable, tuple[str, list[Summary]]] = {}

    def note(self, record: Trainable, tensors: Iterable[Tensor]) -> None:
        """Notes the values of what is kept for a parameter from now on."""
        self._values[record] = list(map(checksum, tensors))

    def compare_backwards(self, record: Trainable, kind: str, tensors: Iterable[Tensor]) -> None:
        """Compares what arrives in the second one of two backwards with what did in the first.

        Raises:
            RuntimeError: the second one computes other values.
        """
        found = kind, _summaries(tensors)
        first = self._arrived.setdefault(record, found)
        if first is not found and self._is_other(*first, found[1]):
            raise RuntimeError(
                f"{record.name}: its layer got other output gradients, or other inputs, "
                "in the second backward of this mode than in the first one, of which the norms "
                "are: let no hook and no backward of a torch.autograd.Function depend on how often "
                'it runs, or give grad_sample_mode="bookkeeping", which runs one backward'
            )

    def _is_other(self, kind: str, first: list[Summary], second: list[Summary]) -> bool:
        """Returns whether a second backward brings other values; the host waits.

        A gradient that is rounding alone, as that of a key's bias, need not repeat itself. So what
        differs must do so beside the largest tensor of its kind in the whole backward, too.
        """
        for n, pair in enumerate(zip(first, second, strict=True)):
            rows, tolerance = pair[0].values.shape[0], pair[0].tolerance
            same = [values for k, values in self._arrived.values() if k is kind]
            alike = [values[n].values for values in same if len(values) > n]
            norms = torch.stack([x[:, -1].double() for x in alike if len(x) == rows])
            least = tolerance * norms.nan_to_num(0, 0, 0).amax(0)[:, None]
            if any(differ([pair], torch.ones(rows, dtype=torch.bool, device="cpu"), [least])):
                return True
        return False

    def others(
        self, noted: list[tuple[tuple[Trainable, ...], tuple[Tensor, ...]]]
    ) -> list[tuple[Trainable, ...]]:
        """Returns the parameters of what has other values than were noted; the host waits once.

        Of what a layer leaves for two, the first one has them.
        """
        pairs = [
            (own, before, tensor)
            for own, tensors in noted
            for before, tensor in zip(self._values.get(own[0], ()), tensors, strict=False)
        ]
        flags = other_sums((before for _, before, _ in pairs), (checksum(x) for _, _, x in pairs))
        return [own for (own, _, _), is_other in zip(pairs, flags, strict=True) if is_other]


def _summaries(tensors: Iterable[Tensor]) -> list[Summary]:
    """Returns a summary of the rows of each tensor that has any, in full precision.

    On a GPU kernels add in another order each time, as those of padding by reflection, and what is
    float32 here may be of numbers of 16 bit.
    """
    found = []
    for x in tensors:
        if x.dim() and len(x):
            with torch.autocast(x.device.type, enabled=False):
                one = summary(x, Layout(), len(x))
            is_inexact = x.is_cuda and one.tolerance != WHOLE
            found.append(one._replace(tolerance=BESIDE.two) if is_inexact else one)
    return found
