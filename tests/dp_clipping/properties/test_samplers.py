"""What every sampler has to be, for any data, key, batch and number of ranks."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from dp_clipping.sampling.poisson import PoissonSampler
from dp_clipping.sampling.schemes import FIXED, SAMPLINGS, scheme_of
from dp_clipping.sampling.units import units_of

KEYS = st.binary(min_size=32, max_size=32)
RUNS = st.fixed_dictionaries(
    {
        "sampling": st.sampled_from(SAMPLINGS), "units": st.integers(1, 50),
        "batches": st.integers(1, 9), "most": st.integers(1, 12), "secure": st.booleans(),
    }
)  # fmt: skip


def scheme(run):
    truncates = run["sampling"] == "truncated_poisson"
    return scheme_of(
        run["sampling"], units=run["units"], sample_rate=1 / run["batches"],
        max_batch_size=run["most"] if truncates else None,
        secure=run["secure"] and run["sampling"] == "poisson",
    )  # fmt: skip


@given(RUNS, KEYS, st.lists(st.integers(0, 200), min_size=1, max_size=4), st.integers(1, 5))
def test_a_batch_follows_from_key_and_number_and_is_split_among_ranks(run, key, numbers, ranks):
    used = scheme(run)
    for number in numbers:
        batch = used.batch(key, number)
        assert torch.equal(batch, scheme(run).batch(key, number)), "whatever was asked before"
        assert batch.dtype == torch.int64
        assert batch.tolist() == sorted(set(batch.tolist()))
        assert all(0 <= unit < run["units"] for unit in batch.tolist())
        if run["sampling"] == "truncated_poisson":
            assert len(batch) <= run["most"]
        parts = used.split(batch, ranks)
        assert len(parts) == ranks
        assert torch.cat(parts).sort().values.tolist() == batch.tolist()
        if run["sampling"] != "poisson":
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(RUNS.filter(lambda run: run["sampling"] in FIXED), KEYS, st.integers(0, 3))
def test_an_epoch_has_each_unit_once(run, key, epoch):
    used = scheme(run)
    first = epoch * run["batches"]
    batches = [used.batch(key, first + i) for i in range(run["batches"])]
    assert torch.cat(batches).sort().values.tolist() == [*range(run["units"])]


@given(RUNS, KEYS, st.integers(1, 4), st.integers(1, 3), st.integers(0, 2))
def test_ranks_together_have_the_examples_of_a_batch(run, key, size, ranks, rest):
    """Each unit with all of its examples, the last one filled up, on one rank."""
    examples = max(1, run["units"] * size - min(rest, size - 1))
    units = units_of(examples, size)
    assert len(units) == run["units"]
    samplers = [
        PoissonSampler(
            num_samples=run["units"], sample_rate=1 / run["batches"], steps=3, key=key, rank=rank,
            world_size=ranks, units=units, scheme=scheme(run),
        )
        for rank in range(ranks)
    ]  # fmt: skip
    for number in range(3):
        shares = [one.shares(number)[one.rank] for one in samplers]
        drawn = scheme(run).batch(key, number).tolist()
        rows = [row for share in shares for row in share]
        assert len(rows) == size * len(drawn)
        expected = {i for unit in drawn for i in range(unit * size, unit * size + size)}
        assert set(rows) == {min(i, examples - 1) for i in expected}
