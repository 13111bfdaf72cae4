"""The network in private training: what the user, the criterion and the optimizer call.

`step.forward_backward` runs the passes; `step.gradient_buffer` holds what they leave in `.grad`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dp_clipping.arguments.checks import checked
from dp_clipping.capture.calls import Calls, plain_names, with_signature_of
from dp_clipping.capture.capture import Capture
from dp_clipping.clipping.statistics import NormStatistics, norm_statistics
from dp_clipping.distributed.dtensor import fsdp_classes
from dp_clipping.distributed.norm_reduce import PendingReduce
from dp_clipping.distributed.sharding import Sharding
from dp_clipping.distributed.torch_compat import active_wrapper
from dp_clipping.losses.in_network import LossInNetwork, wrapped
from dp_clipping.losses.private_loss import PrivateLoss, refuse_reentrant
from dp_clipping.planning.plan import Plans
from dp_clipping.profiling.metrics import loss_and_count
from dp_clipping.profiling.profile import NOTHING, SWITCH, Profile
from dp_clipping.sampling.usage import SampleUsage
from dp_clipping.step.context import StepContext, context_of
from dp_clipping.step.forward_backward import ForwardBackward
from dp_clipping.step.gradient_buffer import GradientBuffer
from dp_clipping.step.private_step import PrivateStep
from dp_clipping.step.state import BatchNorms, StepState, Thresholds
from dp_clipping.validation import refuse_to_be_compiled, refuse_wrapper, replicas


class PrivateModel(nn.Module):
    """A network, or a `ddp` wrapper around one, whose backward clips every sample's gradient.

    `make_private` makes it. Each forward in training mode opens a private step. The backward of the
    private criterion's loss clips and sums, the private optimizer's `step()` adds noise and applies
    the sum, and `zero_grad()` makes room for the next one. In evaluation and under `torch.no_grad`
    calls and unknown attributes are those of the network itself.

    Args:
        settings: an `arguments.settings.Settings`, whose `module`, the network or its data-parallel
            wrapper, is `.module` of this one. With `wrap_model=False` the user gets that module,
            whose calls are redirected to this object.
        sharding: `sharding_of(module)`: how the network is spread over ranks, if it is.
        usage: counts the samples that the loader yields, if it yields Poisson batches.
        hide_unprotected: reading what ε does not cover raises.

    Attributes:
        returned: the object that the user has: this one or their module.
        step_state: the state of the step, shared with criterion and optimizer.
        thresholds: C, and C_k of each clipping group.
        gradient_buffer: `.grad` of the trainable parameters; not in mode `no_dp`.
        passes: run forward and backward; not in mode `no_dp`.
        loss_in_network: lets a network that is given labels return losses that can be clipped.
    """

    network: nn.Module
    returned: nn.Module
    profile: Profile | None = None  # while the switch is on

    def __init__(
        self, settings: Any, *, sharding: Sharding | None = None,
        usage: SampleUsage | None = None, hide_unprotected: bool = False,
    ):  # fmt: skip
        super().__init__()
        module, policy = settings.module, settings.policy
        self.module: Any = module  # a network, or a wrapper with methods of its own
        self.forward = with_signature_of(self.forward, module)  # type: ignore[method-assign]
        self.mode, self.policy, self.clipping = settings.grad_sample_mode, policy, settings.clipping
        self.batch_first, self.views = settings.batch_first, settings.views
        self.examples_per_unit = settings.rows_per_unit * settings.views  # rows of one unit
        self.hide_unprotected, self._loss_reduction = hide_unprotected, settings.loss_reduction
        self.sharding = sharding
        self.step_state = StepState(usage, is_private=policy is not None)
        self._is_wrapped = hasattr(module, "gradient_ready")
        own = self.__dict__  # in which a module is no child
        own["network"] = own["_module"] = module.module if self._is_wrapped else module
        own["returned"] = self if settings.wrap_model else module
        self.step_context: StepContext | None = None
        if policy is None:
            self.thresholds = Thresholds(settings.max_grad_norm, self.clipping, None)
        else:
            self._capture_layers(settings)
        self._calls: Calls | None = None
        if settings.wrap_model:
            self.register_load_state_dict_pre_hook(_load_plain_names)
        else:
            self._calls = Calls(
                module, self._call_of_unwrapped, zero_grad=self.zero_grad,
                refuse_wrapper=refuse_wrapper,
            )  # fmt: skip

    def _capture_layers(self, settings: Any) -> None:
        self.capture = Capture(self.network, self.clipping, self.sharding)
        context = self.step_context = context_of(settings, self.capture, self.hide_unprotected)
        self.profile = context.profile
        try:
            limits, groups = settings.max_grad_norm, self.capture.group_names
            self.thresholds = Thresholds(limits, self.clipping, groups)
            wrapper = self.module if self._is_wrapped else None
            self.gradient_buffer = GradientBuffer(context, self.step_state, wrapper)
        except ValueError:
            self.capture.remove()
            raise
        self.passes = ForwardBackward(context, self.step_state, self.gradient_buffer)
        self.loss_in_network = LossInNetwork(
            self.network, self.batch_first, self.capture.is_compiled, self.passes.constants
        )

    @property
    def per_sample_gradient_norms(self) -> Tensor:
        """Returns unclipped norms of all samples since `zero_grad`, float32 [local batch]."""
        self.refuse_in_release("per_sample_gradient_norms")
        return torch.cat([batch.norms for batch in self._norms()])

    def global_norms(self) -> PendingReduce:
        """Returns squared norms of all samples of all ranks since `zero_grad`, on every rank.

        Its `wait()` returns them: [clipping groups, samples of all ranks], float32, rank by rank.
        Every rank calls it, once per step.
        """
        self.refuse_in_release("global_norms")
        return self.gather_norms()

    def norm_statistics(self) -> NormStatistics:
        """Returns clipped fraction and histogram of all ranks' norms since `zero_grad`.

        Every rank calls it, after a backward and before `zero_grad`; all get the same.
        """
        self.refuse_in_release("norm_statistics")
        return norm_statistics(self.gather_norms().wait(), self.step_state.clip_norms)

    @property
    def nonfinite_samples(self) -> int:
        """Counts the samples since `zero_grad` whose norms are not finite; they were left out."""
        self.refuse_in_release("nonfinite_samples")
        return int(sum(batch.nonfinite for batch in self.step_state.norms))

    def profile_report(self) -> str:
        """Returns times of a step's phases and layers on this rank, and its norms: see `profiling`.

        `profile.data()` has the same for JSON. Raises RuntimeError if the switch was off.
        """
        self.refuse_in_release("profile_report")
        if self.profile is None:
            raise RuntimeError(f"profiling is off: set {SWITCH}=1 before make_private")
        return self.profile.report()

    def plan_table(self) -> str:
        """Shows what the last fused step did with each linear layer; see `planning.plan`.

        In every private mode it names the modules whose samples run one after another, and says
        why. It shows the size of that batch. Raises RuntimeError where there is neither.
        """
        self.refuse_in_release("plan_table")
        handles = () if self.policy is None else self.capture.handles
        slow = {handle.name or "the network": handle.one_by_one for handle in handles}
        plans = Plans() if self.step_context is None else self.step_context.plans
        return plans.table(self.mode, slow)

    def refuse_in_release(self, what: str) -> None:
        """Raises RuntimeError in a run whose every output is to be covered by ε."""
        if self.hide_unprotected:
            raise RuntimeError(
                f"{what} depends on the samples without noise and is not covered by ε: it is off "
                "with hide_unprotected=True; build PrivacyEngine(hide_unprotected=False) to look "
                "at it in private"
            )

    def gather_norms(self) -> PendingReduce:
        """Returns `global_norms` to code that adds noise to them before it shows them."""
        squared = torch.cat([batch.squared for batch in self._norms()], dim=1)
        assert self.step_context is not None
        return self.step_context.reducer.gather(squared)

    def _norms(self) -> list[BatchNorms]:
        """Returns the norms of each backward since `zero_grad`."""
        if self.policy is None:
            raise RuntimeError(f"mode {self.mode} computes no per-sample norms")
        if not self.step_state.norms:
            raise RuntimeError("no backward since zero_grad: there are no norms yet")
        return self.step_state.norms

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.policy is None:
            return self.module(*args, **kwargs)
        if not self.takes_step:
            with self.capture.attached(None):
                return self.module(*args, **kwargs)
        if torch.compiler.is_compiling():
            refuse_to_be_compiled()
        if (wrapper := active_wrapper()) is not None:
            refuse_wrapper(type(wrapper).__name__)
        if not self.network.training:
            raise RuntimeError(
                "a private training step of a network in evaluation: call model.train(); single "
                "modules may stay in evaluation"
            )
        module: Any = self._modules["module"]
        is_open = (state := self.step_state).is_open
        if is_open:
            self.gradient_buffer.watch.refuse_unclipped()
        losses, labelled = self.loss_in_network, None
        if kwargs or losses.places:
            labelled = losses.labelled(args, kwargs)
        try:
            with NOTHING if labelled is None else losses.per_sample(labelled):
                outputs = self.passes.forward(module, args, kwargs, self._sync_context())
        except RuntimeError as error:
            refuse_reentrant(error)
            raise
        for lengths in state.pending.lengths:
            lengths.around = partial(self._as_in_forward, lengths.around, args, kwargs)
        if is_open:
            self.gradient_buffer.watch.note()  # a wrapper may have waited for sums under way
        if labelled is None and isinstance(outputs, Tensor) and outputs.dim():
            return outputs  # no loss of the network's own
        private = partial(PrivateLoss, self, state.pending, reduction=self._loss_reduction)
        return wrapped(outputs, state.pending, private, labelled)

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuses the subclasses that `fully_shard` and `replicate` make of a module's class."""
        super().__init_subclass__(**options)
        if issubclass(cls, (*replicas(), *fsdp_classes())):
            refuse_wrapper(cls.__mro__[1].__name__)

    refuse_wrapper = staticmethod(refuse_wrapper)  # which a `ddp` wrapper calls

    def no_sync(self) -> AbstractContextManager:
        """Enters a context in which sums add up locally; the next backward outside sends them."""
        return self.module.no_sync() if self._is_wrapped else NOTHING

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops gradients and norms. After a skipped step it keeps the sums being accumulated.

        Private gradients are always set to None: zeros of a 16-bit parameter could not take up
        float32 sums.
        """
        if self.step_state.keeps_sums:
            return
        if self.policy is None:
            super().zero_grad(set_to_none)
            self.step_state.drop()
        else:
            self.clear_gradients()

    def reset_batch_layouts(self) -> None:
        """Searches for the batch dimension again: for layers that are called differently now.

        Modules that came to run under vmap run as at first until the search finds that they cannot.
        With a sharded model every rank calls it.
        """
        self.passes.reset_batch_layouts()

    @checked()
    def skip_checks(self, batches: int = 1024) -> None:
        """Counts this number of batches as checked for dependent samples.

        Batches 1, 2, 4, 8, ... are checked: ten of the first thousand, but half of the first four.
        Call this before you time a few steps, and not in training. Every rank calls it.

        The batches that `checks="sampled"` selects are counted too: none of these is checked, and
        one in 64 of those that follow is. A first batch is checked in any case.
        """
        if self.policy is not None:
            self.passes.skip_checks(batches)

    def to_standard_module(self) -> nn.Module:
        """Returns the network with its own forwards, as before `make_private`."""
        if self.step_context is not None:
            self.capture.remove()
            self.gradient_buffer.remove()
        if self._calls is not None:
            self._calls.remove()
        return self.network

    @property
    def training(self) -> bool:
        """Returns whether calls are steps of training."""
        own = self.__dict__.get("returned", self)
        return self.__dict__["_training"] if own is self else own.training

    @training.setter
    def training(self, mode: bool) -> None:
        self.__dict__["_training"] = mode

    def whole_parameters(self) -> AbstractContextManager:
        """Returns a context with whole parameters, if a `ddp` wrapper divides them; collective."""
        return getattr(self.module, "whole_parameters", nullcontext)()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the network's, under the network's own names."""
        with self.whole_parameters():
            return self.network.state_dict(*args, **kwargs)

    @checked()
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads the state dict of a network like this one, or of its private model.

        Names may begin with `module.` or `_module.`, as older versions and Opacus save them.
        """
        with self.whole_parameters():
            return self.network.load_state_dict(
                plain_names(state_dict, self.network), strict=strict, assign=assign
            )

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the network's, under the network's own names."""
        return self.network.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yields the network's, under the network's own names."""
        return self.network.named_buffers(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Makes `copy.deepcopy` and `torch.save` copy the plain network.

        A copy belongs to no engine. It is for averaging weights and for evaluation; training it is
        not private. To continue later, use `PrivacyEngine.save_checkpoint`.
        """
        reduced: Any = self.network.__reduce_ex__(protocol)
        function, *rest = reduced
        # pickle takes copyreg's function for a promise that the object is of this class.
        return object.__new__ if function.__name__ == "__newobj__" else function, *rest

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
            return getattr(super().__getattr__("module"), name)

    @property
    def takes_step(self) -> bool:
        """Returns whether a forward is one of a private step: there is something to train."""
        if not (self.training and torch.is_grad_enabled()):
            return False
        # The compiler, which is refused in a step, follows no `map`.
        return any([p.requires_grad for p in self.capture.parameters])

    def reached(self) -> AbstractContextManager:
        """Returns a context in which calls of the user's own module run its own forward."""
        return NOTHING if self._calls is None else self._calls.reached()

    def private_backward(self, private_step: PrivateStep, losses: Tensor) -> None:
        """Runs the private backward; see `ForwardBackward.backward`."""
        is_kept = self.step_state.keeps_losses and not private_step.is_empty
        kept = [loss_and_count(private_step, losses)] if is_kept else []
        limits = self.thresholds.clip_norms
        self.passes.backward(private_step, losses, limits, self._sync_context())
        self.step_state.losses += kept

    def finish_synchronization(self) -> None:
        """Blocks until each `.grad` is (this rank's shard of) the sum over all ranks.

        Raises RuntimeError if parameters have no sum, as after a backward that was cut off.
        """
        self.step_state.accumulating = False
        if self.step_context is not None:
            with self.step_context.timer.part("gradient_sync", is_labelled=False):
                self.gradient_buffer.finish()
        elif hasattr(self.module, "finish_gradient_synchronization"):
            self.module.finish_gradient_synchronization()

    def clear_gradients(self) -> None:
        """Drops gradients, as `zero_grad` does; they may be float32 again."""
        self.passes.drop()

    def _call_of_unwrapped(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.module, (*replicas(), *fsdp_classes())) and self.sharding is None:
            refuse_wrapper(type(self.module).__name__)
        return self.forward(*args, **kwargs)

    @contextmanager
    def _as_in_forward(
        self, context: Callable[[], AbstractContextManager], args: tuple, kwargs: dict
    ) -> Iterator[None]:
        """Enters the context of a forward with these arguments, and another one."""
        losses = self.loss_in_network
        with self.reached(), context(), losses.per_sample(losses.labelled(args, kwargs)):
            yield

    def _sync_context(self) -> AbstractContextManager:
        return self.no_sync() if self.step_state.accumulating else NOTHING


def _load_plain_names(model: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Renames entries before loading, so that the network's own names can be loaded."""
    inner = f"{prefix}module." + ("module." if model.module is not model.network else "")
    own = {key: state_dict.pop(key) for key in list(state_dict) if key.startswith(prefix)}
    of_network = {key.removeprefix(prefix): value for key, value in own.items()}
    named = plain_names(of_network, model.network)
    state_dict.update({f"{inner}{name}": value for name, value in named.items()})
