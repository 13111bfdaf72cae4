"""Computes private clipping straight from its definition: one backward per sample.

Slow, in float64, and without any of the arithmetic that `dp_clipping` uses, of which nothing is
imported: tests and `experiments.verify_correctness` compare with it. A batch is
`(inputs, targets)`: `inputs` is a tensor or a dictionary of keyword arguments, `targets` a tensor,
and dimension 0 of every tensor in them counts samples.
"""

import copy
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dp_clipping.torch_compat import tree_leaves, tree_map

Inputs = Tensor | dict[str, Tensor]
Batch = tuple[Inputs, Tensor]
PerSampleLoss = Callable[[Tensor, Tensor], Tensor]
"""`per_sample_loss(outputs, targets)` -> [B]; sample i's loss depends on sample i only."""

Gradients = dict[str, Tensor]
"""Name of a trainable parameter -> [B, *its shape]; a tied one once, under its first name."""


class Widened(TorchFunctionMode):
    """Redirects casts to float32 to `dtype`; norms of Hugging Face's models contain such casts."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is Tensor.float:
            return args[0].to(self.dtype)
        widened = [self.dtype if value is torch.float32 else value for value in args]
        if kwargs is None:
            return function(*widened)
        named = {n: self.dtype if v is torch.float32 else v for n, v in kwargs.items()}
        return function(*widened, **named)


def forward(model: nn.Module, inputs: Inputs) -> Tensor:
    """Returns the output tensor of any model: the logits, if it returns several things."""
    outputs = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    return getattr(outputs, "logits", outputs)


def move(tensors: Any, *, device=None, dtype: torch.dtype | None = None) -> Any:
    """Returns a batch on another device; `dtype` is for its floating-point tensors only."""
    return tree_map(lambda x: x.to(device, dtype if x.is_floating_point() else None), tensors)


def pick(tensors: Any, which: slice | list[int] | Tensor) -> Any:
    """Returns some samples of a batch, the batch dimension kept."""
    return tree_map(lambda x: x[which], tensors)


def per_sample_sum(x: Tensor) -> Tensor:
    """Adds [B, ...] up to [B], also [B] itself and no samples."""
    return x[:, None].flatten(1).sum(1)


def per_sample_gradients(
    model: nn.Module,
    batch: Batch,
    per_sample_loss: PerSampleLoss,
    dtype: torch.dtype = torch.float64,
) -> Gradients:
    """Computes g_i for each sample i, by a forward and a backward of that sample alone.

    `model` is a plain module, without hooks of anything under test; a copy is used. Frozen
    parameters are left out, and a parameter that sample i does not reach has g_i = 0.
    """
    model = copy.deepcopy(model).to(dtype)
    batch = move(batch, dtype=dtype)
    size = len(batch[1])
    assert all(len(tensor) == size for tensor in tree_leaves(batch)), "dimension 0 is the batch"
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = {name: p.new_zeros(size, *p.shape) for name, p in parameters.items()}
    for i in range(size):
        inputs, targets = pick(batch, slice(i, i + 1))
        with Widened(dtype):
            losses = per_sample_loss(forward(model, inputs), targets)
        assert losses.shape == (1,), f"losses of one sample have shape {tuple(losses.shape)}"
        one = torch.autograd.grad(losses.sum(), list(parameters.values()), allow_unused=True)
        for name, gradient in zip(parameters, one, strict=True):
            if gradient is not None:
                gradients[name][i] = gradient
    return gradients


def norms(gradients: Gradients) -> Tensor:
    """Returns n_i = ‖g_i‖ over all parameters, [B]; not finite where the gradient is not."""
    squares = [per_sample_sum(g.square()) for g in gradients.values()]
    return torch.stack(squares).sum(0).sqrt()


def module_groups(names: Sequence[str]) -> list[list[str]]:
    """Returns parameter names by the module that owns them, in order of appearance."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.rpartition(".")[0], []).append(name)
    return list(groups.values())


def coefficients(
    gradients: Gradients,
    max_grad_norm: float | Sequence[float],
    clipping: str = "flat",
    clipping_function: str = "abadi",
    gamma: float = 0.01,
    groups: list[list[str]] | None = None,
) -> dict[str, Tensor]:
    """Returns c_i for each parameter, [B]: what g_i is multiplied with.

    | clipping    | groups                                             | thresholds               |
    | `flat`      | one, of all parameters                             | C                        |
    | `per_layer` | `groups`, or one for each module with K in all     | C / √K, or a list of C_k |

    | clipping_function | c_i of a group        |
    | `abadi`           | min(1, C_k / n_ik)    |
    | `automatic`       | C_k / (n_ik + γ)      |

    A sample whose gradient is not finite, wherever that is, has c_i = 0 for every parameter.
    """
    if clipping == "flat":
        groups = [list(gradients)]
    elif groups is None:
        groups = module_groups(list(gradients))
    assert sorted(chain(*groups)) == sorted(gradients), "each parameter is in one group"
    if isinstance(max_grad_norm, int | float):
        max_grad_norm = [max_grad_norm / len(groups) ** 0.5] * len(groups)
    finite = norms(gradients).isfinite()
    result = {}
    for names, threshold in zip(groups, max_grad_norm, strict=True):
        n = norms({name: gradients[name] for name in names})
        if clipping_function == "abadi":
            c = (threshold / n).clamp(max=1)
        else:
            assert clipping_function == "automatic", clipping_function
            c = threshold / (n + gamma)
        result |= dict.fromkeys(names, c.where(finite, 0))
    return {name: result[name] for name in gradients}


def clipped_sum(
    gradients: Gradients, max_grad_norm: float | Sequence[float], *options: Any, **named: Any
) -> dict[str, Tensor]:
    """Returns Σ_i c_i g_i for each parameter, without samples that are not finite.

    Further arguments are those of `coefficients`.
    """
    c = coefficients(gradients, max_grad_norm, *options, **named)
    finite = norms(gradients).isfinite()
    return {
        name: torch.tensordot(c[name][finite], g[finite], dims=1) for name, g in gradients.items()
    }
