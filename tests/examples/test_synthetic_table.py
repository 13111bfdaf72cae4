"""A private auto-regressive model of a table: its parts, ε of both halves of the data, a resume."""

import shutil
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ddp_by_hand.examples import functions_table as table
from ddp_by_hand.examples import synthetic_table
from ddp_by_hand.examples.synthetic_table import MOST, ROWS, SIZES, Options, TableModel
from ddp_by_hand.measure.command_line import BadInput
from dp_clipping import BatchMemoryManager, PrivacyEngine

SMALL = [
    "--entities", "60", "--epochs", "2", "--batch-size", "2", "--noise", "2", "--loss-noise", "1",
]  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore")


def some_entities(count: int) -> torch.Tensor:
    """Returns entities of 1 to ROWS rows, [count, ROWS, columns]."""
    values = torch.stack([torch.randint(size, (count, ROWS)) for size in SIZES], 2)
    there = torch.arange(ROWS) < 1 + torch.arange(count)[:, None] % ROWS
    return values.where(there[..., None], -1)


def test_the_table_is_read_and_rows_are_values_and_text(tmp_path, monkeypatch):
    (tmp_path / "one.py").write_text(
        "class A:\\n    def __eq__(self, x):\\n        'Says.'\\n\\n    def _f(): pass\\n"
        "class B:\\n    x = 1\\nclass C:\\n    def g(a, b, c, d, e, f): pass\\n".replace(
            "\\n", "\n"
        )
    )
    (tmp_path / "two.py").write_text("an example of a mistake (")
    monkeypatch.setattr(table.sysconfig, "get_path", lambda _: str(tmp_path))
    found = table.read_entities(2)
    assert found == {
        "one.py: A": [("__eq__", 2, 2, 1), ("_f", 0, 1, 0)], "one.py: C": [("g", 6, 1, 0)],
    }  # fmt: skip
    with pytest.raises(BadInput, match="3 entities are asked for, and the table has 2"):
        table.read_entities(3)
    values = table.to_values(found["one.py: A"], 3)
    assert values.tolist() == [[0, 2, 0, 1, 0], [1, 0, 0, 0, 1], [-1] * 5]
    assert table.to_words(values).splitlines()[1:] == [
        "    name __special__, args 2, lines 1-2, doc yes",
        "    name _private, args 0, lines 1-2, doc no",
    ]
    row = found["one.py: C"][0]
    assert table.Row.from_text(row.to_text()) == row
    assert table.Row.from_text('{"name":"g","args":"6","lines":1,"doc":0}') is None
    assert table.Row.from_text('{"name":"g"') is None
    assert table.Row.from_text("[1]") is None


def test_a_column_is_predicted_from_what_is_before_it():
    model, values = TableModel().eval(), some_entities(4).clamp(min=0)
    before = model(values)
    for row, column in ((0, 0), (2, 3), (ROWS - 1, len(SIZES) - 1)):
        other = values.clone()
        other[:, row, column] = (values[:, row, column] + 1) % SIZES[column]
        for j, (a, b) in enumerate(zip(before, model(other), strict=True)):
            same = row + (j <= column)
            assert torch.equal(a[:, :same], b[:, :same])
            assert j <= column or not torch.equal(a[:, row], b[:, row])
        if row < ROWS - 1:
            assert not torch.equal(before[0][:, row + 1], model(other)[0][:, row + 1])


def test_the_loss_of_an_entity_is_its_own_and_another_one_is_refused():
    values = some_entities(8)
    scores = TableModel()(values)
    whole = sum(  # entity 3 has 4 rows
        -s[3, t].log_softmax(0)[values[3, t, j]] for j, s in enumerate(scores) for t in range(4)
    )
    torch.testing.assert_close(synthetic_table.losses(scores, values)[3], whole / ROWS)

    def of_the_batch(scores, values):  # divides by the rows of all entities
        own = (values[..., 0] >= 0).sum(1)
        return synthetic_table.losses(scores, values) * own / own.sum()

    model = TableModel()
    model, _, criterion, _ = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0,
        criterion=of_the_batch, data_loader=DataLoader(TensorDataset(values), batch_size=4),
        max_grad_norm=1.0, wrap_model=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match="depend"):
        criterion(model(values), values).backward()


def test_a_held_out_entity_changes_a_loss_by_what_its_noise_hides():
    model, held_out = TableModel(), some_entities(12)
    with torch.no_grad():
        model.heads[0][2].bias[0] = 1e3  # some entities have a huge loss
    quiet = Options(entities=60, loss_noise=0.0)
    whole = synthetic_table.noisy_loss(model, held_out, quiet)
    without = [
        synthetic_table.noisy_loss(model, torch.cat([held_out[:i], held_out[i + 1 :]]), quiet)
        for i in range(12)
    ]
    changes = torch.tensor([abs(whole - one) * 60 / 5 for one in without])
    assert changes.max() == pytest.approx(MOST, rel=1e-4)
    torch.manual_seed(1)
    noisy = synthetic_table.noisy_loss(model, held_out, Options(entities=60, loss_noise=3.0))
    torch.manual_seed(1)
    assert (noisy - whole) * 60 / 5 == pytest.approx(3.0 * MOST * float(torch.randn(())), rel=1e-3)


def test_an_entity_ends_with_its_last_row():
    values = synthetic_table.generate(TableModel(), 32)
    assert values.shape == (32, ROWS, len(SIZES))
    assert (values < torch.tensor(SIZES)).all()
    rows = (values[..., 0] >= 0).sum(1)
    assert 1 <= rows.min() < rows.max()
    for entity, count in zip(values, rows.tolist(), strict=True):
        assert (entity[:count] >= 0).all()
        assert (entity[count:] == -1).all()
        assert (entity[: count - 1, -1] == 0).all()
        assert count == ROWS or entity[count - 1, -1] == 1


def saved(path: Path) -> dict:
    found = torch.load(path, weights_only=True)
    return {"weights": found["module_state_dict"], **found["at"]}


def test_a_run_has_empty_batches_states_epsilon_and_goes_on_where_it_was(
    tmp_path, capsys, monkeypatch
):
    whole, again = tmp_path / "whole/epoch.pt", tmp_path / "again/epoch.pt"
    save, sizes = PrivacyEngine.save_checkpoint, []

    def copied(engine, **given):
        save(engine, **given)
        if given["checkpoint_dict"]["at"]["epoch"] == 1:
            shutil.copytree(whole.parent, again.parent)

    class Recorded(BatchMemoryManager):
        def __enter__(self):
            return (sizes.append(len(batch[0])) or batch for batch in super().__enter__())

    monkeypatch.setattr(PrivacyEngine, "save_checkpoint", copied)
    monkeypatch.setattr(synthetic_table, "BatchMemoryManager", Recorded)
    assert synthetic_table.main([*SMALL, "--checkpoint", str(whole)]) == 0
    assert len(sizes) == 48
    assert 0 in sizes
    out = capsys.readouterr().out
    assert out.count("a class with\n    name ") == 4
    assert "not covered by epsilon) / synthetic\n    name  __special__ " in out
    own = float(out.split("(epsilon, delta) = (")[1].split(",")[0])
    other = float(out.split("by dp-accounting alone:")[1].split()[0])
    assert own == pytest.approx(other, rel=0.01)
    assert "steps taken:            48" in out
    both = float(out.split("with validation losses:")[1])
    assert both == pytest.approx(table.independent_epsilon(1.0, 1, 2, 1e-4), abs=1e-3)
    assert both > own

    monkeypatch.setattr(PrivacyEngine, "save_checkpoint", save)
    assert synthetic_table.main([*SMALL, "--checkpoint", str(again), "--resume"]) == 0
    assert "epoch  1" not in capsys.readouterr().out
    a, b = saved(whole), saved(again)
    assert a["loss"] == b["loss"]
    assert a["epoch"] == b["epoch"] == 2
    assert all(torch.equal(x, b["weights"][name]) for name, x in a["weights"].items())

    arguments = [*SMALL, "--checkpoint", str(again), "--resume", "--epochs", "9", "--epsilon"]
    assert synthetic_table.main([*arguments, str(both + 0.1)]) == 0
    assert "one more would spend more than --epsilon" in capsys.readouterr().out
    assert saved(again)["epoch"] == 2
