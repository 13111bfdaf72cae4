"""A user or a document as the unit of privacy of a Trainer."""

import pytest

from tests.dp_clipping.integrations.conftest import Compared, trainer_of
from tests.support.turns import in_turn

USERS = [i // 3 if i < 12 else i - 8 for i in range(24)]  # 4 users of 3 samples, 12 of one


class Recording(Compared):
    """Keeps the units of all steps."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.seen = []

    def on_optimizer_step(self, *arguments, **options):
        super().on_optimizer_step(*arguments, **options)
        self.seen += self.units


UNITS = {  # of a Trainer, the largest unit of a step, and what is stated of it
    "all examples of a user": (
        {"examples_per_unit": 3, "unit_ids": USERS, "max_grad_norm": 0.5},
        "all examples with the same entry in unit_ids, at most 3",
    ),
    "one of a user": (
        {"examples_per_step": 1, "unit_ids": USERS, "max_grad_norm": 1.0},
        "all examples with the same entry in unit_ids, of which a step takes 1",
    ),
    "views of a sample": ({"views": 2, "max_grad_norm": 0.5}, "one example"),
}


@pytest.mark.parametrize(
    ("name", "mode"), in_turn(UNITS, ["ghost", "flash_bookkeeping", "per_sample"], fast=1)
)
def test_gradients_are_those_of_units(name, mode, tmp_path):
    """Also in microbatches: a unit is in one of them as a whole."""
    options, stated = UNITS[name]
    trainer = trainer_of(
        "gpt2", tmp_path, per_device_train_batch_size=6, max_steps=4,
        privacy={
            "noise_multiplier": 0.0, "sample_rate": 0.3, "steps": 4,
            "options": {"grad_sample_mode": mode}, **options,
        },
    )  # fmt: skip
    compared = Recording(trainer, options["max_grad_norm"])
    trainer.train()
    assert len(compared.seen) > 4
    for members in compared.seen:
        user = [i for i, user in enumerate(USERS) if user == USERS[members[0]]]
        assert members == user if "examples_per_unit" in options else len(members) == 1
    if "views" in options:
        assert sum(compared.sizes) == 2 * len(compared.seen)
        assert max(compared.sizes) > 6, "or no batch was split"
    assert trainer.privacy_statement().unit == stated
