"""Private fine-tuning with a real Hugging Face Trainer, beside single samples and other runs."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from opacus.accountants import RDPAccountant

from dp_clipping.losses.private_loss import PrivateLoss
from tests.dp_clipping.integrations.conftest import Compared, trainer_of, transformers
from tests.support.language_models import LANGUAGE_MODELS, collated, language_model, samples_of

STEPS_OF_AN_EPOCH = 6  # of 24 samples in batches of 4


SOME = ("gpt2", "t5")
EACH_KIND = [
    pytest.param(kind, marks=[] if kind in SOME else pytest.mark.slow) for kind in LANGUAGE_MODELS
]


@pytest.mark.parametrize("kind", EACH_KIND)
def test_gradients_are_those_of_single_samples(kind, tmp_path):
    """Also in several microbatches, each padded to its own longest sample."""
    trainer = trainer_of(
        kind, tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=3,
        privacy={"noise_multiplier": 0.0, "max_grad_norm": 0.5},
    )  # fmt: skip
    compared = Compared(trainer, C=0.5)
    trainer.train()
    assert len(compared.sizes) == 3
    assert max(compared.sizes) > 2


def test_epsilon_is_logged_and_the_loss_is_not(tmp_path):
    trainer = trainer_of("gpt2", tmp_path, save_strategy="steps", save_steps=3)
    output = trainer.train()
    account = RDPAccountant()
    logs = [entry for entry in trainer.state.log_history if "learning_rate" in entry]
    assert len(logs) == 3
    for entry in logs:
        account.step(noise_multiplier=1.0, sample_rate=1 / STEPS_OF_AN_EPOCH)
        assert entry["epsilon"] == pytest.approx(account.get_epsilon(1e-5))
        assert entry["grad_norm"] > 0
    assert output.metrics["epsilon"] == trainer.privacy_statement().epsilon == logs[-1]["epsilon"]
    state = json.loads((tmp_path / "checkpoint-3/trainer_state.json").read_text())
    seen = [name for entry in state["log_history"] + [output.metrics] for name in entry]
    assert not {"loss", "train_loss", "total_flos"} & set(seen)
    assert state["total_flos"] == 0
    assert output.training_loss != output.training_loss  # not a number
    assert "nan" not in f"{output} {output.training_loss:.3f}"
    assert "training_loss=not shown: PrivacyArguments(log_unprotected=True)" in repr(output)


def test_what_is_not_covered_is_logged_if_asked_for(tmp_path):
    trainer = trainer_of(
        "gpt2", tmp_path, max_steps=1, include_num_input_tokens_seen=True,
        privacy={"log_unprotected": True},
    )  # fmt: skip
    output = trainer.train()
    entry = trainer.state.log_history[0]
    assert 3 < entry["loss"] < 5
    assert output.training_loss == entry["loss"]
    assert entry["num_input_tokens_seen"] > 0
    assert trainer.state.total_flos > 0


def test_evaluation_generation_and_early_stopping_in_between(tmp_path):
    lengths = []

    class Generates(transformers.TrainerCallback):
        def on_evaluate(self, *_, model, **__):
            ids = torch.tensor([[2, 3, 4]])
            found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2,
                                   do_sample=False, pad_token_id=0)  # fmt: skip
            lengths.append(found.shape[1])

    stopping = transformers.EarlyStoppingCallback(early_stopping_patience=1)
    trainer = trainer_of(
        "gpt2", tmp_path, max_steps=6, eval_strategy="steps", eval_steps=1, save_strategy="steps",
        save_steps=1, load_best_model_at_end=True, learning_rate=0.0, save_total_limit=1,
        trainer={"eval_dataset": samples_of("gpt2", 4), "callbacks": [Generates(), stopping]},
    )  # fmt: skip
    trainer.train()
    assert trainer.privacy_statement().steps == 2
    assert len(lengths) == 2
    assert set(lengths) <= {4, 5}
    expected = language_model("gpt2").eval()(**collated(samples_of("gpt2", 4))).loss.item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_bfloat16(tmp_path):
    """The network computes in bfloat16; parameters, sums and noise are float32."""
    seen = []
    trainer = trainer_of("gpt2", tmp_path, bf16=True, max_steps=2)
    trainer.model.transformer.h[0].mlp.register_forward_hook(
        lambda module, args, output: seen.append(output.dtype)
    )
    trainer.train()
    assert seen[-1] == torch.bfloat16  # the first ones are those of a look at padding
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    del seen[:]
    trainer.evaluate(samples_of("gpt2", 4))
    assert set(seen) == {torch.bfloat16}


def per_sample(outputs, labels, num_items_in_batch=None):
    return F.cross_entropy(outputs.logits, labels, reduction="none", label_smoothing=0.1)


def test_a_loss_of_the_users_own(tmp_path):
    trainer = trainer_of(
        "bert", tmp_path, eval_strategy="steps", eval_steps=3,
        trainer={"compute_loss_func": per_sample, "eval_dataset": samples_of("bert", 4)},
    )  # fmt: skip
    trainer.train()
    assert trainer.privacy_statement().steps == 3
    assert any("eval_loss" in entry for entry in trainer.state.log_history)


def test_a_loss_that_averages_over_the_batch_is_refused(tmp_path):
    def mean(*arguments, **options):
        return per_sample(*arguments, **options).mean()

    trainer = trainer_of("bert", tmp_path, trainer={"compute_loss_func": mean})
    with pytest.raises(ValueError, match=r"must return one (a|per) sample"):
        trainer.train()


def test_compute_loss_of_a_subclass(tmp_path):
    from dp_clipping.integrations.transformers import PrivateTrainer
    from tests.dp_clipping.integrations.conftest import arguments, privacy

    class Own(PrivateTrainer):
        reduction = None

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            logits = model(**inputs).logits
            if self.reduction:
                return F.cross_entropy(logits, labels, reduction=self.reduction)
            loss = self.criterion(logits, labels)
            assert isinstance(loss, PrivateLoss)
            return loss

    def made():
        return Own(
            model=language_model("bert"), args=arguments(tmp_path), privacy=privacy(),
            train_dataset=samples_of("bert", 24), data_collator=collated,
        )  # fmt: skip

    trainer = made()
    trainer.train()
    assert trainer.privacy_statement().steps == 3
    for Own.reduction in ("mean", "none"):
        with pytest.raises(
            ValueError, match=r"compute_loss_func=f, .* returns one loss per sample"
        ):
            made().train()


def test_a_search_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not covered by epsilon"):
        trainer_of("gpt2", tmp_path).hyperparameter_search()


def test_arguments_that_are_missing(tmp_path):
    from dp_clipping.integrations.transformers import PrivateTrainer
    from tests.dp_clipping.integrations.conftest import arguments, privacy

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([])

    with pytest.raises(ValueError, match="TrainingArguments"):
        PrivateTrainer(model=language_model("gpt2"), privacy=privacy())
    for wrong in (None, {"target_epsilon": 8.0}):
        with pytest.raises(TypeError, match=r"give privacy=PrivacyArguments\(target_epsilon=8"):
            PrivateTrainer(model=language_model("gpt2"), args=arguments(tmp_path), privacy=wrong)
    stream = trainer_of("gpt2", tmp_path, trainer={"train_dataset": Stream()})
    with pytest.raises(TypeError, match=r"no length, .* train_dataset=list\(train_dataset\)"):
        stream.train()
    for dataset, message in (
        (None, "train_dataset is missing"),
        ([], "train_dataset is empty"),
        ({"train": samples_of("gpt2", 4)}, r"train_dataset=datasets\['train'\]"),
    ):
        trainer = trainer_of("gpt2", tmp_path, trainer={"train_dataset": dataset})
        with pytest.raises(ValueError, match=message):
            trainer.train()
    with pytest.raises(TypeError, match=r"model=AutoModelForCausalLM.from_pretrained\('gpt2'\)"):
        trainer_of("gpt2", tmp_path, trainer={"model": "gpt2"})
    without = [{"input_ids": sample["input_ids"][:2]} for sample in samples_of("gpt2", 24)]
    trainer = trainer_of(
        "gpt2", tmp_path,
        trainer={"train_dataset": without, "data_collator": transformers.default_data_collator},
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"DataCollatorForLanguageModeling\(tokenizer, mlm=False"):
        trainer.train()
    assert Path(tmp_path).exists()
