"""Padding that changes the loss of a sample is refused; what an attention mask hides is not."""

import pytest
import torch

from tests.dp_clipping.integrations.conftest import trainer_of
from tests.support.language_models import collated


def on_the_left(samples):
    """Positions then count from the left end of the longest sample."""
    reverse = [{name: x.flip(0) if x.dim() else x for name, x in s.items()} for s in samples]
    return {name: x.flip(1) if x.dim() > 1 else x for name, x in collated(reverse).items()}


def without_mask(samples):
    return {name: x for name, x in collated(samples).items() if name != "attention_mask"}


def sorted_by_length(samples):
    return collated(sorted(samples, key=lambda sample: len(sample["input_ids"])))


def masked_at_random(samples):
    batch = collated(samples)
    hidden = (torch.rand(batch["input_ids"].shape) < 0.5) & (batch["attention_mask"] > 0)
    return batch | {"input_ids": batch["input_ids"].masked_fill(hidden, 1)}


def train(kind, collator, tmp_path, **trainer):
    made = trainer_of(
        kind, tmp_path, trainer={"data_collator": collator, **trainer},
        privacy={"options": {"noise_generator": torch.Generator().manual_seed(3)}},
        per_device_train_batch_size=8, max_steps=2,
    )  # fmt: skip
    try:
        made.train()
    except ValueError:
        assert made.engine.accountant.history == []  # before the first step
        raise


@pytest.mark.parametrize("collator", [sorted_by_length, masked_at_random])
def test_other_orders_and_random_masks(collator, tmp_path):
    train("bert", collator, tmp_path)


def test_causal_attention_sees_no_padding_without_a_mask(tmp_path):
    train("gpt2", without_mask, tmp_path)


@pytest.mark.parametrize(
    ("kind", "collator"), [("gpt2", on_the_left), ("bert", without_mask)], ids=["left", "no mask"]
)
def test_padding_that_is_seen(kind, collator, tmp_path):
    with pytest.raises(ValueError, match=r"the gradient of a sample changes by .* fixed length"):
        train(kind, collator, tmp_path)


def test_a_loss_of_the_user_s(tmp_path):
    def loss(outputs, labels, num_items_in_batch=None):
        return outputs.logits.logsumexp(-1).mean(1)

    with pytest.raises(ValueError, match="uses what the network returns for padding"):
        train("gpt2", collated, tmp_path, compute_loss_func=loss)
