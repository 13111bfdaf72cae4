"""What was released stays accounted for, once, whatever is loaded."""

import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from opacus.accountants import RDPAccountant

from dp_clipping.accounting.ledger import Account, Release
from tests.support.saved_runs import (
    build,
    data,
    load,
    loaded,
    save,
    saved,
    state,
    steps_of,
    train,
    trained,
)

pytestmark = pytest.mark.filterwarnings("error")


def cross_entropies(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


def margins(outputs, targets):
    return F.multi_margin_loss(outputs, targets, reduction="none")


class TestAccount:
    """What was released stays accounted for, once."""

    def load(self, run, path, kept, **more):
        with pytest.warns(UserWarning, match=f"account keeps {kept} of this engine's steps"):
            load(run, path, **more)

    def test_the_same_run_from_an_earlier_step_makes_the_same_steps_again(self, path):
        run = saved(path, 1)
        train(run, 3)
        expected = state(run)
        self.load(run, path, 3)
        assert (steps_of(run), run.optimizer.steps) == (4, 1)
        train(run, 3)
        assert state(run) == expected
        train(run, 1)
        assert steps_of(run) == 5

    def test_new_keys_from_an_earlier_step(self, path):
        """Both continuations are released, what they begin with is one."""
        run = saved(path, 2)
        train(run, 3)
        spent = run.engine.get_epsilon(1e-5)
        self.load(run, path, 3, new_keys=True)
        assert run.engine.get_epsilon(1e-5) == spent
        train(run, 4)
        self.load(run, path, 7, new_keys=True)
        assert (steps_of(run), run.optimizer.steps) == (9, 2)

    def test_the_checkpoint_knows_what_it_has(self, path):
        first = path.with_name("first.pt")
        run = saved(first, 2)
        train(run, 3)
        self.load(run, first, 3, new_keys=True)
        train(run, 1)
        save(run, path)
        train(run, 1)
        self.load(run, path, 1)
        assert steps_of(run) == 7
        resumed = loaded(path)
        assert steps_of(resumed) == 6
        train(resumed, 1)
        self.load(resumed, first, 5, new_keys=True)
        assert steps_of(resumed) == 7

    def test_two_runs_of_one_engine(self, path):
        paths = [path, path.with_name("other.pt")]
        dataset = data()

        def both():
            one = build(dataset=dataset)
            return one, build(engine=one.engine, dataset=dataset)

        one, other = both()
        train(one, 1)
        save(one, paths[0])
        train(other, 3)
        self.load(one, paths[0], 3)
        train(one, 2)
        save(other, paths[1])
        train(one, 2)
        save(one, paths[0])
        assert steps_of(one) == 8
        # Another process: the second checkpoint lacks the last two steps of the first run.
        one, other = both()
        load(one, paths[0])
        assert steps_of(one) == 8
        self.load(other, paths[1], 2)
        assert steps_of(one) == 8

    def test_an_accountant_that_is_handed_on(self, path):
        """It counts for the engine that gets it, whose loads keep the steps of the first one."""
        first, second = build(), build()
        train(first, 2)
        second.engine.accountant = first.engine.accountant
        save(second, path)
        train(second, 3)
        assert second.engine.accountant.history == [(0.8, 1 / 6, 5)]
        assert second.engine.get_epsilon(1e-3) == first.engine.get_epsilon(1e-3) > 0
        self.load(second, path, 3)
        assert steps_of(second) == 5

    def test_steps_that_the_user_has_counted(self, path):
        def handed_on():
            run = build()
            for _ in range(4):
                run.engine.accountant.step(noise_multiplier=2.0, sample_rate=0.5)
            return run

        run = handed_on()
        train(run, 2)
        save(run, path)
        resumed = handed_on()
        load(resumed, path)
        assert resumed.engine.accountant.history == [(2.0, 0.5, 4), (0.8, 1 / 6, 2)]
        other = build()
        for _ in range(4):
            other.engine.accountant.step(noise_multiplier=3.0, sample_rate=0.5)
        self.load(other, path, 4)
        assert other.engine.accountant.history == [(2.0, 0.5, 4), (0.8, 1 / 6, 2), (3.0, 0.5, 4)]
        save(build(), path)
        self.load(resumed, path, 4)

    def test_another_run_of_the_engine_takes_none_away(self, path):
        dataset = data()
        one = saved(path, 2, dataset=dataset)
        train(one, 3)
        other = build(engine=one.engine, dataset=dataset)
        self.load(other, path, 3)
        train(other, 2)  # as the first one did
        assert steps_of(one) == 5
        with pytest.raises(RuntimeError, match="another run of this engine has loaded a checkp"):
            train(one, 1)
        train(other, 2)
        assert steps_of(one) == 6
        one.optimizer.zero_grad()
        save(other, path)
        load(one, path)  # which goes on with the key from here on
        train(one, 1)
        assert steps_of(one) == 7
        with pytest.raises(RuntimeError, match=r"load_checkpoint\(\.\., new_keys=True\)"):
            train(other, 1)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("noise_multiplier", 2.5),
            ("max_grad_norm", 2.5),
            ("expected_batch_size", 2.5),
            ("loss_reduction", "sum"),
        ],
    )
    def test_a_step_again_under_the_same_noise_is_refused_if_it_is_another(self, path, name, value):
        """r₁ - 100 r₂ of C = 100 and C = 1 would have no noise in it."""
        run = saved(path)
        setattr(run.optimizer, name, value)
        train(run, 1)
        spent = run.engine.accountant.history
        self.load(run, path, 1)
        before = state(run)
        with pytest.raises(RuntimeError, match="step 0 was made before, from the same key"):
            train(run, 1)
        assert state(run) == before
        assert run.engine.accountant.history == spent
        run.optimizer.zero_grad()
        self.load(run, path, 1, new_keys=True)
        train(run, 1)
        assert steps_of(run) == 2

    def test_a_step_again_with_another_learning_rate_is_refused(self, path):
        """The step after it would have the same noise, and sums at other parameters."""
        run = saved(path, 1)
        train(run, 2)
        self.load(run, path, 2)
        run.optimizer.param_groups[0]["lr"] = 0.01
        with pytest.raises(RuntimeError, match=r"step 1 was made before, .* learning rate"):
            train(run, 1)
        run.optimizer.zero_grad()
        self.load(run, path, 2)  # with the saved rate
        train(run, 2)
        assert steps_of(run) == 3

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            (torch.nn.CrossEntropyLoss(), torch.nn.CrossEntropyLoss(label_smoothing=0.3)),
            (torch.nn.CrossEntropyLoss(), torch.nn.MultiMarginLoss()),
            *[[torch.nn.CrossEntropyLoss(torch.tensor([1.0, w])) for w in (2.0, 9.0)]],
            *[[partial(F.cross_entropy, reduction="none", label_smoothing=x) for x in (0.0, 0.1)]],
            (cross_entropies, margins),
        ],
        ids=["smoothing", "class", "weights", "partial", "function"],
    )
    def test_a_step_again_with_another_criterion_is_refused(self, path, first, second):
        dataset = data()
        run = saved(path, dataset=dataset, criterion=first)
        train(run, 2)
        other = build(engine=run.engine, dataset=dataset, criterion=second)
        self.load(other, path, 2)
        with pytest.raises(RuntimeError, match=r"step 0 was made before, .* or the criterion"):
            train(other, 1)

    def test_an_account_of_one_noise_only_cannot_hold_both(self, path):
        warnings.filterwarnings("ignore", message="GDP accounting is experimental")
        save(other := build(accountant="gdp"), path)
        train(other, 1)
        save(other, path)
        run = trained(2, accountant="gdp", noise_multiplier=0.9)
        with pytest.raises(ValueError, match=r"gdp cannot hold 2 steps .* new engine") as caught:
            load(run, path, new_keys=True)
        assert "\n" not in str(caught.value)
        assert run.engine.accountant.history == [(0.9, 1 / 6, 2)]
        same = trained(2, accountant="gdp")
        self.load(same, path, 2, new_keys=True)
        assert same.engine.accountant.history == [(0.8, 1 / 6, 3)]

    def test_a_step_again_of_another_draw_is_refused(self, path):
        """A batch of an evaluation is the next one after a load, but not before it."""
        run = build()
        run.model.eval()
        batches = iter(run.loader)
        next(batches), next(batches)
        run.model.train()
        save(run, path)
        run.loader.load_state_dict({**run.loader.state_dict(), "position": 3})
        train(run, 2)
        self.load(run, path, 2)
        with pytest.raises(RuntimeError, match=r"step 0 was made before, .* batch,"):
            train(run, 1)

    def test_runs_with_one_fixed_seed_are_counted_apart(self):
        """They are for tests, say of one σ beside another: steps of one number are no replay."""

        def fixed(**more):
            return build(noise_generator=torch.Generator().manual_seed(1), dataset=dataset, **more)

        dataset = data()
        one = fixed()
        other = fixed(engine=one.engine, noise_multiplier=0.9)
        train(one, 2)
        train(other, 2)
        assert one.engine.accountant.history == [(0.8, 1 / 6, 2), (0.9, 1 / 6, 2)]


def test_steps_of_a_key_stay_through_changes_of_the_noise():
    run = build()
    for sigma in (0.8, 1.0, 1.2, 1.2):
        run.optimizer.noise_multiplier = sigma
        train(run, 1)
    expected = [(0.8, 1 / 6, 1), (1.0, 1 / 6, 1), (1.2, 1 / 6, 2)]
    assert run.engine.accountant.history == expected
    assert run.engine.privacy_statement(1e-3).account["histories"] == [[[*e] for e in expected]]


def test_steps_of_a_key_are_made_again_only_before_its_last_one():
    account = Account(RDPAccountant())
    for number in (4, 5):
        account.count(Release("key", number, 1.0, 0.1, (1.0,), number), key_is_fixed=False)
    assert [account.made_ahead("key", number) for number in (4, 5, 6, 7)] == [2, 1, 0, 0]
    assert account.made_ahead("other", 0) == 0


def test_steps_of_an_accountant_that_comes_late_are_of_no_run_and_stay():
    """However its history is divided into entries: it may have fewer of them than before."""
    account = Account(RDPAccountant())
    for number, sigma in enumerate((1.0, 2.0, 1.0)):
        account.count(Release("key", number, sigma, 0.1, (1.0,), number), key_is_fixed=False)
    late = RDPAccountant()
    late.history = [(1.0, 0.1, 2), (2.0, 0.1, 101)]
    account.replace(late)
    assert account.histories() == [[(1.0, 0.1, 1), (2.0, 0.1, 1), (1.0, 0.1, 1)], [(2.0, 0.1, 100)]]
    account.count(Release("key", 3, 2.0, 0.1, (1.0,), 3), key_is_fixed=False)
    assert [sum(steps for *_, steps in part) for part in account.histories()] == [4, 100]


def test_epsilon_of_other_steps_counts_none():
    account, expected = Account(RDPAccountant()), RDPAccountant()
    account.accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    expected.history = [(1.0, 0.1, 7)]
    assert account.of_history([(1.0, 0.1, 7)], 1e-5) == expected.get_epsilon(1e-5)
    assert account.of_history([], 1e-5) == 0.0
    assert account.history == [(1.0, 0.1, 1)]
