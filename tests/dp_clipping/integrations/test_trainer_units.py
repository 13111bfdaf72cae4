"""A user or a document as the unit of privacy of a Trainer."""

from functools import partial

import pytest

from tests.dp_clipping.integrations.conftest import Compared, trainer_of
from tests.support.language_models import collated

USERS = [i // 3 if i < 12 else i - 8 for i in range(24)]  # 4 users of 3 samples, 12 of one


class Recording(Compared):
    """Keeps the units of all steps."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.seen = []

    def on_optimizer_step(self, *arguments, **options):
        super().on_optimizer_step(*arguments, **options)
        self.seen += self.units


@pytest.mark.parametrize("mode", ["per_sample", "ghost", "flash_bookkeeping"])
def test_gradients_are_those_of_units(mode, tmp_path):
    """Also in microbatches: a user is in one of them as a whole."""
    trainer = trainer_of(
        "gpt2", tmp_path, per_device_train_batch_size=6, max_steps=4,
        privacy={
            "noise_multiplier": 0.0, "max_grad_norm": 0.5, "examples_per_unit": 3,
            "unit_ids": USERS, "sample_rate": 0.3, "steps": 4,
            "options": {"grad_sample_mode": mode},
        },
    )  # fmt: skip
    compared = Recording(trainer, 0.5)
    trainer.train()
    assert len(compared.seen) > 4
    for members in compared.seen:
        assert members == [i for i, user in enumerate(USERS) if user == USERS[members[0]]]
    statement = trainer.privacy_statement()
    assert statement.unit == "all examples with the same entry in unit_ids, at most 3"


def test_gradients_are_those_of_samples_with_several_views(tmp_path):
    trainer = trainer_of(
        "gpt2", tmp_path, per_device_train_batch_size=6, max_steps=4,
        privacy={"noise_multiplier": 0.0, "max_grad_norm": 0.5, "views": 2, "sample_rate": 0.2,
                 "steps": 4},
    )  # fmt: skip
    compared = Recording(trainer, 0.5)
    trainer.train()
    assert all(len(members) == 1 for members in compared.seen)
    assert sum(compared.sizes) == 2 * len(compared.seen) > 8
    assert max(compared.sizes) > 6, "or no batch was split"


def test_a_step_draws_one_sample_of_a_user(tmp_path):
    trainer = trainer_of(
        "gpt2", tmp_path, per_device_train_batch_size=3, max_steps=4,
        privacy={
            "noise_multiplier": 0.0, "examples_per_step": 1, "unit_ids": USERS,
            "sample_rate": 0.3, "steps": 4,
        },
    )  # fmt: skip
    compared = Recording(trainer, 1.0)
    trainer.train()
    assert len(compared.seen) > 4
    assert all(len(members) == 1 for members in compared.seen)
    statement = trainer.privacy_statement()
    assert statement.unit == "all examples with the same entry in unit_ids, of which a step takes 1"


def test_microbatches_of_parts_of_units_are_refused(tmp_path):
    trainer = trainer_of("gpt2", tmp_path, privacy={"examples_per_unit": 3})
    with pytest.raises(ValueError, match=r"batch_size is 4, .* give 3 or 6"):
        trainer.train()


def sorted_by_length(samples):
    return collated(sorted(samples, key=lambda sample: len(sample["input_ids"])))


def test_a_collator_that_sorts_tears_units_apart(tmp_path):
    made = partial(
        trainer_of, "gpt2", per_device_train_batch_size=6, max_steps=4,
        privacy={"examples_per_unit": 3, "unit_ids": USERS, "sample_rate": 0.3, "steps": 4},
    )  # fmt: skip
    refusal = r"\(data_collator of a Trainer\) returns rows in another order.*do not sort them"
    with pytest.raises(ValueError, match=refusal):
        made(tmp_path / "sorted", trainer={"data_collator": sorted_by_length}).train()
    made(tmp_path / "not", trainer={"data_collator": collated}).train()
