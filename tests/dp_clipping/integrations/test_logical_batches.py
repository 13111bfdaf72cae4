"""One Poisson batch at a time, in microbatches that end with its step."""

import pytest
import torch
from torch import nn

from dp_clipping import PrivacyEngine
from dp_clipping.integrations.logical_batches import LogicalBatches


@pytest.fixture
def run():
    engine = PrivacyEngine(accountant="rdp")
    network = nn.Linear(3, 2)
    data = torch.utils.data.TensorDataset(torch.randn(40, 3), torch.randint(2, (40,)))
    loader = torch.utils.data.DataLoader(data, batch_size=10)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    _, optimizer, criterion, loader = engine.make_private(
        module=network, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0,
        max_grad_norm=1.0, grad_sample_mode="bookkeeping", wrap_model=False,
        noise_generator=torch.Generator().manual_seed(5),
    )  # fmt: skip
    return network, optimizer, criterion, loader


def train(network, optimizer, criterion, batches):
    """Yields the sizes of each batch's microbatches, after its step."""
    for batch in batches:
        sizes = []
        for x, y in batch:
            criterion(network(x), y).backward()
            assert batch.samples == len(x)
            sizes.append(len(x))
            if not batch.is_last:
                optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
        yield sizes


def test_a_step_is_one_poisson_batch(run):
    network, optimizer, criterion, loader = run
    batches = LogicalBatches(loader, optimizer, 4, pad_batches=False)
    assert len(batches) == 4
    assert batches.dataset is loader.dataset
    expected = [len(loader.batch_sampler.shares(step)[0]) for step in range(4)]
    sizes = list(train(network, optimizer, criterion, batches))
    assert [sum(of_batch) for of_batch in sizes] == expected
    assert max(map(max, sizes)) <= 4
    assert max(map(len, sizes)) > 1
    assert optimizer.steps == 4


def test_an_epoch_that_ends_late_leaves_the_next_one_alone(run):
    """A loop that counts its steps leaves an iteration open, which is ended at any time."""
    network, optimizer, criterion, loader = run
    batches = LogicalBatches(loader, optimizer, 4, pad_batches=False)
    old = iter(batches)
    first = [next(old) for _ in range(1)]
    for x, y in first[0]:
        criterion(network(x), y).backward()
        optimizer.step()
    optimizer.zero_grad()
    for number, batch in enumerate(batches):
        for x, y in batch:
            criterion(network(x), y).backward()
            if number == 1:
                old.close()
            optimizer.step()
            optimizer.zero_grad()
    assert optimizer.steps == 5
