"""`torch_fsdp`: PyTorch's `fully_shard` on each block, beside which `fsdp` is measured.

Its parameters are DTensors, which PyTorch gathers and reduces itself, so
`finish_gradient_synchronization` has nothing to do
(https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp.internals.gradients import Reduction
from ddp.internals.interface import trainable
from ddp.internals.ranks import group_or_default
from ddp.internals.replicas import Replicas
from ddp.sharded.internals.blocks import parameters_by_block


class TorchFSDP(nn.Module):
    """A network whose blocks and rest are sharded by `fully_shard`.

    Args:
        units, param_dtype: as of `ddp.sharded.fsdp.HandBuiltFSDP`.
    """

    options = ("reduce", "process_group", "units", "param_dtype")

    def __init__(
        self,
        module: nn.Module,
        *,
        reduce: str = "mean",
        process_group: dist.ProcessGroup | None = None,
        units: Sequence[type[nn.Module]] | None = None,
        param_dtype: torch.dtype | None = None,
    ):
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        super().__init__()
        self.module: Any = module  # which fully_shard makes an FSDPModule
        self.process_group = group_or_default(process_group)
        self.reduce = Reduction(reduce, dist.get_world_size(self.process_group)).name
        Replicas(module, self.process_group).make_equal(obstacle=None)
        device = next(module.parameters()).device.type
        reduce_dtype = None if param_dtype is None else torch.float32
        settings: dict[str, Any] = {
            "mesh": DeviceMesh.from_group(self.process_group, device),
            "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype),
        }
        names = parameters_by_block(module, None if units is None else tuple(units))
        for name in sorted(names, reverse=True):  # inner blocks first, the network itself last
            fully_shard(module.get_submodule(name), **settings)
        if reduce == "sum":
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.set_gradient_divide_factor(1.0)
                    part.set_force_sum_reduction_for_comms(True)  # gloo cannot scale in it

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Does nothing: PyTorch has waited at the end of backward."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Enters a context in which gradients add up whole on each rank."""
        self.module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)

    def make_optimizer(
        self, cls: Callable[..., Optimizer], params: Any = None, **options: Any
    ) -> Optimizer:
        """Returns an optimizer over the DTensors, with a whole `state_dict` on every rank."""
        optimizer = cls(trainable(self.module) if params is None else params, **options)
        optimizer.register_state_dict_post_hook(_gather_state)
        optimizer.register_load_state_dict_pre_hook(_shard_state)
        return optimizer

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        return _whole(nn.utils.clip_grad_norm_(trainable(self.module), max_norm))

    def whole_gradients(self) -> list[Tensor | None]:
        """Returns the reduced gradient of each parameter; a collective call."""
        gradients = (p.grad for p in self.module.parameters())
        return [None if gradient is None else _whole(gradient) for gradient in gradients]

    def stats(self) -> dict[str, int]:
        """Returns nothing: PyTorch does not count the collectives of FSDP."""
        return {}

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Returns the whole state, on every rank; a collective call."""
        return {key: _whole(x) for key, x in super().state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        if assign:
            raise ValueError("load_state_dict: a rank keeps shards of its own, give assign=False")
        shards = super().state_dict()
        like = {key: _shard(x, shards[key]) for key, x in state_dict.items() if key in shards}
        return super().load_state_dict({**state_dict, **like}, strict=strict)


def _whole(x: Any) -> Any:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def _shard(x: Any, like: Any) -> Any:
    """Returns this rank's part of a whole tensor, if `like` is a DTensor of its shape."""
    from torch.distributed.tensor import distribute_tensor

    if not hasattr(like, "placements") or not isinstance(x, Tensor) or x.shape != like.shape:
        return x
    return distribute_tensor(x.to(like.device), like.device_mesh, like.placements)


def _gather_state(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return _changed(state_dict, lambda _, value: _whole(value))


def _shard_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    saved = [number for group in state_dict["param_groups"] for number in group["params"]]
    mine = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    like = dict(zip(saved, mine, strict=False))  # PyTorch compares their numbers later
    return _changed(state_dict, lambda number, value: _shard(value, like.get(number)))


def _changed(state_dict: dict[str, Any], change: Callable[[int, Any], Any]) -> dict[str, Any]:
    state = state_dict["state"].items()
    changed = {n: {key: change(n, x) for key, x in values.items()} for n, values in state}
    return {**state_dict, "state": changed}
