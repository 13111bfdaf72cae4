"""Measures the rates of this machine's GPU once, and stores them for later runs.

    python -m dp_clipping.planning.calibration    measure, keep, print the rates before and after

The plan compares algorithms by the rates of `cost_model.Rates`. Without a measurement they
are an H200's, scaled by the number of multiprocessors. On another kind of GPU they may be wrong
relative to each other, and only that matters. Measured rates are kept in `rates.json` by
device, torch and Triton (see `kernels.tuning` for the folder), and `rates_of`
takes them from there. They are those of the tiles that the kernels take (`kernels.tuning`).

With `DP_CLIPPING_CALIBRATE=1` the first plan of a process measures too if none are kept: below two
seconds once the kernels are compiled, and half a GiB of the device for that time. Processes that
share a file share their plans, so calibrate before a run on several GPUs rather than in it.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import cycle, islice
from statistics import geometric_mean, median

import torch
from torch import Tensor

from dp_clipping.kernels.gradient import gradient_and_squares
from dp_clipping.kernels.gram import gram_squares
from dp_clipping.kernels.launch import tuning
from dp_clipping.kernels.launch.tuning import interleaved
from dp_clipping.kernels.sorted_coefficients import SortedCoefficients
from dp_clipping.kernels.weighted_product import weighted_product
from dp_clipping.kernels.weighted_sum import weighted_sum
from dp_clipping.planning.cost_model import (
    ACCUMULATE,
    GRAM,
    INSTANTIATE,
    SUM_BYTES,
    LinearShape,
    Rates,
    default_rates,
    predict,
    steps_of,
)
from dp_clipping.table import aligned

FILE = "rates.json"
MEASURED = ("product", "gram", "weighted", "single", "bandwidth")
UNITS = {"product": 1e12, "gram": 1e12, "weighted": 1e12, "single": 1, "bandwidth": 1e12}
SHAPES = ((8, 1024, 4096, 2048), (16, 512, 2048, 2048))  # B, T, d, p; in bfloat16
SINGLE_SHAPE = (4, 256, 2048, 1024)  # in float32
SETS = 3  # of operands, so that a call finds none in the second-level cache
GRAM_LAYERS = 8  # that share a launch
ROUNDS = 7


# ---- what is kept -------------------------------------------------------------------------------


def stored(device: torch.device) -> Rates | None:
    """Returns the rates that are kept for a device."""
    values = tuning.read(FILE, device)
    if not all(_is_rate(values.get(name)) for name in MEASURED):
        return None
    return replace(default_rates(device), **{name: values[name] for name in MEASURED})


def store(device: torch.device, rates: Rates) -> None:
    """Stores a device's rates beside those of other devices."""
    tuning.keep(FILE, device, {name: getattr(rates, name) for name in MEASURED})


def _is_rate(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value) and value > 0


# ---- who measures -------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def rates_of(device: torch.device) -> Rates:
    """Returns a device's rates: those that are kept, or an H200's by its multiprocessors.

    If none are kept they are measured now, where the environment asks for it.
    """
    if device.type != "cuda":
        return Rates()
    rates = stored(device)
    if rates is None and os.environ.get("DP_CLIPPING_CALIBRATE") == "1":
        rates = calibrate(device)
    return rates or default_rates(device)


def calibrate(device: torch.device) -> Rates:
    """Measures and keeps the rates."""
    rates = measure(device)
    store(device, rates)
    return rates


# ---- measuring ----------------------------------------------------------------------------------


def measure(device: torch.device) -> Rates:
    """Measures with the kernels, each rate so that the plan predicts what they took.

    The device is the current one.
    """
    rates = default_rates(device)
    found: dict[str, list[float]] = {}
    for shape in SHAPES:
        for name, rate in _half_precision(shape, rates, device).items():
            found.setdefault(name, []).append(float(rate))
    means = {name: geometric_mean(values) for name, values in found.items()}
    single = _single_precision(SINGLE_SHAPE, rates, device)
    return replace(rates, **means, single=single / means["product"])


def _half_precision(shape: tuple[int, ...], rates: Rates, device: torch.device) -> dict[str, float]:
    """Measures operations or bytes per second of each 16-bit kernel."""
    use = _use(shape, torch.bfloat16)
    sets = _operands(shape, torch.bfloat16, device)
    coefficients = torch.linspace(0.1, 1.0, use.batch_size, device=device)
    weights = SortedCoefficients.of(coefficients)
    kept = [gradient_and_squares(*operands)[0] for operands in sets]
    rows = [(a, [y]) for y, a in islice(cycle(sets), GRAM_LAYERS)]
    calls = {
        "product": lambda number: gradient_and_squares(*sets[number % SETS], store=False),
        "gram": lambda number: gram_squares(rows),
        "weighted": lambda number: weighted_product(*sets[number % SETS], weights),
        "bandwidth": lambda number: weighted_sum(kept[number % SETS], coefficients),
    }
    seconds = _seconds(calls, device)
    return {
        "product": _rate(use, INSTANTIATE, "product", rates, seconds["product"]),
        "gram": _rate(use, GRAM, "gram", rates, seconds["gram"] / GRAM_LAYERS),
        "weighted": _rate(use, ACCUMULATE, "weighted", rates, seconds["weighted"]),
        "bandwidth": (kept[0].nbytes + kept[0][0].numel() * SUM_BYTES) / seconds["bandwidth"],
    }


def _single_precision(shape: tuple[int, ...], rates: Rates, device: torch.device) -> float:
    """Measures operations per second of float32 products."""
    use, sets = _use(shape, torch.float32), _operands(shape, torch.float32, device)
    rates = replace(rates, single=1.0)
    call = lambda number: gradient_and_squares(*sets[number % SETS], store=False)  # noqa: E731
    seconds = _seconds({"single": call}, device)["single"]
    return _rate(use, INSTANTIATE, "product", rates, seconds)


def _rate(use: LinearShape, algorithm: str, name: str, rates: Rates, seconds: float) -> float:
    """Returns the rate at which the plan predicts `seconds` for one kernel of an algorithm.

    Steps of the kernels' tiles are what they are: the rest of the time is work at the rate.
    """
    free = {other: math.inf for other in ("product", "gram", "weighted", "bandwidth")}
    work = predict(use, algorithm, replace(rates, **free | {name: 1.0, "step": 0.0})).seconds
    steps = 0.0 if name == "gram" else steps_of(use, rates)
    return work / max(seconds - steps, seconds / 2)


def _use(shape: tuple[int, ...], dtype: torch.dtype) -> LinearShape:
    batch_size, tokens, outputs, inputs = shape
    return LinearShape("layer", batch_size, tokens, inputs, outputs, dtype.itemsize, dtype.itemsize)


def _operands(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """Returns SETS of y [B, T, d] and a [B, T, p], from a generator of their own."""
    batch_size, tokens, outputs, inputs = shape
    generator = torch.Generator(device).manual_seed(0)
    normal = lambda n: torch.randn(  # noqa: E731
        batch_size, tokens, n, generator=generator, device=device, dtype=dtype
    )
    return [(normal(outputs), normal(inputs)) for _ in range(SETS)]


def _seconds(calls: dict[str, Callable], device: torch.device) -> dict[str, float]:
    """Returns the seconds of one call of each."""
    samples = interleaved(calls, device, ROUNDS)
    return {name: median(values) * 1e-3 for name, values in samples.items()}


# ---- the command --------------------------------------------------------------------------------


def table(before: Rates, after: Rates) -> str:
    """Returns one line a rate: unit, before, after."""
    rows = [["rate", "unit", "before", "after"]]
    for name in MEASURED:
        unit = {"single": "of product", "bandwidth": "TB/s"}.get(name, "TFLOP/s")
        old, new = (getattr(rates, name) / UNITS[name] for rates in (before, after))
        rows.append([name, unit, f"{old:.4g}", f"{new:.4g}"])
    return "\n".join(aligned(rows, [False, False, True, True]))


def main() -> int:
    if not torch.cuda.is_available():
        print("dp_clipping.planning.calibration: needs a CUDA device", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    before = stored(device)
    print(f"{tuning.key_of(device)}: before {'by default' if before is None else 'kept'}")
    print(table(before or default_rates(device), calibrate(device)))
    print(f"kept in {tuning.path_of(FILE)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
