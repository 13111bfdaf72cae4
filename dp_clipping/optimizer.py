"""The optimizer of private training: finish the exchange, add noise once, divide, step."""

import weakref
from collections.abc import Callable
from functools import partial
from operator import is_
from typing import Any

import torch
from torch.optim import Optimizer

from dp_clipping.arguments.checks import check
from dp_clipping.cuda_graph import GraphedStep
from dp_clipping.distributed.agreement import Agreement
from dp_clipping.noise.adaptive_threshold import AdaptiveThreshold
from dp_clipping.noise.add_noise import NoiseSource
from dp_clipping.profiling.profile import Timer
from dp_clipping.sampling.loader import PREPARED
from dp_clipping.step.gradient_noise import FixedSettings, GradientNoise
from dp_clipping.torch_compat import common_step_hooks, step_hooks

Hook = Callable[["PrivateOptimizer"], None]
STEPS = "private_steps"  # in the optimizer's state: steps that it has seen
UNCOUNTED = (
    "the optimizer's state was loaded from a run of {there} private steps, of which this engine "
    "has counted {here}, so ε would be too small: save it with engine.save_checkpoint(..) too, and "
    "call engine.load_checkpoint(..) before the first step (in Lightning: docs/lightning.md)"
)
NOISE_ALONE = (
    "no sample of the first step has a finite gradient, so the step would be noise alone, and ε "
    "would count it: call engine.check(model, batch), and look for NaN or infinity in the samples"
)


def _of_wrapped(name: str) -> Any:
    """Returns a property that is the wrapped optimizer's attribute, for reading and for setting."""
    return property(
        lambda self: getattr(self.original_optimizer, name),
        lambda self, value: setattr(self.original_optimizer, name, value),
    )


class PrivateOptimizer(Optimizer):
    """Wraps a `torch.optim.Optimizer`, which then sees clipped sum plus noise, divided.

    `step()` finishes the exchange between ranks, counts the step, adds noise once, divides by the
    expected batch size and calls the wrapped optimizer's `step()`. It has the interface of
    `torch.optim.Optimizer`, which learning-rate schedulers read, and that of Opacus's
    `DPOptimizer`.

    An old `.grad` of a parameter that was frozen at `make_private` is set to None.

    The settings of a step are fixed at its first backward: later changes apply to the next step.
    Ranks compare them in each step (`FixedSettings`).

    Args:
        settings: an `arguments.settings.Settings`, with the optimizer to wrap, and σ, divisor and
            reduction of the first step.
        count: counts a step in an account, before its noise is generated. No hook takes its place.
        agreement: compares settings with other ranks; None: there are none.
        noise_source: where the noise comes from; default: independent Gaussian noise.

    Attributes:
        noise_multiplier: σ; the noise on the sum has standard deviation σC. Schedulers change it.
        max_grad_norm: C, which schedulers change too.
        expected_batch_size: the public constant that a mean is divided by.
        noise: adds noise to `.grad`.
        hooks: run in each step before it is counted; see `attach_step_hook`.
        listeners: called after each step (`PrivacyEngine.on_step`).
    """

    def __init__(
        self, settings: Any, *, model: Any, noise_key: bytes, count: Hook,
        agreement: Agreement | None = None, noise_source: NoiseSource | None = None,
    ):  # fmt: skip
        self.original_optimizer = settings.optimizer
        self.model, self._timer = model, Timer(model.profile)
        self.step_state = model.step_state
        self.noise_multiplier = settings.noise_multiplier
        self.expected_batch_size = settings.expected_batch_size
        self.loss_reduction = settings.loss_reduction
        self.hooks: list[Hook] = []
        self.listeners: list[Hook] = []
        self._count, self._cuda_graph = count, settings.cuda_graph
        self._runs_hooks = False
        self.noise = GradientNoise(model, noise_key, settings.adaptive_threshold, noise_source)
        if settings.fused_step and model.policy is not None:
            self.noise.fused_with = self.original_optimizer
        self.fixed_settings = FixedSettings(self, agreement)
        self._held: list[Any] = []  # parameters, when they were looked at last
        self._not_trained: list[Any] = []  # those of them that are not the model's
        self._loaded_steps = 0  # of the run whose state was loaded
        self.refuse()
        self._guard(self.original_optimizer)

    param_groups = _of_wrapped("param_groups")
    state = _of_wrapped("state")
    defaults = _of_wrapped("defaults")

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a private optimizer holds the noise key: use PrivacyEngine.save_checkpoint"
        )

    def __repr__(self) -> str:
        return f"PrivateOptimizer(σ={self.noise_multiplier}, {self.original_optimizer!r})"

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Raises RuntimeError: `accelerator.prepare` asks for it, and would skip steps."""
        raise RuntimeError(PREPARED)

    def __getattr__(self, name: str) -> Any:
        """Registers hooks with the wrapped optimizer, whose steps have noise."""
        if name.startswith("_optimizer_"):  # hooks of its steps or state dicts
            return getattr(self.original_optimizer, name)
        raise AttributeError(
            f"PrivateOptimizer has no attribute {name!r}: docs/from_opacus.md says what takes the "
            "place of Opacus's names"
        )

    def add_param_group(self, group: dict[str, Any]) -> None:
        raise RuntimeError(
            "add parameters before make_private: later ones have no clipped gradient"
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the wrapped optimizer's, and the number of private steps."""
        steps = 0 if self.model.policy is None else self.steps
        return {**self.original_optimizer.state_dict(), STEPS: steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads what `state_dict` has returned.

        Steps that the engine has not counted are not in its account: the next step is refused until
        `engine.load_checkpoint` has loaded that too.
        """
        check("state", state)
        self._loaded_steps = max(state.get(STEPS, 0), self._loaded_steps)
        self.original_optimizer.load_state_dict(
            {name: value for name, value in state.items() if name != STEPS}
        )

    @property
    def adaptive_threshold(self) -> AdaptiveThreshold | None:
        """Returns the adaptive threshold, which moves C to a quantile; None if C is fixed."""
        return self.noise.adaptive

    @property
    def max_grad_norm(self) -> float | list[float]:
        return self.model.thresholds.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | list[float]) -> None:
        self.model.thresholds.set(value)

    @property
    def steps(self) -> int:
        """Steps so far; part of the key of each step's noise."""
        return self.step_state.steps

    @property
    def accumulated_iterations(self) -> int:
        """Poisson batches per step, always one. Accountants multiply the sample rate by it."""
        return 1

    @property
    def step_hook(self) -> Hook | None:
        """Returns the hook that was attached last; setting it replaces all that were attached.

        The engine's account is not among them: it counts each step whatever is attached here.
        """
        return self.hooks[-1] if self.hooks else None

    @step_hook.setter
    def step_hook(self, hook: Hook | None) -> None:
        self.hooks = [] if hook is None else [hook]

    def attach_step_hook(self, hook: Hook) -> None:
        """Adds a hook: `hook(self)` runs in each real step, before it is counted and gets noise.

        If a hook raises, or changes a gradient, the step is not taken and not counted. The engine
        counts by itself. An accountant of your own can be attached beside it. A hook that counts in
        the engine's accountant is refused, because the step would be counted twice.
        """
        check("hook", hook)
        self.hooks.append(hook)

    def run_step_hooks(self) -> None:
        """Runs all hooks. Raises RuntimeError within a hook, or if one has changed a gradient."""
        if self._runs_hooks:
            raise RuntimeError(
                "a step hook calls step() or pre_step() of the optimizer that it is attached to: "
                "it runs within that step; call step() where the training loop does"
            )
        self._runs_hooks = True
        try:
            for hook in self.hooks:
                hook(self)
        finally:
            self._runs_hooks = False
        if self.hooks and self.model.policy is not None:
            self.model.gradient_buffer.watch.refuse_unclipped()

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """Announces that the next `step()` belongs to a microbatch that is not the last one."""
        check("do_skip", do_skip)
        self.step_state.signal_part(do_skip)

    def leave_microbatches(self, half_way: bool) -> bool:
        """Ends a batch; drops its sums if it was left `half_way`. No further microbatch comes.

        Returns whether there were any.
        """
        state = self.step_state
        dropped = half_way and (state.is_open or state.keeps_sums)
        state.end_parts()
        if half_way:
            self.zero_grad()
        return dropped

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops gradients. After a skipped step it keeps the sums that are being accumulated."""
        if set_to_none is not True:
            check("set_to_none", set_to_none)
        self.model.zero_grad(set_to_none)
        if not self.step_state.keeps_sums:
            self.original_optimizer.zero_grad(set_to_none or self.model.policy is not None)

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Takes a step. Raises RuntimeError without a backward since the last step."""
        loss = None
        if closure is not None:
            check("closure", closure)
            with torch.enable_grad():
                loss = closure()
        if self.step_state.take_signal():
            self.step_state.usage.end_part()
            return loss
        self._prepare()
        self.step_state.apply()
        self.original_optimizer.step()
        if self.noise.fused_with is not None:
            self.model.gradient_buffer.drop(self.model.capture.parameters)
        self.step_state.batch_number = None
        for listener in self.listeners:
            listener(self)
        return loss

    def graphed(self, body: Callable[..., Any]) -> GraphedStep:
        """Returns the body of a loop as one CUDA graph, which is called in its place.

        The body is one whole step: model, criterion, `backward()`, `step()` and `zero_grad()`. Its
        batches come from `BatchMemoryManager(.., pad_batches=True)`. See `cuda_graph`.

        Raises RuntimeError unless `make_private` was given `cuda_graph=True`.
        """
        if not self._cuda_graph:
            raise RuntimeError("optimizer.graphed(..) is for make_private(.., cuda_graph=True)")
        return GraphedStep(self, body)

    def pre_step(self) -> bool:
        """Makes `.grad` what `step()` applies: finishes the exchange, counts the step, adds noise.

        `step()` does it itself. Called before, it leaves room for what may be done with noisy
        gradients only, such as clipping their total norm. False for a step that is skipped.

        Raises:
            RuntimeError: if no backward has been since the last step, or with `fused_step=True`.
        """
        if self.noise.fused_with is not None:
            raise RuntimeError(
                "fused_step=True forms no noisy gradients that pre_step() could leave in .grad: "
                "call make_private without it"
            )
        if self.step_state.skips_next:
            return False
        self._prepare()
        return True

    def _prepare(self) -> None:
        """Makes `.grad` what may be applied, if it is not yet: the sum of all ranks, with noise."""
        self.refuse()
        if self.step_state.is_noisy:
            return
        self.model.finish_synchronization()
        with self._timer.part("noise", is_labelled=False):
            number = self.count()
            if self.model.policy is not None:
                is_fused = self.noise.fused_with is not None and not self.has_step_hooks()
                self.noise.add(number, is_fused)
            self.step_state.add_noise()

    def refuse(self) -> None:
        """Raises RuntimeError if `.grad` must not be applied, before anything is counted."""
        if self.model.policy is None:
            return
        if self.noise_multiplier is not self.step_state.settings.noise_multiplier:
            check("noise_multiplier", self.noise_multiplier)
        if self.step_state.is_noisy:  # else `finish_synchronization` looks at it
            self.model.gradient_buffer.watch.refuse_unclipped(is_noisy=True)
        capture = self.model.capture
        held = [parameter for group in self.param_groups for parameter in group["params"]]
        if len(held) != len(self._held) or not all(map(is_, held, self._held)):
            those = set(held)
            missing = [capture.names[p] for p in capture.parameters if p not in those]
            if missing:
                raise RuntimeError(
                    f"the optimizer no longer holds {', '.join(missing[:5])}, which would get "
                    "noise and never move: keep the parameters in optimizer.param_groups, or make "
                    "the network private again with a new optimizer"
                )
            self._held = held
            self._not_trained = [p for p in held if p not in capture.groups]
        for parameter in self._not_trained:
            parameter.grad = None

    def _guard(self, optimizer: Optimizer) -> None:
        """Refuses a step of the wrapped optimizer itself, which would apply sums without noise."""
        handle = optimizer.register_step_pre_hook(partial(_refuse_sums, weakref.ref(self)))
        weakref.finalize(self, handle.remove)

    def has_step_hooks(self) -> bool:
        """Returns whether hooks before the wrapped optimizer's step are to see noisy gradients."""
        hooks = (*common_step_hooks.values(), *step_hooks(self.original_optimizer).values())
        return any(getattr(hook, "func", None) is not _refuse_sums for hook in hooks)

    def count(self) -> int:
        """Counts the step in hooks, account and state; returns its number."""
        is_private = self.model.policy is not None
        self.step_state.require_sums()
        if self._loaded_steps > self.steps:
            raise RuntimeError(UNCOUNTED.format(there=self._loaded_steps, here=self.steps))
        if is_private:
            self.noise.check_process()
            self.fixed_settings.agree()
            self._refuse_noise_alone()
        self._count(self)
        # Counted before noise is made: what fails from here on never adds the same noise again.
        return self.step_state.count()

    def _refuse_noise_alone(self) -> None:
        """Raises RuntimeError on every rank if the first step with samples has no finite one.

        Whether it does depends on the samples. Later steps do not tell: without finite samples
        they apply noise.
        """
        state, agreement = self.step_state, self.fixed_settings.agreement
        if state.had_finite:
            return
        counts = [len(batch.norms) for batch in state.norms]
        left_out = [int(batch.nonfinite) for batch in state.norms]
        samples, finite = sum(counts), sum(counts) - sum(left_out)
        if agreement is not None:
            samples, finite = agreement.sums([samples, finite])
        if samples and not finite:
            self.model.clear_gradients()
            raise RuntimeError(NOISE_ALONE)
        state.had_finite = finite > 0

    def resume(self, steps: int, noise_key: bytes) -> None:
        """Continues at a step boundary: the next noise is that of step number `steps`."""
        self.noise.key, self._loaded_steps = noise_key, 0
        self.step_state.resume(steps)


def _refuse_sums(private: Callable[[], PrivateOptimizer | None], *_: Any) -> None:
    """Raises RuntimeError, as a hook of the wrapped optimizer, where `.grad` has no noise yet."""
    owner = private()
    if owner is not None and owner.step_state.is_open:
        raise RuntimeError(
            "step() of the optimizer that make_private was given would apply clipped sums "
            "without noise: call step() of the one that make_private returned"
        )
