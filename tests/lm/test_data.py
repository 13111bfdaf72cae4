import os
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch

from ddp_by_hand.lm import data
from ddp_by_hand.lm.data import Batches, Corpus, open_data

COUNTING = Corpus("counting", 256, np.arange(200, dtype=np.uint8))


def batches(corpus=COUNTING, **options):
    usual = {"batch_size": 2, "context_length": 7, "rank": 0, "world_size": 1, "seed": 0}
    return Batches(corpus, **(usual | options))


def message_of(call, *arguments, **keywords):
    with pytest.raises(ValueError) as caught:
        call(*arguments, **keywords)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("source", ["text", "synthetic"])
class TestBatches:
    @pytest.fixture
    def corpus(self, source):
        return open_data("synthetic", 1000) if source == "synthetic" else COUNTING

    def test_shapes_dtypes_and_shift(self, corpus):
        inputs, targets = batches(corpus, batch_size=3, context_length=7)(5)
        assert inputs.shape == targets.shape == (3, 7)
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.is_contiguous()
        assert targets.is_contiguous()
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert not torch.equal(inputs, targets)

    @pytest.mark.parametrize(("world_size", "batch_size"), [(2, 3), (3, 1), (5, 2)])
    def test_shards_are_the_global_batch(self, corpus, world_size, batch_size):
        whole = batches(corpus, batch_size=world_size * batch_size)
        for step in (0, 7):
            shards = [
                batches(corpus, batch_size=batch_size, rank=rank, world_size=world_size)(step)
                for rank in range(world_size)
            ]
            for joined, expected in zip(zip(*shards, strict=True), whole(step), strict=True):
                assert torch.equal(torch.cat(joined), expected)

    def test_a_step_is_a_pure_function(self, corpus):
        first, second = batches(corpus), batches(corpus)
        expected = [first(step)[0] for step in range(4)]
        for step in (3, 0, 2, 2):
            assert torch.equal(second(step)[0], expected[step])

    def test_global_random_state_is_neither_read_nor_moved(self, corpus):
        expected = batches(corpus)(1)[0]
        torch.manual_seed(1)
        np.random.seed(1)
        torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
        assert torch.equal(batches(corpus)(1)[0], expected)
        assert torch.equal(torch.get_rng_state(), torch_state)
        assert (np.random.get_state()[1] == numpy_state).all()

    def test_seeds_and_steps_do_not_collide(self, corpus):
        keys = [(seed, step) for seed in (0, 1, 2, 2**32, 2**33) for step in (0, 1, 2)]
        seen = {
            tuple(batches(corpus, batch_size=8, seed=s)(t)[0].flatten().tolist()) for s, t in keys
        }
        assert len(seen) == len(keys)


@pytest.mark.parametrize("count", [10, 8])  # 8 bytes are one sequence
def test_text_sequences_are_consecutive_bytes_and_reach_both_ends(count):
    corpus = Corpus("counting", 256, np.arange(count, dtype=np.uint8))
    inputs, targets = batches(corpus, batch_size=200)(0)
    assert set(inputs[:, 0].tolist()) == set(range(count - 7))
    assert targets.max() == count - 1
    assert torch.equal(targets, inputs + 1)


def test_synthetic_tokens_fill_the_vocabulary_evenly():
    inputs, _ = batches(open_data("synthetic", 10), batch_size=200, context_length=100)(0)
    share = torch.bincount(inputs.flatten(), minlength=10) / inputs.numel()
    assert share.shape == (10,)
    assert (share - 0.1).abs().max() < 0.015


def test_stdlib_is_real_source_capped_and_the_same_each_time(monkeypatch):
    corpus = open_data("stdlib", 300)
    assert corpus.tokens.dtype == np.uint8
    assert 1_000_000 < len(corpus.tokens) <= data.STDLIB_BYTES
    assert corpus.vocab_size == 300
    first = Path(sysconfig.get_paths()["stdlib"], "__future__.py").read_bytes()
    assert first in corpus.tokens[:1_000_000].tobytes()
    assert corpus.tokens.tobytes() == open_data("stdlib", 256).tokens.tobytes()
    monkeypatch.setattr(data, "STDLIB_BYTES", 12_345)
    assert open_data("stdlib", 256).tokens.tobytes() == corpus.tokens[:12_345].tobytes()


def test_stdlib_takes_sources_only_in_sorted_order(tmp_path, monkeypatch):
    contents = {
        "b.py": "b", "a.py": "a", "c/d.py": "d", "e.txt": "no",
        "test/t.py": "no", "c/tests/t.py": "no", "site-packages/s.py": "no",
    }  # fmt: skip
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert "no Python sources" in message_of(open_data, "stdlib", 256)
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert open_data("stdlib", 256).tokens.tobytes() == b"abd"
    (tmp_path / "text").write_bytes("né\n".encode())
    assert open_data(str(tmp_path / "text"), 256).tokens.tolist() == [110, 0xC3, 0xA9, 10]


def test_folder_is_its_text_files_in_sorted_order(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    for name, content in {"z": b"z", "a": b"a", "sub/m": b"m", "bin": b"x\0y", "bad": b"!"}.items():
        (tmp_path / name).write_bytes(content)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    refuse(monkeypatch, tmp_path / "bad")
    assert open_data(str(tmp_path), 256).tokens.tobytes() == b"amz"


def refuse(monkeypatch, unreadable):
    """Reading this path fails, also for root, whom file modes do not stop."""
    read_bytes = Path.read_bytes

    def guarded(path):
        if path == unreadable:
            raise PermissionError(13, "Permission denied")
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", guarded)


def test_unusable_paths_are_named_with_the_reason(tmp_path, monkeypatch):
    for name, content in {"empty": b"", "binary": b"a\0b", "locked": b"text"}.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    refuse(monkeypatch, tmp_path / "locked")
    reasons = {
        "missing\nfile": "does not exist",
        "empty": "is empty",
        "binary": "NUL bytes",
        "locked": "cannot be read (Permission denied)",
        "folder": "without readable text",
        "pipe": "neither a regular file nor a folder",
    }
    for name, reason in reasons.items():
        message = message_of(open_data, str(tmp_path / name), 256)
        assert message.startswith(f"--data {str(tmp_path / name)!r} ")
        assert reason in message
        assert "give" in message
    assert "does not exist" in message_of(open_data, "", 256)


def test_text_needs_256_tokens_and_synthetic_takes_any_positive_vocabulary():
    for source in ("stdlib", "some/path"):
        message = message_of(open_data, source, 255)
        assert "bytes need --vocab-size 256 or more" in message
        assert "255" in message
    assert batches(open_data("synthetic", 1))(0)[0].unique().tolist() == [0]
    assert "--vocab-size is 0" in message_of(open_data, "synthetic", 0)


@pytest.mark.parametrize(
    ("keywords", "named"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"context_length": 0}, "context_length is 0"),
        ({"world_size": 0}, "world_size is 0"),
        ({"rank": 2, "world_size": 2}, "rank is 2: give 0 to 1"),
        ({"rank": -1}, "rank is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"context_length": 200}, "'counting' holds 200 bytes, and one sequence needs"),
    ],
)
def test_bad_arguments_are_named(keywords, named):
    assert named in message_of(batches, **keywords)
    assert "step is -1" in message_of(batches(), -1)
