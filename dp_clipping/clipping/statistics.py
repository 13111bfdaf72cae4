"""Computes clipped fraction and histogram of the norms of the global batch.

They depend on the samples without noise: ε does not cover them. Look at them, but do not
publish them; with `hide_unprotected=True` they are refused. They are the same on every rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NOT_COVERED = "Not covered by ε: for you to look at, not to publish."
"""Ends texts that show what depends on the samples without noise."""

EDGES = tuple(2.0 ** (k / 2) for k in range(-12, 13))
"""Edges of the histogram's bins relative to C: half octaves from C/64 to 64 C."""


@dataclass(frozen=True)
class NormStatistics:
    """Clipped fraction and histogram of one step's global batch. Not covered by ε.

    Attributes:
        samples: the number of samples of all ranks together.
        nonfinite: those whose norm is not finite, which no sum holds.
        clipped: those with a finite norm above C, or in any clipping group above its C_k.
        clipped_by_group: the same for each of K groups.
        histogram: of finite norms over all groups: below `edges[0]`, from each edge (included) to
            the next one, from the last one on; one number more than edges.
        edges: C · `EDGES`, where C² = Σ C_k².
    """

    samples: int
    nonfinite: int
    clipped: int
    clipped_by_group: tuple[int, ...]
    histogram: tuple[int, ...]
    edges: tuple[float, ...]

    @property
    def clipped_fraction(self) -> float:
        """Returns the part of the samples with finite norms that was clipped; 0 of none."""
        return self.clipped / max(1, self.samples - self.nonfinite)

    def __str__(self) -> str:
        return f"{self!r}\n{NOT_COVERED}"


def norm_statistics(squares: Tensor, clip_norms: Sequence[float]) -> NormStatistics:
    """Returns statistics of squared norms [K, G] (`NormReducer.gather`).

    Args:
        squares: the same on every rank.
        clip_norms: C_k of the step that the norms are of.
    """
    squares = squares.detach().double()
    finite = squares.isfinite().all(0)
    squares = squares[:, finite]
    bounds = torch.tensor(clip_norms, dtype=torch.float64, device=squares.device)
    above = squares.sqrt() > bounds[:, None]
    threshold = sum(limit * limit for limit in clip_norms) ** 0.5
    edges = tuple(threshold * edge for edge in EDGES)
    places = torch.tensor(edges, dtype=torch.float64, device=squares.device)
    bins = torch.bucketize(squares.sum(0).sqrt(), places, right=True)
    return NormStatistics(
        samples=len(finite),
        nonfinite=int((~finite).sum()),
        clipped=int(above.any(0).sum()),
        clipped_by_group=tuple(above.sum(1).tolist()),
        histogram=tuple(bins.bincount(minlength=len(edges) + 1).tolist()),
        edges=edges,
    )
