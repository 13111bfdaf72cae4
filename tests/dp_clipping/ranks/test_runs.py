"""Runs on ranks are those of one process: draws, noise, parameters, thresholds and statements.

A row is a layout, the options of a run and perhaps microbatches. A checkpoint of one layout goes on
on another one as if nothing had happened.
"""

import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count as numbers
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ddp_by_hand.lm.rank_pool import Context
from dp_clipping import CorrelatedNoise
from dp_clipping.noise import keys, mechanisms
from dp_clipping.noise.adaptive_threshold import AdaptiveThreshold
from dp_clipping.noise.keys import fixed_keys
from dp_clipping.sampling.poisson import included
from tests.support import engine
from tests.support.draws import joined
from tests.support.ranks import DIVIDED, LAYOUTS, REPLICAS, started, values
from tests.support.replicas import train

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*so noise and samples come from a new key"),
    pytest.mark.filterwarnings("ignore:noise and sampling come from a fixed seed"),
]
STEPS = 4
DELTA = 1e-3
SECRET = bytes(range(32))
IDS = [i // 3 if i < 12 else i - 8 for i in range(24)]  # 4 units of 3 examples, 12 of one
UNITS = {"batch_size": 6, "examples_per_unit": 3, "unit_ids": IDS}


def first_draw_is_empty(seed: int) -> bool:
    key = fixed_keys(torch.Generator().manual_seed(seed)).sampling
    return not included(key, 0, 6, 1 / 6).any()


def threshold(size: int = 4) -> AdaptiveThreshold:
    return AdaptiveThreshold(0.7, expected_batch_size=size, quantile=0.4, count_std=6.0)


OPTIONS: dict[str, dict[str, Any]] = {
    "poisson": {},
    "ghost": {"grad_sample_mode": "ghost"},
    "per sample": {"grad_sample_mode": "per_sample", "clipping": "per_layer"},
    "without noise": {"noise_multiplier": 0.0},
    "in bfloat16": {"dtype": torch.bfloat16},
    "empty draws": {
        "count": 6, "batch_size": 1, "noise_multiplier": 1.5,
        "seed": next(filter(first_draw_is_empty, numbers())),
    },
    "samples in place of none": {"count": 6, "batch_size": 1, "rand_on_empty": True},
    "adaptive": {"adaptive_threshold": threshold},
    "units": UNITS,
    "views": {"views": 3},
    "drawn examples": {"batch_size": 2, "unit_ids": IDS, "examples_per_step": 1},
    "adaptive units": {**UNITS, "adaptive_threshold": lambda: threshold(2)},
    "truncated": {"sampling": "truncated_poisson", "max_batch_size": 5},
    "balls in bins": {"sampling": "balls_in_bins"},
    "cyclic": {"sampling": "cyclic"},
    "correlated": {"noise_mechanism": CorrelatedNoise(bands=3), "sampling": "cyclic",
                   "max_grad_norm": 1e-7, "noise_multiplier": 1e7},
    "fused step": {"fused_step": True},
    "registered": {"noise_mechanism": "of these runs"},
    "secure": {"secure_mode": True, "seed": None},
    "drawn keys": {"seed": None},
}  # fmt: skip
"""A step of "correlated" applies its noise, beside sums of at most 4e-7."""


def register() -> None:
    if "of these runs" not in mechanisms.known_mechanisms():
        engine.register_noise("of these runs")


@contextmanager
def known_keys(is_on: bool) -> Iterator[None]:
    """Of secure runs, which no user can fix."""
    drawn = keys.secrets.token_bytes
    if is_on:
        keys.secrets.token_bytes = lambda size: SECRET[:size]
    try:
        yield
    finally:
        keys.secrets.token_bytes = drawn


def trained(
    context: Context | None,
    layout: str | None,
    name: str,
    microbatch: int | None = None,
    pad: bool = False,
    save: Path | None = None,
    load: Path | None = None,
) -> dict[str, Any]:
    """Returns what was drawn in each step, the parameters, and what is said of the run.

    `save`: after two steps; `load`: in place of the first two.
    """
    register()
    options = {key: value() if key == "adaptive_threshold" else value
               for key, value in OPTIONS[name].items()}  # fmt: skip
    with known_keys(bool(options.get("secure_mode"))):
        looks = name in ("poisson", "empty draws", "units")
        run = started(context, layout, name="transformer", looks=looks, **options)
    files = {"module": run.model, "optimizer": run.optimizer, "data_loader": run.loader}
    clipped: list[tuple] = []
    run.optimizer.attach_step_hook(lambda _: clipped.append(statistics(run)))
    before: list = []
    if load is not None:
        run.engine.load_checkpoint(path=load, **files)
        assert run.optimizer.steps == 2
    elif save is not None:
        before = train(run, 2, microbatch, pad=pad)
        run.optimizer.zero_grad()
        run.engine.save_checkpoint(path=save, **files)
    draws = train(run, STEPS - len(before) - 2 * (load is not None), microbatch, pad=pad)
    statement = None
    if context is None or context.rank == 0:  # it takes longer than a step
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            statement = run.engine.privacy_statement(DELTA).as_dict()
    history = list(run.engine.accountant.history)
    said = history, run.optimizer.steps, run.optimizer.expected_batch_size
    numbers_of_run = run.optimizer.max_grad_norm, clipped[-2:]
    found = {"draws": draws, "values": values(run), "said": said, "norms": numbers_of_run}
    return found | {"statement": statement}


def statistics(run) -> tuple:
    found = run.model.norm_statistics()
    return found.samples, found.clipped, found.histogram


def drawn_by(answers: list[dict], name: str, share: int = 1) -> dict[str, Any]:
    """Returns the draws to expect where they are not those of one process: ranks make up a sample
    each, and correlated noise goes on with new keys, whose order is another one."""
    if name not in ("samples in place of none", "correlated", "drawn keys"):
        return {}
    steps = zip(*(one["draws"] for one in answers[::share]), strict=True)
    return {"draws": [[joined(joined(parts))] for parts in steps]}


@cache
def alone(name: str) -> dict[str, Any]:
    return trained(None, None, name)


def check(
    answers: list[dict], expected: dict, layout: str, tolerance: float = 2e-5, is_even: bool = False
) -> None:
    """Each rank has its part of the draws of one process, and all that is left is the same.

    `is_even`: the parts are of equal size, or one sample more.
    """
    share = LAYOUTS[layout].share
    for step, whole in enumerate(expected["draws"][-len(answers[0]["draws"]) :]):
        parts = [joined(one["draws"][step]) for one in answers[::share]]
        assert sorted(joined(parts)) == sorted(joined(whole))
        assert len({len(one["draws"][step]) for one in answers}) == 1, "microbatches"
        if is_even:
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
        for rank, one in enumerate(answers):
            assert joined(one["draws"][step]) == parts[rank // share]
    assert answers[0]["statement"] == expected["statement"]
    for one in answers:
        np.testing.assert_allclose(one["values"], expected["values"], rtol=0, atol=tolerance)
        assert one["said"] == expected["said"]
        assert one["norms"][0] == pytest.approx(expected["norms"][0], rel=1e-6)
        assert one["norms"][1] == expected["norms"][1]
    if LAYOUTS[layout].variant not in (None, *DIVIDED):
        assert len({one["values"].tobytes() for one in answers}) == 1, "replicas differ"


SYNCHRONISING = [name for name in (*REPLICAS, *DIVIDED) if name != "alone on each"]
SHARDS = ("fsdp1 block", "fsdp2 block", "fsdp2 on four", "tensor", "fsdp2 x tensor")
# Each layout once, and each option; `MORE` has those that may differ on replicas and on shards.
WHOLE = [
    *((name, "poisson") for name in ("ddp", "torch_ddp_tuned", "fsdp")),
    ("copy engine", "empty draws"), ("zero2", "correlated"), ("fsdp1 block", "secure"),
    ("fsdp2 block", "registered"), ("ddp_bucketed", "truncated"), ("fsdp2 block", "cyclic"),
    ("fsdp2 x tensor", "balls in bins"), ("fsdp2 block", "per sample"),
    ("ddp_bucketed on four", "units"), ("ddp_individual_v2", "samples in place of none"),
    ("ddp_bucketed", "drawn examples"), ("ddp_bucketed", "fused step"),
    ("fsdp2 block", "fused step"),
]  # fmt: skip
SPLIT = [  # into microbatches, of which some ranks have none
    ("ddp_bucketed on four", "poisson", 2), ("zero1", "balls in bins", 1),
    ("fsdp2 block", "ghost", 1), ("fsdp1 block, SHARD_GRAD_OP", "poisson", 1),
    ("fsdp1 block", "adaptive units", 3), ("ddp_individual", "without noise", 1),
    ("torch_ddp", "without noise", 1), ("copy engine", "without noise", 1),
]  # fmt: skip
PADDED = [
    ("ddp_bucketed on four", "poisson", 2),
    ("tensor", "units", 3),
    ("fsdp2 block", "views", 3),
]
ROWS = [
    *((layout, name, None, False) for layout, name in WHOLE),
    *((layout, name, size, False) for layout, name, size in SPLIT),
    *((layout, name, size, True) for layout, name, size in PADDED),
]
MORE = [  # beside `REST`
    ("ddp_bucketed on four", "poisson", None, False), ("fsdp2 on four", "poisson", None, False),
    ("ddp_bucketed", "poisson", 1, False), ("fsdp2 block", "poisson", 3, True),
    ("ddp_bucketed", "units", 3, True), ("fsdp2 block", "units", 6, True),
    ("tensor", "poisson", None, False),
    ("fsdp2 x tensor", "poisson", None, False), ("fsdp", "empty draws", None, False),
    ("fsdp1 block", "correlated", None, False), ("ddp_bucketed", "secure", None, False),
    ("fsdp2 block", "adaptive units", None, False),
]  # fmt: skip
IN_16_BIT = ("ddp_bucketed", "zero2")
MORE_IN_16_BIT = ("copy engine", "torch_ddp")


def rows(fast: Iterable, more: Iterable) -> list:
    return [*fast, *(pytest.param(row, marks=pytest.mark.slow) for row in more)]


@pytest.mark.parametrize("row", rows(ROWS, MORE), ids=str)
def test_a_run_is_that_of_one_process(cpu_ranks, row):
    layout, name, microbatch, pad = row
    register()
    ranks = LAYOUTS[layout].ranks
    answers = cpu_ranks.run(ranks, trained, layout, name, microbatch, pad)
    expected = alone(name) | drawn_by(answers, name, LAYOUTS[layout].share)
    check(answers, expected, layout, is_even=name in ("truncated", "balls in bins", "cyclic"))
    if name == "units":
        check_units(answers[:: LAYOUTS[layout].share])
    sizes = [[len(joined(draw)) for draw in one["draws"]] for one in answers]
    if name == "empty draws":
        assert not any(of_ranks[0] for of_ranks in sizes), "the first draw is empty"
    if microbatch and not pad and name == "poisson":
        for step, of_ranks in enumerate(zip(*sizes, strict=True)):
            needed = max(1, -(-max(of_ranks) // microbatch))
            assert len(answers[0]["draws"][step]) == needed


def check_units(answers: list[dict]) -> None:
    """Each unit is on one rank, with all of its examples."""
    for parts in zip(*(one["draws"] for one in answers), strict=True):
        seen = [{IDS[i] for i in joined(part)} for part in parts]
        for units, part in zip(seen, parts, strict=True):
            assert set(joined(part)) == {i for i, unit in enumerate(IDS) if unit in units}
        assert sum(map(len, seen)) == len(set().union(*seen))


@pytest.mark.parametrize("layout", rows(IN_16_BIT, MORE_IN_16_BIT))
def test_a_run_in_16_bit(cpu_ranks, layout):
    """Parameters are rounded after each step: a unit in the last place now and then."""
    answers = cpu_ranks.run(2, trained, layout, "in bfloat16")
    expected = alone("in bfloat16")
    check(answers, expected | {"norms": answers[0]["norms"]}, layout, tolerance=0.05)
    assert np.abs(answers[0]["values"] - expected["values"]).mean() < 1e-3


def test_drawn_keys_are_shared_and_new_in_each_run(cpu_ranks):
    first, second = (cpu_ranks.run(2, trained, "ddp_bucketed", "drawn keys") for _ in range(2))
    for answers in (first, second):
        check(answers, answers[0] | drawn_by(answers, "drawn keys"), "ddp_bucketed")
    assert first[0]["said"] == second[0]["said"], "the account is the same"
    assert first[0]["values"].tobytes() != second[0]["values"].tobytes()


REST = [
    (layout, name, size)
    for layout, name, size in product((*SYNCHRONISING, *SHARDS), OPTIONS, (None, 3))
    if (layout, name, size, False) not in (*ROWS, *MORE)
    and name not in ("drawn keys", "in bfloat16", "fused step")
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "name", "microbatch"), REST)
def test_all_runs(cpu_ranks, layout, name, microbatch):
    register()
    answers = cpu_ranks.run(LAYOUTS[layout].ranks, trained, layout, name, microbatch)
    expected = alone(name) | drawn_by(answers, name, LAYOUTS[layout].share)
    if name == "secure" and microbatch:  # sums of parts round less, and ε counts the rounding
        found, whole = answers[0]["statement"], expected["statement"]
        assert 0.99 * whole["epsilon"] < found["epsilon"] < whole["epsilon"]
        follow = ("epsilon", "secure", "curve", "mu", "true_positive_rates")
        counted = {key: found[key] for key in follow}
        expected |= {"statement": whole | counted}
    check(answers, expected, layout)


# Checkpoints


GO_ON = [  # the layouts before and after, and options
    ("ddp_individual_v2", "ddp_individual_v2", "in bfloat16"), ("zero1", "fsdp", "poisson"),
    ("fsdp", "zero2", "cyclic"), ("torch_zero1", "zero1", "poisson"),
    ("fsdp2 on four", "fsdp2 block", "adaptive"), ("fsdp2 x tensor", "fsdp2 block", "correlated"),
    (None, "tensor", "poisson"),
]  # fmt: skip
MORE_GO_ON = [
    ("copy engine", "copy engine", "in bfloat16"), ("ddp_bucketed", "zero2", "cyclic"),
    ("zero2", "ddp_bucketed", "poisson"),
    ("ddp_bucketed", "zero2", "drawn examples"),
    ("ddp_bucketed", "zero2", "truncated"), ("ddp_bucketed", "zero2", "balls in bins"),
    ("fsdp2 block", "fsdp2 x tensor", "correlated"), ("tensor", None, "correlated"),
    (None, "fsdp2 on four", "poisson"),
]  # fmt: skip


@pytest.mark.parametrize("row", rows(GO_ON, MORE_GO_ON), ids=str)
def test_a_checkpoint_goes_on(cpu_ranks, tmp_path, row):
    """In the middle of an epoch: batches and noise are the same, however they are dealt out."""
    before, after, name = row
    path = tmp_path / "run.pt"
    if before is None:
        trained(None, None, name, save=path)
    else:
        whole = cpu_ranks.run(LAYOUTS[before].ranks, trained, before, name, None, False, path)
    if after is None:
        answers = [trained(None, None, name, load=path)]
    else:
        ranks = LAYOUTS[after].ranks
        answers = cpu_ranks.run(ranks, trained, after, name, None, False, None, path)
    if after == before:
        assert [one["draws"] for one in answers] == [one["draws"] for one in whole]
        assert answers[0]["values"].tobytes() == whole[0]["values"].tobytes()
        assert answers[0]["said"] == whole[0]["said"]
        assert answers[0]["statement"] == whole[0]["statement"]
    else:
        after = after or "fsdp2 on one"
        check(answers, alone(name) | drawn_by(answers, name, LAYOUTS[after].share), after)


# What no comparison with one process shows


@pytest.mark.parametrize("is_distributed", [False, True])
def test_the_divisor_is_a_public_constant(cpu_ranks, is_distributed):
    """`batch_size`, times the ranks with a DistributedSampler; drawn sizes do not enter."""
    for found in cpu_ranks.run(2, divisor, is_distributed):
        assert found == ((6, 1 / 4) if is_distributed else (3, 1 / 8))


def divisor(context: Context, is_distributed: bool) -> tuple[float, float]:
    run = started(context, "ddp_bucketed", batch_size=3, distributed_sampler=is_distributed)
    return run.optimizer.expected_batch_size, run.loader.sample_rate


def fingerprint(context: Context) -> str:
    run = started(context, "ddp_bucketed", seed=100 + context.rank)
    return run.engine._runs[0].keys.fingerprint


def test_fixed_keys_are_those_of_rank_0(cpu_ranks):
    """Replicas with other noise would drift apart."""
    expected = fixed_keys(torch.Generator().manual_seed(100)).fingerprint
    assert cpu_ranks.run(2, fingerprint) == [expected, expected]


def without_privacy(context: Context) -> tuple[bytes, list[int]]:
    run = started(context, "ddp_bucketed", grad_sample_mode="no_dp", count=6, batch_size=1)
    draws = train(run, 8, 1)
    return values(run).tobytes(), [len(pieces) for pieces in draws]


def test_no_dp_on_the_same_draws(cpu_ranks):
    """Unequal and empty ones: the ranks stay in step, and no empty batch makes a NaN."""
    one, other = cpu_ranks.run(2, without_privacy)
    assert one == other
    assert not math.isnan(np.frombuffer(one[0], np.float32).sum())
