"""Refuses changes of what a backward keeps, between its arrival and its use.

Autograd gives one gradient tensor to all branches that need it, and a hook or a backward on another
branch may write to it after a layer has delivered it. So the versions of all tensors that are kept
are noted on arrival, and compared before norms and before sums are formed.

`Tensor.data`, NumPy and kernels of other libraries write without a new version. So where the losses
of a batch are checked, values are noted and compared too, also between two backwards.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from dp_clipping.capture.checks.summaries import summary
from dp_clipping.layers.batch_layout import Layout
from dp_clipping.layers.recorder import Trainable
from dp_clipping.torch_compat import version_of
from dp_clipping.trials.seen import Summary, differ
from dp_clipping.trials.values import checksum, others


class Kept:
    """Refuses other versions, and in some steps other values, of the tensors that one step keeps.

    Attributes:
        reads_values: values are noted and compared too.
    """

    def __init__(self) -> None:
        self.reads_values = False
        self.forget()

    def forget(self) -> None:
        """Forgets what was noted."""
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
            if any(differ([pair], torch.ones(rows, dtype=torch.bool), [least])):
                return True
        return False

    def refuse_changed(
        self,
        noted: Iterable[tuple[tuple[Trainable, ...], tuple[Tensor, ...], tuple[int, ...]]],
        values: bool = True,
    ) -> None:
        """Raises RuntimeError if a tensor has changed since it was noted.

        Args:
            noted: parameters, the tensors of what is kept for them, and their versions then.
            values: their values were noted, too.
        """
        noted = list(noted)
        changed = [own for own, tensors, then in noted if then != tuple(map(version_of, tensors))]
        if self.reads_values and values and not changed:
            changed = self._others([one[:2] for one in noted])
        if changed:
            raise changed_in_place(dict.fromkeys(own[0].name for own in changed))

    def _others(
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
        flags = others((before for _, before, _ in pairs), (checksum(x) for _, _, x in pairs))
        return [own for (own, _, _), is_other in zip(pairs, flags, strict=True) if is_other]


def changed_in_place(names: Iterable[str]) -> RuntimeError:
    """Returns the error for parameters of whose layers a kept tensor has changed."""
    return RuntimeError(
        f"{', '.join(names)}: the gradient of its layer's output, or its input, was changed in "
        "place in backward after the layer had used it, so its clipped sum would not be that of "
        "its norm: in a hook, or in the backward of a torch.autograd.Function on another branch, "
        "return a new tensor, as return gradient * 2 in place of return gradient.mul_(2)"
    )


def _summaries(tensors: Iterable[Tensor]) -> list[Summary]:
    """Returns a summary of the rows of each tensor that has any, in full precision."""
    found = []
    for x in tensors:
        if x.dim() and len(x):
            with torch.autocast(x.device.type, enabled=False):
                found.append(summary(x, Layout(), len(x)))
    return found
