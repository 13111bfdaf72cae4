"""A resumed run is the run, its key is where it belongs, and a kill loses nothing."""

import multiprocessing
import os
import pickle
import random
import signal
import stat
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from opacus.schedulers import ExponentialGradClip, ExponentialNoise, LambdaNoise, StepGradClip
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ddp import wrap
from dp_clipping import MODES, BatchMemoryManager, PrivacyEngine
from dp_clipping.adaptive import AdaptiveThreshold
from dp_clipping.checkpoint_file import key_path
from dp_clipping.keys import KEY_BYTES, Keys, fresh_keys, read_keys, write_keys

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
    engine=None, dataset=None, **changes,
):  # fmt: skip
    """A run with new objects throughout, or in an engine that has others."""
    torch.manual_seed(seed)
    network = Network(hidden)
    optimizer = make(network.parameters())
    module = network if group is None else wrap("ddp_bucketed", network, process_group=group)
    engine = engine or PrivacyEngine(accountant=accountant)
    arguments = {"noise_multiplier": 0.8, "max_grad_norm": 0.7, **changes}
    model, optimizer, criterion, loader = engine.make_private(
        module=module,
        optimizer=optimizer,
        data_loader=DataLoader(dataset or data(count), batch_size=BATCH, num_workers=workers),
        **arguments,
    )
    return SimpleNamespace(
        engine=engine, model=model, optimizer=optimizer, criterion=criterion, loader=loader
    )


def batches(run, microbatch=None):
    """Batches without end, epoch after epoch."""
    while True:
        if microbatch is None:
            yield from run.loader
        else:
            with BatchMemoryManager(
                data_loader=run.loader, max_physical_batch_size=microbatch, optimizer=run.optimizer
            ) as loader:
                yield from loader


def train(run, steps, *, microbatch=None, after=lambda: None):
    """`steps` steps; what was drawn in each."""
    drawn, seen = [], []
    goal = run.optimizer.steps + steps
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


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.pt"


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


class TestResume:
    def check(self, path, *, microbatch=None, **options):
        whole = build(**options)
        train(whole, 3, microbatch=microbatch)
        save(whole, path)
        expected = train(whole, 5, microbatch=microbatch)  # past the end of the epoch
        resumed = build(**options, seed=9)
        load(resumed, path)
        assert train(resumed, 5, microbatch=microbatch) == expected
        assert state(resumed) == state(whole)
        assert resumed.loader.position == whole.loader.position == 8
        assert resumed.engine.get_epsilon(1e-5) == whole.engine.get_epsilon(1e-5)

    @pytest.mark.parametrize("mode", MODES)
    def test_every_mode_in_the_middle_of_an_epoch(self, path, mode):
        self.check(path, grad_sample_mode=mode)

    def test_adamw_and_per_layer_thresholds(self, path):
        self.check(path, make=adamw, clipping="per_layer", max_grad_norm=[0.2, 0.3])

    def test_microbatches(self, path):
        self.check(path, microbatch=2)

    @pytest.mark.slow
    def test_workers(self, path):
        self.check(path, workers=2)
        self.check(path, workers=2, microbatch=2)

    def test_saved_again_and_again(self, path):
        whole = build()
        save(whole, path)
        expected = train(whole, 6)
        drawn = []
        for _ in range(3):
            run = build(seed=3)
            load(run, path)
            drawn += train(run, 2)
            save(run, path)
        assert drawn == expected
        assert state(run) == state(whole)

    def test_a_draw_in_the_hand_is_drawn_again(self, path):
        whole = build()
        train(whole, 2)
        held = next(iter(whole.loader))
        save(whole, path)
        resumed = build()
        load(resumed, path)
        assert torch.equal(next(iter(resumed.loader))[0], held[0])

    def test_draws_taken_behind_the_loaders_back_are_not_drawn_again(self, path):
        whole = build()
        for rows in whole.loader.batch_sampler:
            x, y = data()[rows]  # no rows are an empty batch, which a DataLoader cannot collate
            whole.criterion(whole.model(x), y).backward()
            whole.optimizer.step()
            whole.optimizer.zero_grad()
            if whole.optimizer.steps == 2:
                break
        save(whole, path)
        resumed = build()
        load(resumed, path)
        assert resumed.loader.position == 2

    def test_in_the_middle_of_a_step_it_is_refused(self, path):
        run = build()
        x, y = next(iter(run.loader))
        run.criterion(run.model(x), y).backward()
        with pytest.raises(RuntimeError, match="middle of a step"):
            save(run, path)
        assert not path.exists()
        assert not key_path(path).exists()
        run.optimizer.pre_step()
        with pytest.raises(RuntimeError, match="middle of a step"):
            save(run, path)
        run.optimizer.step()
        save(run, path)
        run.optimizer.zero_grad()
        x, y = next(iter(run.loader))
        run.criterion(run.model(x), y).backward()
        with pytest.raises(RuntimeError, match="middle of a step"):
            load(run, path)

    def test_between_microbatches_it_is_refused(self, path):
        run = build()
        x, y = next(batches(run, 1))
        run.criterion(run.model(x), y).backward()
        run.optimizer.signal_skip_step(True)
        run.optimizer.step()
        run.optimizer.zero_grad()
        assert run.optimizer.steps == 0
        with pytest.raises(RuntimeError, match="last microbatch"):
            save(run, path)

    def test_schedulers(self, path):
        def schedulers(run):
            return {
                "noise_scheduler": ExponentialNoise(run.optimizer, gamma=0.9),
                "grad_clip_scheduler": StepGradClip(run.optimizer, step_size=2, gamma=0.5),
            }, torch.optim.lr_scheduler.StepLR(run.optimizer, step_size=2, gamma=0.3)

        def after(ours, rate):
            return lambda: [one.step() for one in (*ours.values(), rate)]

        whole = build()
        ours, rate = schedulers(whole)
        train(whole, 3, after=after(ours, rate))
        save(whole, path, checkpoint_dict={"rate": rate.state_dict(), "epoch": 4}, **ours)
        train(whole, 3, after=after(ours, rate))
        resumed = build(seed=5)
        ours, rate = schedulers(resumed)
        rest = load(resumed, path, **ours)
        rate.load_state_dict(rest["rate"])
        assert rest["epoch"] == 4
        train(resumed, 3, after=after(ours, rate))
        assert state(resumed) == state(whole)
        assert len(whole.engine.accountant.history) == 6
        assert resumed.optimizer.max_grad_norm == 0.7 * 0.5**3
        assert resumed.optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * 0.3**3)

    def test_the_function_of_a_lambda_scheduler_is_the_users(self, path):
        one = build()
        save(one, path, noise_scheduler=LambdaNoise(one.optimizer, noise_lambda=lambda n: 1 + n))
        other = build()
        scheduler = LambdaNoise(other.optimizer, noise_lambda=lambda n: 1 + n)
        load(other, path, noise_scheduler=scheduler)
        scheduler.step()
        assert other.optimizer.noise_multiplier == 1.6

    def test_what_is_given_on_one_side_only_is_said(self, path):
        run = build()
        save(run, path)
        with pytest.warns(UserWarning, match="no noise_scheduler in the checkpoint"):
            load(run, path, noise_scheduler=ExponentialNoise(run.optimizer, gamma=1.0))
        with pytest.warns(UserWarning, match="an optimizer in the checkpoint and no optimizer"):
            run.engine.load_checkpoint(path=path, module=run.model)

    def test_steps_and_draws_go_on_without_the_optimizer_too(self, path):
        run = build()
        train(run, 3)
        run.engine.save_checkpoint(path=path, module=run.model, data_loader=run.loader)
        resumed = build()
        resumed.engine.load_checkpoint(path=path, module=resumed.model)
        assert (resumed.optimizer.steps, resumed.loader.position) == (3, 3)
        assert resumed.optimizer._noise_key == run.optimizer._noise_key

    def test_a_load_drops_gradients_and_the_skip_of_what_was_before(self, path):
        run = build()
        train(run, 1)
        save(run, path)
        x, y = next(iter(run.loader))
        run.criterion(run.model(x), y).backward()
        run.optimizer.step()
        run.optimizer.signal_skip_step(True)
        load(run, path)
        assert all(p.grad is None for p in run.model.parameters())
        train(run, 1)
        assert run.optimizer.steps == 2

    def test_what_the_user_added_and_what_opacus_returns(self, path):
        run = build()
        extra = {"best": 0.5, "names": ["a"], "mean": torch.ones(2)}
        save(run, path, checkpoint_dict=extra)
        assert set(extra) == {"best", "names", "mean"}, "the user's dictionary stays as it was"
        rest = load(run, path)
        assert set(rest) == {*extra, "module_state_dict", "privacy_accountant_state_dict"}
        plain = Network()
        plain.load_state_dict(rest["module_state_dict"])
        assert torch.equal(plain.first.weight, run.model.network.first.weight)


class TestKeys:
    @pytest.mark.parametrize("entry", ["noise_scheduler", "grad_clip_scheduler", "optimizer"])
    @pytest.mark.parametrize("is_saved", [False, True])
    def test_what_only_one_side_has_draws_a_new_key(self, path, entry, is_saved):
        """Two σ or C under the same noise could be solved for the clipped sum."""

        def given(run, is_there):
            if entry == "optimizer":
                return {} if is_there else {"optimizer": None}
            make = ExponentialNoise if entry == "noise_scheduler" else ExponentialGradClip
            return {entry: make(run.optimizer, gamma=0.5)} if is_there else {}

        run = build()
        train(run, 1)
        objects = {"path": path, "module": run.model, "optimizer": run.optimizer}
        run.engine.save_checkpoint(**objects | given(run, is_saved))
        resumed = build()
        objects = {"path": path, "module": resumed.model, "optimizer": resumed.optimizer}
        with pytest.warns(UserWarning, match=f"{entry} given, so noise .* a new key"):
            resumed.engine.load_checkpoint(**objects | given(resumed, not is_saved))
        assert keys_of(resumed).fingerprint != keys_of(run).fingerprint
        assert resumed.optimizer._noise_key == keys_of(resumed).noise != run.optimizer._noise_key
        assert resumed.optimizer.steps == 1

    def test_the_key_is_in_its_file_alone(self, path):
        run = build()
        train(run, 2)
        save(run, path)
        keys = keys_of(run)
        secrets = [keys.master, keys.noise, keys.sampling]
        secrets += [secret.hex().encode() for secret in secrets]
        content = path.read_bytes()
        shown = repr((run.engine, run.engine._runs, run.optimizer, run.loader, run.model))
        shown += repr((run.model.state_dict(), run.optimizer.state_dict(), run.loader.state_dict()))
        for secret in secrets:
            assert secret not in content
            assert secret not in shown.encode()
            assert repr(secret) not in shown
        assert keys.master.hex().encode() in key_path(path).read_bytes(), "the search can find it"
        assert keys.fingerprint.encode() in content, "and in the checkpoint too"
        with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
            pickle.dumps(run.optimizer)

    def test_only_its_owner_can_ever_read_it(self, path, monkeypatch):
        modes = []
        real = os.open

        def watched(name, flags, mode=0o777, **more):
            descriptor = real(name, flags, mode, **more)
            if ".key" in str(name) and flags & os.O_CREAT:
                modes.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
            return descriptor

        run = build()
        monkeypatch.setattr(os, "open", watched)
        old = os.umask(0)
        try:
            save(run, path)
        finally:
            os.umask(old)
        assert modes == [0o600]
        assert stat.S_IMODE(key_path(path).stat().st_mode) == 0o600

    def test_a_key_file_that_others_may_read_is_closed_at_the_next_save(self, path):
        run = build()
        save(run, path)
        key_path(path).chmod(0o644)
        save(run, path)
        assert stat.S_IMODE(key_path(path).stat().st_mode) == 0o600

    def test_it_is_written_once_a_run(self, path):
        run = build()
        save(run, path)
        before = key_path(path).stat()
        train(run, 1)
        save(run, path)
        after = key_path(path).stat()
        assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)

    def test_a_missing_file_is_said_and_may_be_done_without(self, path):
        one = build()
        train(one, 2)
        save(one, path)
        key_path(path).unlink()
        other = build()
        with pytest.raises(ValueError, match=r"run.pt.key is missing.*new_keys=True"):
            load(other, path)
        own = keys_of(other)
        load(other, path, new_keys=True)
        new = keys_of(other)
        assert new not in (own, keys_of(one))
        assert other.optimizer._noise_key == new.noise
        assert other.loader.batch_sampler._key == new.sampling
        assert (other.optimizer.steps, other.loader.position) == (2, 2)
        assert state(other) == state(one)
        assert train(one, 3) != train(other, 3)
        assert state(other)[1] != state(one)[1]

    def test_the_key_of_another_run_is_refused(self, path):
        save(build(), path)
        write_keys(key_path(path), [fresh_keys(None, torch.device("cpu"))])
        with pytest.raises(ValueError, match="holds no key of this checkpoint"):
            load(build(), path)

    @pytest.mark.parametrize("content", [b"", b"\xff\x00", b"drawn 00\n", b"drawn " + b"ab" * 31])
    def test_a_broken_file_is_refused_and_not_overwritten(self, path, content):
        run = build()
        save(run, path)
        key_path(path).write_bytes(content)
        for use in (load, save):
            with pytest.raises(ValueError, match="is not a key file") as caught:
                use(run, path)
            assert "abab" not in str(caught.value)
        assert key_path(path).read_bytes() == content

    @pytest.mark.parametrize(
        "change",
        [
            {"noise_multiplier": 0.9},
            {"max_grad_norm": 0.6},
            {"clipping_function": "automatic"},
            {"expected_batch_size": 5},
        ],
    )
    def test_another_mechanism_draws_another_key(self, path, change):
        one = build()
        train(one, 2)
        save(one, path)
        other = build(**change)
        with pytest.warns(UserWarning, match=next(iter(change)) + " was .* new key"):
            load(other, path)
        assert keys_of(other) != keys_of(one)
        assert other.optimizer._noise_key == keys_of(other).noise
        assert other.optimizer.noise_multiplier == change.get("noise_multiplier", 0.8)
        assert other.optimizer.max_grad_norm == change.get("max_grad_norm", 0.7)
        assert other.optimizer.steps == 2

    @pytest.mark.parametrize("name", ["world_size", "data_ranks", "device"])
    def test_other_ranks_and_another_device_draw_another_key(self, path, name):
        """Dropout draws other masks there: another sum, which the same noise would give away."""
        one = build()
        train(one, 2)
        save(one, path)
        saved = torch.load(path)
        saved["dp_clipping"]["run"][name] = "other"
        torch.save(saved, path)
        resumed = build()
        with pytest.warns(UserWarning, match=f"{name} was other and is .* a new key"):
            load(resumed, path)
        assert keys_of(resumed) != keys_of(one)
        assert state(resumed) == state(one)
        assert (resumed.optimizer.steps, resumed.loader.position) == (2, 2)

    @pytest.mark.parametrize("changed", ["noise_multiplier", "max_grad_norm"])
    def test_what_a_scheduler_has_reached_stays_where_the_other_changes(self, path, changed):
        def schedulers(run):
            return {
                "noise_scheduler": ExponentialNoise(run.optimizer, gamma=0.9),
                "grad_clip_scheduler": ExponentialGradClip(run.optimizer, gamma=0.5),
            }

        one = build()
        ours = schedulers(one)
        train(one, 2, after=lambda: [scheduler.step() for scheduler in ours.values()])
        save(one, path, **ours)
        resumed = build(**{changed: 1.1})
        with pytest.warns(UserWarning, match=f"{changed} was .* and is 1.1"):
            load(resumed, path, **schedulers(resumed))
        for name in ("noise_multiplier", "max_grad_norm"):
            expected = 1.1 if name == changed else getattr(one.optimizer, name)
            assert getattr(resumed.optimizer, name) == expected

    def test_the_threshold_that_was_reached_clips_the_first_step_under_another_noise(self, path):
        def adaptive():
            return AdaptiveThreshold(0.7, expected_batch_size=BATCH, count_std=4.0)

        one = build(adaptive_threshold=adaptive())
        train(one, 2)
        save(one, path)
        resumed = build(adaptive_threshold=adaptive(), noise_multiplier=0.9)
        with pytest.warns(UserWarning, match="noise_multiplier was 0.8 and is 0.9"):
            load(resumed, path)
        assert resumed.optimizer.noise_multiplier == 0.9
        assert resumed.optimizer.max_grad_norm == one.optimizer.max_grad_norm != 0.7

    def test_other_data_need_the_word(self, path):
        one = build()
        train(one, 2)
        save(one, path)
        other = build(count=28)
        with pytest.raises(ValueError, match="num_samples is 24 in the checkpoint and 28"):
            load(other, path)
        load(other, path, new_keys=True)
        assert (other.loader.position, other.optimizer.steps) == (0, 2)
        train(other, 1)
        save(other, path)
        again = build(count=28)
        load(again, path)
        assert (again.loader.position, again.optimizer.steps) == (1, 3)

    def test_new_keys_are_new_also_after_steps_of_this_run(self, path):
        """Steps are counted back, so the old key would draw the same noise for other sums."""
        run = build()
        save(run, path)
        train(run, 2)
        before = keys_of(run)
        with pytest.warns(UserWarning, match="stay in its account"):
            load(run, path, new_keys=True)
        assert keys_of(run) != before

    def test_fixed_ones_stay_known_as_such(self, path):
        save(build(noise_generator=torch.Generator().manual_seed(1)), path)
        resumed = build()
        load(resumed, path)
        with pytest.warns(UserWarning, match="fixed seed"):
            resumed.engine.get_epsilon(1e-5)

    def test_fingerprint_and_derived_keys_differ(self):
        keys = Keys(bytes(KEY_BYTES))
        assert len({keys.master, keys.noise, keys.sampling, bytes.fromhex(keys.fingerprint)}) == 4


def steps_of(run):
    return sum(steps for _, _, steps in run.engine.accountant.history)


class TestAccount:
    """What was released stays accounted for, once."""

    def load(self, run, path, kept, **more):
        with pytest.warns(UserWarning, match=f"{kept} steps that this engine has counted .* stay"):
            load(run, path, **more)

    def test_the_same_run_from_an_earlier_step_makes_the_same_steps_again(self, path):
        run = build()
        train(run, 1)
        save(run, path)
        train(run, 3)
        expected = state(run)
        load(run, path)
        assert steps_of(run) == 1
        train(run, 3)
        assert state(run) == expected

    def test_new_keys_from_an_earlier_step(self, path):
        """Both continuations are released, what they begin with is one."""
        run = build()
        train(run, 2)
        save(run, path)
        train(run, 3)
        spent = run.engine.get_epsilon(1e-5)
        self.load(run, path, 3, new_keys=True)
        assert run.engine.get_epsilon(1e-5) == spent
        train(run, 4)
        self.load(run, path, 7, new_keys=True)
        assert (steps_of(run), run.optimizer.steps) == (9, 2)

    def test_a_step_back_with_the_same_key_in_between_loses_nothing(self, path):
        run = build()
        save(run, path)
        train(run, 3)
        load(run, path)
        self.load(run, path, 3, new_keys=True)
        assert steps_of(run) == 3

    def test_the_checkpoint_knows_what_it_has(self, path):
        first = path.with_name("first.pt")
        run = build()
        train(run, 2)
        save(run, first)
        train(run, 3)
        self.load(run, first, 3, new_keys=True)
        train(run, 1)
        save(run, path)
        train(run, 1)
        load(run, path)
        assert steps_of(run) == 6
        resumed = build()
        load(resumed, path)
        assert steps_of(resumed) == 6
        train(resumed, 1)
        self.load(resumed, first, 5, new_keys=True)
        assert steps_of(resumed) == 7

    def test_steps_before_the_checkpoint_of_another_run(self, path):
        other = build()
        train(other, 2)
        save(other, path)
        run = build()
        train(run, 3)
        self.load(run, path, 3)
        assert (steps_of(run), run.optimizer.steps) == (5, 2)

    def test_checkpoints_that_are_only_looked_at_replace_each_other(self, path):
        paths = [path, path.with_name("other.pt")]
        for steps, each in enumerate(paths, 2):
            run = build()
            train(run, steps)
            save(run, each)
        looked = build()
        for steps, each in [*enumerate(paths, 2), (2, path)]:
            load(looked, each)
            assert steps_of(looked) == steps

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

    def test_steps_that_the_user_has_counted(self, path):
        """As with an accountant that was handed on."""

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
        save(build(), path)
        self.load(resumed, path, 4)

    def test_a_checkpoint_that_does_not_tell_keys_apart(self, path):
        run = build()
        train(run, 2)
        save(run, path)
        saved = torch.load(path)
        del saved["dp_clipping"]["account"]
        torch.save(saved, path)
        train(run, 1)
        self.load(run, path, 1, new_keys=True)
        assert steps_of(run) == 3

    def test_an_account_of_one_noise_only_cannot_hold_both(self, path):
        warnings.filterwarnings("ignore", message="GDP accounting is experimental")
        save(other := build(accountant="gdp"), path)
        train(other, 1)
        save(other, path)
        run = build(accountant="gdp", noise_multiplier=0.9)
        train(run, 2)
        with pytest.raises(ValueError, match=r"gdp cannot hold 2 steps .* new engine") as caught:
            load(run, path, new_keys=True)
        assert "\n" not in str(caught.value)
        assert run.engine.accountant.history == [(0.9, 1 / 6, 2)]
        same = build(accountant="gdp")
        train(same, 2)
        self.load(same, path, 2, new_keys=True)
        assert same.engine.accountant.history == [(0.8, 1 / 6, 3)]


class TestRefused:
    """On one line, and nothing is changed."""

    def refused(self, run, path, match, **more):
        before = state(run), run.loader.state_dict(), keys_of(run)
        random_state = torch.get_rng_state()
        with pytest.raises(ValueError, match=match) as caught:
            load(run, path, **more)
        assert "\n" not in str(caught.value)
        assert (state(run), run.loader.state_dict(), keys_of(run)) == before
        assert torch.equal(torch.get_rng_state(), random_state)

    @pytest.mark.parametrize(
        ("changes", "match"),
        [
            ({"hidden": 6}, r"first.weight is \[5, 3\] in the checkpoint and \[6, 3\] in this"),
            ({"make": adamw}, "optimizer is SGD in the checkpoint and AdamW"),
            ({"accountant": "prv"}, "accountant is rdp in the checkpoint and prv"),
            ({"grad_sample_mode": "no_dp"}, "private is True in the checkpoint and False"),
            ({"count": 48}, "num_samples is 24 in the checkpoint and 48"),
        ],
    )
    def test_another_run(self, path, changes, match):
        one = build()
        train(one, 1)
        save(one, path)
        self.refused(build(**changes), path, match)

    def test_other_parameters(self, path):
        save(build(), path)
        network = nn.Linear(3, 2)
        engine = PrivacyEngine(accountant="rdp")
        model, optimizer, _, loader = engine.make_private(
            module=network,
            optimizer=sgd(network.parameters()),
            data_loader=DataLoader(data(), batch_size=BATCH),
            noise_multiplier=0.8,
            max_grad_norm=0.7,
        )
        run = SimpleNamespace(engine=engine, model=model, optimizer=optimizer, loader=loader)
        self.refused(run, path, "first.weight is .* in the checkpoint and missing in this model")

    @pytest.mark.parametrize(
        ("scale", "there"), [(torch.ones(2), r"\[2\] torch.float32"),
                             (torch.tensor(1.0, dtype=torch.float64), r"\[\] torch.float64")],
    )  # fmt: skip
    def test_another_buffer(self, path, scale, there):
        save(build(), path)
        other = build()
        other.model.network.scale = scale
        match = rf"entry scale is \[\] torch.float32 in the checkpoint and {there} in this model"
        self.refused(other, path, match)

    def test_other_groups_of_the_optimizer(self, path):
        def two_groups(parameters):
            first, *rest = parameters
            return torch.optim.SGD([{"params": [first]}, {"params": rest}], lr=0.1)

        save(build(), path)
        self.refused(build(make=two_groups), path, r"groups is \[4\] .* and \[1, 3\]")

    def test_cut_short_at_any_length(self, path):
        one = build()
        save(one, path)
        content = path.read_bytes()
        for length in (0, 1, 100, len(content) // 2, len(content) - 1):
            path.write_bytes(content[:length])
            self.refused(one, path, "is not a whole checkpoint")

    @pytest.mark.parametrize(
        "content", [b"garbage" * 99, pickle.dumps({"a": print}, 2), b"\x80\x02."]
    )
    def test_garbage(self, path, content):
        path.write_bytes(content)
        self.refused(build(), path, "is not a whole checkpoint")

    def test_code_is_not_executed(self, path):
        class Trap:
            def __reduce__(self):
                return (os.mkdir, (str(path) + ".trap",))

        torch.save({"module_state_dict": Trap()}, path)
        self.refused(build(), path, "is not a whole checkpoint")
        unsafe = {"torch_load_kwargs": {"weights_only": False}}
        self.refused(build(), path, "would execute code", **unsafe)
        assert not os.path.exists(str(path) + ".trap")

    def test_a_file_of_opacus_or_of_another_version(self, path):
        run = build()
        torch.save({"module_state_dict": {}}, path)
        self.refused(run, path, "was not written by dp_clipping")
        save(run, path)
        saved = torch.load(path)
        torch.save({**saved, "dp_clipping": {**saved["dp_clipping"], "version": 2}}, path)
        self.refused(run, path, "has version 2, this program reads 1")
        del saved["dp_clipping"]["steps"]
        torch.save(saved, path)
        self.refused(run, path, "lacks steps")

    def test_no_file(self, path):
        with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
            load(build(), path)

    def test_another_scheduler(self, path):
        one = build()
        save(one, path, noise_scheduler=ExponentialNoise(one.optimizer, gamma=0.9))
        scheduler = StepGradClip(one.optimizer, step_size=2, gamma=0.5)
        self.refused(one, path, "state of the noise_scheduler", noise_scheduler=scheduler)

    def test_replacing_parameters(self, path):
        run = build()
        save(run, path)
        self.refused(run, path, "assign=True", module_load_dict_kwargs={"assign": True})

    @pytest.mark.parametrize(
        ("entry", "match"),
        [
            ({"best": object()}, "best holds something that cannot be loaded"),
            ({"loss": nn.Linear(1, 1)}, "loss holds something"),
            ({"f": lambda: 0}, "f holds something"),
            ({"module_state_dict": 1}, "module_state_dict, which are written here"),
        ],
    )
    def test_saving_what_could_not_be_loaded(self, path, entry, match):
        run = build()
        save(run, path)
        before = path.read_bytes()
        with pytest.raises(ValueError, match=match):
            save(run, path, checkpoint_dict=entry)
        assert path.read_bytes() == before

    def test_things_of_another_make_private(self, path):
        one, other = build(), build()
        with pytest.raises(ValueError, match="not one that this engine's make_private returned"):
            one.engine.save_checkpoint(path=path, module=other.model)
        with pytest.raises(ValueError, match="optimizer is not the one"):
            one.engine.save_checkpoint(path=path, module=one.model, optimizer=other.optimizer)
        with pytest.raises(ValueError, match="data_loader is not the one"):
            one.engine.save_checkpoint(path=path, module=one.model, data_loader=other.loader)
        with open(path, "wb") as file, pytest.raises(ValueError, match="give a file name"):
            save(one, file)


class Crash(BaseException):
    """Nothing after it runs, as after a kill."""


def guard_operations(monkeypatch, crash_at=None):
    """Counts moments before and after what changes the disk, and crashes at one of them."""
    count = [0]

    def tick():
        count[0] += 1
        if count[0] == crash_at:
            raise Crash

    def guarded(real):
        def operation(*args, **kwargs):
            tick()
            result = real(*args, **kwargs)
            tick()
            return result

        return operation

    for owner, name in ((os, "replace"), (os, "fsync"), (torch, "save")):
        monkeypatch.setattr(owner, name, guarded(getattr(owner, name)))
    # A kill unlinks no temporary file.
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)
    return count


class TestKilled:
    def test_between_any_two_operations(self, path, monkeypatch):
        """A run with a new key saves over the checkpoint of an old run: the worst case."""
        old, new = build(seed=1), build(seed=2)
        train(new, 1)
        save(old, path)
        files = [(file, file.read_bytes()) for file in (path, key_path(path))]
        with monkeypatch.context() as patch:
            count = guard_operations(patch)
            save(new, path)
        assert count[0] > 18
        found = set()
        resumed = build(seed=3)
        for crash_at in range(1, count[0] + 1):
            for file, content in files:
                file.write_bytes(content)
            with monkeypatch.context() as patch:
                guard_operations(patch, crash_at)
                with pytest.raises(Crash):
                    save(new, path)
            load(resumed, path)
            is_new = resumed.optimizer.steps == 1
            assert keys_of(resumed) == keys_of(new if is_new else old)
            found.add(is_new)
            save(new, path)  # and the next save cleans up
            assert read_keys(key_path(path)) == [keys_of(new)]
        assert found == {False, True}

    @pytest.mark.slow
    def test_by_sigkill_at_random_moments(self, path):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])  # torch is imported once
        chance = random.Random(4)
        fingerprints = set()
        for _ in range(20):
            process = context.Process(target=save_for_ever, args=(path, started := context.Event()))
            process.start()
            assert started.wait(60)
            time.sleep(chance.uniform(0, 0.2))
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            run = build()
            load(run, path)
            fingerprints.add(keys_of(run).fingerprint)
        assert len(fingerprints) > 10


def save_for_ever(path, started):
    """New runs, each with its own key, save over each other."""
    torch.set_num_threads(1)
    while True:
        run = build()
        for _ in range(3):
            train(run, 1)
            save(run, path)
            started.set()


# ---- several ranks ------------------------------------------------------------------------------


def resume_on_ranks(context, folder):
    path = Path(folder) / "run.pt"
    whole = build(group=context.group)
    torch.manual_seed(100 + context.rank)  # dropout differs between ranks
    train(whole, 3)
    save(whole, path)
    assert path.exists(), "no rank goes on before it is whole"
    expected = train(whole, 4)
    resumed = build(group=context.group, seed=5)
    load(resumed, path)
    assert train(resumed, 4) == expected
    assert state(resumed) == state(whole)
    return state(resumed), [x for step in expected for x in step], keys_of(resumed).fingerprint


def fail_on_one_rank(context, folder):
    """A rank that cannot write or read takes the others with it; nothing is half-loaded."""
    path = Path(folder) / "run.pt"
    run = build(group=context.group)
    before = state(run)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        save(run, path, checkpoint_dict={"bad": object()} if context.rank == 0 else {})
    said = [str(caught.value)]
    save(run, path)
    train(run, 1)

    own = path.with_name(f"own{context.rank}.pt")  # a disk that is not shared, empty on rank 1
    if context.rank == 0:
        own.write_bytes(path.read_bytes())
        key_path(own).write_bytes(key_path(path).read_bytes())
    after = state(run)
    assert after != before
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        load(run, own)
    said.append(str(caught.value))
    assert state(run) == after

    save(run, path)  # and one that is later on rank 1
    if context.rank == 1:
        own.write_bytes(path.read_bytes())
        key_path(own).write_bytes(key_path(path).read_bytes())
    with pytest.raises(ValueError, match="different checkpoints"):
        load(run, own)
    load(run, path, new_keys=True)
    return said, keys_of(run).fingerprint


class TestRanks:
    def test_resume_with_the_same_and_another_number(self, cpu_ranks, path):
        answers = cpu_ranks.run(2, resume_on_ranks, str(path.parent))
        states, drawn, keys = zip(*answers, strict=True)
        assert states[0] == states[1]
        assert keys[0] == keys[1]
        assert not set(drawn[0]) & set(drawn[1]), "ranks have different samples"
        alone = build()
        with pytest.warns(UserWarning, match="world_size was 2 and is 1, .* a new key"):
            load(alone, path)
        assert keys_of(alone).fingerprint != keys[0]
        assert (alone.optimizer.steps, alone.loader.position) == (3, 3)
        assert alone.engine.accountant.history == [(0.8, 1 / 6, 3)]

    def test_failures(self, cpu_ranks, path):
        (first, new), (second, same) = cpu_ranks.run(2, fail_on_one_rank, str(path.parent))
        assert new == same
        assert "bad holds something" in first[0]
        assert "rank 0 could not write" in second[0]
        assert "rank 1 could not load" in first[1]
        assert "no checkpoint" in second[1]
