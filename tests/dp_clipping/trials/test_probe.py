"""Runs of a subject are compared for the samples that stay, beyond what chance changes."""

import pytest
import torch

from dp_clipping.capture.checks.summaries import summary
from dp_clipping.layers.batch_layout import Layout
from dp_clipping.trials.perturb import Perturbed, enlarged, one_more, replaced
from dp_clipping.trials.probe import Probe
from dp_clipping.trials.seen import Seen

ROWS = Layout("dimension", 0)
NEIGHBOUR = replaced(4, {1: 2})


class Subject:
    """Shows what a function makes of numbers [B, 3]; errors of rounding are added to its input."""

    device = torch.device("cpu")
    repeats = 5

    def __init__(self, function, is_random=False, size=4):
        self.x = torch.randn(size, 3, generator=torch.Generator().manual_seed(0))
        self.function, self.is_random, self.runs = function, is_random, 0

    def run(self, perturbed: Perturbed | None = None, seed: int | None = None) -> Seen:
        self.runs += 1
        x = self.x if perturbed is None else self.x[perturbed.rows]
        if seed is not None:
            x = x * (1 + 1e-6 * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        with torch.random.fork_rng():
            y = self.function(x)
        seen = Seen(is_random=self.is_random)
        seen.add("a", "output", summary(y, ROWS, len(y)))
        return seen


KEY = ("a", "output", 0)


def test_samples_apart():
    subject = Subject(torch.sin)
    probe = Probe(subject)
    for perturbed in (NEIGHBOUR, enlarged(4, 2), *one_more(4)):
        assert probe.differing(perturbed) == []
    assert subject.runs == 5  # nothing differs, so nothing is repeated


def test_samples_that_see_each_other():
    probe = Probe(Subject(lambda x: x - x.mean(0)))
    assert probe.differing(NEIGHBOUR) == [KEY]
    for more in one_more(4):
        assert Probe(Subject(lambda x: x / len(x))).differing(more) == [KEY]


@pytest.mark.parametrize(
    ("size", "function", "found"),
    [
        (4, lambda x: torch.cat([-x[:1], x[1:]]), ["front"]),
        (4, lambda x: torch.cat([x[:-1], -x[-1:]]), ["behind"]),
        (4, lambda x: torch.cat([x[: len(x) // 2], -x[len(x) // 2 :]]), ["front"]),
        (5, lambda x: torch.cat([x[: len(x) // 2], -x[len(x) // 2 :]]), ["behind"]),
    ],
)
def test_places_are_counted_from_either_end(size, function, found):
    probe = Probe(Subject(function, size=size))
    assert [more.more for more in one_more(size) if probe.differing(more) == [KEY]] == found


def test_what_rounding_changes_as_much_tells_nothing():
    probe = Probe(Subject(lambda x: (x + 1e4 * x.abs().sum(0)) - 1e4 * x.abs().sum(0)))
    assert probe.differing(NEIGHBOUR) == []


def test_what_cannot_run_tells_nothing_where_it_need_not():
    def function(x):
        if len(x) != 4:
            raise RuntimeError
        return x

    probe = Probe(Subject(function))
    for more in one_more(4):
        assert probe.differing(more) is None
        with pytest.raises(RuntimeError):
            probe.differing(more._replace(may_fail=False))


def test_one_more_is_not_compared_where_numbers_are_drawn():
    for more in one_more(4):
        assert Probe(Subject(lambda x: x / len(x), is_random=True)).differing(more) == []


def test_numbers_whose_amount_depends_on_values():
    subject = Subject(lambda x: torch.rrelu(x, training=True), is_random=True)
    state = torch.get_rng_state()
    for place in range(4):
        assert Probe(subject).differing(replaced(4, {place: (place + 1) % 4})) == []
    assert torch.equal(torch.get_rng_state(), state)


def test_all_ranks_repeat_what_differs_on_one():
    asked = []
    subject = Subject(torch.sin)
    probe = Probe(subject, lambda flag: asked.append(flag) or True)
    assert probe.differing(NEIGHBOUR) == []
    assert subject.runs == 4 + subject.repeats


def test_calls_of_one_layer_are_numbered():
    seen, one = Seen(), summary(torch.ones(2, 2), ROWS, 2)
    for _ in range(2):
        seen.add("a", "input", one)
    assert list(seen.summaries) == [("a", "input", 0), ("a", "input", 1)]
