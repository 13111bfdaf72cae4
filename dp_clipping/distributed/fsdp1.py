"""FSDP1 (`FullyShardedDataParallel`) in private training: flat shards, and the sums for them.

FSDP1 concatenates the parameters of a unit in one flat parameter and gives every rank an equal
piece of it. With `use_orig_params=True` a parameter is, outside of forward, a view of its elements
in this rank's piece: [n], for some ranks [0]. Each rank's part follows from public information: the
numbers of elements on all ranks, in their order, and the parameter while it is summoned whole.

| when | a parameter of the unit |
| --- | --- |
| outside of forward | `nn.Parameter` [n], elements start to start + n of the whole, flattened |
| in forward | a plain tensor in its place: a view, in its own shape, of the gathered flat one |
| in `summon_full_params` | the same `nn.Parameter`, whole |

Captured layers compute with detached tensors, so flat parameters get no gradient and FSDP1 reduces
nothing. Its own `no_sync()` surrounds every private backward as well.

Zhao et al., PyTorch FSDP: experiences on scaling fully sharded data parallel, 2023.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.fsdp import FlatParameter, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from dp_clipping.distributed.dtensor import is_sharded
from dp_clipping.distributed.sharding import ParameterPart, Sharding, Slice, owned
from dp_clipping.distributed.torch_compat import (
    USE_FSDP2,
    fsdp1_end_backward,
    fsdp1_free,
    fsdp1_gather_in_backward,
    fsdp1_handle,
    fsdp1_stand_ins,
)

STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)


@dataclass(frozen=True)
class FlatSharding(Sharding):
    """The flat shards of a model under FSDP1.

    Attributes:
        root: the model.
        leaving: frees what a backward has gathered.
    """

    root: FSDP = field(repr=False, kw_only=True)
    leaving: ReshardOnExit = field(repr=False, kw_only=True)

    @property
    def leaves_gradients(self) -> bool:
        return False

    @contextmanager
    def backward(self) -> Iterator[None]:
        with _gathering_again(self.root), self.root.no_sync(), self.leaving.running():
            yield

    def entered(self, module: nn.Module, inputs: Callable[[], list[Tensor]]) -> None:
        self.leaving.enter(module, inputs())

    def watch(self, note: Callable[[Parameter], None]) -> list[RemovableHandle]:
        """Calls `note` when autograd adds to a unit's flat parameter, for each parameter in it."""

        def note_all(parameters: list[Parameter], _: FlatParameter) -> None:
            for parameter in parameters:
                note(parameter)

        hooks = []
        for number, unit in enumerate(_units(self.root)):
            if number in self.units:
                hook = partial(note_all, self.units[number])
                flat = fsdp1_handle(unit).flat_param
                hooks.append(flat.register_post_accumulate_grad_hook(hook))
        return hooks

    def stands_for(self, now: Tensor | None, before: Parameter) -> bool:
        """Returns whether there is a tensor: FSDP1 replaces parameters by views at any time."""
        return now is not None

    def recover(self) -> bool:
        """Runs FSDP1's own end of a backward: for a pass that was cut off it has no public name."""
        fsdp1_end_backward(self.root)
        _shard_again(self.root)
        return True


class ReshardOnExit:
    """Frees the gathered parameters of a unit when backward has left it.

    FSDP1 does so behind the gradient of the flat parameter, of which there is none here, and else
    at the end of the whole backward. Here it is behind the gradients of the unit's inputs: autograd
    runs later nodes first, so by then all that reads the unit's parameters has run. A unit without
    such inputs, as one that begins with an embedding, stays to the end.
    """

    def __init__(self, units: list[FSDP]):
        self._units = {unit.module: unit for unit in units}
        self._root = units[0].module
        self._calls: Counter[nn.Module] = Counter()  # in the last forward
        self._left: Counter[nn.Module] = Counter()  # by the backward under way
        self._is_running = False

    @contextmanager
    def running(self) -> Iterator[None]:
        self._left.clear()
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    def enter(self, module: nn.Module, inputs: list[Tensor]) -> None:
        if self._is_running:
            return  # a forward that is computed again
        if module is self._root:
            self._calls.clear()
        self._calls[module] += 1
        inputs = [x for x in inputs if x.requires_grad]
        if inputs:
            register_multi_grad_hook(inputs, lambda _: self._leave(module))

    def _leave(self, module: nn.Module) -> None:
        self._left[module] += 1
        if self._is_running and self._left[module] == self._calls[module]:
            _free(self._units[module])


def flat_sharding_of(module: nn.Module) -> FlatSharding:
    """Returns the sharding of a module that contains FSDP1's.

    Every rank calls it: each unit is gathered once.

    Raises:
        ValueError: for what FSDP1 was told that private training cannot be exact with, and what to
            do.
    """
    units = _units(module)
    _refuse(module, units)
    group = units[0].process_group
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    names_of = owned([unit.module for unit in units])
    lengths: list[list[int]] = [[]] * world
    lengths_here = [p.numel() for names in names_of for p in names]
    dist.all_gather_object(lengths, lengths_here, group=group)
    of_parameter = iter(zip(*lengths, strict=True))
    parts: dict[Parameter, ParameterPart] = {}
    slices: dict[Parameter, list[Slice]] = {}
    for number, (unit, names) in enumerate(zip(units, names_of, strict=True)):
        shards = {p: p.detach().clone() for p in names}
        with FSDP.summon_full_params(unit, recurse=False, writeback=False):
            for parameter, shard in shards.items():
                found = _slices(parameter, shard, next(of_parameter), rank)
                if not parameter.requires_grad:
                    continue
                parts[parameter] = ParameterPart(parameter.shape, number)
                if found is not None:
                    slices[parameter] = found
    gathering = tuple(
        (unit.module, {p: name for p, name in names.items() if p.requires_grad})
        for unit, names in zip(units, names_of, strict=True)
    )
    return FlatSharding(
        "FSDP1 (FullyShardedDataParallel)", group, None, group, None, group, parts, gathering,
        root=module, slices=slices, leaving=ReshardOnExit(units), gathered=frozenset(units[1:]),
    )  # fmt: skip


def _units(module: nn.Module) -> list[FSDP]:
    """Returns the units in the order of their numbers."""
    return [m for m in module.modules() if isinstance(m, FSDP)]


def _slices(
    parameter: Parameter, shard: Tensor, lengths: tuple[int, ...], rank: int
) -> list[Slice] | None:
    """Returns each rank's part, given the sizes; None: all of it. The parameter is whole now.

    Raises:
        ValueError: for a DTensor.
        RuntimeError: if a rank's part is not where those of the ranks before it end.
    """
    if is_sharded(parameter):
        raise ValueError(f"FSDP1 over parameters that tensor parallel has split: {USE_FSDP2}")
    whole = parameter.numel()
    if all(length == whole for length in lengths):
        return None
    starts = [0, *itertools.accumulate(lengths)]
    start, length = starts[rank], lengths[rank]
    there = parameter.detach().reshape(-1)[start : start + length]
    if starts[-1] != whole or not torch.equal(there.nan_to_num(), shard.view(-1).nan_to_num()):
        raise RuntimeError(
            f"FSDP1 of torch {torch.__version__} shards a parameter of {whole} elements as "
            f"{list(lengths)}, otherwise than one rank after the other: {USE_FSDP2}"
        )
    return list(zip(starts, lengths, strict=False))


def _refuse(module: nn.Module, units: list[FSDP]) -> None:
    if units[0] is not module:
        raise ValueError(
            "FullyShardedDataParallel (FSDP1) wraps parts of the module, but not the module "
            "itself, so nothing controls when its gradients are synchronised: wrap the root too"
        )
    if any(isinstance(p, FlatParameter) for p in module.parameters()):
        raise ValueError(
            "FullyShardedDataParallel (FSDP1) with use_orig_params=False hides the parameters, "
            "by which layers and groups of parameters are identified: give use_orig_params=True, "
            f"or {USE_FSDP2}"
        )
    group = dist.get_process_group_ranks(units[0].process_group)
    for unit in units:
        strategy = unit.sharding_strategy
        if strategy not in STRATEGIES and len(group) > 1:
            raise ValueError(
                f"FSDP1 with {strategy.name}: private training takes "
                f"{' or '.join(s.name for s in STRATEGIES)}; for hybrid sharding {USE_FSDP2}, to "
                "shard nothing use ddp.wrap"
            )
        if dist.get_process_group_ranks(unit.process_group) != group:
            raise ValueError("FSDP1 with several process groups in one model: give all the same")
        if unit.cpu_offload.offload_params:
            raise ValueError(
                "FSDP1 with CPUOffload(offload_params=True): sums are formed where layers "
                "compute; leave parameters on the GPU"
            )


@contextmanager
def _gathering_again(root: FSDP) -> Iterator[None]:
    """Enters a context for a backward, which may be the second one of a forward.

    FSDP1 gathers for the first one only, and forgets what stands for the parameters of a unit that
    is all frozen. What it leaves to the end of a flat parameter's gradient, of which there is none,
    is done here: gathered values go, or the next forward would compute with them (seen with
    SHARD_GRAD_OP), and parameters take their place again (one rank).
    """
    stand_ins = {}
    for unit, handle in _handles(root):
        fsdp1_gather_in_backward(handle)
        stand_ins[unit] = list(fsdp1_stand_ins(handle))
    try:
        yield
    finally:
        for unit, handle in _handles(root):
            fsdp1_stand_ins(handle)[:] = stand_ins[unit]
        _shard_again(root)


def _shard_again(root: FSDP) -> None:
    """Frees gathered parameters; shards take their place."""
    for unit, handle in _handles(root):
        if not handle.uses_sharded_strategy:
            handle.reshard(free_unsharded_flat_param=False)
        elif not handle.needs_unshard():
            _free(unit)


def _free(unit: FSDP) -> None:
    """Frees the gathered parameters of a unit, as FSDP1 does at the end of a backward."""
    handle = fsdp1_handle(unit)
    if handle is not None and handle.uses_sharded_strategy:
        fsdp1_free(unit, handle)


def _handles(root: FSDP) -> list[tuple[FSDP, Any]]:
    """Returns units that have parameters, each with FSDP1's private state of it."""
    found = [(unit, fsdp1_handle(unit)) for unit in FSDP.fsdp_modules(root)]
    return [(unit, handle) for unit, handle in found if handle is not None]
