"""Detects changes of `.grad` by anything but private backwards, before noise is added."""

from collections.abc import Iterable
from operator import attrgetter, is_

from torch import Tensor
from torch.nn import Parameter

from dp_clipping.capture.network import CapturedNetwork
from dp_clipping.distributed.awaited import REMEDY
from dp_clipping.distributed.gradient_reduce import ShardedSums
from dp_clipping.distributed.placement import Piece
from dp_clipping.step.state import StepState
from dp_clipping.torch_compat import version_of

GRADIENT = attrgetter("grad")


class Passing:
    """A context around passes of a private step, in which a backward is one of the network's own.

    Attributes:
        depth: how many of these contexts are entered.
    """

    def __init__(self) -> None:
        self.depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


class GradientWatch:
    """Compares `.grad` of the trainable parameters with the sums of private backwards.

    Args:
        capture: the model's parameters.
        sums: takes clipped sums to the shards of a sharded network; None: it is not sharded.
        state: the state of the model's step.
        is_wrapped: a `ddp` wrapper sends what is in `.grad`.

    Attributes:
        passing: surrounds passes of a private step.
    """

    def __init__(
        self,
        capture: CapturedNetwork,
        sums: ShardedSums | None,
        state: StepState,
        is_wrapped: bool = False,
    ):
        self.capture, self.sums, self.state = capture, sums, state
        self._is_wrapped = is_wrapped or sums is not None
        self._forget()
        self._aside: list[tuple[Parameter, Tensor]] = []  # sums, for an ordinary backward
        self._unclipped: set[Parameter] = set()  # what autograd has added an ordinary one to
        self._own: set[Parameter] = set()  # those of them that the network has added itself
        self.passing = passing = Passing()
        unclipped, own = self._unclipped, self._own
        sharding = self.capture.sharding

        def add(parameter: Parameter) -> None:  # a hook that held this object would keep the model
            unclipped.add(parameter)
            if passing.depth:
                own.add(parameter)

        self._hooks = [p.register_post_accumulate_grad_hook(add) for p in self.capture.parameters]
        if sharding is not None:
            self._hooks += sharding.watch(add)

    def remove(self) -> None:
        """Removes the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()

    def begin(self) -> None:
        """Begins a private backward. Raises if `.grad` has changed since the last one."""
        self.refuse_unclipped()
        self._unclipped.clear()
        self._own.clear()

    def settle(self) -> None:
        """Allows changes of each gradient: noise has been added."""
        self._forget()
        if self.sums is not None:
            self.sums.settle()

    def set_aside(self) -> None:
        """Takes a batch's sums out of `.grad` between its parts, for an ordinary forward.

        Its backward may add to `.grad`. Where a wrapper or FSDP relies on them they stay.
        """
        if not self._is_wrapped and self.state.keeps_sums and not self._aside:
            held = list(zip(self._owners, self._tensors, strict=True))[: self._count]
            self._aside = [(p, g) for p, g in held if p.grad is g]
            for parameter, _ in self._aside:
                parameter.grad = None

    def take_back(self) -> None:
        """Puts the sums back into `.grad`, in place of what an ordinary backward has left there."""
        for parameter, gradient in self._aside:
            parameter.grad = gradient
            self._unclipped.discard(parameter)
        self._aside = []

    def clear(self) -> None:
        """Expects `.grad` to be empty."""
        self._aside = []
        self._unclipped.clear()
        self._own.clear()
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
        elif self._aside:
            self.take_back()
        if not is_noisy and (changed := self._changed()):
            raise RuntimeError(f"the gradient of {self._show(changed)} was changed {REMEDY}")

    def _refuse_added(self) -> None:
        """Raises RuntimeError if `.grad` holds what an ordinary backward has added to it."""
        unclipped = [p for p in self._unclipped if p.grad is not None]
        if own := [p for p in unclipped if p in self._own]:
            raise RuntimeError(
                f"{self._show(own)}: the network runs a backward of its own in that of the loss (a "
                "torch.autograd.Function that computes layers again, as reversible layers have), "
                "where no per-sample gradient is captured: freeze these parameters before "
                "make_private, or compute the layers again by torch.utils.checkpoint.checkpoint("
                "layer, x, use_reentrant=False)"
            )
        if not unclipped:
            self.take_back()
            return
        if self.state.keeps_sums and not self._aside:
            raise RuntimeError(
                f"an ordinary backward has added to the gradient of {self._show(unclipped)}, "
                "unclipped, between parts of a batch: freeze the network for it, with "
                "model.requires_grad_(False) before and model.requires_grad_(True) after it"
            )
        raise RuntimeError(
            f"an ordinary backward (a loss that is not the private criterion's, or a forward "
            f"after model.eval()) has added to the gradient of {self._show(unclipped)}, "
            "unclipped: call optimizer.zero_grad() after it, and model.train() before the "
            "private forward. The gradient g of a penalty on the weights is added after the "
            "noise: loss.backward(); optimizer.pre_step(); p.grad += g; optimizer.step()"
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
