"""What optimizer and criterion need of a private model, which `model.PrivateModel` has."""

from typing import Any, Protocol

from torch import Tensor
from torch.nn import Parameter

from dp_clipping.capture.network import CapturedNetwork
from dp_clipping.distributed.global_norms import GlobalNorms
from dp_clipping.distributed.sharding import Sharding
from dp_clipping.modes import Policy
from dp_clipping.profiling.profile import Profile
from dp_clipping.step.state import StepState


class Steppable(Protocol):
    """A model whose backward leaves clipped sums; see `PrivateModel` for each of these.

    Attributes:
        policy: how the mode works; None in mode `no_dp`.
    """

    training: bool
    mode: str
    clipping: str
    policy: Policy | None
    batch_first: bool
    max_grad_norm: float | list[float]
    sharding: Sharding | None
    step_state: StepState

    @property
    def profile(self) -> Profile | None: ...

    @property
    def capture(self) -> CapturedNetwork: ...

    # ---- what the criterion calls

    def refuse_in_release(self, what: str) -> None: ...

    def private_backward(self, private_step: Any, losses: Tensor) -> None: ...

    # ---- what the optimizer calls

    def zero_grad(self, set_to_none: bool = True) -> None: ...

    def finish_synchronization(self) -> None: ...

    def clip_norms(self) -> list[float]: ...

    def set_max_grad_norm(self, value: float | list[float]) -> None: ...

    def gather_norms(self) -> GlobalNorms: ...

    def refuse_unclipped(self, is_noisy: bool = False) -> None: ...

    def apply_gradient(self, parameter: Parameter, gradient: Tensor) -> None: ...

    def settle_gradients(self) -> None: ...

    def clear_gradients(self) -> None: ...
