"""The training step: its phases in order, what it sets, clips and clears; and that it trains."""

from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from torch import nn

from ddp_by_hand.lm.data import Batches, open_data
from ddp_by_hand.lm.model import ModelConfig, Transformer, forward_loss
from ddp_by_hand.lm.runtime import seed_everything
from ddp_by_hand.lm.training import training_step

WITHOUT_CLIPPING = [
    "lr_scheduling", "forward_pass", "backward_pass", "gradient_sync", "optimizer_step",
]  # fmt: skip


class Recorder:
    """Writes down phases as they begin and end, and what happens between."""

    def __init__(self):
        self.events = []

    @contextmanager
    def phase(self, name):
        self.events.append(name)
        yield
        self.events.append(f"end of {name}")

    def begun(self):
        return [event for event in self.events if "_" in event and not event.startswith("end")]


@pytest.fixture
def network():
    torch.manual_seed(0)
    return nn.Linear(3, 1, bias=False)


def step(network, recorder, *, rate=0.5, maximum=None, finish=None, factor=1.0, **more):
    optimizer = torch.optim.SGD([{"params": [p]} for p in network.parameters()], lr=99.0)
    loss = training_step(
        torch.ones(2, 3), optimizer, forward_loss=lambda batch: (factor * network(batch)).sum(),
        finish=finish or (lambda: recorder.events.append("finish")), learning_rate=rate,
        max_gradient_norm=maximum, phase=recorder.phase, **more,
    )  # fmt: skip
    assert network.weight.grad is None
    return loss, optimizer


def test_phases_come_in_order_and_finish_is_called_between(network):
    recorder = Recorder()
    step(network, recorder)
    assert recorder.begun() == WITHOUT_CLIPPING
    sync = recorder.events.index("gradient_sync")
    assert recorder.events[sync : sync + 3] == ["gradient_sync", "finish", "end of gradient_sync"]
    for earlier, later in pairwise(WITHOUT_CLIPPING):
        assert recorder.events.index(f"end of {earlier}") < recorder.events.index(later)


def test_further_phases_come_in_order_before_clipping(network):
    """Noise does: what is clipped after it is no longer anybody's gradient."""
    recorder, done = Recorder(), []

    def double():
        done.append("double")
        network.weight.grad *= 2

    before = network.weight.detach().clone()
    more = {"double_it": double, "look_at": lambda: done.append("look")}
    finish = lambda: done.append("finish")  # noqa: E731
    step(network, recorder, rate=1.0, maximum=0.5, factor=0.1, finish=finish, more_phases=more)
    assert done == ["finish", "double", "look"]
    assert recorder.begun() == [
        *WITHOUT_CLIPPING[:4], *more, "gradient_clipping_warmup", "optimizer_step",
    ]  # fmt: skip
    torch.testing.assert_close((before - network.weight).norm(), torch.tensor(0.5))


@pytest.mark.parametrize(
    ("left", "factor", "stepped"),
    [([3.0, 4.0, 0.0], 1.0, [0.6, 0.8, 0.0]), (None, 0.01, [0.02, 0.02, 0.02])],
    ids=["a large one", "a small one is not scaled up"],
)
def test_the_total_norm_is_clipped_of_what_finish_left(network, left, factor, stepped):
    before = network.weight.detach().clone()
    finish = (lambda: network.weight.grad.copy_(torch.tensor([left]))) if left else None
    step(network, Recorder(), rate=1.0, maximum=1.0, finish=finish, factor=factor)
    torch.testing.assert_close(before - network.weight, torch.tensor([stepped]))


def test_a_failing_finish_takes_no_step(network):
    before = network.weight.detach().clone()

    def finish():
        raise RuntimeError("unfinished")

    with pytest.raises(RuntimeError, match="unfinished"):
        step(network, Recorder(), finish=finish)
    torch.testing.assert_close(network.weight.detach(), before)


def train(seed: int) -> list[float]:
    torch.set_num_threads(1)  # several on a busy machine take ten times as long
    seed_everything(seed)
    config = ModelConfig(d_model=32, num_layers=1, num_heads=2, d_ff=64, context_length=32)
    network = Transformer(config)
    batches = Batches(open_data("stdlib", 256), batch_size=8, context_length=32, rank=0,
                      world_size=1, seed=seed)  # fmt: skip
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.0)
    return [
        training_step(
            batches(number), optimizer, forward_loss=lambda batch: forward_loss(network, batch),
            finish=lambda: None, learning_rate=3e-3,
        ).item()
        for number in range(60)
    ]  # fmt: skip


def test_the_loss_on_real_text_falls():
    losses = train(seed=0)
    assert losses[0] == pytest.approx(5.545, abs=0.15)  # ln 256: nothing known
    assert sum(losses[-10:]) / 10 < 3.6  # more than the frequency of letters
