"""Private fine-tuning as a user meets it: ε, files, Ctrl-C and a resume, wrong options."""

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from ddp_by_hand.examples import finetune, finetune_options, finetune_run  # noqa: E402
from ddp_by_hand.measure.options import parse_options  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
TINY = [
    "--device", "cpu", "--epochs", "2", "--batch-size", "8", "--max-physical-batch-size", "4",
    "--length", "12", "--save-every", "2", "--report-every", "1", "--new-tokens", "3",
]  # fmt: skip


@pytest.fixture
def table(tmp_path) -> Path:
    rows = [f"note {i} of ward {i % 3}" for i in range(36)]
    (tmp_path / "notes.csv").write_text(
        "id,note\n" + "".join(f"{i},{r}\n" for i, r in enumerate(rows))
    )
    (tmp_path / "notes.jsonl").write_text("".join(json.dumps({"note": r}) + "\n" for r in rows))
    return tmp_path / "notes.csv"


def options(table: Path, folder: Path, *more: str) -> list[str]:
    return [*TINY, "--data", str(table), "--column", "note", "--output-dir", str(folder), *more]


def parsed(words: list[str]) -> finetune_options.Options:
    return parse_options(finetune_options.Options, finetune_options.with_config(words))


def weights(folder: Path) -> bytes:
    return (folder / "model/model.safetensors").read_bytes()


def test_a_run_says_what_it_spends_and_resumes_bit_for_bit(table, tmp_path, capsys, monkeypatch):
    whole, again = tmp_path / "whole", tmp_path / "again"
    assert finetune.main(options(table, whole)) == 0
    out = capsys.readouterr().out
    assert out.index("before: 'the patient ") < out.index("step    8 of 8   epsilon 7.")
    assert out.index("step    1 of 8   epsilon") < out.index("after: 'the patient ")
    assert "not covered by epsilon: loss" in out
    assert "the text is not meant to be good" in out
    statement = json.loads((whole / "privacy.json").read_text())
    assert 7 < statement["epsilon"] <= 8
    assert statement["delta"] == pytest.approx(32**-1.1)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(whole / "model")
    assert type(loaded).__name__ == "GPT2LMHeadModel"

    shutil.copytree(whole, again)
    shutil.copytree(f"{whole}.keys", f"{again}.keys")
    shutil.rmtree(again / "model")
    shutil.rmtree(again / "checkpoint-8")
    assert finetune.main(options(table, again, "--resume")) == 0
    assert "step    7 of 8" in capsys.readouterr().out
    assert weights(again) == weights(whole)

    assert finetune.main(options(table, whole)) == 2
    assert "add --resume to continue it" in capsys.readouterr().err
    assert finetune.main(options(table, whole, "--resume", "--epsilon", "2")) == 2
    assert "--resume: --epsilon was 8.0 and is 2.0: give the same" in capsys.readouterr().err


def test_ctrl_c_saves_and_says_how_to_go_on(table, tmp_path, capsys, monkeypatch):
    jsonl, steps = table.with_suffix(".jsonl"), []

    def interrupt(progress, args, state, control, **_):
        steps.append(state.global_step)
        if state.global_step == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(finetune_run.Progress, "on_step_begin", interrupt)
    given = options(jsonl, tmp_path / "run", "--train", "lora", "--model", "llama")
    before = signal.getsignal(signal.SIGINT)
    assert finetune.main(given) == 130
    assert signal.getsignal(signal.SIGINT) is before
    out = capsys.readouterr().out
    again = out.rstrip().splitlines()[-1].split()
    assert again[:3] == ["python", "-m", "ddp_by_hand.examples.finetune"]
    assert parsed(again[3:]) == parsed([*given, "--resume"])
    assert (tmp_path / "run/checkpoint-3").is_dir()
    monkeypatch.undo()
    assert finetune.main([*given, "--resume"]) == 0
    assert "step    4 of 8" in capsys.readouterr().out
    adapters = tmp_path / "run/model/adapter_model.safetensors"
    assert adapters.stat().st_size < 200_000
    assert steps == [0, 1, 2]


@pytest.mark.slow
def test_a_saved_model_and_a_file_of_options(table, tmp_path, capsys):
    config = transformers.GPT2Config(
        vocab_size=257, n_positions=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=256,
        eos_token_id=256,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "saved")
    file = tmp_path / "run.toml"
    file.write_text(f'model = "{tmp_path}/saved"\nepsilon = 4.0\nepochs = 1\nprompt = "no"\n')
    found = parsed([f"--config={file}", "--epsilon", "2"])
    assert (found.model, found.epsilon, found.epochs) == (f"{tmp_path}/saved", 2.0, 1)
    torch.manual_seed(0)
    assert finetune.main(["--config", str(file), *options(table, tmp_path / "run")]) == 0
    assert json.loads((tmp_path / "run/privacy.json").read_text())["epsilon"] <= 4
    assert "before: 'no" in capsys.readouterr().out


def test_rows_are_read_from_a_list_and_made_ones_are_the_same_again(tmp_path):
    rows = [{"note": f"row {i}"} for i in range(20)]
    (tmp_path / "notes.json").write_text(json.dumps(rows, indent=1))
    expected = [row["note"] for row in rows]
    assert finetune_run.read_rows(str(tmp_path / "notes.json"), "note") == expected
    rows = finetune_run.make_rows(50)
    assert rows == finetune_run.make_rows(50)
    assert len(set(rows)) > 30
    tokens = finetune_run.Bytes()
    assert tokens.decode(tokens.encode(rows[0])) == rows[0]
