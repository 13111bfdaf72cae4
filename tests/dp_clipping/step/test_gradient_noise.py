"""Noise is added to `.grad` once, by key, step and parameter, in the process that has the key."""

from unittest.mock import patch

import pytest
import torch

from dp_clipping import PrivacyEngine
from tests.support import engine


def noisy(step=0, **changes):
    run = engine.build(noise_generator=engine.fixed(), **changes)
    engine.backward(run, engine.data()[:5])
    run.optimizer.noise.add(step)
    return run, [p.grad.clone() for p in run.model.network.parameters()]


def test_noise_is_that_of_the_step():
    (_, first), (_, again), (_, second) = noisy(0), noisy(0), noisy(1)
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, second))


def test_noise_of_pieces_is_that_of_whole_gradients():
    (_, whole), run = noisy(), engine.build(noise_generator=engine.fixed())
    engine.backward(run, engine.data()[:5])
    pieces = []
    for parameter in run.network.parameters():
        flat, first = parameter.grad.view(-1), parameter.numel() // 3
        last = len(flat) - first
        pieces.append((parameter, 0, first, flat[:first]))
        pieces.append((parameter, first, last, flat[first:]))
    with patch.object(run.model.gradient_buffer, "pieces", return_value=pieces):
        run.optimizer.noise.add(0)
    for parameter, expected in zip(run.network.parameters(), whole, strict=True):
        torch.testing.assert_close(parameter.grad, expected)


def test_pieces_are_divided_where_a_source_returns_other_tensors():
    """Returns other tensors, as the source of `secure_mode` does without noise."""
    run = engine.build(engine=PrivacyEngine(secure_mode=True), noise_multiplier=0.0)
    engine.backward(run, engine.data()[:5])
    weight, sums = run.network[0].weight, run.network[0].weight.grad.clone()
    pieces = [(weight, 0, sums.numel(), weight.grad.view(-1))]
    with patch.object(run.model.gradient_buffer, "pieces", return_value=pieces):
        run.optimizer.noise.add(0)
    torch.testing.assert_close(weight.grad * engine.BATCH, sums)


def test_without_noise_sums_are_divided():
    _, mean = noisy(noise_multiplier=0.0)
    _, total = noisy(noise_multiplier=0.0, loss_reduction="sum", criterion=torch.nn.
                     CrossEntropyLoss(reduction="sum"))  # fmt: skip
    for one, other in zip(mean, total, strict=True):
        torch.testing.assert_close(one * engine.BATCH, other)


def test_if_it_fails_sums_are_dropped():
    run = engine.build()
    engine.backward(run, engine.data()[:5])
    failing = patch.object(run.model.gradient_buffer, "apply", side_effect=MemoryError)
    with failing, pytest.raises(MemoryError):
        run.optimizer.noise.add(0)
    assert all(p.grad is None for p in run.model.network.parameters())
    assert run.model.step_state.is_idle


def test_a_fingerprint_tells_keys_apart():
    noise = engine.build().optimizer.noise
    before, noise.key = noise.fingerprint, bytes(32)
    assert noise.fingerprint != before
    assert len(before) == 8


def test_a_process_that_was_forked_has_no_noise():
    noise = engine.build().optimizer.noise
    noise.check_process()
    with (
        patch("os.getpid", return_value=-1),
        pytest.raises(RuntimeError, match="this process was forked"),
    ):
        noise.check_process()
