"""Usual mistakes, each a change of the solution: the property that it lacks, and what is said.

A row: exercise, how the property's text starts, a part of what is said, then text of the solution
and its replacement, perhaps twice. Further lines of a text begin below its first one.
"""

WORLD = "dist.group.WORLD"
DIVIDE = "parameter.grad /= dist.get_world_size()"
REDUCE = "dist.all_reduce(parameter.grad, async_op=True)"
WATCH = "parameter.register_post_accumulate_grad_hook"
WAIT_AND_DIVIDE = f"handle.wait()\n{DIVIDE}"
SCATTER = f"reduce_scatter(self.own.grad, flat, dist.ReduceOp.SUM, {WORLD}).wait()"
OPTIMIZER = "cls([unit.own for unit in self.units], **options)"
GIVE_GRADIENTS = """def give_gradients(*_):
    for p in self.trained:
        p.grad = torch.empty_like(p)
    flat = self.gather(torch.empty_like(self.flat), self.own.grad)
    torch.nn.utils.vector_to_parameters(flat, [p.grad for p in self.trained])

optimizer = cls(self.trained, **options)
optimizer.register_step_pre_hook(give_gradients)"""
OF_COPIES = """own = [unit.own for unit in self.units]
copies = [x.detach().clone().requires_grad_() for x in own]
def give_gradients(*_):
    for copied, x in zip(copies, own, strict=True):
        copied.grad = x.grad
optimizer = cls(copies, **options)
optimizer.register_step_pre_hook(give_gradients)
return optimizer"""

MISTAKES = {
    "AverageNoBuffers": (
        "average", "Every rank begins with rank 0's buffers", "broadcast module.buffers()",
        "[*self.module.parameters(), *self.module.buffers()]", "self.module.parameters()",
    ),
    "AverageSum": (
        "average", "After finish every gradient is the mean", "the sum over the ranks, divide",
        DIVIDE, "",
    ),
    "AverageOneRank": (  # rank 0 does not know that it must call it too
        "average", "Every rank begins with rank 0's param", "not matched on rank 0: call 1",
        "dist.broadcast(tensor, src=0)", "dist.get_rank() == 0 or dist.broadcast(tensor, src=0)",
    ),
    "HooksParameter": (  # the hook's argument is taken for the gradient
        "hooks", "After finish every gradient", "itself was reduced, and not its .grad",
        REDUCE, "dist.all_reduce(parameter.div_(dist.get_world_size()), async_op=True)",
        DIVIDE, "",
    ),
    "HooksRace": (  # a gradient is divided while its reduction is under way
        "hooks", "After finish every gradient", "divide after the wait",
        "self.handles.append((handle, parameter))",
        f"self.handles.append((handle, parameter))\n{DIVIDE}",
        WAIT_AND_DIVIDE, "handle.wait()",
    ),
    "HooksLeakedHandles": (
        "hooks", "In each of three steps finish waits", "[8, 16, 24]",
        "self.handles.clear()", "",
    ),
    "HooksBlocking": (
        "hooks", "Nothing blocks during backward", "without async_op=True",
        f"handle = {REDUCE}\nself.handles.append((handle, parameter))",
        f"dist.all_reduce(parameter.grad)\n{DIVIDE}",
    ),
    "HooksAllAtTheEnd": (  # right, and nothing overlaps
        "hooks", "The first all-reduce starts before", "none was started before",
        f"{WATCH}(self.start_reduction)", "pass",
        "for handle, parameter in self.handles:",
        "for parameter in self.module.parameters():\n"
        "    self.start_reduction(parameter)\n"
        "for handle, parameter in self.handles:",
    ),
    "measure_lengths": (  # an instant that two intervals cover counts twice
        "measure", "An instant that two intervals", "computation is 15 and should be 10",
        "times[\"computation\"] += busy * length",
        "times[\"computation\"] += sum(a <= start and end <= b for a, b in computation) * length",
    ),
    "measure_window": (
        "measure", "What lies outside the window", "computation is 18 and should be 6",
        "{*window, *(e for e in inside if window[0] < e < window[1])}", "{*window, *inside}",
    ),
    "plan_forward_order": (
        "plan", "Gradients stand in their order of arrival", "bucket [0, 1, 2]",
        "last = [order[-1]]", "order = sorted(order)\nlast = [order[-1]]",
    ),
    "plan_mixed_dtypes": (
        "plan", "A bucket holds one dtype", "bucket [7, 6, 5] holds two dtypes",
        "last = [order[-1]]", "dtypes = ['any'] * len(dtypes)\nlast = [order[-1]]",
    ),
    "plan_no_tail": (
        "plan", "The bucket that is complete last", "[2, 1, 0] has 120 bytes",
        "last = [order[-1]]", "tail = capacity\nlast = [order[-1]]",
    ),
    "plan_overfull": (  # a bucket is closed after the gradient that overfills it
        "plan", "A bucket of several gradients", "bucket [6, 4, 2] has 120 bytes",
        "sum(nbytes[k] for k in [*bucket, i]) > capacity",
        "sum(nbytes[k] for k in bucket) >= capacity",
    ),
    "plan_one_each": (
        "plan", "Buckets are filled", "10 buckets of float32",
        "last = [order[-1]]", "return [[i] for i in order]",
    ),
    "OrderOfReadiness": (  # what is ready is started: the usual hand-built version
        "order", "When each rank takes them in its own order", "no error was raised",
        "while len(self.handles) < len(self.order) and self.next() in self.ready:\n"
        "    self.handles.append(dist.all_reduce(self.next().grad, async_op=True))",
        f"self.handles.append({REDUCE})",
    ),
    "OrderOwnObservation": (  # each rank adopts the order that it has seen itself
        "order", "When each rank takes them in its own order", "mixes different",
        "self.ready.add(parameter)",
        "self.ready.add(parameter)\nself.order.sort(key=lambda p: p not in self.ready)",
    ),
    "OrderAllAtTheEnd": (
        "order", "The first all-reduce starts before", "none was started during",
        f"{WATCH}(self.gradient_ready)", "pass",
        "for handle, parameter in zip(",
        "for parameter in self.order:\n"
        "    self.gradient_ready(parameter)\n"
        "for handle, parameter in zip(",
    ),
    "NoSyncWithoutFinally": (
        "no_sync", "After an exception inside no_sync", "restore it in a `finally`",
        "try:\n    yield\nfinally:\n    self.synchronizing = before",
        "yield\nself.synchronizing = before",
    ),
    "NoSyncNotNested": (
        "no_sync", "The end of an inner block", "restore what was there before it",
        "self.synchronizing = before", "self.synchronizing = True",
    ),
    "NoSyncIgnored": (
        "no_sync", "Inside no_sync no collective starts", "16 calls of all_reduce",
        "if self.synchronizing:", "if True:",
    ),
    "UnusedZerosForAll": (
        "unused", "What no rank used keeps .grad None", "AdamW would decay it",
        "if used_by_any:", "if True:",
    ),
    "UnusedSkipped": (  # a rank leaves out what it has not got
        "unused", "What only rank 0 used", "a collective was not matched on rank 1",
        "dist.all_reduce(used, op=dist.ReduceOp.MAX)", "",
        "if used_by_any:", "if parameter.grad is not None:",
    ),
    "ring_all_send_first": (
        "ring", "Twelve numbers", "a send was not matched on rank 1",
        "sending = dist.isend(", "dist.send(",
        "sending.wait()", "",
    ),
    "ring_drops_remainder": (
        "ring", "Numbers that the ranks do not divide", "is number 12",
        "tensor.view(-1).tensor_split(",
        "tensor.view(-1)[: tensor.numel() // world_size * world_size].tensor_split(",
    ),
    "ring_ready_made": (
        "ring", "No ready-made collective", "all_reduce was called",
        "chunks = tensor.view(-1)", "return dist.all_reduce(tensor)\nchunks = tensor.view(-1)",
    ),
    "ring_whole_tensor": (  # goes round, W - 1 times: right, and too many bytes
        "ring", "Each rank sends 2 (W - 1) / W", "with 3 ranks, rank 0 sent 9600",
        "chunks = tensor.view(-1).tensor_split(world_size)",
        "passing = tensor.clone()\n"
        "for _ in range(world_size - 1):\n"
        "    passing = pass_on(passing, tensor)\n"
        "    tensor += passing\n"
        "return",
    ),
    "FlatCopiedBack": (  # right, and two more passes
        "flat", "After finish every .grad is a view", "lies outside of the flat tensors",
        "if parameter.grad.data_ptr() != view.data_ptr():\n"
        "    view.copy_(parameter.grad)\n"
        "    parameter.grad = view",
        "view.copy_(parameter.grad)",
        "for handle, flat in zip(self.handles, self.flats, strict=True):\n"
        "    handle.wait()\n"
        "    flat /= dist.get_world_size()",
        "for handle, flat, bucket in zip(self.handles, self.flats, self.buckets, strict=True):\n"
        "    handle.wait()\n"
        "    flat /= dist.get_world_size()\n"
        "    slices = flat.split([p.numel() for p in bucket])\n"
        "    for parameter, values in zip(bucket, slices, strict=True):\n"
        "        parameter.grad.copy_(values.view_as(parameter))",
    ),
    "FlatBoundOnce": (  # zero_grad() takes the views away for good
        "flat", "Gradients are right after zero_grad(), which",
        "must be brought into the flat tensor",
        "if parameter.grad.data_ptr() != view.data_ptr():", "if not hasattr(parameter, 'bound'):",
        "parameter.grad = view", "parameter.grad = parameter.bound = view",
    ),
    "FlatAsComplete": (  # whatever its place: each rank in its own order
        "flat", "When each rank's gradients", "a collective was not matched on rank 1",
        "while len(self.handles) < len(self.buckets) and self.ready.issuperset(self.next()):\n"
        "    flat = self.flats[len(self.handles)]\n"
        "    self.fill(flat, self.next())",
        "for bucket, flat in zip(self.buckets, self.flats, strict=True):\n"
        "    if not any(p is parameter for p in bucket) or not self.ready.issuperset(bucket):\n"
        "        continue\n"
        "    self.fill(flat, bucket)",
    ),
    "FlatNoTail": (
        "flat", "The bucket that starts last", "nothing to hide behind",
        "tail=capacity // 4", "tail=capacity",
    ),
    "predict_bytes_per_rank_count": (
        "predict", "Without latency, an all-reduce sends",
        "each rank sends 2 chunks of 1/2 of the bytes",
        "nbytes / ranks / bandwidth", "nbytes / bandwidth",
    ),
    "predict_no_queue": (  # all collectives run at once
        "predict", "Collectives are worked off one after another", "has ended",
        "free = max(free, now) + send", "free = max(free, now + send)",
    ),
    "predict_all_slower": (  # all of backward, sent or not
        "predict", "Computation advances at 1 / slowdown", "exactly while something is sent",
        "now = free = 0.0",
        "pieces, slowdown = [slowdown * p for p in pieces], 1\nnow = free = 0.0",
    ),
    "predict_best_of_all": (  # also behind one that does not pay
        "predict", "A variant pays until", "step_on(1) / step_on(W)",
        "break", "continue",
    ),
    "StateNoGather": (
        "zero1", "After a step every rank", "gather the parameters after the step",
        "optimizer.register_step_post_hook(lambda *_: self.gather(self.flat, self.own))", "",
    ),
    "StateOfEverything": (  # every rank's optimizer has all parameters
        "zero1", "The optimizer has state for this rank's slice", "no memory is saved",
        "optimizer = cls([self.own], **options)\n"
        "optimizer.register_step_post_hook(lambda *_: self.gather(self.flat, self.own))",
        GIVE_GRADIENTS,
    ),
    "StateGatherFirst": (
        "zero1", "After a step every rank", "the gather ran before the slices were stepped",
        "optimizer.register_step_post_hook(lambda *_: self.gather(self.flat, self.own))",
        "optimizer.register_step_pre_hook(lambda *_: [self.gather(self.flat, self.own)] and None)",
    ),
    "StateRoundedDown": (  # the remainder of the division by the ranks is dropped
        "zero1", "All parameters lie in one flat tensor", "the last parameters would never be",
        "return torch.nn.functional.pad(flat, (0, -len(flat) % dist.get_world_size()))",
        "return flat[: len(flat) // dist.get_world_size() * dist.get_world_size()].clone()",
        "parameter.data = self.flat[start : start + parameter.numel()].view_as(parameter)", "pass",
    ),
    "StateCopied": (  # what is gathered does not reach the parameters
        "zero1", "All parameters lie in one flat tensor", "is no view of its place in flat",
        "].view_as(parameter)", "].clone().view_as(parameter)",
    ),
    "StateSum": (
        "zero1", "After finish", "is the sum over the ranks: divide it",
        "self.own.grad /= dist.get_world_size()", "",
    ),
    "StateAllReduce": (
        "zero1", "Gradients are reduce-scattered, once", "all_reduce of 72 numbers in finish",
        SCATTER, "dist.all_reduce(flat)\nself.own.grad = self.slice_of(flat)",
    ),
    "StateGradientsLeft": (  # the next backward adds to them
        "zero1", "Three more steps", "is left after finish",
        "parameter.grad = None", "pass",
    ),
    "StateSavedWithPadding": (  # which depends on the number of ranks
        "zero1", "The saved state is whole", "the padding for 2 ranks among them",
        "value)[:count]", "value)",
    ),
    "StateOwnSaved": (
        "zero1", "The saved state is whole", "rank 0's file would lack the others",
        "return {", "return optimizer.state[self.own]\nreturn {",
    ),
    "StateOfRank0": (  # every rank loads the first slice
        "zero1", "A state that was saved elsewhere", "rank 1 has the state of rank 0's slice",
        "self.slice_of(self.flatten([value])).clone()",
        "self.flatten([value])[: self.own.numel()].clone()",
    ),
    "GradientsAllReduced": (
        "zero2", "Each bucket is reduce-scattered once", "sends half of an all-reduce",
        "own = torch.empty_like(unit.own)\n"
        f"handle = reduce_scatter(own, flat, dist.ReduceOp.SUM, {WORLD})",
        "own, handle = unit.slice_of(flat), dist.all_reduce(flat, async_op=True)",
    ),
    "GradientsFreedEarly": (  # where the collective starts
        "zero2", "After finish", "numbers was freed while a collective was still at work on it",
        "self.in_flight.append((handle, unit, own, flat))",
        "self.in_flight.append((handle, unit, own, flat))\nflat.untyped_storage().resize_(0)",
    ),
    "GradientsOneBuffer": (  # the next bucket is brought into what is still being sent
        "zero2", "After finish", "numbers was overwritten while a collective was still at work",
        "flat = self.take_gradients(unit)",
        "flat = self.take_gradients(unit)\n"
        "self.buffer = getattr(self, 'buffer', flat.clone())\n"
        "flat = self.buffer.copy_(flat)",
    ),
    "GradientsWholeBucket": (  # a slice that is received in place keeps the whole bucket
        "zero2", "After finish a rank has its slices",
        "is a view of 80 bytes, all of the flat tensor",
        "own = torch.empty_like(unit.own)", "own = unit.slice_of(flat)",
    ),
    "GradientsHeld": (  # a list keeps what has been waited for
        "zero2", "After finish a rank has its slices", "flat tensors are in memory after finish",
        "flat = self.take_gradients(unit)",
        "flat = self.take_gradients(unit)\nself.flats = [*getattr(self, 'flats', []), flat]",
    ),
    "GradientsLeft": (
        "zero2", "After finish a rank has its slices", "grad is still there",
        "parameter.grad = None", "pass",
    ),
    "GradientsUnbounded": (
        "zero2", "During backward at most two buckets", "of 6 flat tensors at once",
        "on_the_wire = 2", "on_the_wire = 99",
    ),
    "GradientsWaitedAtOnce": (
        "zero2", "The first bucket starts during backward", "waited for where it started",
        "self.in_flight.append((handle, unit, own, flat))",
        "self.in_flight.append((handle, unit, own, flat))\nself.finish_oldest()",
    ),
    "GradientsInFinish": (
        "zero2", "The first bucket starts during backward", "start it in gradient_ready",
        f"{WATCH}(self.gradient_ready)", "pass",
        "while self.in_flight:",
        "for unit in self.units:\n    self.start(unit)\nwhile self.in_flight:",
    ),
    "GradientsAsComplete": (  # whatever its place: each rank in its own order
        "zero2", "When each rank's gradients", "do the buckets start in the order of self.units",
        "while self.waiting and self.ready.issuperset(self.waiting[0].trained):\n"
        "    self.start(self.waiting.pop(0))",
        "for unit in list(self.waiting):\n"
        "    if self.ready.issuperset(unit.trained):\n"
        "        self.waiting.remove(unit)\n"
        "        self.start(unit)",
    ),
    "ShardedReplaced": (  # each gather has a new buffer; hiding the parameters frees nothing
        "fsdp", "In forward at most two blocks", "autograd has saved views of it",
        "if self.values.untyped_storage().size() == 0:\n"
        "    self.values.untyped_storage().resize_(self.values.nbytes)",
        "if getattr(self, 'is_hidden', False):\n"
        "    self.values, self.is_hidden = torch.empty_like(self.values), False",
        "self.values.untyped_storage().resize_(0)", "self.is_hidden = True",
    ),
    "ShardedNoPrefetch": (
        "fsdp", "While a block computes", "has not been started: nothing hides it",
        "if 0 <= following < len(self.blocks):", "if False:",
    ),
    "ShardedReplacedAndFreed": (
        "fsdp", "After finish", "autograd's saved views are of the old one",
        "self.values.untyped_storage().resize_(self.values.nbytes)",
        "self.values = torch.empty(self.own.numel() * dist.get_world_size())",
    ),
    "ShardedNotFreedInBackward": (
        "fsdp", "In backward at most two blocks", "free a block when its last gradient is there",
        "if self.ready.issuperset(self.blocks[k].trained):\n    self.blocks[k].free()",
        "if self.ready.issuperset(self.blocks[k].trained):",
        "self.root.free()", "for unit in self.units:\n    unit.free()",
    ),
    "ShardedRootNotFreed": (
        "fsdp", "In backward at most two blocks", "the root is whole after finish",
        "self.root.free()", "",
    ),
    "ShardedFreesAhead": (  # a forward frees the block that was gathered ahead too
        "fsdp", "Each block is gathered twice",
        "block 1 was gathered ahead, freed in the forward of",
        "def after_forward(self, k):\n    self.blocks[k].free()",
        "def after_forward(self, k):\n    for unit in self.blocks:\n        unit.free()",
    ),
    "ShardedFreedAtFirstGradient": (
        "fsdp", "After finish", "not at an earlier one",
        "self.ready.add(parameter)", "self.blocks[k].free()\nself.ready.add(parameter)",
    ),
    "ShardedNotGatheredInBackward": (
        "fsdp", "After finish", "gather it again in before_backward",
        "self.gather(k, k - 1)", "pass",
    ),
    "ShardedRootFreedEarly": (  # after forward, as the blocks are
        "fsdp", "After finish", "which was freed: free it in finish",
        "return self.module(*args, **kwargs)",
        "y = self.module(*args, **kwargs)\nself.root.free()\nreturn y",
    ),
    "ShardedWaitedAtOnce": (
        "fsdp", "A block's gradients are on the wire", "waited for where they were started",
        "self.in_flight.append((handle, unit))",
        "handle.wait()\nself.in_flight.append((handle, unit))",
    ),
    "ShardedRootForgotten": (  # what is in no block
        "fsdp", "After finish", "unit 0: the own slice has no gradient after finish",
        "self.reduce(self.root)", "",
    ),
    "ShardedGatherNotWaited": (
        "fsdp", "Forward computes with whole parameters", "is NaN: is its gather started",
        "self.handle.wait()", "",
    ),
    "ShardedPrefetchWaited": (
        "fsdp", "While a block computes", "waited for the gather of block 1",
        "self.blocks[following].start()",
        "self.blocks[following].start()\nself.blocks[following].wait()",
    ),
    "ShardedReducedInFinish": (  # blocks are freed in time, and reduced after backward
        "fsdp", "A block's gradients are on the wire", "start in gradient_ready",
        "self.reduce(self.blocks[k])", "",
        "self.reduce(self.root)", "for unit in [*self.blocks, self.root]:\n    self.reduce(unit)",
    ),
    "ShardedGatheredAgain": (  # the first block is freed once more than needed
        "fsdp", "Each block is gathered twice", "block 0 was gathered 3 times",
        "self.root.start()",
        "self.blocks[0].start()\n"
        "self.blocks[0].wait()\n"
        "self.blocks[0].free()\n"
        "self.root.start()",
    ),
    "ShardedOwnIsNoLeaf": (  # the optimizer steps copies of the slices
        "fsdp", "Three steps of an optimizer", "does every forward gather anew what was stepped",
        f"return {OPTIMIZER}", OF_COPIES,
    ),
    "ShardedUnawaited": (  # backward begins a block's gather, and does not wait for it
        "fsdp", "After finish", "whose gather has not been waited for: wait in before_backward",
        "self.gather(k, k - 1)",
        "for block in self.blocks[max(0, k - 1) : k + 1][::-1]:\n    block.start()",
    ),
    "LocalUphill": (  # the pseudo-gradient has the wrong sign
        "diloco", "Step number `every` ends where", "every rank has moved uphill",
        "delta = start - parameter", "delta = parameter - start",
    ),
    "LocalForgetful": (
        "diloco", "Momentum and start go on", "momentum begins anew in each round: keep it",
        "momentum.mul_(self.outer_momentum)", "momentum.zero_()",
    ),
    "LocalAlways": (  # all ranks meet behind every step
        "diloco", "The first steps of a round", "only number 3 sends",
        "if self.steps == self.every:", "if True:",
    ),
    "LocalFirstStart": (  # every round steps from where the first one began
        "diloco", "Momentum and start go on", "wrong from round 2: ",
        "self.steps, self.start = 0, self.positions()", "self.steps = 0",
    ),
}  # fmt: skip
