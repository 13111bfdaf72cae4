"""The settings of a step: fixed at its first backward, and the same on all ranks."""

from operator import attrgetter, is_
from typing import Any

from dp_clipping.arguments.checks import check
from dp_clipping.arguments.thresholds import check_noise
from dp_clipping.distributed.agreement import REFUSAL, Agreement, Settings
from dp_clipping.step.state import StepSettings

NAMES = ("noise_multiplier", "expected_batch_size", "loss_reduction")
VALUES = attrgetter(*NAMES)  # of an optimizer


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
        check_noise(self.noise.std_multiplier(), state.sensitivity)
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
