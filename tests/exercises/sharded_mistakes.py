"""Usual mistakes in exercises 10 and 11, as in mistakes.py."""

import torch
import torch.distributed as dist

from ddp.torch_compat import reduce_scatter
from tests.exercises.mistakes import mistake
from tests.exercises.sharded_solutions import GradientShardedDDP, StateShardedDDP

AFTER_FINISH = "After finish"


@mistake("zero1", "After a step every rank", "gather the parameters after the step")
class StateNoGather(StateShardedDDP):
    """The new values stay where they were stepped."""

    def make_optimizer(self, cls, **options):
        return cls([self.own], **options)


@mistake("zero1", "The optimizer has state for this rank's slice", "no memory is saved")
class StateOfEverything(StateShardedDDP):
    """Every rank's optimizer has all parameters."""

    def make_optimizer(self, cls, **options):
        optimizer = cls(self.trained, **options)
        optimizer.register_step_pre_hook(lambda *_: self.give_gradients())
        return optimizer

    @torch.no_grad()
    def give_gradients(self):
        flat = self.gather(torch.empty_like(self.flat), self.own.grad)
        start = 0
        for parameter in self.trained:
            parameter.grad = flat[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()


@mistake("zero1", "After a step every rank", "the gather ran before the slices were stepped")
class StateGatherFirst(StateShardedDDP):
    """The gather runs before the step."""

    def make_optimizer(self, cls, **options):
        optimizer = cls([self.own], **options)
        optimizer.register_step_pre_hook(lambda *_: self.gather_early())
        return optimizer

    def gather_early(self):
        self.gather(self.flat, self.own)


@mistake("zero1", "All parameters lie in one flat tensor", "the last parameters would never be")
class StateRoundedDown(StateShardedDDP):
    """The remainder of the division by the ranks is dropped."""

    def flatten(self, tensors):
        flat = torch.cat([t.flatten() for t in tensors])
        return flat[: len(flat) // dist.get_world_size() * dist.get_world_size()].clone()

    @torch.no_grad()
    def flatten_parameters(self):
        self.flat = self.flatten([p.detach() for p in self.trained])
        self.own = self.slice_of(self.flat).requires_grad_()


@mistake("zero1", "All parameters lie in one flat tensor", "is no view of its place in flat")
class StateCopied(StateShardedDDP):
    """The parameters keep their own memory: what is gathered does not reach them."""

    @torch.no_grad()
    def flatten_parameters(self):
        self.flat = self.flatten([p.detach() for p in self.trained])
        self.own = self.slice_of(self.flat).requires_grad_()


@mistake("zero1", AFTER_FINISH, "is the sum over the ranks: divide it")
class StateSum(StateShardedDDP):
    """The sum is not divided."""

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        super().finish_gradient_synchronization()
        self.own.grad *= dist.get_world_size()


@mistake("zero1", AFTER_FINISH, "was divided by the number of ranks twice")
class StateTwice(StateShardedDDP):
    """Every rank's gradients are divided, and their sum too."""

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        for parameter in self.trained:
            if parameter.grad is not None:
                parameter.grad /= dist.get_world_size()
        super().finish_gradient_synchronization()


@mistake("zero1", AFTER_FINISH, "is NaN: the reduction was not waited for")
class StateNotWaited(StateShardedDDP):
    """The slice is used before it has arrived."""

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        flat = self.flatten([p.grad for p in self.trained])
        self.own.grad = torch.empty_like(self.own)
        reduce_scatter(self.own.grad, flat, dist.ReduceOp.SUM, dist.group.WORLD)
        self.own.grad /= dist.get_world_size()


@mistake("zero1", AFTER_FINISH, "on rank 1 is the slice of rank 0")
class StateFirstSlice(StateShardedDDP):
    """Every rank takes the first slice of the means."""

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        flat = self.flatten([p.grad for p in self.trained])
        dist.all_reduce(flat)
        self.own.grad = flat[: self.own.numel()] / dist.get_world_size()


@mistake("zero1", "Gradients are reduce-scattered, once", "all_reduce of 72 numbers in finish")
class StateAllReduce(StateShardedDDP):
    """All sums go to all ranks."""

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        flat = self.flatten([p.grad for p in self.trained])
        dist.all_reduce(flat)
        self.own.grad = self.slice_of(flat) / dist.get_world_size()
        for parameter in self.trained:
            parameter.grad = None


@mistake("zero1", "Three more steps", "is left after finish")
class StateGradientsLeft(StateShardedDDP):
    """The gradients stay, and the next backward adds to them."""

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        kept = [p.grad for p in self.trained]
        super().finish_gradient_synchronization()
        for parameter, gradient in zip(self.trained, kept, strict=True):
            parameter.grad = gradient


@mistake("zero1", "The saved state is whole", "the padding for 2 ranks among them")
class StateSavedWithPadding(StateShardedDDP):
    """The padding is saved, which depends on the number of ranks."""

    @torch.no_grad()
    def whole_state(self, optimizer):
        state = optimizer.state[self.own]
        return {
            key: self.gather(torch.empty_like(self.flat), value) if value.dim() else value
            for key, value in state.items()
        }


@mistake("zero1", "The saved state is whole", "rank 0's file would lack the others")
class StateOwnSaved(StateShardedDDP):
    """Each rank returns its own slice."""

    def whole_state(self, optimizer):
        return optimizer.state[self.own]


@mistake("zero1", "A state that was saved elsewhere", "rank 1 has the state of rank 0's slice")
class StateOfRank0(StateShardedDDP):
    """Every rank loads the first slice."""

    @torch.no_grad()
    def load_whole_state(self, optimizer, whole):
        n = self.own.numel()
        optimizer.state[self.own] = {
            key: value[:n].clone() if value.dim() else value for key, value in whole.items()
        }


@mistake("zero2", "Each bucket is reduce-scattered once", "sends half of an all-reduce")
class GradientsAllReduced(GradientShardedDDP):
    """All sums go to all ranks, which keep a slice."""

    def start(self, unit):
        flat = self.take_gradients(unit)
        handle = dist.all_reduce(flat, async_op=True)
        self.in_flight.append((handle, unit, unit.slice_of(flat), flat))


@mistake("zero2", AFTER_FINISH, "numbers was freed while a collective was still at work on it")
class GradientsFreedEarly(GradientShardedDDP):
    """The flat tensor is freed where the collective starts."""

    def start(self, unit):
        super().start(unit)
        self.in_flight[-1][-1].untyped_storage().resize_(0)


@mistake("zero2", AFTER_FINISH, "numbers was overwritten while a collective was still at work")
class GradientsOneBuffer(GradientShardedDDP):
    """The next bucket is brought into the tensor that is still being sent."""

    def take_gradients(self, unit):
        flat = super().take_gradients(unit)
        if not hasattr(self, "buffer"):
            self.buffer = flat.clone()
        return self.buffer.copy_(flat)


@mistake(
    "zero2", "After finish a rank has its slices", "is a view of 80 bytes, all of the flat tensor"
)
class GradientsWholeBucket(GradientShardedDDP):
    """The slice is received in place, and keeps the whole bucket."""

    def receiver(self, unit, flat):
        return unit.slice_of(flat)


@mistake("zero2", "After finish a rank has its slices", "flat tensors are in memory after finish")
class GradientsHeld(GradientShardedDDP):
    """A list keeps what has been waited for."""

    def take_gradients(self, unit):
        self.flats = [*getattr(self, "flats", []), super().take_gradients(unit)]
        return self.flats[-1]


@mistake("zero2", "After finish a rank has its slices", "grad is still there")
class GradientsLeft(GradientShardedDDP):
    """The gradients stay beside the flat tensor."""

    def take_gradients(self, unit):
        return unit.flatten([p.grad for p in unit.trained])


@mistake("zero2", "After finish each own.grad", "was divided by the number of ranks twice")
class GradientsTwice(GradientShardedDDP):
    """Divided before and after the sum."""

    def take_gradients(self, unit):
        return super().take_gradients(unit) / dist.get_world_size()


@mistake("zero2", "During backward at most two buckets", "of 6 flat tensors at once")
class GradientsUnbounded(GradientShardedDDP):
    """All buckets are waited for in finish."""

    on_the_wire = 99


@mistake("zero2", "The first bucket starts during backward", "waited for where it started")
class GradientsWaitedAtOnce(GradientShardedDDP):
    """Each bucket is waited for where it starts."""

    def start(self, unit):
        super().start(unit)
        self.finish_oldest()


@mistake("zero2", "The first bucket starts during backward", "start it in gradient_ready")
class GradientsInFinish(GradientShardedDDP):
    """Nothing starts before backward has ended."""

    def gradient_ready(self, parameter):
        pass

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        for unit in self.units:
            self.start(unit)
        super().finish_gradient_synchronization()


@mistake("zero2", "When each rank's gradients", "do the buckets start in the order of self.units")
class GradientsAsComplete(GradientShardedDDP):
    """A bucket is started when it is complete, whatever its place: each rank in its own order."""

    @torch.no_grad()
    def gradient_ready(self, parameter):
        self.ready.add(parameter)
        for unit in list(self.waiting):
            if self.ready.issuperset(unit.trained):
                self.waiting.remove(unit)
                self.start(unit)
