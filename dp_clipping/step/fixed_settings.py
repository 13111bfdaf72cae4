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
        if self.noise.source.spans_steps:
            self._refuse_changed()
        if self.agreement is not None:
            self.agreement.begin(self._public())

    def _take(self) -> None:
        """Sets the settings as they are now; the very same objects are not checked again."""
        values = VALUES(self.optimizer)
        if not self._checked or not all(map(is_, values, self._checked)):
            for name, value in zip(NAMES, values, strict=True):
                check(name, value)
            self.model.step_state.settings, self._checked = self._now(), values

    def _now(self) -> StepSettings:
        """Returns the settings as they are now, with all numbers as Python floats."""
        noise_multiplier, expected_batch_size, loss_reduction = VALUES(self.optimizer)
        return StepSettings(float(noise_multiplier), float(expected_batch_size), loss_reduction)

    def _scales(self, clip_norms: list[float]) -> dict[str, object]:
        multiplier = self.model.step_state.settings.noise_multiplier
        return {"noise_multiplier": multiplier, "max_grad_norm": list(map(float, clip_norms))}

    def _refuse_changed(self) -> None:
        """Raises ValueError if σ or C is not that of `make_private`."""
        for name, value in self._scales(self.model.step_state.clip_norms).items():
            if value != self._first[name]:
                raise ValueError(
                    f"{name} was {self._first[name]} at make_private and is {value}: correlated "
                    "noise takes back noise of earlier steps, whose scale must be the same; leave "
                    'its scheduler out, or give make_private(.., noise_mechanism="gaussian")'
                )

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
        """Returns the settings that must be the same on all ranks; none of them is secret.

        A value that was changed since the first backward is shown with its new value.
        """
        model, adaptive = self.model, self.noise.adaptive
        own, coming = vars(model.step_state.settings), vars(self._now())
        found: Settings = {name: _shown(value, coming[name]) for name, value in own.items()}
        groups, clip_norms = model.capture.group_names, model.step_state.clip_norms
        for name, limit, later in zip(
            groups, clip_norms, model.thresholds.clip_norms(), strict=True
        ):
            of_group = f"max_grad_norm of {name}" if len(groups) > 1 else "max_grad_norm"
            found[of_group] = _shown(limit, later)
        found |= {"grad_sample_mode": model.mode, "clipping": model.clipping}
        found |= {"clipping_function": model.policy.clipping_function, "gamma": model.policy.gamma}
        if adaptive is not None:
            state = adaptive.state_dict()
            found |= {f"adaptive_threshold's {name}": value for name, value in state.items()}
        return found | {
            "steps": model.step_state.steps, "key fingerprint": self.noise.fingerprint,
            REFUSAL: model.step_state.refusal,
        }  # fmt: skip


def _shown(value: object, coming: object) -> object:
    return value if value == coming else f"{value}, then {coming}"
