"""Tiles of the matrix kernels: found once, kept, and never looked for where nobody asked for it."""

import json
from pathlib import Path

import pytest
import torch

from dp_clipping.kernels import gradient, gram, weighted_product
from dp_clipping.kernels.coefficients import SortedCoefficients
from dp_clipping.kernels.launch import tuning
from dp_clipping.kernels.launch.grouped_launch import launches as launches_of
from dp_clipping.kernels.launch.tiles import Tile, triton

DEVICE = torch.device("cuda", 0)
TILES = [Tile(64, 64, 32, 4, 3), Tile(128, 64, 32, 4, 3), Tile(32, 64, 32, 4, 3)]
TIMES = dict(zip(TILES, (2.0, 1.0, 3.0), strict=True))
SHAPE = (8, 1000, 4096, 2048)


@pytest.fixture(autouse=True)
def some_gpu(tmp_path, monkeypatch):
    """A device that is not there, an empty cache folder, and a process that remembers nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("DP_CLIPPING_TUNE", "1")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Some GPU")
    monkeypatch.setattr(tuning, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(tuning, "INTERPRETED", False)
    tuning.forget()
    yield
    tuning.forget()


@pytest.fixture(autouse=True)
def timed(monkeypatch):
    """Which tiles were timed, in one list a choice. One round is an outlier."""
    choices = []

    def interleaved(calls, device, rounds):
        assert device == DEVICE
        choices.append(list(calls))
        for call in calls.values():
            call(0)
        return {tile: [TIMES[tile]] * (rounds - 1) + [9.0 - TIMES[tile]] for tile in calls}

    monkeypatch.setattr(tuning, "interleaved", interleaved)
    return choices


def choose(shape=SHAPE, kernel="gradient", dtype=torch.bfloat16, run=lambda tile: None, **options):
    return tuning.best(
        kernel, dtype, shape, options.get("tiles", TILES), run, options.get("device", DEVICE)
    )


def path() -> Path:
    return tuning.path_of(tuning.FILE)


def content() -> dict:
    return json.loads(path().read_text())


def test_the_fastest_is_chosen_once(timed):
    launched = []
    for _ in range(3):
        assert choose(run=launched.append) == TILES[1]
    assert timed == [TILES]
    assert set(launched) == set(TILES)


def test_shapes_of_one_class_share_a_choice(timed):
    choose((8, 1000, 4096, 2048))
    for shape in ((5, 1024, 4096, 2048), (7, 513, 2049, 1025)):
        assert choose(shape) == TILES[1]
    assert len(timed) == 1
    for shape in ((9, 1000, 4096, 2048), (4, 1000, 4096, 2048), (1, 8, 1000, 4096, 2048)):
        choose(shape)
    assert len(timed) == 4


def test_kernels_and_dtypes_have_choices_of_their_own(timed):
    choose()
    choose(kernel="weighted_product")
    choose(kernel=tuning.name_of("gradient", described=False))
    choose(dtype=torch.float16)
    assert len(timed) == 4
    assert len(content()[tuning.key_of(DEVICE)]) == 4


@pytest.mark.parametrize("error", [RuntimeError("passes"), "resources"])
def test_candidates_that_fail_are_skipped(timed, error):
    if error == "resources":
        pytest.importorskip("triton")
        error = triton.runtime.errors.OutOfResources(300_000, 232_448, "shared memory")

    def run(tile):
        if tile == TILES[1]:
            raise error

    assert choose(run=run) == TILES[0]
    assert timed == [[TILES[0], TILES[2]]]


def test_without_any_that_works_it_is_the_first(timed):
    calls = []

    def run(tile):
        calls.append(tile)
        raise RuntimeError("none")

    assert choose(run=run) == choose(run=run) == TILES[0]
    assert timed == []
    assert calls == TILES
    assert not path().exists()


def test_a_full_device_says_nothing_of_a_tile():
    def run(tile):
        raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError):
        choose(run=run)
    assert choose() == TILES[1]


@pytest.mark.parametrize("value", [None, "", "0"])
def test_off_by_default(monkeypatch, timed, value):
    if value is None:
        monkeypatch.delenv("DP_CLIPPING_TUNE")
    else:
        monkeypatch.setenv("DP_CLIPPING_TUNE", value)
    assert choose() == TILES[0]
    assert timed == []
    assert not path().exists()


def test_in_the_interpreter_and_on_the_cpu(monkeypatch, timed):
    assert choose(device=torch.device("cpu")) == TILES[0]
    monkeypatch.setattr(tuning, "INTERPRETED", True)
    assert choose() == TILES[0]
    assert timed == []


@pytest.mark.parametrize(
    ("module", "name"), [(tuning, "is_current_stream_capturing"), (torch.compiler, "is_compiling")]
)
def test_later_if_not_now(monkeypatch, timed, module, name):
    with monkeypatch.context() as patch:
        patch.setattr(module, name, lambda: True)
        assert choose() == TILES[0]
        assert timed == []
    assert choose() == TILES[1]


def test_what_is_kept_serves_a_capture(monkeypatch, timed):
    choose()
    tuning.forget()
    monkeypatch.setattr(tuning, "is_current_stream_capturing", lambda: True)
    assert choose() == TILES[1]


@pytest.mark.parametrize("value", ["1", "0"])
def test_another_process_takes_what_is_kept(monkeypatch, timed, value):
    choose()
    assert [entry.name for entry in path().parent.iterdir()] == ["tiles.json"]
    tuning.forget()
    monkeypatch.setenv("DP_CLIPPING_TUNE", value)
    assert choose() == TILES[1]
    assert len(timed) == 1


def test_devices_and_versions_have_choices_of_their_own(monkeypatch, timed):
    choose()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "another")
    tuning.forget()
    choose()
    monkeypatch.setattr(torch, "__version__", "0.0")
    tuning.forget()
    choose()
    assert len(timed) == len(content()) == 3


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "\x00", '{"a": 1}', "KEY:[1]", "KEY:{}", "KEY:null"], ids=repr
)
def test_files_that_hold_something_else_count_as_none(timed, text):
    key = json.dumps(tuning.key_of(DEVICE))
    path().parent.mkdir()
    path().write_text(text if text[:3] != "KEY" else f"{{{key}: {text[4:]}}}")
    assert choose() == TILES[1]
    assert len(timed) == 1
    tuning.forget()
    assert choose() == TILES[1]
    assert len(timed) == 1


@pytest.mark.parametrize("value", [None, 3, [128, 64, 32, 4, 3], {"rows": 128}, {"rows": 0}])
def test_what_is_no_candidate_counts_as_none(timed, value):
    choose()
    kept = content()
    (name,) = kept[tuning.key_of(DEVICE)]
    old = kept[tuning.key_of(DEVICE)][name]
    kept[tuning.key_of(DEVICE)][name] = old | value if isinstance(value, dict) else value
    if value == {"rows": 128}:
        assert old["rows"] == 128  # the one that counts
    path().write_text(json.dumps(kept))
    tuning.forget()
    assert choose() == TILES[1]
    assert len(timed) == (1 if value == {"rows": 128} else 2)


def test_candidates_that_a_new_version_has_dropped(timed):
    choose()
    tuning.forget()
    assert choose(tiles=[TILES[0], TILES[2]]) == TILES[0]


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch, timed):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="are not stored"):
        assert choose() == TILES[1]
    assert choose() == TILES[1]
    assert len(timed) == 1


class Device:
    """A clock on which calls take no time, spinning takes what it is told, and the host what it
    takes: whether an event has been reached is known from that."""

    def __init__(self, monkeypatch, launches: list[float]):
        self.now = self.busy_until = 0.0  # seconds of the host; when the device has nothing to do
        self.launches = launches  # seconds that the host takes for each sample
        self.spun: list[float] = []
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(self))
        monkeypatch.setattr(tuning, "spin", self.spin)

    def spin(self, cycles: int) -> None:
        self.spun.append(cycles / tuning.SPIN_RATE)
        self.busy_until = self.now + self.spun[-1]

    def call(self, number: int) -> None:
        self.now += self.launches.pop(0)
        self.busy_until = max(self.busy_until, self.now) + 1e-3


class Event:
    def __init__(self, device: Device):
        self.device = device

    def record(self) -> None:
        self.at = max(self.device.now, self.device.busy_until)

    def query(self) -> bool:
        return self.at <= self.device.now

    def synchronize(self) -> None:
        self.device.now = max(self.device.now, self.at)

    def elapsed_time(self, end: "Event") -> float:
        return (end.at - self.at) * 1e3


@pytest.mark.parametrize(
    ("launches", "spun", "milliseconds"),
    [([0.01], 1, 1.0), ([0.5, 0.01], 2, 1.0), ([0.5, 0.5, 0.01], 3, 1.0), ([0.5] * 4, 4, 381.0)],
)
def test_a_sample_that_the_host_fell_behind_is_taken_again(
    monkeypatch, launches, spun, milliseconds
):
    device = Device(monkeypatch, launches)
    found = tuning._sample(device.call, 1, 0.01, torch.device("cuda"))
    assert device.spun == [pytest.approx(0.015 * 2**n) for n in range(spun)]
    assert found == pytest.approx(milliseconds)


class Launches:
    """Stands for a kernel: takes a grid and arguments, and says which tiles it was given."""

    def __init__(self):
        self.tiles = []

    def __getitem__(self, grid):
        return self

    def __call__(self, *args, **options):
        if "BLOCK" in options:
            block, depth = options["BLOCK"], options["BLOCK_X"]
            sizes = (block, block, depth)
        else:
            sizes = tuple(options[f"BLOCK_{name}"] for name in "DPT")
        self.tiles.append((*sizes, options["num_warps"], options["num_stages"]))


@pytest.fixture
def launches(monkeypatch):
    pytest.importorskip("triton")
    launches = Launches()
    for module, name in (
        (gradient, "_gradient_kernel"), (gradient, "_gradients_kernel"), (gram, "_gram_kernel"),
        (weighted_product, "_weighted_product_kernel"),
        (weighted_product, "_weighted_products_kernel"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, launches)
    monkeypatch.setattr(gradient, "squares_of_tiles", lambda *_: [None])
    return launches


def launch(name: str, width: int, tile: Tile | None) -> None:
    """One launch of a kernel on operands whose rows the bulk copy engine takes, or does not."""
    y, a = torch.zeros(2, 8, width), torch.zeros(2, 8, 2 * width)
    if name in ("instantiate", "accumulate"):
        gradient.gradient_and_squares(y, a, tile, store=name == "instantiate")
    elif name == "weighted_product":
        weighted_product.weighted_product(y, a, SortedCoefficients.of(torch.ones(2)), tile)
    else:
        gram.gram_squares([(a, [y])], tile)


KERNELS = {
    "instantiate": gradient, "accumulate": gradient, "weighted_product": weighted_product,
    "gram": gram,
}  # fmt: skip


@pytest.mark.parametrize("width", [64, 63])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_ask_for_their_tile(monkeypatch, launches, name, width):
    candidates = KERNELS[name].TILES[4]
    asked = []

    def choose(key, tiles, run):
        asked.append(key)
        assert tiles == candidates
        run(tiles[1])
        return tiles[-1]

    monkeypatch.setattr(tuning, "_choose", choose)
    launch(name, width, None)
    assert launches.tiles == [candidates[1][:5], candidates[-1][:5]]
    sizes = (1, 2, 8, 256) if name == "gram" else (1, 2, 8, 64, 128)
    kernel = tuning.name_of(name, described=width == 64)
    assert asked == [(kernel, torch.float32, sizes, torch.device("cpu"))]


@pytest.mark.parametrize("name", ["instantiate", "accumulate", "weighted_product"])
def test_the_default_tile_fits_narrow_results(launches, name):
    narrow = KERNELS[name].TILES[4][2]
    for width, expected in ((narrow.rows, narrow), (2 * narrow.rows, KERNELS[name].TILES[4][0])):
        launch(name, width, None)
        assert launches.tiles.pop() == expected[:5]


def test_large_products_of_another_default_tile_have_a_launch_of_their_own():
    """A small one is launched with others, whatever its own default would be."""
    pair = lambda d, tokens: tuple(torch.empty(64, tokens, n, device="meta") for n in (d, 512))  # noqa: E731
    pairs = [pair(512, 1024), pair(32, 8192), pair(32, 8), pair(512, 8), pair(32, 8192)]
    tiles = {4: (Tile(64, 64, 32, 4, 3), Tile(32, 64, 32, 4, 3, 0.9))}
    assert list(launches_of(pairs, 1e13, tiles)) == [((0, 2, 3), False), ((1, 4), False)]
    assert list(launches_of(pairs, 1e13, {})) == [((0, 1, 2, 3, 4), False)]


@pytest.mark.parametrize(("tokens", "rows"), [(64, 64), (65, 128)])
def test_short_samples_have_small_gram_tiles(launches, tokens, rows):
    y, a = torch.zeros(2, 2, tokens, 16, dtype=torch.float16)
    gram.gram_squares([(a, [y])])
    assert [tile[0] for tile in launches.tiles] == [rows]


@pytest.mark.gpu
def test_on_a_gpu(monkeypatch, tmp_path):
    """A tile that no processor has the memory for is among the candidates of each kernel."""
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("DP_CLIPPING_TUNE", "1")
    large = Tile(128, 128, 256, 8, 4)
    for tiles in (gradient.TILES, gradient.NORM_TILES, weighted_product.TILES, gram.TILES):
        first, second = tiles[2][:2]
        monkeypatch.setitem(tiles, 2, (large, first, second))
    normal = lambda n: torch.randn(4, 512, n, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    y, a = normal(1024), normal(768)
    ones = SortedCoefficients.of(torch.ones(4, device="cuda"))
    for operands in ((y, a), (y[..., 1:], a[..., 1:])):
        found, squares = gradient.gradient_and_squares(*operands)
        plain, plain_squares = gradient.gradient_and_squares_plain(*operands)
        torch.testing.assert_close(found, plain, rtol=1.6e-2, atol=1e-4)  # sums of 512 products
        torch.testing.assert_close(squares, plain_squares, rtol=1e-4, atol=0)
        gradient.gradient_and_squares(*operands, store=False)
        weighted_product.weighted_product(*operands, ones)
        gram.gram_squares([(operands[1], [operands[0]])])
    kept = content()[tuning.key_of(y.device)]
    assert len(kept) == 8
    assert large[:5] not in [tuple(tile.values()) for tile in kept.values()]
