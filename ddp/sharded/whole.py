"""Whole parameters of a network that `fsdp` has divided, and checkpoints of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn import Parameter

from ddp.sharded.units import Block
from ddp.torch_compat import own_parameters


class WholeOnDemand(nn.Module):
    """Methods that gather all parameters of a wrapper at once."""

    module: nn.Module
    blocks: list[Block]
    is_whole: bool = False
    """True inside of `whole_parameters`, where a forward communicates nothing."""

    def free(self) -> None:
        """Frees the parameters of all blocks."""

    @contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """Enters a context with whole parameters in the network; changes of them are kept.

        They are other tensors than those of training, in the dtype of the slices. A collective
        call; inside, one rank alone may call the network, and enter another one.
        """
        if self.is_whole:
            yield
            return
        self.free()
        units = [unit for block in self.blocks for unit in block.units]
        whole: dict[Parameter, Parameter] = {}
        for unit in units:
            for p, value in zip(unit.parameters, unit.gather(unit.shard), strict=True):
                whole[p] = Parameter(value, requires_grad=p.requires_grad)
        places = [
            (module, name, p)
            for module in self.module.modules()
            for name, p in own_parameters(module).items()
            if p is not None
        ]
        try:
            self.is_whole = True
            for module, name, p in places:
                setattr(module, name, whole[p])
            yield
            with torch.no_grad():
                for unit in units:
                    for piece in unit.pieces:
                        value = whole[unit.parameters[piece.member]].reshape(-1)
                        own = unit.shard.narrow(0, piece.start, piece.numel)
                        own.copy_(value.narrow(0, piece.offset, piece.numel))
        finally:
            for module, name, p in places:
                setattr(module, name, p)
            self.is_whole = False

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Returns the whole state, on every rank. A collective call."""
        with self.whole_parameters():
            return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Takes this rank's slices of a whole state, which must be the same on every rank.

        Raises:
            ValueError: for `assign=True`.
            RuntimeError: inside of `whole_parameters`, and for a state that does not fit; the
                parameters stay as they were.
        """
        if assign:
            raise ValueError("load_state_dict: a rank keeps slices of its own, give assign=False")
        if self.is_whole:
            raise RuntimeError("load_state_dict: leave whole_parameters() first, on all ranks")
        with self.whole_parameters():
            return super().load_state_dict(state_dict, strict=strict)

    def __deepcopy__(self, memo: dict) -> NoReturn:
        self.__getstate__()

    def __getstate__(self) -> NoReturn:
        raise RuntimeError(
            "a network that fsdp has divided cannot be copied or pickled, because this rank has "
            "slices of it only: save model.state_dict() on one rank, after calling it on all"
        )
