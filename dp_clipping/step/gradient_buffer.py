"""What `.grad` of a private model holds, from one `zero_grad` to the next.

    clear            nothing, and room for float32
    begin_backward   checked: it may be added to
    accumulate       Σ_i c_i G_i of this rank, one parameter after the other; each leaves at once
    end_backward     of this backward all are there
    finish           (this rank's shard of) the sum of all ranks
    apply            that with noise, in the parameter's own dtype
    settle           the optimizer may use it

Sums come from a private step and go to the optimizer; nothing goes back. A step may have several
backwards. Under the wrapper's `no_sync` sums stay on their rank, until a backward outside of it or
`finish` lets them leave.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from dp_clipping.capture.network import every_module
from dp_clipping.clipping.accumulation import accumulation_dtype
from dp_clipping.distributed.dtensor import local
from dp_clipping.step.context import StepContext
from dp_clipping.step.state import StepState
from dp_clipping.torch_compat import own_parameters, version_of

Own = dict[str, Parameter]
NOTHING: Own = {}


class GradientBuffer:
    """`.grad` of the trainable parameters of one private model.

    Args:
        context: the model's parameters, and what takes clipped sums to their shards.
        state: of the model's step.
        wrapper: the `ddp` wrapper, which is told of each sum; None: there is none.
    """

    def __init__(self, context: StepContext, state: StepState, wrapper: nn.Module | None):
        self.context, self.state, self.wrapper = context, state, wrapper
        self.capture = capture = context.capture
        self.network = network = context.network
        # Between forward and backward FSDP has other objects in the place of these.
        self._parameters = dict(network.named_parameters())
        self._trainable = {name for name, p in self._parameters.items() if p.requires_grad}
        self._flags = [(p, p.requires_grad) for p in self._parameters.values()]
        self._dtypes = {p: p.dtype for p in capture.parameters}
        self._own = {m: _trainable(m) for m in every_module(network)}
        self._left: dict[Parameter, tuple[Tensor, int]] = {}  # `.grad` and its version
        if wrapper is not None:
            self._before = wrapper.reduce, wrapper.gradient_dtype
            wrapper.reduce = "sum"
            wrapper.gradients_come_by_hand = True
            # A user may call it before optimizer.step(), and it changes `.grad` as it should.
            self._finish_wrapper = wrapper.finish_gradient_synchronization
            wrapper.finish_gradient_synchronization = self._finish_by_wrapper
        self._widen()
        self._unclipped: set[Parameter] = set()  # what autograd has added an ordinary one to
        note = self._unclipped.add
        self._hooks = [p.register_post_accumulate_grad_hook(note) for p in capture.parameters]
        if capture.sharding is not None:
            self._hooks += capture.sharding.watch(note)

    def remove(self) -> None:
        """Let autograd and the wrapper fill `.grad` again, as it did before.

        Raises:
            RuntimeError: sums of 16-bit parameters are on their way: finish or drop the step first.
        """
        for hook in self._hooks:
            hook.remove()
        if self.wrapper is not None:
            self.wrapper.reduce, self.wrapper.gradient_dtype = self._before
            self.wrapper.gradients_come_by_hand = False
            vars(self.wrapper).pop("finish_gradient_synchronization", None)

    # ---- a backward -----------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Let a backward add its sums.

        Raises:
            RuntimeError: an ordinary backward has added to `.grad`, or parameters were frozen or
                unfrozen.
            ValueError: the last step's gradients are still there.
        """
        self._refuse_replaced()
        self.refuse_unclipped()
        self._unclipped.clear()
        if not self.state.is_open and any(p.grad is not None for p in self.capture.parameters):
            raise ValueError(
                "gradients of the last step are still there: call optimizer.zero_grad() after "
                "optimizer.step(), or they would be used twice"
            )

    def accumulate(self, parameter: Parameter, total: Tensor | None) -> None:
        """Add a clipped sum to `.grad`, in float32 (float64), and let it leave; None: zeros."""
        shape, dtype = self.capture.shapes[parameter], accumulation_dtype(parameter.dtype)
        if total is None:
            total = torch.zeros(shape, dtype=dtype, device=parameter.device)
        total = total.to(dtype).view(shape)
        if self.context.sums is not None:
            self.context.sums.accumulate(parameter, total)
            return
        if parameter.grad is None:
            parameter.grad = total
        else:
            if self.wrapper is not None:
                self.wrapper.before_gradient(parameter)
            parameter.grad.add_(total)
        if self.wrapper is not None:
            self.wrapper.gradient_ready(parameter)

    def accumulate_zeros(self) -> None:
        """Zeros for all parameters."""
        # Backwards, as a backward would: rank 0's first order becomes that of the buckets.
        for parameter in reversed(self.capture.parameters):
            self.accumulate(parameter, None)

    def end_backward(self) -> None:
        """Called where `no_sync` still holds, if it does."""
        self.state.held_back = self.wrapper is not None and not _sends(self.wrapper)
        self.note()

    def note(self) -> None:
        """`.grad` is as it shall be until the next backward, or the step.

        Sums of a sharded network note themselves, each when it arrives.
        """
        if self.context.sums is None and self.state.is_open:
            held = [(p, p.grad) for p in self.capture.parameters]
            self._left = {p: (g, version_of(g)) for p, g in held if g is not None}

    def _changed(self) -> list[Parameter]:
        """Parameters whose `.grad` is not the tensor, or not of the version, that was left."""
        if self.context.sums is not None:
            changed = self.context.sums.changed()
            return [p for p in changed if self.state.is_open or p.grad is not None]
        return [p for p, (g, version) in self._left.items()
                if p.grad is not g or version_of(g) != version]  # fmt: skip

    def refuse_unclipped(self, is_noisy: bool = False) -> None:
        """Raises RuntimeError if `.grad` is not as private backwards have left it.

        In private training autograd accumulates nothing into a trainable parameter. Until they are
        noisy, sums may not be changed at all: noise is scaled to what was clipped.
        """
        unclipped = [p for p in self._unclipped if p.grad is not None]
        if unclipped:
            raise RuntimeError(
                f"an ordinary backward (a loss that is not the private criterion's, or a forward "
                f"after model.eval()) has added to the gradient of {self._show(unclipped)}, "
                "unclipped: call optimizer.zero_grad() after it, and model.train() before the "
                "private forward"
            )
        if not is_noisy and (changed := self._changed()):
            raise RuntimeError(
                f"the gradient of {self._show(changed)} was changed between backward() and "
                "optimizer.step(), and the noise is scaled to the sum as it was: to clip or scale "
                "it, call optimizer.pre_step() first, then clip_grad_norm_(..) and "
                "optimizer.step(); if it was zeroed, or an ordinary backward has added to it, call "
                "optimizer.zero_grad() to drop the step"
            )

    def _show(self, parameters: Iterable[Parameter]) -> str:
        return ", ".join(sorted(self.capture.names[p] for p in parameters)[:5])

    def _refuse_replaced(self) -> None:
        """Raises RuntimeError if trainable parameters are others than when the model was made.

        Which are trainable, and which tensors they are: what is clipped and gets noise, and what
        the optimizer moves, was settled then.
        """
        for parameter, dtype in self._dtypes.items():
            if parameter.dtype != dtype:
                raise RuntimeError(
                    f"{self.capture.names[parameter]} was {dtype} at make_private and is "
                    f"{parameter.dtype} now: convert the network before make_private"
                )
        own = self._own
        flags_hold = all(p.requires_grad == flag for p, flag in self._flags)
        now = {m: _trainable(m) for m in every_module(self.network)}
        if (
            flags_hold
            and all(self._same(own.get(m, NOTHING), now[m]) for m in now)
            and all(m in now for m, names in own.items() if names)
        ):
            return
        named = dict(self.network.named_parameters())
        changed = {
            name: "trainable" if p.requires_grad else "frozen"
            for name, p in (named | self._parameters).items()
            if p.requires_grad != (name in self._trainable)
        }
        if changed:
            names = ", ".join(f"{name} ({now} now)" for name, now in list(changed.items())[:5])
            raise RuntimeError(
                f"{names}: freeze and unfreeze before make_private; afterwards set the learning "
                "rate of a parameter group to 0, or use to_standard_module() and make it private "
                "again"
            )
        replaced = [
            name for name in sorted(self._trainable)
            if not self._stands_for(named.get(name), self._parameters[name])
        ]  # fmt: skip
        if replaced:
            raise RuntimeError(
                f"{', '.join(replaced[:5])} of the network is another tensor than at make_private "
                "(load_state_dict(assign=True)? a new module?), which the optimizer does not move: "
                "load without assign=True, or change the network before make_private"
            )

    def _same(self, before: Own, now: Own) -> bool:
        if before.keys() != now.keys():
            return False
        return all(
            p is before[name] or self._stands_for(p, before[name]) for name, p in now.items()
        )

    def _stands_for(self, now: Tensor | None, before: Parameter) -> bool:
        """Whether what is in a parameter's place is it, or what FSDP has put there meanwhile."""
        sharding = self.capture.sharding
        return now is before or (sharding is not None and sharding.stands_for(now, before))

    # ---- the step -------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait for the sums of all ranks; those that `no_sync` held back leave now.

        Raises:
            RuntimeError: under `no_sync`, or a parameter has no sum, as after a backward that was
                cut off.
        """
        self.refuse_unclipped(is_noisy=not self.state.is_open)
        if self.state.held_back:
            self._send()
        if self.context.sums is not None:
            self.context.sums.finish()
        elif self.wrapper is not None:
            self._finish_wrapper()
        self.note()
        self.state.reduce()

    def _finish_by_wrapper(self) -> None:
        """The wrapper's own, called by a user."""
        self.refuse_unclipped(is_noisy=not self.state.is_open)
        self._finish_wrapper()
        self.note()

    def _send(self) -> None:
        if not _sends(self.wrapper):
            raise RuntimeError(
                "optimizer.step() under no_sync(): ranks would go on with different sums, so call "
                "it outside"
            )
        for parameter in reversed(self.capture.parameters):
            self.wrapper.gradient_ready(parameter)

    def apply(self, parameter: Parameter, gradient: Tensor) -> None:
        """Let `.grad` be what the optimizer applies, in the parameter's own dtype.

        `gradient`: of a DTensor, this rank's part; it may be what `.grad` holds, changed in place.
        """
        if parameter.grad is not None and local(parameter.grad) is gradient:
            return
        if self.capture.sharding is not None:
            gradient = self.capture.sharding.like(parameter, gradient)
        parameter.grad = None
        parameter.grad_dtype = parameter.dtype
        parameter.grad = gradient

    def settle(self) -> None:
        """Each gradient is what the optimizer applies; a user may change it."""
        self._left = {}

    def clear(self) -> None:
        """Drop what there is; sums may come in float32 again."""
        self._unclipped.clear()
        self._left = {}
        if self.context.sums is not None:
            self.context.sums.forget()
        for parameter in self.capture.parameters:
            parameter.grad = None
        self._widen()

    def _widen(self) -> None:
        """`.grad` of 16-bit parameters is float32 until noise is in it."""
        narrow = [p for p in self.capture.parameters if p.dtype != accumulation_dtype(p.dtype)]
        for parameter in narrow:
            if parameter.grad is None:
                parameter.grad_dtype = accumulation_dtype(parameter.dtype)
        if narrow and self.wrapper is not None:
            self.wrapper.gradient_dtype = torch.float32


def _trainable(module: nn.Module) -> Own:
    """Its own parameters that are trainable, by name."""
    own = own_parameters(module)
    if not own:
        return NOTHING
    return {name: p for name, p in own.items() if p is not None and p.requires_grad}


def _sends(wrapper: nn.Module) -> bool:
    """Returns whether the wrapper's next backward reduces: not under its `no_sync`."""
    return getattr(wrapper, "require_backward_grad_sync", True)
