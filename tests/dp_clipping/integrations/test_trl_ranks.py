"""TRL's private trainers on ranks take the steps of one process, and one rank writes files."""

import functools
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("peft")

from ddp import wrap

STEPS = 2
CASES = {
    "sft": ("sft", True, {}),
    "dpo": ("dpo", True, {}),
    "dpo with a reference model": ("dpo", False, {}),
    "dpo with precomputed reference": ("dpo", True, {"precompute_ref_log_probs": True}),
}


def made(context, folder: Path, case: str):
    from tests.dp_clipping.integrations import test_trl as alone
    from tests.dp_clipping.integrations.conftest import as_launched

    kind, is_adapted, options = CASES[case]
    ranks = as_launched(context)
    data = None
    if (saved := folder.parent / "pairs").exists():
        data = alone.datasets.load_from_disk(str(saved))
    parts = {"data_parallel": functools.partial(wrap, "ddp_bucketed")}
    trainer = getattr(alone, kind)(
        folder, data, per_device_train_batch_size=4 // ranks, gradient_accumulation_steps=2,
        max_steps=STEPS, optim="sgd", learning_rate=1.0, save_strategy="steps", save_steps=1,
        ddp_backend=None if ranks == 1 else "gloo",
        privacy={
            "options": {"noise_generator": torch.Generator().manual_seed(7)},
            "key_folder": str(folder.parent / "keys"),
        },
        **(alone.adapter(parts) if is_adapted else {"trainer": parts}), **options,
    )  # fmt: skip
    assert trainer.args.world_size == ranks
    return trainer


def weights(trainer) -> dict:
    """The trained parameters."""
    of = trainer.model.named_parameters()
    return {name: p.detach().clone() for name, p in of if p.requires_grad}


def trained(folder: Path, case: str) -> tuple:
    """Weights, and what is sampled, after steps in one process that are those of single pairs."""
    from tests.dp_clipping.integrations import test_trl as alone

    trainer = made(None, folder, case)
    compared = alone.Compared(trainer, alone.plain(trainer))
    trainer.train()
    assert len(compared.sizes) == STEPS
    assert max(compared.norms) > compared.C, "one was clipped"
    statement = trainer.privacy_statement()
    return weights(trainer), (statement.steps, statement.sample_rate)


def trained_and_resumed(context, folder: Path, case: str) -> tuple:
    """The same on a rank, which has a folder of its own, and the files that it has written."""
    own = folder / f"rank{context.rank}"
    trainer = made(context, own, case)
    trainer.train()
    statement, found = trainer.privacy_statement(), weights(trainer)
    resumed = made(context, own, case)
    resumed.train(resume_from_checkpoint=str(folder / "rank0/checkpoint-1"))
    for name, x in weights(resumed).items():
        torch.testing.assert_close(x, found[name], rtol=1e-6, atol=1e-8, msg=name)
    files = sorted(str(f.relative_to(own)) for f in own.rglob("*") if f.is_file())
    of_numpy = {name: x.numpy() for name, x in found.items()}
    return of_numpy, (statement.steps, statement.sample_rate), files


def refused_in_memory(context, folder: Path, case: str) -> None:
    with pytest.raises(ValueError, match=r"several ranks: .*datasets\.load_from_disk"):
        made(context, folder / "refused", case)


@pytest.mark.filterwarnings("ignore:noise and sampling come from a fixed seed")
@pytest.mark.slow  # each rank imports for seconds
@pytest.mark.parametrize("case", CASES)
def test_ranks_are_one_process(case, cpu_ranks, tmp_path):
    if "precomputed" in case:
        from tests.dp_clipping.integrations.test_trl import preferences

        cpu_ranks.run(cpu_ranks.size, refused_in_memory, tmp_path, case)
        preferences(16).save_to_disk(str(tmp_path / "pairs"))
    expected, counted = trained(tmp_path / "alone", case)
    of_ranks = cpu_ranks.run(cpu_ranks.size, trained_and_resumed, tmp_path, case)
    for found, own, _ in of_ranks:
        assert own == counted
        for name, x in expected.items():
            torch.testing.assert_close(torch.from_numpy(found[name]), x, msg=name)
    first, *others = (files for *_, files in of_ranks)
    assert {"checkpoint-2/privacy.pt", "checkpoint-2/privacy.json"} <= set(first)
    for rank, files in enumerate(others, 1):  # as of the Trainer: a rank's own random states
        assert {Path(file).name for file in files} == {f"rng_state_{rank}.pth"}
