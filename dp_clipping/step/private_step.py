"""One private step of one batch: forward, backward, clipping and clipped sums.

    forward    each layer is one autograd function, with detached parameters
    backward   each layer delivers per-sample gradients or their factors, whose norms are taken
    clip       norms -> coefficients, when the last norm is known
    sum        Σ_i c_i G_i of each parameter, passed on as soon as it is final

In a profiler's trace these are `norm_pass`, `clip_coefficients` and `weighted_sum`; within them
`norm/{how}/{layer}` and `sum/{layer}` (`profiling.profile`).

Bookkeeping modes keep what layers deliver and sum it afterwards: one backward. Two-pass modes keep
nothing and run backward a second time. Neither computes a non-private weight gradient.

Layers call `PrivateStep`, which runs the phases. `work` decides when norms and sums are formed.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dp_clipping.capture.checks.terms import AFTER_NOISE, THROUGH, penalized, warn_of_others
from dp_clipping.capture.samples.batch import tensors_of
from dp_clipping.kernels.launch import tiles
from dp_clipping.layers.batch_layout import UsedMore
from dp_clipping.layers.recorder import DENSE, Accumulate, Joint, Trainable
from dp_clipping.modes import Policy
from dp_clipping.profiling.profile import NOTHING
from dp_clipping.sampling.parts import Slice
from dp_clipping.step.context import StepContext
from dp_clipping.step.slots import make_slots
from dp_clipping.step.state import BatchNorms
from dp_clipping.torch_compat import (
    apply_directly,
    current_backward,
    flush_ready_nodes,
    gradients_at,
    transforms_run,
)
from dp_clipping.trials.randomness import RandomStates

TRIGGER = attrgetter("trigger")
IN_FORWARD = (
    "the network's forward calls backward(), or it differentiates what this layer computes and did "
    "not in the first batch: in forward call torch.autograd.grad(energy.sum(), x, "
    "create_graph=True), with respect to inputs alone, and model.reset_batch_layouts() before a "
    "forward that differs from the first one"
)
OF_SOMETHING_ELSE = (
    "backward of something else than the private criterion's loss for the last forward: call "
    "backward() on what the criterion from make_private returns, once for each forward (samples of "
    "one batch may be concatenated); in place of loss = model(**batch).loss, "
    "loss = criterion(model(**batch).logits, labels)"
)
OF_OWN_LOSS = (
    "the network's own loss is reduced over the batch, and samples cannot be told apart in it: "
    "loss = criterion(model(**batch).logits, labels), or let forward call what it compares with "
    "labels or targets; if it is no loss of torch.nn.functional, make_private(criterion=f) with an "
    "f that returns one value per sample, of the outputs that it needs and the targets: out = "
    "model(**batch); loss = criterion((out.logits, out.mask), targets)"
)
OF_SEVERAL = (
    "the loss is of several forwards of the private model, and a step has one: give make_private a "
    "module whose forward calls the network for each input, as return net(a), net(b)"
)


class PrivateStep:
    """A private step: forward, backward, norms and clipped sums of one batch.

    `ForwardBackward` makes one in each training forward. The layers call some of its methods in
    forward and in backward, and the criterion's loss calls `backward`. When that returns, the
    clipped sums are in the gradient buffer, and the step is not used again.

    Args:
        context: what all steps of the model have in common.
        inputs: what the network gets, an `inputs.Inputs`; `real`, `examples_per_unit`, `fill`,
            `is_looked_at`, `is_through` and `is_compiled` are its own.
        work: takes norms and forms sums, a `sums.work.Work`.
        padding: bool for each row, True for padding, if a CUDA graph captures the step: the
            same graph serves batches with other real rows. None: `real` says it.

    Attributes that layers read:
        rows: of the batch that the network gets.
        batch_size: samples of the batch: units, if a unit of privacy has several examples.
        kernel_dtypes: of tensors that the step computes with on kernels; none in a mode without.
        policy: how the mode works.
        plans: what becomes of linear layers. To `plans.calls` a layer adds (weight, shape and dtype
            of its input, outputs) for each use of one in `planned` (`handle.Site`). A layer whose
            backward needs much more memory calls `plans.note_other` if `plans.measures`.
        slots: name of a layer -> parameter's name -> slot, of those that are made beforehand.
        is_in_forward: the network has not returned yet.
        leaves: parameter -> what stands for it in this forward, where FSDP has gathered it.

    Other attributes:
        has_own_loss: its outputs have a `loss` of one number, which is not the criterion's.
        is_empty: the batch has no sample; its one row is padding.
        seen: the samples of the forward, a `Batch`.
        watched: the outputs, if the losses are to be checked.
        lengths: compare padded samples with themselves alone, if some are to be.
        checks: what is called after the backward, when its graph is freed, and may raise.
        slices: where the samples are in memory, if they are a part of what the loader has yielded.
    """

    def __init__(self, context: StepContext, inputs: Any, work: Any, padding: Tensor | None):
        self.context, self.work, self.padding = context, work, padding
        self.rows, self.real, self.fill = inputs.batch.size, inputs.real, inputs.fill
        self.examples_per_unit = inputs.examples_per_unit
        self.is_empty, self.is_looked_at = not inputs.given.size, inputs.is_looked_at
        self.is_through, self.is_compiled = inputs.is_through, inputs.is_compiled
        self.batch_size = self.rows // self.examples_per_unit
        self.capture, self.plans = context.capture, work.plans
        of_device = tiles.DTYPES if self.capture.trigger.is_cuda else tiles.HOST_DTYPES
        self.kernel_dtypes = of_device if work.fused else ()
        self.policy: Policy = context.policy
        self.leaves: dict[Parameter, Tensor] = {}
        self.used: set[Trainable] = set()  # with gradients, of those whose uses are not joined
        self.seen: Any = inputs.seen
        self.watched: Any = None  # a `guard.losses.Watched`
        self.lengths: list[Any] = []  # of `guard.lengths.Lengths`
        self.checks: list[Callable[[], None]] = []
        self.slices: Sequence[Slice | None] = ()
        self.is_in_forward, self.has_own_loss = True, False
        self._slots: dict[Trainable, Tensor] = {}
        self._joins: dict[Joint, Tensor] = {}
        self.slots = make_slots(self) if self.is_compiled else {}

    def end_forward(self) -> None:
        """Is called when the forward has returned."""
        self.is_in_forward = False

    def look_at(self, losses: Tensor, loss_of: Callable[..., float | None] | None = None) -> None:
        """Checks the losses in their graph, and prepares what is compared after the backward.

        Args:
            losses: one per row.
            loss_of: see `guard.lengths.Lengths.check`.
        """
        if self.watched is not None:
            self.watched.check_graph(losses)
            warn_of_others(losses, tensors_of(self.watched.outputs), self.capture.names)
        for lengths in self.lengths:
            lengths.note(losses)
            self.checks.append(partial(lengths.check, loss_of))

    def release(self) -> None:
        """Drops what refers to the step's autograd graph; the step is not used again.

        Nodes of the graph hold the step. Where several tensors share such a node, the garbage
        collector does not see the cycle, and neither would be freed.
        """
        self.seen = self.watched = self.work.versions.values = None
        self.lengths, self.checks, self.slices = [], [], ()
        self.slots = {}
        self._slots.clear()
        self._joins.clear()

    @property
    def without_loss(self) -> Tensor | None:
        """Returns which rows have no loss, bool; None if `real` determines it."""
        if self.fill is None or self.padding is None:
            return self.padding if self.fill is None else self.fill
        return self.padding | self.fill

    def slot(self, parameter: Trainable) -> Tensor:
        """Returns the slot of a parameter, which all layers that use it share."""
        if parameter not in self._slots:
            value = self.capture.slot_value(parameter)
            with torch.enable_grad():  # the first use may be one under no_grad
                run = GradientSlot.apply if transforms_run() else _slot_of
                self._slots[parameter] = run(self.trigger(parameter), value, (self, parameter))
        return self._slots[parameter]

    def trigger(self, record: Trainable) -> Tensor:
        """Returns the input that makes autograd visit a use of a parameter: see `Joint`.

        Raises:
            UsedMore: it has been used in this forward, and its uses are not joined yet.
        """
        joint = record.joint
        if joint is None:
            if torch.is_grad_enabled():
                if record in self.used and self.is_in_forward:  # checkpointing runs it again later
                    record.is_reused = self.capture.sharding is None  # or ranks would differ
                    raise UsedMore(record.name)
                self.used.add(record)
            return record.trigger
        if joint not in self._joins:
            with torch.enable_grad():
                triggers = [one.trigger for one in joint.records]
                self._joins[joint] = Join.apply((self, joint), *triggers)
        return self._joins[joint]

    def take(
        self, kind: str, records: tuple[Trainable, ...], value: Any, tensors: tuple[Tensor, ...]
    ) -> None:
        """Refuses what is left outside of the step's own backward, in which `Work.take` has it."""
        name = records[0].name
        if self.is_in_forward:
            raise RuntimeError(f"{name}: {IN_FORWARD}")
        if self.capture.attached_step not in (None, self):  # whose backward runs
            raise RuntimeError(f"{name}: {OF_SEVERAL}")
        of = OF_OWN_LOSS if self.has_own_loss else OF_SOMETHING_ELSE
        raise RuntimeError(THROUGH if self.is_through else f"{name}: {of}")

    def counted(self, weights: frozenset[Trainable], count: Tensor, used: int) -> None:
        """Takes how often compiled code has used weights, in all [1]; called before their G.

        Args:
            used: how many of them it has used.
        """
        self.work.counts.append((weights, count, used))

    def backward(self, losses: Tensor, clip_norms: Tensor, accumulate: Accumulate) -> BatchNorms:
        """Forms the clipped sums of a batch.

        Args:
            losses: one per row.
            clip_norms: [K], the threshold of each group.
            accumulate: called with pairs of a trainable parameter's record and Σ_i c_i G_i in
                float32 (float64), or None for a parameter that this backward did not reach; once
                for each parameter.

        Returns:
            Unclipped norms of the real samples, of the parameters' accumulation dtype.
        """
        context, capture, work = self.context, self.capture, self.work
        timer = context.timer
        device = capture.trigger.device
        if torch.is_autocast_enabled(device.type):  # `loss.backward()` within it
            with torch.autocast(device.type, enabled=False):
                return self.backward(losses, clip_norms, accumulate)
        guard = torch.cuda.device(device) if device.type == "cuda" else NOTHING
        hand_over = timer.around_each("hand_over", accumulate)
        if self.fill is not None:
            losses = losses.masked_fill(self.fill, 0)
        if context.views > 1:  # views of one example: the mean of their gradients
            losses = losses / context.views
        try:
            self.take = work.take  # type: ignore[method-assign]
            work.begin(losses, clip_norms, hand_over)
            randomness = RandomStates(device=device, only_torch=True) if work.runs_twice else None
            total = losses.sum()
            if total.grad_fn is not None:  # whose own hooks take fewer calls than a tensor's
                total.grad_fn.register_prehook(self._note_backward)
            with capture.attached(self), guard, torch.set_grad_enabled(False):
                with timer.phase("norm_pass"):
                    triggers = list(map(TRIGGER, capture.trained))
                    self._run_backward(total, triggers, retain_graph=work.runs_twice)
                with timer.phase("clip_coefficients"):
                    found = work.clip()
                    samples = self.real // self.examples_per_unit
                    if self.padding is None and samples < self.batch_size:
                        found = found.first(samples)
                with timer.phase("weighted_sum"):
                    self._sum(total, randomness)
            if len(work.seen) < len(capture.trained):
                hand_over([(one, None) for one in capture.trained if one not in work.seen])
            timer.note_norms(work.norms.own_squares, found.squared)
            return found
        except BaseException:
            timer.abandon()
            raise
        finally:
            vars(self).pop("take", None)
            work.forget()

    def _note_backward(self, _: Any) -> None:
        """Notes the backward that begins."""
        self.work.backward = current_backward()

    def _sum(self, total: Tensor, randomness: RandomStates | None) -> None:
        """Forms the sums. `randomness`: of the first backward, if there is a second."""
        work = self.work
        work.begin_sums()
        if randomness is not None:
            first, work.seen = work.seen, set()
            triggers = work.second_triggers(randomness)
            with randomness.again(), self.context.timer.part("second_backward"):
                self._run_backward(total, triggers, retain_graph=False)
            work.seen |= first  # the second one may go less deep
        work.end_sums()

    def _run_backward(self, total: Tensor, triggers: list[Tensor], retain_graph: bool) -> None:
        """Runs backward as far as the triggers' uses. No parameter may be reached in another way.

        On a GPU too it runs in this thread, not in autograd's own for the device: layers' backwards
        are Python, which is slower there (docs/sharded.md has by how much).
        """
        parameters = list(self.capture.parameters)
        leaves = {p: x for p, x in self.leaves.items() if x is not p and x.requires_grad}
        sharding, points = self.context.sharding, self.work.points
        with NOTHING if points is None else points.in_backward():
            with (
                NOTHING if sharding is None else sharding.backward(),
                torch.autograd.set_multithreading_enabled(False),
            ):
                try:
                    inputs = [*triggers, *parameters, *leaves.values()]
                    found = gradients_at(total, inputs, retain_graph)
                except BaseException:
                    flush_ready_nodes()
                    raise
            pairs = zip((*parameters, *leaves), found[len(triggers) :], strict=True)
            outside = [p for p, g in pairs if g is not None]
            if outside:
                names = ", ".join(self.capture.names[p] for p in outside)
                if penalized(total, outside) == set(outside):
                    raise RuntimeError(AFTER_NOISE.format(names=names))
                raise RuntimeError(
                    f"{names}: used outside of the module that owns it (as in "
                    "F.linear(x, embedding.weight), or in a hook that computes a weight of it), "
                    "where no per-sample gradient is captured: call the module, tie the weights of "
                    "two modules, compute in forward what a hook computes (or with torch.nn.utils."
                    "parametrize.register_parametrization), or freeze the parameter"
                )


class GradientSlot(torch.autograd.Function):
    """A slot [B, *parameter] without memory, through which all uses of a parameter pass.

    Autograd sums the uses' gradients before it calls backward here, so cross terms of tied and
    reused weights are in the norm. The parameter is given in a tuple: as an argument it would be a
    leaf of the graph, which autograd visits on the stream of its first use.
    """

    @staticmethod
    def forward(ctx, trigger, value, rest):
        ctx.rest = rest
        private_step, parameter = rest
        return value.expand(private_step.batch_size, *parameter.shape)

    @staticmethod
    def backward(ctx, gradients):
        private_step, parameter = ctx.rest
        private_step.take(DENSE, (parameter,), None, (gradients,))
        return None, None, None


_slot_of = apply_directly(GradientSlot)


class Join(torch.autograd.Function):
    """An input [0] of all uses of parameters: its backward follows all of theirs."""

    @staticmethod
    def forward(ctx, rest, *triggers):
        ctx.rest, ctx.count = rest, len(triggers)
        return triggers[0].new_empty(0)

    @staticmethod
    def backward(ctx, nothing):
        private_step, joint = ctx.rest
        private_step.work.join(joint)
        return None, *[None] * ctx.count
