"""Gathers and frees the parameters of a block, and calls `fsdp` around each block.

A parameter is the same object for the whole of training. Where nothing computes with it, it is a
stand-in without values (whole.py). While a module computes with it, it is a view of a flat buffer
with the values of all ranks; what is written there meanwhile is kept when the buffer is freed.

The buffer's storage is resized, never replaced: autograd saves views of it for backward, such as
the transposed weight of a linear layer, and these must see the values that a later gather writes.
That is no change in autograd's eyes, because a parameter counts its own writes, not its buffer's.

On a GPU the memory is allocated, used and given back on the stream that computes. A gather starts
behind what is queued on that stream, and the stream waits for it before the memory is used or given
back. So no other stream has to be told about it.
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from ddp.buckets import Bucket
from ddp.internals.gradients import Gradients
from ddp.sharded.layout import FlatUnit, StandIn
from ddp.sharded.torch_compat import copy_, refuse_writes
from ddp.sharded.whole import Place, Values, hide_all, reveal, unlike
from ddp.torch_compat import all_gather, own_parameters, version_of

NOT_TOGETHER = (
    "the {what} of {name} has failed. With fsdp each forward and backward is a call of all ranks, "
    "and another rank has not made it: it has ended, failed, left its loop earlier, returned from "
    "its forward before this block, or evaluates alone. Take the same steps on all ranks and call "
    "the same blocks in them; to evaluate on one rank, let all enter `with "
    "model.whole_parameters():`. After an error start all ranks again, from a checkpoint"
)


def cast(x: Any, dtype: torch.dtype | None) -> Any:
    """Returns an argument of a forward, converted if it is a tensor of floating-point numbers."""
    floats = dtype is not None and isinstance(x, Tensor) and x.is_floating_point()
    return x.to(dtype) if floats else x


def wait_for(work: dist.Work, what: str = "gather", block: str = "") -> None:
    """Waits for a collective of a block; an error of it says in a note what may have happened."""
    try:
        work.wait()
    except RuntimeError as error:
        error.add_note(NOT_TOGETHER.format(what=what, name=block or "what is in no block"))
        raise


class GatheredUnit(FlatUnit):
    """Parameters that lie in one flat buffer, which has memory while a module computes with them.

    Attributes:
        shard: this rank's slice of the values, in the dtype that the parameters had.
        name: that of its block; "" if it belongs to none.
        awaited: positions of the parameters that got no gradient since the last gather.
        kept: positions of those whose reduced gradient the next one is added to.
        computes: its block's forward is running, so that it is not freed.
        replaced: how often each stand-in got other `.data`.
        before_use: is called before whole values of stand-ins are gathered, with what they are for.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        name: str = "",
        names: Sequence[str] = (),
    ):
        super().__init__(parameters, group, itemsize=dtype.itemsize)
        self.name, self.computes = name, False
        self.before_use: Callable[[str], None] = lambda what: None
        myself: weakref.ref[Values] = weakref.ref(self)
        names = names or [f"a parameter {list(p.shape)}" for p in self.parameters]
        self.replaced = [0] * len(self.parameters)
        self._places = [Place(myself, member, own) for member, own in enumerate(names)]
        flat = self.flatten()
        self.is_trainable = self.parameters[0].requires_grad
        self.shard = self.layout.slice_of(flat, self.rank).clone()
        self.values = torch.empty_like(flat, dtype=dtype)
        self._views = self.layout.views(self.values)
        nothing = torch.full((), torch.nan if dtype.is_floating_point else 0, device=flat.device)
        self._nothing = nothing.to(dtype)  # all that C++ sees of them
        refuse_writes(self._nothing)
        stale = self.parameters, self._places, self._nothing  # once this has gone
        weakref.finalize(self, hide_all, *stale).atexit = False
        self._work: dist.Work | None = None
        self._is_shown = False
        self._stand_ins: dict[int, Tensor] = {}
        self.awaited: set[int] = set()
        self.kept: set[int] = set()
        self._absent = False  # the stand-in that was taken away was not in `.grad`
        for parameter in self.parameters:
            parameter.grad = None
        self._hide()
        self.values.untyped_storage().resize_(0)

    def start(self) -> int:
        """Starts to gather the values, unless they are there. Returns the bytes handed over."""
        if self.values.untyped_storage().size():
            return 0
        self.values.untyped_storage().resize_(self.values.nbytes)
        own = self.layout.slice_of(self.values, self.rank).copy_(self.shard)
        self._work = all_gather(self.values, own, self.group)
        return self.values.nbytes

    def wait(self) -> None:
        """Makes the parameters whole, for later work of the current stream."""
        self._wait_for_values()
        self.awaited = set(range(len(self.parameters)))
        if not self._is_shown:
            self._show()

    def free(self) -> None:
        """Makes the parameters stand-ins and frees their memory, unless a forward computes."""
        if self.values.untyped_storage().size() and not self.computes:
            self._wait_for_values()
            if self._is_shown:
                self._keep_written()
                self._hide()
            self.values.untyped_storage().resize_(0)

    def whole(self) -> list[Tensor]:
        """Returns copies of the parameters from every rank's slice; a collective call."""
        return self.gather(self.shard)

    @torch.no_grad()
    def keep(self, member: int, value: Tensor) -> None:
        """Makes `value` that of a stand-in: this rank keeps what it owns of it."""
        for piece in self.pieces:
            if piece.member == member:
                own = self.shard.narrow(0, piece.start, piece.numel)
                own.copy_(value.reshape(-1).narrow(0, piece.offset, piece.numel))
        self.free()  # what was gathered before

    def stand_in(self, member: int) -> Tensor:
        """Returns a `.grad` that says: this rank has its slice of the reduced gradient."""
        parameter, known = self.parameters[member], self._stand_ins.get(member)
        dtype = parameter.grad_dtype or parameter.dtype
        if known is None or known.dtype != dtype or version_of(known):
            one = torch.full((), torch.nan, dtype=dtype, device=parameter.device)
            known = self._stand_ins[member] = one.expand(parameter.shape).as_subclass(StandIn)
        return known

    def addresses(self) -> set[int]:
        return {one.untyped_storage().data_ptr() for one in self._stand_ins.values()}

    def bucket(self, gradients: Gradients) -> Bucket:
        """Returns the bucket of this unit's gradients, and settles the dtype of their reduction.

        That is the widest of the slices' and of those of `.grad`.
        """
        members = tuple(gradients.index_of(p) for p in self.parameters)
        dtypes = [gradients.dtypes.all[i] for i in members]
        self._reduced_in = reduce(torch.promote_types, dtypes, self.shard.dtype)
        nbytes = self.layout.numel * self._reduced_in.itemsize
        return Bucket(members, self.layout.offsets, self.layout.numel, nbytes)

    def collect(self, gradients: Gradients, members: Sequence[int]) -> Tensor:
        """Returns this rank's gradients as a flat tensor, [layout.numel].

        A stand-in takes the place of each, also where this rank has none.
        """
        is_absent = [p.grad is None for p in self.parameters]
        for member, i in enumerate(members):
            if is_absent[member] or isinstance(self.parameters[member].grad, StandIn):
                self.take_stand_in_away(gradients, i, member)
        flat = self.shard.new_empty(self.layout.numel, dtype=self._reduced_in)
        copy_(self.layout.views(flat), [gradients.local(i) for i in members])
        for member, i in enumerate(members):
            if is_absent[member]:
                gradients.stand_ins[i] = self.stand_in(member)
            else:
                gradients.stand_ins.pop(i, None)  # of what was reduced before, and no more
                self.parameters[member].grad = self.stand_in(member)
        return flat

    def take_stand_in_away(self, gradients: Gradients, i: int, member: int) -> None:
        """Takes a stand-in out of `.grad`, and notes whether what it stands for is kept."""
        parameter = self.parameters[member]
        self._absent = i in gradients.stand_ins
        gradient = gradients.stand_ins.get(i, parameter.grad)
        if gradient is None:
            self.kept.discard(member)
        elif self.is_stand_in(gradient):
            was_zeroed = version_of(gradient) > 0  # by zero_grad(set_to_none=False)
            (self.kept.discard if was_zeroed else self.kept.add)(member)
            gradients.stand_ins.pop(i, None)
            parameter.grad = None

    def forget_cleared(self, gradients: Gradients) -> None:
        """Keeps nothing of gradients that were set to None since a backward under `no_sync`."""
        for member in list(self.kept):
            parameter = self.parameters[member]
            if parameter.grad is None and gradients.index_of(parameter) not in gradients.stand_ins:
                self.kept.discard(member)

    def put_stand_in_back(self, gradients: Gradients, i: int, member: int) -> None:
        """Undoes `take_stand_in_away`, if backward has brought None."""
        parameter = self.parameters[member]
        if parameter.grad is None:
            if self._absent:
                gradients.stand_ins[i] = self.stand_in(member)
            else:
                parameter.grad = self.stand_in(member)

    def add_reduced(self, own: Tensor) -> None:
        """Makes `own` the reduced gradient, added to what was reduced before and is kept."""
        if self.gradient is not None and self.kept:
            for piece in self.pieces:
                if piece.member in self.kept:
                    part = own.narrow(0, piece.start, piece.numel)
                    part.add_(self.gradient.narrow(0, piece.start, piece.numel))
        self.gradient, self.kept = own, set()

    def _wait_for_values(self) -> None:
        if self._work is not None:
            work, self._work = self._work, None
            wait_for(work, "gather", self.name)

    def _show(self) -> None:
        self._is_shown = True
        for parameter, view, place in zip(self.parameters, self._views, self._places, strict=True):
            reveal(parameter, place.name)
            parameter.data = view

    def _hide(self) -> None:
        self._is_shown = False
        hide_all(self.parameters, self._places, self._nothing)

    @torch.no_grad()
    def _keep_written(self) -> None:
        """Takes into this rank's slice what was written to parameters while they were whole.

        All of it is copied, since nothing counts what is written through `.data`. What is narrower
        than the slice is compared, so that the digits of the rest are not lost.
        """
        for parameter, view, place in zip(self.parameters, self._views, self._places, strict=True):
            if parameter.data_ptr() != view.data_ptr():  # `parameter.data = value`
                if parameter.shape != view.shape or parameter.dtype != view.dtype:
                    raise RuntimeError(unlike(place.name, parameter))
                view.copy_(parameter)
        own = self.layout.slice_of(self.values, self.rank)
        if own.dtype != self.shard.dtype:
            same = own == self.shard.to(own.dtype)
            own = torch.where(same, self.shard, own.to(self.shard.dtype))
        self.shard.copy_(own)


class Block:
    """A module whose parameters are gathered just before it computes.

    Attributes:
        name: its name in the network; "" is the network itself, which has the rest.
        units: its parameters, by dtype and whether they are trained.
        around: the block itself and those that contain it, but not the network.
    """

    def __init__(self, name: str, module: nn.Module, units: list[GatheredUnit]):
        self.name, self.module, self.units = name, module, units
        self.around: list[Block] = []
        self._computes = False

    def start(self) -> list[int]:
        """Starts to gather what has no memory. Returns the bytes of each collective."""
        return [nbytes for unit in self.units if (nbytes := unit.start())]

    def wait(self) -> None:
        for unit in self.units:
            unit.wait()

    def free(self) -> None:
        for unit in self.units:
            unit.free()

    @property
    def computes(self) -> bool:
        """Whether its forward is running."""
        return self._computes

    @computes.setter
    def computes(self, value: bool) -> None:
        self._computes = value
        for unit in self.units:
            unit.computes = value

    def call(
        self,
        enter: Callable[["Block", tuple, dict], tuple[tuple, dict] | None],
        leave: Callable[["Block", Any], None],
    ) -> None:
        """Calls two methods of a wrapper around each forward of this module.

        The first one returns other arguments for it, or None.

        The hooks hold the wrapper weakly and go with it. `torch.compile` does not trace them, where
        it was in use when the network was wrapped.
        """
        weak_enter, weak_leave = weakref.WeakMethod(enter), weakref.WeakMethod(leave)

        def before(module: nn.Module, args: tuple, kwargs: dict) -> Any:
            is_here = module is self.module  # a deep copy of the network has these hooks too
            return method(self, args, kwargs) if is_here and (method := weak_enter()) else None

        def after(module: nn.Module, _inputs: tuple, output: Any) -> None:
            if (method := weak_leave()) is not None and module is self.module:
                method(self, output)

        if "torch._dynamo" in sys.modules:
            before, after = torch.compiler.disable(before), torch.compiler.disable(after)
        for handle in (
            self.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            self.module.register_forward_hook(after),
        ):
            weakref.finalize(enter.__self__, handle.remove).atexit = False  # type: ignore[attr-defined]


def blocks_of(
    network: nn.Module,
    classes: Sequence[type[nn.Module]] | None,
    group: dist.ProcessGroup,
    param_dtype: torch.dtype | None,
) -> list[Block]:
    """Divides a network's parameters among the ranks of a group. The first block has the rest."""
    blocks = []
    for name, names in parameters_by_block(network, classes).items():
        groups: dict[tuple, list[Parameter]] = {}
        for p, full_name in names.items():  # of no block: by child, so that the head goes early
            child = "" if name else full_name.partition(".")[0]
            groups.setdefault((p.dtype, p.requires_grad, child), []).append(p)
        units = []
        for (dtype, *_), parameters in groups.items():
            narrow = param_dtype if dtype.is_floating_point else None
            full_names = [names[p] for p in parameters]
            units.append(GatheredUnit(parameters, group, narrow or dtype, name, full_names))
        blocks.append(Block(name, network.get_submodule(name), units))
    for block in blocks[1:]:
        block.around = [b for b in blocks[1:] if f"{block.name}.".startswith(f"{b.name}.")]
    return blocks


def parameters_by_block(
    network: nn.Module, classes: Sequence[type[nn.Module]] | None
) -> dict[str, dict[Parameter, str]]:
    """Returns the name of each block -> its parameters and their names; "" is the network itself.

    A block is a member of an `nn.ModuleList`, or a module of one of `classes`. A parameter belongs
    to the innermost block around it. One that two blocks share, itself or with its module, belongs
    to the network itself.
    """
    lists = [m for m in network.modules() if isinstance(m, nn.ModuleList)]
    chosen = {member for members in lists for member in members}
    if classes is not None:
        chosen = {m for m in network.modules() if isinstance(m, tuple(classes))}
    block_of = {"": ""}
    first: dict[nn.Module, str] = {network: ""}
    owner: dict[Parameter, str] = {}
    names: dict[Parameter, str] = {}
    for path, module in network.named_modules(remove_duplicate=False):
        around = block_of[path.rpartition(".")[0]]
        block = first.setdefault(module, path) if module in chosen else around
        block_of[path] = block
        for name, parameter in own_parameters(module).items():
            if parameter is not None:
                owner[parameter] = block if owner.get(parameter, block) == block else ""
                names.setdefault(parameter, f"{path}.{name}" if path else name)
    found: dict[str, dict[Parameter, str]] = {"": {}}
    for parameter, block in owner.items():
        found.setdefault(block, {})[parameter] = names[parameter]
    return found
