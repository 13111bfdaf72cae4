"""Holds clipped sums in `.grad` of a private model, from one `zero_grad` to the next.

    after            `.grad` holds
    clear            nothing, and may become float32
    begin_backward   what it held, and was checked
    accumulate       Σ_i c_i G_i of this rank, parameter by parameter; each is sent at once
    end_backward     the same, for all parameters
    finish           (this rank's shard of) the sum of all ranks
    apply            that sum with noise, in the parameter's own dtype

`watch` detects other changes of `.grad`, `parameters` those that were replaced, frozen or given
hooks; `hooks` has users' own.

Sums come from a private step and go to the optimizer. A step may have several backwards. Under the
wrapper's `no_sync`, sums stay on their rank until a backward outside of it, or `finish`, sends
them.
"""

from collections.abc import Iterable
from operator import attrgetter, is_

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from dp_clipping.capture.network import CapturedNetwork
from dp_clipping.capture.unchanged import UnchangedParameters
from dp_clipping.clipping.accumulation import accumulation_dtype
from dp_clipping.distributed.gradient_reduce import REMEDY, ShardedSums
from dp_clipping.distributed.placement import Piece
from dp_clipping.layers.recorder import Trainable
from dp_clipping.step.context import StepContext
from dp_clipping.step.gradient_hooks import GradientHooks
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
            "model.eval() or model.compile(), or one that the network runs in its own, as "
            "reversible layers do: let checkpoint(block, x, use_reentrant=False) run their block) "
            f"has added to the gradient of {self._show(added)}, unclipped: {cure}"
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


class GradientBuffer:
    """Owns `.grad` of the trainable parameters of one private model.

    Args:
        context: the model's parameters, and what takes clipped sums to their shards.
        state: the state of the model's step.
        wrapper: the `ddp` wrapper, which receives each sum; None: there is none.

    Attributes:
        parameters: raises if one was frozen, replaced or given a hook.
        hooks: calls users' hooks on parameters.
        watch: raises if `.grad` is not the sum of private backwards.
    """

    def __init__(self, context: StepContext, state: StepState, wrapper: nn.Module | None):
        self.context, self.state, self.wrapper = context, state, wrapper
        self.capture = context.capture
        is_divided = context.sums is not None or hasattr(wrapper, "gradient_pieces")
        is_wrapped = wrapper is not None or context.sums is not None
        self.hooks = GradientHooks(context.capture, is_wrapped, is_divided)
        dtypes = [(p, accumulation_dtype(p.dtype)) for p in self.capture.parameters]
        self._narrow = [(p, dtype) for p, dtype in dtypes if p.dtype != dtype]
        if wrapper is not None:
            self._before = wrapper.reduce, wrapper.gradient_dtype
            wrapper.reduce = "sum"
            wrapper.gradients_come_by_hand = True
            # A user may call it before optimizer.step(), and it changes `.grad` as it should.
            self._finish_wrapper = wrapper.finish_gradient_synchronization
            wrapper.finish_gradient_synchronization = self._finish_by_wrapper
            if context.departures is not None:
                context.departures.send = wrapper.gradient_ready
        self._widen()
        self.watch = GradientWatch(context.capture, context.sums, state)
        self.parameters = UnchangedParameters(context.capture, is_wrapped)

    def remove(self) -> None:
        """Detaches the buffer: autograd and the wrapper fill `.grad` again, as before.

        Raises:
            RuntimeError: sums of 16-bit parameters are on their way: finish or drop the step first.
        """
        self.watch.remove()
        self.hooks.remove()
        if self.wrapper is not None:
            self.wrapper.reduce, self.wrapper.gradient_dtype = self._before
            self.wrapper.gradients_come_by_hand = False
            vars(self.wrapper).pop("finish_gradient_synchronization", None)

    def begin_backward(self) -> None:
        """Checks that a backward may add its sums.

        Raises:
            RuntimeError: an ordinary backward has added to `.grad`, or parameters were frozen,
                unfrozen or given hooks.
            ValueError: the last step's gradients are still there.
        """
        self.parameters.check()
        self.watch.begin()
        if self.state.is_open:
            return
        if any([p.grad is not None for p in self.capture.parameters]):
            raise ValueError(
                "gradients of the last step are still there: call optimizer.zero_grad() after "
                "optimizer.step(), or they would be used twice"
            )
        if self.state.norms:  # no `zero_grad` since: `fused_step=True` leaves no gradients
            self._widen()

    def accumulate(self, sums: Iterable[tuple[Trainable, Tensor | None]]) -> None:
        """Adds clipped sums to `.grad` in float32 (float64) and sends them; None means zeros."""
        shards, departures, wrapper = self.context.sums, self.context.departures, self.wrapper
        for one, total in sums:
            parameter, shape, dtype = one.parameter, one.shape, one.sum_dtype
            if total is None:
                total = torch.zeros(shape, dtype=dtype, device=parameter.device)
            elif total.shape != shape or total.dtype != dtype:
                total = total.to(dtype).view(shape)
            if shards is not None:
                shards.accumulate(parameter, total)
            elif parameter.grad is None:
                parameter.grad = total
            else:
                if wrapper is not None:
                    wrapper.before_gradient(parameter)
                parameter.grad.add_(total)
            if departures is not None:
                departures.ready(parameter)
            elif wrapper is not None:
                wrapper.gradient_ready(parameter)

    def accumulate_zeros(self) -> None:
        """Adds zeros for all parameters."""
        # Backwards, as a backward would: rank 0's first order becomes that of the buckets.
        self.accumulate([(one, None) for one in reversed(self.capture.trained)])

    def accumulate_zeros_of(self, sums: Iterable[tuple[Trainable, Tensor | None]]) -> None:
        """Adds zeros for the same parameters in place of their sums."""
        self.accumulate([(one, None) for one, _ in sums])

    def end_backward(self) -> None:
        """Records whether sums stay on this rank; called where `no_sync` still holds."""
        self.state.held_back = self.wrapper is not None and not _sends(self.wrapper)
        self.watch.note()
        if self.context.sums is not None:
            self.context.sums.stand_in()

    def finish(self) -> None:
        """Waits for the sums of all ranks; sends those that `no_sync` held back.

        Raises:
            RuntimeError: under `no_sync`, or a parameter has no sum, as after a backward that was
                cut off.
        """
        self.watch.refuse_unclipped(is_noisy=not self.state.is_open)
        if self.state.held_back:
            self._send()
        if self.context.sums is not None:
            self.context.sums.finish()
        elif self.wrapper is not None:
            self._finish_wrapper()
            self.watch.note(self.pieces())
        self.state.held_back = False

    def pieces(self) -> list[Piece] | None:
        """Returns this rank's parts of the sums where the wrapper divides them among the ranks.

        None: `.grad` holds whole sums, or those of a shard.
        """
        pieces_of = getattr(self.wrapper, "gradient_pieces", None)
        return None if pieces_of is None else pieces_of()

    def _finish_by_wrapper(self) -> None:
        """Runs the wrapper's own finish, which a user has called."""
        self.watch.refuse_unclipped(is_noisy=not self.state.is_open)
        self._finish_wrapper()
        self.watch.note(None if self.state.held_back else self.pieces())

    def _send(self) -> None:
        if not _sends(self.wrapper):
            raise RuntimeError(
                "optimizer.step() under no_sync(): ranks would train on different sums: call it "
                "outside"
            )
        for parameter in reversed(self.capture.parameters):
            self.wrapper.gradient_ready(parameter)

    def apply(self, noisy: Iterable[tuple[Parameter, Tensor]]) -> None:
        """Sets `.grad` to what the optimizer applies, in the parameter's own dtype.

        `noisy`: parameters with the gradients that take the place of `.grad`, of a DTensor this
        rank's part.
        """
        sharding = self.capture.sharding
        for parameter, gradient in noisy:
            parameter.grad = None
            parameter.grad_dtype = parameter.dtype
            parameter.grad = gradient if sharding is None else sharding.like(parameter, gradient)

    def drop(self, parameters: Iterable[Parameter]) -> None:
        """Drops the sums of parameters that have been updated with them."""
        for parameter in parameters:
            parameter.grad = None
            parameter.grad_dtype = parameter.dtype

    def clear(self) -> None:
        """Drops all sums; `.grad` may become float32 again."""
        self.watch.clear()
        if self.context.sums is not None:
            self.context.sums.forget()
        if self.context.departures is not None:
            self.context.departures.forget()
        for parameter in self.capture.parameters:
            parameter.grad = None
        self._widen()

    def _widen(self) -> None:
        """Makes `.grad` of 16-bit parameters float32 until noise has been added."""
        for parameter, dtype in self._narrow:
            if parameter.grad is None:
                parameter.grad_dtype = dtype
        if self._narrow and self.wrapper is not None:
            self.wrapper.gradient_dtype = torch.float32


def _sends(wrapper: nn.Module) -> bool:
    """Returns whether the wrapper's next backward reduces: not under its `no_sync`."""
    return getattr(wrapper, "require_backward_grad_sync", True)
