"""Private adapters that write records: ε, empty batches, files, Ctrl-C and a resume."""

import shutil

import pytest

for needed in ("accelerate", "transformers", "peft"):
    pytest.importorskip(needed)

from ddp_by_hand.examples import synthetic_text  # noqa: E402
from ddp_by_hand.examples.functions_table import Row, independent_epsilon  # noqa: E402
from ddp_by_hand.examples.synthetic_text import Options  # noqa: E402
from tests.support.wrong_input import is_one_line  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
SMALL = [
    "--entities", "24", "--batch-size", "4", "--steps", "4", "--save-every", "2",
    "--public-steps", "2", "--records", "3",
]  # fmt: skip
VALID = '{"name":"f","args":1,"lines":2,"doc":0}'


@pytest.mark.slow
def test_a_run_states_epsilon_and_resumes_bit_for_bit(tmp_path, capsys, monkeypatch):
    whole, again = tmp_path / "whole", tmp_path / "again"
    monkeypatch.setattr(synthetic_text, "generate", lambda *_: [VALID, VALID[:9], '{"name":1}'])
    assert synthetic_text.main([*SMALL, "--output-dir", str(whole)]) == 0
    out = capsys.readouterr().out
    assert f"\n{VALID}\n1 of 3 records are valid\n" in f"\n{out}"
    assert "of which a step takes 1\n" in out
    own = float(out.split("(epsilon, delta) = (")[1].split(",")[0])
    other = float(out.split("by dp-accounting alone:")[1].split()[0])
    assert own == pytest.approx(other, rel=0.01)
    assert 7.8 < own <= 8
    assert (whole / "records.jsonl").read_text() == f"{VALID}\n"

    shutil.copytree(whole, again)
    shutil.copytree(f"{whole}.keys", f"{again}.keys")
    shutil.rmtree(again / "adapters")
    shutil.rmtree(again / "checkpoint-4")
    assert synthetic_text.main([*SMALL, "--output-dir", str(again), "--resume"]) == 0
    adapters = [folder / "adapters/adapter_model.safetensors" for folder in (whole, again)]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()
    steps = ["--steps", "5", "--resume"]
    at = ["--output-dir", str(whole)]
    is_one_line(synthetic_text.main, [*SMALL, *at, *steps], "--steps was 4 and is 5", capsys)


def test_steps_without_any_entity_are_taken_and_counted(tmp_path):
    options = Options(entities=3, batch_size=2, steps=3, public_steps=1, output_dir=tmp_path)
    entities = {f"{i}": [Row("f", i, 1, 0)] * (i + 1) for i in range(3)}
    own = {"sample_rate": 1e-12, "target_epsilon": None, "noise_multiplier": 1.0}
    trainer = synthetic_text.make_trainer(
        synthetic_text.make_base(options), entities, options, **own
    )
    before = [p.clone() for p in trainer.model.parameters() if p.requires_grad]
    trainer.train()
    assert trainer.privacy_statement().steps == 3
    epsilon = independent_epsilon(1.0, 1e-12, 3, 1e-4)
    assert trainer.engine.get_epsilon(1e-4) == pytest.approx(epsilon, abs=1e-3)
    after = [p for p in trainer.model.parameters() if p.requires_grad]
    assert all((a != b).any() for a, b in zip(before, after, strict=True))  # by noise


def test_records_are_what_the_model_writes_after_a_brace():
    found = synthetic_text.generate(synthetic_text.make_base(Options(public_steps=1)), 4)
    assert len(found) == 4
    assert all(one[0] == "{" and 1 < len(one) <= synthetic_text.LENGTH for one in found)
