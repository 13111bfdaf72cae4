"""One private step of one batch: what its forward and its backward leave behind.

    forward    each layer is one autograd function, with detached parameters
    backward   it hands over per-sample gradients or their factors, which are normed at once
    clip       norms -> coefficients, when the last one is known
    sum        Σ_i c_i G_i of each parameter, handed on as it becomes final

In a profiler's trace these are `norm_pass`, `clip_coefficients` and `weighted_sum`; within them
`norm/{how}/{layer}` and `sum/{layer}` (`PrivateStep._range`).

Bookkeeping modes keep what arrived and sum it afterwards: one backward. Two-pass modes keep
nothing and run backward a second time. Neither computes an ordinary weight gradient.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.profiler import record_function

from dp_clipping.capture.backward import flush_ready_nodes
from dp_clipping.capture.compile_forecast import CompiledShapes
from dp_clipping.capture.losses import Watched
from dp_clipping.clipping.accumulation import Weights, squared_norms, weighted_sum
from dp_clipping.clipping.coefficients import coefficients, finite_samples
from dp_clipping.clipping.norms import Norm, Norms
from dp_clipping.distributed.norm_reduce import Layerwise, NormReducer
from dp_clipping.distributed.split_norms import SplitNorms
from dp_clipping.layers.handle import LayerState
from dp_clipping.layers.linear_factors import Grams
from dp_clipping.layers.low_precision_sums import is_rescaled, rescale
from dp_clipping.step.context import StepContext
from dp_clipping.step.rng_replay import Randomness
from dp_clipping.torch_compat import is_profiling

NOTHING = nullcontext()


class PrivateStep:
    """Raises RuntimeError where a norm would miss something."""

    fused = False

    def __init__(
        self, context: StepContext, batch_size: int, forecast: CompiledShapes | None = None
    ):
        self.context, self.batch_size = context, batch_size
        self.capture, self.policy = context.capture, context.policy
        self.forecast = forecast  # of what linear layers are given, where compiled code needs it
        self.trigger: Tensor = self.capture.trigger
        self.reducer: NormReducer = context.reducer
        self._taps: dict[Parameter, Tensor] = {}
        self.leaves: dict[Parameter, Tensor] = {}  # what stands for sharded ones now
        self.watched: Watched | None = None  # outputs, if the losses are to be looked at
        self._running = False
        self.split_norms = SplitNorms(self.reducer, context.sharding)
        self.is_compiled: bool = self.capture.is_compiled  # asked once: it looks at every module
        self._forget()
        self.slots = self.capture.make_slots(self)

    def _forget(self) -> None:
        self._summing = self._in_backward = False
        self._norms: dict[Parameter, Norm] = {}
        self._kept: dict[Parameter, Any] = {}
        self._seen: set[Parameter] = set()
        self._grams = Grams()
        self._recomputed: list[Parameter] = []
        self._accumulate: Callable[[Parameter, Tensor | None], None] | None = None
        self._partial: Layerwise | None = None
        self._randomness: Randomness | None = None  # of the first backward, if there is a second
        self._noted: set[Parameter] = set()  # whose norms are in it

    # ---- what layers ask in forward -------------------------------------------------------------

    def slot(self, parameter: Parameter) -> Tensor:
        """The slot of a parameter: one, however many layers use it."""
        if parameter not in self._taps:
            value = self.capture.slot_value(parameter)
            self._taps[parameter] = GradientSlot.apply(
                self.trigger_of(parameter), value, self, parameter
            )
        return self._taps[parameter]

    def slots_of(self, handle: LayerState) -> dict[str, Tensor]:
        """All that the layer may ask for where none can be made."""
        return {name: self.slot(parameter) for name, parameter in handle.parameters().items()}

    def trigger_of(self, parameter: Parameter) -> Tensor:
        """The leaf whose gradient, a nothing, makes backward visit what uses the parameter."""
        return self.capture.triggers[parameter]

    def will_use(self, parameter: Parameter, x: Tensor, outputs: int) -> None:
        """A linear layer is about to be run on x [.., p]."""

    @property
    def dense_always(self) -> bool:
        return self.policy.dense_always

    @property
    def shards_parameters(self) -> bool:
        return self.capture.sharding is not None

    def prefers_dense(self, tokens: int, outputs: int, inputs: int) -> bool:
        """Whether G [d, p] of a linear layer is kept rather than its factors: if it is smaller."""
        if self.policy.two_passes:
            return False
        return self.dense_always or tokens * (outputs + inputs) >= outputs * inputs

    # ---- what layers hand over in backward ------------------------------------------------------

    def dense(self, parameter: Parameter, gradients: Tensor) -> None:
        """G [B, *parameter], the sum over all uses of the parameter."""
        self._arrived(parameter)
        if self._summing:
            self._emit(parameter, self._only_good(gradients))
            return
        with self._range("norm/dense", parameter):
            self._norms[parameter] = Norm(squared_norms(gradients))
        if not self.policy.two_passes:
            self._kept[parameter] = gradients
        self._note_norms()

    def factors(self, parameter: Parameter, factors: Any) -> None:
        """Factors of G of the parameter's only use."""
        self._arrived(parameter)
        if self._summing:
            self._emit(parameter, self._only_good(factors))
            return
        with self._range("norm/factors", parameter):
            self._norms[parameter] = factors.norm(self._grams)
        if not self.policy.two_passes:
            self._kept[parameter] = factors
        self._note_norms()

    def _arrived(self, parameter: Parameter) -> None:
        name = self.capture.names[parameter]
        if not self._running:
            raise RuntimeError(
                f"{name}: backward of something else than the private criterion's loss for the "
                "last forward: call backward() on what the criterion from make_private returns, "
                "once for each forward (samples of one batch may be concatenated); in place of "
                "loss = model(**batch).loss, loss = criterion(model(**batch).logits, labels)"
            )
        if parameter in self._seen:
            raise RuntimeError(
                f"{name} was used more often in this step than in the first one, so its norm would "
                "miss the cross terms: call model.reset_batch_layouts() before a forward that "
                "differs"
            )
        self._seen.add(parameter)

    # ---- the step -------------------------------------------------------------------------------

    def backward(
        self,
        losses: Tensor,
        clip_norms: Tensor,
        accumulate: Callable[[Parameter, Tensor | None], None],
    ) -> Tensor:
        """Clipped sums of a batch.

        Args:
            losses: [B], one a sample.
            clip_norms: [K], the threshold of each group.
            accumulate: called once for each trainable parameter with Σ_i c_i G_i in float32
                (float64), or None for a parameter that this backward did not reach.

        Returns:
            Unclipped norms [B] in float32 (float64).
        """
        try:
            device = self.trigger.device
            guard = torch.cuda.device(device) if device.type == "cuda" else NOTHING
            self._running = True
            self._clip_norms, self._accumulate = clip_norms, accumulate
            self._prepare(losses)
            twice = self._needs_second_pass()
            self._randomness = Randomness(self.trigger) if twice else None
            if self.split_norms.is_split and self.reducer.mode == "layerwise":
                order = list(reversed(self.capture.parameters))
                self._partial = self.reducer.layerwise(order, self._table_of)
            with self.capture.attached(self), guard:
                with self._phase("norm_pass"):
                    triggers = list(self.capture.triggers.values())
                    self._run_backward(losses, triggers, retain_graph=twice)
                with self._phase("clip_coefficients"):
                    norms = self._clip(clip_norms)
                with self._phase("weighted_sum"):
                    self._sum(losses)
            for parameter in self.capture.parameters:
                if parameter not in self._seen:
                    accumulate(parameter, None)
            return norms
        finally:
            self._running = False
            self._forget()

    def _prepare(self, losses: Tensor) -> None:
        """Before the first backward."""

    def _needs_second_pass(self) -> bool:
        return self.policy.two_passes

    def _run_backward(self, losses: Tensor, triggers: list[Tensor], retain_graph: bool) -> None:
        """Backward as far as the anchors' uses; parameters must not be reached by another way.

        On a GPU too it runs in this thread, not in autograd's own for the device: layers' backwards
        are Python, which is slower there (docs/sharded.md has by how much).
        """
        parameters = list(self.capture.parameters)
        leaves = {p: x for p, x in self.leaves.items() if x is not p and x.requires_grad}
        self._in_backward = True
        sharding = self.capture.sharding
        with (
            NOTHING if sharding is None else sharding.backward(),
            torch.autograd.set_multithreading_enabled(False),
        ):
            try:
                found = torch.autograd.grad(
                    losses.sum(), [*triggers, *parameters, *leaves.values()],
                    retain_graph=retain_graph, allow_unused=True,
                )  # fmt: skip
            except BaseException:
                flush_ready_nodes()
                raise
        self._in_backward = False
        parameters += leaves
        found = found[len(triggers) :]
        outside = [p for p, g in zip(parameters, found, strict=True) if g is not None]
        if outside:
            names = ", ".join(self.capture.names[p] for p in outside)
            raise RuntimeError(
                f"{names}: used outside of the module that owns it (as in F.linear(x, "
                "embedding.weight)), where no per-sample gradient is captured: call the module, "
                "tie the weights of two modules, or freeze the parameter"
            )

    # ---- norms of the parts that other ranks have -----------------------------------------------

    def _note_norms(self) -> None:
        """Let the norms that have come leave for other ranks, where they go layer by layer."""
        if self._partial is None:
            return
        for parameter in self._known_norms():
            if parameter not in self._noted:
                self._noted.add(parameter)
                self._partial.add(parameter)

    def _known_norms(self) -> list[Parameter]:
        return list(self._norms)

    def _table_of(self, parameters: Sequence[Parameter]) -> Tensor:
        """What is known here and adds up over ranks: see `SplitNorms.table`."""
        norms = self._table(len(self._clip_norms))
        rescaled = any(is_rescaled(self._kept.get(p)) for p in parameters)
        return self.split_norms.table(norms, parameters, rescaled)

    def _squares_and_bounds(self) -> tuple[Tensor, Tensor]:
        """[K, B] each, of whole samples."""
        if not self.split_norms.is_split:
            norms = self._table(len(self._clip_norms))
            return norms.squared(), norms.bounds()
        with self._phase("norm_all_reduce"):
            if self._partial is not None:
                return self.split_norms.unpack(self._partial.wait())
            table = self._table_of(list(self._norms))
            return self.split_norms.unpack(self.reducer.reduce(table).wait())

    # ---- clipping and sums ----------------------------------------------------------------------

    def _clip(self, clip_norms: Tensor) -> Tensor:
        self.squares, bounds = self._squares_and_bounds()
        policy = self.policy
        scale = coefficients(bounds, clip_norms, policy.clipping_function, policy.gamma)
        # One look from the host: a product with zero would not keep NaN out of the sum.
        good = finite_samples(bounds)
        self._good = None if bool(good.all()) else good.nonzero()[:, 0]
        self.nonfinite = 0 if self._good is None else self.batch_size - len(self._good)
        if self._good is not None:
            scale = scale[:, self._good]
            for parameter, saved in self._kept.items():
                self._kept[parameter] = self._only_good(saved)
        whole = self.split_norms
        if whole.some_are_rescaled(any(is_rescaled(saved) for saved in self._kept.values())):
            counted = whole.counted(self._norms)
            others = {p for p in counted if not is_rescaled(self._kept[p])}
            rest = self._table(len(clip_norms), self._good).only(others)
            scale = rescale(
                self._kept, rest, self.capture.groups, scale, clip_norms, counted, whole.sum
            )
        self._weights = [Weights(*c) for c in zip(scale, scale.tolist(), strict=True)]
        return self.squares.sum(0).sqrt()

    def _table(self, groups: int, samples: Tensor | None = None) -> Norms:
        """All norms of the step, or of some samples."""
        norms, zero = self._norms, self._zero()
        if samples is not None:
            pick = lambda x: None if x is None else x[samples]  # noqa: E731
            norms = {
                p: replace(norm, squared=pick(norm.squared), scale=pick(norm.scale))
                for p, norm in norms.items()
            }
            zero = pick(zero)
        table = Norms(self.capture.groups, groups, zero)
        for parameter, norm in norms.items():
            table.add(parameter, norm)
        return table

    def _zero(self) -> Tensor:
        dtype = next((norm.squared.dtype for norm in self._norms.values()), torch.float32)
        return torch.zeros(self.batch_size, dtype=dtype, device=self.trigger.device)

    def _only_good(self, saved: Any) -> Any:
        """Without the samples whose norm is not finite."""
        if self._good is None:
            return saved
        return saved[self._good] if isinstance(saved, Tensor) else saved.select(self._good)

    def _sum(self, losses: Tensor) -> None:
        self._summing = True
        if self._randomness is not None:
            first, self._seen = self._seen, set()
            triggers = self._second_triggers()
            with self._randomness.again():
                self._run_backward(losses, triggers, retain_graph=False)
            self._seen |= first  # the second one may go less deep
        self._hand_on_kept()

    def _hand_on_kept(self) -> None:
        while self._kept:
            parameter = next(iter(self._kept))
            self._emit(parameter, self._kept.pop(parameter))

    def _second_triggers(self) -> list[Tensor]:
        return list(self.capture.triggers.values())

    @torch.no_grad()
    def _emit(self, parameter: Parameter, saved: Any) -> None:
        weights = self._weights[self.capture.groups[parameter]]
        with self._range("sum", parameter):
            if isinstance(saved, Tensor):
                total = weighted_sum(weights, saved)
            else:
                total = saved.weighted_sum(weights)
        self._accumulate(parameter, total)

    def _phase(self, name: str) -> AbstractContextManager:
        """A range of the trace; with the profiling switch on also of the profile: `timed_step`."""
        return record_function(name)

    def _range(self, what: str, *parameters: Parameter) -> AbstractContextManager:
        """Labels `{what}/{layer}` (`+` between layers) in a trace, while a profiler records one."""
        if not is_profiling():
            return NOTHING
        return record_function(f"{what}/{'+'.join(self.capture.names[p] for p in parameters)}")


class GradientSlot(torch.autograd.Function):
    """A slot [B, *parameter] without memory, between the anchor and all uses of a parameter.

    Autograd sums the uses' gradients before it calls backward here, so cross terms of tied and
    reused weights are in the norm.
    """

    @staticmethod
    def forward(ctx, trigger, value, private_step, parameter):
        ctx.rest = (private_step, parameter)
        return value.expand(private_step.batch_size, *private_step.capture.shapes[parameter])

    @staticmethod
    def backward(ctx, gradients):
        private_step, parameter = ctx.rest
        private_step.dense(parameter, gradients)
        return None, None, None, None
