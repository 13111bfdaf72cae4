"""Steps as CUDA graphs: an ordinary one is captured here, a private one by `optimizer.graphed`.

    training, batch = training_of(variant, row, is_small, device, cuda_graph=True)
    graphed, pinned = GraphedTraining(training, len(batch[1])), in_pinned_memory(batch)
    graphed.backward(pinned)        # eager, EAGER times; then captured; then one launch per step

On both sides the inputs of a step are copied from pinned memory to where the graph reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ddp_by_hand.experiments.networks.training import NetworkTraining
from ddp_by_hand.lm.timing import MIB
from dp_clipping import BatchMemoryManager
from dp_clipping.cuda_graph import EAGER, capturing
from dp_clipping.torch_compat import tree_leaves, tree_map


class OrdinaryGraph:
    """A step without privacy: eager at first, then captured, then replayed.

    Args:
        body: one whole step. It gets its arguments with all tensors on the device.
    """

    def __init__(self, body: Callable[..., None], device: torch.device):
        self._body, self._device = body, device
        self._eager_steps = 0
        self._graph: Any = None
        self._inputs: Any = None

    @property
    def is_captured(self) -> bool:
        return self._graph is not None

    def __call__(self, *args: Any) -> None:
        if self._inputs is None:
            self._inputs = tree_map(lambda x: torch.empty_like(x, device=self._device), args)
        for static, given in zip(tree_leaves(self._inputs), tree_leaves(args), strict=True):
            static.copy_(given, non_blocking=True)
        if self._graph is not None:
            self._graph.replay()
        elif self._eager_steps < EAGER:
            self._eager_steps += 1
            self._on_another_stream()
        else:
            graph = torch.cuda.CUDAGraph()
            with capturing(graph):
                self._body(*self._inputs)
            graph.replay()
            self._graph = graph

    def _on_another_stream(self) -> None:
        """Runs the body as it will be captured: autograd's nodes keep the stream they began on."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._body(*self._inputs)
        torch.cuda.current_stream().wait_stream(stream)


class GraphedTraining:
    """Captures whole training steps in CUDA graphs, after which a step is one launch.

    See `lm.timing.Trainee`: a step has no second part.

    Attributes:
        capture_peak_mb: the peak of memory in the capture, in MiB. A replay allocates nothing.
    """

    def __init__(self, training: NetworkTraining, samples: int, device: torch.device):
        def body(inputs: Any, targets: Tensor) -> None:
            training.backward((inputs, targets))
            training.step()

        self.capture_peak_mb = 0.0
        self._announced: Iterator[Any] | None = None
        self._step: Any
        if hasattr(training.optimizer, "graphed"):
            self._step = training.optimizer.graphed(body)
            self._announced = _batches(training, samples)
        else:
            self._step = OrdinaryGraph(body, device)

    def backward(self, batch: tuple[Any, Tensor]) -> None:
        """Makes a whole step."""
        if self._announced is not None:
            next(self._announced)
        if self._step.is_captured:
            self._step(*batch)
            return
        torch.cuda.reset_peak_memory_stats()
        self._step(*batch)
        self.capture_peak_mb = torch.cuda.max_memory_allocated() / MIB

    def step(self) -> None:
        """Does nothing: the graph contains the optimizer's step."""

    def check(self) -> None:
        """Raises RuntimeError unless steps are replays from here on."""
        if not self._step.is_captured:
            raise RuntimeError("the step was not captured in the warm-up: give it more steps")


def in_pinned_memory(batch: tuple[Any, Tensor]) -> tuple[Any, Tensor]:
    """Returns the batch on the host, from where a GPU takes it without a wait."""
    return tree_map(lambda x: x.cpu().pin_memory(), batch)


def _batches(training: NetworkTraining, samples: int) -> Iterator[Any]:
    """Announces batches of `samples` samples to the private optimizer, one at a time."""
    while True:
        with BatchMemoryManager(
            data_loader=training.loader, max_physical_batch_size=samples,
            optimizer=training.optimizer, pad_batches=True,
        ) as batches:  # fmt: skip
            yield from batches
