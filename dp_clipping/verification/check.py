"""Compares a private step on the user's model and batch with one ordinary backward per sample.

The private side is a step's forward and backward as in training: its mode, clipping groups,
thresholds and clipping function. The other side is the definition: see one_by_one.py.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.data import default_collate

from dp_clipping.capture.samples.bags import Bags, place_of
from dp_clipping.capture.samples.batch import Batch
from dp_clipping.checkpoint.run import PrivateRun
from dp_clipping.clipping.accumulation import full_float32
from dp_clipping.clipping.coefficients import MARGIN
from dp_clipping.clipping.norms import GRAM_ROUNDING
from dp_clipping.clipping.statistics import norm_statistics
from dp_clipping.guard.lengths import DependsOnLength
from dp_clipping.layers.recorder import Trainable
from dp_clipping.planning.cost_model import GRAM
from dp_clipping.sampling.usage import Ticket
from dp_clipping.trials.randomness import same_randomness
from dp_clipping.trials.tolerances import FLOOR, ITEMSIZE, NORM, OF_BATCHES, SUM
from dp_clipping.verification.one_by_one import (
    Reference,
    Setting,
    changed,
    in_float64,
    one_by_one,
    random_sample,
    tensors_of,
)
from dp_clipping.verification.report import Bounds, Check, gradient_errors, norm_errors
from dp_clipping.verification.user_loss import Loss, loss_of

CANCELLED = 0.1
"""A sum shorter than so much of Σ_i c_i‖g_i‖ / √B, the length of a sum of unrelated gradients, is
judged by that length: rounding errors are relative to what was summed."""
SAMPLES = 32  # of the data set, among which samples of other lengths are looked for
RANDOM = 0.1  # of the tolerance of a norm: losses of one sample that differ by more are random


class Stage(nn.Module):
    """The user's network where a check runs it, without the wrapper's step state and sample usage.

    Forwards are private ones while `training`, which is no flag of the network's, and `backward`
    of the criterion's loss then stores what it has computed here. Otherwise they are the network's.
    All else is the model's.
    """

    model: Any  # a `PrivateModel`, which is no part of this module

    def __init__(self, model: Any):
        super().__init__()
        self.__dict__["model"] = model
        self.module = model.network
        self.clip_norms = self.capture.trigger.new_tensor(
            model.thresholds.clip_norms(), dtype=torch.float64
        )
        self.size: int  # of the batch
        self.batch: Batch  # that the forward was called with
        self.norms: Tensor  # [B]
        self.group_norms: Tensor  # [K, B]
        self.sums: dict[Parameter, Tensor | None] = {}
        self._passes = model.passes.beside()
        self.step_state, self.plans = self._passes.state, self._passes.context.plans

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            with self.capture.attached(None):
                return self.module(*args, **kwargs)
        batch = self._passes.batch_of(args, kwargs)
        if not batch.size:
            raise ValueError("the batch has no samples, so there is nothing to check: take another")
        outputs = self._passes.forward(self.module, args, kwargs, nullcontext())
        self.size = self.step_state.pending.rows
        self.batch = batch
        return outputs

    def _take(self, sums: Iterable[tuple[Trainable, Tensor | None]]) -> None:
        self.sums.update({one.parameter: total for one, total in sums})

    def private_backward(self, private_step: Any, losses: Tensor) -> None:
        if private_step is not self.step_state.pending:
            raise RuntimeError("loss runs the model twice: it may once for each loss")
        with torch.autocast(losses.device.type, enabled=False):
            found = private_step.backward(losses, self.clip_norms, self._take)
            for check in private_step.checks:
                check()
        self.norms, self.group_norms = found.norms, found.squared.double().sqrt()

    @property
    def takes_step(self) -> bool:
        """Returns whether a forward is one of the step that is checked, not of an evaluation."""
        return self.training

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.model, name)


def compare(run: PrivateRun, batch: Any, loss: Loss | None = None) -> Check:
    """Returns both sides of a step on this batch; see `PrivacyEngine.check`."""
    _refuse(run)
    if any(x.is_meta for x in tensors_of(batch)):
        raise ValueError("batch has tensors on device meta, without data: give one of the loader")
    model = run.model
    with _without_trace(model), full_float32(layers=True):
        stage = Stage(model)
        batch = changed(batch, lambda x: x.to(stage.clip_norms.device))
        dim = 0 if stage.batch_first else 1
        rows = [x.shape[dim] for x in tensors_of(batch, stage.batch_first) if x.dim() > dim]
        stage.step_state.usage.batch_size = rows[0] if rows else None
        of_batch = partial(loss_of, loss, stage, run.criterion.for_model(stage))
        of_batch(batch).backward()
        _check_lengths(run, batch, loss)
        allowance = GRAM_ROUNDING * _tokens_of_grams(stage.plans.last)
        stage.training = False
        setting = _setting(stage, batch, lambda batch: of_batch(batch).loss_per_sample)
        reference = one_by_one(setting)
        shortest = _shortest(stage.module, reference)
        verdict = _verdict(stage, reference, shortest, allowance)
        if verdict.faults:
            sample = random_sample(setting, RANDOM * NORM.of(shortest))
            if sample is not None:
                return replace(verdict, random_sample=sample)
            # What one sample's own backward rounds away is not the private step's fault.
            exact = None if shortest.itemsize > 4 else in_float64(stage.module, setting)
            if exact is not None:
                verdict = _verdict(stage, exact, shortest, allowance, reference)
    return verdict


def _check_lengths(run: PrivateRun, batch: Any, loss: Loss | None) -> None:
    """Raises DependsOnLength if samples of the data set depend on the length of their batch.

    The loader's collate function makes a batch of some of the first samples, which
    `guard.lengths` compares. Nothing is found if the user's batch is of another kind.
    """
    collate = None if run.poisson is None else run.poisson.checked
    if collate is None or collate.collate_fn is default_collate:
        return
    stage = Stage(run.model)
    dataset: Any = run.poisson.dataset
    try:
        with same_randomness():
            samples = [dataset[i] for i in range(min(SAMPLES, len(dataset)))]
            whole, alone = collate.some_of(samples)
            if alone is not None and _kinds(whole) == _kinds(batch):
                stage.step_state.usage.ticket = Ticket(alone=(whole, alone))
                whole = changed(whole, lambda x: x.to(stage.clip_norms.device))
                loss_of(loss, stage, run.criterion.for_model(stage), whole)
                for check in stage.step_state.pending.checks:
                    check()
    except DependsOnLength:
        raise
    except Exception:  # the loss does not take such a batch
        return


def _kinds(batch: Any) -> list[tuple[int, torch.dtype]]:
    return [(x.dim(), x.dtype) for x in tensors_of(batch)]


def _setting(stage: Stage, batch: Any, losses_of: Callable[[Any], Tensor]) -> Setting:
    """Returns the results of the private side that the reference side needs."""
    capture, policy = stage.capture, stage.policy
    return Setting(
        losses_of,
        batch,
        size=stage.size,
        batch_first=stage.batch_first,
        groups={p: capture.groups[p] for p in capture.parameters},
        clip_norms=stage.clip_norms,
        function=policy.clipping_function,
        gamma=policy.gamma,
        bags=_bags_in(batch, stage.batch),
        examples_per_unit=stage.examples_per_unit,
        views=stage.views,
    )


def _bags_in(batch: Any, given: Batch) -> tuple[Bags, ...]:
    """Returns which tensors of the user's batch are the bags that the model was given."""
    tensors, leaves = tensors_of(batch), given.leaves
    found = {n: place_of(leaves[n], tensors) for one in given.bags for n in one.leaves}
    places = {n: place for n, place in found.items() if place is not None}
    if len(places) < len(found):
        raise ValueError(
            "engine.check cannot tell a sample's ids, as the model is given other ids or offsets "
            "than the batch holds: hand them through in loss, as loss=lambda model, criterion, "
            "batch: criterion(model(batch[0], batch[1]), batch[2])"
        )
    return tuple(one.at(places) for one in given.bags)


def _shortest(network: nn.Module, reference: Reference) -> torch.dtype:
    """Returns the shortest dtype among parameters and computed values."""
    dtypes = {p.dtype for p in network.parameters() if p.is_floating_point()}
    return min(reference.shortest, *dtypes, key=ITEMSIZE)


def _verdict(
    stage: Stage, reference: Reference, shortest: torch.dtype, allowance: float,
    beside: Reference | None = None,
) -> Check:  # fmt: skip
    """Returns the comparison of the private step with a reference.

    Args:
        shortest: of what the network computes with.
        allowance: for the rounding of Gram matrices, beyond the tolerance of a sum.
        beside: the same in the network's own numbers, where the reference is in float64. What it
            is off by, the private step may be off by so many times.
    """
    model, capture, clip_norms = stage.model, stage.capture, stage.clip_norms.tolist()
    floor, norm, norms = FLOOR.of(shortest), NORM.of(shortest), reference.norms
    least = CANCELLED / norms.shape[1] ** 0.5
    scales = {p: least * scale for p, scale in reference.scales.items()}
    margins = {p: MARGIN[torch.float32] * scale for p, scale in reference.scales.items()}
    errors = gradient_errors(stage.sums, reference.sums, floor, scales, margins)
    allowed = dict.fromkeys(errors, SUM.of(shortest) + allowance)
    if beside is not None:
        times = OF_BATCHES.of(shortest)
        rounding = gradient_errors(beside.sums, reference.sums, floor, scales)
        allowed = {p: max(allowed[p], times * rounding[p]) for p in errors}
        lost = norm_errors(beside.norms, norms, stage.clip_norms, floor)
        norm = max(norm, times * float(lost.max()))
    worst = max(errors, key=lambda p: errors[p] / allowed[p])
    return Check(
        norms=stage.norms.detach().cpu(),
        expected_norms=norms.norm(dim=0).cpu(),
        norm_errors=norm_errors(stage.group_norms, norms, stage.clip_norms, floor).cpu(),
        gradient_error=errors[worst],
        worst_parameter=capture.names[worst],
        clipped=norm_statistics(stage.group_norms.square(), clip_norms).clipped_fraction,
        expected_clipped=norm_statistics(norms.square(), clip_norms).clipped_fraction,
        tolerance=Bounds(norm, allowed[worst]),
        setting=f"{model.mode}, {model.clipping}, {norms.shape[1]} samples",
    )


def _tokens_of_grams(plan: Any) -> int:
    """Returns the number of tokens in the longest Gram matrix of the step."""
    pairs = () if plan is None else zip(plan.uses, plan.choices, strict=True)
    return max((use.tokens for use, choice in pairs if choice.algorithm == GRAM), default=0)


def _refuse(run: PrivateRun) -> None:
    model: Any = run.model
    model.refuse_in_release("engine.check")
    if model.policy is None:
        raise ValueError(f"mode {model.mode} clips nothing: choose another grad_sample_mode")
    if model.sharding is not None:
        raise ValueError(
            "a sharded model has no rank that could run one sample alone: check the network before "
            "it is sharded, or run python -m ddp_by_hand.experiments.verify_correctness "
            "--use-fsdp / --use-tp"
        )
    if not run.model.step_state.is_idle:
        raise RuntimeError(
            "check in the middle of a step: call it before loss.backward(), or after "
            "optimizer.step() and optimizer.zero_grad()"
        )


@contextmanager
def _without_trace(model: Any) -> Iterator[None]:
    """Puts the network into evaluation inside, and everything that a step reads back afterwards."""
    capture, network = model.capture, model.network
    flags = [(module, module.training) for module in network.modules()]
    layouts = [(h, h.layouts, h.output_layouts, h.flattened, h.sought) for h in capture.handles]
    joints = [(record, record.joint) for record in capture.trained]
    try:
        for module, _ in flags:
            module.training = False
        for handle in capture.handles:
            handle.layouts, handle.output_layouts, handle.flattened, handle.sought = {}, {}, 0, 0
        with same_randomness(network.modules(), capture.trigger.device), torch.enable_grad():
            yield
    finally:
        for module, training in flags:
            module.training = training
        for handle in capture.handles:  # some may be new
            handle.layouts, handle.output_layouts, handle.flattened, handle.sought = {}, {}, 0, 0
            handle.sites.clear()
        for handle, *known in layouts:
            handle.layouts, handle.output_layouts, handle.flattened, handle.sought = known
        for record, joint in joints:
            record.joint = joint
