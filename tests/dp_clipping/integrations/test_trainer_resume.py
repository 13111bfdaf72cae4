"""Checkpoints of a private Trainer: a run goes on bit for bit, with its key apart."""

import pytest
import torch

from tests.dp_clipping.integrations.conftest import trainer_of, transformers, weights
from tests.support.language_models import language_model, samples_of

SAVED = [
    pytest.param(2, id="in an epoch"),
    pytest.param(6, id="between epochs", marks=pytest.mark.slow),
    pytest.param(8, id="in the second epoch", marks=pytest.mark.slow),
]


def with_dropout() -> torch.nn.Module:
    network = language_model("gpt2")
    for module in network.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    return network


@pytest.mark.parametrize("saved", SAVED)
def test_a_resumed_run_is_the_same(saved, tmp_path):
    """Bit for bit, with dropout: weights, logs and the account."""
    options = dict(
        max_steps=saved + 2, save_strategy="steps", save_steps=saved,
        gradient_accumulation_steps=2, per_device_train_batch_size=2,
    )  # fmt: skip
    network = with_dropout()
    start = {name: x.clone() for name, x in network.state_dict().items()}
    whole = trainer_of("gpt2", tmp_path, network=network, **options)
    whole.train()
    expected = weights(whole)
    network = with_dropout()
    network.load_state_dict(start)
    resumed = trainer_of("gpt2", tmp_path, network=network, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{saved}"))
    for name, x in weights(resumed).items():
        assert torch.equal(x, expected[name]), name
    assert resumed.privacy_statement() == whole.privacy_statement()
    kept = ("epoch", "learning_rate", "grad_norm", "epsilon", "step")
    for one, other in zip(
        whole.state.log_history[:-1], resumed.state.log_history[:-1], strict=True
    ):
        assert [one[name] for name in kept] == pytest.approx([other[name] for name in kept], abs=0)


def test_the_key_is_not_in_the_folder_that_is_published(tmp_path):
    out = tmp_path / "out"
    trainer = trainer_of("gpt2", out, save_strategy="steps", save_steps=2)
    trainer.train()
    keys = trainer.engine._runs[0].keys
    key = tmp_path / "out.keys/checkpoint-2.key"
    assert keys.master.hex() in key.read_text()
    assert key.stat().st_mode & 0o777 == 0o600
    assert key.parent.stat().st_mode & 0o777 == 0o700
    for file in out.rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert keys.master not in content
            assert keys.master.hex().encode() not in content


def with_adapter() -> torch.nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    torch.manual_seed(0)
    return peft.get_peft_model(language_model("gpt2"), config)


@pytest.mark.parametrize("make", [language_model, with_adapter])
def test_weights_are_saved_once(make, tmp_path):
    """Beside the model's own file, or the adapter's; a run goes on from both."""

    def network():
        return make("gpt2") if make is language_model else make()

    options = dict(save_strategy="steps", save_steps=2, optim="sgd")
    whole = trainer_of("gpt2", tmp_path, network=network(), **options)
    whole.train()
    folder = tmp_path / "checkpoint-2"
    written = torch.load(folder / "privacy.pt", weights_only=True)["module_state_dict"]
    names = {name for name, _ in whole.model.named_parameters() if "lora" in name}
    assert set(written) == names
    resumed = trainer_of("gpt2", tmp_path, network=network(), **options)
    resumed.train(resume_from_checkpoint=str(folder))
    for name, x in weights(resumed).items():
        assert torch.equal(x, weights(whole)[name]), name


def test_a_resume_with_a_new_key(tmp_path):
    """If the key is lost, or the data have changed; the message shows it."""
    out = tmp_path / "out"
    trainer_of("gpt2", out, save_strategy="steps", save_steps=2).train()
    (tmp_path / "out.keys/checkpoint-2.key").unlink()
    with pytest.raises(ValueError, match="pass new_keys=True"):
        trainer_of("gpt2", out).train(resume_from_checkpoint=str(out / "checkpoint-2"))
    again = trainer_of("gpt2", out, privacy={"new_keys": True})
    again.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    assert again.privacy_statement().steps == 3


def test_a_checkpoint_without_an_account_is_refused(tmp_path):
    trainer = trainer_of(
        "gpt2", tmp_path, save_strategy="steps", save_steps=3, save_only_model=True
    )
    trainer.train()
    with pytest.raises(ValueError, match=r"has no privacy\.pt.*save_only_model"):
        trainer_of("gpt2", tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_it_is_saved_under_plain_names(tmp_path):
    trainer = trainer_of("gpt2", tmp_path)
    trainer.evaluate(samples_of("gpt2", 2))  # which leaves the model in evaluation
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
    for name, x in loaded.state_dict().items():
        assert torch.equal(x, trainer.model.state_dict()[name]), name
