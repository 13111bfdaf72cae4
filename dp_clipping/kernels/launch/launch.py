"""Launches kernels: what Triton decides for each call is decided once for each kind of call.

Triton binds the arguments, derives from their types, alignment and values which compiled variant
serves them, and makes its key a string: in each launch, some 25 µs in Python, which a step of a
hundred launches waits for. All of it follows from what `launch` looks up at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dp_clipping.kernels.launch.tiles import ALIGNMENT, TRITON_DTYPES, triton
from dp_clipping.torch_compat import current_stream

if triton is not None:
    from triton.knobs import runtime

MOST = 1 << 14  # variants that are known: batches and lengths vary

_known: dict[tuple, tuple] = {}


def launch(
    kernel: Any, grid: tuple[int, ...], tensors: Sequence[Tensor | None],
    numbers: tuple[float, ...] = (), **constants: Any,
) -> None:  # fmt: skip
    """Launches a kernel, as `kernel[grid](*tensors, *numbers, **constants)` does.

    Args:
        tensors: its first arguments, the first of them on the device that it runs on.
        numbers: the arguments behind them; each is an int in all calls, or a float in all.
        constants: its `constexpr` parameters and the options of the compiler. A dtype is PyTorch's.
    """
    device = tensors[0].device
    key = [id(kernel), device, numbers, *constants.items()]
    for x in tensors:
        key += (None,) if x is None else (x.dtype, x.data_ptr() % ALIGNMENT == 0)
    key = tuple(key)
    known = _known.get(key)
    if known is None or runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
        named = {n: TRITON_DTYPES[x] if type(x) is torch.dtype else x for n, x in constants.items()}
        compiled = kernel[grid](*tensors, *numbers, **named)
        if compiled is not None:  # no interpreter
            if len(_known) >= MOST:
                _known.clear()
            names = kernel.arg_names[len(tensors) + len(numbers) :]
            values = [named[name] for name in names]
            _known[key] = compiled.run, compiled.function, compiled.packed_metadata, values
        return
    run, function, metadata, values = known
    x, y, z, *_ = (*grid, 1, 1)
    stream = current_stream(device.index) if device.type == "cuda" else 0
    run(x, y, z, stream, function, metadata, None, None, None, *tensors, *numbers, *values)
