"""Networks and losses for which a sample depends on the length of its batch are refused."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence
from torch.utils.data import DataLoader

from ddp import wrap
from dp_clipping import BatchMemoryManager, PrivacyEngine
from tests.support import zoo
from tests.support.on_ranks import on_ranks

WORDS, CLASSES, WIDTH, LONGEST = 20, 3, 6, 9
REFUSED = "depends on who else is in the batch"


def samples_of(count=24, longest=LONGEST, words=WORDS):
    """Sequences of 2 to `longest` words, from 1 on, and a class."""
    draw = torch.Generator().manual_seed(0)
    lengths = [longest] + [2 + 5 * i % (longest - 2) for i in range(1, count)]
    return [(torch.randint(1, words, (n,), generator=draw), n % CLASSES) for n in lengths]


def pad(samples, length=None, at_end=False, sort=False, multiple=1):
    if sort:
        samples = sorted(samples, key=lambda sample: -len(sample[0]))
    ids = [x for x, _ in samples]
    length = length or -(-max(map(len, ids)) // multiple) * multiple
    ids = [F.pad(x, (length - len(x), 0) if at_end else (0, length - len(x))) for x in ids]
    return torch.stack(ids), torch.tensor([y for _, y in samples])


def short_samples():
    """Sequences of up to as many words as there are classes, of the first class."""
    return [(x[: 2 + i % (CLASSES - 1)], 0) for i, (x, _) in enumerate(samples_of())]


def with_one_hot_classes(samples):
    ids, labels = pad(samples)
    return ids, F.one_hot(labels, CLASSES).float()


def truncate(samples):
    shortest = min(len(x) for x, _ in samples)
    return torch.stack([x[:shortest] for x, _ in samples]), torch.tensor([y for _, y in samples])


def packed(samples):
    x = pack_sequence([F.one_hot(x, WORDS).float() for x, _ in samples], enforce_sorted=False)
    return x, torch.tensor([y for _, y in samples])


def with_positions(samples, from_end):
    ids, labels = pad(samples)
    positions = torch.arange(ids.shape[1]).expand(ids.shape)
    return {"ids": ids, "positions": positions.flip(1) if from_end else positions}, labels


def masked_at_random(samples, draw):
    ids, _ = pad(samples)
    hidden = (draw(ids.shape) < 0.5) & (ids > 0)
    return ids.masked_fill(hidden, 0), ids.where(hidden, -100)


class Reader(nn.Module):
    """Words are embedded, seen by a layer, and pooled."""

    def __init__(self, pool, layer="identity", dropout=0.0, noise=0.0):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(16, WIDTH)
        layers = {
            "identity": nn.Identity,
            "lstm": partial(nn.LSTM, WIDTH, WIDTH, batch_first=True),
            "bilstm": partial(nn.LSTM, WIDTH, WIDTH // 2, batch_first=True, bidirectional=True),
            "attention": partial(nn.MultiheadAttention, WIDTH, 2, dropout, batch_first=True),
        }
        self.layer, self.pool, self.kind = layers[layer](), pool, layer
        self.dropout, self.noise = nn.Dropout(dropout), noise
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids, positions=None, mask=None):
        mask = ids != 0 if mask is None else mask
        x = self.dropout(self.words(ids))
        if positions is not None:
            x = x + self.places(positions)
        if self.kind == "lstm" or self.kind == "bilstm":
            x = self.layer(x)[0]
        elif self.kind == "attention":
            hidden = ~mask if self.pool == "masked" else None
            x = self.layer(x, x, x, key_padding_mask=hidden, need_weights=False)[0]
        x = x + self.noise * torch.randn_like(x)
        return self.head(pooled(x, mask, self.pool))


def with_large_padding(reader):
    """Padding is among the largest numbers of every padded sample."""
    with torch.no_grad():
        reader.words.weight[0] += 10
    return reader


def pooled(x, mask, how):
    weights, lengths = mask.unsqueeze(2).to(x.dtype), mask.sum(1)
    return {
        "last": lambda: x[:, -1],
        "first": lambda: x[:, 0],
        "read": lambda: x[torch.arange(len(x)), lengths - 1],
        "mean": lambda: x.mean(1),
        "max": lambda: x.max(1).values,
        "masked": lambda: (x * weights).sum(1) / weights.sum(1),
        "divided": lambda: (x * weights).sum(1) / x.shape[1],
        "max_masked": lambda: x.masked_fill(~mask.unsqueeze(2), -1e9).max(1).values,
    }[how]()


class Packing(nn.Module):
    """An LSTM over packed sequences, whose outputs are padded again."""

    def __init__(self, end):
        super().__init__()
        self.words, self.end = nn.Embedding(WORDS, WIDTH), end
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, ids):
        lengths = (ids != 0).sum(1).clamp(min=1).cpu()
        x = pack_padded_sequence(self.words(ids), lengths, batch_first=True, enforce_sorted=False)
        y, (h, _) = self.lstm(x)
        if self.end == "state":
            return self.head(h.movedim(0, 1).flatten(1))
        y = pad_packed_sequence(y, batch_first=True, total_length=ids.shape[1])[0]
        return self.head(y[:, -1] if self.end == "last" else y.sum(1))


class Tagger(nn.Module):
    """A class for each word, from the words up to it, or from all of them."""

    def __init__(self, classes=WORDS, causal=True):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=not causal)
        self.head = nn.Linear(WIDTH if causal else 2 * WIDTH, classes)

    def forward(self, ids):
        return self.head(self.lstm(self.words(ids))[0])


def classify(model, criterion, batch):
    x, y = batch
    return criterion(model(**x) if isinstance(x, dict) else model(x), y)


def next_word(model, criterion, batch):
    ids = batch[0]
    targets = ids[:, 1:].masked_fill(ids[:, 1:] == 0, -100)
    return criterion(model(ids[:, :-1]).transpose(1, 2), targets)


def next_word_flat(model, criterion, batch):
    ids = batch[0]
    outputs = model(ids[:, :-1])
    return criterion(outputs.flatten(0, 1), ids[:, 1:].flatten(), shape=outputs.shape)


def tag(model, criterion, batch):
    return criterion(model(batch[0]).transpose(1, 2), batch[1])


def last_of_outputs(model, criterion, batch):
    return criterion(model(batch[0])[:, -1], batch[1])


def mask_of_loop(model, criterion, batch):
    return criterion(model(batch[0].clone(), mask=batch[0] != 0), batch[1])


def masked_mean(outputs, targets, over):
    losses = F.cross_entropy(outputs, targets, ignore_index=-100, reduction="none")
    valid = (targets != -100).sum(1) if over == "valid" else targets.shape[1]
    return losses.sum(1) / valid


def train(
    network, collate=pad, loop=classify, criterion=None, samples=None, batches=2, workers=0,
    split=None, wrapped=None, prepare=lambda *_: None, rate=0.5, **options,
):  # fmt: skip
    """Trains privately on a few batches of about half of the samples."""
    samples = samples_of() if samples is None else samples
    network = network if wrapped is None else wrapped(network)
    torch.manual_seed(0)
    loader = DataLoader(samples, batch_size=12, collate_fn=collate, num_workers=workers)
    engine = PrivacyEngine()
    model, optimizer, criterion, loader = engine.make_private(
        module=network, optimizer=torch.optim.SGD(network.parameters(), 0.1), data_loader=loader,
        criterion=criterion, noise_multiplier=1.0, max_grad_norm=1.0, steps=batches,
        noise_generator=torch.Generator().manual_seed(3), sample_rate=rate, **options,
    )  # fmt: skip

    prepare(engine, model)

    def run(parts):
        for batch in parts:
            loop(model, criterion, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    if split is None:
        run(loader)
    else:
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=split, optimizer=optimizer, pad_batches=True
        ) as parts:
            run(parts)


ignoring = nn.CrossEntropyLoss(ignore_index=-100)
ignoring_zero = nn.CrossEntropyLoss(ignore_index=0)


def least_length():
    """A network that cannot run on the shortest sample alone: a convolution needs its width."""
    network = Reader("last", "lstm")
    windows = zoo.Net(
        lambda net, x: net.convolution(x.transpose(1, 2)).transpose(1, 2),
        convolution=nn.Conv1d(WIDTH, WIDTH, 5),
    )
    network.words = nn.Sequential(network.words, windows)
    return network


class Both(nn.Module):
    """Returns numbers of each word, and of each sample: as many as there are classes."""

    def __init__(self):
        super().__init__()
        self.of_words, self.of_samples = Tagger(1), Reader("masked")

    def forward(self, ids):
        return self.of_words(ids)[..., 0] * (ids != 0), self.of_samples(ids)


def divided(model, criterion, batch, what):
    """The criterion divides by the length of an argument that is no output."""
    ids, labels = batch
    of_length = ids if what == "words" else (ids != 0).float()
    return criterion(model(ids), labels, of_length)


def over_length(outputs, labels, of_length):
    return F.cross_entropy(outputs, labels, reduction="none") / of_length.shape[1]


def by_mean(outputs, labels):
    """Counts the classes: they are no length, however many words there are."""
    return F.cross_entropy(outputs, labels.argmax(1), reduction="none") * labels.mean(1)


def of_both(outputs, labels):
    words, samples = outputs
    losses = F.cross_entropy(samples, labels, reduction="none")
    return losses + words.square().sum(1) / words.shape[1]


WRONG = {
    # With as many classes as words an output has the shape of what has the length.
    "loss divided by the length of words, as of classes": lambda: train(
        Reader("masked"), loop=partial(divided, what="words"), criterion=over_length,
        samples=short_samples(),
    ),
    "loss divided by the length of a mask, as of classes": lambda: train(
        Reader("masked"), loop=partial(divided, what="a mask"), criterion=over_length,
        samples=short_samples(),
    ),
    "loss divided by the length of one of two outputs, as of classes": lambda: train(
        Both(), criterion=of_both, samples=short_samples()
    ),
    "needs some length": lambda: train(least_length()),
    "reads the last position": lambda: train(Reader("last")),
    "reads the last position of an lstm": lambda: train(Reader("last", "lstm")),
    "lstm in both directions": lambda: train(Reader("read", "bilstm")),
    "mean": lambda: train(Reader("mean")),
    "max": lambda: train(with_large_padding(Reader("max"))),
    "masked sum, divided by the length": lambda: train(Reader("divided")),
    "attention with dropout sees padding": lambda: train(
        Reader("first", "attention", dropout=0.3)
    ),
    "attention sees padding": lambda: train(Reader("first", "attention")),
    "outputs of packed sequences, last position": lambda: train(Packing("last")),
    "positions from the end": lambda: train(
        Reader("masked"), partial(with_positions, from_end=True)
    ),
    "padding at the left": lambda: train(Reader("masked", "lstm"), partial(pad, at_end=True)),
    "buckets": lambda: train(Reader("last"), partial(pad, multiple=4)),
    "sorted": lambda: train(Reader("last", "lstm"), partial(pad, sort=True)),
    "cut to the shortest": lambda: train(Reader("mean"), truncate),
    "dropout": lambda: train(Reader("mean", dropout=0.5)),
    "noise": lambda: train(Reader("last", "lstm", noise=0.01)),
    "in the loop": lambda: train(Tagger(CLASSES), loop=last_of_outputs),
    "loss of padding": lambda: train(Tagger(), loop=next_word_flat),
    "loss divided by the length": lambda: train(
        Tagger(), loop=next_word, criterion=partial(masked_mean, over="all")
    ),
    "tags of words seen from both sides": lambda: train(
        Tagger(causal=False), loop=next_word, criterion=ignoring
    ),
    "mask made in the loop": lambda: train(Reader("mean", "attention"), loop=mask_of_loop),
    "units": lambda: train(Reader("last"), examples_per_unit=2),
    "rows of zeros": lambda: train(Reader("last"), split=8),
    "workers": lambda: train(Reader("last"), workers=1),
    "masked at random, and seen from both sides": lambda: train(
        Tagger(causal=False), partial(masked_at_random, draw=torch.rand), tag, ignoring
    ),
    "zeros at first": lambda: train(zeroed(Reader("mean"))),
    "16 bit": lambda: train(Reader("mean").bfloat16()),
    "autocast": lambda: train(Reader("last", "attention"), loop=in_autocast),
    "the length as a number": lambda: train(ByNumber(), with_number),
    "samples that are changed in place": lambda: train(
        Reader("last"), emptied, samples=Dictionaries()
    ),
    "cut at random": lambda: train(Reader("masked"), cropped),
    "a network of the user's class": lambda: train(Reader("last"), wrap_model=False),
    "batch in dimension 1": lambda: train(
        Reader("last", "lstm"), loop=turned, batch_first=False, wrapped=time_first
    ),
}  # fmt: skip
RIGHT = {
    "reads the last word": lambda: train(Reader("read")),
    "reads the last word of an lstm": lambda: train(Reader("read", "lstm")),
    "masked mean": lambda: train(Reader("masked")),
    "masked max": lambda: train(Reader("max_masked", "lstm")),
    "masked attention": lambda: train(Reader("masked", "attention")),
    "state of packed sequences": lambda: train(Packing("state")),
    "sum of packed sequences": lambda: train(Packing("sum")),
    "packed batches": lambda: train(Opened("sum"), packed),
    "positions": lambda: train(Reader("masked"), partial(with_positions, from_end=False)),
    "padding at the left, masked": lambda: train(Reader("masked"), partial(pad, at_end=True)),
    "one length": lambda: train(Reader("last"), partial(pad, length=LONGEST)),
    "as many classes as words": lambda: train(Reader("masked"), samples=short_samples()),
    "as many classes as words, one-hot": lambda: train(
        Reader("masked"), with_one_hot_classes, criterion=by_mean, samples=short_samples()
    ),
    "sorted": lambda: train(Reader("read", "lstm"), partial(pad, sort=True)),
    "dropout": lambda: train(Reader("masked", "lstm", dropout=0.5)),
    "noise": lambda: train(Reader("masked", "lstm", noise=1.0)),
    "next words": lambda: train(Tagger(), loop=next_word, criterion=ignoring),
    "next words, flat": lambda: train(Tagger(), loop=next_word_flat, criterion=ignoring_zero),
    "mean over valid": lambda: train(
        Tagger(), loop=next_word, criterion=partial(masked_mean, over="valid")
    ),
    "mask made in the loop": lambda: train(Reader("masked", "attention"), loop=mask_of_loop),
    "units": lambda: train(Reader("masked"), examples_per_unit=2),
    "rows of zeros": lambda: train(Reader("masked"), split=8),
    "workers": lambda: train(Reader("masked"), workers=1),
    "masked at random": lambda: train(
        Tagger(), partial(masked_at_random, draw=torch.rand), tag, ignoring
    ),
    "masked at random by a generator": lambda: train(
        Tagger(), partial(masked_at_random, draw=np_rand), tag, ignoring
    ),
    "16 bit": lambda: train(Reader("masked").bfloat16()),
    "autocast": lambda: train(Reader("masked", "attention"), loop=in_autocast),
    "packed sequences in autocast": lambda: train(Packing("state"), loop=in_autocast),
    "samples that are changed in place": lambda: train(
        Reader("masked"), emptied, samples=Dictionaries()
    ),
    "a network of the user's class": lambda: train(Reader("masked"), wrap_model=False),
    "batch in dimension 1": lambda: train(
        Reader("read", "lstm"), loop=turned, batch_first=False, wrapped=time_first
    ),
    "one-hot words, as many as the longest": lambda: train(
        Hot("masked"), loop=one_hot, samples=samples_of(words=LONGEST)
    ),
}  # fmt: skip


class Opened(nn.Module):
    """Takes packed words, and reads outputs padded to the longest."""

    def __init__(self, end="last"):
        super().__init__()
        self.lstm, self.end = nn.LSTM(WORDS, WIDTH, batch_first=True), end
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        y = pad_packed_sequence(self.lstm(x)[0], batch_first=True)[0]
        return self.head(y[:, -1] if self.end == "last" else y.sum(1))


class ByNumber(Reader):
    """Divides by the length of the batch, which it is told."""

    def __init__(self):
        super().__init__("masked")

    def forward(self, ids, length):
        return super().forward(ids) / length


class Hot(Reader):
    """Reads one-hot words."""

    def __init__(self, pool):
        super().__init__(pool)
        self.words = nn.Linear(LONGEST, WIDTH)

    def forward(self, x):
        return super().forward(x, mask=x.sum(2) > 0)


def time_first(network):
    """Takes [time, batch]."""
    return zoo.Net(lambda net, ids: net.network(ids.transpose(0, 1)), network=network)


class Dictionaries(torch.utils.data.Dataset):
    """Makes a new dictionary for each sample."""

    def __len__(self):
        return 24

    def __getitem__(self, i):
        x, y = samples_of()[i]
        return {"x": x, "y": y}


def with_number(samples):
    ids, labels = pad(samples)
    return {"ids": ids, "length": ids.shape[1]}, labels


def emptied(samples):
    return pad([(sample.pop("x"), sample.pop("y")) for sample in samples])


def cropped(samples):
    shortest = min(len(x) for x, _ in samples)
    starts = [int(torch.randint(len(x) - shortest + 1, ())) for x, _ in samples]
    pairs = zip(samples, starts, strict=True)
    return pad([(x[start : start + shortest], y) for (x, y), start in pairs])


GENERATOR = np.random.default_rng(0)


def np_rand(shape):
    return torch.from_numpy(GENERATOR.random(shape))


def in_autocast(model, criterion, batch):
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(batch[0])
    return criterion(outputs.float(), batch[1])


def turned(model, criterion, batch):
    return criterion(model(batch[0].transpose(0, 1)), batch[1])


def one_hot(model, criterion, batch):
    """Makes inputs that are no tensors of the batch, with two dimensions of its length."""
    ids = batch[0]
    return criterion(model(F.one_hot(ids, LONGEST).float() * (ids != 0).unsqueeze(2)), batch[1])


def zeroed(network):
    nn.init.zeros_(network.head.weight)
    nn.init.zeros_(network.head.bias)
    return network


@pytest.mark.parametrize("name", WRONG)
def test_refused(name):
    with pytest.raises(ValueError, match=REFUSED):
        WRONG[name]()


@pytest.mark.parametrize("name", RIGHT)
def test_not_refused(name):
    RIGHT[name]()


def test_lengths_that_differ_first_in_a_later_batch():
    """One long sample comes first in batch 3, 5, 6 or 7, which are no powers of two."""
    samples = [(torch.tensor([1 + i // 10, 1 + i % 10, 1]), i % CLASSES) for i in range(24)]
    batches = []

    def loop(model, criterion, batch):
        batches.append([10 * x + y - 11 for x, y in batch[0][:, :2].tolist()])
        return classify(model, criterion, batch)

    train(Reader("last"), loop=loop, samples=samples, batches=7, rate=0.2)
    first = {i: n for n in (6, 5, 4, 3, 2, 1, 0) for i in batches[n]}
    late, number = next((i, n) for i, n in first.items() if n not in (0, 1, 3))
    samples[late] = (torch.cat((samples[late][0], torch.ones(3, dtype=torch.long))), 0)
    batches.clear()
    with pytest.raises(ValueError, match=REFUSED):
        train(Reader("last"), loop=loop, samples=samples, batches=7, rate=0.2)
    assert len(batches) == number + 1


def test_engine_check_compares_samples_of_the_loader():
    def check(engine, model):
        engine.check(model, pad(samples_of(4)))

    with pytest.raises(ValueError, match=REFUSED):
        train(Reader("last", "lstm"), prepare=check, batches=1)
    train(Reader("masked", "lstm"), prepare=check, batches=1)


def test_engine_check_of_a_batch_of_another_kind_compares_none():
    def check(engine, model):
        x = F.one_hot(pad(samples_of(4, words=LONGEST))[0], LONGEST).float()
        assert engine.check(model, (x, torch.zeros(4, dtype=torch.long))).ok

    train(Hot("masked"), loop=one_hot, samples=samples_of(words=LONGEST), prepare=check, batches=1)


def test_skipped_checks_compare_nothing():
    train(Reader("last"), prepare=lambda _, model: model.skip_checks())


def test_batches_of_one_length_cost_nothing(monkeypatch):
    plain, calls = F.embedding, []

    def counted(*args, **options):
        calls.append(1)
        return plain(*args, **options)

    monkeypatch.setattr(F, "embedding", counted)

    def count(collate):
        calls.clear()
        train(Reader("masked"), collate, batches=4)
        return len(calls)

    fixed = count(partial(pad, length=LONGEST))
    assert fixed < count(pad) <= fixed + 3 * 2 * 3  # in batches 1, 2 and 4, two samples each


def test_the_message_says_the_lengths_and_how_much_changes():
    with pytest.raises(ValueError, match=r"gradient .* by [\d.]+ % when .* from 2 to 9, so"):
        train(Reader("mean"))
    with pytest.raises(ValueError, match=r"loss .* changes by [\d.]+ % when"):
        WRONG["loss divided by the length"]()


def test_the_message_says_that_outputs_at_padding_are_used():
    with pytest.raises(ValueError, match="uses what the network returns for padding"):
        train(Tagger(CLASSES), loop=last_of_outputs)


def test_what_comparing_does_leaves_no_trace():
    """Weights after three steps are those of a run whose batches are not looked at."""
    trained = []
    for prepare in (lambda *_: None, lambda _, model: model.skip_checks()):
        torch.manual_seed(1)
        network = Reader("masked", "lstm", dropout=0.3)
        train(network, batches=3, prepare=prepare)
        trained.append(torch.cat([p.detach().flatten() for p in network.parameters()]))
    assert torch.equal(*trained)


@pytest.mark.parametrize(
    ("collate", "variant", "on_all"),
    [
        (pad, "ddp", False),
        (pad, "zero1", True),
        (truncate, "ddp", False),
        (truncate, "zero1", True),
    ],
)
@on_ranks(2)
def test_all_ranks_raise_what_one_of_them_refuses(context, collate, variant, on_all):
    """Batches of rank 0, or of all, have lengths that follow from samples: all ranks raise."""
    torch.manual_seed(0)
    network = Reader("last")
    module = wrap(variant, network, process_group=context.group)
    samples = [(torch.randint(1, WORDS, (2 + 7 * (n // 2 % 2),)), n % CLASSES) for n in range(24)]
    if context.rank and not on_all:
        collate = partial(pad, length=LONGEST)
    engine = PrivacyEngine()
    model, optimizer, criterion, loader = engine.make_private(
        module=module, optimizer=module.make_optimizer(torch.optim.SGD, network.parameters(), lr=1),
        criterion=nn.CrossEntropyLoss(), noise_multiplier=1.0, max_grad_norm=1.0,
        data_loader=DataLoader(samples, batch_size=12, collate_fn=collate),
        noise_generator=torch.Generator().manual_seed(5),
    )  # fmt: skip
    before = [p.detach().clone() for p in network.parameters()]

    def train():
        for x, y in loader:
            criterion(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(ValueError, match=r"of a sample changes|collate_fn cuts a sample") as raised:
        train()
    if not on_all or collate is truncate:  # what all say alike is said of none
        assert ("on rank 0: " in str(raised.value)) == (not on_all)
    assert engine.accountant.history == []
    assert all(map(torch.equal, before, network.parameters()))
    assert all(p.grad is None for p in network.parameters())
