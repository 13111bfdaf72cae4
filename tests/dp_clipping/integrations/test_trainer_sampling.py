"""Samplings and noise of a Trainer are those of `make_private`, and its target is of them."""

import warnings

import pytest
import torch

from dp_clipping import CorrelatedNoise
from dp_clipping.noise import mechanisms
from tests.dp_clipping.integrations.conftest import trainer_of, weights
from tests.dp_clipping.noise import test_mechanisms
from tests.support.language_models import language_model

SAMPLINGS = [
    {"sampling": "balls_in_bins"},
    pytest.param({"sampling": "cyclic"}, marks=pytest.mark.slow),
    pytest.param({"sampling": "truncated_poisson", "max_batch_size": 3}, marks=pytest.mark.slow),
    {"secure_mode": True, "target_delta": 1e-4},
]
every_sampling = pytest.mark.parametrize("options", SAMPLINGS, ids=lambda x: next(iter(x.values())))


@every_sampling
def test_a_target_is_met_and_a_run_resumes(options, tmp_path):
    """Saved in the middle of an epoch, with dropout off."""
    given = {
        "max_steps": -1, "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 8,
        "privacy": {"target_epsilon": 3.0, **options},
    }  # fmt: skip
    whole = trainer_of("gpt2", tmp_path, **given)
    start = {name: x.clone() for name, x in whole.model.state_dict().items()}
    whole.train()
    statement = whole.privacy_statement()
    assert statement.sampler == options.get("sampling", "poisson")
    assert 2.9 <= statement.epsilon <= 3.0
    resumed = trainer_of("gpt2", tmp_path, **given)
    resumed.model.load_state_dict(start)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert resumed.privacy_statement() == statement
    for name, x in weights(resumed).items():
        assert torch.equal(x, weights(whole)[name]), name


def test_a_resumed_run_that_would_end_above_its_target_is_refused(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "privacy": {
        "target_epsilon": 3.0, "sampling": "cyclic"}}  # fmt: skip
    trainer_of("gpt2", tmp_path, max_steps=2, **options).train()
    longer = trainer_of("gpt2", tmp_path, max_steps=40, **options)
    with pytest.raises(ValueError, match=r"epsilon would end at .*, above target_epsilon=3"):
        longer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


@pytest.mark.parametrize("epochs", [None, 2])
def test_correlated_noise_ends_at_its_target(tmp_path, epochs):
    """Noise of as many steps would be too little, were it independent."""
    noise = CorrelatedNoise(bands=3, epochs=epochs)
    options = {"sampling": "cyclic", "options": {"noise_mechanism": noise}}
    given = {"max_steps": 8, "privacy": {"target_epsilon": 3.0, **options}}
    trainer = trainer_of("gpt2", tmp_path, **given)
    trainer.train()
    assert 2.99 <= trainer.privacy_statement().epsilon <= 3.0


def test_a_target_of_registered_noise_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(mechanisms, "_REGISTERED", {})
    test_mechanisms.register("logistic")
    options = {"target_epsilon": 3.0, "options": {"noise_mechanism": "logistic"}}
    trainer = trainer_of("gpt2", tmp_path, privacy=options)
    with pytest.raises(ValueError, match="target_epsilon is for Gaussian noise"):
        trainer.train()


ONE_TARGET_ONLY = {"privacy": {"target_epsilon": 3.0}}
ONE_TARGET = {"max_steps": 2, **ONE_TARGET_ONLY}


class TestTarget:
    """It is of all that a trainer has trained."""

    def test_another_training_is_refused(self, tmp_path):
        init = {"model": None, "model_init": lambda: language_model("gpt2")}
        trainer = trainer_of("gpt2", tmp_path, trainer=init, **ONE_TARGET)
        trainer.train()
        with pytest.raises(ValueError, match="was called before, and target_epsilon is for one"):
            trainer.train()
        trainer = trainer_of("gpt2", tmp_path, **ONE_TARGET)
        trainer.train()
        trainer.model, trainer.optimizer = language_model("gpt2"), None
        with pytest.raises(ValueError, match="was called before, and target_epsilon is for one"):
            trainer.train()

    @pytest.mark.parametrize("microbatches", [pytest.param(1, marks=pytest.mark.slow), 2])
    def test_interrupted_within_a_step(self, microbatches, tmp_path, monkeypatch):
        given = {
            "max_steps": 4, "save_strategy": "steps", "save_steps": 2, **ONE_TARGET_ONLY,
            "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4 // microbatches,
        }  # fmt: skip
        trainer = trainer_of("gpt2", tmp_path, **given)
        step, left = trainer.training_step, [1]

        def interrupted(*arguments):
            found = step(*arguments)
            if trainer.state.global_step == 3 and left.pop():
                raise KeyboardInterrupt
            return found

        monkeypatch.setattr(trainer, "training_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        monkeypatch.undo()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert trainer.privacy_statement().steps == 4
        assert trainer.privacy_statement().epsilon <= 3.0

    def test_data_are_not_replaced(self, tmp_path):
        trainer = trainer_of("gpt2", tmp_path, max_steps=2)
        trainer.train()
        trainer.train()
        trainer.train_dataset = list(trainer.train_dataset)[:8]
        with pytest.raises(ValueError, match="train_dataset was replaced since"):
            trainer.train()
        trainer.model = language_model("gpt2")
        with pytest.raises(ValueError, match="train_dataset was replaced since"):
            trainer.train()
