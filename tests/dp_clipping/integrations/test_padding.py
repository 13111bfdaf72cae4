"""Padding that changes the loss of a sample is refused; what an attention mask hides is not."""

import pytest
import torch

from dp_clipping.integrations.padding import refuse_padding
from tests.dp_clipping.integrations.conftest import trainer_of
from tests.support.language_models import collated, language_model, samples_of


def check(kind, collate, samples=None):
    model = language_model(kind).eval()
    samples = samples_of(kind, 8) if samples is None else samples
    refuse_padding(samples, collate, lambda b: float(model(**b).loss), torch.float32)


def on_the_left(samples):
    """Positions then count from the left end of the longest sample."""
    reverse = [{name: x.flip(0) if x.dim() else x for name, x in s.items()} for s in samples]
    return {name: x.flip(1) if x.dim() > 1 else x for name, x in collated(reverse).items()}


def without_mask(samples):
    return {name: x for name, x in collated(samples).items() if name != "attention_mask"}


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "t5"])
def test_a_mask_and_padding_on_the_right(kind):
    check(kind, collated)


def test_positions_that_count_from_the_left_end():
    with pytest.raises(ValueError, match=r"padded to the length of another one.*max_length"):
        check("gpt2", on_the_left)


def test_padding_that_is_attended_to():
    with pytest.raises(ValueError, match="who else is in the batch"):
        check("bert", without_mask)
    check("gpt2", without_mask)  # causal: no token sees those after it


def test_one_length_and_random_masks_are_not_compared():
    same = [sample for sample in samples_of("bert", 12) if len(sample["input_ids"]) == 3]
    check("bert", without_mask, same)

    def masked_at_random(samples):
        batch = without_mask(samples)
        batch["input_ids"] = torch.randint(2, 40, batch["input_ids"].shape)
        return batch

    check("bert", masked_at_random)


def test_a_trainer_refuses_it_before_the_first_step(tmp_path):
    trainer = trainer_of("gpt2", tmp_path, trainer={"data_collator": on_the_left})
    with pytest.raises(ValueError, match="let data_collator pad on the right"):
        trainer.train()
    assert trainer.engine.accountant.history == []
