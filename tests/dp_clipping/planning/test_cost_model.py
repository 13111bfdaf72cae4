"""Predicted time and memory: the closed forms, and what grows with what."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dp_clipping.planning.cost_model import (
    ACCUMULATE,
    ALGORITHMS,
    GRAM,
    INSTANTIATE,
    SUM_BYTES,
    LinearShape,
    Rates,
    predict,
    rates_of,
)

# One tile of one processor, without fixed costs: times are operations over rates.
PLAIN = Rates(
    product=2.0, gram=3.0, weighted=5.0, single=0.5, bandwidth=7.0, step=0.0, processors=1,
    tile=(8, 8), block=4,
)  # fmt: skip
USE = LinearShape("w", 3, 8, 8, 8, 2, 4)


def test_gradient_writes_and_reads_every_value():
    found = predict(USE, INSTANTIATE, PLAIN)
    moved = 2 * USE.gradient_bytes + 8 * 8 * SUM_BYTES
    assert found.seconds == pytest.approx(USE.operations / 2.0 + moved / 7.0)
    assert found.bytes == USE.gradient_bytes


def test_width_multiplies_pairs_of_blocks_of_tokens():
    found = predict(USE, GRAM, PLAIN)
    pairs = 2 * 3 / 2  # of two blocks of four tokens
    operations = 3 * pairs * 4**2 * 2 * (8 + 8)
    assert found.seconds == pytest.approx(operations / 3.0 + USE.operations / 5.0)
    assert found.bytes == USE.factor_bytes


def test_width_takes_half_a_block_for_samples_that_fit_in_it():
    work = [
        predict(USE._replace(tokens=tokens), GRAM, replace(PLAIN, weighted=float("inf"))).seconds
        for tokens in (2, 3)
    ]
    assert work[0] == pytest.approx(work[1] / 4)


def test_input_length_computes_twice_and_writes_nothing():
    found = predict(USE, ACCUMULATE, PLAIN)
    assert found.seconds == pytest.approx(USE.operations * (1 / 2.0 + 1 / 5.0))
    assert found.bytes == USE.factor_bytes


def test_float32_products_are_slower():
    single = USE._replace(element_size=4)
    for algorithm in (GRAM, ACCUMULATE):
        both = [predict(use, algorithm, PLAIN).seconds for use in (single, USE)]
        assert both[0] == pytest.approx(both[1] / PLAIN.single)


def test_processors_divide_the_tiles_of_all_samples():
    rates = replace(PLAIN, step=1.0, processors=3)
    wide = USE._replace(outputs=9)  # two tiles, of one step each
    norm_and_sum = 2 * 2.0 + 2 * (2.0 * 8 * 8 * 8 * 3) * (1 / 2.0 + 1 / 5.0)
    assert predict(wide, ACCUMULATE, rates).seconds == pytest.approx(norm_and_sum)


def test_rates_are_an_h200s_by_multiprocessors(monkeypatch):
    properties = SimpleNamespace(multi_processor_count=66)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    rates = rates_of.__wrapped__(torch.device("cuda"))
    assert rates.processors == 66
    for name in ("product", "gram", "weighted", "bandwidth"):
        assert getattr(rates, name) == pytest.approx(getattr(Rates(), name) / 2)
    assert rates.single == Rates().single
    assert rates_of(torch.device("cpu")) == Rates()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", ["batch_size", "tokens", "inputs", "outputs"])
def test_more_work_takes_more_time(algorithm, name):
    rates, use = Rates(), LinearShape("w", 64, 1024, 2048, 2048, 2, 2)
    more = use._replace(**{name: 4 * getattr(use, name)})
    assert predict(more, algorithm, rates).seconds > predict(use, algorithm, rates).seconds
