"""A solution of each exercise but 10 to 12, in the order of the exercises."""

from contextlib import contextmanager
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn


class AverageDDP(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        self.make_replicas_equal()

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    @torch.no_grad()
    def make_replicas_equal(self):
        for tensor in [*self.module.parameters(), *self.module.buffers()]:
            dist.broadcast(tensor, src=0)

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()


class OverlapDDP(AverageDDP):
    def __init__(self, module):
        super().__init__(module)
        self.handles = []
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.start_reduction)

    @torch.no_grad()
    def start_reduction(self, parameter):
        handle = dist.all_reduce(parameter.grad, async_op=True)
        self.handles.append((handle, parameter))

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        for handle, parameter in self.handles:
            handle.wait()
            parameter.grad /= dist.get_world_size()
        self.handles.clear()


def measure(computation, communication, window):
    times = dict.fromkeys(["computation", "communication", "overlapped", "exposed", "idle"], 0)
    inside = [e for pair in [*computation, *communication] for e in pair]
    edges = sorted({*window, *(e for e in inside if window[0] < e < window[1])})
    for start, end in pairwise(edges):
        busy, wire = covered(computation, start, end), covered(communication, start, end)
        length = end - start
        times["computation"] += busy * length
        times["communication"] += wire * length
        times["overlapped"] += (busy and wire) * length
        times["exposed"] += (wire and not busy) * length
        times["idle"] += (not busy and not wire) * length
    return times


def covered(intervals, start, end):
    return any(a <= start and end <= b for a, b in intervals)


def plan_buckets(nbytes, dtypes, order, capacity, tail):
    last = [order[-1]]
    for i in reversed(order[:-1]):
        if dtypes[i] != dtypes[last[0]] or sum(nbytes[k] for k in [i, *last]) > tail:
            break
        last.insert(0, i)
    buckets, open_buckets = [], {}
    for i in order[: len(order) - len(last)]:
        bucket = open_buckets.get(dtypes[i])
        if bucket is None or sum(nbytes[k] for k in [*bucket, i]) > capacity:
            open_buckets[dtypes[i]] = bucket = []
            buckets.append(bucket)
        bucket.append(i)
    place = {i: k for k, i in enumerate(order)}
    return sorted([*buckets, last], key=lambda bucket: place[bucket[-1]])


def all_reduce_seconds(nbytes, ranks, latency, bandwidth):
    return 2 * (ranks - 1) * (latency + nbytes / ranks / bandwidth)


def step_seconds(pieces, sends, slowdown):
    now = free = 0.0  # when computation, and when the wire, has done what was queued so far
    for piece, send in zip(pieces, sends, strict=True):
        beside = min(piece, max(0.0, free - now) / slowdown)
        now += beside * slowdown + piece - beside
        free = max(free, now) + send
    return max(now, free)


def last_that_pays(step_on, counts, limit):
    last = 0
    for ranks in counts:
        if step_on(1) / step_on(ranks) < limit:
            break
        last = ranks
    return last


class OrderedDDP(AverageDDP):
    def __init__(self, module):
        super().__init__(module)
        self.order = [p for p in reversed(list(module.parameters())) if p.requires_grad]
        self.begin_step()
        for parameter in self.order:
            parameter.register_post_accumulate_grad_hook(self.gradient_ready)

    def begin_step(self):
        self.ready = set()
        self.handles = []

    @torch.no_grad()
    def gradient_ready(self, parameter):
        self.ready.add(parameter)
        while len(self.handles) < len(self.order) and self.next() in self.ready:
            self.handles.append(dist.all_reduce(self.next().grad, async_op=True))

    def next(self):
        return self.order[len(self.handles)]

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        for handle, parameter in zip(self.handles, self.order, strict=True):
            handle.wait()
            parameter.grad /= dist.get_world_size()
        self.begin_step()


class AccumulatingDDP(OverlapDDP):
    synchronizing = True

    @contextmanager
    def no_sync(self):
        before, self.synchronizing = self.synchronizing, False
        try:
            yield
        finally:
            self.synchronizing = before

    def start_reduction(self, parameter):
        if self.synchronizing:
            super().start_reduction(parameter)

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        for handle, parameter in self.handles:
            handle.wait()
            parameter.grad /= dist.get_world_size()
        self.handles.clear()


class UnusedDDP(AverageDDP):
    @torch.no_grad()
    def finish_gradient_synchronization(self):
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        used = torch.tensor([int(p.grad is not None) for p in parameters])
        dist.all_reduce(used, op=dist.ReduceOp.MAX)
        for parameter, used_by_any in zip(parameters, used.tolist(), strict=True):
            if used_by_any:
                self.average(parameter)

    def average(self, parameter):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def ring_all_reduce(tensor):
    world_size, rank = dist.get_world_size(), dist.get_rank()
    chunks = tensor.view(-1).tensor_split(world_size)
    for k in range(world_size - 1):
        mine, theirs = chunks[(rank - k) % world_size], chunks[(rank - k - 1) % world_size]
        theirs += pass_on(mine, theirs)
    for k in range(world_size - 1):
        mine, theirs = chunks[(rank + 1 - k) % world_size], chunks[(rank - k) % world_size]
        theirs.copy_(pass_on(mine, theirs))


def pass_on(mine, theirs):
    """Send a chunk to the right while one arrives from the left."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    received = torch.empty_like(theirs)
    sending = dist.isend(mine, (rank + 1) % world_size)
    dist.recv(received, (rank - 1) % world_size)
    sending.wait()
    return received


class FlatDDP(AverageDDP):
    def __init__(self, module, *, bucket_size_mb=25):
        super().__init__(module)
        self.make_buckets(int(bucket_size_mb * (1 << 20)))
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.gradient_ready)

    def make_buckets(self, capacity):
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        plan = plan_buckets(
            [p.nbytes for p in parameters],
            [str(p.dtype) for p in parameters],
            list(reversed(range(len(parameters)))),
            capacity,
            tail=capacity // 4,
        )
        self.buckets = [[parameters[i] for i in members] for members in plan]
        self.flats = [torch.empty(sum(p.numel() for p in b)).to(b[0]) for b in self.buckets]
        self.begin_step()

    def begin_step(self):
        self.ready = set()
        self.handles = []

    @torch.no_grad()
    def gradient_ready(self, parameter):
        self.ready.add(parameter)
        while len(self.handles) < len(self.buckets) and self.ready.issuperset(self.next()):
            flat = self.flats[len(self.handles)]
            self.fill(flat, self.next())
            self.handles.append(dist.all_reduce(flat, async_op=True))

    def next(self):
        return self.buckets[len(self.handles)]

    def fill(self, flat, bucket):
        start = 0
        for parameter in bucket:
            view = flat[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
            if parameter.grad.data_ptr() != view.data_ptr():
                view.copy_(parameter.grad)
                parameter.grad = view

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        for handle, flat in zip(self.handles, self.flats, strict=True):
            handle.wait()
            flat /= dist.get_world_size()
        self.begin_step()


class LocalStepsDDP(AverageDDP):
    def __init__(self, module, every, outer_lr=0.7, outer_momentum=0.9):
        super().__init__(module)
        self.every = every
        self.outer_lr, self.outer_momentum = outer_lr, outer_momentum
        self.trained = [p for p in module.parameters() if p.requires_grad]
        self.steps = 0
        self.momentum = [torch.zeros_like(p) for p in self.trained]
        self.start = self.positions()

    def finish_gradient_synchronization(self):
        pass

    def positions(self):
        return [p.detach().clone() for p in self.trained]

    def make_optimizer(self, cls, **options):
        optimizer = cls(self.trained, **options)
        optimizer.register_step_post_hook(lambda *_: self.count_step())
        return optimizer

    def count_step(self):
        self.steps += 1
        if self.steps == self.every:
            self.outer_step()
            self.steps, self.start = 0, self.positions()

    @torch.no_grad()
    def outer_step(self):
        for parameter, start, momentum in zip(self.trained, self.start, self.momentum, strict=True):
            delta = start - parameter
            dist.all_reduce(delta)
            delta /= dist.get_world_size()
            momentum.mul_(self.outer_momentum).add_(delta)
            parameter.copy_(start - self.outer_lr * (delta + self.outer_momentum * momentum))
