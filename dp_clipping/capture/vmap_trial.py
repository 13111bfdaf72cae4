"""Tests which modules can run with their child layers outside of vmap, before a step does so.

A module cannot if its own code computes with a child's weight, calls a child with a tensor that
belongs to no sample, or raises an error. One forward shows this. Such a module runs under vmap
together with its children, which is right for any module but slower.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from dp_clipping.capture.network import CapturedNetwork, expanded_output, plain_run, trials
from dp_clipping.capture.ownership import bare
from dp_clipping.capture.samples.batch import map_tensors
from dp_clipping.distributed.dtensor import owner_of
from dp_clipping.layers.attention.core import fits
from dp_clipping.layers.batch_layout import FEW, MORE, is_close
from dp_clipping.layers.handle import LayerState, LayoutUnknown, NeedsVmap
from dp_clipping.layers.vmap.children import Record
from dp_clipping.layers.vmap.module import on_whole_batch, plain_forward
from dp_clipping.layers.vmap.objects import Objects, refuse_iterators
from dp_clipping.layers.vmap.refusals import escapes_named
from dp_clipping.layers.vmap.whole_batch import Call, Operation, UnknownOperation, learned
from dp_clipping.torch_compat import current_vmap, every_module, is_passed_on, tensors_in
from dp_clipping.trials.draws import without_dropout
from dp_clipping.trials.randomness import RandomStates


def unfit_modules(capture: CapturedNetwork, arguments: tuple, batch_size: int) -> list[LayerState]:
    """Returns the modules that must run under vmap with their children.

    Args:
        arguments: positional and keyword arguments of a forward of `batch_size` samples.
    """
    attentions: list[Any] = [
        module
        for module in capture.network.modules()
        if "_private" in vars(module) and module._private.kind == "attention"
    ]
    found: list[LayerState] = [
        m._private for m in attentions if not fits(m.batch_first, m._private.layouts)
    ]
    found += [handle for handle in capture.inner if handle.is_misfit]
    if not any(handle.kind == "vectorized" for handle in capture.handles):
        return found
    _run_with(partial(_try, found, capture, batch_size), capture.handles, capture, arguments)
    return found


def _run_with(
    trial: Callable[..., Any], handles: list[LayerState], capture: CapturedNetwork, arguments: tuple
) -> None:
    """Runs a plain forward of the network, in which `trial` gets the calls of these modules."""
    args, kwargs = arguments
    with (
        trials(handles, trial), escapes_named(capture.network), plain_run(capture, args, kwargs),
    ):  # fmt: skip
        pass


def _try(
    unfit: list[LayerState], capture: CapturedNetwork, batch_size: int,
    every_sample: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict,
) -> Any:  # fmt: skip
    """Runs a module in a plain forward, and adds it to `unfit` if it cannot run under vmap.

    Args:
        every_sample: runs the module under vmap: see `layers.vmap.module`.
    """
    handle: LayerState = vars(module)["_private"]
    if handle in unfit:
        return plain_forward(module, *args, **kwargs)
    refuse_iterators(handle.name, args, kwargs)
    if not handle.children_apart:
        return _try_rows(capture, module, every_sample, batch_size, args, kwargs)
    copied_args, copied_kwargs = map_tensors(Tensor.clone, (args, kwargs))
    start, record = Objects(module, args, kwargs), Record()
    with record.recording():
        plain, is_random = _plain_and_random(capture, module, args, kwargs)
    end = Objects(module, args, kwargs)
    layouts = handle.output_layouts.get(tuple(x.dim() for x in tensors_in((args, kwargs))), ())
    start.put_back()
    try:
        run = partial(every_sample, batch_size=batch_size, args=copied_args, kwargs=copied_kwargs)
        expected = expanded_output(handle, layouts, plain, batch_size)
        with record.answering(compares=not is_random):
            is_fit = _agrees(module, run, batch_size, expected, is_random)
        if not is_fit:
            handle.whole_because = (
                "its code computes with a weight of one of them, or otherwise for one sample than "
                "for a batch: call that layer, and treat samples apart"
            )
            unfit.append(handle)
    except Exception as error:  # with its children under vmap it may run, or that raises the error
        if is_passed_on(error):
            raise
        handle.whole_because = _why(error)
        unfit.append(handle)
    end.put_back()
    return plain


def _why(error: Exception) -> str:
    """Returns why a module's code failed without its child layers, and what to do."""
    if isinstance(error, LayoutUnknown):
        return (
            f"it gives {error} a tensor made of its parameters alone, without samples: expand that "
            "to the batch, as in self.table.expand(len(x), -1, -1)"
        )
    first = str(error).strip().partition("\n")[0]
    return (
        f"its code does not run without them ({type(error).__name__}: {first}): compute with its "
        "parameters in a module without such layers"
    )


def _plain_and_random(
    capture: CapturedNetwork, module: nn.Module, args: tuple, kwargs: dict
) -> tuple[Any, bool]:
    """Returns what a plain forward of a module does, and whether it draws random numbers."""
    states = RandomStates(every_module(capture.network), capture.trigger.device)
    plain = plain_forward(module, *args, **kwargs)
    return plain, states.have_moved


def _try_rows(
    capture: CapturedNetwork, module: nn.Module, every_sample: Callable[..., Any], batch_size: int,
    args: tuple, kwargs: dict,
) -> Any:  # fmt: skip
    """Runs a module under vmap with its children; returns a row for each sample.

    Raises:
        NeedsVmap: its samples run one after another, or it has effects, and it computes otherwise
            with one sample than with a batch.
    """
    handle: LayerState = vars(module)["_private"]
    dims = tuple(x.dim() for x in tensors_in((args, kwargs)))
    layouts = handle.output_layouts.get(dims, ())
    if not any(layout.kind == "dimension" for layout in layouts):
        return plain_forward(module, *args, **kwargs)
    effects = handle.effects.get(dims)
    given = args, kwargs
    copied_args, copied_kwargs = map_tensors(Tensor.clone, given) if effects is None else given
    start = Objects(module, args, kwargs)
    try:
        copies = _copies(module, batch_size)
        found = every_sample(module, copies, batch_size, copied_args, copied_kwargs)
    except Exception as error:  # the step will say so
        if is_passed_on(error):
            raise
        start.put_back()
        return plain_forward(module, *args, **kwargs)
    end = Objects(module, args, kwargs)
    is_right = not handle.one_by_one and effects is None
    if not is_right:
        start.put_back()
        plain, is_random = _plain_and_random(capture, module, args, kwargs)
        expected = expanded_output(handle, layouts, plain, batch_size)
        wanted = tensors_in(expected)
        is_right = is_random or _are_close(tensors_in(found), wanted)
        end.put_back()
    if not is_right:
        raise NeedsVmap(
            handle.name,
            f"{handle.name or 'the network'} ({type(module).__name__}) computes something else of "
            "a sample alone than beside other samples, or of tensors that it keeps in objects "
            "(a limit of rows for each expert, or a mean over the batch, for example), so the "
            "sample has no gradient of its own: let what it computes of a sample depend on that "
            "sample alone",
        )
    if all(layout.kind != "shared" for layout in layouts):
        return found
    start.put_back()
    return plain_forward(module, *args, **kwargs)


def _are_close(found: list[Tensor], wanted: list[Tensor]) -> bool:
    if [y.shape for y in found] != [y.shape for y in wanted]:
        return False
    return all(is_close(*pair) for pair in zip(found, wanted, strict=True))


def _copies(module: nn.Module, batch_size: int) -> dict[str, Tensor]:
    own = {name: getattr(*owner_of(module, name)) for name in vars(module)["_private"].trainable}
    return {name: p.detach().expand(batch_size, *p.shape) for name, p in own.items()}


def _agrees(
    module: nn.Module, run: Callable[..., Any], batch_size: int, expected: Any, is_random: bool
) -> bool:
    """Returns whether a run from the module's own parameters computes what a plain forward does."""
    others = {id(p) for p in module.parameters() if p.requires_grad}
    own = (getattr(*owner_of(module, name)) for name in vars(module)["_private"].trainable)
    with _Uses(others - {id(p) for p in (*own, *bare(module))}) as uses:
        found = tensors_in(run(module, _copies(module, batch_size)))
    wanted = tensors_in(expected)
    if uses.found or [y.shape for y in found] != [y.shape for y in wanted]:
        return False
    return is_random or _are_close(found, wanted)


class _Uses(TorchFunctionMode):
    """Records whether code under vmap computes with one of the given parameters."""

    def __init__(self, parameters: set[int]):
        super().__init__()
        self._parameters, self.found = parameters, False

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        # Outside of vmap the layer itself uses its parameter. Reading a dtype or shape is no use.
        if not self.found and tensors_in(result):
            given = tensors_in((args, kwargs or {}))
            self.found = current_vmap() is not None and any(
                id(x) in self._parameters for x in given
            )
        return result


def learn_whole_batches(capture: CapturedNetwork, few: tuple, more: tuple) -> None:
    """Learns which modules can compute with their own parameters without vmap.

    Args:
        few, more: arguments of forwards of `FEW` and of `MORE` samples.
    """
    candidates = [handle for handle in capture.handles if _may_do_without_vmap(handle)]
    sharding = capture.sharding
    splits = sharding is not None and sharding.tensor_group is not None
    if not candidates or splits or capture.is_compiled:
        return
    runs: list[dict[tuple, list[list[Operation]]]] = []
    for arguments, size in ((few, FEW), (more, MORE)):
        runs.append({})
        _run_with(partial(_note_operations, runs[-1], size), candidates, capture, arguments)
    for handle, dims in runs[0]:
        if handle.whole_batch is None:
            continue
        calls = [run.get((handle, dims), []) for run in runs]
        try:
            found = {learned(*pair) for pair in zip(*calls, strict=True)}
        except (UnknownOperation, ValueError):
            continue
        if len(found) == 1:
            handle.whole_batch[dims] = found.pop()
    learnt = [handle for handle in candidates if handle.whole_batch]
    if learnt:
        _run_with(_compare, learnt, capture, few)


def _may_do_without_vmap(handle: LayerState) -> bool:
    """Returns whether a module owns all that it trains, and no known output is without samples."""
    if handle.kind != "vectorized" or handle.whole_batch is None or handle.inner is not None:
        return False
    handle.whole_batch.clear()
    layouts = [layout for found in handle.output_layouts.values() for layout in found]
    is_shared = any(layout.kind == "shared" for layout in layouts)
    return not is_shared and handle.is_own


def _note_operations(
    found: dict[tuple, list[list[Operation]]], batch_size: int,
    every_sample: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict,
) -> Any:  # fmt: skip
    """Runs a module in a plain forward, and records the operations with its parameters."""
    handle: LayerState = vars(module)["_private"]
    again, start = map_tensors(Tensor.clone, (args, kwargs)), Objects(module, args, kwargs)
    call, record = Call(batch_size, None), Record()
    with record.recording():
        outputs = plain_forward(module, *args, **kwargs)
    end = Objects(module, args, kwargs)
    start.put_back()
    try:
        with record.answering():
            on_whole_batch(module, call, dict.fromkeys(handle.trainable), *again)
    except Exception as error:
        if is_passed_on(error):
            raise
        handle.whole_batch = None
        return outputs
    finally:
        end.put_back()
    dims = tuple(x.dim() for x in handle.tensors(again))
    found.setdefault((handle, dims), []).append(call.operations)
    return outputs


def _compare(every_sample: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
    """Runs a module in a plain forward of `FEW` samples.

    Discards what was learned about the module if outputs, inputs of child layers or G differ from
    those under vmap.
    """
    handle: LayerState = vars(module)["_private"]
    dims = tuple(x.dim() for x in handle.tensors((args, kwargs)))
    known = (handle.whole_batch or {}).get(dims)
    if known is None:
        return plain_forward(module, *args, **kwargs)
    again, start = map_tensors(Tensor.clone, (args, kwargs)), Objects(module, args, kwargs)
    record = Record()
    with record.recording():
        outputs = plain_forward(module, *args, **kwargs)
    end = Objects(module, args, kwargs)
    under_vmap = partial(every_sample, batch_size=FEW)
    without_vmap = partial(on_whole_batch, call=Call(FEW, known))
    try:
        runs = []
        for run in (under_vmap, without_vmap):
            start.put_back()
            runs.append(_outputs_and_gradients(run, record, module, *again))
        is_right = all(is_close(*pair) for pair in zip(*runs, strict=True))
    except Exception as error:
        if is_passed_on(error):
            raise
        is_right = False
    if not is_right:
        handle.whole_batch = None
    end.put_back()
    return outputs


@torch.enable_grad()
def _outputs_and_gradients(
    run: Callable[..., Any], record: Record, module: nn.Module, args: tuple, kwargs: dict
) -> list[Tensor]:
    """Returns the outputs of a run, what it leaves in objects, inputs of child layers, and G.

    G is that for fixed gradients of all these; child layers answer from the record.
    """
    args, kwargs = map_tensors(lambda x: x.detach().clone(), (args, kwargs))
    copies = {n: c.clone().requires_grad_() for n, c in _copies(module, FEW).items()}
    before = Objects(module, args, kwargs)
    with record.answering():
        outputs = tensors_in(run(module, copies=copies, args=args, kwargs=kwargs))
    left = Objects(module, args, kwargs).left_since(before)
    outputs += [left[path] for path in sorted(left, key=str)]
    outputs += [x.nan_to_num(0, 0, 0) for x in record.inputs]  # an attention mask, say
    ends = [y for y in outputs if y.requires_grad]
    given = [torch.arange(1.0, y.numel() + 1).sin().view(y.shape).to(y) for y in ends]
    found = torch.autograd.grad(ends, list(copies.values()), given, allow_unused=True)
    zeros = map(torch.zeros_like, copies.values())
    return outputs + [z if g is None else g for g, z in zip(found, zeros, strict=True)]


def callers_of(
    capture: CapturedNetwork, arguments: tuple, layers: Collection[str]
) -> list[nn.Module]:
    """Returns the modules whose code calls one of these layers in a plain forward."""
    found: list[nn.Module] = []

    def note(module: nn.Module, running: list[nn.Module]) -> None:
        handle = vars(module).get("_private")
        is_one = handle is not None and handle.name in layers
        if is_one and running and running[-1] not in found:
            found.append(running[-1])

    args, kwargs = arguments
    with (
        torch.set_grad_enabled(capture.sharding is None),
        _calls(capture, note),
        capture.tried(args, kwargs),
    ):
        pass
    return found


@torch.enable_grad()
def weights_read_elsewhere(
    capture: CapturedNetwork, arguments: tuple
) -> dict[nn.Module, list[Parameter]]:
    """Returns the weights that code outside of their owners computes with, by that code's module.

    Weights of layers that are also called are left out.
    """
    called: set[Parameter] = set()

    def note(module: nn.Module, running: list[nn.Module]) -> None:
        if (handle := vars(module).get("_private")) is not None:
            called.update(one.parameter for one in handle.parameters().values())

    args, kwargs = arguments
    with (
        _calls(capture, note) as running, _Reads(capture, running) as reads,
        capture.tried(args, kwargs),
    ):  # fmt: skip
        pass
    found = {m: [p for p in weights if p not in called] for m, weights in reads.found.items()}
    return {module: weights for module, weights in found.items() if weights}


@contextmanager
def _calls(
    capture: CapturedNetwork, note: Callable[[nn.Module, list[nn.Module]], None]
) -> Iterator[list[nn.Module]]:
    """Enters a context with plain forwards; yields the running modules, outermost first.

    Args:
        note: called with each module that is called, and the modules that are running.
    """
    running: list[nn.Module] = []

    def entered(module: nn.Module, *_: Any) -> None:
        note(module, running)
        running.append(module)

    with ExitStack() as stack:
        stack.enter_context(capture.looked_at(lambda *_: None))
        stack.enter_context(without_dropout(capture.network))
        for module in capture.network.modules():
            hook = module.register_forward_pre_hook(entered)
            stack.callback(hook.remove)
            hook = module.register_forward_hook(lambda *_: running.pop() and None, always_call=True)
            stack.callback(hook.remove)
        yield running


class _Reads(TorchFunctionMode):
    """Records parameters that running code computes with and no running layer owns."""

    def __init__(self, capture: CapturedNetwork, running: list[nn.Module]):
        super().__init__()
        self._trainable = {id(p): p for p in capture.parameters}
        self._running = running
        self.found: dict[nn.Module, list[Parameter]] = {}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if self._running and any(y.requires_grad for y in tensors_in(result)):
            for x in tensors_in((args, kwargs or {})):
                if id(x) in self._trainable and not self._is_own(x):
                    self._note(self._trainable[id(x)])
        return result

    def _note(self, parameter: Parameter) -> None:
        """Records the innermost running module that has the parameter."""
        for module in reversed(self._running):
            if any(parameter is p for p in module.parameters()):
                weights = self.found.setdefault(module, [])
                if all(parameter is not weight for weight in weights):
                    weights.append(parameter)
                return

    def _is_own(self, parameter: Parameter) -> bool:
        handles = (vars(module).get("_private") for module in self._running)
        return any(
            parameter is own.parameter
            for handle in handles
            if handle is not None
            for own in handle.parameters().values()
        )
