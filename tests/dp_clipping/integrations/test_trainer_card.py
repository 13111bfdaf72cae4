"""Beside each model that a private Trainer saves is what its ε depends on."""

import json

import pytest

pytest.importorskip("accelerate")

from tests.dp_clipping.integrations.conftest import trainer_of


def steps_in(folder):
    """Returns the steps in privacy.json, after comparing it with the card's section."""
    file = json.loads((folder / "privacy.json").read_text())
    card = (folder / "README.md").read_text()
    assert card.count("## Differential privacy") == 1
    assert f"in {file['steps']} steps" in card
    assert f"ε = {file['epsilon']:.4g} at δ = {file['delta']:g}" in card
    return file["steps"]


def test_it_is_in_checkpoints_and_beside_the_model_and_in_the_card(tmp_path):
    trainer = trainer_of("gpt2", tmp_path, save_strategy="steps", save_steps=2)
    trainer.save_model(str(tmp_path / "before"))
    assert not (tmp_path / "before" / "privacy.json").exists()  # nothing is private yet
    trainer.train()
    assert steps_in(tmp_path / "checkpoint-2") == 2
    trainer.save_model()
    assert steps_in(tmp_path) == 3
    trainer.create_model_card(model_name="a model")
    text = (tmp_path / "README.md").read_text()
    assert "# a model" in text
    assert steps_in(tmp_path) == 3
