"""Adds the noise of a step to clipped sums: by Triton kernels on a GPU, else by their reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from dp_clipping.distributed.placement import Place
from dp_clipping.noise import gaussian
from dp_clipping.noise import kernel as kernels
from dp_clipping.noise.correlated import CorrelatedNoise
from dp_clipping.noise.fused_update import Update
from dp_clipping.noise.gaussian import (
    CHUNK,
    GAUSSIAN,
    NoiseStream,
    Values,
    add_noise_plain,
    add_noise_to_short,
)
from dp_clipping.noise.mechanisms import mechanism_of

SHORT = TOGETHER = 4 * CHUNK  # elements of a tensor, and of several, that get noise at once


def add_noise_to_all(
    totals: list[Tensor], streams: list[NoiseStream], *, std: float, divisor: float,
    dtypes: list[torch.dtype], places: Sequence[Place | None] | None = None,
    table: kernels.StreamTable | None = None, values: Values = GAUSSIAN,
    earlier: Sequence[tuple[float, list[NoiseStream]]] = (),
    updates: Sequence[Update | None] = (),
) -> list[Tensor]:  # fmt: skip
    """Returns `(total + std·(z + Σ w·z')) / divisor` of each total, in few launches and in order.

    Computed in float32 and cast last. Element i of a total, counted in row-major order, gets z[i]
    of its stream, or that of its place in the parameter.

    Args:
        totals: any shapes and strides, float32 (or float64, for tests: then computed in float64 on
            the same z). Contiguous ones whose dtype stays are overwritten.
        std: standard deviation of the noise on a sum, σC or σC/√W for one of W shares; 0 adds
            nothing.
        divisor: the expected global batch size, a public constant.
        dtypes: the dtypes of the results.
        places: where each total lies in its parameter; None: it is the whole.
        table: where a CUDA graph that is captured reads the streams of whole parameters. It has
            none of earlier steps.
        values: how words become z; kernels make normal numbers alone.
        earlier: each w, and a stream of z' per total, if noise of earlier steps is added again.
        updates: of totals whose result updates a parameter at once, how; see `fused_update`.

    Returns:
        Contiguous tensors; the parameter itself where it has been updated.

    Raises:
        ValueError: a negative or non-finite `std`, or a `divisor` that is not positive and finite.
    """
    check_scales(std, divisor)
    # Noise joins a sum before the cast.
    assert {total.dtype for total in totals} <= {torch.float32, torch.float64}
    places = [None] * len(totals) if places is None else places
    totals = list(map(Tensor.contiguous, totals))
    updates = updates or [None] * len(totals)
    results, alike = [], dict[tuple, list[int]]()
    for i, (total, dtype, place, update) in enumerate(
        zip(totals, dtypes, places, updates, strict=True)
    ):
        if update is not None:
            result = update.weight
        else:
            result = total if total.dtype == dtype else torch.empty_like(total, dtype=dtype)
        results.append(result)
        rule = None if update is None else update.rule
        alike.setdefault((rule, total.dtype, dtype, total.device, place is None), []).append(i)
    for (rule, *_, are_whole), numbers in alike.items():
        sums, noisy = [totals[i] for i in numbers], [results[i] for i in numbers]
        own = [streams[i] for i in numbers]
        more = [(weight, [others[i] for i in numbers]) for weight, others in earlier]
        if std == 0 and rule is None:
            for total, result in zip(sums, noisy, strict=True):
                torch.div(total, divisor, out=result)
        elif rule is not None or (values is GAUSSIAN and gaussian.serves(sums[0])):
            make = None if table is None else partial(table.take, numbers)
            own_places: Any = None if are_whole else [places[i] for i in numbers]
            with torch.cuda.device_of(sums[0]):
                kernels.add_noise_kernel_launch(
                    sums, noisy, own, own_places, std, divisor, make, more,
                    [] if rule is None else [updates[i] for i in numbers],
                )  # fmt: skip
        elif are_whole and not more:
            _add_noise_plain_to_wholes(sums, noisy, own, std, divisor, values)
        else:
            for i, total, result, stream in zip(numbers, sums, noisy, own, strict=True):
                add_noise_plain(
                    total.view(-1), result.view(-1), stream, std, divisor, places[i], values,
                    [(weight, others[i]) for weight, others in earlier],
                )  # fmt: skip
    return results


def _add_noise_plain_to_wholes(
    totals: list[Tensor], results: list[Tensor], streams: list[NoiseStream], std: float,
    divisor: float, values: Values,
) -> None:  # fmt: skip
    """Adds noise to whole parameters of one dtype in PyTorch, to many short ones at a time."""
    short = []
    for i, total in enumerate(totals):
        if total.numel() > SHORT:
            flat, out = total.view(-1), results[i].view(-1)
            add_noise_plain(flat, out, streams[i], std, divisor, values=values)
        else:
            short.append(i)
    while short:
        size, some = 0, []
        while short and (size := size + totals[short[-1]].numel()) <= TOGETHER:
            some.append(short.pop())
        add_noise_to_short(
            [totals[i] for i in some], [results[i] for i in some], [streams[i] for i in some],
            std, divisor, values,
        )  # fmt: skip


def check_scales(std: float, divisor: float) -> None:
    """Raises ValueError for a standard deviation or a divisor out of range."""
    if not (math.isfinite(std) and std >= 0):
        raise ValueError(f"std must be finite and not negative, got {std}")
    if not (math.isfinite(divisor) and divisor > 0):
        raise ValueError(f"divisor must be finite and positive, got {divisor}")


class NoiseSource(Protocol):
    """Adds the noise of a step: `AddressedNoise`, `noise.secure.source.SecureNoise`."""

    spans_steps: bool

    @property
    def add(self) -> Callable[..., list[Tensor]]: ...


class AddressedNoise:
    """Noise of `NoiseStream`s: that of a step alone, or with the noise of earlier steps.

    Nothing is kept from one step to the next. The noise of an element is a function of the key, the
    step, the parameter and the element's place in it alone, so shards, replicas and resumed runs
    agree on it.

    Args:
        values: how random words become noise; default: normal numbers.
        correlated: how many earlier steps' noise is generated again, and with which weights.

    Attributes:
        spans_steps: noise of earlier steps is in that of a step, so σ and C must never change.
    """

    def __init__(
        self, values: Values = GAUSSIAN, correlated: CorrelatedNoise | None = None
    ) -> None:
        self.values, self.correlated = values, correlated
        self.spans_steps = correlated is not None

    def add(
        self, totals: list[Tensor], parameters: Sequence[str], *, key: bytes, step: int, std: float,
        divisor: float, dtypes: list[torch.dtype], places: Sequence[Place | None] | None = None,
        table: kernels.StreamTable | None = None, updates: Sequence[Update | None] = (),
    ) -> list[Tensor]:  # fmt: skip
        """Returns (total + std·Σ_j w_j z_{step-j}) / divisor of each total; one pass over them.

        Args:
            parameters: the full name of the parameter that each total belongs to.
            key: the noise key of the run, 32 bytes.
            step: the optimizer step, from 0.
            totals, std, divisor, dtypes, places, table, updates: as of `add_noise_to_all`.
        """
        streams = partial(NoiseStream.derive_all, key, parameters=parameters, share=0)
        earlier = []
        if self.correlated is not None:
            _, *weights = self.correlated.weights(step + 1)
            earlier = [(weight, streams(step=step - j)) for j, weight in enumerate(weights, 1)]
        return add_noise_to_all(
            totals, streams(step=step), std=std, divisor=divisor, dtypes=dtypes, places=places,
            table=table, values=self.values, earlier=earlier, updates=updates,
        )  # fmt: skip


def source_of(noise_mechanism: str | CorrelatedNoise) -> NoiseSource:
    """Returns the source of a noise mechanism's noise.

    Raises:
        ValueError: for a mechanism that was not registered.
    """
    if isinstance(noise_mechanism, CorrelatedNoise):
        return AddressedNoise(correlated=noise_mechanism)
    mechanism = mechanism_of(noise_mechanism)
    return AddressedNoise(GAUSSIAN if mechanism is None else mechanism.values)
