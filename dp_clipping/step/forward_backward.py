"""Forward and backward of a captured network: each forward opens a private step for one backward.

Before the first forward it is found out where the samples are (`establish`). Where a pass fails
half-way, a sharded network is put back into a state from which the next one can be right.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn

from dp_clipping.capture.batch import Batch
from dp_clipping.capture.capture import Capture
from dp_clipping.capture.compile_forecast import CompiledShapes
from dp_clipping.capture.discovery import LayoutDiscovery
from dp_clipping.capture.losses import Watched
from dp_clipping.capture.state import Mark
from dp_clipping.kernels import available
from dp_clipping.layers.handle import LayoutUnknown
from dp_clipping.modes import Policy, say_plain
from dp_clipping.step.fused_step import FusedStep
from dp_clipping.step.gradient_buffer import GradientBuffer
from dp_clipping.step.private_step import PrivateStep
from dp_clipping.step.state import StepState
from dp_clipping.step.timed_step import PROFILED
from dp_clipping.torch_compat import is_compiled_in_place
from dp_clipping.validation import check_still_fixed, normalizations, refuse_packed


class ForwardBackward:
    """The passes of one private model.

    Args:
        network: the bare network.
        capture: its layers.
        mode: name of the mode, for messages.
        batch_first: the first dimension of the inputs counts the samples, else the second.
        state: of the model's step; the private step of a forward is pending in it.
    """

    def __init__(
        self, network: nn.Module, capture: Capture, mode: str, batch_first: bool, state: StepState
    ):
        self.network, self.capture, self.state = network, capture, state
        self.mode, self.batch_first = mode, batch_first
        self._establishment = LayoutDiscovery(network, capture, capture.sharding, batch_first)
        self._carried = self._establishment.carried
        self._normalizations = normalizations(network)
        self._samples_are_checked = False
        self._batch: Batch | None = None  # of that private step
        self._is_broken = False  # a sharded step failed, and nothing can be computed any more

    def reset_batch_layouts(self) -> None:
        """Look for the batch dimension again."""
        self._establishment.forget()

    def skip_checks(self, batches: int) -> None:
        """See `PrivateModel.skip_checks`."""
        self._establishment.skip_checks(batches)

    def forward(
        self,
        module: nn.Module,
        args: tuple,
        kwargs: dict,
        policy: Policy,
        sync: AbstractContextManager,
    ) -> Any:
        """Outputs of the module, the network or its data-parallel wrapper, called inside of `sync`;
        of no samples if it is given none.

        Raises:
            ValueError: where a layer's samples are cannot be told, or `model.train()` has reached
                a normalization that was accepted because it was frozen.
            RuntimeError: an earlier step of a sharded network failed half-way.
        """
        if self._is_broken:
            raise RuntimeError(
                "an earlier step of this sharded model failed half-way, and this version of torch "
                "(below 2.13) cannot tell FSDP2: it would compute with old parameters; load the "
                "last checkpoint in a new process"
            )
        check_still_fixed(self._normalizations)
        refuse_packed(args, kwargs)
        given = batch = Batch(args, kwargs, self.batch_first)
        if not given.size:
            args, kwargs = given.with_a_row_of_zeros()
            batch = Batch(args, kwargs, self.batch_first)
        try:
            check = self._establishment.ensure(batch)
        except BaseException:
            self.recover()
            raise
        kind = self._session_class(policy)
        kind = kind if self.capture.profile is None else PROFILED[kind]
        private_step = kind(self.capture, batch.size, policy, self._forecast(batch, policy))
        private_step.is_empty = not given.size
        self.state.pending = self._batch = None
        with self.capture.attached(private_step), sync, self._state_is_checked(module, batch):
            try:
                output = module(*args, **kwargs)
            except LayoutUnknown as error:
                if self.capture.sharding is not None:
                    self.recover()
                    raise ValueError(
                        f"{error} is called in a way that was not seen in the first batch, and "
                        "other ranks cannot be asked to look again now: call "
                        "model.reset_batch_layouts() on every rank before a forward that differs"
                    ) from error
                self._establishment.look(batch)
                output = self._call_network_again(args, kwargs)
            except BaseException:
                self.recover()
                raise
        self.state.pending, self._batch = private_step, batch
        if check is not None:
            private_step.watched = Watched(output, self._establishment.layouts_of(output), check)
            output = private_step.watched.outputs
        return given.without_rows(output) if private_step.is_empty else output

    def backward(
        self,
        private_step: PrivateStep,
        losses: Tensor,
        clip_norms: Tensor,
        gradients: GradientBuffer,
    ) -> Tensor:
        """`PrivateStep.backward` into `gradients`: unclipped norms [B].

        Raises:
            RuntimeError: in the first one, if the ranks of a tensor-parallel axis have other
                samples, or other gradients of a parameter that all of them have whole.
        """
        is_first = self.capture.reducer.splits_parameters and not self._samples_are_checked
        if is_first:
            self.capture.reducer.check_same_samples(losses)
        mark = Mark(self._carried.state)
        norms = private_step.backward(losses, clip_norms, gradients.accumulate)
        self._carried.check(mark, self._batch, "a backward")
        self._batch = None
        if is_first:
            differ = private_step.split_norms.differ
            if differ is not None and bool(differ):
                raise RuntimeError(
                    "a parameter that is not split over the tensor-parallel axis has other "
                    "per-sample gradients on each of its ranks: its module is given a part of its "
                    "input there (a norm over the heads that a rank has, say), so no rank knows "
                    "its gradient; freeze it, or let the plan gather its input"
                )
            self._samples_are_checked = True
        return norms

    def backward_without_samples(
        self,
        private_step: PrivateStep,
        losses: Tensor,
        clip_norms: Tensor,
        gradients: GradientBuffer,
    ) -> None:
        """Zeros into `gradients`, as other ranks expect them."""
        if self.capture.sharding is None:
            gradients.accumulate_zeros()
        else:
            # Ranks with samples need this one's shards, and its sums, zeros, in their order.
            private_step.backward(losses, clip_norms, lambda p, _: gradients.accumulate(p, None))

    def recover(self) -> None:
        """After a pass that failed."""
        sharding = self.capture.sharding
        if sharding is not None and not sharding.recover():
            self._is_broken = True

    def _call_network_again(self, args: tuple, kwargs: dict) -> Any:
        """Not through the wrapper, which has prepared its step: other ranks do not repeat it."""
        try:
            return self.network(*args, **kwargs)
        except LayoutUnknown as error:
            raise ValueError(
                f"{error} is called in a way that depends on more than the batch: where its "
                "samples are cannot be established"
            ) from error

    @contextmanager
    def _state_is_checked(self, module: nn.Module, batch: Batch) -> Iterator[None]:
        """Inside is one forward, which may carry nothing on; see `carried`.

        The host compares references and version counters, and reads no value.
        """
        mark = self._carried.state.mark()
        hook = None
        if module is not self.network:  # a wrapper, which writes to buffers before the network runs
            mark.forget_buffers()
            if not is_compiled_in_place(self.network):
                hook = self.network.register_forward_pre_hook(lambda *_: mark.renew(), prepend=True)
        try:
            yield
        finally:
            if hook is not None:
                hook.remove()
        self._carried.check(mark, batch, "a forward in training")

    def _session_class(self, policy: Policy) -> type[PrivateStep]:
        """On fused kernels, if the mode asks for them and all parameters are where they run."""
        if not policy.fused:
            return PrivateStep
        serve = all(available(p.device, p.dtype) for p in self.capture.parameters)
        if not serve:
            say_plain(self.mode)
        return FusedStep if serve else PrivateStep

    def _forecast(self, batch: Batch, policy: Policy) -> CompiledShapes | None:
        """Of the linear layers' operands, where compiled code must know it beforehand."""
        is_sharded = self.capture.sharding is not None
        if not policy.fused or not self.capture.is_compiled or is_sharded:
            return None
        return self._establishment.forecast(batch) if self._session_class(policy).fused else None
