"""A private step on the user's own model and batch, beside one ordinary backward a sample.

The private side is a step's forward and backward as in training: its mode, clipping groups,
thresholds and clipping function. The other side is the definition. Sample i alone runs through the
user's own modules, not captured, and autograd gives g_i:

    n_ik = ‖g_ik‖ for clipping group k,    Σ_i c(n_ik) g_ik

with c(n) = min(1, C_k / n) (`abadi`, arXiv:1607.00133) or C_k / (n + γ) (`automatic`,
arXiv:2206.07136), in float64 and by nothing of `clip`, `norms` or `layers`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from dp_clipping.capture.batch import Batch
from dp_clipping.checkpoint.run import Run
from dp_clipping.clipping.statistics import norm_statistics
from dp_clipping.criterion import PrivateCriterion, PrivateLoss
from dp_clipping.layers.accumulation import full_float32
from dp_clipping.model import PrivateModel
from dp_clipping.planning.cost_model import WIDTH
from dp_clipping.step.forward_backward import ForwardBackward
from dp_clipping.step.private_step import PrivateStep
from dp_clipping.step.state import StepState
from dp_clipping.torch_compat import tree_map
from dp_clipping.verification.report import (
    TOLERANCES,
    Check,
    Tolerance,
    gradient_errors,
    norm_errors,
)

Loss = Callable[[nn.Module, PrivateCriterion, Any], PrivateLoss]
Sums = dict[Parameter, Tensor]

ROUNDING = 10  # times the error of one sample's own float32 backward; kernels of batches differ
GRAM_ROUNDING = 2.0**-16  # a token: what norms from Gram matrices leave room for before they clip
EXAMPLE = 'loss=lambda model, criterion, batch: criterion(model(**batch).logits, batch["labels"])'


class Stage(nn.Module):
    """The user's network where a check runs it, with none of the model's wrapper, step and budget.

    Forwards are private ones while `training`, which is no flag of the network's, and `backward`
    of the criterion's loss then leaves what it has computed here. Otherwise they are the network's.
    """

    def __init__(self, model: PrivateModel):
        super().__init__()
        # In a tuple, since as an attribute it would be a part of this module.
        self._model = (model,)
        self.module, self.capture, self.policy = model.network, model.capture, model.policy
        self.batch_first = model.batch_first
        self.clip_norms = self.capture.trigger.new_tensor(model.clip_norms(), dtype=torch.float64)
        self.size: int  # of the batch
        self.norms: Tensor  # [B]
        self.group_norms: Tensor  # [K, B]
        self.sums: dict[Parameter, Tensor | None] = {}
        dtypes = {p.dtype for p in model.network.parameters() if p.is_floating_point()}
        self.shortest = min(dtype.itemsize for dtype in dtypes)
        self.step_state = StepState()
        self._passes = ForwardBackward(
            model.network, model.capture, model.mode, model.batch_first, self.step_state
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            with self.capture.attached(None):
                return self.module(*args, **kwargs)
        if not Batch(args, kwargs, self.batch_first).size:
            raise ValueError("the batch has no samples, so there is nothing to check: take another")
        device = self.clip_norms.device.type
        if torch.is_autocast_enabled(device):
            self.shortest = min(self.shortest, torch.get_autocast_dtype(device).itemsize)
        outputs = self._passes.forward(self.module, args, kwargs, self.policy, nullcontext())
        self.size = self.step_state.pending.batch_size
        return outputs

    def private_backward(self, private_step: PrivateStep, losses: Tensor) -> None:
        if private_step is not self.step_state.pending:
            raise RuntimeError("loss runs the model twice: it may once for each loss")
        with torch.autocast(losses.device.type, enabled=False):
            self.norms = private_step.backward(losses, self.clip_norms, self.sums.__setitem__)
        self.group_norms = private_step.squares.double().sqrt()

    @property
    def model(self) -> PrivateModel:
        return self._model[0]

    def refuse_in_release(self, what: str) -> None:
        """`compare` has."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def compare(run: Run, batch: Any, loss: Loss | None = None) -> Check:
    """See `PrivacyEngine.check`."""
    _refuse(run)
    model = run.model
    with _without_trace(model), full_float32(convolutions=True):
        stage = Stage(model)
        criterion = PrivateCriterion(stage, run.criterion.criterion, run.criterion.loss_reduction)
        batch = _changed(batch, lambda x: x.to(stage.clip_norms.device))

        def loss_of(batch: Any) -> PrivateLoss:
            made = (loss or _plain_loss)(stage, criterion, batch)
            if not isinstance(made, PrivateLoss) or made.model is not stage:
                raise ValueError(
                    f"loss returned {type(made).__name__}: it must call the model and the "
                    f"criterion that it is given, and return what that returns, as {EXAMPLE}"
                )
            return made

        loss_of(batch).backward()
        allowance = GRAM_ROUNDING * _tokens_of_grams(model)
        stage.training = False
        norms, sums = _one_by_one(stage, batch, loss_of)
        tolerance = TOLERANCES[min(4, stage.shortest)]
        tolerance = replace(tolerance, gradient=tolerance.gradient + allowance)
        verdict = _verdict(stage, norms, sums, tolerance)
        if verdict.faults and stage.shortest == 4:
            # What one sample's own float32 backward rounds away is not the private step's fault.
            exact = _in_float64(stage, batch, loss_of)
            if exact is not None:
                verdict = _verdict(stage, *exact, tolerance, beside=(norms, sums))
    return verdict


def _verdict(
    stage: Stage,
    norms: Tensor,
    sums: Sums,
    tolerance: Tolerance,
    beside: tuple[Tensor, Sums] | None = None,
) -> Check:
    """The private step against norms [K, B] and clipped sums.

    beside: norms and sums of float32 backwards one by one, where those above are of float64. What
        they are off by, the private step may be off by `ROUNDING` times.
    """
    model, capture, clip_norms = stage.model, stage.capture, stage.clip_norms.tolist()
    floor, norm = tolerance.floor, tolerance.norm
    errors = gradient_errors(stage.sums, sums, floor)
    allowed = dict.fromkeys(errors, tolerance.gradient)
    if beside is not None:
        rounding = gradient_errors(beside[1], sums, floor)
        allowed = {p: max(allowed[p], ROUNDING * rounding[p]) for p in errors}
        lost = norm_errors(beside[0], norms, stage.clip_norms, floor)
        norm = max(norm, ROUNDING * float(lost.max()))
    worst = max(errors, key=lambda p: errors[p] / allowed[p])
    return Check(
        norms=stage.norms.detach().cpu(),
        expected_norms=norms.norm(dim=0).cpu(),
        norm_errors=norm_errors(stage.group_norms, norms, stage.clip_norms, floor).cpu(),
        gradient_error=errors[worst],
        worst_parameter=capture.names[worst],
        clipped=norm_statistics(stage.group_norms.square(), clip_norms).clipped_fraction,
        expected_clipped=norm_statistics(norms.square(), clip_norms).clipped_fraction,
        tolerance=replace(tolerance, norm=norm, gradient=allowed[worst]),
        setting=f"{model.mode}, {model.clipping}, {norms.shape[1]} samples",
    )


def _in_float64(
    stage: Stage, batch: Any, loss_of: Callable[[Any], PrivateLoss]
) -> tuple[Tensor, Sums] | None:
    """`_one_by_one` of the network in float64; None if it cannot run there."""
    own = (*stage.module.parameters(), *stage.module.buffers())
    tensors = [x for x in own if x.is_floating_point()]
    before = [x.data for x in tensors]
    try:
        for x in tensors:
            x.data = x.data.double()
        found = _one_by_one(stage, _changed(batch, _doubled), loss_of)
    except (RuntimeError, TypeError, ValueError):  # say, a table or a cast in float32
        return None
    finally:
        for x, data in zip(tensors, before, strict=True):
            x.data = data
    return found


def _doubled(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def _one_by_one(
    stage: Stage, batch: Any, loss_of: Callable[[Any], PrivateLoss]
) -> tuple[Tensor, Sums]:
    """Norms [K, B] and clipped sums, by the definition, in float64."""
    capture, policy, clip_norms = stage.capture, stage.policy, stage.clip_norms
    size = stage.size
    groups = torch.tensor(list(capture.groups.values()), device=clip_norms.device)
    sums = {p: torch.zeros_like(p, dtype=torch.float64) for p in capture.parameters}
    norms = clip_norms.new_zeros(len(clip_norms), size)
    for i in range(size):
        with torch.compiler.set_stance("force_eager"):
            losses = loss_of(_sample(batch, i, size, stage.batch_first)).loss_per_sample
        if losses.shape != (1,):
            raise ValueError(
                f"sample {i} alone has losses of shape {tuple(losses.shape)}: dimension 0 (of "
                "inputs 1, with batch_first=False) of every tensor in the batch must count samples"
            )
        with torch.autocast(clip_norms.device.type, enabled=False):
            found = torch.autograd.grad(losses.sum(), capture.parameters, allow_unused=True)
        gradients = [p.new_zeros(()) if g is None else g for p, g in zip(sums, found, strict=True)]
        lengths = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients]
        squares = torch.stack(lengths).square()
        norms[:, i] = n = squares.new_zeros(len(clip_norms)).index_add(0, groups, squares).sqrt()
        if not n.isfinite().all():
            continue  # it contributes nothing
        automatic = policy.clipping_function == "automatic"
        c = (
            clip_norms / (n + policy.gamma) if automatic else (clip_norms / n).clamp(max=1)
        ).tolist()
        for (p, total), g in zip(sums.items(), gradients, strict=True):
            total.add_(g, alpha=c[capture.groups[p]])
    return norms, sums


def _plain_loss(model: nn.Module, criterion: PrivateCriterion, batch: Any) -> PrivateLoss:
    if not isinstance(batch, Sequence) or len(batch) != 2:
        raise ValueError(
            f"the batch is no pair of inputs and targets but a {type(batch).__name__}: say how "
            f"its loss is computed, as {EXAMPLE}"
        )
    return criterion(model(batch[0]), batch[1])


def _changed(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Every tensor in it, also in mappings that torch does not know (a tokenizer's)."""

    def leaf(x: Any) -> Any:
        if isinstance(x, Mapping):
            return _changed(dict(x), change)
        return change(x) if isinstance(x, Tensor) else x

    return tree_map(leaf, batch)


def _sample(batch: Any, number: int, size: int, batch_first: bool) -> Any:
    """One sample of a batch; what has no dimension of so many samples is of all of them."""

    def pick(x: Tensor) -> Tensor:
        dims = [d for d in ((0,) if batch_first else (1, 0)) if d < x.dim() and x.shape[d] == size]
        return x.narrow(dims[0], number, 1) if dims else x

    return _changed(batch, pick)


def _tokens_of_grams(model: PrivateModel) -> int:
    """In the longest Gram matrix of the step."""
    plan = model.capture.plan
    pairs = () if plan is None else zip(plan.uses, plan.choices, strict=True)
    return max((use.tokens for use, choice in pairs if choice.algorithm == WIDTH), default=0)


def _refuse(run: Run) -> None:
    model = run.model
    model.refuse_in_release("engine.check")
    if model.policy is None:
        raise ValueError(f"mode {model.mode} clips nothing: choose another grad_sample_mode")
    if model.sharding is not None:
        raise ValueError(
            "a sharded model has no rank that could run one sample alone: check the network before "
            "it is sharded, or run python -m experiments.verify_correctness --use-fsdp / --use-tp"
        )
    if not run.model.step_state.is_idle:
        raise RuntimeError(
            "check in the middle of a step: call it before loss.backward(), or after "
            "optimizer.step() and optimizer.zero_grad()"
        )


@contextmanager
def _without_trace(model: PrivateModel) -> Iterator[None]:
    """Nothing is random inside, and nothing that a step reads has changed afterwards."""
    capture, network = model.capture, model.network
    flags = [(module, module.training) for module in network.modules()]
    layouts = [(h, h.layouts, h.output_layouts, h.always_dense) for h in capture.handles]
    found = {name: getattr(capture, name) for name in ("plans", "plan", "profile")}
    devices = [p.device for p in network.parameters() if p.is_cuda]
    try:
        for module, _ in flags:
            module.training = False
        for handle in capture.handles:
            handle.layouts, handle.output_layouts = {}, {}
        capture.plans, capture.plan, capture.profile = {}, None, None
        with torch.random.fork_rng(set(devices)), torch.enable_grad():
            yield
    finally:
        for module, training in flags:
            module.training = training
        for handle, *known in layouts:
            handle.layouts, handle.output_layouts, handle.always_dense = known
        for name, value in found.items():
            setattr(capture, name, value)
