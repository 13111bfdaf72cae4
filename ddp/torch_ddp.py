"""`torch_ddp`: PyTorch's own DistributedDataParallel with this package's interface.

Its reducer is written in C++ and has synchronised when backward returns, so
`finish_gradient_synchronization` only checks that it did. Private gradients come through
`gradient_ready`. PyTorch's reducer does not see them, because autograd does not accumulate them.
Our own calls reduce them at finish, and a table of results must say so.

`torch_ddp_tuned` is the same class with the settings that its documentation recommends for speed
(https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html).
A comparison with the defaults alone would flatter the variants built by hand.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from ddp.base import DataParallel
from ddp.buckets import mebibytes
from ddp.internals.hooks import AutogradHooks, Backward
from ddp.internals.optimizer import Replicated
from ddp.internals.ownership import activate, enter
from ddp.internals.step import Record
from ddp.internals.wrapper import Copyable
from ddp.synchronous import SynchronousDDP
from ddp.torch_compat import ddp_record, scale_


class TorchDDP(Replicated, Copyable, DistributedDataParallel):
    """Wraps PyTorch's DDP and has the methods of `ddp.base.DataParallel`.

    It cannot inherit those, as it is a DistributedDataParallel: its methods repeat the interface.

    Args:
        settings: `bucket_size_mb`, which is PyTorch's `bucket_cap_mb` (default PyTorch's own, 25;
            None for one bucket), and, not through `wrap`, further arguments of
            DistributedDataParallel.
    """

    options = (*DataParallel.options, "bucket_size_mb")

    is_active: bool = True

    _hands_over: bool = False
    """The last forward was in eval mode: gradients of its backward are reduced as by hand."""

    gradients_come_by_hand: bool = False
    """See `ManualGradients`. PyTorch's own forward is then not called.

    It would prepare a reducer that no gradient reaches. With a static graph it would also start
    collectives in the first backward, on those ranks only that have a sample.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        reduce: str = "mean",
        process_group: dist.ProcessGroup | None = None,
        find_unused_parameters: bool = False,
        **settings: Any,
    ):
        if "bucket_size_mb" in settings:
            nbytes = mebibytes(settings.pop("bucket_size_mb"))
            everything = max(1, sum(p.nbytes for p in module.parameters()))
            settings["bucket_cap_mb"] = (everything if nbytes is None else nbytes) / (1 << 20)
        by_hand = _WithoutHooks(
            module,
            self.is_copy,
            reduce=reduce,
            process_group=process_group,
            find_unused_parameters=find_unused_parameters,
        )
        super().__init__(
            module,
            process_group=process_group,
            find_unused_parameters=find_unused_parameters,
            init_sync=not self.is_copy,
            **settings,
        )
        self._by_hand = (by_hand,)  # in a tuple, so that it is not a submodule
        self.gradients, self.watch = by_hand.gradients, by_hand.watch
        self._arrived: set[int] = set()
        self._holds_sums = False
        self._forget_step()
        enter(self, AutogradHooks(self, Backward()), self.gradients)

    def forward(self, *args, **kwargs):
        if not torch.is_grad_enabled():
            return self.watch.call(self.module, args, kwargs)
        self.watch.raise_if_replaced(self.module)
        by_hand, self._hands_over = self._by_hand[0], False
        if not self.training:  # PyTorch's forward would communicate, but a rank may be alone here
            self._raise_if_changed()
            self._backward_reduces = self._awaits_backward
            self._hands_over = self.require_backward_grad_sync and not self._awaits_backward
            return self.watch.call(self.module, args, kwargs)
        activate(self)
        if self.gradients_come_by_hand:
            by_hand.require_backward_grad_sync = self.require_backward_grad_sync
            return by_hand(*args, **kwargs)
        self._raise_if_changed()
        by_hand.step.finished = Record()
        self.gradients.dtypes.conform()
        by_hand.step.discard_partial(by_hand)
        by_hand.step.unfinished = by_hand.is_in_mid_step()  # one without a gradient is forgotten
        # PyTorch decides at the end of a forward whether the next one broadcasts buffers.
        self.require_forward_param_sync = self.require_backward_grad_sync
        if self.require_backward_grad_sync:
            self._unfinished = self._awaits_backward = True
        self._backward_reduces = self._awaits_backward  # PyTorch decides here too
        return self.watch.call(super().forward, args, kwargs)

    def load_state_dict(self, *args, **kwargs):
        result = super().load_state_dict(*args, **kwargs)
        self.watch.accept_changes()
        return result

    def before_gradient(self, parameter: Parameter) -> None:
        """Announces that a gradient will be added to without autograd; `gradient_ready` follows."""
        activate(self)
        self._by_hand[0].before_gradient(parameter)

    def gradient_ready(self, parameter: Parameter) -> None:
        """Reduces a gradient that autograd did not accumulate, by our own call at finish."""
        activate(self)
        by_hand = self._by_hand[0]
        by_hand.require_backward_grad_sync = self.require_backward_grad_sync
        by_hand.gradient_ready(parameter)

    def finish_gradient_synchronization(self) -> None:
        by_hand = self._by_hand[0]
        if by_hand.step.unfinished:
            by_hand.finish_gradient_synchronization()
            self._holds_sums = self.reduce == "sum"
        elif self._unfinished:
            self._raise_if_changed()
            self._check_that_all_arrived()
            if self.reduce == "sum" and not self._is_frozen():
                self._scale(self.world_size)
            self.gradients.reduced.update(range(len(self.gradients.parameters)))
        self._forget_step()

    def stats(self) -> dict[str, int]:
        """Returns a step's counts: PyTorch's own record, or ours after `gradient_ready`."""
        ours = self._by_hand[0].stats()
        if ours["collectives"]:
            return ours
        record = ddp_record(self)
        sizes = str(record.get("rebuilt_bucket_sizes") or record.get("bucket_sizes") or "")
        buckets = [int(size) for size in sizes.replace(" ", "").split(",") if size]
        return {
            "collectives": len(buckets) + int(self.find_unused_parameters),
            "bytes": sum(buckets),
            "buckets": len(buckets),
        }

    @property
    def reduce(self) -> str:
        return self._by_hand[0].reduce

    @reduce.setter
    def reduce(self, value: str) -> None:
        self._by_hand[0].reduce = value

    @property
    def gradient_dtype(self) -> torch.dtype | None:
        """Returns the dtype for `gradient_ready`. PyTorch's own reducer refuses one."""
        return self._by_hand[0].gradient_dtype

    @gradient_dtype.setter
    def gradient_dtype(self, value: torch.dtype | None) -> None:
        self._by_hand[0].gradient_dtype = value

    @property
    def world_size(self) -> int:
        return self._by_hand[0].world_size

    def _scale(self, factor: float) -> None:
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        if gradients:
            scale_(gradients, factor)
        self._holds_sums = factor > 1

    def _check_that_all_arrived(self) -> None:
        trainable = range(len(self.gradients.parameters))  # at construction, as PyTorch's reducer
        missing = [i for i in trainable if i not in self._arrived]
        if missing and not self.find_unused_parameters and not self._is_frozen():
            self._forget_step()
            raise RuntimeError(
                f"unfinished reduction: {self.gradients.show(missing)} got no gradient in the last "
                "backward; if that is meant, pass find_unused_parameters=True"
            )

    def _is_frozen(self) -> bool:
        return not self._arrived and not any(p.requires_grad for p in self.gradients.parameters)

    def _raise_if_changed(self) -> None:
        """Raises if an optimizer has stepped before the end of the step."""
        if complaint := self.watch.complaint():
            self._forget_step()
            raise RuntimeError(complaint)

    def _forget_step(self) -> None:
        self._unfinished = self._awaits_backward = self._backward_reduces = False
        self._arrived.clear()
        self.watch.end_step()

    def is_in_mid_step(self) -> bool:
        return bool(self._arrived) or self._by_hand[0].is_in_mid_step()

    def deactivate(self) -> None:
        """Discards an unfinished step because another wrapper of this network takes over."""
        self._forget_step()
        self._by_hand[0].deactivate()
        self._by_hand[0].is_active = True  # whenever this one is
        self.is_active = False

    def before_accumulation(self, i: int) -> None:
        """Runs when autograd is about to accumulate gradient `i`."""
        by_hand = self._by_hand[0]
        if self.gradients_come_by_hand and self.require_backward_grad_sync:
            raise RuntimeError(
                "gradients_come_by_hand is set, so PyTorch's reducer does not see this backward: "
                "unset it before an ordinary forward"
            )
        if self._hands_over:
            by_hand.before_accumulation(i)
        elif self._holds_sums:  # PyTorch's reducer averages: gradients of before must be means
            self._scale(1 / self.world_size)
            self.gradients.reduced.clear()
        if not self._backward_reduces:
            return
        if self.gradients.dtypes.of(i) != self.gradients.parameters[i].dtype:
            raise RuntimeError(
                f"{self.gradients.name(i)} has a gradient of another type, and PyTorch's "
                "reducer works in the parameters' own type: gradient_dtype is for gradients that "
                "are handed to gradient_ready; set no grad_dtype, or use another variant"
            )
        self._awaits_backward = False
        self._arrived.add(i)
        self._unfinished = True
        self.watch.gradient_arrived(self.gradients.parameters[i])

    def after_accumulation(self, i: int) -> None:
        """Leaves gradient `i` to PyTorch's own hook, unless the forward was in eval mode."""
        if self._hands_over:
            self._by_hand[0].require_backward_grad_sync = True
            self._by_hand[0].after_accumulation(i)


class TunedTorchDDP(TorchDDP):
    """PyTorch's DDP with gradients as views of buckets, larger buckets and a static graph.

    A static graph is learned in the first training step, which must therefore synchronise. A
    private step, in which autograd accumulates nothing, teaches it that no parameter is used:
    ordinary steps behind one would not be reduced at all, and are refused.
    """

    def __init__(self, module: nn.Module, *, bucket_size_mb: float = 100, **options):
        static = not options.get("find_unused_parameters", False)
        super().__init__(
            module,
            bucket_size_mb=bucket_size_mb,
            gradient_as_bucket_view=True,
            static_graph=static,
            **options,
        )
        self._learns_the_graph = static
        self._knows_the_graph = not static
        self._learned_nothing = False

    def forward(self, *args, **kwargs):
        learns = self._learns_the_graph and not self.gradients_come_by_hand
        if learns and self.training and torch.is_grad_enabled():
            if not self.require_backward_grad_sync:
                raise RuntimeError(
                    "torch_ddp_tuned: the first training step must not be under no_sync(), "
                    "its static graph is learned there; use torch_ddp"
                )
            self._learns_the_graph = False
        return super().forward(*args, **kwargs)

    def gradient_ready(self, parameter: Parameter) -> None:
        self._learned_nothing = not (self._learns_the_graph or self._knows_the_graph)
        super().gradient_ready(parameter)

    def before_accumulation(self, i: int) -> None:
        if self._learned_nothing:
            raise RuntimeError(
                "torch_ddp_tuned: its static graph was learned in a private step, where it sees "
                "no gradient; for ordinary steps wrap the network anew, or use torch_ddp"
            )
        self._knows_the_graph = True
        super().before_accumulation(i)


class _WithoutHooks(SynchronousDDP):
    """Reduces what is handed to `gradient_ready`."""

    def __init__(self, module: nn.Module, is_copy: bool, **options):
        self.is_copy = is_copy
        super().__init__(module, **options)

    def register_hooks(self) -> None:
        """Registers nothing: autograd accumulates no gradient here."""
