"""The LightningModule of docs/lightning.md on a real Trainer, and what a Trainer must not do."""

import os
import re
from functools import partialmethod
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L = pytest.importorskip("pytorch_lightning")
from pytorch_lightning.callbacks import ModelCheckpoint  # noqa: E402
from pytorch_lightning.strategies import DDPStrategy  # noqa: E402

from dp_clipping import BatchMemoryManager, PrivacyEngine  # noqa: E402
from tests.dp_clipping.integrations.conftest import as_launched  # noqa: E402

DOCUMENT = Path(__file__).parents[3] / "docs/lightning.md"
BLOCKS = re.findall(r"^```python\n([^`]*)^```", DOCUMENT.read_text(), re.MULTILINE)
EPOCH = 8  # batches
pytestmark = pytest.mark.filterwarnings("ignore")


def documented() -> dict:
    """The names of the documents' class, and of its other methods."""
    names = {"BatchMemoryManager": BatchMemoryManager, "__name__": __name__}
    for block in BLOCKS:
        if "trainer.fit" not in block and "RanksOnly" not in block:
            exec(block, names)
    return names


NAMES = documented()
Documented = NAMES["PrivateClassifier"]


class Manual(Documented):
    training_step = NAMES["training_step"]

    def __init__(self, *args):
        super().__init__(*args)
        self.automatic_optimization = False


class Split(Documented):
    train_dataloader = NAMES["train_dataloader"]


def network(dropout: float = 0.2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, 2))


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(64, 20, generator=draw), torch.randint(2, (64,), generator=draw)
    )


def trainer_in(folder, **options):
    (Path(folder) / "keys").mkdir(exist_ok=True)
    given = dict(
        max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=str(folder),
    )  # fmt: skip
    return L.Trainer(**given | options)


def steps_of(private) -> int:
    return private.engine.privacy_statement(1e-5).steps


def kept(private) -> dict:
    return {name: x.clone() for name, x in private.state_dict().items()}


@pytest.mark.parametrize("kind", [Documented, Manual])
def test_a_step_is_a_poisson_batch(kind, tmp_path):
    private = kind(network(), data())
    before = kept(private)
    trainer = trainer_in(tmp_path)
    trainer.fit(private, val_dataloaders=DataLoader(data(), batch_size=16))
    assert steps_of(private) == trainer.global_step == 2 * EPOCH
    assert list(private.state_dict()) == list(before)  # the network's own names
    assert all(not torch.equal(x, before[name]) for name, x in kept(private).items())
    assert "val_loss" in trainer.callback_metrics


def test_both_ways_are_the_plain_loop(tmp_path, monkeypatch):
    """Automatic and manual optimisation leave the weights of a loop written by hand."""
    seed(monkeypatch)
    found = []
    for kind in (Documented, Manual):
        private = kind(network(dropout=0.0), data())
        trainer_in(tmp_path, max_epochs=1).fit(private)
        found.append(kept(private))
    alone = Documented(network(dropout=0.0), data())
    alone.trainer = trainer_in(tmp_path)
    alone.setup("fit")
    alone.train()
    for x, y in alone.loader:
        alone.criterion(alone.network(x), y).backward()
        alone.optimizer.step()
        alone.optimizer.zero_grad()
    for name, x in kept(alone).items():
        assert torch.equal(x, found[0][name])
        assert torch.equal(x, found[1][name])


def seed(monkeypatch) -> None:
    """Fixes noise and samples."""
    make = PrivacyEngine.make_private

    def fixed(self, **options):
        return make(self, **options, noise_generator=torch.Generator().manual_seed(3))

    monkeypatch.setattr(PrivacyEngine, "make_private", fixed)


def test_microbatches(tmp_path):
    private = Split(network(), data())
    trainer = trainer_in(tmp_path, reload_dataloaders_every_n_epochs=1)
    trainer.fit(private)
    assert steps_of(private) == 2 * EPOCH < trainer.global_step


@pytest.mark.parametrize(
    ("saved", "sampling"),
    [(3, "poisson"), (EPOCH, "poisson"), (EPOCH + 3, "poisson"), (EPOCH + 3, "cyclic")],
)
def test_a_resumed_run_is_the_same(saved, sampling, tmp_path, monkeypatch):
    """Bit for bit, with dropout; the key is not in the folder of the checkpoints."""
    with_sampling = partialmethod(PrivacyEngine.make_private, sampling=sampling)
    monkeypatch.setattr(PrivacyEngine, "make_private", with_sampling)
    private = Documented(network(), data())
    files = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=saved, save_top_k=-1)
    trainer_in(tmp_path, enable_checkpointing=True, callbacks=[files]).fit(private)
    resumed = Documented(network(), data())
    path = tmp_path / f"step={saved}.ckpt"
    trainer_in(tmp_path).fit(resumed, ckpt_path=str(path))
    assert steps_of(resumed) == steps_of(private) == 2 * EPOCH
    for name, x in kept(resumed).items():
        assert torch.equal(x, private.state_dict()[name]), name
    key = private.engine._runs[0].keys.master
    for file in (path, tmp_path / f"privacy-{saved}.pt"):
        assert key not in file.read_bytes()
        assert key.hex().encode() not in file.read_bytes()
    assert key.hex() in (tmp_path / f"keys/privacy-{saved}.pt.key").read_text()


def test_a_resumed_run_without_its_account_is_refused(tmp_path):
    class Forgetful(Documented):
        def on_save_checkpoint(self, checkpoint):
            pass

        def on_load_checkpoint(self, checkpoint):
            pass

    files = ModelCheckpoint(tmp_path, "last")
    trainer = trainer_in(tmp_path, max_epochs=1, enable_checkpointing=True, callbacks=[files])
    trainer.fit(Forgetful(network(), data()))
    private = Forgetful(network(), data())
    with pytest.raises(RuntimeError, match=r"counted 0.*engine\.load_checkpoint\(\.\.\)"):
        trainer_in(tmp_path).fit(private, ckpt_path=str(tmp_path / "last.ckpt"))
    assert steps_of(private) == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"gradient_clip_val": 1e6}, "noise is scaled to the sum as it was"),
        ({"accumulate_grad_batches": 2}, r"accumulate_grad_batches=2\).*BatchMemoryManager"),
        ({"precision": "bf16-true"}, "convert the network before make_private"),
    ],
    ids=["clipping", "accumulation", "bf16-true"],
)
def test_options_that_are_refused(options, says, tmp_path):
    private = Documented(network(), data())
    with pytest.raises(RuntimeError, match=says):
        trainer_in(tmp_path, **options).fit(private)
    assert steps_of(private) == 0


class RanksOnly(DDPStrategy):
    def configure_ddp(self):
        pass


def on_ranks(context, folder: str, strategy, path: str | None = None, **options):
    as_launched(context)
    os.environ.update(LOCAL_WORLD_SIZE="4", GROUP_RANK="0", TORCHELASTIC_RUN_ID="none")
    private = Documented(network(), data())
    given = {"use_distributed_sampler": False, "devices": 4, **options}
    if strategy == "ranks":
        strategy = RanksOnly(process_group_backend="gloo")
    trainer = trainer_in(folder, strategy=strategy, **given)
    trainer.fit(private, ckpt_path=path)
    assert trainer.world_size == 4
    assert steps_of(private) == 2 * EPOCH
    return {name: x.numpy() for name, x in private.state_dict().items()}


def trained_on_ranks(context, folder: str):
    files = ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)
    return on_ranks(context, folder, "ranks", enable_checkpointing=True, callbacks=[files])


def resumed_on_ranks(context, folder: str):
    return on_ranks(context, folder, "ranks", f"{folder}/step=9.ckpt")


def refused_on_ranks(context, folder: str):
    with pytest.raises(RuntimeError, match=r"would wrap a private model.*ddp\.wrap"):
        on_ranks(context, folder, "ddp")
    with pytest.raises(TypeError, match=r"use_distributed_sampler=False"):
        on_ranks(context, folder, "ranks", use_distributed_sampler=True)


@pytest.mark.slow
def test_four_ranks(cpu_ranks, tmp_path):
    """They have the same weights, bit for bit, and after a resume but for the order of sums."""
    first, second, *_ = cpu_ranks.run(4, trained_on_ranks, str(tmp_path))
    again, *_ = cpu_ranks.run(4, resumed_on_ranks, str(tmp_path))
    start = network().state_dict()
    for name, x in first.items():
        assert (x == second[name]).all(), name
        torch.testing.assert_close(torch.from_numpy(again[name]), torch.from_numpy(x), msg=name)
        assert (x != start[name.removeprefix("network.")].numpy()).any(), name


@pytest.mark.slow  # each rank imports Lightning
def test_wrong_strategies_on_four_ranks(cpu_ranks, tmp_path):
    cpu_ranks.run(4, refused_on_ranks, str(tmp_path))
