"""The interface of a private model for optimizer and criterion; see `model.PrivateModel`."""

from typing import Any, Protocol

from torch import Tensor

from dp_clipping.arguments.thresholds import Thresholds
from dp_clipping.capture.network import CapturedNetwork
from dp_clipping.distributed.global_norms import GlobalNorms
from dp_clipping.distributed.sharding import Sharding
from dp_clipping.modes import Policy
from dp_clipping.profiling.profile import Profile
from dp_clipping.step.state import StepState


class Steppable(Protocol):
    """A model whose backward forms clipped sums; see `PrivateModel` for each of these.

    Attributes:
        policy: how the mode works; None in mode `no_dp`.
    """

    training: bool
    mode: str
    clipping: str
    policy: Policy | None
    batch_first: bool
    sharding: Sharding | None
    step_state: StepState
    thresholds: Thresholds
    gradient_buffer: Any  # a `gradient_buffer.GradientBuffer`

    @property
    def profile(self) -> Profile | None: ...

    @property
    def capture(self) -> CapturedNetwork: ...

    # ---- what the criterion calls

    @property
    def takes_step(self) -> bool: ...

    def refuse_in_release(self, what: str) -> None: ...

    def private_backward(self, private_step: Any, losses: Tensor) -> None: ...

    # ---- what the optimizer calls

    def zero_grad(self, set_to_none: bool = True) -> None: ...

    def finish_synchronization(self) -> None: ...

    def gather_norms(self) -> GlobalNorms: ...

    def clear_gradients(self) -> None: ...
