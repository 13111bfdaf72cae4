"""Compares what a registered function returns with autograd on single samples, run alone.

It compares the gradients that the step is about to clip: in backwards 1, 2, 4, 8, ... of a layer,
and in each backward until a gradient was not zero.
"""

from typing import Any

import torch
from torch import Tensor

from dp_clipping.clipping.accumulation import full_float32
from dp_clipping.layers.registered.norm_and_sum import NormAndSum
from dp_clipping.trials.tolerances import ALONE

SAMPLES = 4  # that are compared in a backward
ROUNDINGS = 8  # of the output's gradient, that a function may be off by
TINY = 1e-18  # a norm whose square may be lost


def refuse_wrong(use: Any, gradient: Tensor, tensors: list[Tensor], found: Any) -> None:
    """Raises ValueError if G of a sample differs from autograd's for that sample alone.

    Args:
        use: the layer's call (`module.Use`).
        gradient: of the output, as the network has it; `tensors`: the inputs, likewise.
        found: what the function has returned for the whole batch.
    """
    schedule, rows = use.step.context.schedule_of(use.handle.name), use.rows
    if not schedule.is_due():
        schedule.skip(1)
        return
    step = max(1, rows // SAMPLES)
    first = schedule.checks % step
    is_zero = True
    for i in range(first, rows, step):
        for name, (g, rounding) in _alone(use, gradient, tensors, i).items():
            got = use.row(found[name], i)
            tolerance = ALONE.of(got.dtype, g.dtype)
            error = float((got.double() - g.double()).norm())
            size = float(g.double().norm())
            is_zero = is_zero and size == 0
            if size < float("inf") and not error <= tolerance * size + ROUNDINGS * rounding:
                raise ValueError(_message(use, name, i, error, size))
    for name, one in found.items():
        if isinstance(one, NormAndSum):
            _compare_norms(use, name, one, range(first, rows, step))
    if not is_zero:  # which tells nothing
        schedule.skip(1)
        schedule.checks += 1


def _compare_norms(use: Any, name: str, found: NormAndSum, samples: range) -> None:
    """Raises ValueError if a norm is not that of the summed values, or a sum is not linear in c."""
    norms, slack = found.sums.norms[name], found.sums.slack
    c = norms.new_zeros(use.rows, dtype=torch.float32)
    c[list(samples)] = torch.linspace(0.2, 0.9, len(samples), device=c.device)
    expected, size = torch.zeros_like(use.trainable[name], dtype=torch.float64), 0.0
    for i in samples:
        g = use.row(found, i).double()
        own, given = float(g.norm()), float(norms[i])
        if own < float("inf") and not abs(given - own) <= slack / 2 * own + TINY:
            raise ValueError(
                f"the norm registered for {use.title} is wrong: for {name!r} of sample {i} it is "
                f"{given:.8g}, and what weighted_sum returns for that sample alone has the norm "
                f"{own:.8g}; return that norm to {slack / 2:.0e} of itself, in float64 where "
                "tokens cancel, or leave out register_layer, and torch.vmap computes it"
            )
        expected += float(c[i]) * g
        size += own
    error = float((found.sums.sum_of(name, c).double() - expected).norm())
    if size < float("inf") and not error <= slack * size + TINY:
        raise ValueError(
            f"the weighted_sum registered for {use.title} is wrong: for {name!r} the sum of "
            f"{len(samples)} samples differs by {error:.3g} from their gradients, multiplied by "
            "their coefficients: return the sum of c_i G_i, as (c @ gradients.flatten(1))"
        )


def _alone(
    use: Any, gradient: Tensor, tensors: list[Tensor], i: int
) -> dict[str, tuple[Tensor, float]]:
    """Returns the gradients of sample i alone, by a forward of the layer itself.

    And how far each moves if every number of the output's gradient is rounded: where tokens cancel,
    the gradient itself may be no longer than that.
    """
    leaves = list(use.leaves)
    own = {n: p.detach().requires_grad_() for n, p in use.trainable.items()}
    dtype = max((p.dtype for p in own.values()), key=lambda dtype: dtype.itemsize)
    for n, x, layout in zip(use.places, tensors, use.layouts, strict=True):
        x = x if layout.kind == "shared" else _only(x, layout, use.rows, i)
        is_narrow = x.is_floating_point() and x.element_size() < dtype.itemsize
        leaves[n] = x.to(dtype) if is_narrow else x  # as under autocast, which backward leaves
    with torch.enable_grad(), full_float32(layers=True):
        y = use.run(own, leaves)
        gy = _only(gradient, use.of_output, use.rows, i).to(y.dtype)
        draw = torch.Generator(gy.device).manual_seed(0)
        signs = torch.randn(gy.shape, generator=draw, device=gy.device, dtype=torch.float32).sign()
        found, moved = (
            torch.autograd.grad(y, list(own.values()), x, allow_unused=True, retain_graph=True)
            for x in (gy, (gy * signs).to(gy.dtype))
        )
    unit = torch.finfo(gy.dtype).eps
    return {
        n: (torch.zeros_like(p), 0.0) if g is None else (g, unit * float(change.double().norm()))
        for (n, p), g, change in zip(own.items(), found, moved, strict=True)
    }


def _only(x: Tensor, layout: Any, rows: int, i: int) -> Tensor:
    """Returns one sample of x, where the network has it."""
    return layout.restore(layout.batch_first(x, rows)[i : i + 1])


def _message(use: Any, name: str, i: int, error: float, size: float) -> str:
    return (
        f"the function registered for {use.title} is wrong: for {name!r} of sample {i} it differs "
        f"by {error:.3g} from the gradient of that sample alone, whose norm is {size:.3g}; return "
        "that gradient, of the sample's own inputs alone (a layer that draws random numbers "
        "cannot be registered: draw them outside of it), or leave out register_layer, and "
        "torch.vmap computes it"
    )
