"""Which modules of a network are blocks of `fsdp`, and what is called around each of them."""

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from ddp.sharded.internals.views import bind
from ddp.sharded.units import GatheredUnit
from ddp.torch_compat import own


class Block:
    """A module whose parameters are gathered just before it computes.

    Attributes:
        name: its name in the network; "" is the network itself, which has the rest.
        units: its parameters, by dtype and whether they are trained.
        around: the block itself and those that contain it, but not the network.
        computes: its forward is running.
    """

    def __init__(self, name: str, module: nn.Module, units: list[GatheredUnit]):
        self.name, self.module, self.units = name, module, units
        self.around: list[Block] = []
        self.computes = False

    def wait(self) -> None:
        for unit in self.units:
            unit.wait()

    def call(self) -> None:
        """Notes that its forward is about to run."""
        for unit in self.units:
            unit.was_called = True

    def end(self) -> None:
        """Notes that its forward has ended, which may have given parameters other `.data`."""
        self.computes = False
        bind(self.units, frees=True)

    def free(self) -> None:
        for unit in self.units:
            unit.free()

    @property
    def computes(self) -> bool:
        return self._computes

    @computes.setter
    def computes(self, value: bool) -> None:
        self._computes = value
        for unit in self.units:
            unit.computes = value


Enter = Callable[[Block, tuple, dict], tuple[tuple, dict] | None]
Leave = Callable[[Block, Any], None]


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
        for name, parameter in own(module, "parameters").items():
            if parameter is not None:
                owner[parameter] = block if owner.get(parameter, block) == block else ""
                names.setdefault(parameter, f"{path}.{name}" if path else name)
    found: dict[str, dict[Parameter, str]] = {"": {}}
    for parameter, block in owner.items():
        found.setdefault(block, {})[parameter] = names[parameter]
    return found


def call_around(block: Block, enter: Enter, leave: Leave) -> None:
    """Calls two methods of a wrapper around each forward of a block's module.

    The first one returns other arguments for it, or None.

    The hooks hold the wrapper weakly and go with it. `torch.compile` does not trace them, where
    it was in use when the network was wrapped.
    """
    weak_enter, weak_leave = weakref.WeakMethod(enter), weakref.WeakMethod(leave)

    def before(module: nn.Module, args: tuple, kwargs: dict) -> Any:
        is_here = module is block.module  # a deep copy of the network has these hooks too
        return method(block, args, kwargs) if is_here and (method := weak_enter()) else None

    def after(module: nn.Module, _inputs: tuple, output: Any) -> None:
        if (method := weak_leave()) is not None and module is block.module:
            method(block, output)

    if "torch._dynamo" in sys.modules:
        before, after = torch.compiler.disable(before), torch.compiler.disable(after)
    for handle in (
        block.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        block.module.register_forward_hook(after),
    ):
        weakref.finalize(enter.__self__, handle.remove).atexit = False  # type: ignore[attr-defined]


def cast(x: Any, dtype: torch.dtype) -> Any:
    """Returns an argument of a forward, converted if it is a tensor of floating-point numbers."""
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
