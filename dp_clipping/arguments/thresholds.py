"""The clipping threshold C, set by `make_private`, schedulers or an adaptive threshold."""

from collections.abc import Sequence

from dp_clipping.arguments.numbers import check_max_grad_norm
from dp_clipping.clipping.coefficients import clip_norms_of


class Thresholds:
    """C of the next step, and the threshold C_k of each of its clipping groups.

    Args:
        max_grad_norm: C, or a list of thresholds, one per group.
        clipping: `"flat"` or `"per_layer"`.
        groups: names of the clipping groups; None: mode `no_dp` has none.

    Raises:
        ValueError: for a threshold that is no finite number above 0, or not one per group.
    """

    def __init__(
        self, max_grad_norm: float | list[float], clipping: str, groups: Sequence[str] | None
    ):
        self._clipping, self._groups = clipping, groups
        self.set(max_grad_norm)

    def set(self, max_grad_norm: float | list[float]) -> None:
        """Sets C from the next step on."""
        if self._groups is not None:
            self._checked(max_grad_norm, self._groups)
        self.max_grad_norm = max_grad_norm

    def clip_norms(self) -> list[float]:
        """Returns C_k of each clipping group."""
        return [] if self._groups is None else self._checked(self.max_grad_norm, self._groups)

    def _checked(self, max_grad_norm: float | list[float], groups: Sequence[str]) -> list[float]:
        check_max_grad_norm(max_grad_norm, self._clipping)
        clip_norms = clip_norms_of(max_grad_norm, len(groups), self._clipping)
        if len(clip_norms) != len(groups):
            raise ValueError(
                f"max_grad_norm has {len(clip_norms)} thresholds for {len(groups)} clipping groups "
                f"({', '.join(groups[:4])}{', ...' if len(groups) > 4 else ''}): give one per "
                "group, or one number"
            )
        return clip_norms
