"""A private Trainer on four ranks takes the steps of one process."""

import functools
import os

import pytest
import torch

pytest.importorskip("accelerate")

from ddp import wrap
from tests.support.language_models import language_model


def made(context, folder: str):
    from tests.dp_clipping.integrations.conftest import as_launched, trainer_of

    ranks = as_launched(context)
    trainer = trainer_of(
        "gpt2", folder, per_device_train_batch_size=4 // ranks, gradient_accumulation_steps=2,
        optim="sgd", save_strategy="steps", save_steps=2,
        ddp_backend=None if ranks == 1 else "gloo",
        privacy={
            "noise_multiplier": 0.0,
            "options": {"noise_generator": torch.Generator().manual_seed(7)},
        },
        trainer={"data_parallel": functools.partial(wrap, "ddp_bucketed")},
    )  # fmt: skip
    assert trainer.args.world_size == ranks
    return trainer


def trained(context, folder: str) -> tuple:
    """Weights, steps and sample rate, after three noiseless steps."""
    trainer = made(context, folder)
    trainer.train()
    statement = trainer.privacy_statement()
    return trainer.model.state_dict(), statement.steps, statement.sample_rate


def trained_and_resumed(context, folder: str) -> tuple:
    state, steps, rate = trained(context, folder)
    trainer = made(context, folder)
    trainer.train(resume_from_checkpoint=os.path.join(folder, "checkpoint-2"))
    for name, x in trainer.model.state_dict().items():
        torch.testing.assert_close(x, state[name], rtol=1e-6, atol=1e-8, msg=name)
    return {name: x.numpy() for name, x in state.items()}, steps, rate


@pytest.mark.filterwarnings("ignore:noise and sampling come from a fixed seed")
def test_four_ranks_are_one_process(cpu_ranks, tmp_path):
    expected, steps, rate = trained(None, str(tmp_path / "alone"))
    start = language_model("gpt2").state_dict()
    assert any(not torch.equal(x, start[name]) for name, x in expected.items())
    of_ranks = cpu_ranks.run(4, trained_and_resumed, str(tmp_path / "ranks"))
    for found, *counted in of_ranks:
        assert counted == [steps, rate]
        for name, x in expected.items():
            torch.testing.assert_close(torch.from_numpy(found[name]), x, msg=name)
