"""One case of `experiments.verify_correctness`: private steps beside the reference.

The network is trained through `PrivacyEngine.make_private` without noise, four steps:

1. samples dealt out unequally over data ranks;
2. the same, and one rank has none;
3. the sample with the largest norm alone, on the last data rank;
4. the one with the smallest norm alone, on the first.

Steps 1 and 2 are compared with the reference: norms of a rank's own samples, norms of all samples
on every rank, the clipped sum, and what the optimizer then applies. Steps 3 and 4 measure what one
sample adds, in float64 on the float32 sum: at most C, whatever the dtype, and not lazily less.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ddp_by_hand.experiments.verify_correctness import reference as oracle
from ddp_by_hand.experiments.verify_correctness.cases import (
    IGNORED,
    Case,
    Ranks,
    Reference,
    build,
)
from ddp_by_hand.experiments.verify_correctness.findings import Finding, merge, tolerance
from ddp_by_hand.experiments.verify_correctness.phases import phase_times
from ddp_by_hand.lm.gradients import gradient_error
from ddp_by_hand.lm.layout import whole
from dp_clipping import PrivacyEngine
from dp_clipping.distributed.norm_reduce import NormReducer


def verify(
    cases: Sequence[Case],
    ranks: Ranks,
    dtype: torch.dtype,
    note: Callable[[str], None] = lambda label: None,
    listening: bool = False,
) -> Iterator[Finding]:
    """Yields each case's finding, the same on all ranks.

    Alone, an error is a finding; one of several ranks raises it, because others may wait for it.

    Args:
        note: called with the label of the case that begins.
        listening: `Finding.parts` are what ranks send, also where each has parts of all norms.
    """
    samples = max(5, ranks.data_place[1] + 2)
    reference = name = None
    with quiet(), one_thread():
        for case in cases:
            note(case.label)
            if case.network != name:
                name = case.network
                reference = Reference.of(name, ranks.sizes, dtype, samples)
            try:
                yield merge(ranks.gather(check(case, reference, ranks, dtype, listening)))
            except Exception as error:
                if ranks.group is not None:
                    raise
                text = " ".join(str(error).split())
                judge = tolerance(case, ranks.sizes, dtype)
                yield Finding(case, judge, failure=f"{type(error).__name__}: {text}")


@contextmanager
def quiet() -> Iterator[None]:
    """Suppresses warnings that the table repeats, or that concern real training only."""
    loggers = [logging.getLogger(n) for n in ("dp_clipping", "torch.distributed.tensor")]
    before = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="poisson_sampling=False")
        warnings.filterwarnings("ignore", message=".*returned a view tensor")
        try:
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            for logger, level in zip(loggers, before, strict=True):
                logger.setLevel(level)


@contextmanager
def one_thread() -> Iterator[None]:
    """Uses one thread: on networks this small, several threads would cost more than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check(
    case: Case, reference: Reference, ranks: Ranks, dtype: torch.dtype, listening: bool
) -> Finding:
    """Computes this rank's part of a case."""
    began = time.perf_counter()
    training = Training(case, reference, ranks, dtype, listening)
    norms, group_norms = reference.norms, reference.group_norms[case.clipping]
    number, count = ranks.data_place
    norm_errors, sum_errors, steps = [], [], []
    for samples in deals(len(norms), count):
        step = training.step(samples)
        steps.append(step)
        norm_errors.append(relative_error(step.own, norms[samples[number]]))
        norm_errors.append(relative_error(step.group_norms, group_norms))
        expected = reference.sums[case.clipping]
        for found in (step.sums, step.applied):
            own = [found[name] for name in expected]
            error, place, _ = gradient_error(own, [*expected.values()])
            sum_errors.append((error, [*expected][place]))
    limit = reference.limit / len(group_norms) ** 0.5
    added = []
    for sample, place in ((int(norms.argmax()), count - 1), (int(norms.argmin()), 0)):
        step = training.step([[sample] if rank == place else [] for rank in range(count)])
        adds = [norm_of(step.sums, members) for members in reference.groups[case.clipping]]
        added += zip(adds, step.group_norms[:, 0].tolist(), strict=True)
    error, parameter = max(sum_errors)
    return Finding(
        case, tolerance(case, ranks.sizes, dtype), largest(norm_errors), error, parameter,
        contribution=largest([adds / limit for adds, _ in added]),
        least=smallest([adds / min(limit, n) for adds, n in added if n > 0]),
        seconds=time.perf_counter() - began, parts=(steps[0].parts,),
        norms=(tuple(steps[0].norms.tolist()),), reference=tuple(norms.tolist()),
        phases=phase_times(training.model.profile),
    )  # fmt: skip


def deals(size: int, count: int) -> list[list[list[int]]]:
    """Returns two ways to distribute samples 0 .. size - 1 over `count` data ranks, in order.

    The first rank has all but one for each other rank; then none, and the last one has the rest.
    """
    uneven = [size - count + 1] + [1] * (count - 1)
    with_empty = [0] + [1] * (count - 2) + [size - count + 2] if count > 1 else [size]
    found = []
    for sizes in (uneven, with_empty):
        ends = [sum(sizes[: n + 1]) for n in range(count)]
        found.append([list(range(e - s, e)) for e, s in zip(ends, sizes, strict=True)])
    return found


@dataclass(frozen=True)
class Step:
    """Results of a private step in float64 on the CPU; G samples on all ranks, B on this one.

    Attributes:
        own: norms [B].
        group_norms: by clipping group [K, G], as every rank has them.
        parts: norms before ranks exchange anything [G], None for others' samples.
        sums: whole clipped sums before noise.
        applied: what the optimizer was given, times the divisor.
    """

    own: Tensor
    group_norms: Tensor
    parts: tuple[float | None, ...]
    sums: oracle.Gradients
    applied: oracle.Gradients

    @property
    def norms(self) -> Tensor:
        """Norms of all samples, [G]."""
        return self.group_norms.norm(dim=0)


class Training:
    """A network in private training, as a user sets it up.

    Args:
        listening: note what this rank sends of its norms, where ranks have parts of them.
    """

    def __init__(
        self, case: Case, reference: Reference, ranks: Ranks, dtype: torch.dtype, listening: bool
    ):
        self._batch, self._ranks = reference.batch, ranks
        network = build(case.network, ranks.sizes, dtype).to(ranks.device)
        module = ranks.share(network)
        optimizer = torch.optim.SGD(network.parameters())
        options = {}
        if case.norm_algorithm is not None:
            options["norm_algorithm"] = case.norm_algorithm
        if case.norm_reduction is not None:
            options["norm_reduction"] = case.norm_reduction
        self._expected_batch_size = 2 * len(reference.norms)
        self.model, self.optimizer, self.criterion, _ = PrivacyEngine(
            accountant="rdp"
        ).make_private(
            module=module, optimizer=optimizer, criterion=nn.CrossEntropyLoss(ignore_index=IGNORED),
            data_loader=DataLoader(range(8), batch_size=None),  # only its length is used
            noise_multiplier=0.0, max_grad_norm=reference.limit, poisson_sampling=False,
            expected_batch_size=self._expected_batch_size, clipping=case.clipping,
            grad_sample_mode=case.mode, **options,
        )  # fmt: skip
        self._sent = None
        if listening and self.model.step_context.reducer.splits_parameters:
            self._sent = listen(self.model.step_context.reducer)

    def step(self, samples: list[list[int]]) -> Step:
        """Runs one step on these samples of the batch, by data rank."""
        number, _ = self._ranks.data_place
        batch = oracle.pick(self._batch, samples[number])
        inputs, targets = oracle.move(batch, device=self._ranks.device)
        logits = oracle.forward(self.model, inputs)
        loss = self.criterion(logits.flatten(0, 1).float(), targets.flatten(), shape=logits.shape)
        loss.backward()
        self.model.finish_synchronization()
        own = self.model.per_sample_gradient_norms
        group_norms = self.model.global_norms().wait().sqrt()
        sent = own if self._sent is None else self._sent()
        # An empty batch is computed with a row of zeros.
        known = dict(zip(samples[number], sent[: len(own)].tolist(), strict=True))
        order = [sample for own_samples in samples for sample in own_samples]
        sums = self._gradients()
        self.optimizer.pre_step()  # all of `step()` but the step: weights stay
        applied = {name: g * self._expected_batch_size for name, g in self._gradients().items()}
        self.optimizer.zero_grad()
        return Step(
            own.double().cpu(), group_norms.double().cpu(), tuple(known.get(i) for i in order),
            sums, applied,
        )  # fmt: skip

    def _gradients(self) -> oracle.Gradients:
        return {n: whole(p.grad).double().cpu() for n, p in self.model.network.named_parameters()}


def listen(reducer: NormReducer) -> Callable[[], Tensor]:
    """Returns a function that returns the norms [B] this rank gave to the sum over the tensor axis.

    Tables of a step begin with squared norms by group [K, B]. Where several leave layer by layer,
    each has those of some layers; otherwise the last one has all.
    """
    tables: list[Tensor] = []
    pieces: list[Tensor] = []
    reduce, layerwise = reducer.reduce, reducer.layerwise

    def noting_reduce(table: Tensor):
        if len(table) > 1:  # one row alone are bounds
            tables.append(table[0])
        return reduce(table)

    def noting_layerwise(order, table_of, *every):
        def noting(keys):
            table = table_of(keys)
            pieces.append(table[0])
            return table

        return layerwise(order, noting, *every)

    def sent() -> Tensor:
        found = torch.stack(pieces).sum(0) if pieces else tables[-1]
        tables.clear(), pieces.clear()
        return found.sum(0).sqrt()

    reducer.reduce, reducer.layerwise = noting_reduce, noting_layerwise
    return sent


def largest(values: Sequence[float]) -> float:
    """Returns the largest value; NaN counts as infinite."""
    return max((float("inf") if x != x else x for x in values), default=0.0)


def smallest(values: Sequence[float]) -> float:
    """Returns the smallest value; NaN counts as 0."""
    return min((0.0 if x != x else x for x in values), default=0.0)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Returns the largest relative error."""
    if found.shape != expected.shape:
        return float("inf")
    return largest(((found - expected).abs() / expected).flatten().tolist())


def norm_of(gradients: oracle.Gradients, names: Sequence[str]) -> float:
    return float(torch.stack([gradients[name].norm() for name in names]).norm())
