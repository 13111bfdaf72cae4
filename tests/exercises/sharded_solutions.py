"""A solution of exercises 10 to 12, in their order."""

import torch
import torch.distributed as dist

from ddp.torch_compat import all_gather, reduce_scatter
from ddp_by_hand.exercises.sharded import GatheredUnit, Sharded, Unit, blocks_of, in_buckets


class Begun(Sharded):
    """Begins with rank 0's parameters and buffers."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


class StateShardedDDP(Begun):
    def __init__(self, module):
        super().__init__(module)
        self.trained = [p for p in module.parameters() if p.requires_grad]
        self.units = [self]
        self.flatten_parameters()

    @torch.no_grad()
    def flatten_parameters(self):
        self.flat = self.flatten([p.detach() for p in self.trained])
        start = 0
        for parameter in self.trained:
            parameter.data = self.flat[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
        self.own = self.slice_of(self.flat).requires_grad_()

    def flatten(self, tensors):
        """The tensors one behind the other, then zeros until the ranks divide the length."""
        flat = torch.cat([t.flatten() for t in tensors])
        return torch.nn.functional.pad(flat, (0, -len(flat) % dist.get_world_size()))

    def slice_of(self, flat):
        return flat.chunk(dist.get_world_size())[dist.get_rank()]

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.trained]
        self.own.grad = torch.empty_like(self.own)
        flat = self.flatten(grads)
        reduce_scatter(self.own.grad, flat, dist.ReduceOp.SUM, dist.group.WORLD).wait()
        self.own.grad /= dist.get_world_size()
        for parameter in self.trained:
            parameter.grad = None

    def make_optimizer(self, cls, **options):
        optimizer = cls([self.own], **options)
        optimizer.register_step_post_hook(lambda *_: self.gather(self.flat, self.own))
        return optimizer

    @torch.no_grad()
    def gather(self, flat, own):
        all_gather(flat, own, dist.group.WORLD).wait()
        return flat

    @torch.no_grad()
    def whole_state(self, optimizer):
        count = sum(p.numel() for p in self.trained)
        return {
            key: self.gather(torch.empty_like(self.flat), value)[:count]
            if value.shape == self.own.shape
            else value
            for key, value in optimizer.state[self.own].items()
        }

    @torch.no_grad()
    def load_whole_state(self, optimizer, whole):
        count = sum(p.numel() for p in self.trained)
        optimizer.state[self.own] = {
            key: self.slice_of(self.flatten([value])).clone() if value.numel() == count else value
            for key, value in whole.items()
        }


class GradientShardedDDP(Begun):
    on_the_wire = 2

    def __init__(self, module, *, bucket_size_mb=25):
        super().__init__(module)
        self.units = [Unit(bucket) for bucket in in_buckets(module, bucket_size_mb)]
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.gradient_ready)
        self.begin_step()

    def make_optimizer(self, cls, **options):
        optimizer = cls([unit.own for unit in self.units], **options)
        optimizer.register_step_post_hook(lambda *_: self.gather_parameters())
        return optimizer

    @torch.no_grad()
    def gather_parameters(self):
        handles = [all_gather(u.values, u.own, dist.group.WORLD) for u in self.units]
        for handle in handles:
            handle.wait()

    def begin_step(self):
        self.ready = set()
        self.waiting = list(self.units)
        self.in_flight = []

    @torch.no_grad()
    def gradient_ready(self, parameter):
        self.ready.add(parameter)
        while self.waiting and self.ready.issuperset(self.waiting[0].trained):
            self.start(self.waiting.pop(0))

    def start(self, unit):
        while len(self.in_flight) >= self.on_the_wire:
            self.finish_oldest()
        flat = self.take_gradients(unit)
        own = torch.empty_like(unit.own)
        handle = reduce_scatter(own, flat, dist.ReduceOp.SUM, dist.group.WORLD)
        self.in_flight.append((handle, unit, own, flat))

    def take_gradients(self, unit):
        flat = unit.flatten([p.grad for p in unit.trained])
        for parameter in unit.trained:
            parameter.grad = None
        return flat

    def finish_oldest(self):
        handle, unit, own, _ = self.in_flight.pop(0)
        handle.wait()
        unit.own.grad = own.div_(dist.get_world_size())

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        while self.in_flight:
            self.finish_oldest()
        self.begin_step()


class MyUnit(GatheredUnit):
    handle = None

    def start(self):
        if self.values.untyped_storage().size() == 0:
            self.values.untyped_storage().resize_(self.values.nbytes)
            self.handle = all_gather(self.values, self.own.detach(), dist.group.WORLD)

    def wait(self):
        if self.handle is not None:
            self.handle.wait()
            self.handle = None
        self.show(self.views(self.values))

    def free(self):
        self.hide()
        self.values.untyped_storage().resize_(0)


class FullyShardedDDP(Begun):
    unit_type = MyUnit

    def __init__(self, module):
        super().__init__(module)
        modules, rest = blocks_of(module)
        self.blocks = [self.unit_type(block.parameters()) for block in modules]
        self.root = self.unit_type(rest)
        self.units = [self.root, *self.blocks]
        for k, block in enumerate(modules):
            block.register_forward_pre_hook(lambda *_, k=k: self.before_forward(k))
            block.register_forward_hook(lambda *_, k=k: self.after_forward(k))
            block.register_full_backward_pre_hook(lambda *_, k=k: self.before_backward(k))
            for parameter in self.blocks[k].trained:
                parameter.register_post_accumulate_grad_hook(
                    lambda p, k=k: self.gradient_ready(k, p)
                )
        for unit in self.units:
            unit.free()
        self.begin_step()

    def forward(self, *args, **kwargs):
        self.root.start()
        self.root.wait()
        return self.module(*args, **kwargs)

    def make_optimizer(self, cls, **options):
        return cls([unit.own for unit in self.units], **options)

    def begin_step(self):
        self.ready = set()
        self.in_flight = []

    def before_forward(self, k):
        self.gather(k, k + 1)

    def after_forward(self, k):
        self.blocks[k].free()

    def before_backward(self, k):
        self.gather(k, k - 1)

    def gather(self, k, following):
        self.blocks[k].start()
        self.blocks[k].wait()
        if 0 <= following < len(self.blocks):
            self.blocks[following].start()

    @torch.no_grad()
    def gradient_ready(self, k, parameter):
        self.ready.add(parameter)
        if self.ready.issuperset(self.blocks[k].trained):
            self.blocks[k].free()
            self.reduce(self.blocks[k])

    def reduce(self, unit):
        flat = unit.flatten([p.grad for p in unit.trained])
        for parameter in unit.trained:
            parameter.grad = None
        unit.own.grad = torch.empty_like(unit.own)
        handle = reduce_scatter(unit.own.grad, flat, dist.ReduceOp.SUM, dist.group.WORLD)
        self.in_flight.append((handle, unit))

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        self.reduce(self.root)
        self.root.free()
        for handle, unit in self.in_flight:
            handle.wait()
            unit.own.grad /= dist.get_world_size()
        self.begin_step()
