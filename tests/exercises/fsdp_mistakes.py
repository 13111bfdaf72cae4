"""Usual mistakes in exercise 12, as in mistakes.py."""

import torch
import torch.distributed as dist

from ddp.torch_compat import all_gather, reduce_scatter
from tests.exercises.mistakes import mistake
from tests.exercises.sharded_solutions import FullyShardedDDP, MyUnit

AFTER_FINISH = "After finish"


@mistake("fsdp", "In forward at most two blocks", "autograd has saved views of it")
class ShardedReplaced(FullyShardedDDP):
    """Each gather has a new buffer; hiding the parameters frees nothing."""

    class unit_type(MyUnit):
        is_there = True

        def start(self):
            if not self.is_there:
                self.values, self.is_there = torch.empty_like(self.values), True
                self.handle = all_gather(self.values, self.own.detach(), dist.group.WORLD)

        def free(self):
            self.hide()
            self.is_there = False


@mistake("fsdp", "While a block computes", "has not been started: nothing hides it")
class ShardedNoPrefetch(FullyShardedDDP):
    """A gather starts when it is needed."""

    def gather(self, k, following):
        super().gather(k, -1)


@mistake("fsdp", AFTER_FINISH, "autograd's saved views are of the old one")
class ShardedReplacedAndFreed(FullyShardedDDP):
    """The old buffer is freed, and backward's gather has a new one."""

    class unit_type(MyUnit):
        def start(self):
            if self.values.untyped_storage().size() == 0:
                flat = torch.empty(self.own.numel() * dist.get_world_size())
                self.values = flat
                self.handle = all_gather(self.values, self.own.detach(), dist.group.WORLD)


@mistake("fsdp", "In backward at most two blocks", "free a block when its last gradient is there")
class ShardedNotFreedInBackward(FullyShardedDDP):
    """Backward leaves every block whole."""

    @torch.no_grad()
    def gradient_ready(self, k, parameter):
        self.ready.add(parameter)
        if self.ready.issuperset(self.blocks[k].trained):
            self.reduce(self.blocks[k])

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        super().finish_gradient_synchronization()
        for unit in self.blocks:
            unit.free()


@mistake("fsdp", "In backward at most two blocks", "the root is whole after finish")
class ShardedRootNotFreed(FullyShardedDDP):
    """The root stays whole."""

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        self.reduce(self.root)
        for handle, unit in self.in_flight:
            handle.wait()
            unit.own.grad /= dist.get_world_size()
        self.begin_step()


@mistake("fsdp", "In forward at most two blocks", "free a block after its forward")
class ShardedNotFreedInForward(FullyShardedDDP):
    """Forward leaves every block whole."""

    def after_forward(self, k):
        pass


@mistake(
    "fsdp", "Each block is gathered twice", "block 1 was gathered ahead, freed in the forward of"
)
class ShardedFreesAhead(FullyShardedDDP):
    """A forward frees every block, the one gathered ahead too."""

    def after_forward(self, k):
        for unit in self.blocks:
            unit.free()


@mistake(
    "fsdp", "Each block is gathered twice", "ahead, freed in the backward of block 1, and gath"
)
class ShardedFreesAheadInBackward(FullyShardedDDP):
    """The last gradient of a block frees the one gathered ahead too."""

    @torch.no_grad()
    def gradient_ready(self, k, parameter):
        super().gradient_ready(k, parameter)
        if k == 1 and self.ready.issuperset(self.blocks[k].trained):
            self.blocks[k - 1].free()


@mistake("fsdp", AFTER_FINISH, "not at an earlier one")
class ShardedFreedAtFirstGradient(FullyShardedDDP):
    """A block is freed at the first of its gradients."""

    @torch.no_grad()
    def gradient_ready(self, k, parameter):
        self.blocks[k].free()
        super().gradient_ready(k, parameter)


@mistake("fsdp", AFTER_FINISH, "gather it again in before_backward")
class ShardedNotGatheredInBackward(FullyShardedDDP):
    """Backward reads what forward has freed."""

    def before_backward(self, k):
        pass


@mistake("fsdp", AFTER_FINISH, "which was freed: free it in finish")
class ShardedRootFreedEarly(FullyShardedDDP):
    """The root is freed after forward, as the blocks are."""

    def forward(self, *args, **kwargs):
        y = super().forward(*args, **kwargs)
        self.root.free()
        return y


@mistake("fsdp", "Forward computes with whole", "whose memory was freed: resize its storage first")
class ShardedNotResized(FullyShardedDDP):
    """The gather writes to memory that is not there."""

    class unit_type(MyUnit):
        def start(self):
            self.handle = all_gather(self.values, self.own.detach(), dist.group.WORLD)


@mistake("fsdp", AFTER_FINISH, "is NaN: the reduction was not waited for")
class ShardedNotWaited(FullyShardedDDP):
    """Gradients are used before they have arrived."""

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        self.reduce(self.root)
        self.root.free()
        for _, unit in self.in_flight:
            unit.own.grad /= dist.get_world_size()
        self.begin_step()


@mistake("fsdp", "A block's gradients are on the wire", "waited for where they were started")
class ShardedWaitedAtOnce(FullyShardedDDP):
    """Each reduction ends before backward goes on."""

    def reduce(self, unit):
        super().reduce(unit)
        self.in_flight[-1][0].wait()


@mistake("fsdp", AFTER_FINISH, "is the sum over the ranks: divide it")
class ShardedSum(FullyShardedDDP):
    """The sums of the blocks are not divided."""

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        super().finish_gradient_synchronization()
        for unit in self.blocks:
            unit.own.grad *= dist.get_world_size()


@mistake("fsdp", AFTER_FINISH, "was divided by the number of ranks twice")
class ShardedTwice(FullyShardedDDP):
    """Divided before and after the sum."""

    def reduce(self, unit):
        for parameter in unit.trained:
            parameter.grad /= dist.get_world_size()
        super().reduce(unit)


@mistake("fsdp", AFTER_FINISH, "unit 0: the own slice has no gradient after finish")
class ShardedRootForgotten(FullyShardedDDP):
    """What is in no block is not reduced."""

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        self.root.free()
        for handle, unit in self.in_flight:
            handle.wait()
            unit.own.grad /= dist.get_world_size()
        self.begin_step()


@mistake("fsdp", "Forward computes with whole parameters", "is NaN: is its gather started")
class ShardedGatherNotWaited(FullyShardedDDP):
    """The gather is started and not waited for."""

    class unit_type(MyUnit):
        def wait(self):
            self.show(self.views(self.values))


@mistake("fsdp", "While a block computes", "waited for the gather of block 1")
class ShardedPrefetchWaited(FullyShardedDDP):
    """The next gather is waited for before the block computes."""

    def gather(self, k, following):
        super().gather(k, following)
        if 0 <= following < len(self.blocks):
            self.blocks[following].wait()


@mistake("fsdp", "A block's gradients are on the wire", "start in gradient_ready")
class ShardedReducedInFinish(FullyShardedDDP):
    """Blocks are freed in time, and reduced after backward."""

    @torch.no_grad()
    def gradient_ready(self, k, parameter):
        self.ready.add(parameter)
        if self.ready.issuperset(self.blocks[k].trained):
            self.blocks[k].free()

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        for unit in self.blocks:
            self.reduce(unit)
        super().finish_gradient_synchronization()


@mistake("fsdp", "After finish a rank has its slices", "all of the flat tensor")
class ShardedGradientsWhole(FullyShardedDDP):
    """The slice is received in place, and keeps the whole flat tensor."""

    def reduce(self, unit):
        flat = unit.flatten([p.grad for p in unit.trained])
        for parameter in unit.trained:
            parameter.grad = None
        unit.own.grad = unit.slice_of(flat)
        handle = reduce_scatter(unit.own.grad, flat, dist.ReduceOp.SUM, dist.group.WORLD)
        self.in_flight.append((handle, unit))


@mistake("fsdp", "Each block is gathered twice", "block 0 was gathered 3 times")
class ShardedGatheredAgain(FullyShardedDDP):
    """The first block is freed once more than needed, and gathered anew."""

    def forward(self, *args, **kwargs):
        self.blocks[0].start()
        self.blocks[0].wait()
        self.blocks[0].free()
        return super().forward(*args, **kwargs)


@mistake("fsdp", "Three steps of an optimizer", "does every forward gather anew what was stepped")
class ShardedOwnIsNoLeaf(FullyShardedDDP):
    """The optimizer steps copies of the slices."""

    def make_optimizer(self, cls, **options):
        copies = [unit.own.detach().clone().requires_grad_() for unit in self.units]
        optimizer = cls(copies, **options)
        optimizer.register_step_pre_hook(lambda *_: self.give(copies))
        return optimizer

    def give(self, copies):
        for copied, unit in zip(copies, self.units, strict=True):
            copied.grad = unit.own.grad


@mistake("fsdp", AFTER_FINISH, "whose gather has not been waited for: wait in before_backward")
class ShardedUnawaited(FullyShardedDDP):
    """Backward begins a block's gather, and does not wait for it."""

    def before_backward(self, k):
        for block in self.blocks[max(0, k - 1) : k + 1][::-1]:
            block.start()
