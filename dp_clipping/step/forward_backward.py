"""Runs forward and backward of a captured network; each forward opens one private step.

Before the first forward, `establish` determines which dimension of each layer's tensors counts the
samples. After a pass that failed half-way, a sharded network is reset, so that the next pass works.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import starmap
from typing import Any

import torch
from torch import Tensor, nn

from dp_clipping.capture.checks.terms import THROUGH
from dp_clipping.capture.samples.batch import Batch, hold_objects, tensors_of
from dp_clipping.capture.samples.packed import opened, packed, packed_in, repacking
from dp_clipping.guard.guard import LayoutDiscovery
from dp_clipping.guard.lengths import Lengths
from dp_clipping.guard.losses import Watched, viewed
from dp_clipping.guard.state import Mark
from dp_clipping.kernels.launch.tiles import available, on_device
from dp_clipping.layers.batch_layout import LayoutUnknown
from dp_clipping.layers.vmap.refusals import escape_of, recomputation_of
from dp_clipping.modes import say_plain
from dp_clipping.planning.plan import Plans
from dp_clipping.profiling.profile import NOTHING
from dp_clipping.sampling.parts import slices_of
from dp_clipping.step.context import StepContext
from dp_clipping.step.gradient_buffer import GradientBuffer
from dp_clipping.step.other_calls import OF_ZEROS, OtherCalls, shown
from dp_clipping.step.private_step import PrivateStep
from dp_clipping.step.state import BatchNorms, StepState
from dp_clipping.step.sums.fused import Fused
from dp_clipping.step.sums.layer_plans import FusedPlans, PlainPlans
from dp_clipping.step.sums.plain import Plain
from dp_clipping.step.sums.work import Work
from dp_clipping.torch_compat import is_compiled_in_place, version_of
from dp_clipping.trials.objects import Objects
from dp_clipping.trials.randomness import RandomStates
from dp_clipping.validation import check_still_fixed, normalizations, refuse_packed


class ForwardBackward:
    """Runs forward and backward of one private model, and recovers from a pass that failed.

    Args:
        context: the context of the model's steps.
        state: the state of the step; the private step of a forward is pending in it.
        gradients: what backwards add their sums to; None: only forwards are run.

    Attributes:
        padding: [B] bool, where the CUDA graph that is being captured reads which rows of a batch
            are no samples; None: nothing is captured.
    """

    def __init__(
        self, context: StepContext, state: StepState, gradients: GradientBuffer | None = None
    ):
        self.context, self.state = context, state
        self._gradients = gradients
        self._passing = NOTHING if gradients is None else gradients.watch.passing
        self.network, self.capture = context.capture.network, context.capture
        self.padding: Tensor | None = None
        self._establishment = LayoutDiscovery(
            self.network, self.capture, context.sharding, context.batch_first,
            joins_all=context.policy.dense_always,
        )  # fmt: skip
        self._carried = self._establishment.carried
        self._calls = OtherCalls(self.capture, self._carried.state, self.recover)
        self._normalizations = normalizations(self.network)
        self._kinds = {(p.device, p.dtype) for p in self.capture.parameters}
        self._samples_are_checked = False
        self._begun: PrivateStep | None = None  # the last one: the pending, or one that failed
        self._has_packed = False  # sequences among what it was given
        self._unlooked = 0  # batches whose padding is not looked at
        self._is_broken = False  # a sharded step failed, and nothing can be computed any more

    def beside(self) -> "ForwardBackward":
        """Returns passes on the same capture with a step of their own, as `engine.check` runs."""
        return ForwardBackward(replace(self.context, plans=Plans(), profile=None), StepState())

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
        self._unlooked = batches

    def forward(
        self,
        module: nn.Module,
        args: tuple,
        kwargs: dict,
        sync: AbstractContextManager,
    ) -> Any:
        """Returns outputs of the module, the network or its data-parallel wrapper.

        Called inside of `sync`. For an empty batch the outputs are empty.

        Raises:
            ValueError: the batch dimension of a layer cannot be determined, or `model.train()` has
                put a normalization in training that was accepted because it was frozen.
            RuntimeError: an earlier step of a sharded network failed half-way.
        """
        has_objects, left = hold_objects(args, kwargs), self._establishment.left
        given = packed_in((args, kwargs)) if has_objects else []
        self._has_packed = bool(given)
        if not has_objects and not left.noted:
            return self._forward(module, args, kwargs, sync)
        if not given:
            with left.without(args, kwargs) as args:
                return self._forward(module, args, kwargs, sync)
        if self.capture.sharding is not None or self.capture.is_compiled:
            refuse_packed(args, kwargs)
        args, kwargs = opened((args, kwargs), self.context.batch_first)
        with repacking(self.network, self.context.batch_first):
            outputs = self._forward(module, args, kwargs, sync)
        return packed(outputs, self.context.batch_first, given)

    def _forward(
        self, module: nn.Module, args: tuple, kwargs: dict, sync: AbstractContextManager
    ) -> Any:
        """Runs the forward of a batch without packed sequences."""
        has_objects = hold_objects(args, kwargs)  # which a forward may write to
        if self._is_broken:
            raise RuntimeError(
                "an earlier step of this sharded model failed half-way, and this version of torch "
                "(below 2.13) cannot tell FSDP2: it would compute with old parameters; load the "
                "last checkpoint in a new process"
            )
        check_still_fixed(self._normalizations)
        self.capture.arithmetic.refuse_changes()
        before = Objects(args, kwargs) if has_objects else None
        batch_of = partial(self._establishment.batch_of, args, kwargs)
        given = batch = self._calls.own_errors_first(batch_of, args, kwargs)
        ticket = self.state.ticket
        if given.bags and ticket.rows is not None:
            raise ValueError(
                "pad_batches=True adds a row of zeros for each sample that a batch lacks, and ids "
                "with offsets have no rows: leave it out, as BatchMemoryManager(data_loader=loader,"
                " max_physical_batch_size=.., optimizer=optimizer), or give nn.EmbeddingBag ids "
                "[batch, tokens] of one length, padded with padding_idx"
            )
        real = ticket.real_of(given.size)
        each = self._examples_per_unit(given.size)
        if not given.size:
            args, kwargs = given.stand_in()
            batch = self._establishment.batch_of(args, kwargs)
        seen = batch if real == given.size else batch.first(max(1, real))  # by the checks
        is_looked_at = self.looks_at(seen.size)
        with self._passing:
            ensure = partial(self._establishment.ensure, seen)
            check = self._calls.own_errors_first(ensure, given.args, given.kwargs, given.size)
        padding = self.padding
        if padding is None and real < given.size:
            padding = torch.arange(batch.size, device=self.capture.trigger.device) >= real
        fill = None if each == 1 else ticket.fill_of(batch.size)
        fill = None if fill is None else fill.to(self.capture.trigger.device)
        lengths = self._lengths(seen, given.size)
        is_compiled = self.capture.is_compiled  # asked once: it looks at every module

        def begin() -> PrivateStep:
            self._drop_pending()
            work = self._work(batch, padding, each, is_compiled)
            private_step = PrivateStep(
                self.context, batch.size, work, real, each, fill, is_compiled
            )
            private_step.padding = self.padding
            work.versions.reads_values = is_looked_at
            private_step.is_looked_at = is_looked_at
            private_step.is_empty = not given.size
            tensors = tensors_of((args, kwargs)) if has_objects else batch.leaves
            private_step.is_through = any([getattr(x, "requires_grad", False) for x in tensors])
            self._begun = private_step
            return private_step

        private_step = begin()
        objects = before if given.size or not has_objects else Objects(args, kwargs)
        device = self.capture.trigger.device
        randomness = RandomStates(device=device, only_torch=True) if is_compiled else None
        mark = self._carried.state.mark()
        hook = self._marked_again_inside(module, mark)
        try:
            with self.capture.attached(private_step), sync:
                output = module(*args, **kwargs)
        except LayoutUnknown as error:
            if self.capture.sharding is not None:
                self.recover()
                raise ValueError(
                    f"{error} is called in a way that was not seen in the first batch, and "
                    "other ranks cannot repeat the search now: call "
                    "model.reset_batch_layouts() on every rank before a forward that differs"
                ) from error

            def looked_at() -> PrivateStep:
                mark.put_back()
                if objects is not None:
                    objects.put_back()
                look = partial(self._establishment.look, seen)
                self._calls.own_errors_first(look, args, kwargs, given.size)
                return begin()  # what layers left in the other belongs to other layouts

            private_step = looked_at()
            try:
                with self.capture.attached(private_step):
                    output = self.network(*args, **kwargs)
            except LayoutUnknown:  # then a module runs under vmap: see `LayerState.unseen`
                private_step = looked_at()
                output = self._calls.again(private_step, args, kwargs)
        except BaseException as raised:
            self.recover()
            error = escape_of(raised) or raised
            if private_step.is_empty and isinstance(error, Exception):
                raise ValueError(OF_ZEROS.format(error=shown(error))) from error
            if error is not raised:
                raise error from raised
            raise
        finally:
            if hook is not None:
                hook.remove()
        if randomness is not None and private_step.plans.foresaw_too_much():
            del output  # frees what it has saved
            mark.put_back()
            if objects is not None:
                objects.put_back()
            private_step = begin()
            with randomness.again():
                output = self._calls.again(private_step, args, kwargs)
        self._carried.check(mark, seen, "a forward in training")
        private_step.end_forward()
        self.state.pending, private_step.seen = private_step, seen
        if self.state.usage.is_part(given.size):
            rows = given.rows()
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
            self._establishment.left.note(given.args, given.kwargs, before)
        return output

    def _lengths(self, seen: Batch, rows: int) -> list[Lengths]:
        """Returns what compares padded samples of this forward, if the loader has collated some.

        Args:
            seen: the samples of the forward.
            rows: its rows.
        """
        self._unlooked -= self._unlooked > 0
        found = self.state.usage.take_alone()
        if found is None or self._unlooked:
            return []
        lengths: list[Lengths] = []
        with self.state.refused_together():
            lengths = self._establishment.lengths(*found, rows, seen)
        for one in lengths:
            one.around = self._as_now()
        return lengths

    def _as_now(self) -> Callable[[], AbstractContextManager]:
        """Returns what enters the same autocast as now, and packs sequences as now."""
        device = self.capture.trigger.device.type
        cast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))

        @contextmanager
        def around() -> Iterator[None]:
            with torch.autocast(cast[0], cast[1], enabled=cast[2]), self._repacking():
                yield

        return around

    def _examples_per_unit(self, rows: int) -> int:
        """Returns k of a forward of `rows` rows; 1 for a row that replaces an empty batch.

        Raises:
            ValueError: they are not whole units, or a part of what the loader has yielded.
        """
        each = self.context.examples_per_unit
        if each == 1 or not rows:
            return 1
        if rows % each:
            raise ValueError(
                f"a batch of {rows} examples, and each {each} that lie side by side are one unit "
                "of examples_per_unit, examples_per_step or views: give whole units, and "
                "drop_last=True to a loader whose last batch is shorter"
            )
        self.state.usage.refuse_parts(rows)
        return each

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
            RuntimeError: in the first backward, if ranks of a tensor-parallel axis have different
                samples, or different gradients of a parameter that each of them has whole.
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
        self._gradients.begin_backward()
        self._open_step(clip_norms)
        try:
            with sync, self._passing:
                self._add_sums(private_step, losses, samples)
                self._gradients.end_backward()
        except BaseException:
            self.drop()
            self.recover()
            raise
        self._drop_pending()

    def _repacking(self) -> AbstractContextManager:
        """Returns the context in which forwards of the last batch's samples can run."""
        if not self._has_packed:
            return NOTHING
        return repacking(self.network, self.context.batch_first)

    def looks_at(self, samples: int) -> bool:
        """Returns whether the next batch, of this size, will be checked: its step takes longer."""
        return self._establishment.is_due(samples) or self.state.ticket.alone is not None

    def begin_replay(self, clip_norms: Callable[[], list[float]]) -> None:
        """Opens a step whose sums a CUDA graph forms, as forward and backward of a batch would."""
        check_still_fixed(self._normalizations)
        self.capture.arithmetic.refuse_changes()
        samples = self.state.ticket.samples
        self._establishment.count(samples)
        self._drop_pending()
        self.state.usage.use(samples, self._is_so_on_any_rank)
        self._gradients.begin_backward()
        self._open_step(clip_norms)

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

    def _open_step(self, clip_norms: Callable[[], list[float]]) -> None:
        if self.state.is_open:
            self.state.add_backward()
            return
        values = clip_norms()
        try:
            self.state.open(values)
        except BaseException:
            self.drop()
            raise

    def _is_so_on_any_rank(self, flag: bool) -> bool:
        """Returns whether any rank set the flag, of either axis. Synchronises the host."""
        count = self.capture.trigger.new_tensor([float(flag)], dtype=torch.float32)
        for axis in (self.context.reducer.tensor, self.context.reducer.data):
            count = axis.sum(count, "whether samples are left", "async").wait()
        return bool(count > 0)

    def _add_sums(self, private_step: PrivateStep, losses: Tensor, samples: int) -> None:
        clip_norms = on_device(tuple(self.state.clip_norms), torch.float64, losses.device)
        if samples:
            self.state.norms.append(self._add_sums_of_samples(private_step, losses, clip_norms))
            return
        nothing = losses.detach().new_zeros(0, dtype=torch.float32)
        self.state.norms.append(BatchNorms(nothing, nothing.new_zeros(len(clip_norms), 0)))
        gradients = self._gradients
        if self.context.sharding is None:
            gradients.accumulate_zeros()
        else:
            # Ranks with samples need this one's shards, and its sums, zeros, in their order.
            private_step.backward(losses, clip_norms, gradients.accumulate_zeros_of)

    def _add_sums_of_samples(
        self, private_step: PrivateStep, losses: Tensor, clip_norms: Tensor
    ) -> BatchNorms:
        reducer = self.context.reducer
        is_first = reducer.splits_parameters and not self._samples_are_checked
        if is_first:
            reducer.check_same_samples(losses)
        mark = Mark(self._carried.state)
        try:
            norms = private_step.backward(losses, clip_norms, self._gradients.accumulate)
        except RuntimeError as error:
            meaning = recomputation_of(error, (one.kind for one in self.capture.handles))
            if meaning is None:
                raise
            raise meaning from error
        if mark.changes():
            self._carried.check(mark, private_step.seen, "a backward", around=self._repacking)
        if private_step.checks:
            with self.state.refused_together():
                for check in private_step.checks:
                    check()
        if is_first:
            differ = private_step.work.norms.split.differ
            if differ is not None and bool(differ):
                raise RuntimeError(
                    "a parameter that is not split over the tensor-parallel axis has other "
                    "per-sample gradients on each of its ranks: its module is given a part of its "
                    "input there (a norm over the heads that a rank has, say), so no rank knows "
                    "its gradient; freeze it, or let the plan gather its input"
                )
            self._samples_are_checked = True
        return norms

    def recover(self) -> None:
        """Puts a sharded network back after a pass that failed."""
        sharding = self.capture.sharding
        if sharding is not None and not sharding.recover():
            self._is_broken = True

    def _marked_again_inside(self, module: nn.Module, mark: Mark) -> Any:
        """Lets a wrapper write to buffers before the network runs: the mark is renewed then.

        Returns:
            The handle of the hook that does it, if there is one.
        """
        if module is self.network:
            return None
        mark.forget_buffers()
        if is_compiled_in_place(self.network):
            return None
        return self.network.register_forward_pre_hook(lambda *_: mark.renew(), prepend=True)

    def _work(self, batch: Batch, padding: Tensor | None, each: int, compiled: bool) -> Work:
        """Returns work on fused kernels if the mode asks for it and parameters are on their device.

        Args:
            padding: True for rows that are padding.
            each: rows of one sample.
            compiled: a part of the network is.
        """
        context, samples = self.context, batch.size // each
        padding = None if padding is None else padding[::each]
        is_fused = context.policy.fused
        if is_fused and not all(starmap(available, self._kinds)):
            say_plain(context.mode)
            is_fused = False
        if not is_fused:
            return Work(context, samples, Plain(context, samples, padding), PlainPlans())
        forecast = None  # of linear layers' operands: compiled code must know them beforehand
        if context.sharding is None and compiled:
            forecast = self._establishment.forecast(batch).of_units(each)
        fused = Fused(context, samples, padding)
        return Work(context, samples, fused, FusedPlans(context, samples, forecast), compiled)
