"""The repeated published trainings, on tiny data of the real formats."""

import gzip
import pickle
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ddp_by_hand.examples.private_text import Text
from ddp_by_hand.experiments.records import __main__ as records
from ddp_by_hand.experiments.records import data, picture, results, synthetic, texts, train
from ddp_by_hand.experiments.records.data import open_images
from ddp_by_hand.experiments.records.networks import NETWORKS, TemperedSigmoid
from ddp_by_hand.experiments.records.rows import ROWS, STDLIB, Row, rows_of
from ddp_by_hand.experiments.records.scattering import Scattering, scattered
from ddp_by_hand.experiments.records.texts import Planned
from ddp_by_hand.experiments.records.train import opacus
from ddp_by_hand.experiments.records.views import SHIFT, views
from ddp_by_hand.measure import Results
from ddp_by_hand.measure.picture import read_picture
from dp_clipping import cuda_graph
from tests.support.plans import quick_noise

ROOT = Path(__file__).parents[2]

SMALL = Row(
    "small", "tempered_cnn", 8.0, "a paper", published=50.0, delta=1e-4, batches=4, epochs=2,
    rate=2.0, momentum=0.0, grid={"rate": (1.0, 2.0)},
)  # fmt: skip


def idx_of(array: np.ndarray) -> bytes:
    return b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + (
        array.astype(np.uint8).tobytes()
    )  # fmt: skip


@pytest.fixture
def fashion(tmp_path):
    """Returns a folder with 64 + 32 images whose brightness tells the label, in idx files."""
    draw = np.random.default_rng(0)
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    for split, count in (("train", 64), ("t10k", 32)):
        labels = draw.integers(0, 10, count)
        images = draw.integers(0, 20, (count, 28, 28)) + 20 * labels[:, None, None]
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(idx_of(labels))
        packed = gzip.compress(idx_of(images))
        (folder / f"{split}-images-idx3-ubyte.gz").write_bytes(packed)
    return tmp_path


def test_idx_files_are_read_packed_or_not(fashion):
    images = open_images("fashion-mnist", fashion)
    assert images.train.shape == (64, 1, 28, 28)
    assert (images.test.dtype, images.labels.dtype) == (torch.uint8, torch.int64)
    told = images.test.flatten(1).float().mean(1).div(20).floor()
    torch.testing.assert_close(told.long(), images.answers)


@pytest.mark.parametrize("content", [b"", b"\0\0\x0d\x01\0\0\0\1\0", idx_of(np.zeros(4))[:-1]])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"idx|header"):
        data.read_idx(path)


def test_data_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "UNPACKED", "nowhere")
    with pytest.raises(FileNotFoundError, match="make records-data, or give --data FOLDER"):
        open_images("fashion-mnist", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no data_batch_1 .*: give --data FOLDER"):
        open_images("cifar10", tmp_path)


def test_cifar_is_the_same_from_both_formats(tmp_path):
    draw = np.random.default_rng(0)
    for name in [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]:
        pixels = draw.integers(0, 256, (3, 3072), dtype=np.uint8)
        labels = draw.integers(0, 10, 3)
        for kind in ("python", "binary"):
            (tmp_path / kind).mkdir(exist_ok=True)
        rows = np.concatenate((labels[:, None].astype(np.uint8), pixels), 1)
        (tmp_path / "binary" / f"{name}.bin").write_bytes(rows.tobytes())
        batch = {b"data": pixels, b"labels": labels.tolist(), b"batch_label": b"a batch"}
        (tmp_path / "python" / name).write_bytes(pickle.dumps(batch, protocol=2))
    python, binary = (open_images("cifar10", tmp_path / kind) for kind in ("python", "binary"))
    assert python.train.shape == (15, 3, 32, 32)
    for one, other in zip(python, binary, strict=True):
        torch.testing.assert_close(one, other)


class Calls:
    def __reduce__(self):
        return print, ("called",)


@pytest.mark.parametrize("content", [{b"data": Calls()}, {b"labels": [1]}, 3])
def test_a_pickle_calls_nothing_but_arrays(tmp_path, capsys, content):
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(ValueError, match="no batch of CIFAR-10"):
        data.read_cifar_pickle(path)
    assert capsys.readouterr().out == ""


def test_digits_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "find_spec", lambda name: None)
    lines = np.concatenate((np.tile(np.arange(64) % 17, (10, 1)), np.arange(10)[:, None]), 1)
    np.savetxt(tmp_path / "digits.csv.gz", lines, fmt="%d", delimiter=",")
    images = open_images("digits", tmp_path)
    assert images.train.shape == (8, 1, 8, 8)
    assert images.train[0, 0, 2, 0] == 16 * 255 // 16
    assert images.answers.tolist() == [8, 9]


def kernel_of(side: int, width: float, slant: float, theta: float, frequency: float) -> np.ndarray:
    """Returns Σ over shifts of exp(−(u² + slant² v²) / 2 width² + i · frequency · u), loop by loop.

    u runs along θ.
    """
    found = np.zeros((side, side), complex)
    for row in range(-2 * side, 3 * side):
        for column in range(-2 * side, 3 * side):
            u = row * np.cos(theta) + column * np.sin(theta)
            v = column * np.cos(theta) - row * np.sin(theta)
            height = np.exp(-(u**2 + (slant * v) ** 2) / (2 * width**2))
            found[row % side, column % side] += height * np.exp(1j * frequency * u)
    return found * slant / (2 * np.pi * width**2)


def convolved(image: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    return np.fft.ifft2(np.fft.fft2(image) * np.fft.fft2(kernel))


def scattering_of(image: np.ndarray, angles: int) -> np.ndarray:
    """Returns the definition for J = 2, on pixels alone: [1 + 2 angles + angles², side/4, side/4].

    Where every second pixel is left, a filter is what is left of it, times 4.
    """
    padded = np.pad(image, 4, mode="reflect")
    side, wavelets = len(padded), []
    for j in range(2):
        for turn in range(angles):
            theta = (angles - angles // 2 - 1 - turn) * np.pi / angles
            shape = (side, 0.8 * 2**j, 4 / angles, theta)
            wave, plain = kernel_of(*shape, 0.75 * np.pi / 2**j), kernel_of(*shape, 0.0)
            wavelets.append((j, wave - wave.sum() / plain.sum() * plain))
    average = kernel_of(side, 1.6, 1.0, 0.0, 0.0)

    def ends(signal: np.ndarray, step: int) -> np.ndarray:
        kernel = average[::step, ::step] * step**2
        rest = 4 // step
        return convolved(signal, kernel).real[::rest, ::rest][1:-1, 1:-1]

    first, second = [], []
    for j, wavelet in wavelets:
        inner = abs(convolved(padded, wavelet))[:: 2**j, :: 2**j]
        first.append(ends(inner, 2**j))
        if j == 0:
            for other in wavelets[angles:]:
                second.append(ends(abs(convolved(inner, other[1]))[::2, ::2], 2))
    return np.stack([ends(padded, 1), *first, *second])


def test_scattering_is_its_definition_and_has_81_channels():
    image = np.random.default_rng(0).random((8, 8))
    found = Scattering(8, angles=2)(torch.from_numpy(image).float()[None, None])
    np.testing.assert_allclose(found[0], scattering_of(image, 2), atol=2e-6)
    pixels = torch.full((2, 1, 28, 28), 255, dtype=torch.uint8)
    found = scattered(pixels, "cpu")
    assert found.shape == (2, 81, 7, 7)
    torch.testing.assert_close(found[:, 0], torch.ones(2, 7, 7), atol=1e-4, rtol=0)
    assert found[:, 1:].abs().max() < 1e-4  # wavelets have mean 0
    with pytest.raises(ValueError, match="multiple of 4"):
        Scattering(27)


def test_views_are_moved_or_mirrored():
    images = torch.randn(40, 1, 5, 5)
    padded = torch.nn.functional.pad(images, [SHIFT] * 4, mode="reflect")
    seen = set()
    for view, image in zip(views(images), padded, strict=True):
        windows = image.unfold(1, 5, 1).unfold(2, 5, 1)[0].flatten(0, 1)  # [49, 5, 5]
        both = torch.cat((windows, windows.flip(-1)))
        places = (both == view).all(-1).all(-1).nonzero().flatten().tolist()
        assert places
        seen.add(places[0])
    assert len(seen) > 20


def test_every_row_has_a_network_and_a_name_of_its_own():
    assert len({row.name for row in ROWS}) == len(ROWS)
    trained = [row for row in ROWS if isinstance(row, Row)]
    assert {row.network for row in trained} == set(NETWORKS)
    for row in trained:
        kind = NETWORKS[row.network]
        if kind.features == "text":
            outputs = kind.made(64)(torch.zeros(2, 64, dtype=torch.long))
            assert outputs.shape == (2, 256, 64)
            continue
        shape = (81, 7) if kind.features == "scatter" else (1, 28)
        images = torch.zeros(2, shape[0], shape[1], shape[1])
        assert kind.made(*shape)(images).shape == (2, 10)
        assert row.delta < 1 / 60_000
    assert [row.name for row in rows_of(["scatter_cnn", "tempered_cnn@2.7"])] == [
        "scatter_cnn@1", "scatter_cnn@2.7", "scatter_cnn@3", "scatter_cnn@8", "tempered_cnn@2.7",
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"no row is called scatter: give .*scatter_cnn"):
        rows_of(["scatter"])
    with pytest.raises(ValueError, match=r"called tempered_cnn@5: give tempered_cnn@1, temp"):
        rows_of(["tempered_cnn@5"])
    x = torch.randn(9)
    torch.testing.assert_close(TemperedSigmoid()(x), x.tanh())


def text_of(sequences: int) -> Text:
    tokens = torch.randint(97, 100, (sequences + 8, 65), dtype=torch.uint8)
    return Text(tokens[:sequences], tokens[sequences:], "a digest")


@pytest.mark.slow
def test_a_language_model_is_fine_tuned_from_public_text(monkeypatch):
    text = text_of(32)
    monkeypatch.setattr(train, "private_text", lambda: text)
    monkeypatch.setattr(texts, "public_text", lambda: text.training)
    monkeypatch.setattr(texts, "BATCH", 16)
    row = Row(
        "lora", "transformer_lora", 8.0, "none", data=STDLIB, delta=1e-3, batches=4, epochs=1,
        optimizer="adam", rate=1e-2, clip=1.0, pretraining=20,
    )  # fmt: skip
    split = train.sequences(torch.device("cpu"))
    assert split.train.shape == split.labels.shape == (32, 64)
    scores = [
        train.run(one, engine, 0, split)["score"]
        for one, engine in ((row, "ours"), (row, "opacus"), (replace(row, pretraining=0), "ours"))
    ]
    assert max(scores[:2]) < 4 < scores[2] < 6  # before any step ln 256 = 5.5


def test_a_planned_row_is_trained_as_planned(monkeypatch):
    quick_noise(monkeypatch)
    text = text_of(100_000)
    monkeypatch.setattr(texts, "private_text", lambda: text)
    monkeypatch.setattr(texts, "LAW", ROOT / texts.LAW)
    monkeypatch.setattr(texts, "train", lambda run, text, marks, delta: {
        "losses": {run.steps: 2.5}, "epsilon": 2.0, "parameters": 1, "seconds": 1.0, "run": run,
    })  # fmt: skip
    found = Planned(2.0).run("ours", 0, torch.device("cpu"))
    assert found["score"] == 2.5
    assert 1.5 < found["predicted"] < 4
    assert found["delta"] < 1 / 100_000
    with pytest.raises(ValueError, match="leave --engine out"):
        Planned(2.0).run("opacus", 0, torch.device("cpu"))


def test_public_text_is_of_license_files():
    text = texts.public_text()
    assert text.shape[1] == 65
    assert b"LICENSE" in bytes(text.flatten().tolist()).upper()


@pytest.fixture
def program(fashion, monkeypatch):
    """Returns the program with one small row, on the small data."""
    monkeypatch.setattr(records, "rows_of", lambda names: [SMALL])
    monkeypatch.setattr(results, "ROWS", [SMALL])
    monkeypatch.setattr(picture, "ROWS", [SMALL])
    monkeypatch.setattr(records, "HELD_OUT", 8)
    monkeypatch.chdir(fashion)
    common = ["--data", str(fashion), "--device", "cpu", "--output-dir", "found"]
    return lambda *arguments: records.main([*common, *arguments])


def test_a_row_is_trained_once_by_each_engine(program, capsys):
    assert program("--seeds", "2") == 0
    assert program("--seeds", "1", "--engine", "opacus") == 0
    said = capsys.readouterr().out
    assert "small@8 ours seed 1: " in said
    found = Results("found").rows()
    assert [(one["variant"], one["round"]) for one in found] == [
        ("ours", 0), ("ours", 1), ("opacus", 0),
    ]  # fmt: skip
    for one in found:
        assert one["status"] == "ok", one
        assert 7.9 < one["epsilon"] <= 8
        assert one["epsilon"] == pytest.approx(found[0]["epsilon"], rel=1e-6)
    ours = next(line for line in said.splitlines() if line.startswith("ours "))
    low, high = sorted(one["score"] for one in found[:2])
    assert f"{(low + high) / 2:.2f} ± " in ours
    assert " 50 " in ours
    assert program("--seeds", "2", "--picture", "found.png") == 0
    assert (
        f"Best: {(low + high) / 2:.1f} % at ε = 8 (small)" in read_picture("found.png").description
    )
    assert "seed" not in capsys.readouterr().out.partition("score: accuracy")[0]


@pytest.mark.slow
def test_tuning_leaves_the_test_images_alone(program, fashion, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(records, "run", lambda *a: seen.append(a[-1]) or train.run(*a))
    assert program("--tune") == 0
    images = open_images("fashion-mnist", fashion)
    for split in seen:
        assert len(split.train) == 56
        assert split.answers.tolist() == images.labels[56:].tolist()
    said = capsys.readouterr().out
    assert "small@8 ours rate 1.0: " in said
    found = Results("found").rows()
    assert [one["settings"]["rate"] for one in found] == [1.0, 2.0]
    assert {one["kind"] for one in found} == {"tuning"}
    assert program("--tuned", "--seeds", "1") == 0
    assert len(Results("found").rows()) == 3


@pytest.mark.parametrize(("row", "rate"), [(SMALL, 2.0), (replace(SMALL, data=STDLIB), 1.0)])
def test_the_best_of_what_was_tried_is_taken(row, rate):
    tried = [
        {"kind": "tuning", "row": row.name, "status": status, "score": score,
         "settings": replace(row, rate=rate).settings()}
        for rate, score, status in ((1.0, 3.0, "ok"), (2.0, 4.0, "ok"), (5.0, None, "error"))
    ]  # fmt: skip
    assert records.tuned(row, tried).rate == rate
    assert records.tuned(row, []) == row


def test_a_row_without_its_data_says_so(program, fashion, monkeypatch, capsys):
    monkeypatch.setattr(data, "UNPACKED", "nowhere")
    (fashion / "fashion-mnist").rename(fashion / "elsewhere")
    assert program("--seeds", "2") == 2
    said = capsys.readouterr()
    assert said.out.count("unavailable: fashion-mnist: no train-images") == 1
    assert "no row was trained" in said.err
    (fashion / "elsewhere").rename(fashion / "fashion-mnist")
    assert program("--seeds", "1") == 0, "what was missing is tried again"


@pytest.mark.parametrize("change", [
    {"views": 2, "physical": 4}, {"sampling": "balls_in_bins"},
    {"network": "group_norm_cnn", "pretraining": 1, "physical": 16},
], ids=str)  # fmt: skip
def test_every_kind_of_row_spends_its_budget(change, monkeypatch):
    monkeypatch.setattr(synthetic, "BATCH", 16)
    row = replace(SMALL, **change, data="two classes", rate=4.0)
    labels = torch.arange(64) % 2
    images = torch.randn(64, 1, 28, 28) / 10 + 2.0 * labels[:, None, None, None] - 1
    split = train.Split(images, labels, images, labels)
    found = train.run(row, "ours", 0, split)
    assert 7.9 < found["epsilon"] <= 8
    assert 0 <= found["score"] <= 100
    assert len(found["step_ms"]) == 1


def test_views_of_an_image_lie_side_by_side(monkeypatch):
    monkeypatch.setattr(train, "views", lambda images: images)
    images = torch.arange(6.0).reshape(6, 1, 1, 1)
    split = train.Split(images, torch.arange(6), images, torch.arange(6))
    loader = train.gathered(replace(SMALL, views=2, batches=3), split)
    assert (len(loader.dataset), loader.batch_size) == (12, 4)
    x, y = loader.collate_fn(loader.dataset.__getitems__([0, 1, 8, 9]))
    assert x.flatten().tolist() == y.tolist() == [0, 0, 4, 4]


def test_opacus_has_no_units_of_views():
    row = Row("views", "tempered_cnn", 8.0, "a paper", views=2)
    with pytest.raises(ValueError, match="leave --engine out"):
        opacus(row, None, None, 1.0, 0)


@pytest.mark.gpu
def test_a_graph_trains_as_steps_on_the_cpu_do(monkeypatch):
    replays = []
    replay = cuda_graph._Captured.replay
    monkeypatch.setattr(
        cuda_graph._Captured, "replay", lambda self, *a: replays.append(1) or replay(self, *a)
    )
    row = replace(SMALL, data="two classes", batches=8, epochs=4, rate=0.5)
    labels = torch.arange(256) % 2
    images = torch.randn(256, 1, 28, 28) / 10 + 2.0 * labels[:, None, None, None] - 1
    split = train.Split(images, labels, images, labels)
    on_cpu = train.run(row, "ours", 0, split)
    found = train.run(row, "ours", 0, train.Split(*(x.cuda() for x in split)))
    assert len(replays) > row.steps // 2
    assert found["epsilon"] == on_cpu["epsilon"]
    assert found["score"] == pytest.approx(on_cpu["score"], abs=2)
