"""A resumed run is the run; on several ranks it is in `ranks/test_runs.py`, but for failures."""

from pathlib import Path

import pytest
import torch
from opacus.schedulers import ExponentialNoise, LambdaNoise, StepGradClip

from dp_clipping import MODES
from dp_clipping.checkpoint.file_format import key_path
from tests.support.saved_runs import (
    Network,
    adamw,
    batches,
    build,
    check_resume,
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


class TestResume:
    def test_a_key_at_another_place(self, path, tmp_path):
        whole, elsewhere = build(), tmp_path / "other.key"
        save(whole, path, key_path=elsewhere)
        assert elsewhere.stat().st_mode & 0o777 == 0o600
        assert not key_path(path).exists()
        resumed = build(seed=9)
        with pytest.raises(ValueError, match="is missing"):
            load(resumed, path)
        load(resumed, path, key_path=elsewhere)
        assert keys_of(resumed) == keys_of(whole)
        for call in (save, load):
            with pytest.raises(ValueError, match="the checkpoint itself: give another file"):
                call(resumed, path, key_path=path)
        load(build(seed=9), path, key_path=elsewhere)

    @pytest.mark.parametrize("mode", MODES)
    def test_every_mode_in_the_middle_of_an_epoch(self, path, mode):
        check_resume(path, grad_sample_mode=mode)

    def test_adamw_and_per_layer_thresholds(self, path):
        check_resume(path, make=adamw, clipping="per_layer", max_grad_norm=[0.2, 0.3])

    def test_microbatches(self, path):
        check_resume(path, microbatch=2)

    @pytest.mark.slow
    def test_workers(self, path):
        check_resume(path, workers=2)
        check_resume(path, workers=2, microbatch=2)

    def test_saved_again_and_again(self, path):
        whole = saved(path)
        expected = train(whole, 6)
        drawn = []
        for _ in range(3):
            run = loaded(path, seed=3)
            drawn += train(run, 2)
            save(run, path)
        assert drawn == expected
        assert state(run) == state(whole)

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

    def test_what_the_sum_is_divided_by_is_as_it_was_left(self, path):
        run = trained(1)
        run.optimizer.expected_batch_size, run.optimizer.loss_reduction = 9.0, "sum"
        train(run, 1)
        save(run, path)
        train(run, 1)
        resumed = loaded(path)
        assert resumed.optimizer.expected_batch_size == 9.0
        assert resumed.optimizer.loss_reduction == "sum"
        train(resumed, 1)
        assert state(resumed) == state(run)

    def test_between_microbatches_it_is_refused(self, path):
        run = build(noise_generator=torch.Generator().manual_seed(1))  # a batch of several units
        pieces = batches(run, 1)
        x, y = next(pieces)
        run.criterion(run.model(x), y).backward()
        run.optimizer.signal_skip_step(True)
        run.optimizer.step()
        run.optimizer.zero_grad()
        assert run.optimizer.steps == 0
        with pytest.raises(RuntimeError, match="last microbatch"):
            save(run, path)
        with pytest.warns(UserWarning, match="was left after some of its microbatches"):
            pieces.close()

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

    def test_steps_and_draws_go_on_without_the_optimizer_too(self, path):
        run = trained(3)
        run.engine.save_checkpoint(path=path, module=run.model, data_loader=run.loader)
        resumed = build()
        resumed.engine.load_checkpoint(path=path, module=resumed.model)
        assert (resumed.optimizer.steps, resumed.loader.position) == (3, 3)
        assert resumed.optimizer.noise.key == run.optimizer.noise.key

    def test_a_load_drops_gradients_and_the_skip_of_what_was_before(self, path):
        run = saved(path, 1)
        x, y = next(iter(run.loader))
        run.criterion(run.model(x), y).backward()
        run.optimizer.step()
        run.optimizer.signal_skip_step(True)
        with pytest.warns(UserWarning, match="account keeps 1 of this engine's steps"):
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
    with pytest.raises(ValueError, match="ranks have read other content to load"):
        load(run, own)
    load(run, path, new_keys=True)
    return said, keys_of(run).fingerprint


class TestRanks:
    def test_failures(self, cpu_ranks, path):
        (first, new), (second, same) = cpu_ranks.run(2, fail_on_one_rank, str(path.parent))
        assert new == same
        assert "bad holds something" in first[0]
        assert "rank 0 could not write" in second[0]
        assert "rank 1 could not load" in first[1]
        assert "no checkpoint" in second[1]
