"""A collate function makes one row of each sample, from that sample alone; else it is refused."""

import functools
import math
import random
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torch.utils.data import DataLoader, default_collate

from dp_clipping import BatchMemoryManager
from dp_clipping.sampling import collate_check
from dp_clipping.sampling.alone import SIZES, chosen_of
from dp_clipping.sampling.collate_check import CheckedCollate
from tests.dp_clipping.test_engine import build, data, fixed
from tests.support import host_cost

SAME = [(torch.randn(3, generator=torch.Generator().manual_seed(i)), i % 3) for i in range(12)]
UNEQUAL = [(torch.arange(3.0 + 7 * i % 12) + 20 * i, i % 3) for i in range(12)]
LONG = [(torch.arange(3.0 + 7 * i % 5) + 10 * i, i % 3) for i in range(12)]


def stack(samples):
    return default_collate(samples)


def pad(samples):
    x = pad_sequence([x for x, _ in samples], batch_first=True)
    return {"x": x, "longest": x.shape[1], "labels": [y for _, y in samples]}


def time_first(samples):
    return pad_sequence([x for x, _ in samples]), np.array([y for _, y in samples])


def one_token(samples):
    """Returns time-first rows of one number each, which are contiguous with any stride."""
    return torch.stack([x[:1].long() for x, _ in samples], 1)


def narrow(samples):
    x = default_collate([x for x, _ in samples])
    return (
        x.bfloat16(),
        x > 0,
        x.to(torch.complex64).conj(),
        [{"y": y, "none": None} for _, y in samples],
    )


def pack(samples):
    return pack_sequence([x for x, _ in samples], enforce_sorted=False)


def joined(samples):
    """Joined targets, as for CTC."""
    x, lengths = torch.cat([x for x, _ in samples]), torch.tensor([len(x) for x, _ in samples])
    return pad(samples)["x"], x, lengths


def bags(samples):
    """For nn.EmbeddingBag: a row of offsets has something of all samples before."""
    offsets = torch.tensor([0] + [len(x) for x, _ in samples[:-1]]).cumsum(0)
    starts = [0]
    for x, _ in samples[:-1]:
        starts.append(starts[-1] + len(x))
    return torch.cat([x for x, _ in samples]), offsets, starts, [y for _, y in samples]


def bags_with_end(samples):
    offsets = torch.tensor([0] + [len(x) for x, _ in samples]).cumsum(0)
    return torch.cat([x for x, _ in samples]), offsets


def boxes(samples):
    """Returns as many boxes as a picture has: 2, 1, 1 and 0 of four samples are four rows."""
    found = torch.cat([torch.full((y, 4), float(y)) for _, y in samples])
    return stack(samples)[0], found, [torch.zeros(y, 4) for _, y in samples]


def relative_lengths(samples):
    x = pad(samples)["x"]
    return x, torch.tensor([len(one) for one, _ in samples]) / x.shape[1]


def lists_of_one_length(samples):
    longest = max(len(x) for x, _ in samples)
    return [[*x.tolist(), *[0.0] * (longest - len(x))] for x, _ in samples]


def optional_part(samples):
    x, y = stack(samples)
    found = {"x": x, "all": [one for one in y.tolist() if one], "classes": sorted(set(y.tolist()))}
    return found | ({"has_two": 1} if 2 in y else {})


def turned_arrays(samples):
    x = np.stack([x.numpy()[::-1] for x, _ in samples]).astype(">f4")[:, ::-1]
    return x, np.array([str(y) for _, y in samples])


def sparse(samples):
    return stack(samples)[0].to_sparse()


def column_labels(samples):
    return stack(samples)[0], torch.tensor([[float(y) for _, y in samples]]).T


def positions(samples):
    """Returns three positions of each token, as multimodal models have."""
    x = pad(samples)["x"]
    return x, torch.arange(x.shape[1]).expand(3, *x.shape) + 0


def time_steps(samples):
    return [*pad_sequence([x for x, _ in samples])]


def some_have_pictures(samples):
    pictures = [torch.full((2, 2), float(y)) for _, y in samples if y]
    return pad(samples) | ({"pictures": torch.stack(pictures)} if pictures else {})


def by_length_and_masked(samples):
    return masked(sorted(samples, key=lambda sample: -len(sample[0])))


@dataclass
class Holder:
    x: torch.Tensor
    names: list


def in_a_dataclass(samples):
    return Holder(stack(samples)[0], [y for _, y in samples])


def masked_language(samples):
    """Rows without a masked token have labels of -100 alone."""
    x = pad(samples)["x"].long()
    chosen = torch.rand(x.shape) < 0.05
    return {"x": x.masked_fill(chosen, -1), "labels": torch.where(chosen, x, -100)}


class Turned:
    """Turns whole batches, by a generator of its own, and every third one by a counter."""

    def __init__(self):
        self.random, self.calls = np.random.default_rng(0), 0

    def __call__(self, samples):
        self.calls += 1
        x, y = stack(samples)
        return (-x if self.random.random() < 0.5 else x) * (-1 if self.calls % 3 == 0 else 1), y

    def collate(self, samples):
        return self(samples)


def without_zero(samples):
    return stack([sample for sample in samples if sample[1]])


def masked(samples):
    x = pad(samples)["x"]
    return x.masked_fill(torch.rand_like(x) < 0.3, -1), [y for _, y in samples]


def cropped(samples):
    starts = [random.randint(0, len(x) - 3) for x, _ in samples]
    return torch.stack([x[i : i + 3] for i, (x, _) in zip(starts, samples, strict=True)])


ROW_BY_ROW = [
    (stack, SAME), (pad, LONG), (time_first, LONG), (one_token, LONG), (narrow, SAME), (pack, LONG),
    (joined, LONG), (bags, LONG), (bags_with_end, LONG), (boxes, SAME), (relative_lengths, LONG),
    (lists_of_one_length, LONG), (optional_part, SAME), (column_labels, SAME), (positions, LONG),
    (time_steps, LONG), (some_have_pictures, LONG), (masked_language, LONG), (turned_arrays, SAME),
    (sparse, SAME), (without_zero, SAME), (masked, LONG), (cropped, LONG), (in_a_dataclass, SAME),
]  # fmt: skip


def by_length(samples):
    return pad(sorted(samples, key=lambda sample: -len(sample[0])))


def list_by_length(samples):
    return [x for x, _ in sorted(samples, key=lambda sample: len(sample[0]))]


def shuffled(samples):
    samples = list(samples)
    random.shuffle(samples)
    return stack(samples)


def first_two_exchanged(samples):
    return stack([*samples[:2][::-1], *samples[2:]])


OTHER_ORDER = [
    (by_length, LONG), (list_by_length, UNEQUAL), (shuffled, SAME),
    (by_length_and_masked, UNEQUAL), (by_length_and_masked, LONG), (first_two_exchanged, SAME),
]  # fmt: skip


def mixup(samples):
    x, y = stack(samples)
    other, share = torch.randperm(len(x)), float(np.random.beta(1, 1))
    return share * x + (1 - share) * x[other], y


def normalised(samples):
    x, y = stack(samples)
    return (x - x.mean(0)) / (x.std(0, unbiased=False) + 1e-5), y


def two_together(samples):
    """In-batch negatives: a sample is in two rows, each time in another part."""
    x, y = stack(samples)
    return x, x.roll(1, 0), y


def mixed_in_a_dataclass(samples):
    return Holder(mixup(samples)[0], [y for _, y in samples])


def mixup_later(samples):
    x, y = stack(samples)
    other = torch.randperm(len(x))
    return {"x": x, "other": x[other], "y": y, "other_y": y[other], "share": 0.3}


def other_labels(samples):
    x, y = stack(samples)
    return x, y.roll(1)


def average_so_far(samples):
    x, y = stack(samples)
    return x.cumsum(0) / torch.arange(1, len(x) + 1)[:, None] + 0.1 * torch.rand_like(x), y


def turned_and_rolled(samples):
    x = np.stack([x.numpy() for x, _ in samples])
    return (x + np.roll(x, 1, 0))[:, ::-1]


MIXING = [
    (two_together, SAME), (mixup_later, SAME), (other_labels, SAME), (average_so_far, SAME),
    (turned_and_rolled, SAME), (mixup, SAME), (normalised, SAME), (mixed_in_a_dataclass, SAME),
]  # fmt: skip


def windows(samples):
    return torch.cat([x.unfold(0, 3, 1) for x, _ in samples])


def two_views(samples):
    x, y = stack(samples)
    return torch.cat([x, -x]), torch.cat([y, y])


def first_windows(samples):
    return windows(samples)[:LOTS]


def one_of_each_label(samples):
    return stack([*{y: (x, y) for x, y in reversed(samples)}.values()])


def windows_beside(samples):
    return pad(samples), first_windows(samples)


LOTS = 4
SEVERAL = [
    (windows, LONG), (two_views, SAME), (first_windows, LONG), (one_of_each_label, SAME),
    (windows_beside, LONG),
]  # fmt: skip


def run(collate_fn, samples, *, in_order):
    collate = CheckedCollate(
        collate_fn, batch_dim=1 if collate_fn in (time_first, one_token) else 0, in_order=in_order
    )
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    for start in range(4):
        collate([samples[(3 * start + i) % len(samples)] for i in range(7)])


def named(cases):
    return [pytest.param(*case, id=case[0].__name__) for case in cases]


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize(("collate_fn", "samples"), named(ROW_BY_ROW))
def test_what_makes_a_row_of_each_sample_is_used(collate_fn, samples, in_order):
    run(collate_fn, samples, in_order=in_order)


@pytest.mark.parametrize(("collate_fn", "samples"), named(OTHER_ORDER))
def test_an_order_of_its_own_tears_units_apart_and_nothing_else(collate_fn, samples):
    run(collate_fn, samples, in_order=False)
    with pytest.raises(ValueError, match=r"in another order.*enforce_sorted=False"):
        run(collate_fn, samples, in_order=True)


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize(("collate_fn", "samples"), named(MIXING))
def test_rows_of_several_samples(collate_fn, samples, in_order):
    with pytest.raises(ValueError, match="mixes them" if in_order else "sample's neighbours"):
        run(collate_fn, samples, in_order=in_order)


@pytest.mark.parametrize(("collate_fn", "samples"), named(SEVERAL))
def test_several_rows_of_a_sample(collate_fn, samples):
    with pytest.raises(ValueError, match="each of them may be in one row only"):
        run(collate_fn, samples, in_order=False)


def test_the_order_of_rows_that_are_never_the_same_is_not_known():
    def noisy(samples):
        return pad(samples)["x"] + torch.as_tensor(np.random.default_rng().normal(size=(1, 1)))

    run(noisy, LONG, in_order=False)
    with pytest.raises(ValueError, match="other ones each time"):
        run(noisy, LONG, in_order=True)


def test_random_numbers_and_samples_stay_as_they_are():
    changing = [[1.0, 2.0], [3.0, 4.0]]

    def collate_fn(samples):
        for sample in samples:
            sample[0] += 1
        return torch.tensor(samples) + torch.rand(2) + random.random() + np.random.rand()

    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    found = CheckedCollate(collate_fn, batch_dim=0, in_order=False)(changing)
    assert changing == [[2.0, 2.0], [4.0, 4.0]]
    after = torch.rand(1), random.random(), np.random.rand()
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    assert torch.equal(found, collate_fn([[1.0, 2.0], [3.0, 4.0]]))
    assert after == (torch.rand(1), random.random(), np.random.rand())


def jitter(own, samples):
    return stack(samples)[0] + own.random()


HOLDERS = {
    "object": Turned,
    "method": lambda: Turned().collate,
    "partial": lambda: functools.partial(jitter, np.random.default_rng(0)),
    "partial of a partial": lambda: functools.partial(functools.partial(jitter), random.Random(0)),
}


@pytest.mark.parametrize("how", HOLDERS)
def test_counters_and_generators_of_the_function_stay_as_they_are(how):
    one, other = HOLDERS[how](), CheckedCollate(HOLDERS[how](), batch_dim=0, in_order=False)
    for start in range(0, 12, 3):
        samples = SAME[start : start + 3]
        for a, b in zip(one(samples), other(samples), strict=True):
            assert torch.equal(a, b)


def test_it_looks_again_at_later_batches():
    calls = []

    def at_last(samples):
        calls.append(len(samples))
        x, y = stack(samples)
        return (x - x.mean(0) if max(y) > 2 else x), y

    collate = CheckedCollate(at_last, batch_dim=0, in_order=False)
    for _ in range(3):
        collate(SAME[:6])
    before = len(calls)
    with pytest.raises(ValueError, match="neighbours"):
        collate([*SAME[:5], (torch.zeros(3), 5)])
    assert before < len(calls)


@pytest.mark.parametrize("workers", [0, 1])
def test_make_privates_loader_checks(workers):
    def sort(samples):
        return stack(sorted(samples, key=lambda sample: float(sample[0][0])))

    loader = DataLoader(data(20), batch_size=10, collate_fn=sort, num_workers=workers)
    run = build(data_loader=loader, examples_per_unit=2, noise_generator=fixed())
    with pytest.raises(
        ValueError,
        match=r"\(data_collator of a Trainer\) returns rows in another order.*do not sort",
    ):
        next(iter(run.loader))


def test_and_the_loader_that_splits_its_batches():
    loader = DataLoader(data(20), batch_size=10, collate_fn=normalised)
    run = build(data_loader=loader, noise_generator=fixed())
    with (
        BatchMemoryManager(
            data_loader=run.loader,
            max_physical_batch_size=5,
            optimizer=run.optimizer,
            pad_batches=True,
        ) as pieces,
        pytest.raises(ValueError, match="collate_fn makes other rows"),
    ):
        next(iter(pieces))


@pytest.mark.parametrize("period", [2, 3, 7])
def test_lengths_that_alternate_are_all_seen(period):
    samples = [[0.0] * (1 + n % period) for n in range(600)]
    assert len(chosen_of(samples)) == period
    assert chosen_of([]) == {}
    many = chosen_of([[0.0] * n for n in range(99)])
    assert (len(many), min(many), max(many)) == (8, 0, 98)


def of_length(*lengths):
    return [torch.ones(length) for length in lengths]


def in_eights(samples):
    """Returns rows that are padded to a multiple of 8."""
    longest = max(map(len, samples))
    return pad_sequence([*samples, torch.zeros(-(-longest // 8) * 8)], batch_first=True)[:-1]


CONTAINERS = {
    "tensor": lambda x: x,
    "array": lambda x: x.numpy(),
    "one without a company": lambda x: [x, x if len(x) > 1 else None],
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_the_samples_that_tell_most_of_padding_are_collated_alone(container):
    """Looks at one as long as the batch, the shortest, the longest other, and the fullest row."""

    def collate_fn(samples):
        return CONTAINERS[container](in_eights(samples))

    collate = CheckedCollate(collate_fn, batch_dim=0, in_order=False)
    _, alone = collate.some_of(of_length(3, 8, 9, 20))
    assert alone.places == (3, 0, 2, 1)


def test_random_parts_of_a_batch_are_known():
    def collate_fn(samples):
        x = pad_sequence(samples, batch_first=True, padding_value=math.nan)
        return x, torch.rand(x.shape), torch.rand(1 + int(3 * torch.rand(())))

    torch.manual_seed(0)
    collate = CheckedCollate(collate_fn, batch_dim=0, in_order=False)
    assert collate.some_of(of_length(2, 5))[1].random == (False, True, True)


def test_samples_are_looked_at_alone_when_their_lengths_become_different():
    collate, seen = CheckedCollate(in_eights, batch_dim=0, in_order=False), []
    for lengths in ((3, 3), (3, 3), (3, 11), (3, 11), (3, 19), (3, 3), (3, 3), (3, 11)):
        collate(of_length(*lengths))
        seen.append(collate.alone is not None)
    assert seen == [False, False, True, True, False, False, False, True], "and when they are due"


def test_looks_at_new_lengths_end_where_no_sample_is_padded(monkeypatch):
    looks = []
    monkeypatch.setattr(collate_check, "collated_alone", lambda *of: looks.append(of[3].shape[1]))
    collate = CheckedCollate(in_eights, batch_dim=0, in_order=False)
    for number in range(1, 40):
        collate(of_length(8 * number, 8 * number))
    assert [look // 8 for look in looks] == [*range(1, 14), 16, 32]


def together_never(samples):
    if len({len(x) for x in samples}) > 1:
        raise ValueError
    return torch.stack(samples)


def none_of(samples):
    raise ValueError


@pytest.mark.parametrize(
    ("collate_fn", "lengths", "expected"),
    [
        (in_eights, (3, 5), [1, 2, 2, 3, 3]),
        (in_eights, (3, 3), [1, 2, 3, 4, 5]),
        (together_never, (3, 5), [1, 2, 2, 3, 3]),
        (none_of, (3, 5), [1, 2, 2, 3, 3]),
    ],
)
def test_batches_are_checked_until_samples_differ_and_seldom_afterwards(
    collate_fn, lengths, expected, monkeypatch
):
    run, runs, found = collate_check._Check.run, [], []
    monkeypatch.setattr(collate_check._Check, "run", lambda self: runs.append(self) or run(self))
    collate = CheckedCollate(collate_fn, batch_dim=0, in_order=False)
    for _ in range(5):
        with nullcontext() if collate_fn is in_eights else pytest.raises(ValueError):
            collate(of_length(*lengths))
        found.append(len(runs))
    assert found == expected


def test_a_check_of_many_samples_costs_what_one_of_few_does():
    def checked(count):
        calls = []

        def stacked(samples):
            calls.append(len(samples))
            return torch.tensor(samples)

        collate = CheckedCollate(stacked, batch_dim=0, in_order=False)
        made = host_cost.calls_of(lambda: collate([[float(i)] for i in range(count)]))[0]
        return made, calls[:-2]  # the batch itself, and one sample alone

    (few, of_few), (many, of_many) = checked(64), checked(20_000)
    assert of_few == of_many
    assert len(of_few) <= 14
    assert many - few < 4 * SIZES
