"""What `fsdp` gathers together, and the memory that comes and goes.

A parameter is the same object for the whole of training. Where nothing computes with it, it is NaN
and takes no memory. While a module computes with it, it is a view of a flat buffer with the values
of all ranks.

The buffer's storage is resized, never replaced: autograd saves views of it for backward, such as
the transposed weight of a linear layer, and these must see the values that a later gather writes.
That is no change in autograd's eyes, because a parameter counts its own writes, not its buffer's.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from ddp.sharded.layout import FlatUnit
from ddp.torch_compat import own_parameters, start_all_gather, version_of


class GatheredUnit(FlatUnit):
    """Parameters of one dtype in one flat buffer, whole while a module computes with them.

    Attributes:
        shard: this rank's slice of the values, in the dtype that the parameters had.
        buffer: the values of all ranks; its storage is empty while it is freed.
        local: this rank's own gradients, whole, until they are reduced; a parameter whose gradient
            is here or in `gradient` has a stand-in as its `.grad`.
        awaited: positions of the parameters that got no gradient since the last gather.
    """

    def __init__(
        self, parameters: Sequence[Parameter], group: dist.ProcessGroup, dtype: torch.dtype
    ):
        super().__init__(parameters, group, itemsize=dtype.itemsize)
        first, flat = self.parameters[0], self.flatten()
        self.is_trainable = first.requires_grad
        self.shard = self.layout.slice_of(flat, self.rank).clone()
        self.buffer = torch.empty_like(flat, dtype=dtype)
        absent = torch.full((), torch.nan if dtype.is_floating_point else 0)
        absent = absent.to(first.device, dtype)
        self._views = self.layout.views(self.buffer)
        self._freed = [absent.expand(p.shape) for p in self.parameters]
        self._work: dist.Work | None = None
        self.awaited: set[int] = set()
        self.local: Tensor | None = None
        self._filled: set[int] = set()  # whose gradient is in `local`
        self._kept: set[int] = set()  # to which a backward is about to add
        self._replaced: set[int] = set()  # whose reduced gradient zero_grad() has dropped
        self._held: dict[int, Tensor] = {}
        for parameter in self.parameters:
            parameter.grad = None
        self.free()

    @property
    def is_freed(self) -> bool:
        return self.buffer.untyped_storage().size() == 0

    def start(self) -> int:
        """Starts to gather the values, unless they are there. Returns the bytes handed over."""
        if not self.is_freed:
            return 0
        self.buffer.untyped_storage().resize_(self.buffer.nbytes)
        own = self.layout.slice_of(self.buffer, self.rank)
        own.copy_(self.shard)
        self._work = start_all_gather(self.buffer, own, self.group)
        return self.buffer.nbytes

    def wait(self) -> None:
        """Makes the parameters whole for later work of the current stream."""
        self._wait_for_values()
        self.awaited = set(range(len(self.parameters)))
        self._show(self._views)

    def free(self) -> None:
        """Makes the parameters NaN and gives their memory back."""
        self._wait_for_values()
        self._show(self._freed)
        self.buffer.untyped_storage().resize_(0)

    def _show(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.data = value

    def whole_parameters(self) -> dict[Parameter, Parameter]:
        """Returns new parameters with the values of all ranks' slices; a collective call."""
        whole = self.gather(self.shard)
        return {
            p: Parameter(value, requires_grad=p.requires_grad)
            for p, value in zip(self.parameters, whole, strict=True)
        }

    @torch.no_grad()
    def take_values(self, whole: Mapping[Parameter, Tensor]) -> None:
        """Takes this rank's slice of whole values."""
        for piece in self.pieces:
            value = whole[self.parameters[piece.member]].reshape(-1)
            own = self.shard.narrow(0, piece.start, piece.numel)
            own.copy_(value.narrow(0, piece.offset, piece.numel))

    # ---- gradients -----------------------------------------------------------------------------

    def open(self, member: int, keep: bool = False) -> None:
        """Takes the stand-in away: a backward, or the caller, is about to set `.grad`."""
        parameter = self.parameters[member]
        if (held := self._is_held(parameter.grad)) is not None:
            parameter.grad, keep = None, held
        if keep:
            self._kept.add(member)

    def take(self, member: int, dtype: torch.dtype) -> None:
        """Moves a gradient to `local`, adds it to what is held unless that was cleared."""
        parameter = self.parameters[member]
        gradient, keep = parameter.grad, member in self._kept
        if gradient is None and not keep:
            return
        if gradient is not None:
            if self._is_held(gradient) is not None:
                return
            if self.local is None:
                self.local = gradient.new_empty(self.layout.numel, dtype=dtype)
            view = self._part_of(self.local, member)
            if keep and member in self._filled:
                view.add_(gradient)
            else:
                view.copy_(gradient)
            if not keep:
                self._replaced.add(member)
            self._filled.add(member)
        self._kept.discard(member)
        self.hold(member, parameter.grad_dtype or parameter.dtype)

    def hold(self, member: int, dtype: torch.dtype) -> None:
        """Makes `.grad` a stand-in: it is in `local` or in `gradient`."""
        parameter, held = self.parameters[member], self._held.get(member)
        if held is None or held.dtype != dtype or version_of(held) > 0:
            mark = torch.full((), torch.nan, dtype=dtype, device=parameter.device)
            held = self._held[member] = mark.expand(parameter.shape)
        parameter.grad = held

    def _is_held(self, gradient: Tensor | None) -> bool | None:
        """Returns whether a stand-in still says so, not cleared by zeroing; None: it is none."""
        if gradient is None or not any(gradient is held for held in self._held.values()):
            return None
        return version_of(gradient) == 0

    def take_local(self, absent: float, dtype: torch.dtype) -> tuple[Tensor, list[int]]:
        """Returns the whole local gradients to reduce, and which members have none.

        These are filled with `absent`, all if that is NaN.
        """
        local, self.local = self.local, None
        if local is None:
            local = self.shard.new_empty(self.layout.numel, dtype=dtype)
        missing = set(range(len(self.parameters))) - self._filled
        for member in range(len(self.parameters)) if absent else missing:
            self._part_of(local, member).fill_(absent)
        self._filled.clear()
        return local, sorted(missing)

    def add_reduced(self, own: Tensor) -> None:
        """Adds this rank's slice of reduced gradients to `gradient`, except to what was cleared."""
        cleared = {m for m, p in enumerate(self.parameters) if p.grad is None} | self._replaced
        self._replaced = set()
        if self.gradient is None or len(cleared) == len(self.parameters):
            self.gradient = own
            return
        for piece in self.pieces:
            if piece.member in cleared:
                self.gradient.narrow(0, piece.start, piece.numel).zero_()
        self.gradient.add_(own)

    def drop_cleared(self) -> None:
        """Gives back the memory of gradients that zero_grad() has cleared."""
        if all(p.grad is None for p in self.parameters):
            self.gradient = self.local = None
            self._filled.clear()

    def _part_of(self, flat: Tensor, member: int) -> Tensor:
        shape = self.layout.shapes[member]
        return flat.narrow(0, self.layout.offsets[member], shape.numel()).view(shape)

    def _wait_for_values(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


class Block:
    """A module whose parameters are gathered just before it computes.

    Attributes:
        name: its name in the network, "" for the network itself, which has the rest.
        units: its parameters, by dtype and whether they are trained.
    """

    def __init__(self, name: str, module: nn.Module, units: list[GatheredUnit]):
        self.name, self.module, self.units = name, module, units

    def start(self) -> list[int]:
        """Starts to gather what is freed. Returns the bytes of each collective."""
        return [nbytes for unit in self.units if (nbytes := unit.start())]

    def wait(self) -> None:
        for unit in self.units:
            unit.wait()

    def free(self) -> None:
        for unit in self.units:
            unit.free()


def parameters_by_block(
    network: nn.Module, classes: tuple[type[nn.Module], ...] | None
) -> dict[str, dict[Parameter, str]]:
    """Returns the name of each block -> its parameters and their names; "" is the network itself.

    A block is a member of an `nn.ModuleList`, or a module of one of `classes`. A parameter belongs
    to the innermost block around it. One that two blocks share belongs to the network itself.
    """
    modules = dict(network.named_modules())
    lists = [m for m in modules.values() if isinstance(m, nn.ModuleList)]
    chosen = {id(member) for members in lists for member in members}
    if classes is not None:
        chosen = {id(m) for m in modules.values() if isinstance(m, classes)}
    chosen.discard(id(network))
    block_of = {"": ""}
    owner: dict[Parameter, str] = {}
    names: dict[Parameter, str] = {}
    for path, module in modules.items():
        around = block_of[path.rpartition(".")[0]]
        block_of[path] = block = path if id(module) in chosen else around
        for name, parameter in own_parameters(module).items():
            if parameter is not None:
                owner[parameter] = block if owner.get(parameter, block) == block else ""
                names.setdefault(parameter, f"{path}.{name}" if path else name)
    found: dict[str, dict[Parameter, str]] = {"": {}}
    for parameter, block in owner.items():
        found.setdefault(block, {})[parameter] = names[parameter]
    return found
