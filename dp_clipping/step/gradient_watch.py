"""Detects changes of `.grad` by anything but private backwards, before noise is added."""

from collections.abc import Iterable
from operator import attrgetter, is_

from torch import Tensor
from torch.nn import Parameter

from dp_clipping.capture.network import CapturedNetwork
from dp_clipping.distributed.gradient_reduce import REMEDY, ShardedSums
from dp_clipping.distributed.placement import Piece
from dp_clipping.step.state import StepState
from dp_clipping.torch_compat import version_of

GRADIENT = attrgetter("grad")


class GradientWatch:
    """Compares `.grad` of the trainable parameters with the sums of private backwards.

    Args:
        capture: the model's parameters.
        sums: takes clipped sums to the shards of a sharded network; None: it is not sharded.
        state: the state of the model's step.
    """

    def __init__(self, capture: CapturedNetwork, sums: ShardedSums | None, state: StepState):
        self.capture, self.sums, self.state = capture, sums, state
        self._forget()
        self._unclipped: set[Parameter] = set()  # what autograd has added an ordinary one to
        add = self._unclipped.add  # a hook that held this object would keep the model
        self._hooks = [p.register_post_accumulate_grad_hook(add) for p in capture.parameters]
        if capture.sharding is not None:
            self._hooks += capture.sharding.watch(add)

    def remove(self) -> None:
        """Removes the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()

    def begin(self) -> None:
        """Begins a private backward. Raises if `.grad` has changed since the last one."""
        self.refuse_unclipped()
        self._unclipped.clear()

    def settle(self) -> None:
        """Allows changes of each gradient: noise has been added."""
        self._forget()
        if self.sums is not None:
            self.sums.settle()

    def clear(self) -> None:
        """Expects `.grad` to be empty."""
        self._unclipped.clear()
        self._forget()

    def _forget(self) -> None:
        self._owners: list[Parameter] = []  # of the tensors
        self._tensors: list[Tensor] = []  # gradients, and the pieces of sums that this rank has
        self._versions: list[int] = []  # of the tensors
        self._count = 0  # of the gradients among them

    def note(self, pieces: list[Piece] | None = None) -> None:
        """Expects `.grad` to stay as it is until the next backward or the step.

        For a sharded network this is noted when its sums arrive.

        Args:
            pieces: this rank's parts of the sums, where `.grad` only stands for them.
        """
        if self.sums is None and self.state.is_open:
            owners = [p for p in self.capture.parameters if p.grad is not None]
            tensors, self._count = list(map(GRADIENT, owners)), len(owners)
            for parameter, *_, piece in pieces or ():
                owners.append(parameter)
                tensors.append(piece)
            self._owners, self._tensors = owners, tensors
            self._versions = list(map(version_of, tensors))

    def refuse_unclipped(self, is_noisy: bool = False) -> None:
        """Raises RuntimeError if `.grad` was changed since the last private backward.

        In private training autograd accumulates nothing into a trainable parameter. Sums may not be
        changed before noise is added, because the noise is scaled to the clipping threshold.
        """
        if self._unclipped:
            self._refuse_added()
        if not is_noisy and (changed := self._changed()):
            raise RuntimeError(f"the gradient of {self._show(changed)} was changed {REMEDY}")

    def _refuse_added(self) -> None:
        """Raises RuntimeError if `.grad` holds what an ordinary backward has added to it."""
        added = [p for p in self._unclipped if p.grad is not None]
        if not added:
            return
        if self.state.keeps_sums:
            cure = (
                "between parts of a batch freeze the network for it, with "
                "model.requires_grad_(False) before and model.requires_grad_(True) after it"
            )
        else:
            cure = (
                "call optimizer.zero_grad() after it, and model.train() before the private "
                "forward. The gradient g of a penalty on the weights is added after the noise: "
                "loss.backward(); optimizer.pre_step(); p.grad += g; optimizer.step()"
            )
        raise RuntimeError(
            "an ordinary backward (a loss that is not the private criterion's, a forward after "
            "model.eval(), or one that the network runs in its own, as reversible layers do: let "
            "checkpoint(block, x, use_reentrant=False) run their block) has added to the "
            f"gradient of {self._show(added)}, unclipped: {cure}"
        )

    def _changed(self) -> list[Parameter]:
        """Returns the parameters whose `.grad` is another tensor or version than was noted."""
        if self.sums is not None:
            changed = self.sums.changed()
            return [p for p in changed if self.state.is_open or p.grad is not None]
        now, gradients = list(map(version_of, self._tensors)), self._tensors[: self._count]
        if now == self._versions and all(map(is_, map(GRADIENT, self._owners), gradients)):
            return []
        replaced = [p for p, g in zip(self._owners, gradients, strict=False) if p.grad is not g]
        both = zip(self._owners, now, self._versions, strict=True)
        return list(dict.fromkeys(replaced + [p for p, version, then in both if version != then]))

    def _show(self, parameters: Iterable[Parameter]) -> str:
        return ", ".join(sorted(self.capture.names[p] for p in parameters)[:5])
