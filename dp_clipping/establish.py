"""Before a step: where the samples are is known, on one rank or, of a sharded model, on all.

`search` finds it with two forwards; this decides when to look, and with whose samples. All ranks of
a sharded model run the same forwards, whatever their own batches: they gather parameters together.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dp_clipping.batch import Batch
from dp_clipping.capture import Capture, tensors_in
from dp_clipping.carried import Carried, kept
from dp_clipping.compiled import Forecast, Forecaster
from dp_clipping.independence import check_network
from dp_clipping.layout import FEW, MORE
from dp_clipping.search import Search, without_dropout
from dp_clipping.session import drop_what_was_ready
from dp_clipping.sharded import Sharding


class Establishment:
    """What has been found out about a captured network, and from how many samples.

    A batch of one sample tells little: beside one, every dimension of size one may count samples.
    What it gave is provisional until a larger batch comes.
    """

    def __init__(
        self, network: nn.Module, capture: Capture, sharding: Sharding | None, batch_first: bool
    ):
        self._network, self._capture, self._sharding = network, capture, sharding
        self.carried = Carried(
            network, self._forward_and_backward, batch_first, is_sharded=sharding is not None
        )
        self._search = Search(capture)
        self._forecaster = Forecaster(self._search)
        self._is_known = self._is_provisional = False

    def ensure(self, batch: Batch) -> None:
        """Look, unless it is known. With a sharding all ranks call it together.

        Raises:
            ValueError: naming the layer whose samples cannot be found, or a module that mixes them.
        """
        if self._sharding is not None:
            self._ensure_together(batch)
        elif not self._is_known or (batch.size >= FEW and self._is_provisional):
            self.look(batch)

    def look(self, batch: Batch) -> None:
        """Look, on this rank."""
        self._look(batch.with_samples(FEW), batch.with_samples(MORE), batch.size)

    def forget(self) -> None:
        """The way in which layers are called has changed: look at the next batch."""
        self._is_known = False
        self._search.forget()
        self._forecaster.forget()
        self._capture.plans.clear()

    def forecast(self, batch: Batch) -> Forecast:
        """What linear layers will be given, where compiled code must know it beforehand."""
        return self._forecaster.of(batch.first_sample(), batch.with_samples)

    def _look(self, few: tuple, more: tuple, size: int) -> None:
        """From the arguments of two forwards, made of a batch of so many samples."""
        if self._is_provisional or size < FEW:
            self._search.forget()
            self._forecaster.forget()
        with kept(self.carried.state, lambda: self.carried.refuse(few)):
            self._search.establish(few, more)
            if size >= FEW:
                check_network(self._capture, few, more)
        self._is_known, self._is_provisional = True, size < FEW

    # ---- what is carried from batch to batch ----------------------------------------------------

    def _forward_and_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Outputs, and where it is one rank's affair gradients, of a plain step."""
        with (
            self._capture.looked_at(lambda *_: None),
            without_dropout(self._network),
            torch.set_grad_enabled(self._sharding is None),
        ):
            outputs = self._network(*args, **kwargs)
            ends = [y.float().square().sum() for y in tensors_in(outputs) if y.requires_grad]
            return outputs, self._gradients(sum(ends)) if ends else ()

    def _gradients(self, total: Tensor) -> tuple[Tensor | None, ...]:
        try:
            return torch.autograd.grad(total, self._capture.parameters, allow_unused=True)
        except Exception:  # the step's own backward will say so
            drop_what_was_ready()
            return ()

    def _ensure_together(self, batch: Batch) -> None:
        """With the samples of one rank, which has most.

        Once all have done so with a batch of some samples no rank asks the others again.
        """
        if self._is_known and not self._is_provisional:
            return
        everyone = self._sharding.everyone
        sizes: list[int] = [0] * dist.get_world_size(everyone)
        dist.all_gather_object(sizes, batch.size, group=everyone)
        largest = max(sizes)
        if self._is_known and largest < FEW:
            return
        source = sizes.index(largest)
        given = [None, None]
        if dist.get_rank(everyone) == source:
            given = [_moved(batch.with_samples(n), torch.device("cpu")) for n in (FEW, MORE)]
        dist.broadcast_object_list(given, group=everyone, group_src=source)
        device = self._capture.anchor.device
        few, more = (_moved(one, device) for one in given)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(0)  # what is random in the network must not part the ranks
            self._look(few, more, largest)


def _moved(tree: Any, device: torch.device) -> Any:
    return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, tree)
