"""Pictures of digits from fonts, and a small private run on them."""

import json

import pytest
import torch

from ddp_by_hand.examples import private_images
from ddp_by_hand.examples.font_digits import _glyphs, font_digits


def test_pictures_are_the_same_again_and_show_their_digits():
    pictures, digits = font_digits(64, 16, 0)
    assert pictures.shape == (64, 3, 16, 16)
    assert 0.3 < float(pictures.std()) < 3
    again, _ = font_digits(64, 16, 0)
    other, _ = font_digits(64, 16, 1)
    assert torch.equal(pictures, again)
    assert not torch.equal(pictures, other)
    assert set(digits.tolist()) == set(range(10))
    glyphs = _glyphs()
    assert len(glyphs) > 10
    same = (glyphs.unsqueeze(1) == glyphs.unsqueeze(2)).flatten(3).all(3).sum((1, 2))
    assert (same == 10).all()  # in each font, a digit looks like itself only


@pytest.fixture
def line(monkeypatch, tmp_path):
    monkeypatch.setattr(private_images, "HELD_OUT", 32)
    small = {"images": 64, "batch-size": 32, "epochs": 1, "size": 8, "epsilons": 8}
    options = [word for name, value in small.items() for word in (f"--{name}", str(value))]
    return [*options, "--device", "cpu", "--output-dir", str(tmp_path / "out")]


def test_a_run_says_what_it_spent_and_draws_it(line, tmp_path, capsys):
    assert private_images.main(line) == 0
    found = json.loads((tmp_path / "out/accuracy.json").read_text())
    private, ordinary = found["runs"]
    assert (private["epsilon"], ordinary["epsilon"]) == (8.0, None)
    assert private["noise_multiplier"] > 0
    assert private["points"][-1]["step"] == ordinary["points"][-1]["step"] == 2
    assert 0 < private["points"][0]["epsilon"] < private["points"][-1]["epsilon"] <= 8
    assert all(0 <= p["accuracy"] <= 1 for p in private["points"] + ordinary["points"])
    assert (tmp_path / "out/accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert "not private, step 2 of 2" in capsys.readouterr().out


def test_views_of_a_picture_are_moved(line, monkeypatch):
    given = []
    made = private_images.BatchMemoryManager

    def noted(**arguments):
        given.append((arguments["optimizer"].model.views, arguments["max_physical_batch_size"]))
        return made(**arguments)

    monkeypatch.setattr(private_images, "BatchMemoryManager", noted)
    assert private_images.main([*line, "--views", "3", "--max-physical-batch-size", "16"]) == 0
    assert given[0] == (3, 15)
    picture = torch.arange(75.0).view(1, 3, 5, 5)
    moved = private_images.Moved(picture, torch.tensor([7]))
    draws = [moved[0] for _ in range(20)]
    assert len({tuple(x.flatten().tolist()) for x, _ in draws}) > 1
    assert all(digit == 7 and x.sort().values.sum() == picture.sum() for x, digit in draws)
