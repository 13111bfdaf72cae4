"""Adds noise to the clipped sums of a step, and divides them, by settings fixed when it opens."""

import hashlib
import os
from operator import attrgetter, is_
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.nn import Parameter
from torch.optim import Optimizer

from dp_clipping.arguments.checks import check
from dp_clipping.arguments.thresholds import check_noise
from dp_clipping.distributed.agreement import REFUSAL, Agreement, Settings
from dp_clipping.distributed.dtensor import local
from dp_clipping.distributed.placement import Place, Span, place_of
from dp_clipping.distributed.sharding import Sharding
from dp_clipping.noise.adaptive_threshold import AdaptiveThreshold
from dp_clipping.noise.add_noise import AddressedNoise, NoiseSource
from dp_clipping.noise.fused_update import Update, updates_of
from dp_clipping.noise.gaussian import NoiseStream
from dp_clipping.noise.kernel import StreamTable
from dp_clipping.step.state import StepSettings

NAMES = ("noise_multiplier", "expected_batch_size", "loss_reduction")
VALUES = attrgetter(*NAMES)  # of an optimizer


class GradientNoise:
    """Adds the noise of one model's steps. Key, step and parameter select its streams.

    Args:
        model: whose `.grad` gets it.
        key: the key of the noise; a load replaces it.
        adaptive: lets C follow a quantile of the norms, whose counts need noise too; or None.
        source: where the noise comes from; default: independent Gaussian noise in each step.

    Attributes:
        table: where the CUDA graph that is being captured reads the streams of its steps.
        fused_with: the optimizer whose step the noise kernels take (`noise.fused_update`), or None.
    """

    def __init__(
        self, model: Any, key: bytes, adaptive: AdaptiveThreshold | None,
        source: NoiseSource | None = None,
    ):  # fmt: skip
        self.model, self.key, self.adaptive = model, key, adaptive
        self.source = source or AddressedNoise()
        self.table: StreamTable | None = None
        self.fused_with: Optimizer | None = None
        self._process = os.getpid()
        self._names: list[str] = []
        self._dtypes: list[torch.dtype] = []
        if model.policy is not None:
            self._dtypes = [p.dtype for p in model.capture.parameters]
            self._names = [model.capture.names[p] for p in model.capture.parameters]
        self._places: list[Place | None] | None = None  # of this rank's parts, if it has parts
        if model.sharding is not None:
            self._places = [_place_in(model.sharding, p) for p in model.capture.parameters]

    @property
    def fingerprint(self) -> str:
        """Returns a text by which ranks compare keys; it reveals nothing about the key."""
        return hashlib.blake2b(b"shown", key=self.key, digest_size=4).hexdigest()

    def std_multiplier(self) -> float:
        """Returns z of the gradient's noise: σ, or more if counts of norms get noise too."""
        multiplier = self.model.step_state.settings.noise_multiplier
        if self.adaptive is None:
            return multiplier
        return self.adaptive.gradient_noise_multiplier(multiplier)

    def check_process(self) -> None:
        """Raises RuntimeError in a process that was forked from the one that made this."""
        if os.getpid() != self._process:
            raise RuntimeError(
                "this process was forked from the one that called make_private, and would add the "
                "same noise, which two different sums must not share: call make_private in the "
                "process that trains"
            )

    def streams(self, step: int) -> list[NoiseStream]:
        """Returns the stream of each parameter that `AddressedNoise` takes, for a CUDA graph."""
        return NoiseStream.derive_all(self.key, step=step, parameters=self._names, share=0)

    def add(self, step: int, is_fused: bool = False) -> None:
        """Adds noise to `.grad`, divides it and calls users' hooks; updates C if it is adaptive.

        If it fails half-way, sums are dropped: a second attempt would add noise to some twice.

        Args:
            is_fused: the kernels take the step of `fused_with`, where they can.
        """
        model, settings = self.model, self.model.step_state.settings
        try:
            norms = None if self.adaptive is None else model.gather_norms()
            self._add_to_sums(step, is_fused)
            if self.adaptive is not None:
                is_noisy = settings.noise_multiplier > 0
                self.adaptive.update(norms.wait(), step=step, noise_key=self.key, noisy=is_noisy)
                model.thresholds.set(self.adaptive.max_grad_norm)
            if model.gradient_buffer.hooks.taken:
                model.gradient_buffer.hooks.run()
        except BaseException:
            model.clear_gradients()
            raise
        model.gradient_buffer.watch.settle()

    def _add_to_sums(self, step: int, is_fused: bool) -> None:
        """Adds noise to the sums in `.grad`, or to the pieces of them that this rank steps."""
        model, settings = self.model, self.model.step_state.settings
        buffer = model.gradient_buffer
        owners, pieces = model.capture.parameters, buffer.pieces()
        names, dtypes, places = self._names, self._dtypes, self._places
        if pieces is not None:
            owners, totals = [p for p, *_ in pieces], [total for *_, total in pieces]
            names = [model.capture.names[p] for p in owners]
            dtypes = [total.dtype for total in totals]
            places = [(Span(0, offset, n, n, 1),) for _, offset, n, _ in pieces]
        else:
            totals = [p.grad for p in owners]
            totals = totals if places is None else list(map(local, totals))
        fused: dict[str, list[Update | None]] = {}
        if is_fused and self.fused_with is not None:
            fused["updates"] = updates_of(self.fused_with, owners, totals)
        noisy = self.source.add(
            totals, names, dtypes=dtypes, places=places, table=self.table, key=self.key, step=step,
            std=self.std_multiplier() * model.step_state.sensitivity,
            divisor=settings.expected_batch_size if settings.loss_reduction == "mean" else 1.0,
            **fused,
        )  # fmt: skip
        of_all = zip(owners, totals, noisy, strict=True)
        others = [(p, total, found) for p, total, found in of_all if found is not total]
        if fused:
            updated = {p for p, one in zip(owners, fused["updates"], strict=True) if one}
            increment_version(updated)
            buffer.drop(updated)
            others = [one for one in others if one[0] not in updated]
        if pieces is None:
            buffer.apply([(p, found) for p, _, found in others])
        else:
            for _, total, found in others:  # some were changed in place
                total.copy_(found)


def _place_in(sharding: Sharding, parameter: Parameter) -> Place | None:
    """Returns the place of this rank's part of a parameter; None if the rank has all of it."""
    if parameter not in sharding.slices:
        return place_of(parameter)
    # FSDP1's slice of a flattened parameter
    start, length = sharding.slices[parameter][dist.get_rank(sharding.shards)]
    return (Span(0, start, length, length, 1),) if length else ()


class FixedSettings:
    """Fixes σ, divisor and reduction when a step opens; later changes apply to the next step.

    Args:
        optimizer: the private optimizer, whose settings, model and noise they are.
        agreement: compares settings with other ranks; None: there are none.
    """

    def __init__(self, optimizer: Any, agreement: Agreement | None):
        self.optimizer, self.agreement = optimizer, agreement
        self.model, self.noise = optimizer.model, optimizer.noise
        self._checked: tuple = ()  # values that were looked at last
        self._scale: tuple = ()  # of noise that was looked at last
        self._take()
        self._first = self._scales(self.model.thresholds.clip_norms())
        self.model.step_state.on_open = self.fix
        self.model.step_state.refuses_late = agreement is not None and not agreement.early

    def fix(self) -> None:
        """Fixes the settings; called when a step's first backward begins.

        Raises:
            ValueError: for one out of range, or another σ or C than in the first step where the
                noise of earlier steps is in that of this one.
        """
        state = self.model.step_state
        self._take()
        scale = self.noise.std_multiplier(), state.sensitivity
        if scale != self._scale:
            check_noise(*scale)
            self._scale = scale
        scales = self._scales(state.clip_norms) if self.noise.source.spans_steps else self._first
        for name, value in scales.items():
            if value != self._first[name]:
                raise ValueError(
                    f"{name} was {self._first[name]} at make_private and is {value}: correlated "
                    "noise takes back noise of earlier steps, whose scale must be the same; leave "
                    'its scheduler out, or give make_private(.., noise_mechanism="gaussian")'
                )
        if self.agreement is not None:
            self.agreement.begin(self._public())

    def _take(self) -> None:
        """Sets the settings as they are now; the very same objects are not checked again."""
        values = VALUES(self.optimizer)
        if not self._checked or not all(map(is_, values, self._checked)):
            for name, value in zip(NAMES, values, strict=True):
                check(name, value)
            self._checked = noise_multiplier, expected_batch_size, loss_reduction = values
            self.model.step_state.settings = StepSettings(
                float(noise_multiplier), float(expected_batch_size), loss_reduction
            )

    def _scales(self, clip_norms: list[float]) -> dict[str, object]:
        """Returns σ and C of the step, which the noise is scaled with."""
        multiplier = self.model.step_state.settings.noise_multiplier
        return {"noise_multiplier": multiplier, "max_grad_norm": list(map(float, clip_norms))}

    def agree(self) -> None:
        """Raises an error, after dropping the sums, if ranks have other settings or refuse."""
        if self.agreement is None:
            return
        try:
            self.agreement.check(self.model.step_state.steps, self._public())
        except BaseException:
            self.model.step_state.refusal = None
            self.model.clear_gradients()
            raise

    def _public(self) -> Settings:
        """Returns the settings that must be the same on all ranks; none of them is secret."""
        model, state, adaptive = self.model, self.model.step_state, self.noise.adaptive
        found: Settings = dict(vars(state.settings))
        groups = model.capture.group_names
        for name, limit in zip(groups, state.clip_norms, strict=True):
            found[f"max_grad_norm of {name}" if len(groups) > 1 else "max_grad_norm"] = limit
        found |= {"grad_sample_mode": model.mode, "clipping": model.clipping}
        found |= {"clipping_function": model.policy.clipping_function, "gamma": model.policy.gamma}
        if self.noise.fused_with is not None:  # with hooks, weights are rounded otherwise
            found["a step pre-hook of the optimizer"] = self.optimizer.has_step_hooks()
        if adaptive is not None:
            values = adaptive.state_dict()
            found |= {f"adaptive_threshold's {name}": value for name, value in values.items()}
        return found | {
            "steps": state.steps, "batch of the loader": state.batch_number,
            "key fingerprint": self.noise.fingerprint, REFUSAL: state.refusal,
        }  # fmt: skip
