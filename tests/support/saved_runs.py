"""A small private run with everything that a checkpoint holds, for the tests of checkpoints."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ddp import wrap
from dp_clipping.checkpoint.file_format import write_sealed
from tests.dp_clipping.conftest import skip_all_checks
from tests.support import engine as runs

SAMPLES, BATCH = 24, 4  # 6 draws an epoch


class Network(nn.Module):
    """Dropout, so that torch's random state matters, and a buffer."""

    def __init__(self, hidden: int = 5):
        super().__init__()
        self.first, self.last = nn.Linear(3, hidden), nn.Linear(hidden, 2)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, x):
        return self.last(self.drop(self.first(x).tanh())) * self.scale


def data(count: int = SAMPLES) -> TensorDataset:
    draw = torch.Generator().manual_seed(7)
    x = torch.randn(count, 3, generator=draw)
    return TensorDataset(x, torch.randint(2, (count,), generator=draw))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)


def build(
    *, make=sgd, hidden=5, count=SAMPLES, workers=0, accountant="rdp", group=None, seed=0,
    engine=None, dataset=None, frozen=False, **changes,
):  # fmt: skip
    """A run with new objects throughout, or in an engine that has others."""
    torch.manual_seed(seed)
    network = Network(hidden)
    network.first.weight.requires_grad_(not frozen)
    optimizer = make(network.parameters())
    module = network if group is None else wrap("ddp_bucketed", network, process_group=group)
    run = runs.build(
        engine=engine, accountant=accountant, module=module, optimizer=optimizer,
        data_loader=DataLoader(dataset or data(count), batch_size=BATCH, num_workers=workers),
        **{"noise_multiplier": 0.8, "max_grad_norm": 0.7, **changes},
    )  # fmt: skip
    if changes.get("grad_sample_mode") != "no_dp":
        skip_all_checks(run.optimizer.model)  # which take longer than the steps
    return run


batches = runs.endless


def train(run, steps, *, microbatch=None, after=lambda: None):
    """`steps` steps; what was drawn in each."""
    drawn, seen = [], []
    goal = run.optimizer.steps + steps
    if not steps:
        return drawn
    for x, y in batches(run, microbatch):
        seen += x[:, 0].tolist()
        run.criterion(run.model(x), y).backward()
        before = run.optimizer.steps
        run.optimizer.step()
        run.optimizer.zero_grad()
        if run.optimizer.steps > before:
            drawn.append(seen)
            seen = []
            after()
        if run.optimizer.steps == goal:
            return drawn
    raise AssertionError


def keys_of(run):
    return run.engine._runs[0].keys


def state(run):
    """Everything that must agree, as bytes."""
    optimizer = run.optimizer.state_dict()["state"]
    tensors = [*run.model.state_dict().values()]
    tensors += [v for one in optimizer.values() for v in one.values() if v is not None]
    return [x.numpy().tobytes() for x in tensors] + [list(run.engine.accountant.history)]


def save(run, path, **more):
    run.engine.save_checkpoint(path=path, module=run.model, optimizer=run.optimizer, **more)


def load(run, path, **more):
    return run.engine.load_checkpoint(path=path, module=run.model, optimizer=run.optimizer, **more)


def trained(steps, **options):
    """A run that has made so many steps."""
    run = build(**options)
    train(run, steps)
    return run


def saved(path, steps=0, **options):
    """A run that has made so many steps and was saved after them."""
    run = trained(steps, **options)
    save(run, path)
    return run


def loaded(path, **options):
    """A new run that goes on from a checkpoint."""
    run = build(**options)
    load(run, path)
    return run


def check_resume(path, build=build, steps=3, more=5, microbatch=None, **options):
    """Compares a run with one that goes on from its checkpoint; returns both."""
    whole = build(**options)
    train(whole, steps, microbatch=microbatch)
    save(whole, path)
    expected = train(whole, more, microbatch=microbatch)
    resumed = build(**options, seed=9)
    load(resumed, path)
    assert train(resumed, more, microbatch=microbatch) == expected
    assert state(resumed) == state(whole)
    assert resumed.loader.position == whole.loader.position
    assert resumed.engine.get_epsilon(1e-3) == whole.engine.get_epsilon(1e-3)
    return whole, resumed


def edit(run, path, change):
    """Saves again what `change(saved)` leaves, with its digest, as somebody with the key can."""
    saved = torch.load(path)
    change(saved)
    write_sealed(path, saved, keys_of(run), {})


def steps_of(run):
    return sum(steps for _, _, steps in run.engine.accountant.history)
