"""Runs forward and backward of a captured network; each forward opens one private step.

Before the first forward, `establish` determines which dimension of each layer's tensors counts the
samples. After a pass that failed half-way, a sharded network is reset, so that the next pass works.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import starmap
from typing import Any

import torch
from torch import Tensor, nn

from dp_clipping.capture.checks.kept import KeptValues
from dp_clipping.capture.checks.terms import THROUGH
from dp_clipping.capture.samples.batch import Batch, hold_objects, tensors_of
from dp_clipping.capture.samples.packed import opened, packed, packed_in, repacking
from dp_clipping.guard.carried import LeftInArguments
from dp_clipping.guard.guard import LayoutDiscovery
from dp_clipping.guard.losses import Watched, viewed
from dp_clipping.kernels.launch.tiles import available, on_device
from dp_clipping.layers.batch_layout import LayoutUnknown, SomeSamples, UsedMore
from dp_clipping.layers.vmap.refusals import escape_of, recomputation_of
from dp_clipping.modes import say_plain
from dp_clipping.planning.plan import Plans
from dp_clipping.profiling.profile import NOTHING
from dp_clipping.sampling.parts import slices_of
from dp_clipping.step.context import StepContext
from dp_clipping.step.gradient_buffer import GradientBuffer
from dp_clipping.step.inputs import OF_ZEROS, InputReader, Inputs, shown
from dp_clipping.step.private_step import PrivateStep
from dp_clipping.step.state import BatchNorms, StepState
from dp_clipping.step.sums.backward_state import Kept
from dp_clipping.step.sums.fused import Fused
from dp_clipping.step.sums.layer_plans import FusedPlans
from dp_clipping.step.sums.plain import Plain, Uses
from dp_clipping.step.sums.work import Work
from dp_clipping.torch_compat import is_compiled_in_place, version_of
from dp_clipping.trials.objects import Mark, Objects
from dp_clipping.trials.randomness import RandomStates
from dp_clipping.trials.schedule import Schedule
from dp_clipping.validation import refuse_packed


class ForwardBackward:
    """Runs forward and backward of one private model, and recovers from a pass that failed.

    Args:
        context: the context of the model's steps.
        state: the state of the step; the private step of a forward is pending in it.
        gradients: what backwards add their sums to; None: only forwards are run.

    Attributes:
        reader: reads the arguments of each forward.
        constants: knows which of them have no row for each sample.
        padding: [B] bool, where the CUDA graph that is being captured reads which rows of a batch
            are no samples; None: nothing is captured.
    """

    def __init__(
        self, context: StepContext, state: StepState, gradients: GradientBuffer | None = None
    ):
        self.context, self.state = context, state
        self._gradients = gradients
        self.network, self.capture = context.capture.network, context.capture
        self.padding: Tensor | None = None
        self._establishment = LayoutDiscovery(
            self.capture, context.batch_first, context.policy.dense_always, context.checks
        )
        self._carried, self._left = self._establishment.carried, LeftInArguments()
        self.constants = self._establishment.constants
        self.reader = InputReader(context, state, self._establishment, self.recover)
        kinds = {(p.device, p.dtype) for p in self.capture.parameters}
        self._is_fused = context.policy.fused and all(starmap(available, kinds))
        self._compared = Schedule()  # of backwards under tensor parallelism
        self._begun: PrivateStep | None = None  # the last one: the pending, or one that failed
        self._has_packed = False  # sequences in the last forward's arguments
        self._is_broken = False  # a sharded step failed, and nothing can be computed any more

    def beside(self) -> "ForwardBackward":
        """Returns passes on the same capture with a step of their own, as `engine.check` runs."""
        context = replace(self.context, plans=Plans(), profile=None, checks="first")
        return ForwardBackward(context, StepState())

    def batch_of(self, args: tuple, kwargs: dict) -> Batch:
        """Returns the samples in arguments of a forward."""
        args, kwargs = opened((args, kwargs), self.context.batch_first)
        with repacking(self.network, self.context.batch_first):
            return self._establishment.batch_of(args, kwargs)

    def reset_batch_layouts(self) -> None:
        """Searches for the batch dimension again."""
        self._establishment.forget()
        self.context.plans.forget()

    def skip_checks(self, batches: int) -> None:
        """Skips checks of samples; see `PrivateModel.skip_checks`."""
        self._establishment.skip_checks(batches)
        self.reader.unlooked = batches

    def forward(
        self, module: nn.Module, args: tuple, kwargs: dict, sync: AbstractContextManager
    ) -> Any:
        """Returns outputs of the module, the network or its data-parallel wrapper.

        Called inside of `sync`. For an empty batch the outputs are empty.

        Raises:
            ValueError: the batch dimension of a layer cannot be determined, or `model.train()` has
                put a normalization in training that was accepted because it was frozen.
            RuntimeError: an earlier step of a sharded network failed half-way.
        """
        if self._left.noted:
            self._left.refuse(args, kwargs)
        given = packed_in((args, kwargs)) if hold_objects(args, kwargs) else []
        self._has_packed = bool(given)
        if not given:
            return self._forward(module, args, kwargs, sync)
        if self.capture.sharding is not None or self.capture.is_compiled:
            refuse_packed(args, kwargs)
        args, kwargs = opened((args, kwargs), self.context.batch_first)
        with self._repacking():
            outputs = self._forward(module, args, kwargs, sync)
        return packed(outputs, self.context.batch_first, given)

    def _forward(
        self, module: nn.Module, args: tuple, kwargs: dict, sync: AbstractContextManager
    ) -> Any:
        """Runs the forward of a batch without packed sequences."""
        if self._is_broken:
            raise RuntimeError(
                "an earlier step of this sharded model failed half-way, and this version of torch "
                "(below 2.13) cannot tell FSDP2: it would compute with old parameters; load the "
                "last checkpoint in a new process"
            )
        self.capture.layers.check()
        has_objects = hold_objects(args, kwargs)  # which a forward may write to
        before = Objects(args, kwargs) if has_objects else None
        inputs = self.reader.of(args, kwargs, has_objects, self.padding)
        given, seen = inputs.given, inputs.seen
        check = None
        if inputs.is_due:
            ensure = partial(self._establishment.ensure, seen)
            check = self.reader.own_errors_first(ensure, given.args, given.kwargs, given.size)
        else:
            self._establishment.skip_checks(1)
        lengths = self.reader.lengths(inputs, self._repacking)
        objects = before if given.size or not has_objects else Objects(inputs.args, inputs.kwargs)
        private_step, output, mark = self._run(module, inputs, objects, sync)
        if changes := mark.changes():
            self._carried.check(changes, mark, seen, "a forward in training")
        private_step.end_forward()
        self.state.pending = private_step
        if self.state.usage.is_part(given.size):
            rows = given.rows_beside_bags()
            private_step.slices = slices_of(rows, [version_of(x) for x, _ in rows])
        if check is not None:
            private_step.watched = Watched(output, self._establishment.layouts_of(output), check)
            output = private_step.watched.outputs
        elif lengths:
            output = viewed(output)
        for one in lengths:
            one.outputs = tensors_of(output)
        private_step.lengths = lengths
        output = given.without_rows(output) if private_step.is_empty else output
        if before is not None:
            self._left.note(given.args, given.kwargs, before)
        return output

    def _run(
        self, module: nn.Module, inputs: Inputs, objects: Objects | None,
        sync: AbstractContextManager,
    ) -> tuple[PrivateStep, Any, Mark]:  # fmt: skip
        """Calls the module in a private step; returns that, the outputs, and the state before.

        Where a layer is called as it never was, its samples are looked for and the network is
        called again; if that does not help the layer runs under vmap (`LayerState.unseen`). A
        compiled network is called again where it has saved so little that another plan is better.

        Args:
            objects: what the arguments hold now.
        """
        device, given = self.capture.trigger.device, inputs.given
        randomness = RandomStates(device=device, only_torch=True) if inputs.is_compiled else None
        mark, searches = self._carried.state.mark(), 0
        hook = None
        if module is not self.network:  # a wrapper may write to buffers before the network runs
            mark.forget_buffers()
            if not is_compiled_in_place(self.network):
                renew = lambda *_: mark.renew()  # noqa: E731
                hook = self.network.register_forward_pre_hook(renew, prepend=True)
        look: Callable[[], Any] | None
        try:
            while True:
                self._drop_pending()
                work = self._work(inputs)
                private_step = self._begun = PrivateStep(self.context, inputs, work, self.padding)
                try:
                    with self.capture.attached(private_step), sync:
                        output = module(*inputs.args, **inputs.kwargs)
                except (LayoutUnknown, SomeSamples) as error:
                    look = self._look_again(error, searches, inputs.seen)
                    searches += not isinstance(error, UsedMore)  # which is once a layer
                except BaseException as raised:
                    self.recover()
                    error = escape_of(raised) or raised
                    if private_step.is_empty and isinstance(error, Exception):
                        raise ValueError(OF_ZEROS.format(error=shown(error))) from error
                    if error is not raised:
                        raise error from raised
                    raise
                else:
                    if randomness is None or not private_step.plans.foresaw_too_much():
                        return private_step, output, mark
                    del output  # frees what it has saved
                    randomness.restore()
                    look = None
                mark.put_back()
                if objects is not None:
                    objects.put_back()
                if look is not None:
                    self.reader.own_errors_first(look, given.args, given.kwargs, given.size)
                module, sync = self.network, NOTHING  # the wrapper has prepared this forward
        finally:
            if hook is not None:
                hook.remove()

    def _look_again(
        self, error: LayoutUnknown | SomeSamples, searches: int, batch: Batch
    ) -> Callable[[], Any]:
        """Returns another search for the samples; raises ValueError where none can help.

        Where a layer has got some of them, those of the batch are compared too.
        """
        if self.capture.sharding is not None:
            self.recover()
            raise error.on_ranks() from error
        if searches == 3:  # for parts of the batch, and twice as of `LayerState.unseen`
            raise error.lasting() from error
        if isinstance(error, SomeSamples):  # without frames, which hold what forward has computed
            return partial(self._establishment.check, batch, error.with_traceback(None))
        return partial(self._establishment.look, batch)

    def backward(
        self,
        private_step: PrivateStep,
        losses: Tensor,
        clip_norms: Callable[[], list[float]],
        sync: AbstractContextManager,
    ) -> None:
        """Adds the clipped sum of a batch to `.grad`, in float32, inside of `sync`.

        If it fails half-way, the step's sums are dropped. Otherwise a second attempt would add the
        samples twice to some parameters.

        Args:
            losses: one per row of the forward.
            clip_norms: called for C_k of each clipping group when a step opens.

        Raises:
            RuntimeError: if ranks of a tensor-parallel axis have different samples, found in the
                first backward, or different gradients of a parameter that each of them has whole,
                found in backwards 1, 2, 4, 8, ..; after a refusal these are counted anew
        """
        state = self.state
        if private_step is not state.pending:
            raise RuntimeError("backward of an earlier forward: run one forward, then its backward")
        is_empty = private_step.is_empty or state.ticket.is_dummy
        samples = 0 if is_empty else private_step.real
        part = state.accumulating
        try:
            state.usage.use(samples, self._is_so_on_any_rank, part=part, slices=private_step.slices)
        except RuntimeError as error:
            if private_step.is_through:
                raise RuntimeError(THROUGH) from error
            raise
        self._open(clip_norms)
        try:
            with sync:
                state.norms.append(self._add_sums(private_step, losses, samples))
                self._gradients.end_backward()
        except BaseException:
            self.drop()
            self.recover()
            raise
        if samples and self.constants.now:
            self.constants.keep()
        self._drop_pending()

    def _repacking(self) -> AbstractContextManager:
        """Returns the context in which forwards of the last batch's samples can run."""
        if not self._has_packed:
            return NOTHING
        return repacking(self.network, self.context.batch_first)

    def begin_replay(self, clip_norms: Callable[[], list[float]]) -> None:
        """Opens a step whose sums a CUDA graph forms, as forward and backward of a batch would."""
        self.capture.layers.check()
        samples = self.state.ticket.samples
        self._establishment.skip_checks(1)
        self._drop_pending()
        self.state.usage.use(samples, self._is_so_on_any_rank)
        self._open(clip_norms)

    def drop(self) -> None:
        """Drops gradients, as `zero_grad` does; they may be float32 again."""
        if self.state.is_open:
            self.context.timer.abandon()
        self.state.drop()
        self._gradients.clear()

    def _drop_pending(self) -> None:
        """Drops the last forward."""
        if self._begun is not None:
            self._begun.release()
        self.state.pending = self._begun = None

    def _open(self, clip_norms: Callable[[], list[float]]) -> None:
        """Begins a backward, and a step if none is open."""
        self._gradients.begin_backward()
        if not self.state.is_open:
            self.state.open(clip_norms())

    def _is_so_on_any_rank(self, flag: bool) -> bool:
        """Returns whether any rank set the flag, of either axis. Synchronises the host."""
        count = self.capture.trigger.new_tensor([float(flag)], dtype=torch.float32)
        for axis in (self.context.reducer.tensor, self.context.reducer.data):
            count = axis.sum(count, "whether samples are left", "async").wait()
        return bool(count > 0)

    def _add_sums(self, private_step: PrivateStep, losses: Tensor, samples: int) -> BatchNorms:
        """Adds clipped sums to `.grad`, or zeros if there are no samples."""
        clip_norms = on_device(tuple(self.state.clip_norms), torch.float64, losses.device)
        if samples:
            return self._add_sums_of_samples(private_step, losses, clip_norms)
        if self.context.sharding is None:
            self._gradients.accumulate_zeros()
        else:
            # Ranks with samples need this one's shards, and its sums, zeros, in their order.
            private_step.backward(losses, clip_norms, self._gradients.accumulate_zeros_of)
        nothing = losses.detach().new_zeros(0, dtype=torch.float32)
        return BatchNorms(nothing, nothing.new_zeros(len(clip_norms), 0))

    def _add_sums_of_samples(
        self, private_step: PrivateStep, losses: Tensor, clip_norms: Tensor
    ) -> BatchNorms:
        reducer = self.context.reducer
        compares = False
        if reducer.splits_parameters:
            if not self._compared.count:
                reducer.check_same_samples(losses)
            compares = self._compared.next_is_due()
        mark = Mark(self._carried.state)
        try:
            norms = private_step.backward(losses, clip_norms, self._gradients.accumulate)
        except RuntimeError as error:
            meaning = recomputation_of(error, (one.kind for one in self.capture.handles))
            if meaning is None:
                raise
            raise meaning from error
        if changes := mark.changes():
            seen, around = private_step.seen, self._repacking
            self._carried.check(changes, mark, seen, "a backward", around=around)
        if private_step.checks:
            with self.state.refused_together():
                for check in private_step.checks:
                    check()
        if compares:  # not only in the first: LoRA's A has no gradient there
            taken, compared = private_step.work.norms, self._compared
            self._compared = Schedule()  # a refusal begins anew
            taken.split.refuse_differences(taken.table, self.capture.trained)
            self._compared = compared
        return norms

    def recover(self) -> None:
        """Puts a sharded network back after a pass that failed."""
        sharding = self.capture.sharding
        if sharding is not None and not sharding.recover():
            self._is_broken = True

    def _work(self, inputs: Inputs) -> Work:
        """Returns work on kernels if the mode asks for it and they serve the parameters."""
        context, each = self.context, inputs.examples_per_unit
        samples = inputs.batch.size // each
        padding = None if inputs.padding is None else inputs.padding[::each]
        kept = Kept(KeptValues() if inputs.is_looked_at else None)
        if not self._is_fused:
            if context.policy.fused:
                say_plain(context.mode)
            return Plain(context, samples, kept, Uses, padding)
        forecast = None  # of linear layers' operands: compiled code must know them beforehand
        if context.sharding is None and inputs.is_compiled:
            forecast = self._establishment.forecast(inputs.batch).of_units(each)
        plans = FusedPlans(context, samples, forecast)
        return Fused(context, samples, kept, Uses, padding, plans, inputs.is_compiled)
