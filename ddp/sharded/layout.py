"""How a group of parameters lies in a flat buffer of which every rank owns one slice.

    flat buffer   | parameter 0 | parameter 1    | parameter 2 |pad|
    slices        | rank 0             | rank 1                    |

The parameters lie one behind the other, each at an aligned offset. The buffer's length is a
multiple of the number of ranks, so that reduce-scatter and all-gather work on it as it is. Slices
are cut without regard to parameters: a parameter may lie on several ranks, and a rank owns at most
one run of elements of each parameter, a `Piece`. Everything that a rank does with its part (step,
noise, checkpoints) goes through its pieces; the padding between them is never read.
"""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter
from torch.optim import Optimizer

from ddp.buckets import ALIGNMENT_BYTES
from ddp.sharded.torch_compat import OperatorsOnly, without_dispatch, written_by
from ddp.torch_compat import all_gather, version_of

RESHAPED = (
    "a parameter of shape {then} has been given the shape {now}: wrap the network anew, and make "
    "another optimizer"
)
DIVIDED = (
    "{function}: gradients are divided among ranks, and .grad stands for one without its values: "
    "call model.clip_grad_norm_(max_norm) in place of torch.nn.utils.clip_grad_norm_(), and `for "
    "*_, g in model.gradient_pieces(): g.clamp_(-value, value)` in place of clip_grad_value_()"
)


PLAIN = (
    "{name} steps whole parameters, and of one of shape {shape} this rank has its own slice only, "
    "or the gradient of that: build it by model.make_optimizer({name}, lr=...), with the wrapper "
    "that reduced the gradients; if that was deleted, wrap the network and run a backward again"
)


@dataclass(frozen=True)
class Piece:
    """The elements of one parameter that one rank owns.

    Attributes:
        member: the parameter's position in the layout.
        offset: the first element, counted in the flattened parameter.
        numel: number of elements.
        start: where they begin in the rank's slice.
    """

    member: int
    offset: int
    numel: int
    start: int


@dataclass(frozen=True)
class FlatLayout:
    """Maps parameters to their places in a flat buffer.

    Attributes:
        shapes, offsets: of each parameter, its shape and its first element in the buffer.
        numel: elements of the buffer, padding included; a multiple of `world_size`.
    """

    shapes: tuple[torch.Size, ...]
    offsets: tuple[int, ...]
    numel: int
    world_size: int

    @property
    def slice_numel(self) -> int:
        return self.numel // self.world_size

    def slice_of(self, flat: Tensor, rank: int) -> Tensor:
        """Returns the slice of `flat` [numel] that `rank` owns, a view [numel / world_size]."""
        return flat.narrow(0, rank * self.slice_numel, self.slice_numel)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Returns a view of `flat` for each parameter, in its shape."""
        return [
            flat.narrow(0, offset, shape.numel()).view(shape)
            for offset, shape in zip(self.offsets, self.shapes, strict=True)
        ]

    def pieces(self, rank: int) -> list[Piece]:
        """Returns what `rank` owns, in the order of the buffer.

        A parameter without elements belongs to one rank too, which has its state.
        """
        low, high = rank * self.slice_numel, (rank + 1) * self.slice_numel
        found = []
        for member, (offset, shape) in enumerate(zip(self.offsets, self.shapes, strict=True)):
            begin, end = max(low, offset), min(high, offset + shape.numel())
            is_here = min(offset // self.slice_numel, self.world_size - 1) == rank
            if begin < end or (is_here and not shape.numel()):
                found.append(Piece(member, begin - offset, end - begin, begin - low))
        return found


def lay_out(shapes: Sequence[torch.Size], itemsize: int, world_size: int) -> FlatLayout:
    """Lays parameters of these shapes, `itemsize` bytes an element, one behind the other."""
    unit = max(1, ALIGNMENT_BYTES // itemsize)
    *offsets, end = accumulate((_round_up(shape.numel(), unit) for shape in shapes), initial=0)
    numel = _round_up(max(end, 1), unit * world_size)
    return FlatLayout(tuple(shapes), tuple(offsets), numel, world_size)


class FlatUnit:
    """Parameters of one dtype that are reduced and gathered together, and this rank's part.

    Attributes:
        parameters, layout, pieces: the parameters, where they lie, and what this rank owns.
        values: the flat buffer of all values, [layout.numel], where it is kept.
        shard: this rank's slice of the values, [layout.slice_numel].
        gradient: this rank's slice of the reduced gradients, or None. What belongs to a parameter
            whose `.grad` is None has no meaning.
    """

    def __init__(
        self, parameters: Sequence[Parameter], group: dist.ProcessGroup, itemsize: int | None = None
    ):
        self.parameters, self.group = list(parameters), group
        self.rank = dist.get_rank(group)
        shapes = [p.shape for p in self.parameters]
        itemsize = itemsize or self.parameters[0].element_size()
        self.layout = lay_out(shapes, itemsize, dist.get_world_size(group))
        self.pieces = self.layout.pieces(self.rank)
        self.values: Tensor
        self.shard: Tensor
        self.gradient: Tensor | None = None
        self._marks = torch.empty(0)

    def flatten(self) -> Tensor:
        """Returns a new flat buffer with the values of all parameters; the padding is zero."""
        first = self.parameters[0]
        flat = torch.zeros(self.layout.numel, dtype=first.dtype, device=first.device)
        for view, parameter in zip(self.layout.views(flat), self.parameters, strict=True):
            view.copy_(parameter.detach())
        return flat

    def gradient_of(self, piece: Piece) -> Tensor | None:
        """Returns the reduced gradient of what this rank owns of a parameter, a view [numel].

        It is zero where the stand-in was set to zero.
        """
        stand_in = self.parameters[piece.member].grad
        if self.gradient is None or stand_in is None:
            return None
        if version_of(stand_in):  # that one or another of the unit was written to
            return self._cleared(piece, stand_in.as_strided((), ()))
        return self.gradient.narrow(0, piece.start, piece.numel)

    def gather(self, own: Tensor) -> list[Tensor]:
        """Returns whole tensors in the parameters' shapes from every rank's slice; a collective."""
        flat = own.new_empty(self.layout.numel)
        all_gather(flat, own.contiguous(), self.group).wait()
        return self.layout.views(flat)

    def stand_ins(self) -> list[Tensor]:
        """Returns a `.grad` for each parameter that says: reduced, and not whole on this rank.

        It has the parameter's shape, takes the memory of one element, and is NaN. So code that
        takes it for the whole gradient gets NaN, never values of which only some are reduced, and
        writing to it raises. Setting it to None or zero clears the gradient as usual.
        """
        assert self.gradient is not None
        self._marks = self.gradient.new_full((len(self.parameters),), torch.nan)
        return self._expanded_marks()

    def cast_gradient(self, dtype: torch.dtype) -> list[Tensor]:
        """Converts this rank's slice of the gradients; returns stand-ins that say the same."""
        assert self.gradient is not None
        for piece in self.pieces:  # versions do not last
            self._cleared(piece, self._marks[piece.member])
        self.gradient, self._marks = self.gradient.to(dtype), self._marks.to(dtype)
        return self._expanded_marks()

    def addresses(self) -> set[int]:
        """Returns where the memory of the last stand-ins is."""
        return {self._marks.data_ptr()}

    def is_stand_in(self, gradient: Tensor) -> bool:
        """Returns whether a `.grad` is one of the last `stand_ins`."""
        return gradient.untyped_storage().data_ptr() in self.addresses() - {0}

    def own_gradient_behind(self, stand_in: Tensor, member: int) -> Tensor:
        """Returns the gradient of one parameter, zero outside of what this rank owns of it."""
        assert self.gradient is not None
        whole = stand_in.new_zeros(stand_in.shape)
        for piece in self.pieces:
            if piece.member == member:
                part = whole.view(-1).narrow(0, piece.offset, piece.numel)
                part.copy_(self._cleared(piece, self._marks[member]))
        return whole

    def _cleared(self, piece: Piece, mark: Tensor) -> Tensor:
        """Returns a piece of the gradient, made zero by `zero_grad(set_to_none=False)` or not.

        It is NaN where another number was written to the stand-in, of one element.
        """
        assert self.gradient is not None
        own = self.gradient.narrow(0, piece.start, piece.numel)
        own.masked_fill_(mark == 0, 0)  # without waiting for a GPU
        return own.masked_fill_((mark == mark) & (mark != 0), torch.nan)

    def _expanded_marks(self) -> list[Tensor]:
        shapes = self.layout.shapes
        return [
            mark.expand(shape).as_subclass(StandIn)
            for mark, shape in zip(self._marks, shapes, strict=True)
        ]


CLEARING = frozenset(["zero_", "_foreach_zero_", "fill_", "detach_"])


class StandIn(OperatorsOnly):
    """A `.grad` that is NaN, because this rank has only its slice of the reduced gradient.

    Its views, as `.grad.data`, are stand-ins too, and what is written to them is written to it. So
    are its clones, which an optimizer may keep.
    """

    of: Tensor | None = None  # of which it is a view

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Calls an operator.

        Raises:
            RuntimeError: if it takes a norm, communicates, writes anything but zeros to all
                elements, or is a plain optimizer's: that writes what follows from the values to
                other tensors, or joins them with a parameter.
        """
        name, kwargs = func.__name__.partition(".")[0], kwargs or {}
        with without_dispatch():
            clears = name in CLEARING and (name != "fill_" or _is_zero(args[1]))
            written = written_by(func, args, kwargs)
            targets = [x for x in written if isinstance(x, StandIn)]
            is_used = len(targets) < len(written) or _joins_a_parameter(args)
            if is_used and (optimizer := stepping_optimizer()):
                refuse_plain(next(x for x in _flat(args) if isinstance(x, StandIn)), optimizer)
            is_part = any(x.of is not None and x.numel() != x.of.numel() for x in targets)
            is_written = bool(targets) and (not clears or is_part)
            if is_written or "norm" in name or func.namespace.lstrip("_").startswith("c10d"):
                raise RuntimeError(DIVIDED.format(function=func))
            try:
                result = func(*args, **kwargs)
            except RuntimeError as error:  # as for a view of part of a stand-in's only number
                raise RuntimeError(DIVIDED.format(function=func)) from error
            for x in targets:
                if x.of is not None:
                    increment_version(x.of)  # which `.data` has of its own
            own = args[0] if args else None
            if targets or not isinstance(own, StandIn):
                return result
            if name == "clone":
                return result.as_subclass(StandIn)
            if isinstance(result, list | tuple):
                return type(result)(_shown_of(own, x) for x in result)
            return _shown_of(own, result)

    def __repr__(self, **_options: Any) -> str:  # type: ignore[override]
        return f"a gradient {list(self.shape)}, divided among ranks"

    def numpy(self, **_options: Any) -> NoReturn:  # PyTorch has neither for such a tensor
        raise RuntimeError(DIVIDED.format(function="numpy"))

    def tolist(self) -> NoReturn:
        raise RuntimeError(DIVIDED.format(function="tolist"))

    def __deepcopy__(self, memo: dict) -> Tensor:
        return torch.full(self.shape, torch.nan, dtype=self.dtype, device=self.device)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__deepcopy__({}).__reduce_ex__(protocol)


def _flat(args: Any) -> Iterator[Any]:
    """Yields the arguments of an operator, of which some are lists of tensors."""
    for x in args:
        yield from x if isinstance(x, list | tuple) else [x]


def _joins_a_parameter(args: Any) -> bool:
    return any(isinstance(x, Parameter) for x in _flat(args))


def _is_zero(x: Any) -> bool:
    """Returns whether a number, or a tensor of one on the host, is 0."""
    is_number = isinstance(x, int | float) or (isinstance(x, Tensor) and x.device.type == "cpu")
    return is_number and bool(x == 0)


def _shown_of(own: StandIn, x: Any) -> Any:
    """Returns what an operator makes of a stand-in: a stand-in too, if it is a view."""
    if not isinstance(x, Tensor) or x is own or _memory(x) != _memory(own):
        return x
    view = x.as_subclass(StandIn)
    view.of = own if own.of is None else own.of
    return view


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def stepping_optimizer() -> str:
    """Returns the name of the plain optimizer that is stepping in this thread; "" if none is."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
        if isinstance(caller, Optimizer):
            return "" if getattr(caller, "steps_slices", False) else type(caller).__name__
        frame = frame.f_back
    return ""


def refuse_plain(parameter: Tensor, name: str) -> NoReturn:
    raise RuntimeError(PLAIN.format(name=name, shape=list(parameter.shape)))


def _round_up(numel: int, unit: int) -> int:
    return -(-numel // unit) * unit


@torch.no_grad()
def bind(units: list[FlatUnit]) -> None:
    """Makes every parameter a view of its flat buffer, with the value that it has now.

    All values are read before the first one is written: parameters may have been exchanged.

    Raises:
        RuntimeError: for a parameter that has another shape than when it was wrapped.
    """
    moved = []
    for unit in units:
        start, itemsize = unit.values.data_ptr(), unit.values.element_size()
        for member, offset in enumerate(unit.layout.offsets):
            parameter, place = unit.parameters[member], start + offset * itemsize
            if parameter.shape != (shape := unit.layout.shapes[member]):
                raise RuntimeError(RESHAPED.format(now=[*parameter.shape], then=[*shape]))
            lies_there = parameter.data_ptr() == place and parameter.is_contiguous()
            if not lies_there and parameter.numel():
                moved.append((unit, member, parameter.detach().clone()))
    for unit, member, value in moved:
        view = unit.layout.views(unit.values)[member]
        unit.parameters[member].data = view.copy_(value)
