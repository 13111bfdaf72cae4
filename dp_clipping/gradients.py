"""What `.grad` of a private model holds, from one `zero_grad` to the next.

    clear            nothing, and room for float32
    begin_backward   a step is open
    receive          Σ_i c_i G_i of this rank, one parameter after the other; each leaves at once
    end_backward     of this backward all are there
    finish           (this rank's shard of) the sum of all ranks
    apply            that with noise, in the parameter's own dtype
    close_step       the optimizer may use it

Sums come from a session and go to the optimizer; nothing goes back. A step may have several
backwards. Under the wrapper's `no_sync` sums stay on their rank, until a backward outside of it or
`finish` lets them leave.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from dp_clipping.capture import Capture
from dp_clipping.layers.arithmetic import wide
from dp_clipping.modules import every_module
from dp_clipping.sharded import local

NOTHING: frozenset[str] = frozenset()


class Gradients:
    """`.grad` of the trainable parameters of one private model.

    Args:
        network: the bare network.
        capture: its parameters, and what takes clipped sums to the shards of a sharded one.
        wrapper: the `ddp` wrapper, which is told of each sum; None: there is none.

    Attributes:
        step_is_open: sums were added since the last step.
        limits: C_k of each clipping group, in the step that is open or was last.
    """

    def __init__(self, network: nn.Module, capture: Capture, wrapper: nn.Module | None):
        self.network, self.capture, self.wrapper = network, capture, wrapper
        self.step_is_open = False
        self.limits: list[float]
        self._is_held_back = False  # `.grad` holds sums that no_sync() kept on this rank
        # Between forward and backward FSDP has other objects in the place of these.
        self._parameters = dict(network.named_parameters())
        self._trainable = {name for name, p in self._parameters.items() if p.requires_grad}
        self._flags = [(p, p.requires_grad) for p in self._parameters.values()]
        self._own = {m: _trainable_names(m) for m in every_module(network)}
        if wrapper is not None:
            self._before = wrapper.reduce, wrapper.gradient_dtype
            wrapper.reduce = "sum"
            wrapper.gradients_come_by_hand = True
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

    # ---- a backward -----------------------------------------------------------------------------

    def begin_backward(self, limits: Callable[[], list[float]]) -> None:
        """Open a step, if none is; only then its `limits` are asked for.

        Raises:
            RuntimeError: an ordinary backward has added to `.grad`, or parameters were frozen or
                unfrozen.
            ValueError: the last step's gradients are still there.
        """
        self.refuse_unclipped()
        self._unclipped.clear()
        if self.step_is_open:
            return
        if any(p.grad is not None for p in self.capture.parameters):
            raise ValueError(
                "gradients of the last step are still there: call optimizer.zero_grad() after "
                "optimizer.step(), or they would be used twice"
            )
        self._refuse_thawed()
        self.limits = limits()
        self.step_is_open = True

    def receive(self, parameter: Parameter, total: Tensor | None) -> None:
        """Add a clipped sum to `.grad`, in float32 (float64), and let it leave; None: zeros."""
        shape, dtype = self.capture.shapes[parameter], wide(parameter.dtype)
        if total is None:
            total = torch.zeros(shape, dtype=dtype, device=parameter.device)
        total = total.to(dtype).view(shape)
        if self.capture.sums is not None:
            self.capture.sums.receive(parameter, total)
            return
        if parameter.grad is None:
            parameter.grad = total
        else:
            if self.wrapper is not None:
                self.wrapper.before_gradient(parameter)
            parameter.grad.add_(total)
        if self.wrapper is not None:
            self.wrapper.gradient_ready(parameter)

    def receive_nothing(self) -> None:
        """Zeros for all parameters."""
        # Backwards, as a backward would: rank 0's first order becomes that of the buckets.
        for parameter in reversed(self.capture.parameters):
            self.receive(parameter, None)

    def end_backward(self) -> None:
        """Called where `no_sync` still holds, if it does."""
        self._is_held_back = self.wrapper is not None and not _sends(self.wrapper)

    def refuse_unclipped(self, is_noisy: bool = False) -> None:
        """Raises RuntimeError if an ordinary backward has added to what a step will apply.

        In private training autograd accumulates nothing into a trainable parameter. Of sharded
        ones sums are also compared with what was left there, until they are noisy: then they may
        be changed.
        """
        unclipped = [p for p in self._unclipped if p.grad is not None]
        if self.capture.sums is not None and not is_noisy:
            unclipped += self.capture.sums.changed()
        names = [self.capture.names[p] for p in unclipped]
        if names:
            raise RuntimeError(
                f"an ordinary backward (a loss that is not the private criterion's) has added to "
                f"the gradient of {', '.join(sorted(names)[:5])}, unclipped: call "
                "optimizer.zero_grad() after it, and before the private forward"
            )

    def _refuse_thawed(self) -> None:
        """What is clipped and gets noise was settled when the model was made."""
        own, known = self._own, (p.requires_grad == flag for p, flag in self._flags)
        if all(known) and all(
            own.get(m, NOTHING) == _trainable_names(m) for m in every_module(self.network)
        ):
            return
        changed = {
            name: "trainable" if p.requires_grad else "frozen"
            for name, p in (dict(self.network.named_parameters()) | self._parameters).items()
            if p.requires_grad != (name in self._trainable)
        }
        if changed:
            names = ", ".join(f"{name} ({now} now)" for name, now in list(changed.items())[:5])
            raise RuntimeError(
                f"{names}: freeze and unfreeze before make_private; afterwards set the learning "
                "rate of a parameter group to 0, or use to_standard_module() and make it private "
                "again"
            )

    # ---- the step -------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait for the sums of all ranks; those that `no_sync` held back leave now.

        Raises:
            RuntimeError: under `no_sync`, or a parameter has no sum, as after a backward that was
                cut off.
        """
        if self._is_held_back:
            self._send()
        if self.capture.sums is not None:
            self.capture.sums.finish()
        elif hasattr(self.wrapper, "finish_gradient_synchronization"):
            self.wrapper.finish_gradient_synchronization()

    def _send(self) -> None:
        if not _sends(self.wrapper):
            raise RuntimeError(
                "optimizer.step() under no_sync(): ranks would go on with different sums, so call "
                "it outside"
            )
        for parameter in reversed(self.capture.parameters):
            self.wrapper.gradient_ready(parameter)
        self._is_held_back = False

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

    def close_step(self) -> None:
        self.step_is_open = False

    def clear(self) -> None:
        """Drop what there is; sums may come in float32 again."""
        self.step_is_open = self._is_held_back = False
        self._unclipped.clear()
        if self.capture.sums is not None:
            self.capture.sums.forget()
        for parameter in self.capture.parameters:
            parameter.grad = None
        self._widen()

    def _widen(self) -> None:
        """`.grad` of 16-bit parameters is float32 until noise is in it."""
        narrow = [p for p in self.capture.parameters if p.dtype != wide(p.dtype)]
        for parameter in narrow:
            if parameter.grad is None:
                parameter.grad_dtype = wide(parameter.dtype)
        if narrow and self.wrapper is not None:
            self.wrapper.gradient_dtype = torch.float32


def _trainable_names(module: nn.Module) -> frozenset[str]:
    """Of its own parameters."""
    own = module._parameters
    if not own:
        return NOTHING
    return frozenset(name for name, p in own.items() if p is not None and p.requires_grad)


def _sends(wrapper: nn.Module) -> bool:
    """Not under its `no_sync`; PyTorch's DDP has another name for it than ours."""
    ours = getattr(wrapper, "_synchronizing", True)
    return getattr(wrapper, "require_backward_grad_sync", ours)
