"""Microbatches: what they hold, how many there are on each rank, and which one steps."""

import copy
import random
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    SequentialSampler,
    TensorDataset,
)

from dp_clipping import PrivacyEngine
from dp_clipping.sampling.loader import PoissonLoader
from dp_clipping.sampling.memory_manager import BatchMemoryManager, split
from dp_clipping.sampling.usage import Ticket
from tests.support import zoo
from tests.support.draws import KEY, joined, numbers
from tests.support.engine import in_parts, step
from tests.support.replicas import build, parameters, train


class Optimizer:
    """Remembers how it was told to step."""

    model = SimpleNamespace(examples_per_unit=1, views=1)

    def __init__(self):
        self.signals = []
        self.usage = None  # of a Poisson loader, whose batches are in a step with their last part

    def signal_skip_step(self, do_skip=True):
        self.signals.append(do_skip)
        if not do_skip and self.usage is not None:
            self.usage.close()

    def leave_microbatches(self, half_way):
        return False


def poisson(count=60, batch_size=12, *, rank=0, world_size=1, rand_on_empty=False, **options):
    loader = DataLoader(numbers(count), batch_size=batch_size, **options)
    return PoissonLoader(
        loader, key=KEY, rank=rank, world_size=world_size, rand_on_empty=rand_on_empty
    )


def split_by(loader, size: int, optimizer: Optimizer | None = None) -> BatchMemoryManager:
    optimizer = optimizer or Optimizer()
    optimizer.usage = getattr(loader, "usage", None)
    return BatchMemoryManager(data_loader=loader, max_physical_batch_size=size, optimizer=optimizer)


def draws_of(loader: DataLoader, max_size: int) -> list[list[list[int]]]:
    """The microbatches of each draw of an epoch, told apart by the signals."""
    optimizer = Optimizer()
    draws, pieces = [], []
    with split_by(loader, max_size, optimizer) as memory_safe:
        for received, (batch,) in enumerate(memory_safe, 1):
            assert len(optimizer.signals) == received, "one signal before each microbatch"
            pieces.append(batch.tolist())
            if not optimizer.signals[-1]:
                draws.append(pieces)
                pieces = []
    assert pieces == [], "the last microbatch of all must step"
    return draws


class TestPoisson:
    @pytest.mark.parametrize("workers", [0, 2])
    @pytest.mark.parametrize("max_size", [1, 5, 1000])
    def test_microbatches_are_the_draw_in_order(self, max_size, workers):
        whole = [batch.tolist() for (batch,) in poisson()]
        options = {"num_workers": workers, "prefetch_factor": 4 if workers else None}
        draws = draws_of(poisson(**options), max_size)
        assert [joined(pieces) for pieces in draws] == whole
        assert all(len(piece) <= max_size for pieces in draws for piece in pieces)
        assert [len(p) for p in draws] == [max(1, -(-len(b) // max_size)) for b in whole]

    @pytest.mark.parametrize("world_size", [2, 5])
    @pytest.mark.parametrize("max_size", [1, 2, 3])
    def test_every_rank_has_the_same_number(self, max_size, world_size):
        ranks = [
            draws_of(poisson(rank=r, world_size=world_size), max_size) for r in range(world_size)
        ]
        whole = [batch.tolist() for (batch,) in poisson()]
        uneven = False
        for batch, *draw in zip(whole, *ranks, strict=True):
            assert len({len(pieces) for pieces in draw}) == 1
            needed = [-(-len(joined(pieces)) // max_size) for pieces in draw]
            assert len(draw[0]) == max(1, *needed)
            uneven |= len(set(needed)) > 1
            assert sorted(joined(map(joined, draw))) == batch
            assert all(len(piece) <= max_size for pieces in draw for piece in pieces)
        assert uneven, "some rank must have been filled up"

    def test_an_empty_draw_is_one_empty_microbatch(self):
        draws = draws_of(poisson(24, 1), 2)
        assert [[]] in draws
        assert len(draws) == 24

    def test_len(self):
        loader = poisson()
        with split_by(loader, 4) as memory_safe:
            lengths = []
            for _ in range(3):
                before = len(memory_safe)
                received = sum(len(memory_safe) == before for _ in memory_safe)
                assert received == before
                lengths.append(before)
            assert len(set(lengths)) > 1, "epochs differ"
            next(iter(memory_safe))
        loader = poisson()
        loader.load_state_dict(loader.state_dict() | {"position": 13, "epoch_end": 15})
        with split_by(loader, 4) as memory_safe:
            assert len(memory_safe) == sum(1 for _ in memory_safe)

    def test_holds_dummy_tells_the_made_up_sample(self):
        for rank in range(2):
            sizes = [
                len(piece) for piece in joined(draws_of(poisson(24, 3, rank=rank, world_size=2), 1))
            ]
            assert 0 in sizes
            loader = poisson(24, 3, rank=rank, world_size=2, rand_on_empty=True)
            with split_by(loader, 1) as memory_safe:
                received = [(len(batch), loader.usage.ticket.is_dummy) for (batch,) in memory_safe]
            assert received == [(1, size == 0) for size in sizes]


class TestOtherLoaders:
    @pytest.mark.parametrize("workers", [0, 2])
    @pytest.mark.parametrize("drop_last", [False, True])
    @pytest.mark.parametrize("max_size", [1, 3, 4, 9])
    def test_batches_are_split(self, max_size, drop_last, workers):
        options = dict(batch_size=8, drop_last=drop_last)
        whole = [batch.tolist() for (batch,) in DataLoader(numbers(21), **options)]
        loader = DataLoader(numbers(21), num_workers=workers, **options)
        draws = draws_of(loader, max_size)
        assert [joined(pieces) for pieces in draws] == whole
        assert all(len(piece) <= max_size for pieces in draws for piece in pieces)
        with (
            split_by(loader, max_size) as memory_safe,
            pytest.raises(TypeError, match="of the loader before the split"),
        ):
            len(memory_safe)

    def test_a_batch_sampler_of_the_users(self):
        class Growing(BatchSampler):
            def __iter__(self):
                return iter([torch.tensor([0]), [1, 2, 3], []])

        loader = DataLoader(
            numbers(4),
            batch_sampler=Growing(SequentialSampler(numbers(4)), 2, False),
            collate_fn=lambda samples: [torch.tensor([number for (number,) in samples])],
        )
        assert draws_of(loader, 2) == [[[0]], [[1], [2, 3]], [[]]]


class TestRefused:
    def test_splitting_twice(self):
        options = dict(max_physical_batch_size=2, optimizer=Optimizer())
        with (
            BatchMemoryManager(data_loader=poisson(), **options) as memory_safe,
            pytest.raises(ValueError, match="already"),
        ):
            BatchMemoryManager(data_loader=memory_safe, **options)

    def test_parts_of_units(self):
        optimizer = Optimizer()
        optimizer.model = SimpleNamespace(examples_per_unit=3, views=1)
        with pytest.raises(ValueError, match=r"holds 3 rows of each unit: give 3 or 6$"):
            split_by(poisson(), 4, optimizer)


@pytest.mark.parametrize(("length", "count"), [(0, 1), (0, 3), (1, 3), (7, 3), (9, 3), (10, 4)])
def test_split_is_even_and_in_order(length, count):
    pieces = split(list(range(length)), count)
    assert len(pieces) == count
    assert joined(pieces) == list(range(length))
    sizes = [len(piece) for piece in pieces]
    assert max(sizes) - min(sizes) <= 1


class TestLeftEarly:
    """Through the front door: the optimizer is between two steps afterwards."""

    def leave(self, run, how):
        with in_parts(run, 1) as loader:
            batches = iter(loader)
            for x, y, _ in batches if how == "kept" else loader:
                run.criterion(run.model(x), y).backward()
                if how == "raise":
                    raise KeyError
                run.optimizer.step()
                run.optimizer.zero_grad()
                if how == "break":
                    break
                if how == "kept":
                    return batches
        return None

    @pytest.mark.parametrize("mode", ["bookkeeping", "no_dp"])
    @pytest.mark.parametrize("how", ["break", "raise", "kept"])
    def test_sums_are_dropped_and_the_batch_comes_again(self, how, mode):
        run, alone = (build(batch_size=12, grad_sample_mode=mode) for _ in range(2))
        with (
            nullcontext()
            if (mode, how) == ("no_dp", "raise")
            else pytest.warns(match="Poisson batch 0"),
            pytest.raises(KeyError) if how == "raise" else nullcontext(),
        ):
            kept = self.leave(run, how)
        assert run.model.step_state.is_idle
        assert all(p.grad is None for p in run.model.parameters())
        if mode != "no_dp":
            with pytest.raises(RuntimeError, match="without a backward"):
                run.optimizer.step()
        if how == "kept":
            with pytest.raises(RuntimeError, match="was left"):
                next(kept)
        assert train(run, 3) == train(alone, 3)
        assert parameters(run).tobytes() == parameters(alone).tobytes()

    def test_a_draw_of_which_a_step_has_used_a_part_is_not_drawn_again(self):
        run = build(batch_size=12)
        with in_parts(run, 1) as loader:
            for x, y, _ in loader:
                run.criterion(run.model(x), y).backward()
                run.optimizer.step()  # skipped
                run.optimizer.step()
                break
        assert run.optimizer.steps == 1
        assert run.loader.state_dict()["position"] == 1
        assert next(iter(run.loader)) is not None
        assert run.loader.usage.ticket.number == 1

    def test_ended_late_it_leaves_the_signals_of_a_newer_one_alone(self):
        """A loop that counts leaves the iteration of an epoch open, and another loader begins."""
        loader, optimizer = poisson(), Optimizer()
        left = []
        optimizer.leave_microbatches = lambda half_way: left.append(half_way)
        options = {"max_physical_batch_size": 1000, "optimizer": optimizer}
        old = iter(BatchMemoryManager(data_loader=loader, **options).__enter__())
        for _ in range(len(loader)):
            next(old)
        new = iter(BatchMemoryManager(data_loader=loader, **options).__enter__())
        next(new)
        old.close()
        assert left == []
        new.close()
        assert left == [False]

    def test_left_after_a_whole_draw_nothing_is_said(self, recwarn):
        run = build(batch_size=12)
        train(run, 2, 1)
        assert run.loader.position == 2
        assert not [w for w in recwarn if "was left" in str(w.message)]


class Direction(nn.Module):
    """NaN for a sample of zeros, forward and backward."""

    def forward(self, x):
        return x / x.norm(dim=-1, keepdim=True)


class Shapes(TorchDispatchMode):
    """Notes which operators are called on which shapes."""

    def __init__(self):
        super().__init__()
        self.seen: set[tuple] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        shapes = tuple(tuple(x.shape) for x in tree_leaves(args) if isinstance(x, torch.Tensor))
        self.seen.add((str(function), shapes))
        return function(*args, **(kwargs or {}))


def padded(run, size=4):
    return in_parts(run, size, pad_batches=True)


class TestPadded:
    """Through the front door: copies follow the samples, and nothing comes of them."""

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"grad_sample_mode": "ghost"},
            {"grad_sample_mode": "per_sample", "clipping_function": "automatic"},
            {"grad_sample_mode": "bookkeeping", "clipping": "per_layer", "loss_reduction": "sum"},
            {"name": "transformer", "dtype": torch.bfloat16, "grad_sample_mode": "bookkeeping"},
        ],
    )
    def test_training_is_that_without(self, options):
        run, alone = (build(**options) for _ in range(2))
        assert [joined(draw) for draw in train(run, 7, 3, pad=True)] == joined(train(alone, 7))
        rounding = 1e-2 if "dtype" in options else 1e-6
        np.testing.assert_allclose(parameters(run), parameters(alone), rtol=0, atol=rounding)
        assert run.engine.accountant.history == alone.engine.accountant.history

    def test_it_leaves_random_numbers_alone(self):
        """A resumed run splits its loader once more, and goes on with the same dropout."""

        class Drawn(TensorDataset):
            def __getitem__(self, index):
                return torch.rand(1), random.random(), np.random.rand()

        run = build()
        run.loader = DataLoader(Drawn(torch.zeros(8)), batch_size=4)
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[2]
        with padded(run):
            assert torch.equal(torch.get_rng_state(), before[0])
            assert (random.getstate(), np.random.get_state()[2]) == before[1:]

    def test_every_microbatch_has_one_shape(self):
        for workers in (0, 1):
            loader, optimizer = poisson(24, 1, num_workers=workers), build().optimizer
            with BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=2, optimizer=optimizer, pad_batches=True
            ) as pieces:
                found = [(batch.tolist(), pieces.real) for (batch,) in pieces]
            assert {len(batch) for batch, _ in found} == {2}
            assert {real for _, real in found} == {0, 1, 2}
            whole = [batch.tolist() for (batch,) in poisson(24, 1)]
            assert joined(batch[:real] for batch, real in found) == joined(whole)

    def test_a_batch_after_the_last_one_is_whole(self):
        run = build(count=7, batch_size=4, poisson_sampling=False)
        with padded(run, 4) as pieces:
            for x, y, _ in pieces:
                real = pieces.real
                step(run, (x, y))
            assert real == 3
            run.criterion(run.model(x), y).backward()
            assert len(run.model.per_sample_gradient_norms) == 4

    def test_a_loader_without_poisson_sampling(self):
        run, alone = (
            build(count=7, batch_size=3, poisson_sampling=False, grad_sample_mode="bookkeeping")
            for _ in range(2)
        )
        assert joined(train(run, 3, 2, pad=True)) == [[0], [1, 2], [3], [4, 5], [6]]
        train(alone, 3)
        np.testing.assert_allclose(parameters(run), parameters(alone), rtol=0, atol=1e-6)
        assert run.model.step_state.ticket.rows is None, "other batches are as they are"

    def test_what_is_printed_is_of_the_samples(self):
        run, seen = build(batch_size=3), 0
        with padded(run, 8) as pieces:
            for x, y, _ in pieces:
                loss = run.criterion(run.model(x), y)
                loss.backward()
                assert len(x) == 8
                seen += pieces.real
                assert len(loss.loss_per_sample) == pieces.real
                assert len((2 * loss).loss_per_sample) == pieces.real
                total = loss.loss_per_sample.sum().item()
                assert loss.item() == pytest.approx(total / max(1, pieces.real))
                assert run.model.per_sample_gradient_norms.shape == (pieces.real,)
                assert run.model.norm_statistics().samples == pieces.real
                run.optimizer.step()
                run.optimizer.zero_grad()
                if seen:
                    break

    @pytest.mark.parametrize("mode", ["bookkeeping", "ghost", "per_sample"])
    def test_what_padding_becomes_poisons_nothing(self, mode):
        options = {"grad_sample_mode": mode, "module": nn.Sequential(Direction(), zoo.mlp(6, 8, 3))}
        assert not options["module"](torch.zeros(1, 6)).isfinite().any()
        run, alone = (build(**copy.deepcopy(options)) for _ in range(2))
        train(alone, 3)
        with padded(run) as pieces:
            for x, y, _ in pieces:
                x[pieces.real :] = 0
                run.criterion(run.model(x), y).backward()
                assert run.model.nonfinite_samples == 0
                assert run.model.per_sample_gradient_norms.isfinite().all()
                run.optimizer.step()
                run.optimizer.zero_grad()
                if run.optimizer.steps == 3:
                    break
        np.testing.assert_allclose(parameters(run), parameters(alone), rtol=0, atol=1e-6)

    @pytest.mark.parametrize("each", [1, 2])
    def test_networks_that_look_at_a_row_run(self, each):
        """Those of transformers count the tokens of a mask, say; a batch may have no sample."""

        def looks(net, x):
            assert x.any(-1).all()
            return net.layer(x)

        network = zoo.Net(looks, layer=zoo.mlp(6, 8, 3))
        options = {"batch_size": each, "examples_per_unit": each}
        reals, run = [], build(module=copy.deepcopy(network), **options)
        with pytest.raises(ValueError, match=r"units of several .* pad_batches=True"):
            train(run, 20)
        run = build(module=network, **options)
        with padded(run) as pieces:
            for x, y, _ in pieces:
                reals.append(pieces.real)
                step(run, (x, y))
        assert 0 in reals
        assert max(reals) > 0

    def test_a_sample_that_is_not_finite_is_counted_beside_them(self):
        run = build(batch_size=8)
        with padded(run, 24) as pieces:
            x, y, _ = next(iter(pieces))
            x[0] = x[pieces.real :] = torch.nan  # and its copies
            run.criterion(run.model(x), y).backward()
            assert 1 < pieces.real < 24
            assert run.model.nonfinite_samples == 1
            assert all(p.grad.isfinite().all() for p in run.model.network.parameters())

    @pytest.mark.parametrize("mode", ["bookkeeping", "ghost"])
    def test_kernels_see_one_shape(self, mode):
        run = build(name="transformer", grad_sample_mode=mode)
        run.model.skip_checks()
        seen, reals = [], []
        with padded(run, 12) as pieces:
            for x, y, _ in pieces:
                with Shapes() as shapes:
                    step(run, (x, y))
                if pieces.real and run.optimizer.steps > 2:
                    seen.append(shapes.seen)
                    reals.append(pieces.real)
        assert len(set(reals)) > 1
        assert all(one == seen[0] for one in seen)

    def test_bits_of_a_sample_do_not_depend_on_how_many_others_there_are(self):
        run = build(name="transformer", batch_size=8, dtype=torch.bfloat16)
        usage = run.model.step_state.usage
        x, y, _ = next(iter(run.loader))
        found = []
        for real in range(1, 4):
            usage.hand_over(Ticket(real, rows=4))
            rows = [*range(real), *[0] * (4 - real)]
            run.criterion(run.model(x[rows]), y[rows]).backward()
            found.append(run.model.per_sample_gradient_norms[0].item())
            run.optimizer.zero_grad()
        assert len(set(found)) == 1

    def test_a_part_of_a_microbatch_is_refused(self):
        run = build()
        with padded(run) as pieces:
            x, _, _ = next(iter(pieces))
            with pytest.raises(
                ValueError, match=r"forward of 2 samples.* 4 rows.*pad_batches=False"
            ):
                run.model(x[:2])


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(9, 4, mode="mean"), nn.Linear(4, 3)

    def forward(self, ids, offsets):
        return self.head(self.bag(ids, offsets))


def collate_bags(samples):
    """As a user's collate function for uneven texts."""
    texts, labels = zip(*samples, strict=True)
    offsets = torch.tensor([0, *map(len, texts)]).cumsum(0)[:-1]
    return torch.cat(texts), offsets, torch.tensor(labels)


def train_bags(max_size: int) -> list[torch.Tensor]:
    """Parameters after an epoch of Poisson batches of texts of different lengths, some empty."""
    torch.manual_seed(0)
    texts = [(torch.randint(9, (n % 4,)), n % 3) for n in range(20)]
    network = Bags().double()
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    model, optimizer, criterion, loader = PrivacyEngine().make_private(
        module=network, optimizer=optimizer, criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(texts, batch_size=2, collate_fn=collate_bags),
        noise_multiplier=0.0, max_grad_norm=0.1,
        noise_generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    sizes = []
    with split_by(loader, max_size, optimizer) as split_loader:
        for ids, offsets, labels in split_loader:
            sizes.append(len(offsets))
            criterion(model(ids, offsets), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert 0 in sizes, "an empty batch"
    return [p.detach() for p in network.parameters()]


def test_batches_of_bags_with_offsets_are_split():
    for one, whole in zip(train_bags(1), train_bags(20), strict=True):
        torch.testing.assert_close(one, whole)
