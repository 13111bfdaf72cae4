"""The correctness gate: before anything is timed, every implementation is proved right here.

Data-parallel training is right when W ranks with a shard each get the gradient that one process
gets from the whole batch. So each rank also computes that, alone, in float32, and compares. `none`
does not communicate, and is compared with the rank's own shard.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from bench.settings import Settings, batches_for, label
from bench.training import build_network, max_over_ranks, release_memory, wrap_network
from lm.model import forward_loss
from lm.runtime import Worker

TOLERANCE = 1e-4  # float32 sums in another order differ by about 1e-6; a wrong one by far more
STEPS = 2  # the second step meets rebuilt buckets and gradients that were cleared


class Gate:
    """Reference gradients of the whole global batch and of this rank's shard, in float32.

    `note` is told how far it has come.
    """

    def __init__(self, settings: Settings, worker: Worker, note: Callable[[str], None]):
        self._settings, self._worker, self._note = settings, worker, note
        network = build_network(settings, worker.device, "float32")
        shards = range(worker.world_size)
        self._whole = [self._reference(network, step, shards) for step in range(STEPS)]
        self._own = [self._reference(network, step, [worker.rank]) for step in range(STEPS)]
        del network
        release_memory(worker.device)

    def error(self, name: str) -> float:
        """The largest relative error of any parameter's gradient, step and rank."""
        network = build_network(self._settings, self._worker.device, "float32")
        model = wrap_network(name, network, self._settings.bucket_size_mb)
        expected = self._own if name == "none" else self._whole
        errors = []
        for step in range(STEPS):
            self._note(f"{label(name)} (gate), step {step}")
            forward_loss(model, self._batch(step, self._worker.rank)).backward()
            model.finish_gradient_synchronization()
            errors.append(relative_error(gradients_of(network), expected[step]))
            network.zero_grad(set_to_none=True)
        del model, network
        release_memory(self._worker.device)
        return max(max_over_ranks(errors, self._worker.device))

    def _reference(self, network: nn.Module, step: int, ranks: range | list[int]) -> list[Tensor]:
        for rank in ranks:
            self._note(f"reference gradients (gate), step {step}, batch of rank {rank}")
            (forward_loss(network, self._batch(step, rank)) / len(ranks)).backward()
        gradients = gradients_of(network)
        network.zero_grad(set_to_none=True)
        return gradients

    def _batch(self, step: int, rank: int) -> tuple[Tensor, Tensor]:
        batches = batches_for(self._settings, rank, self._worker.world_size)
        inputs, targets = batches(step)
        return inputs.to(self._worker.device), targets.to(self._worker.device)


def gradients_of(network: nn.Module) -> list[Tensor]:
    """In float32; zeros where a parameter has none, so that a missing gradient is an error."""
    return [
        torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
        for p in network.parameters()
    ]


def relative_error(gradients: list[Tensor], expected: list[Tensor]) -> float:
    """max over parameters of ‖g − r‖ / (‖r‖ + 1e-3 · ‖all r‖); infinite for NaN.

    The second term keeps a parameter whose gradient is nearly zero from being judged by rounding.
    """
    norms = torch.stack([r.norm() for r in expected])
    differences = torch.stack([(g - r).norm() for g, r in zip(gradients, expected, strict=True)])
    worst = (differences / (norms + 1e-3 * norms.norm())).max().item()
    return worst if worst == worst else float("inf")
