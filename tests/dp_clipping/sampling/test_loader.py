"""The user's loader with draws for batches: options, resume, seeds, and empty draws."""

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

from dp_clipping.sampling.given_loader import batches_of, expected_batch_size_of
from dp_clipping.sampling.loader import PoissonLoader
from dp_clipping.sampling.memory_manager import BatchMemoryManager
from dp_clipping.sampling.poisson import PoissonSampler
from tests.support.draws import KEY, drawn, joined, numbers, poisson


class TestLoader:
    def test_rate_steps_and_batches(self):
        loader = poisson(103, 6)
        assert len(loader) == 18
        assert loader.sample_rate == 1 / 18
        expected = PoissonSampler(num_samples=103, sample_rate=1 / 18, steps=18, key=KEY)
        assert drawn(loader) + drawn(loader) == [expected.shares(n)[0] for n in range(36)]

    def test_keeps_the_options_of_the_original(self):
        def collate(samples):
            return torch.stack([sample[0] for sample in samples])

        def start(worker_id):
            pass

        options = dict(
            num_workers=2, timeout=7, worker_init_fn=start, multiprocessing_context="fork",
            prefetch_factor=3, persistent_workers=True, generator=torch.Generator(),
        )  # fmt: skip
        original = DataLoader(numbers(12), batch_size=3, collate_fn=collate, **options)
        loader = PoissonLoader(original, key=KEY)
        assert isinstance(loader, DataLoader)
        assert loader.dataset is original.dataset
        for name in options:
            assert getattr(loader, name) == getattr(original, name)
        assert loader.collate_fn([(torch.tensor(4),)]).tolist() == [4]

    @pytest.mark.parametrize(("units", "expected"), [(2, 1), (3, 1), (7, 2)])
    def test_units_that_a_dropped_batch_has_count_in_the_one_that_is_left(self, units, expected):
        original = DataLoader(numbers(4 * units), batch_size=12, drop_last=True)
        assert batches_of(original, units, 4) == expected

    def test_a_batch_sampler_of_the_users(self):
        class Fixed:
            def __len__(self):
                return 2

            def __iter__(self):
                return iter([[0, 1, 2], [3, 4, 5]])

        original = DataLoader(numbers(6), batch_sampler=Fixed())
        loader = PoissonLoader(original, key=KEY)
        assert loader.sample_rate == 1 / 2
        with pytest.raises(ValueError, match="give expected_batch_size"):
            expected_batch_size_of(original, 1)

    def test_batches_are_announced_before_they_are_handed_out(self):
        loader = poisson(12, 3)
        events = []
        loader.on_batch = lambda draw: events.append(("draw", draw, loader.position))
        for _ in range(2):
            for _ in loader:
                events.append(("batch", loader.position))
        expected = [[("draw", n, n), ("batch", n + 1)] for n in range(8)]
        assert events == joined(expected)

    @pytest.mark.parametrize("options", [{}, dict(num_workers=1, persistent_workers=True)])
    def test_an_older_iteration_is_refused_and_takes_nothing_from_the_newer(self, options):
        loader, announced = poisson(**options), []
        loader.on_batch = announced.append
        one, other = iter(loader), iter(loader)
        seen = [next(one), next(other)]
        with pytest.raises(RuntimeError, match="another iteration"):
            next(one)
        seen += [next(other), next(other)]
        assert announced == [0, 1, 2, 3]
        assert loader.position == 4
        expected = [loader.batch_sampler.shares(draw)[0] for draw in announced]
        assert [batch.tolist() for (batch,) in seen] == expected

    def test_batches_that_another_loader_takes_count(self):
        loader, announced = poisson(), []
        loader.on_batch = announced.append
        sampler = loader.batch_sampler
        one, other = iter(sampler), iter(sampler)
        seen = [next(one), next(other)]
        with pytest.raises(RuntimeError, match="another iteration"):
            next(one)
        older = iter(loader)
        seen += [next(other), next(older)[0].tolist(), next(iter(sampler))]
        for late in (other, older):
            with pytest.raises(RuntimeError, match="another iteration"):
                next(late)
        assert announced == [0, 1, 2, 3, 4]
        assert loader.position == 5
        resumed = poisson()
        resumed.load_state_dict(loader.state_dict())
        rest = list(resumed.batch_sampler)
        assert len(rest) == 14 - 5, "the rest of the epoch that was begun"
        assert seen + rest == [sampler.shares(draw)[0] for draw in range(len(seen + rest))]
        assert resumed.position == len(seen + rest)
        late = iter(sampler)
        next(late)
        loader.load_state_dict(loader.state_dict())
        with pytest.raises(RuntimeError, match="load_state_dict"):
            next(late)
        loader.is_over = lambda: True
        assert list(sampler) == []


class TestResume:
    @pytest.mark.parametrize("workers", [0, 2])
    @pytest.mark.parametrize("stop", [4, 10, 13, 20])
    def test_continues_with_the_rest_of_the_epoch(self, workers, stop):
        options = {"num_workers": workers, "prefetch_factor": 3 if workers else None}
        reference = poisson()
        whole = [drawn(reference) for _ in range(3)]

        loader, seen, state = poisson(**options), [], None
        while state is None:
            for (batch,) in loader:
                seen.append(batch.tolist())
                if len(seen) == stop:
                    state = loader.state_dict()
                    break
        resumed = poisson(**options)
        resumed.load_state_dict(state)
        assert resumed.position == stop
        if stop % 10:
            seen += drawn(resumed)
            assert len(seen) == math.ceil(stop / 10) * 10
        assert seen == joined(whole)[: len(seen)]
        if not workers:
            following = drawn(resumed)
            assert following == joined([*whole, drawn(reference)])[len(seen) :][:10]

    def test_a_state_saved_before_the_rest_is_drawn_keeps_the_epoch(self):
        loader = poisson()
        next(iter(loader))
        resumed, again = poisson(), poisson()
        resumed.load_state_dict(loader.state_dict())
        again.load_state_dict(resumed.state_dict())
        assert len(drawn(again)) == 9

    def test_the_state_is_plain_and_holds_no_key(self):
        state = poisson().state_dict()
        assert all(type(value) in (int, float) for value in state.values())


class TestSeeds:
    def seed(self, value):
        torch.manual_seed(value)
        np.random.seed(value)
        random.seed(value)

    def states(self):
        return torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()

    @pytest.mark.parametrize("workers", [0, 1])
    def test_global_seeds_neither_influence_draws_nor_are_consumed(self, workers):
        self.seed(1)
        before = self.states()
        one = drawn(poisson(shuffle=True, num_workers=workers))
        assert self.states() == before
        self.seed(2)
        assert drawn(poisson(shuffle=True, num_workers=workers)) == one

    @pytest.mark.parametrize("workers", [0, 1])
    def test_what_samples_draw_follows_from_the_key(self, workers):
        def epochs(seed, key):
            self.seed(seed)
            loader = PoissonLoader(
                DataLoader(RandomNumbers(), batch_size=4, num_workers=workers), key=key
            )
            before = self.states()
            found = [
                [value for batch in loader for value in batch.flatten().tolist()] for _ in "ab"
            ]
            assert self.states() == before
            return found

        one, again, other = epochs(1, KEY), epochs(2, KEY), epochs(1, KEY[::-1])
        assert one == again
        assert not set(one[0]) & set(one[1])
        assert not set(one[0] + one[1]) & set(other[0] + other[1])
        assert len(set(one[0])) == len(one[0])

    def test_parts_of_a_batch_and_ranks_draw_other_numbers(self):
        seen = set()
        for rank in range(2):
            loader = PoissonLoader(
                DataLoader(RandomNumbers(), batch_size=4), key=KEY, sample_rate=1.0, steps=2,
                rank=rank, world_size=2,
            )  # fmt: skip
            optimizer = SimpleNamespace(
                model=SimpleNamespace(examples_per_unit=1, views=1),
                signal_skip_step=lambda do_skip: None, leave_microbatches=lambda half_way: False,
            )  # fmt: skip
            with BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
            ) as pieces:
                seen |= {value for batch in pieces for value in batch.flatten().tolist()}
        assert len(seen) == 2 * 8 * 3

    def test_a_batch_that_comes_again_draws_the_same(self):
        loader = PoissonLoader(DataLoader(RandomNumbers(), batch_size=4), key=KEY, sample_rate=1.0)
        again = PoissonLoader(DataLoader(RandomNumbers(), batch_size=4), key=KEY, sample_rate=1.0)
        loader.is_training = again.is_training = lambda: True
        assert torch.equal(next(iter(loader)), next(iter(loader)))
        assert torch.equal(next(iter(loader)), next(iter(again)))


class RandomNumbers(Dataset):
    """Eight samples that are random where they are read."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        drawn = [torch.rand(()), np.random.random(), random.random()]
        return torch.tensor(drawn, dtype=torch.float64)


class Items(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return {"x": torch.full((40,), 7.0), "y": 9}


@pytest.mark.parametrize("workers", [0, 1])
def test_rand_on_empty(workers):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    original = DataLoader(Items(), batch_size=1, num_workers=workers)
    loader = PoissonLoader(original, key=KEY, rand_on_empty=True)
    sizes = [len(share) for (share,) in map(loader.batch_sampler.shares, range(len(loader)))]
    assert 0 in sizes
    assert max(sizes) > 1
    for size, batch in zip(sizes, loader, strict=True):
        assert loader.usage.ticket.is_dummy == (size == 0)
        if size == 0:
            assert batch["x"].shape == (1, 40)
            assert set(batch["x"].flatten().tolist()) == {0.0, 1.0}
            assert batch["x"].dtype == torch.float32
            assert batch["y"].shape == (1,)
            assert batch["y"].item() in (0, 1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("change", [list.pop, lambda samples: samples.append(torch.tensor(0))])
@pytest.mark.parametrize("in_parts", [False, True])
def test_data_of_another_length_are_refused(change, in_parts):
    """Items of `unit_ids` would be others, and new samples would be in no batch."""
    samples = list(torch.arange(12))
    loader = PoissonLoader(DataLoader(samples, batch_size=4), key=KEY)
    given = loader
    if in_parts:
        optimizer = SimpleNamespace(
            leave_microbatches=lambda half_way: False,
            signal_skip_step=lambda do_skip: None,
            model=SimpleNamespace(examples_per_unit=1, views=1, batch_first=True),
        )
        given = BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
        )
    assert [*given]
    change(samples)
    with pytest.raises(RuntimeError, match=r"had 12 samples at make_private and has 1[13] now"):
        next(iter(given))


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_distributed_sampler_over_an_uneven_data_set(drop_last):
    order = DistributedSampler(numbers(11), num_replicas=2, rank=0, drop_last=drop_last)
    original = DataLoader(numbers(11), sampler=order)
    assert PoissonLoader(original, key=KEY, world_size=2).sample_rate > 0


class ReadAtOnce(Dataset):
    """Reads all samples of a batch in one call, as from a file."""

    def __init__(self, reads_nothing):
        self.reads_nothing = reads_nothing

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((2,), float(index))

    def __getitems__(self, indices):
        if not indices and self.reads_nothing is not None:
            return [self[0]] * self.reads_nothing
        return list(torch.stack([self[index] for index in indices]))


@pytest.mark.parametrize(("reads", "why"), [(None, "raises RuntimeError"), (1, "returns samples")])
def test_a_data_set_that_cannot_read_an_empty_batch_is_refused_at_once(reads, why):
    for dataset in (ReadAtOnce(reads), Subset(ReadAtOnce(reads), range(8))):
        with pytest.raises(ValueError, match=rf"^ReadAtOnce.__getitems__.* {why}.*: return \[\]"):
            PoissonLoader(DataLoader(dataset, batch_size=4), key=KEY)
    loader = PoissonLoader(DataLoader(ReadAtOnce(0), batch_size=4), key=KEY, sample_rate=1e-9)
    assert [tuple(x.shape) for x in loader] == [(0, 2), (0, 2)]


class Columns(ReadAtOnce):
    def __getitems__(self, indices):
        return {"x": torch.zeros(len(indices), 2)}


def as_read(samples):
    return samples


def test_a_data_set_that_reads_columns():
    """A batch without samples has columns without rows."""
    original = DataLoader(Columns(None), batch_size=4, collate_fn=as_read)
    loader = PoissonLoader(original, key=KEY, sample_rate=1e-9)
    assert [tuple(batch["x"].shape) for batch in loader] == [(0, 2), (0, 2)]
