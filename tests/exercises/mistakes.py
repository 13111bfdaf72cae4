"""Usual mistakes, each derived from the solution: the property that it lacks, and what is said."""

from collections.abc import Callable
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

from tests.exercises import solutions
from tests.exercises.solutions import (
    AccumulatingDDP,
    AverageDDP,
    FlatDDP,
    LocalStepsDDP,
    OrderedDDP,
    OverlapDDP,
    UnusedDDP,
)  # fmt: skip


class Mistake(NamedTuple):
    """Fails the property whose text starts with `text`, for a reason that contains `why`."""

    exercise: str
    text: str
    why: str
    code: Callable


MISTAKES: dict[str, Mistake] = {}


def mistake(exercise: str, text: str, why: str) -> Callable[[Callable], Callable]:
    """Adds the class or function that it decorates to `MISTAKES`."""

    def add(code: Callable) -> Callable:
        MISTAKES[code.__name__] = Mistake(exercise, text, why, code)
        return code

    return add


@mistake("average", "Every rank begins with rank 0's buffers", "broadcast module.buffers()")
class AverageNoBuffers(AverageDDP):
    """Buffers are forgotten."""

    def make_replicas_equal(self):
        for parameter in self.module.parameters():
            dist.broadcast(parameter.detach(), src=0)


@mistake("average", "After finish every gradient is the mean", "the sum over the ranks, divide")
class AverageSum(AverageDDP):
    """The sum is not divided."""

    def finish_gradient_synchronization(self):
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)


@mistake("average", "After finish every gradient is the mean", "nothing was averaged")
class AverageParameters(AverageDDP):
    """The parameters are averaged in place of their gradients."""

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        for parameter in self.module.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= dist.get_world_size()


@mistake("average", "After finish every gradient is the mean", "raised TypeError")
class AverageFrozen(AverageDDP):
    """A frozen parameter's missing gradient is not expected."""

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        for parameter in self.module.parameters():
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)


@mistake("average", "Every rank begins with rank 0's param", "not matched on rank 0: call 1")
class AverageOneRank(AverageDDP):
    """Only rank 0 broadcasts; the others do not know that they must call it too."""

    def make_replicas_equal(self):
        if dist.get_rank() != 0:
            for parameter in self.module.parameters():
                dist.broadcast(parameter.detach(), src=0)


@mistake("hooks", "After finish every gradient", "itself was reduced, and not its .grad")
class HooksParameter(OverlapDDP):
    """The hook's argument is taken for the gradient."""

    @torch.no_grad()
    def start_reduction(self, gradient):
        gradient /= dist.get_world_size()
        self.handles.append((dist.all_reduce(gradient, async_op=True), gradient))

    def finish_gradient_synchronization(self):
        for handle, _ in self.handles:
            handle.wait()
        self.handles.clear()


@mistake("hooks", "After finish every gradient", "divide after the wait")
class HooksRace(OverlapDDP):
    """The gradient is divided while its reduction is under way."""

    @torch.no_grad()
    def start_reduction(self, parameter):
        self.handles.append((dist.all_reduce(parameter.grad, async_op=True), parameter))
        parameter.grad /= dist.get_world_size()

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        for handle, _ in self.handles:
            handle.wait()
        self.handles.clear()


@mistake("hooks", "In each of three steps finish waits", "[8, 16, 24]")
class HooksLeakedHandles(OverlapDDP):
    """The handles of earlier steps are kept."""

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        for handle, _ in self.handles:
            handle.wait()
        for parameter in self.module.parameters():
            parameter.grad /= dist.get_world_size()


@mistake("hooks", "Nothing blocks during backward", "without async_op=True")
class HooksBlocking(OverlapDDP):
    """The hook waits: it is called early and nothing overlaps."""

    def start_reduction(self, parameter):
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


@mistake("hooks", "The first all-reduce starts before", "none was started before")
class HooksAllAtTheEnd(OverlapDDP):
    """Everything is started in finish: right, and nothing overlaps."""

    def watch(self, parameter):
        pass

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        for parameter in self.module.parameters():
            self.start_reduction(parameter)
        super().finish_gradient_synchronization()


@mistake("hooks", "After finish every gradient", "after it was accumulated")
class HooksBeforeAccumulation(OverlapDDP):
    """A hook on the tensor runs before accumulation, with a gradient that is not yet `.grad`."""

    def watch(self, parameter):
        parameter.register_hook(self.start_early)

    def start_early(self, gradient):
        self.handles.append((dist.all_reduce(gradient.clone(), async_op=True), gradient))

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        for handle, _ in self.handles:
            handle.wait()
        self.handles.clear()


@mistake("measure", "An instant that two intervals", "computation is 15 and should be 10")
def measure_lengths(computation, communication, window):
    """Lengths are added up: an instant that two intervals cover counts twice."""
    times = solutions.measure(computation, communication, window)
    start, end = window
    clipped = [max(0, min(b, end) - max(a, start)) for a, b in computation]
    return times | {"computation": sum(clipped)}


@mistake("measure", "An instant that two intervals", "overlapped is 14 and should be 6")
def measure_pairs(computation, communication, window):
    """The overlap of every pair is added up."""
    times = solutions.measure(computation, communication, window)
    pairs = [(a, b, c, d) for a, b in computation for c, d in communication]
    overlapped = sum(max(0, min(b, d, window[1]) - max(a, c, window[0])) for a, b, c, d in pairs)
    return times | {"overlapped": overlapped, "exposed": times["communication"] - overlapped}


@mistake("measure", "Communication beside computation", "idle is 4 and should be 8")
def measure_idle(computation, communication, window):
    """Idle is what computation and communication leave, though they overlap."""
    times = solutions.measure(computation, communication, window)
    idle = window[1] - window[0] - times["computation"] - times["communication"]
    return times | {"idle": idle}


@mistake("measure", "What lies outside the window", "computation is 18 and should be 6")
def measure_window(computation, communication, window):
    """What lies outside the window counts."""
    everything = [*computation, *communication, window]
    whole = (min(a for a, _ in everything), max(b for _, b in everything))
    times = solutions.measure(computation, communication, whole)
    return times | {"idle": solutions.measure(computation, communication, window)["idle"]}


@mistake("plan", "Gradients stand in their order of arrival", "bucket [0, 1, 2]")
def plan_forward_order(nbytes, dtypes, order, capacity, tail):
    """Buckets follow registration, not arrival."""
    return solutions.plan_buckets(nbytes, dtypes, sorted(order), capacity, tail)


@mistake("plan", "A bucket holds one dtype", "bucket [7, 6, 5] holds two dtypes")
def plan_mixed_dtypes(nbytes, dtypes, order, capacity, tail):
    """The dtype is not looked at."""
    return solutions.plan_buckets(nbytes, ["any"] * len(dtypes), order, capacity, tail)


@mistake("plan", "The bucket that is complete last", "[2, 1, 0] has 120 bytes")
def plan_no_tail(nbytes, dtypes, order, capacity, tail):
    """The last bucket is as large as the others."""
    return solutions.plan_buckets(nbytes, dtypes, order, capacity, tail=capacity)


@mistake("plan", "A bucket of several gradients", "bucket [6, 4, 2] has 120 bytes")
def plan_overfull(nbytes, dtypes, order, capacity, tail):
    """A bucket is closed after the gradient that overfills it."""
    buckets, open_buckets = [], {}
    for i in order:
        bucket = open_buckets.get(dtypes[i])
        if bucket is None or sum(nbytes[k] for k in bucket) >= capacity:
            open_buckets[dtypes[i]] = bucket = []
            buckets.append(bucket)
        bucket.append(i)
    return sorted(buckets, key=lambda bucket: order.index(bucket[-1]))


@mistake("plan", "Buckets are filled", "10 buckets of float32")
def plan_one_each(nbytes, dtypes, order, capacity, tail):
    """Every gradient travels alone."""
    return [[i] for i in order]


@mistake("order", "When each rank takes them in its own order", "no error was raised")
class OrderOfReadiness(OrderedDDP):
    """What is ready is started: the usual hand-built version."""

    @torch.no_grad()
    def gradient_ready(self, parameter):
        self.handles.append((dist.all_reduce(parameter.grad, async_op=True), parameter))

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        for handle, parameter in self.handles:
            handle.wait()
            parameter.grad /= dist.get_world_size()
        self.begin_step()


@mistake("order", "When each rank takes them in its own order", "mixes different")
class OrderOwnObservation(OrderedDDP):
    """Each rank adopts the order that it has seen itself."""

    @torch.no_grad()
    def gradient_ready(self, parameter):
        if parameter not in self.ready:
            at = len(self.ready)
            self.order = [p for p in self.order if p is not parameter]
            self.order.insert(at, parameter)
        super().gradient_ready(parameter)


@mistake("order", "The first all-reduce starts before", "none was started during")
class OrderAllAtTheEnd(OrderedDDP):
    """One order, because everything is started in finish."""

    def gradient_ready(self, parameter):
        pass

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        for parameter in self.order:
            super().gradient_ready(parameter)
        super().finish_gradient_synchronization()


@mistake("order", "Two more steps", "raised TypeError")
class OrderNotReset(OrderedDDP):
    """What was ready in the first step is taken for ready in the next."""

    def begin_step(self):
        self.ready = getattr(self, "ready", set())
        self.handles = []


@mistake("no_sync", "After an exception inside no_sync", "restore it in a `finally`")
class NoSyncWithoutFinally(AccumulatingDDP):
    """An exception leaves synchronisation off."""

    @contextmanager
    def no_sync(self):
        before, self.synchronizing = self.synchronizing, False
        yield
        self.synchronizing = before


@mistake("no_sync", "The end of an inner block", "restore what was there before it")
class NoSyncNotNested(AccumulatingDDP):
    """The end of any block switches synchronisation on."""

    @contextmanager
    def no_sync(self):
        self.synchronizing = False
        try:
            yield
        finally:
            self.synchronizing = True


@mistake("no_sync", "Inside no_sync no collective starts", "16 calls of all_reduce")
class NoSyncIgnored(AccumulatingDDP):
    """The hook does not look."""

    def start_reduction(self, parameter):
        self.handles.append((dist.all_reduce(parameter.grad, async_op=True), parameter))


@mistake("no_sync", "Finish after backwards inside no_sync", "what was reduced may be")
class NoSyncDividesAll(AccumulatingDDP):
    """Finish divides every gradient, reduced or not."""

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        for handle, _ in self.handles:
            handle.wait()
        self.handles.clear()
        for parameter in self.module.parameters():
            parameter.grad /= dist.get_world_size()


@mistake("unused", "What no rank used keeps .grad None", "AdamW would decay it")
class UnusedZerosForAll(UnusedDDP):
    """What no rank used gets a gradient of zeros."""

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        for parameter in self.module.parameters():
            self.average(parameter)


@mistake("unused", "What only rank 0 used", "divide by all")
class UnusedDividedByUsers(UnusedDDP):
    """The mean is taken over the ranks that used the parameter."""

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        parameters = list(self.module.parameters())
        users = torch.tensor([int(p.grad is not None) for p in parameters])
        dist.all_reduce(users)
        for parameter, count in zip(parameters, users.tolist(), strict=True):
            if count:
                self.average(parameter)
                parameter.grad *= dist.get_world_size() / count


@mistake("unused", "What only rank 0 used", "a collective was not matched on rank 1")
class UnusedSkipped(UnusedDDP):
    """A rank leaves out what it has not got."""

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()


@mistake("ring", "Twelve numbers", "a send was not matched on rank 1")
def ring_all_send_first(tensor):
    """Everybody sends before anybody receives."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    chunks = tensor.view(-1).tensor_split(world_size)
    for k in range(world_size - 1):
        mine, theirs = chunks[(rank - k) % world_size], chunks[(rank - k - 1) % world_size]
        received = torch.empty_like(theirs)
        dist.send(mine, (rank + 1) % world_size)
        dist.recv(received, (rank - 1) % world_size)
        theirs += received
    for k in range(world_size - 1):
        mine, theirs = chunks[(rank + 1 - k) % world_size], chunks[(rank - k) % world_size]
        theirs.copy_(solutions.pass_on(mine, theirs))


@mistake("ring", "Numbers that the ranks do not divide", "is number 12")
def ring_drops_remainder(tensor):
    """The remainder of the division into chunks is dropped."""
    whole = tensor.numel() // dist.get_world_size() * dist.get_world_size()
    solutions.ring_all_reduce(tensor.view(-1)[:whole])


@mistake("ring", "No ready-made collective", "all_reduce was called")
def ring_ready_made(tensor):
    """A ready-made collective."""
    dist.all_reduce(tensor)


@mistake("ring", "Each rank sends 2 (W - 1) / W", "with 3 ranks, rank 0 sent 9600")
def ring_whole_tensor(tensor):
    """The whole tensor goes round, W - 1 times: right, and too many bytes."""
    passing = tensor.clone()
    for _ in range(dist.get_world_size() - 1):
        passing = solutions.pass_on(passing, tensor)
        tensor += passing


@mistake("flat", "After finish every .grad is a view", "lies outside of the flat tensors")
class FlatCopiedBack(FlatDDP):
    """The flat tensor is made anew and the means are copied back: right, and two more passes."""

    def fill(self, flat, bucket):
        flat.copy_(torch.cat([p.grad.flatten() for p in bucket]))

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        for handle, sums, bucket in zip(self.handles, self.flats, self.buckets, strict=True):
            handle.wait()
            sums /= dist.get_world_size()
            slices = sums.split([p.numel() for p in bucket])
            for parameter, values in zip(bucket, slices, strict=True):
                parameter.grad.copy_(values.view_as(parameter))
        self.begin_step()


@mistake(
    "flat", "Gradients are right after zero_grad(), which", "must be brought into the flat tensor"
)
class FlatBoundOnce(FlatDDP):
    """The views are bound in the first step only: zero_grad() takes them away for good."""

    bound = ()

    def fill(self, flat, bucket):
        if flat.data_ptr() not in self.bound:
            super().fill(flat, bucket)
            self.bound = (*self.bound, flat.data_ptr())


@mistake("flat", "When each rank's gradients", "a collective was not matched on rank 1")
class FlatAsComplete(FlatDDP):
    """A bucket is started when it is complete, whatever its place: each rank in its own order."""

    @torch.no_grad()
    def gradient_ready(self, parameter):
        self.ready.add(parameter)
        for bucket, flat_tensor in zip(self.buckets, self.flats, strict=True):
            if any(p is parameter for p in bucket) and self.ready.issuperset(bucket):
                self.fill(flat_tensor, bucket)
                self.handles.append(dist.all_reduce(flat_tensor, async_op=True))


@mistake("flat", "The first bucket starts before", "no bucket was started")
class FlatForwardOrder(FlatDDP):
    """Buckets follow registration: the first to start waits for the end of backward."""

    def make_buckets(self, capacity):
        super().make_buckets(capacity)
        self.buckets.reverse()
        self.flats.reverse()


@mistake("flat", "The bucket that starts last", "nothing to hide behind")
class FlatNoTail(FlatDDP):
    """The last bucket is as large as the others."""

    tail_share = 1


@mistake(
    "predict",
    "Without latency, an all-reduce sends",
    "each rank sends 2 chunks of 1/2 of the bytes",
)
def predict_bytes_per_rank_count(nbytes, ranks, latency, bandwidth):
    """The share 1/W is forgotten."""
    return 2 * (ranks - 1) * (latency + nbytes / bandwidth)


@mistake("predict", "Collectives are worked off one after another", "has ended")
def predict_no_queue(pieces, sends, slowdown):
    """All collectives run at once."""
    ends = [sum(pieces[: i + 1]) + send for i, send in enumerate(sends)]
    return max(sum(pieces), *ends)


@mistake("predict", "Computation advances at 1 / slowdown", "exactly while something is sent")
def predict_all_slower(pieces, sends, slowdown):
    """All of backward is slowed down."""
    return solutions.step_seconds([slowdown * piece for piece in pieces], sends, 1.0)


@mistake("predict", "A variant pays until", "is 1 and should be 0")
def predict_one_always_pays(step_on, counts, limit):
    """One rank is taken to pay, also where it is not asked for."""
    return solutions.last_that_pays(step_on, counts, limit) or 1


@mistake("predict", "A variant pays until", "step_on(1) / step_on(W)")
def predict_best_of_all(step_on, counts, limit):
    """The largest number that pays, also behind one that does not."""
    return max([n for n in counts if step_on(1) / step_on(n) >= limit], default=0)


@mistake("diloco", "Step number `every` ends where", "every rank has moved uphill")
class LocalUphill(LocalStepsDDP):
    """The pseudo-gradient has the wrong sign."""

    def step_parameter(self, parameter, start, momentum, delta):
        super().step_parameter(parameter, start, momentum, -delta)


@mistake("diloco", "Momentum and start go on", "momentum begins anew in each round: keep it")
class LocalForgetful(LocalStepsDDP):
    """Each round begins with new momentum."""

    def step_parameter(self, parameter, start, momentum, delta):
        super().step_parameter(parameter, start, torch.zeros_like(momentum), delta)


@mistake("diloco", "Step number `every` ends where", "without Nesterov's look ahead")
class LocalHeavyBall(LocalStepsDDP):
    """Momentum is applied as it is."""

    def step_parameter(self, parameter, start, momentum, delta):
        momentum.mul_(self.outer_momentum).add_(delta)
        parameter.copy_(start - self.outer_lr * momentum)


@mistake("diloco", "The first steps of a round", "only number 3 sends")
class LocalAlways(LocalStepsDDP):
    """All ranks meet behind every step."""

    def count_step(self):
        self.outer_step()
        self.start = self.positions()


@mistake("diloco", "Step number `every` ends where", "that is the sum over the ranks: divide")
class LocalSum(LocalStepsDDP):
    """The sum of what the ranks have moved is not divided."""

    def step_parameter(self, parameter, start, momentum, delta):
        super().step_parameter(parameter, start, momentum, delta * dist.get_world_size())


@mistake("diloco", "Momentum and start go on", "wrong from round 2: ")
class LocalFirstStart(LocalStepsDDP):
    """Every round steps from where the first one began."""

    def count_step(self):
        self.steps += 1
        if self.steps == self.every:
            self.outer_step()
            self.steps = 0
