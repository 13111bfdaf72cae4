"""Other right solutions of exercises 1 and 10 to 12, which the checks must accept."""

import torch
import torch.distributed as dist

from ddp.synchronous import NaiveDDP as AverageDDP  # noqa: F401
from ddp.torch_compat import all_gather, reduce_scatter
from tests.exercises import sharded_solutions as usual


class StateShardedDDP(usual.StateShardedDDP):
    """Divides before the sum, and gathers into a list of slices."""

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.trained]
        flat = self.flatten(grads) / dist.get_world_size()
        own = self.slice_of(flat)
        reduce_scatter(own, flat, dist.ReduceOp.SUM, dist.group.WORLD).wait()
        self.own.grad = own
        for parameter in self.trained:
            parameter.grad = None

    @torch.no_grad()
    def gather(self, flat, own):
        dist.all_gather(list(flat.chunk(dist.get_world_size())), own, async_op=True).wait()
        return flat


class GradientShardedDDP(usual.GradientShardedDDP):
    """Has one bucket on the wire, and waits for it twice."""

    on_the_wire = 1

    def finish_oldest(self):
        handle, unit, own, _ = self.in_flight.pop(0)
        handle.wait()
        handle.wait()
        unit.own.grad = own / dist.get_world_size()


class FullyShardedDDP(usual.FullyShardedDDP):
    """Gathers in place, hides nothing, waits before it frees, and reduces the root last."""

    class unit_type(usual.MyUnit):
        def start(self):
            if self.values.untyped_storage().size() == 0:
                self.values.untyped_storage().resize_(self.values.nbytes)
                own = self.slice_of(self.values).copy_(self.own)
                self.handle = all_gather(self.values, own, dist.group.WORLD)

        def wait(self):
            self.handle.wait()

        def free(self):
            if self.handle is not None:
                self.handle.wait()
            self.values.untyped_storage().resize_(0)

    def reduce(self, unit):
        flat = unit.flatten([p.grad for p in unit.trained]).div_(dist.get_world_size())
        for parameter in unit.trained:
            parameter.grad = None
        own = torch.empty_like(unit.own)
        handle = reduce_scatter(own, flat, dist.ReduceOp.SUM, dist.group.WORLD)
        self.in_flight.append((handle, unit, own))

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        self.root.free()
        self.reduce(self.root)
        for handle, unit, own in self.in_flight:
            handle.wait()
            unit.own.grad = own
        self.begin_step()
