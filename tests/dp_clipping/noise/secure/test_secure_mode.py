"""`PrivacyEngine(secure_mode=True)`: its noise, its batches, what it refuses, resume and ranks."""

import math
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dp_clipping import MODES, PrivacyEngine
from dp_clipping.noise.secure import source
from dp_clipping.noise.secure.rounded_gaussian import values_at
from dp_clipping.noise.secure.source import SecureNoise, grid_of, stream_keys
from dp_clipping.sampling.poisson import included
from tests.support import engine as runs
from tests.support import saved_runs

PRIVATE = [mode for mode in MODES if mode != "no_dp"]
KEY = bytes(range(32))
SECURE = partial(PrivacyEngine, accountant="rdp", secure_mode=True)

pytestmark = pytest.mark.filterwarnings("ignore:poisson_sampling=False")


def build(**changes):
    return saved_runs.build(**({"engine": SECURE()} | changes))


def test_the_grid_is_a_power_of_two_and_moves_sums_by_little():
    for std, dimension in [(1.0, 1), (0.7, 1474), (3e-5, 10**9), (100.0, 12345), (1.0, 4**10)]:
        grid = grid_of(std, dimension)
        assert math.frexp(grid)[0] == 0.5
        assert 2**-11 * std < dimension**0.5 * grid <= 2**-10 * std


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("is_cuda", [False, True])
def test_the_kernel_has_the_sums_on_a_gpu_of_each_dtype(monkeypatch, is_cuda, dtype):
    ran = []
    total = SimpleNamespace(is_cuda=is_cuda, dtype=dtype)
    monkeypatch.setattr(source, "triton", object())
    monkeypatch.setattr(torch.cuda, "device_of", nullcontext)
    monkeypatch.setattr(source, "add_integers_kernel_launch", lambda *_: ran.append("kernel"))
    monkeypatch.setattr(source, "add_plain", lambda *_: ran.append("reference"))
    source._add([total], [total], [KEY], [None], 1.0, 1.0, 1.0)
    assert ran == ["kernel" if is_cuda else "reference"]


def test_the_result_is_the_sum_rounded_to_the_grid_plus_integers():
    totals, names = [torch.randn(40, 3), torch.randn(7)], ["a", "b"]
    before = [t.clone() for t in totals]
    found = SecureNoise(127).add(
        totals, names, key=KEY, step=3, std=0.7, divisor=8.0,
        dtypes=[torch.float32, torch.bfloat16],
    )  # fmt: skip
    grid = grid_of(0.7, 127)
    for total, out, key in zip(before, found, stream_keys(KEY, 3, names), strict=True):
        n = total.double().div(grid).round().view(-1).numpy()
        k = values_at(key, np.arange(len(n)), 0.7 / grid)
        expected = torch.from_numpy((n + k) * grid / 8.0).float().to(out.dtype)
        assert torch.equal(out.view(-1), expected)
        assert 0.5 < k.std() * grid / 0.7 < 1.5
    assert found[0] is totals[0]


def test_what_lies_below_the_grid_is_not_in_the_result():
    grid = grid_of(1.0, 100)
    one = torch.arange(100).float() * 7 * grid
    other = one + 0.4 * grid * torch.rand(100)
    how = {"key": KEY, "step": 0, "std": 1.0, "divisor": 3.0, "dtypes": [torch.float32]}
    assert not torch.equal(one, other)
    results = [SecureNoise(100).add([t.clone()], ["w"], **how)[0] for t in (one, other)]
    assert torch.equal(*results)
    assert not torch.equal(SecureNoise(100).add([one + grid], ["w"], **how)[0], results[0])


def test_key_step_parameter_and_place_select_the_noise():
    def noise(key=KEY, step=0, name="w"):
        how = {"std": 1.0, "divisor": 1.0, "dtypes": [torch.float32]}
        return SecureNoise(50).add([torch.zeros(50)], [name], key=key, step=step, **how)[0]

    others = [noise(), noise(bytes(32)), noise(step=1), noise(name="w2"), noise(step=2**40)]
    assert torch.equal(noise(), others[0])
    assert len({t.numpy().tobytes() for t in others}) == len(others)


def test_without_noise_nothing_is_rounded_to_the_grid():
    total = torch.randn(50)
    how = {"key": KEY, "step": 0, "std": 0.0, "divisor": 4.0, "dtypes": [torch.float32]}
    assert torch.equal(SecureNoise(50).add([total.clone()], ["w"], **how)[0], total / 4)


def test_sums_that_are_not_float32_are_refused():
    how = {"key": KEY, "step": 0, "std": 1.0, "divisor": 1.0, "dtypes": [torch.float64]}
    with pytest.raises(ValueError, match=r"float32 sums, not torch.float64: .*network.float\(\)"):
        SecureNoise(5).add([torch.zeros(5).double()], ["w"], **how)


def step_of(mode: str, dtype: torch.dtype, secure: bool, noise: float = 1.0, **changes):
    """Returns a run after one step on eight samples, in the order of the data."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)
    data = TensorDataset(torch.randn(8, 6).to(dtype), torch.arange(8) % 3)
    engine = PrivacyEngine(accountant="rdp", secure_mode=secure)
    model, optimizer, criterion, loader = engine.make_private(
        module=network, optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=8), noise_multiplier=noise, max_grad_norm=0.5,
        grad_sample_mode=mode, poisson_sampling=False, **changes,
    )  # fmt: skip
    for x, y in loader:
        criterion(model(x), y).backward()
        optimizer.step()
    return engine, network


@pytest.mark.parametrize(
    ("mode", "dtype", "clipping"),
    [
        (mode, dtype, ("flat", "per_layer")[(n + k) % 2])
        for n, mode in enumerate(PRIVATE)
        for k, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16))
    ],
)
def test_every_mode_and_dtype_has_the_integers_of_its_key(mode, dtype, clipping):
    """In 16 bit the sum without noise is not shown, but the result has its grid's neighbourhood."""
    engine, network = step_of(mode, dtype, secure=True, clipping=clipping)
    _, clean = step_of(mode, dtype, secure=False, noise=0.0, clipping=clipping)
    names = [name for name, _ in network.named_parameters()]
    grid = grid_of(0.5, sum(p.numel() for p in network.parameters()))
    own = stream_keys(engine._runs[0].keys.noise, 0, names)
    for p, q, key in zip(network.parameters(), clean.parameters(), own, strict=True):
        k = values_at(key, np.arange(p.numel()), 0.5 / grid)
        if dtype == torch.float32:
            n = (q.grad.double() * 8 / grid).round().view(-1).numpy()
            found = (p.grad.double() * 8 / grid).view(-1).numpy() - n
            assert np.abs(found - k).max() <= 1  # `q.grad * 8` may have been next to a half
        else:
            expected = q.grad.double().view(-1) + torch.from_numpy(k * grid / 8)
            assert torch.allclose(p.grad.double().view(-1), expected, rtol=0, atol=2e-3)


def test_no_noise_and_no_privacy_are_what_they_were():
    for mode, noise in (("bookkeeping", 0.0), ("no_dp", 1.0)):
        engine, network = step_of(mode, torch.float32, secure=True, noise=noise)
        _, other = step_of(mode, torch.float32, secure=False, noise=noise)
        for p, q in zip(network.parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q)
        assert engine.get_epsilon(1e-3) == math.inf
    assert engine.privacy_statement(1e-3).secure is None


def test_pieces_are_divided_where_nothing_is_changed_in_place():
    """Adds noise to a rank's part, where the source returns other tensors without noise."""
    run = runs.build(engine=SECURE(), noise_multiplier=0.0)
    runs.backward(run, runs.data()[:5])
    weight, sums = run.network[0].weight, run.network[0].weight.grad.clone()
    pieces = [(weight, 0, sums.numel(), weight.grad.view(-1))]
    with patch.object(run.model.gradient_buffer, "pieces", return_value=pieces):
        run.optimizer.noise.add(0)
    torch.testing.assert_close(weight.grad * runs.BATCH, sums)


def test_batches_are_of_chacha():
    run = build()
    key = run.engine._runs[0].keys.sampling
    (drawn, *_) = saved_runs.train(run, 1)
    mask = included(key, 0, saved_runs.SAMPLES, 1 / 6, secure=True)
    assert drawn == saved_runs.data()[mask.nonzero().flatten()][0][:, 0].tolist()
    assert mask.tolist() != included(key, 0, saved_runs.SAMPLES, 1 / 6).tolist() or not len(drawn)


def test_secure_sampling_takes_each_sample_with_its_probability():
    rate, samples, steps = 0.1, 997, 200
    masks = torch.stack([included(KEY, s, samples, rate, True) for s in range(steps)]).double()
    deviation = (rate * (1 - rate) / masks.numel()) ** 0.5
    assert abs(masks.mean() - rate) < 4 * deviation
    assert (masks.mean(0) - rate).abs().max() < 5 * (rate * (1 - rate) / steps) ** 0.5
    assert torch.equal(included(KEY, 7, 10, 0.5, True), included(KEY, 7, 500, 0.5, True)[:10])
    others = [(KEY, 1), (KEY, 2), (bytes(32), 1), (KEY, 2**33)]
    assert len({tuple(included(k, s, 200, 0.5, True).tolist()) for k, s in others}) == 4
    assert included(KEY, 0, 50, 1.0, True).all()


def test_secure_sampling_decides_by_64_bits():
    """A sample whose first 16 bits are those of the rate is in with what its other 48 bits say."""
    samples, top, found = 300_000, 20_000, []

    def mask(step: int, more: float) -> torch.Tensor:
        return included(KEY, step, samples, (top + more) / 2**16, True)

    for step in range(100):
        without = mask(step, 0)
        undecided = without != mask(step, 1)
        assert torch.equal(mask(step, 2**-40), without) or undecided.any()
        found.append(mask(step, 0.25)[undecided])
    share = torch.cat(found).double()
    assert 300 < len(share) < 600  # one of 65,536
    assert abs(share.mean() - 0.25) < 4 * (0.25 * 0.75 / len(share)) ** 0.5


def test_a_run_is_resumed_bit_for_bit(tmp_path):
    saved_runs.check_resume(tmp_path / "file", build)
    with pytest.raises(ValueError, match=r"secure_mode is True .* and False in this run"):
        saved_runs.load(saved_runs.build(), tmp_path / "file")


def test_two_runs_of_an_engine_and_schedules_of_noise_and_threshold():
    run = build(noise_multiplier=np.float32(2.0))
    saved_runs.train(run, 2)
    run.optimizer.noise_multiplier = 4.0
    run.optimizer.max_grad_norm = 0.3
    saved_runs.train(run, 1)
    first = run.engine.get_epsilon(1e-3)
    with pytest.warns(UserWarning, match="accounted for another dataset"):
        other = build(engine=run.engine, hidden=40)
    assert run.engine.get_epsilon(1e-3) >= first  # of the larger network
    saved_runs.train(other, 1)
    statement = run.engine.privacy_statement(1e-3)
    assert statement.epsilon > first
    assert statement.secure["parameters"] == 3 * 40 + 40 + 40 * 2 + 2
    assert statement.steps == 4
