"""Examples with a tag each, and canaries: units whose gradient is one coordinate of their own.

A canary is an example of the user's data whose own loss is multiplied by 0. In its place it has the
loss LARGE·C·w_i, where w_i is a number of its own in a table that is added to the network. So its
gradient is LARGE·C·e_i, and C·e_i once it is clipped: the private gradient of w_i tells of canary i
alone. Such Dirac canaries are those of M. Nasr et al., Tight auditing of differentially private
machine learning (2023, arXiv 2302.07956), and T. Steinke, M. Nasr and M. Jagielski (2023).
"""

import copy
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from dp_clipping.losses.private_loss import PrivateLoss
from dp_clipping.sampling.given_loader import batch_size_of

LARGE = 100.0


class Tagged(Dataset):
    """Examples of a data set, each with a tag.

    Args:
        dataset: map-style.
        rows: index and tag of each example.
    """

    def __init__(self, dataset: Any, rows: Sequence[tuple[int, float]]):
        self.dataset, self.rows = dataset, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> tuple[float, Any]:
        index, tag = self.rows[row]
        return tag, self.dataset[index]


class Kept(Dataset):
    """Returns what a data set has returned for some examples, also where it draws at random."""

    def __init__(self, dataset: Any, examples: Iterable[int], views: int):
        self._items = {i: [dataset[i] for _ in range(views)] for i in examples}
        self._asked: Counter[int] = Counter()

    def __getitem__(self, index: int) -> Any:
        items = self._items[index]
        self._asked[index] += 1
        # A collate may change what it is given.
        return copy.deepcopy(items[self._asked[index] % len(items)])


def tagged_loader(
    loader: DataLoader,
    rows: Sequence[tuple[int, float]],
    batch_first: bool,
    dataset: Dataset | None = None,
) -> DataLoader:
    """Returns a loader of these rows, whose batches are (tags, the user's batch).

    Tags are [B], or [1, B] where dimension 1 counts the samples. Items are those of `dataset`, by
    default the loader's own.
    """
    collate = loader.collate_fn

    def collate_tagged(samples: list[tuple[float, Any]]) -> tuple[Tensor, Any]:
        tags = torch.tensor([tag for tag, _ in samples], device="cpu")
        return tags if batch_first else tags[None], collate([item for _, item in samples])

    return DataLoader(
        Tagged(dataset or loader.dataset, rows), batch_size=batch_size_of(loader) or 1,
        collate_fn=collate_tagged,
    )  # fmt: skip


class CanaryNetwork(nn.Module):
    """The user's network with a number for each canary, which no other example reads.

    Called with the canary of each example [B], or `canaries` for none, and what the network is
    called with. Returns the network's loss, if it computes one, its outputs, and the numbers [B].
    """

    def __init__(self, network: nn.Module, canaries: int):
        super().__init__()
        self.network = network
        first = next(network.parameters())
        dtype = torch.float64 if first.dtype is torch.float64 else torch.float32
        self.table = nn.Embedding(
            canaries + 1, 1, padding_idx=canaries, device=first.device, dtype=dtype
        )
        nn.init.zeros_(self.table.weight)

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any, Tensor]:
        outputs = self.network(*args, **kwargs)
        return getattr(outputs, "loss", None), outputs, self.table(ids).flatten()


class Proxy:
    """The private model as the user's loss calls it, with what belongs to the audit left out.

    Args:
        model: a private model whose network is a `CanaryNetwork`.
        ids: the canaries of the batch.

    Attributes:
        values: the numbers of the canaries [B], after a call.
    """

    def __init__(self, model: Any, ids: Tensor):
        self._model, self._ids = model, ids
        self.values: Tensor | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        loss, outputs, self.values = self._model(self._ids, *args, **kwargs)
        if isinstance(loss, PrivateLoss):
            outputs.loss = loss
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model.network.network, name)
