"""`model(**batch).loss.backward()`: each sample's gradient is the one that it has alone."""

import copy
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dp_clipping.losses.private_loss import PrivateLoss
from tests.support.engine import build, on_any_batches
from tests.support.language_models import (
    LANGUAGE_MODELS,
    batch_of,
    collated,
    language_model,
    reference_gradients,
    samples_of,
)
from tests.support.turns import in_turn


def made_private(network, C=0.5, **options):
    run = on_any_batches(
        module=network, batch_size=5, noise_multiplier=0.0, max_grad_norm=C,
        **{"wrap_model": False, "grad_sample_mode": "bookkeeping", **options},
    )  # fmt: skip
    return run.model, run.optimizer


@pytest.mark.filterwarnings("ignore:poisson_sampling")
@pytest.mark.parametrize(
    ("kind", "wrap_model"), in_turn(LANGUAGE_MODELS, {"hooked": False, "wrapped": True})
)
def test_gradients_are_those_of_single_samples(kind, wrap_model):
    network = language_model(kind)
    plain, batch = copy.deepcopy(network), batch_of(kind, 5)
    model, optimizer = made_private(network, wrap_model=wrap_model)
    outputs = model(**batch, num_items_in_batch=torch.tensor(3))
    assert isinstance(outputs.loss, PrivateLoss)
    outputs.loss.backward()
    norms, expected = reference_gradients(plain, batch, C=0.5)
    torch.testing.assert_close(
        optimizer.model.per_sample_gradient_norms.double(), norms, rtol=1e-4, atol=1e-6
    )
    optimizer.step()
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(
            parameter.grad.double(), expected[name] / 5, rtol=1e-4, atol=1e-6, msg=name
        )


@pytest.mark.filterwarnings("ignore:poisson_sampling")
def test_positions_beside_labels_are_no_samples():
    """They come first among what the network gives its loss function by name."""
    batch = batch_of("gpt2", 5)
    model, optimizer = made_private(language_model("gpt2"))
    model(**batch, cache_position=torch.arange(batch["input_ids"].shape[1])).loss.backward()
    assert len(optimizer.model.per_sample_gradient_norms) == 5


@pytest.mark.filterwarnings("ignore:poisson_sampling")
def test_printed_it_is_the_mean_over_samples_and_evaluation_is_the_networks_own():
    network, batch = language_model("gpt2"), batch_of("gpt2", 5)
    plain = copy.deepcopy(network)
    model, _ = made_private(network)
    losses = [plain(**{k: v[i : i + 1] for k, v in batch.items()}).loss for i in range(5)]
    loss = model(**batch).loss
    torch.testing.assert_close(loss.detach(), torch.stack(losses).mean().detach())
    model.eval()
    torch.testing.assert_close(model(**batch).loss, plain(**batch).loss)
    assert "_loss_function" not in vars(network)


class Labelled(nn.Module):
    """Returns what a function makes of its outputs and labels."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(3, 2), function

    def forward(self, x, labels):
        return self.function(self.linear(x), labels)


Returned = namedtuple("Returned", "outputs loss")


class Named(dict):
    __getattr__ = dict.__getitem__  # raises KeyError


LABELLED = {"x": torch.randn(4, 3), "labels": torch.tensor([0, 1, 1, 0])}
FORMS = {  # what is returned, and where the loss is in it
    "tuple": (lambda y, labels: (F.cross_entropy(y, labels), y), lambda out: out[0]),
    "tuple, later": (lambda y, labels: (y, F.cross_entropy(y, labels), y), lambda out: out[1]),
    "named tuple": (lambda y, z: Returned(y, F.cross_entropy(y, z)), lambda out: out.loss),
    "alone": (F.cross_entropy, lambda out: out),
    "beside a number of each sample": (
        lambda y, z: (y.sum(1), F.cross_entropy(y, z)), lambda out: out[1]
    ),
    "before a number of each sample": (
        lambda y, z: (F.cross_entropy(y, z), y.sum(1)), lambda out: out[0]
    ),
    "dict": (lambda y, labels: {"loss": F.cross_entropy(y, labels)}, lambda out: out["loss"]),
    "dict of several": (
        lambda y, z: {"loss_a": F.cross_entropy(y, z), "y": y, "b_loss": F.cross_entropy(-y, z)},
        lambda out: out["loss_a"] + out["b_loss"],
    ),
    "dict of its own": (
        lambda y, labels: Named(loss=F.cross_entropy(y, labels)), lambda out: out.loss
    ),
    "object": (
        lambda y, labels: SimpleNamespace(loss=F.cross_entropy(y, labels)), lambda out: out.loss
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:poisson_sampling")
def test_outputs_without_a_loss_may_be_a_dict_of_its_own():
    model, _ = made_private(Labelled(lambda y, labels: Named(logits=y)))
    assert model(**LABELLED).logits.shape == (4, 2)


@pytest.mark.filterwarnings("ignore:poisson_sampling")
@pytest.mark.parametrize("form", FORMS)
def test_any_network_that_is_given_labels(form):
    function, loss_in = FORMS[form]
    model, _ = made_private(Labelled(function), C=1.0, wrap_model=True)
    for args, kwargs in (((), LABELLED), (tuple(LABELLED.values()), {})):
        outputs = model(*args, **kwargs)
        assert isinstance(loss_in(outputs), PrivateLoss)
        loss_in(outputs).backward()
        assert len(model.per_sample_gradient_norms) == 4
        model.zero_grad()


class Predicts(nn.Module):
    """Returns logits and, if it is given targets, a loss of those that are not -1."""

    def __init__(self):
        super().__init__()
        self.words, self.last = nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, ids, targets=None):
        logits = self.last(self.words(ids).tanh())
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def test_a_loss_beside_logits_in_a_usual_loop():
    """`logits, loss = model(x, y)`: a sample's loss is the mean over its own targets."""
    ids, targets = torch.randint(7, (2, 32, 5))
    targets[:, 2:] = targets[:, 2:].where(torch.rand(32, 3) < 0.5, -1)
    network = Predicts()
    run = build(
        module=network, data_loader=DataLoader(TensorDataset(ids, targets), batch_size=8),
        noise_multiplier=0.0, max_grad_norm=1.0,
    )  # fmt: skip
    plain = copy.deepcopy(run.model)
    for x, y in run.loader:
        _, loss = run.model(x, y)
        (loss / 2).backward()
        norms = []
        for i in range(len(x)):
            own = torch.autograd.grad(plain(x[i : i + 1], y[i : i + 1])[1], [*plain.parameters()])
            norms.append(torch.cat([g.flatten() for g in own]).norm() / 2)
        torch.testing.assert_close(run.model.per_sample_gradient_norms, torch.stack(norms))
        run.optimizer.step()
        run.optimizer.zero_grad()
        plain = copy.deepcopy(run.model)
    assert run.model(x)[1] is None


@pytest.mark.filterwarnings("ignore:poisson_sampling")
def test_what_is_called_labels_and_makes_no_loss_is_not_looked_at_again():
    network = Labelled(lambda y, labels: y * labels[:, None])
    run = on_any_batches(module=network, batch_size=4, noise_multiplier=0.0)
    for _ in range(2):
        run.criterion(run.model(*LABELLED.values()), LABELLED["labels"]).backward()
        run.model.zero_grad()
    assert run.model.loss_in_network.labelled(tuple(LABELLED.values()), {}) is None


class WithTable(nn.Module):
    """Compares outputs with the rows of a table, an argument."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x, table, labels):
        return F.cross_entropy(self.linear(x) @ table.T, labels), table


@pytest.mark.filterwarnings("ignore:poisson_sampling")
def test_an_argument_with_more_rows_than_the_batch():
    network = WithTable()
    plain = copy.deepcopy(network)
    model, optimizer = made_private(network, C=1.0)
    x, table, labels = torch.randn(5, 3), torch.randn(7, 2), torch.arange(5)
    model(x, table, labels=labels)[0].backward()
    norms = []
    for i in range(5):
        plain.zero_grad()
        plain(x[i : i + 1], table, labels[i : i + 1])[0].backward()
        norms.append(torch.cat([p.grad.flatten() for p in plain.parameters()]).norm())
    torch.testing.assert_close(optimizer.model.per_sample_gradient_norms, torch.stack(norms))


class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x, **targets):
        (y,) = targets.values()
        return {"loss": F.mse_loss(self.linear(x), y)}


@pytest.mark.filterwarnings("ignore:poisson_sampling")
@pytest.mark.parametrize("name", ["future_values", "target_values"])
def test_labels_by_other_names(name):
    model, _ = made_private(Forecast())
    model(torch.randn(4, 3), **{name: torch.randn(4, 2)})["loss"].backward()
    assert model.linear.weight.grad is not None


class OfEachSample(nn.Module):
    """Its code runs for each sample: under `torch.vmap`, or one after another."""

    def __init__(self, in_turn):
        super().__init__()
        self.start, self.linear, self.in_turn = (
            nn.Parameter(torch.ones(3)),
            nn.Linear(3, 2),
            in_turn,
        )

    def forward(self, x, labels):
        if self.in_turn:
            y = torch.stack([row * self.start if row.sum() > 0 else row for row in x])
        else:
            y = torch.zeros(len(x), 2, 3)
            y[:, 0], y[:, 1] = self.start, x
            y = y.prod(1)
        y = self.linear(y)
        return {"loss": F.cross_entropy(y, labels), "logits": y}


@pytest.mark.filterwarnings("ignore:poisson_sampling")
@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_network_that_is_given_labels_and_runs_for_each_sample(one_by_one):
    network = OfEachSample(one_by_one)
    plain = copy.deepcopy(network)
    model, optimizer = made_private(network, C=1.0)
    outputs = model(**LABELLED)
    outputs["loss"].backward()
    losses = [plain(**{k: x[i : i + 1] for k, x in LABELLED.items()})["loss"] for i in range(4)]
    gradients = [
        torch.autograd.grad(loss, [*plain.parameters()], materialize_grads=True) for loss in losses
    ]
    norms = torch.stack([torch.cat([g.flatten() for g in each]).norm() for each in gradients])
    torch.testing.assert_close(optimizer.model.per_sample_gradient_norms, norms)
    torch.testing.assert_close(outputs["loss"].detach(), torch.stack(losses).mean().detach())


@pytest.mark.filterwarnings("ignore:poisson_sampling")
def test_a_loss_that_sees_other_samples_is_refused():
    def mixing(y, labels):
        weight = torch.bincount(labels, minlength=2).to(y) + 1
        return {"loss": F.cross_entropy(y, labels) * weight.mean() * y.std(), "y": y}

    model, _ = made_private(Labelled(mixing))
    with pytest.raises(ValueError, match="depends on"):
        model(**LABELLED)


@pytest.mark.filterwarnings("ignore:poisson_sampling")
def test_a_loss_of_other_arithmetic_says_which_call_works():
    def other(y, labels):
        return -y.log_softmax(1).gather(1, labels[:, None]).mean()

    forms = {lambda y: SimpleNamespace(loss=y): lambda out: out.loss, lambda y: y: lambda out: out}
    for put, loss_in in forms.items():
        model, _ = made_private(Labelled(lambda *args, put=put: put(other(*args))))
        loss = loss_in(model(**LABELLED))
        with pytest.raises(RuntimeError, match=r"loss = criterion\(model\(\*\*batch\)"):
            loss.backward()


class Masked(nn.Module):
    """Predicts what is masked, and reduces its loss by arithmetic of its own, without labels."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        mask = (x > 0).float()
        logits = self.linear(x * (1 - mask))
        loss = ((logits - x).square() * mask).sum() / mask.sum()
        return SimpleNamespace(loss=loss, logits=logits, mask=mask)


def of_masked(outputs, x):
    logits, mask = outputs
    return ((logits - x).square() * mask).sum(1) / mask.sum(1).clamp_min(1)


@pytest.mark.filterwarnings("ignore:poisson_sampling")
def test_a_loss_without_labels_says_which_call_works():
    run = on_any_batches(
        module=Masked(), criterion=of_masked, batch_size=4, noise_multiplier=0.0,
        grad_sample_mode="bookkeeping",
    )  # fmt: skip
    x = torch.randn(4, 3)
    with pytest.raises(
        RuntimeError, match=r"loss = criterion\(\(out\.logits, out\.mask\), targets"
    ):
        run.model(x).loss.backward()
    out = run.model(x)
    run.criterion((out.logits, out.mask), x).backward()
    assert len(run.model.per_sample_gradient_norms) == 4


class OwnLoss(nn.Module):
    """Computes its loss by functions of torch, of padded ids or of bags."""

    def __init__(self, has_bags: bool):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.EmbeddingBag(40, 8) if has_bags else nn.Embedding(40, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, ids, offsets=None, labels=None):
        embedded = self.embedding(ids).mean(1) if offsets is None else self.embedding(ids, offsets)
        logits = self.out(embedded)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def as_bags(samples):
    ids, labels = zip(*samples, strict=True)
    starts = torch.tensor([0, *map(len, ids[:-1])]).cumsum(0)
    return {"ids": torch.cat(ids), "offsets": starts, "labels": torch.stack(labels)}


def as_rows(samples):
    ids, labels = zip(*samples, strict=True)
    return {"ids": torch.stack(ids), "labels": torch.stack(labels)}


@pytest.mark.parametrize("has_bags", [True, False], ids=["bags", "compiled"])
def test_where_it_is_not_exchanged_it_is_refused_with_what_works(has_bags):
    network = OwnLoss(has_bags)
    if not has_bags:
        network.compile(backend="eager")
    draw = torch.Generator().manual_seed(3)
    lengths = [2 + i % 3 if has_bags else 4 for i in range(16)]
    data = [
        (torch.randint(40, (n,), generator=draw), torch.tensor(i % 3))
        for i, n in enumerate(lengths)
    ]
    loader = torch.utils.data.DataLoader(
        data, batch_size=16, collate_fn=as_bags if has_bags else as_rows
    )
    run = build(
        module=network, data_loader=loader, noise_multiplier=0.0, max_grad_norm=1.0,
        wrap_model=False, grad_sample_mode="bookkeeping",
    )  # fmt: skip
    model, optimizer, criterion = run.model, run.optimizer, run.criterion
    (batch,) = run.loader
    with pytest.raises(RuntimeError, match=r"loss = criterion\(model\(\*\*batch\)\.logits, labels"):
        model(**batch)["loss"].backward()
    optimizer.zero_grad()
    labels = batch.pop("labels")
    criterion(model(**batch)["logits"], labels).backward()
    optimizer.step()
    assert len(optimizer.model.per_sample_gradient_norms) == len(labels) > 1


@pytest.mark.slow
def test_a_compiled_model_of_hugging_face_computes_its_loss():
    """By `loss_function`, which is exchanged in compiled code too."""
    found = []
    for is_compiled in (False, True):
        network = language_model("gpt2")
        if is_compiled:
            network.compile(backend="eager")
        loader = torch.utils.data.DataLoader(
            samples_of("gpt2", 8), batch_size=8, collate_fn=collated
        )
        run = build(
            module=network, data_loader=loader, noise_multiplier=0.0, max_grad_norm=1.0,
            wrap_model=False, grad_sample_mode="bookkeeping",
        )  # fmt: skip
        (batch,) = run.loader
        run.model(**batch).loss.backward()
        run.optimizer.step()
        found.append([p.grad.clone() for p in network.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
