"""`PrivacyEngine.audit`: a private run with canaries, and what it tells about them."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dp_clipping.arguments.checks import checked
from dp_clipping.arguments.given import refuse_used
from dp_clipping.arguments.thresholds import check_max_grad_norm
from dp_clipping.audit.attacks import guesses
from dp_clipping.audit.bound import CONFIDENCE
from dp_clipping.audit.canaries import LARGE, CanaryNetwork, Kept, Proxy, tagged_loader
from dp_clipping.audit.copies import Audited
from dp_clipping.audit.curve import DELTAS, Curve, curve_of
from dp_clipping.audit.noise import Parameter
from dp_clipping.audit.records import TOLERANCE, RecordedStep, RecordedSums, record
from dp_clipping.audit.report import AuditReport, bounds_of
from dp_clipping.criterion import PrivateCriterion
from dp_clipping.kinds import whole
from dp_clipping.runs.accounts import Accounts
from dp_clipping.runs.steps import PRIVATE_SIZE
from dp_clipping.sampling.memory_manager import BatchMemoryManager
from dp_clipping.verification.one_by_one import changed
from dp_clipping.verification.user_loss import Loss, loss_of

AUDIT = (
    "engine.audit(module=network, optimizer=optimizer, data_loader=loader, criterion=criterion, "
    "noise_multiplier=1.0, max_grad_norm=1.0, delta=1e-5)"
)
RECORD = AUDIT.replace("audit", "record_sums").replace(", delta=1e-5", "")
FEWEST = 16  # canaries


class Audits(Accounts):
    """Audits of private runs of copies."""

    @checked(AUDIT)
    def audit(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        criterion: Any = None,
        data_loader: DataLoader,
        noise_multiplier: float,
        max_grad_norm: float | list[float],
        canaries: int = 5000,
        delta: float = 1e-5,
        confidence: float = 0.95,
        loss: Loss | None = None,
        max_physical_batch_size: int | None = None,
        **arguments: Any,
    ) -> AuditReport:
        """Trains a copy privately, with canaries, and bounds ε from below: `print` the result.

        One run of what `make_private` returns for these arguments, on the data and about half of
        the canaries. A canary is one unit more, with the gradient C in a coordinate of its own (see
        `audit.canaries`). Attacks on the noisy gradients of all steps guess which canaries were in
        the data. More right guesses than ε allows refute ε. The audit tests sampling, clipping of
        the canaries, sums, noise and account in the run as it is. It finds faults, and it does not
        prove that there are none: `record_sums` and `check` look at the network's own gradients.

        Nothing of the user's is changed: not module, optimizer, criterion, random states, account
        or `.grad`. The report is not covered by this engine's ε.

        Args:
            module, optimizer, criterion, data_loader, noise_multiplier, max_grad_norm: as of
                `make_private`, which has not been called with them.
            canaries: m. Each is in a batch with probability q / 2, so that they add q·m / 2
                examples to a batch. More of them refute more.
            delta: δ of the bounds.
            confidence: the probability that the bounds are right.
            loss: called as `loss(model, criterion, batch)`; returns what the criterion returns.
                Default: `criterion(model(x), y)` of a pair.
            max_physical_batch_size: splits batches, as `BatchMemoryManager` does.
            arguments: further arguments of `make_private`. `steps` is the length of the run, by
                default an epoch. `noise_generator` fixes the canaries too.

        Raises:
            RuntimeError: with `hide_unprotected=True`.
            ValueError: for what has no stated ε (no noise, `poisson_sampling=False`, mode `no_dp`),
                for a module that is wrapped, sharded or private already, and as `make_private`.
        """
        self._refuse_engine("engine.audit")
        check_max_grad_norm(max_grad_norm, arguments.get("clipping", "flat"))
        wanted = f"{FEWEST} or more, a whole number, as canaries=5000"
        whole(wanted, least=FEWEST).check("canaries", canaries)
        CONFIDENCE.check("confidence", confidence)
        if noise_multiplier == 0:
            raise ValueError(
                "noise_multiplier=0 states no epsilon that an audit could refute: give more, as "
                f"{AUDIT}"
            )
        refuse_used(
            module=module, optimizer=optimizer, criterion=criterion, data_loader=data_loader
        )
        audited = Audited(module, optimizer, criterion, data_loader, arguments)
        with audited.untouched():
            keys, draw = audited.seeds()
            included = torch.rand(canaries, generator=draw, device="cpu") < 0.5
            engine: Any = type(self)(accountant=self.accountant.mechanism())
            rate, steps = audited.sampled.rates
            private = _make_private(
                engine, audited, included, noise_multiplier, max_grad_norm,
                noise_generator=keys, sample_rate=rate, steps=steps,
            )  # fmt: skip
            y, spread = _run(*private, included, loss, max_physical_batch_size)
            epsilon = engine.get_epsilon(delta)
            noise_faults: Sequence[str] = ()
            if len(set(audited.units())) > 1:
                noise_faults = self.record_sums(
                    module=module, optimizer=optimizer, criterion=criterion,
                    data_loader=data_loader, noise_multiplier=noise_multiplier,
                    max_grad_norm=max_grad_norm, units=2, removed=1, loss=loss, **arguments,
                ).noise_faults  # fmt: skip
            bounds = bounds_of(
                canaries, guesses(y, spread, rate, included), engine._curve, delta, confidence,
                float(noise_multiplier),
            )  # fmt: skip
        return AuditReport(
            epsilon=epsilon, delta=float(delta), confidence=float(confidence),
            noise_multiplier=float(noise_multiplier), sample_rate=rate, steps=steps,
            canaries=int(canaries), included=int(included.sum()),
            noise_faults=noise_faults, **bounds,
        )  # fmt: skip

    @checked(RECORD)
    def record_sums(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        criterion: Any = None,
        data_loader: DataLoader,
        noise_multiplier: float,
        max_grad_norm: float | list[float],
        units: int = 16,
        removed: int = 4,
        loss: Loss | None = None,
        **arguments: Any,
    ) -> RecordedSums:
        """Records one step on data with and without one unit, for each of some: `print` the result.

        One unit may move the clipped sum by at most C, and may not move the noise. Steps of what
        `make_private` returns for copies of module and optimizer are compared by what they leave in
        `.grad`: of all units, without one, and with that one's loss multiplied by −1000. The sample
        rate is 1 here, so all units are in the batch. About 2·`removed` + 5 private runs of two
        steps are made. Nothing of the user's is changed. The report is private data.

        Args:
            module, optimizer, criterion, data_loader, noise_multiplier, max_grad_norm, loss,
                arguments: as of `audit`. `noise_multiplier=0` looks at sums alone.
            units: so many of the data set, its first ones, are the batch.
            removed: so many of these are removed, one at a time.

        Raises:
            RuntimeError: with `hide_unprotected=True`.
            ValueError: as `audit`, and unless 1 ≤ removed < units.
        """
        self._refuse_engine("engine.record_sums")
        whole("a whole number of 2 or more, as units=16", least=0).check("units", units)
        whole("a whole number of 1 or more, as removed=4", least=0).check("removed", removed)
        refuse_used(
            module=module, optimizer=optimizer, criterion=criterion, data_loader=data_loader
        )
        audited = Audited(module, optimizer, criterion, data_loader, arguments)
        members: dict[Any, list[int]] = {}
        for index, unit in enumerate(audited.units()):
            members.setdefault(unit, []).append(index)
        own = list(members.values())[:units]
        if not 1 <= removed < len(own):
            raise ValueError(
                f"removed is {removed}, and the batch has {len(own)} units: give fewer, and at "
                "least 1, as units=16, removed=4"
            )
        with audited.untouched():
            keys, _ = audited.seeds()
            # Or a data set would draw other numbers for a batch that lacks a unit.
            examples = [index for unit in own for index in unit]
            dataset = Kept(data_loader.dataset, examples, arguments.get("views", 1))

            def run(
                those: Sequence[int], weights: Sequence[float], sigma: float, steps: int = 1,
                seed: int = 0, is_fixed: bool = True,
            ) -> list[RecordedStep]:  # fmt: skip
                torch.manual_seed(seed)
                engine = type(self)(accountant=self.accountant.mechanism())
                return _replay(
                    engine, audited, dataset, [own[u] for u in those], weights, max_grad_norm,
                    loss, is_fixed, steps=steps, noise_multiplier=sigma, noise_generator=keys,
                    expected_batch_size=len(own),
                )  # fmt: skip

            def differs(is_fixed: bool) -> bool:
                several = range(len(own)), [1.0] * len(own), 0.0
                one, other = (run(*several, 1, seed, is_fixed)[0] for seed in (0, 1))
                return float((one.total - other.total).norm()) > TOLERANCE * one.clip_norm

            in_evaluation = differs(False)
            is_random = in_evaluation and differs(True)
            mechanism = arguments.get("noise_mechanism", "gaussian")
            return record(
                partial(run, is_fixed=in_evaluation), len(own), removed, noise_multiplier,
                in_evaluation=in_evaluation, is_random=is_random,
                independent=isinstance(mechanism, str),
                is_gaussian=mechanism == "gaussian" or not isinstance(mechanism, str),
            )  # fmt: skip

    def _refuse_engine(self, what: str) -> None:
        if getattr(self, "hide_unprotected", False):
            raise RuntimeError(
                f"{what} shows what ε does not cover: it is off with hide_unprotected=True; use "
                "PrivacyEngine(hide_unprotected=False) for it, in private"
            )
        if getattr(self, "secure_mode", False):
            raise ValueError(
                f"{what} runs with keys of a seed, which secure noise never has: audit the same "
                "training with PrivacyEngine(secure_mode=False); tests of secure noise are apart"
            )

    def _curve(self, scale: float) -> Curve:
        """Returns the (ε, δ) that the account states, with noise of `scale` times its σ."""
        history = [(sigma * scale, rate, steps) for sigma, rate, steps in self.accountant.history]
        epsilon = self._mechanism.epsilon
        if epsilon is None:
            return curve_of(self.accountant, history)
        return [(epsilon([history], delta), delta) for delta in DELTAS]


def _make_private(
    engine: Any, audited: Audited, included: Tensor, noise_multiplier: float,
    max_grad_norm: float | list[float], **more: Any,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Returns model, optimizer, criterion and loader of a run with the canaries that are included.

    A list of thresholds gets one more for the canaries, as large as the others together.
    """
    module, optimizer, criterion = audited.copied()
    network = CanaryNetwork(module, len(included))
    optimizer.add_param_group({"params": [network.table.weight]})
    examples, units = len(audited.loader.dataset), audited.units()  # type: ignore[arg-type]
    numbers = included.nonzero().flatten().tolist()
    rows = [(index, len(included)) for index in range(examples)]
    rows += [(number % examples, number) for number in numbers]
    arguments = dict(audited.arguments) | more
    arguments["expected_batch_size"] = audited.expected_batch_size()
    if arguments.get("examples_per_unit", 1) > 1:
        arguments["unit_ids"] = [("own", u) for u in units] + [("canary", n) for n in numbers]
    if isinstance(max_grad_norm, list | tuple):
        max_grad_norm = [*max_grad_norm, math.hypot(*max_grad_norm)]
    if arguments.get("adaptive_threshold") is not None:
        arguments["adaptive_threshold"] = deepcopy(arguments["adaptive_threshold"])
    return engine.make_private(
        module=network.train(), optimizer=optimizer, criterion=criterion,
        data_loader=tagged_loader(audited.loader, rows, audited.batch_first),
        noise_multiplier=noise_multiplier, max_grad_norm=max_grad_norm, **arguments,
    )  # fmt: skip


def _run(
    model: Any, optimizer: Any, criterion: Any, loader: Any, included: Tensor, loss: Loss | None,
    most: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Trains for an epoch; returns y [steps, m] and s [steps] of `audit.attacks`, float64."""
    private, table = optimizer.model, optimizer.model.network.table.weight
    factor = LARGE * math.hypot(*private.thresholds.clip_norms())
    canary_loss = PrivateCriterion(
        private, lambda values: factor * values, criterion.loss_reduction
    )
    group, is_mean = private.capture.groups[table], criterion.loss_reduction == "mean"
    gradients, spreads, sigma = [], [], optimizer.noise_multiplier
    split = nullcontext(loader) if most is None else BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=most, optimizer=optimizer
    )  # fmt: skip
    with split as parts:
        for ids, batch in parts:
            ids, batch = (changed(x, lambda t: t.to(table.device)) for x in (ids, batch))
            proxy = Proxy(model, ids)
            is_own = (ids.flatten() == len(included)).to(table.dtype)
            total = loss_of(loss, proxy, criterion, batch) * is_own + canary_loss(proxy.values)
            total.backward()
            taken = optimizer.steps
            optimizer.step()
            if optimizer.steps == taken:  # more parts of the batch follow
                optimizer.zero_grad()
                continue
            state = optimizer.step_state
            clip_norm = state.clip_norms[group]
            divisor = optimizer.expected_batch_size if is_mean else 1.0
            gradients.append(table.grad[:-1, 0].double().cpu() * divisor / clip_norm)
            spreads.append(sigma * state.sensitivity / clip_norm)
            optimizer.zero_grad()
    return torch.stack(gradients), torch.tensor(spreads, dtype=torch.float64, device="cpu")


def _replay(
    engine: Any, audited: Audited, dataset: Kept, units: Sequence[Sequence[int]],
    weights: Sequence[float], max_grad_norm: float | list[float], loss: Loss | None,
    is_fixed: bool, *, steps: int, **more: Any,
) -> list[RecordedStep]:  # fmt: skip
    """Returns so many steps of a private run on these units, from the same parameters.

    Args:
        dataset: has the examples.
        units: the examples of each.
        weights: of each unit's losses.
        is_fixed: the network's modules are in evaluation.
    """
    module, optimizer, criterion = audited.copied()
    for child in module.modules() if is_fixed else ():
        child.training = child is module
    rows = [(i, weight) for own, weight in zip(units, weights, strict=True) for i in own]
    arguments = dict(audited.arguments) | more | {"sample_rate": 1.0, "steps": steps}
    if arguments.get("examples_per_unit", 1) > 1:
        arguments["unit_ids"] = [unit for unit, own in enumerate(units) for _ in own]
    arguments["adaptive_threshold"] = None  # it changes C after a step, not in it
    model, private, criterion, loader = engine.make_private(
        module=module, optimizer=optimizer, criterion=criterion, max_grad_norm=max_grad_norm,
        data_loader=tagged_loader(audited.loader, rows, audited.batch_first, dataset), **arguments,
    )  # fmt: skip
    engine._runs[0].said.add(PRIVATE_SIZE)  # the user's own run says it
    parameters = private.model.capture.parameters
    start = [p.detach().clone() for p in parameters]
    places = _places(private.model.network, parameters)
    divisor = private.expected_batch_size if criterion.loss_reduction == "mean" else 1.0
    made = []
    for tags, batch in loader:
        tags, batch = (changed(x, lambda t: t.to(start[0].device)) for x in (tags, batch))
        (loss_of(loss, model, criterion, batch) * tags.flatten()).backward()
        private.step()
        total = torch.cat([p.grad.double().cpu().flatten() for p in parameters]) * divisor
        precision = max(torch.finfo(p.grad.dtype).eps for p in parameters)
        made.append(RecordedStep(total, private.step_state.sensitivity, precision, places))
        private.zero_grad()
        with torch.no_grad():
            for parameter, value in zip(parameters, start, strict=True):
                parameter.copy_(value)
    return made


def _places(model: nn.Module, parameters: Sequence[nn.Parameter]) -> list[Parameter]:
    """Returns where each parameter is in a vector of all."""
    names = {p: name for name, p in model.named_parameters()}
    stops = list(accumulate(p.numel() for p in parameters))
    return [
        Parameter(
            names.get(p, f"parameter {i}"), stop - p.numel(), stop, p[0].numel() if p.dim() else 1
        )
        for i, (p, stop) in enumerate(zip(parameters, stops, strict=True))
    ]
