"""`experiments.local_steps` on a tiny network: its table, its picture, and what it refuses."""

import re

from ddp_by_hand.experiments.local_steps import main, split
from ddp_by_hand.lm.data import open_data
from ddp_by_hand.measure.picture import read_picture

TINY = "--d-model 32 --num-layers 1 --batch-size 1 --context-length 8 --seeds 1 --ranks 2"


def test_it_trains_prints_and_draws(tmp_path, capsys):
    picture = tmp_path / "local_steps.png"
    command = [*TINY.split(), "--steps", "8", "--every", "2", "4", "--output", str(picture)]
    assert main(command) == 0
    parts = re.findall(r"^(\w+(?:, every \d)?) .* ([\d.]+)% ", capsys.readouterr().out, re.M)
    assert parts == [
        ("ddp_bucketed", "100.00"), ("diloco, every 2", "50.00"), ("diloco, every 4", "25.00"),
        ("none", "0.00"),
    ]  # fmt: skip
    assert read_picture(picture).description.startswith("diloco, every H steps: 1/H")


def test_a_loss_that_is_not_finite_is_not_drawn(tmp_path, capsys):
    picture = tmp_path / "local_steps.png"
    command = [*TINY.split(), "--steps", "2", "--every", "2", "--learning-rate", "1e30"]
    assert main([*command, "--output", str(picture)]) == 2
    assert "the loss of ddp_bucketed is not finite, give a smaller" in capsys.readouterr().err
    assert not picture.exists()


def test_held_out_text_is_not_trained_on():
    corpus, held_out = split(open_data("stdlib", 256))
    both = len(corpus.tokens) + len(held_out.tokens)
    assert len(held_out.tokens) == both // 10
    assert corpus.tokens.base is held_out.tokens.base or both <= 8_000_000
