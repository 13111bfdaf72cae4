"""`torch_ddp`: PyTorch's own DistributedDataParallel with this package's interface.

Its reducer is written in C++ and has synchronised when backward returns, so
`finish_gradient_synchronization` only checks that it did. Private gradients come through
`gradient_ready`. PyTorch's reducer does not see them, because autograd does not accumulate them.
Our own calls reduce them at finish, and a table of results must say so. They also reduce gradients
of a forward in eval mode: PyTorch's forward would communicate, and one rank may be alone there.

`torch_ddp_tuned` is the same class with the settings that its documentation recommends for speed
(https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html).
A comparison with the defaults alone would flatter the variants built by hand.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp.base import DataParallel
from ddp.internals.interface import mebibytes, trainable
from ddp.internals.unused import tensors_in
from ddp.synchronous import SynchronousDDP
from ddp.torch_compat import ddp_record, not_in_tree

OTHER_DTYPE = (
    "{name} has a gradient of another type, and PyTorch's reducer works in the parameters' own "
    "type: gradient_dtype is for gradients that are handed to gradient_ready; set no grad_dtype, "
    "or use another variant"
)
HIDDEN = (
    "torch_ddp_tuned: PyTorch's DDP looks into tuples, lists and dicts alone, and would not reduce "
    "the first step, since {kind} hides a tensor from it: return one of these, or use torch_ddp"
)


class TorchDDP(SynchronousDDP):
    """Trains by PyTorch's DDP; what its reducer does not see is reduced as by `ddp`, at finish.

    Args:
        bucket_size_mb: PyTorch's `bucket_cap_mb`, default its own; None for one bucket.
        settings: not through `wrap`: further arguments of DistributedDataParallel.
    """

    options = (*DataParallel.options, "bucket_size_mb")

    def __init__(
        self, module: nn.Module, *, settings: dict[str, Any] | None = None, **options: Any
    ):
        settings = dict(settings or {})
        if "bucket_size_mb" in options:
            self.bucket_size_mb = options.pop("bucket_size_mb")
            nbytes = mebibytes(self.bucket_size_mb)
            everything = max(1, sum(p.nbytes for p in module.parameters()))
            settings["bucket_cap_mb"] = (everything if nbytes is None else nbytes) / (1 << 20)
        super().__init__(module, **options)
        torch_ddp = DistributedDataParallel(
            module,
            process_group=self.process_group,
            find_unused_parameters=self.find_unused_parameters,
            init_sync=False,  # parameters are rank 0's already
            **settings,
        )
        self._torch_ddp = (torch_ddp,)  # in a tuple, so that it is not a submodule
        self._is_by_torch = False  # PyTorch's reducer reduces what comes from the last forward
        self._arrived: set[int] = set()  # since then: of each the reducer takes one

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not self.training or self.gradients_come_by_hand:
            self._is_by_torch &= self.step.awaits_backward
            return super().forward(*args, **kwargs)
        (torch_ddp,) = self._torch_ddp
        self.step.begin_forward(self)
        if self.require_backward_grad_sync:
            self._is_by_torch = True
            self._arrived.clear()
        torch_ddp.require_backward_grad_sync = self.require_backward_grad_sync
        # PyTorch decides at the end of a forward whether the next one broadcasts buffers.
        torch_ddp.require_forward_param_sync = self.require_backward_grad_sync
        output = self.watch.call(torch_ddp, args, kwargs)
        self.step.end_forward(self, output)
        return output

    def before_accumulation(self, i: int) -> None:
        if self._is_by_torch:  # it averages: sums of before must be means, which a sum is taken of
            self.gradients.make_local(*self.gradients.reduced)
        super().before_accumulation(i)

    def after_accumulation(self, i: int) -> None:
        """Notes gradient `i`; PyTorch's own hook comes behind this one, and reduces it."""
        self._is_by_torch &= i not in self._arrived  # in a second backward it does not
        if self.step.in_backward and self.require_backward_grad_sync:
            if self.gradients_come_by_hand:
                raise RuntimeError(
                    "gradients_come_by_hand is set, so PyTorch's reducer does not see this "
                    "backward: unset it before an ordinary forward"
                )
            if self.gradients.dtypes.all[i] != self.gradients.parameters[i].dtype:
                self.step.begin()  # as if it had not been
                raise RuntimeError(OTHER_DTYPE.format(name=self.gradients.names[i]))
            self._arrived.add(i)
            self.gradients.reduced.discard(i)  # from here on PyTorch's mean, also of None
        super().after_accumulation(i)

    def launch_buckets(self, everything: bool = False, most: int | None = None) -> None:
        """Launches what PyTorch's reducer does not see; nothing where its step is discarded."""
        if not self._is_by_torch or self.step.by_hand:
            super().launch_buckets(everything, most)

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        if not self._is_by_torch or self.step.by_hand:
            super().finish_gradient_synchronization()
        elif self.step.unfinished and self.step.is_complete(self):
            parameters = self.gradients.parameters
            if self.reduce == "sum" and any(p.requires_grad for p in parameters):
                for gradient in (p.grad for p in parameters if p.grad is not None):
                    gradient.mul_(self.world_size)
            self.gradients.reduced.update(range(len(parameters)))
            self.step.finished = self.step.record
            self.step.begin()

    def stats(self) -> dict[str, int]:
        """Returns a step's counts: PyTorch's own record, or ours after `gradient_ready`."""
        ours = super().stats()
        if ours["collectives"]:
            return ours
        record = ddp_record(*self._torch_ddp)
        sizes = str(record.get("rebuilt_bucket_sizes") or record.get("bucket_sizes") or "")
        buckets = [int(size) for size in sizes.replace(" ", "").split(",") if size]
        return {
            "collectives": len(buckets) + int(self.find_unused_parameters),
            "bytes": sum(buckets),
            "buckets": len(buckets),
        }


class TunedTorchDDP(TorchDDP):
    """PyTorch's DDP with gradients as views of buckets, larger buckets and a static graph.

    A static graph is learned in the first training step, which must therefore synchronise. In one
    whose gradients come by hand it would learn that no parameter is used, and ordinary steps behind
    it would not be reduced.
    """

    def __init__(self, module: nn.Module, *, bucket_size_mb: float | None = 100, **options: Any):
        self._learns = not options.get("find_unused_parameters", False)
        settings = {"gradient_as_bucket_view": True, "static_graph": self._learns}
        super().__init__(module, bucket_size_mb=bucket_size_mb, settings=settings, **options)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        by_torch = self.training and torch.is_grad_enabled() and not self.gradients_come_by_hand
        if self._learns and by_torch and not self.require_backward_grad_sync:
            raise RuntimeError(
                "torch_ddp_tuned: the first training step must not be under no_sync(), its static "
                "graph is learned there; use torch_ddp"
            )
        output, learns = super().forward(*args, **kwargs), self._learns and by_torch
        self._learns &= not by_torch
        if learns and any(x.grad_fn is not None for x in not_in_tree(tensors_in(output), output)):
            raise RuntimeError(HIDDEN.format(kind=type(output).__name__))
        return output

    def gradient_ready(self, parameter: Parameter) -> None:
        if not self.gradients_come_by_hand:
            raise RuntimeError(
                "torch_ddp_tuned: set gradients_come_by_hand = True before the forward whose "
                "gradients are handed over, or its static graph is learned wrong; or use torch_ddp"
            )
        super().gradient_ready(parameter)


class TorchZero1(TorchDDP):
    """`torch_zero1`: PyTorch's ZeroRedundancyOptimizer over its DDP, beside `zero1`.

    DDP reduces whole gradients on every rank. The optimizer gives each rank some whole parameters
    to step, and broadcasts them
    (https://docs.pytorch.org/docs/stable/distributed.optim.html#torch.distributed.optim.ZeroRedundancyOptimizer).
    """

    def make_optimizer(
        self, cls: Callable[..., Optimizer], params: Any = None, **options: Any
    ) -> Optimizer:
        params = trainable(self.module) if params is None else params
        optimizer = optimizer_class()(params, cls, self.process_group, **options)
        optimizer.cls = cls  # whose format its state has, as in `ddp.sharded`
        return optimizer


@cache
def optimizer_class() -> Any:
    """Returns PyTorch's class, whose whole state every rank gets. Imported late: it takes long."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    class WholeState(ZeroRedundancyOptimizer):
        def state_dict(self) -> dict[str, Any]:
            """Returns the state of all ranks, in the format of one process; a collective call."""
            self.consolidate_state_dict(to=0)
            box: list[Any] = [super().state_dict() if self.rank == 0 else None]
            dist.broadcast_object_list(box, group=self.process_group, group_src=0)
            return box[0]

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            """Takes this rank's part; PyTorch's deletes those of others from what it is given."""
            super().load_state_dict({**state_dict, "state": {**state_dict["state"]}})

    return WholeState
