"""The key of a run: where it lies, when it goes on, when a new one is drawn."""

import os
import pickle
import stat

import pytest
import torch
from opacus.schedulers import ExponentialGradClip, ExponentialNoise

from dp_clipping.checkpoint.file_format import key_path
from dp_clipping.noise.adaptive_threshold import AdaptiveThreshold
from tests.support.saved_runs import (
    BATCH,
    build,
    edit,
    keys_of,
    load,
    loaded,
    save,
    saved,
    state,
    train,
    trained,
)

pytestmark = pytest.mark.filterwarnings("error")


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

        run = trained(1)
        objects = {"path": path, "module": run.model, "optimizer": run.optimizer}
        run.engine.save_checkpoint(**objects | given(run, is_saved))
        resumed = build()
        objects = {"path": path, "module": resumed.model, "optimizer": resumed.optimizer}
        with pytest.warns(UserWarning, match=f"{entry} given, so noise .* a new key"):
            resumed.engine.load_checkpoint(**objects | given(resumed, not is_saved))
        assert keys_of(resumed).fingerprint != keys_of(run).fingerprint
        assert resumed.optimizer.noise.key == keys_of(resumed).noise != run.optimizer.noise.key
        assert resumed.optimizer.steps == 1

    def test_the_key_is_in_its_file_alone(self, path):
        run = saved(path, 2)
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
        run = saved(path)
        key_path(path).chmod(0o644)
        save(run, path)
        assert stat.S_IMODE(key_path(path).stat().st_mode) == 0o600

    def test_it_is_written_once_a_run(self, path):
        run = saved(path)
        before = key_path(path).stat()
        train(run, 1)
        save(run, path)
        after = key_path(path).stat()
        assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)

    def test_a_missing_file_is_said_and_may_be_done_without(self, path):
        one = saved(path, 2)
        key_path(path).unlink()
        other = build()
        with pytest.raises(ValueError, match=r"run.pt.key is missing.*new_keys=True"):
            load(other, path)
        own = keys_of(other)
        load(other, path, new_keys=True)
        new = keys_of(other)
        assert new not in (own, keys_of(one))
        assert other.optimizer.noise.key == new.noise
        assert other.loader.batch_sampler._key == new.sampling
        assert (other.optimizer.steps, other.loader.position) == (2, 2)
        assert state(other) == state(one)
        assert train(one, 3) != train(other, 3)
        assert state(other)[1] != state(one)[1]

    @pytest.mark.parametrize("content", [b"", b"\xff\x00", b"drawn 00\n", b"drawn " + b"ab" * 31])
    def test_a_broken_file_is_refused_and_not_overwritten(self, path, content):
        run = saved(path)
        key_path(path).write_bytes(content)
        for use in (load, save):
            with pytest.raises(ValueError, match="is not a key file") as caught:
                use(run, path)
            assert "abab" not in str(caught.value)
        assert key_path(path).read_bytes() == content

    def test_a_folder_in_its_place_is_refused(self, path):
        run = saved(path)
        key_path(path).unlink()
        key_path(path).mkdir()
        for use in (load, save):
            with pytest.raises(ValueError, match=r"is not a key file|is a folder"):
                use(run, path)

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
        one = saved(path, 2)
        other = build(**change)
        with pytest.warns(UserWarning, match=next(iter(change)) + " was .* new key"):
            load(other, path)
        assert keys_of(other) != keys_of(one)
        assert other.optimizer.noise.key == keys_of(other).noise
        assert other.optimizer.noise_multiplier == change.get("noise_multiplier", 0.8)
        assert other.optimizer.max_grad_norm == change.get("max_grad_norm", 0.7)
        assert other.optimizer.steps == 2

    @pytest.mark.parametrize("name", ["world_size", "data_ranks", "device"])
    def test_other_ranks_and_another_device_draw_another_key(self, path, name):
        """Dropout draws other masks there: another sum, which the same noise would give away."""
        one = saved(path, 2)
        edit(one, path, lambda saved: saved["dp_clipping"]["run"].update({name: "other"}))
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

        one = saved(path, 2, adaptive_threshold=adaptive())
        resumed = build(adaptive_threshold=adaptive(), noise_multiplier=0.9)
        with pytest.warns(UserWarning, match="noise_multiplier was 0.8 and is 0.9"):
            load(resumed, path)
        assert resumed.optimizer.noise_multiplier == 0.9
        assert resumed.optimizer.max_grad_norm == one.optimizer.max_grad_norm != 0.7

    def test_other_data_draw_another_key(self, path):
        one, other = saved(path, 2), build(count=28)
        with pytest.warns(UserWarning, match="num_samples was 24 and is 28.* a new key"):
            load(other, path)
        assert keys_of(other) != keys_of(one)
        assert (other.loader.position, other.optimizer.steps) == (0, 2)
        train(other, 1)
        save(other, path)
        again = loaded(path, count=28)
        assert (again.loader.position, again.optimizer.steps) == (1, 3)

    def test_new_keys_are_new_also_after_steps_of_this_run(self, path):
        """Steps are counted back, so the old key would draw the same noise for other sums."""
        run = saved(path)
        train(run, 2)
        before = keys_of(run)
        with pytest.warns(UserWarning, match="the account keeps 2 of this"):
            load(run, path, new_keys=True)
        assert keys_of(run) != before

    def test_fixed_ones_stay_known_as_such(self, path):
        save(build(noise_generator=torch.Generator().manual_seed(1)), path)
        resumed = loaded(path)
        with pytest.warns(UserWarning, match="fixed seed"):
            resumed.engine.get_epsilon(1e-5)
