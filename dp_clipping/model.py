"""The network in private training: forward opens a session, backward leaves clipped sums."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from dp_clipping.arguments import check_max_grad_norm
from dp_clipping.batch import Batch
from dp_clipping.budget import Budget
from dp_clipping.capture import Capture
from dp_clipping.clip import thresholds
from dp_clipping.compiled import Forecast
from dp_clipping.establish import Establishment
from dp_clipping.fused import FusedSession
from dp_clipping.global_norms import GlobalNorms
from dp_clipping.kernels import available
from dp_clipping.layers.arithmetic import wide
from dp_clipping.layers.handle import LayoutUnknown
from dp_clipping.modes import PLAIN_TWIN, say_plain
from dp_clipping.norm_reduce import NormReducer
from dp_clipping.profiled import PROFILED
from dp_clipping.profiling import SWITCH, Profile, profile_of, ranged
from dp_clipping.session import Policy, Session
from dp_clipping.sharded import Sharding, local
from dp_clipping.sharded_sums import ShardedSums
from dp_clipping.statistics import NormStatistics, norm_statistics
from dp_clipping.validation import check_still_fixed, normalizations


class PrivateModel(nn.Module):
    """A network, or a `ddp` wrapper around one, whose backward clips every sample's gradient.

    In evaluation and under `torch.no_grad` it is the network itself. Unknown attributes are looked
    up there too.

    Args:
        module: the network or its data-parallel wrapper; `.module` of this one.
        mode: name of the mode, for messages.
        policy: how the mode works; None trains without privacy.
        max_grad_norm: C, or a list of thresholds, one a group.
        clipping: `"flat"` or `"per_layer"`.
        batch_first: the first dimension of the inputs counts the samples, else the second.
        release: what is not covered by ε raises instead of showing itself.
        sharding: `Sharding.of(module)`: how the network is spread over ranks, if it is.
        norm_reduction: how norms are added up over ranks that have parts of the parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        mode: str,
        policy: Policy | None,
        max_grad_norm: float | list[float],
        clipping: str = "flat",
        batch_first: bool = True,
        release: bool = False,
        sharding: Sharding | None = None,
        norm_reduction: str = "async",
    ):
        super().__init__()
        self.module = module
        self.mode, self.policy, self.clipping = mode, policy, clipping
        self.max_grad_norm = max_grad_norm
        self.batch_first = batch_first
        self.accumulating = False  # more microbatches of this draw are to come: nothing leaves yet
        self.keeps_gradients = False  # the last step was skipped: zero_grad keeps its sums
        self.release = release
        self._nonfinite_samples = 0
        self.holds_dummy: Callable[[], bool] = lambda: False  # is the loader's batch made up?
        self.budget = Budget()  # the loader's, if it makes Poisson draws
        self._is_wrapped = hasattr(module, "gradient_ready")
        self._norms: list[Tensor] = []
        self._squares: list[Tensor] = []  # the same by clipping group, squared: [K, B] a backward
        self._samples_are_checked = False
        self._session: Session | None = None
        self._step_is_open = False
        self._is_held_back = False  # `.grad` holds sums that no_sync() kept on this rank
        self._is_broken = False  # a sharded step failed, and nothing can be computed any more
        self._capture: Capture | None = None
        self.sharding = sharding
        self.profile: Profile | None = None  # None: the switch is off, see `profiling`
        self._sharded_sums: ShardedSums | None = None
        if policy is not None:
            self._capture = Capture(self.network, clipping, sharding)
            self._capture.reducer = self._make_reducer(norm_reduction)
            alone = self._capture.reducer.data_ranks == 1
            self.profile = profile_of(self._capture.anchor.device, release, alone)
            self._capture.profile = self.profile
            if sharding is not None:
                self._sharded_sums = self._capture.sums = sharding.make_sums()
                self._sharded_sums.profile = self.profile
            self._establishment = Establishment(self.network, self._capture, sharding)
            self._normalizations = normalizations(self.network)
            # By name: between forward and backward FSDP has other objects in their place.
            named = self.network.named_parameters()
            self._trainable = {name for name, p in named if p.requires_grad}
            self.limits()
            if self._is_wrapped:
                module.reduce = "sum"
                module.gradients_come_by_hand = True
            self._use_wide_gradients()
            self._unclipped: set[Parameter] = set()  # what autograd has added an ordinary one to
            self._hooks = [
                p.register_post_accumulate_grad_hook(self._unclipped.add)
                for p in self.capture.parameters
            ]

    # ---- what a user calls ----------------------------------------------------------------------

    @property
    def network(self) -> nn.Module:
        """The bare network."""
        return self.module.module if self._is_wrapped else self.module

    @property
    def capture(self) -> Capture:
        assert self._capture is not None
        return self._capture

    @property
    def per_sample_gradient_norms(self) -> Tensor:
        """Unclipped norms of all samples since `zero_grad`, float32 [local batch], in order.

        Not covered by ε: for looking, not for publishing.
        """
        self.refuse_in_release("per_sample_gradient_norms")
        if self.policy is None:
            raise RuntimeError(f"mode {self.mode} computes no per-sample norms")
        if not self._norms:
            raise RuntimeError("no backward since zero_grad: there are no norms yet")
        return torch.cat(self._norms)

    def global_norms(self) -> GlobalNorms:
        """Squared norms of all samples of all ranks since `zero_grad`, on their way to every rank.

        Every rank calls it, once a step. Not covered by ε.
        """
        if not self._squares:
            raise RuntimeError("no backward since zero_grad: there are no norms yet")
        return self.capture.reducer.gather(torch.cat(self._squares, dim=1))

    def norm_statistics(self) -> NormStatistics:
        """Clipped fraction and histogram of the norms of all ranks' samples since `zero_grad`.

        Every rank calls it, after a backward and before `zero_grad`; all get the same. Not covered
        by ε: refused with `release=True`.
        """
        self.refuse_in_release("norm_statistics")
        if self.policy is None:
            raise RuntimeError(f"mode {self.mode} computes no per-sample norms")
        squares = self.global_norms().wait()
        return norm_statistics(squares, self._step_limits, self.refuse_in_release)

    @property
    def nonfinite_samples(self) -> int:
        """Samples since `zero_grad` that were left out, their norms not finite.

        Not covered by ε either.
        """
        self.refuse_in_release("nonfinite_samples")
        return int(self._nonfinite_samples)

    def profile_report(self) -> str:
        """Times of a step's phases and layers on this rank, and its norms: see `profiling`.

        Not covered by ε: refused with `release=True`. `profile.data()` has the same for JSON.
        Raises RuntimeError if the switch was off when the model was made.
        """
        self.refuse_in_release("profile_report")
        if self.profile is None:
            raise RuntimeError(f"profiling is off: set {SWITCH}=1 before make_private")
        return self.profile.report()

    def plan_table(self) -> str:
        """What the last step on fused kernels did with each linear layer; see `dp_clipping.plan`.

        It shows the size of that batch: refused with `release=True`. Raises RuntimeError if there
        was none.
        """
        self.refuse_in_release("plan_table")
        if self.policy is None or not self.policy.fused:
            raise RuntimeError(
                f"mode {self.mode} has no plan: choose grad_sample_mode={' or '.join(PLAIN_TWIN)}"
            )
        if self.capture.plan is None:
            raise RuntimeError(
                "no step has run on fused kernels yet: call plan_table() after loss.backward(); "
                f"where they are not available, {self.mode} runs as {PLAIN_TWIN[self.mode]}, "
                "which has no plan"
            )
        return self.capture.plan.table()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.policy is None:
            return self.module(*args, **kwargs)
        if not (self.training and torch.is_grad_enabled()):
            with self.capture.attached(None):
                return self.module(*args, **kwargs)
        check_still_fixed(self._normalizations)
        given = batch = Batch(args, kwargs, self.batch_first)
        if not given.size:
            args, kwargs = given.with_a_row_of_zeros()
            batch = Batch(args, kwargs, self.batch_first)
        self._establishment.ensure(batch)
        self.capture.forecast = self._forecast(batch)
        kind = self._session_class()
        kind = kind if self.profile is None else PROFILED[kind]
        session = kind(self.capture, batch.size, self.policy)
        session.is_empty = not given.size
        if self._is_broken:
            raise RuntimeError(
                "an earlier step of this sharded model failed half-way, and this version of torch "
                "(below 2.13) cannot tell FSDP2: it would compute with old parameters; load the "
                "last checkpoint in a new process"
            )
        with self.capture.attached(session), self._sync_context():
            try:
                output = self.module(*args, **kwargs)
            except LayoutUnknown as error:
                if self.sharding is not None:
                    self._recover()
                    raise ValueError(
                        f"{error} is called in a way that was not seen in the first batch, and "
                        "other ranks cannot be asked to look again now: call "
                        "model.forget_layouts() on every rank before a forward that differs"
                    ) from error
                self._establishment.look(batch)
                output = self._call_network_again(args, kwargs)
            except BaseException:
                self._recover()
                raise
        self._session = session
        return given.without_rows(output) if session.is_empty else output

    def no_sync(self) -> AbstractContextManager:
        """Backwards inside accumulate locally; the next one outside sends the whole sum."""
        return self.module.no_sync() if self._is_wrapped else nullcontext()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients and norms; after a skipped step, keep what is being accumulated.

        Private gradients are always set to None: zeros of a 16-bit parameter could not take up
        float32 sums.
        """
        if self.keeps_gradients:
            return
        if self.policy is None:
            super().zero_grad(set_to_none)
        else:
            self.clear_gradients()

    def forget_layouts(self) -> None:
        """Look for the batch dimension again, as when the way layers are called changes.

        With a sharded model every rank calls it.
        """
        self._establishment.forget()

    def to_standard_module(self) -> nn.Module:
        """The network with its own forwards, as before `make_private`."""
        if self._capture is not None:
            self._capture.remove()
            for hook in self._hooks:
                hook.remove()
            if self._is_wrapped:
                self.module.gradients_come_by_hand = False
        return self.network

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
            return getattr(super().__getattr__("module"), name)

    # ---- what criterion and optimizer call ------------------------------------------------------

    def refuse_in_release(self, what: str) -> None:
        """Raises RuntimeError in a run whose every output is to be covered by ε."""
        if self.release:
            raise RuntimeError(
                f"{what} depends on the samples without noise and is not covered by ε: it is off "
                "with release=True; build PrivacyEngine(release=False) to look at it in private"
            )

    @property
    def last_session(self) -> Session | None:
        return self._session

    def limits(self) -> list[float]:
        """C_k of each clipping group."""
        return self._limits_of(self.max_grad_norm)

    def set_max_grad_norm(self, value: float | list[float]) -> None:
        """C from the next step on. Raises ValueError for one that `make_private` would not take."""
        if self.policy is not None:
            self._limits_of(value)
        self.max_grad_norm = value

    def sensitivity(self) -> float:
        """C of the step that is open: what one sample can move the sum by."""
        return sum(c * c for c in self._step_limits) ** 0.5

    def private_backward(self, session: Session, losses: Tensor) -> None:
        """Add the clipped sum of this batch to `.grad`, in float32, and let it leave.

        If it fails half-way, the step's sums are dropped: parameters that have theirs already would
        count the samples twice in a second attempt.
        """
        if session is not self._session:
            raise RuntimeError("backward of an earlier forward: run one forward, then its backward")
        self.budget.use(0 if session.is_empty or self.holds_dummy() else session.batch_size)
        self._open_step()
        try:
            with self._sync_context():
                self._add_sums(session, losses)
                self._is_held_back = self._is_wrapped and not _sends(self.module)
        except BaseException:
            self.clear_gradients()
            self._recover()
            raise
        self._session = None

    def _recover(self) -> None:
        if self.sharding is not None and not self.sharding.recover():
            self._is_broken = True

    def send_held_back(self) -> None:
        """Before a step: sums that were all accumulated under `no_sync` leave now."""
        if not self._is_held_back:
            return
        if not _sends(self.module):
            raise RuntimeError(
                "optimizer.step() under no_sync(): ranks would go on with different sums, so call "
                "it outside"
            )
        for parameter in reversed(self.capture.parameters):
            self.module.gradient_ready(parameter)
        self._is_held_back = False

    @ranged("gradient_sync")
    def finish_synchronization(self) -> None:
        """Before a step: `.grad` of each parameter is (this rank's shard of) the sum of all ranks.

        Raises:
            RuntimeError: parameters have no sum, as after a backward that was cut off.
        """
        self.accumulating = False
        self.send_held_back()
        if self._sharded_sums is not None:
            self._sharded_sums.finish()
        elif hasattr(self.module, "finish_gradient_synchronization"):
            self.module.finish_gradient_synchronization()

    def _add_sums(self, session: Session, losses: Tensor) -> None:
        if session.is_empty or self.holds_dummy():
            self._norms.append(losses.detach().new_zeros(0, dtype=torch.float32))
            self._squares.append(self._norms[-1].new_zeros(len(self._step_limits), 0))
            if self._sharded_sums is not None:
                # Ranks with samples need this one's shards, and its sums, zeros, in their order.
                limits = _on_device(tuple(self._step_limits), losses.device)
                session.backward(losses, limits, lambda p, _: self._receive(p, None))
                return
            # Backwards, as a backward would: rank 0's first order becomes that of the buckets.
            for parameter in reversed(self.capture.parameters):
                self._receive(parameter, None)
            return
        is_first = self.capture.reducer.splits_parameters and not self._samples_are_checked
        if is_first:
            self.capture.reducer.check_same_samples(losses)
        limits = _on_device(tuple(self._step_limits), losses.device)
        self._norms.append(session.backward(losses, limits, self._receive))
        self._squares.append(session.squares)
        if is_first:
            if session.parted is not None and bool(session.parted):
                raise RuntimeError(
                    "a parameter that is not split over the tensor-parallel axis has other "
                    "per-sample gradients on each of its ranks: its module is given a part of its "
                    "input there (a norm over the heads that a rank has, say), so no rank knows "
                    "its gradient; freeze it, or let the plan gather its input"
                )
            self._samples_are_checked = True
        self._nonfinite_samples += session.nonfinite

    def _call_network_again(self, args: tuple, kwargs: dict) -> Any:
        """Not through the wrapper, which has prepared its step: other ranks do not repeat it."""
        try:
            return self.network(*args, **kwargs)
        except LayoutUnknown as error:
            raise ValueError(
                f"{error} is called in a way that depends on more than the batch: where its "
                "samples are cannot be established"
            ) from error

    def refuse_unclipped(self, is_noisy: bool = False) -> None:
        """Raises RuntimeError if an ordinary backward has added to what a step will apply.

        In private training autograd accumulates nothing into a trainable parameter. Of a sharded
        one that is told by its gradient alone, which may be changed once it `is_noisy`.
        """
        unclipped = [p for p in self._unclipped if p.grad is not None]
        if self._sharded_sums is not None and not is_noisy:
            unclipped += self._sharded_sums.changed()
        names = [self.capture.names[p] for p in unclipped]
        if names:
            raise RuntimeError(
                f"an ordinary backward (a loss that is not the private criterion's) has added to "
                f"the gradient of {', '.join(sorted(names)[:5])}, unclipped: call "
                "optimizer.zero_grad() after it, and before the private forward"
            )

    @property
    def step_is_open(self) -> bool:
        """Sums have been added to `.grad` since the last step."""
        return self._step_is_open

    def close_step(self) -> None:
        self._step_is_open = False

    def clear_gradients(self) -> None:
        """`zero_grad`: gradients are dropped, and may be float32 again."""
        self._norms.clear()
        self._squares.clear()
        self.budget.give_back()
        if self._step_is_open and self.profile is not None:
            self.profile.abandon()
        self._step_is_open = self._is_held_back = False
        self._nonfinite_samples = 0
        self._unclipped.clear()
        if self._sharded_sums is not None:
            self._sharded_sums.forget()
        for parameter in self.capture.parameters:
            parameter.grad = None
        self._use_wide_gradients()

    def apply_gradient(self, parameter: Parameter, gradient: Tensor) -> None:
        """Let `.grad` be what the optimizer applies, in the parameter's own dtype.

        `gradient`: of a DTensor, this rank's part; it may be what `.grad` holds, changed in place.
        """
        if parameter.grad is not None and local(parameter.grad) is gradient:
            return
        if self.sharding is not None:
            gradient = self.sharding.like(parameter, gradient)
        parameter.grad = None
        parameter.grad_dtype = parameter.dtype
        parameter.grad = gradient

    # ---- gradients ------------------------------------------------------------------------------

    def _open_step(self) -> None:
        self.refuse_unclipped()
        self._unclipped.clear()
        if self._step_is_open:
            return
        if any(p.grad is not None for p in self.capture.parameters):
            raise ValueError(
                "gradients of the last step are still there: call optimizer.zero_grad() after "
                "optimizer.step(), or they would be used twice"
            )
        self._refuse_thawed()
        self._step_limits = self.limits()
        self._step_is_open = True

    def _refuse_thawed(self) -> None:
        """What is clipped and gets noise was settled when the model was made."""
        changed = {
            name: "trainable" if p.requires_grad else "frozen"
            for name, p in self.network.named_parameters()
            if p.requires_grad != (name in self._trainable)
        }
        if changed:
            names = ", ".join(f"{name} ({now} now)" for name, now in list(changed.items())[:5])
            raise RuntimeError(
                f"{names}: freeze and unfreeze before make_private; afterwards set the learning "
                "rate of a parameter group to 0, or use to_standard_module() and make it private "
                "again"
            )

    def _use_wide_gradients(self) -> None:
        """`.grad` of 16-bit parameters is float32 until noise is in it."""
        for parameter in self.capture.parameters:
            if parameter.dtype != wide(parameter.dtype) and parameter.grad is None:
                parameter.grad_dtype = wide(parameter.dtype)
        if self._is_wrapped and any(p.dtype != wide(p.dtype) for p in self.capture.parameters):
            self.module.gradient_dtype = torch.float32

    def _receive(self, parameter: Parameter, total: Tensor | None) -> None:
        shape, dtype = self.capture.shapes[parameter], wide(parameter.dtype)
        if total is None:
            total = torch.zeros(shape, dtype=dtype, device=parameter.device)
        total = total.to(dtype).view(shape)
        if self._sharded_sums is not None:
            self._sharded_sums.receive(parameter, total)
            return
        if parameter.grad is None:
            parameter.grad = total
        else:
            if self._is_wrapped:
                self.module.before_gradient(parameter)
            parameter.grad.add_(total)
        if self._is_wrapped:
            self.module.gradient_ready(parameter)

    def _make_reducer(self, mode: str) -> NormReducer:
        data_group, tensor_group = getattr(self.module, "process_group", None), None
        if self.sharding is not None:
            data_group, tensor_group = self.sharding.data_group, self.sharding.tensor_group
        widest = max((wide(p.dtype) for p in self.capture.parameters), key=lambda d: d.itemsize)
        return NormReducer(
            data_group=data_group, tensor_group=tensor_group, mode=mode,
            device=self.capture.anchor.device, dtype=widest,
        )  # fmt: skip

    def _session_class(self) -> type[Session]:
        """On fused kernels, if the mode asks for them and all parameters are where they run."""
        if not self.policy.fused:
            return Session
        serve = all(available(p.device, p.dtype) for p in self.capture.parameters)
        if not serve:
            say_plain(self.mode)
        return FusedSession if serve else Session

    def _sync_context(self) -> AbstractContextManager:
        return self.no_sync() if self.accumulating else nullcontext()

    def _limits_of(self, max_grad_norm: float | list[float]) -> list[float]:
        check_max_grad_norm(max_grad_norm, self.clipping)
        groups = self.capture.group_names
        limits = thresholds(max_grad_norm, len(groups), self.clipping)
        if len(limits) != len(groups):
            raise ValueError(
                f"max_grad_norm has {len(limits)} thresholds for {len(groups)} clipping groups "
                f"({', '.join(groups[:4])}{', ...' if len(groups) > 4 else ''}): give one a group, "
                "or one number"
            )
        return limits

    def _forecast(self, batch: Batch) -> Forecast | None:
        """Of the linear layers' operands, where compiled code must know it beforehand."""
        if not self.policy.fused or not self.capture.is_compiled or self.sharding is not None:
            return None
        return self._establishment.forecast(batch) if self._session_class().fused else None


@lru_cache(maxsize=8)
def _on_device(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Float64, kept: a copy to a GPU would make the host wait for what runs there."""
    return torch.tensor(values, dtype=torch.float64, device=device)


def _sends(wrapper: nn.Module) -> bool:
    """Not under its `no_sync`; PyTorch's DDP has another name for it than ours."""
    ours = getattr(wrapper, "_synchronizing", True)
    return getattr(wrapper, "require_backward_grad_sync", ours)
