"""Gathers and frees the parameters of a block, and calls `fsdp` around each block.

A parameter is the same object for the whole of training. Where nothing computes with it, it is NaN
and has the memory of one element. While a module computes with it, it is a view of a flat buffer
with the values of all ranks.

The buffer's storage is resized, never replaced: autograd saves views of it for backward, such as
the transposed weight of a linear layer, and these must see the values that a later gather writes.
That is no change in autograd's eyes, because a parameter counts its own writes, not its buffer's.

On a GPU the memory is allocated, used and given back on the stream that computes. A gather starts
behind what is queued on that stream, and the stream waits for it before the memory is used or given
back. So no other stream has to be told about it.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from ddp.sharded.layout import FlatUnit
from ddp.torch_compat import all_gather, own_parameters, version_of


class GatheredUnit(FlatUnit):
    """Parameters that lie in one flat buffer, which has memory while a module computes with them.

    Attributes:
        shard: this rank's slice of the values, in the dtype that the parameters had.
        awaited: positions of the parameters that got no gradient since the last gather.
        kept: positions of those whose reduced gradient the next one is added to.
    """

    def __init__(
        self, parameters: Sequence[Parameter], group: dist.ProcessGroup, dtype: torch.dtype
    ):
        super().__init__(parameters, group, itemsize=dtype.itemsize)
        flat = self.flatten()
        self.is_trainable = self.parameters[0].requires_grad
        self.shard = self.layout.slice_of(flat, self.rank).clone()
        self.values = torch.empty_like(flat, dtype=dtype)
        self._views = self.layout.views(self.values)
        nothing = torch.full((), torch.nan if dtype.is_floating_point else 0, device=flat.device)
        self._freed = [nothing.to(dtype).expand(p.shape) for p in self.parameters]
        self._work: dist.Work | None = None
        self._stand_ins: dict[int, Tensor] = {}
        self.awaited: set[int] = set()
        self.kept: set[int] = set()
        for parameter in self.parameters:
            parameter.grad = None
        self.free()

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
        self._show(self._views)

    def free(self) -> None:
        """Makes the parameters NaN and gives the memory back."""
        self._wait_for_values()
        self._show(self._freed)
        self.values.untyped_storage().resize_(0)

    def stand_in(self, member: int) -> Tensor:
        """Returns a `.grad` that says: this rank has its slice of the reduced gradient."""
        parameter, known = self.parameters[member], self._stand_ins.get(member)
        dtype = parameter.grad_dtype or parameter.dtype
        if known is None or known.dtype != dtype or version_of(known):
            one = torch.full((), torch.nan, dtype=dtype, device=parameter.device)
            known = self._stand_ins[member] = one.expand(parameter.shape)
        return known

    def addresses(self) -> set[int]:
        return {one.untyped_storage().data_ptr() for one in self._stand_ins.values()}

    def take_away(self, gradient: Tensor | None, member: int) -> bool:
        """Returns whether a `.grad` is a stand-in; notes whether what it stands for is kept."""
        if gradient is None:
            self.kept.discard(member)
            return False
        if not self.is_stand_in(gradient):
            return False
        was_zeroed = version_of(gradient) > 0  # by zero_grad(set_to_none=False)
        (self.kept.discard if was_zeroed else self.kept.add)(member)
        return True

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
            self._work.wait()
            self._work = None

    def _show(self, values: Iterable[Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.data = value


class Block:
    """A module whose parameters are gathered just before it computes.

    Attributes:
        name: its name in the network; "" is the network itself, which has the rest.
        units: its parameters, by dtype and whether they are trained.
    """

    def __init__(self, name: str, module: nn.Module, units: list[GatheredUnit]):
        self.name, self.module, self.units = name, module, units

    def start(self) -> list[int]:
        """Starts to gather what has no memory. Returns the bytes of each collective."""
        return [nbytes for unit in self.units if (nbytes := unit.start())]

    def wait(self) -> None:
        for unit in self.units:
            unit.wait()

    def free(self) -> None:
        for unit in self.units:
            unit.free()


class BlockCaller(Protocol):
    """The interface that the hooks call; `HandBuiltFSDP` implements it."""

    blocks: list[Block]
    is_whole: bool

    def enter(self, block: Block, inputs: Any) -> None: ...
    def leave(self, block: Block, output: Any) -> None: ...


class BlockHooks:
    """Calls `enter` and `leave` around each block's forward, unless the parameters are whole.

    The hooks hold the wrapper weakly and go with it. `torch.compile` does not trace them, where it
    was in use when the network was wrapped.
    """

    def __init__(self, wrapper: BlockCaller):
        self._wrapper = weakref.ref(wrapper)
        handles = []
        for block in wrapper.blocks:
            enter, leave = self._hooks_of(block)
            if "torch._dynamo" in sys.modules:
                enter, leave = torch.compiler.disable(enter), torch.compiler.disable(leave)
            handles += [
                block.module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
                block.module.register_forward_hook(leave),
            ]
        weakref.finalize(wrapper, _remove, handles).atexit = False

    def _hooks_of(self, block: Block) -> tuple[Callable, Callable]:
        def caller(module: nn.Module) -> BlockCaller | None:
            wrapper = self._wrapper()
            is_copy = module is not block.module  # a deep copy of the network has its hooks
            return None if wrapper is None or wrapper.is_whole or is_copy else wrapper

        def enter(module: nn.Module, args: tuple, kwargs: dict) -> None:
            if (wrapper := caller(module)) is not None:
                wrapper.enter(block, (args, kwargs))

        def leave(module: nn.Module, _args: tuple, output: Any) -> None:
            if (wrapper := caller(module)) is not None:
                wrapper.leave(block, output)

        return enter, leave


def _remove(handles: list) -> None:
    for handle in handles:
        handle.remove()


def at_last_gradient(tensors: Sequence[Tensor], call: Callable[[], None]) -> None:
    """Calls `call` in backward when the gradients of all these tensors are complete.

    PyTorch's `register_multi_grad_hook` keeps the nodes of the graph in its hooks, and with them
    the network: the garbage collector does not see such a cycle.
    """
    count = len(tensors)  # a hook that held the tensors would be such a cycle too
    left = [count]

    def one_less(_gradient: Tensor) -> None:
        left[0] -= 1
        if not left[0]:
            left[0] = count  # of another backward through a kept graph
            call()

    for x in tensors:
        x.register_hook(one_less)


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
