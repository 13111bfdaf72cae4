"""Makes the slots of a step in whose network something is compiled, and takes what arrives there.

A slot is an input without memory, for which a compiled layer returns as a gradient what its use
leaves (`layers.linear`). Inside of a compiled region none can be made, so all layers get theirs
beforehand. What they are follows from shapes and plan, and is kept for later steps with the same.

**Nodes.** With an autograd node of its own each slot would take a call of Python in forward and one
in backward. So layers are dealt, in order, to a few nodes, each of which makes all slots of its
layers. Autograd calls a node's backward when all of its gradients are there, and frees them when
that returns. A compiled region returns all of its gradients at once in any case, and in one pass
they are kept until the sums. But where sums are formed during backward, what each is formed of is
freed with it, which of one node would be late: up to 4 bytes a parameter. So a node has no more
than a part of all parameters (`NODES`). The compiler has to compile anew if other slots are the
same tensor. So the layers of a node do not depend on how large samples are, and all layers of a
compiled block are of one node, or are divided alike in each block: blocks of one class share what
is compiled. In a sharded model each layer has a node, as ranks take what arrives in the order in
which they gather layers.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from dp_clipping.layers.embedding.module import EmbeddingFactors
from dp_clipping.layers.handle import LayerState, Site
from dp_clipping.layers.recorder import DENSE, FACTORS, LINEAR, Trainable
from dp_clipping.torch_compat import apply_directly, is_compiled, transforms_run

NODES = 8  # at most so many and a few, of about equally many parameters


@dataclass(eq=False, slots=True)
class Node:
    """Describes the slots that one autograd node makes.

    Attributes:
        records: the parameters.
        values: a tensor for each slot, of its shape and dtype, without memory. The first one [1]
            counts uses.
        copied: (number of a slot, its parameter) where the slot has the parameter's values.
        arrivals: (record, `WeightSlots.how`, number of the first slot, of the second or None), in
            the order in which they are taken.
        counted: the weights whose uses are counted, and the numbers of their first slots.
        nothing: the gradients of the node's inputs.
    """

    records: list[Trainable] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    copied: list[tuple[int, Trainable]] = field(default_factory=list)
    arrivals: list[tuple[tuple[Trainable], Any, int, int | None]] = field(default_factory=list)
    counted: dict[Trainable, int] = field(default_factory=dict)
    nothing: tuple[None, ...] = ()


@dataclass(frozen=True)
class Layout:
    """Says which nodes make the slots of a step, and which slots each layer has.

    Attributes:
        handles: the layers that it is of.
        layers: the name of each layer, and its slots: their names and numbers among all.
    """

    handles: list[LayerState]
    nodes: list[Node]
    layers: list[tuple[str, list[tuple[str, int]]]]


def make_slots(private_step: Any) -> dict[str, dict[str, Tensor]]:
    """Returns layer -> name -> slot, of all layers: they are made before the forward."""
    capture = private_step.capture
    if apart := capture.apart:
        capture.make_whole(apart)
    layout = _layout_of(private_step)
    made: list[Tensor] = []
    run = SlotNode.apply if transforms_run() else _run
    with torch.enable_grad():
        for node in layout.nodes:
            triggers = [
                one.trigger if one.joint is None else private_step.trigger(one)
                for one in node.records
            ]
            made += run((private_step, node), *triggers)
    found: dict[str, dict[str, Tensor]] = {}
    for layer, slots in layout.layers:
        own = found[layer] = {}
        for name, number in slots:
            own[name] = made[number]
    return found


class SlotNode(torch.autograd.Function):
    """Makes the slots of some layers, and gives the step what arrives there."""

    @staticmethod
    def forward(ctx, rest, *triggers):
        ctx.rest, ctx.materialize_grads = rest, False
        private_step, node = rest
        slots = list(map(Tensor.detach, node.values))
        for number, record in node.copied:
            value = private_step.capture.slot_value(record)
            slots[number] = value.expand(private_step.batch_size, *record.shape)
        return tuple(slots)

    @staticmethod
    def backward(ctx, *gradients):
        private_step, node = ctx.rest
        if gradients[0] is not None:
            used = sum([gradients[number] is not None for number in node.counted.values()])
            private_step.counted(frozenset(node.counted), gradients[0], used)
        take = private_step.take
        for records, how, first, second in node.arrivals:
            value = gradients[first]
            if value is None:  # this backward has not reached it
                continue
            other = None if second is None else gradients[second]
            if how is None:
                take(DENSE, records, other, (value,))
            elif type(how) is Site:
                take(LINEAR, records, how, (value, other))
            else:
                # Ids of several uses have been added up. All samples are left out then
                # (`refuse_repeated`), but a row that does not exist must not be written.
                factors = EmbeddingFactors(other.clamp(max=how - 1), value, how)
                take(FACTORS, records, factors, factors.held(factors))
        return node.nothing


_run = apply_directly(SlotNode)


def _layout_of(private_step: Any) -> Layout:
    """Returns the layout of a step's slots, which steps of the same shapes share."""
    capture, plans = private_step.capture, private_step.plans
    device, batch_size = capture.trigger.device.type, private_step.batch_size
    cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    key = (batch_size, cast, plans.of_slots)
    known: dict[tuple, Layout] = private_step.context.plans.slots
    layout = known.get(key)
    if layout is None or layout.handles is not capture.handles:
        layout = known[key] = _new_layout(capture, plans, batch_size)
    return layout


def _new_layout(capture: Any, plans: Any, batch_size: int) -> Layout:
    layout = Layout(capture.handles, [], [])
    numbers: dict[Trainable, int] = {}  # of the slots that several layers may use
    before = 0  # slots of earlier nodes
    for handles in _dealt(capture):
        node = Node(values=[capture.zero(torch.float32).expand(1)])
        for handle in handles:
            of_weight, own = plans.slots_of(handle), list[tuple[str, int]]()
            for name, record in handle.records.items():
                number = len(node.values)
                if name == "weight" and of_weight is not None:
                    first, second, count = of_weight.names
                    own += (first, before + number), (second, before + number + 1), (count, before)
                    node.values += [
                        capture.zero(dtype).expand(shape) for shape, dtype in of_weight.kinds
                    ]
                    node.arrivals.append(((record,), of_weight.how, number, number + 1))
                    node.counted[record] = number
                else:
                    own.append((name, numbers.setdefault(record, before + number)))
                    if numbers[record] != before + number:
                        continue
                    value = capture.slot_value(record)
                    if record in capture.copied:
                        node.copied.append((number, record))
                        value = capture.zero(value.dtype)
                    node.values.append(value.expand(batch_size, *record.shape))
                    node.arrivals.append(((record,), None, number, None))
                node.records.append(record)
            layout.layers.append((handle.name, own))
        node.arrivals.reverse()
        node.nothing = (None,) * (1 + len(node.records))
        before += len(node.values)
        layout.nodes.append(node)
    return layout


def _dealt(capture: Any) -> Iterator[list[LayerState]]:
    """Yields the layers of each node."""
    most = sum([record.shape.numel() for record in capture.trained]) / NODES
    mine, size = list[LayerState](), 0
    for region in _regions(capture):
        sizes = [
            sum([record.shape.numel() for record in handle.records.values()]) for handle in region
        ]
        room = most - sum(sizes)  # before the region, which begins a node if it has none
        for handle, own in zip(region, sizes, strict=True):
            if mine and (capture.sharding is not None or size > room or size + own > most):
                yield mine
                mine, size = [], 0
            room = most
            mine.append(handle)
            size += own
    yield mine


def _regions(capture: Any) -> Iterator[list[LayerState]]:
    """Yields the layers of each outermost compiled module, and every other layer alone."""
    owners: dict[Any, Any] = {}
    for module in filter(is_compiled, capture.network.modules()):
        for one in module.modules():
            owners.setdefault(id(vars(one).get("_private")), id(module))
    for _, region in groupby(capture.handles, lambda handle: owners.get(id(handle), id(handle))):
        yield list(region)
