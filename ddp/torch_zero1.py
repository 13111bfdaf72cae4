"""`torch_zero1`: PyTorch's ZeroRedundancyOptimizer over its DDP, beside which `zero1` is measured.

DDP reduces whole gradients on every rank. The optimizer gives each rank some whole parameters to
step, and broadcasts them
(https://docs.pytorch.org/docs/stable/distributed.optim.html#torch.distributed.optim.ZeroRedundancyOptimizer).
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from ddp.internals.interface import trainable
from ddp.torch_ddp import TorchDDP


class TorchZero1(TorchDDP):
    """PyTorch's DDP, whose optimizer shards its state."""

    def make_optimizer(
        self, cls: Callable[..., Optimizer], params: Any = None, **options: Any
    ) -> Optimizer:
        params = trainable(self.module) if params is None else params
        options |= {"optimizer_class": cls, "process_group": self.process_group}
        return optimizer_class()(params, **options)


@cache
def optimizer_class() -> type[Optimizer]:
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
