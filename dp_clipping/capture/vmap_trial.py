"""Decides how each module that owns parameters runs in steps, before one does.

`unfit_modules` tries each module on the whole batch (`layers.vmap.whole_batch`), in plain forwards
of two batch sizes. It runs under vmap with its child layers instead if

    in one of its operators samples have no place of their own,
    its code raises an error beside copies of the parameters, or
    results or G are others than those of an ordinary run with its parameters themselves.

A module whose code cannot run under vmap, or be computed again in a backward, takes one sample
after another, and must then compute what it does for a batch. What a trial leaves is put back.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dp_clipping.capture.network import Arguments, CapturedNetwork, fixed_like, plain_run
from dp_clipping.capture.samples.batch import refuse_iterators
from dp_clipping.distributed.dtensor import owner_of, plain_name
from dp_clipping.layers.batch_layout import FEW, MORE, Layout, LayoutUnknown, NeedsVmap
from dp_clipping.layers.handle import LayerState, expanded_input, expanded_output, plain_forward
from dp_clipping.layers.tensor_parallel import local
from dp_clipping.layers.vmap.own import Own, UnknownOperation, replaced, taken_for
from dp_clipping.layers.vmap.refusals import escape_of, reason_of, recomputed
from dp_clipping.layers.vmap.samples import every_sample, may_loop
from dp_clipping.layers.vmap.whole_batch import Call, Noted, learn, on_whole_batch
from dp_clipping.torch_compat import (
    every_module,
    is_in_backward,
    is_passed_on,
    tensors_in,
    tree_leaves,
)
from dp_clipping.trials.objects import Objects
from dp_clipping.trials.places import PLAIN
from dp_clipping.trials.randomness import RandomStates
from dp_clipping.trials.routing import Routing
from dp_clipping.trials.tolerances import are_close

Found = tuple[list[Tensor], list[Tensor]]
"""Holds what a module returns, and a gradient of each parameter."""

MOST = 16  # operators one after another of parameters and tensors that all samples share


def unfit_modules(capture: CapturedNetwork, few: Arguments, more: Arguments) -> list[LayerState]:
    """Returns the modules that must run otherwise than they are captured.

    Args:
        few, more: arguments of forwards of `FEW` and of `MORE` samples.
    """
    found: list[LayerState] = [handle for handle in capture.inner if handle.is_misfit]
    modules: list[Any] = [m for m in capture.network.modules() if "_private" in vars(m)]
    attentions = [m for m in modules if m._private.kind == "attention"]
    found += [m._private for m in attentions if not _has_sequences(m._private, m.batch_first)]
    mine = [handle for handle in capture.handles if handle.kind == "vectorized"]
    if not mine:
        return found
    on_batch = unsettled = [handle for handle in mine if handle.operations is not None]
    for _ in range(MOST):
        if not unsettled:
            break
        small = _Trial(capture, few, FEW).note()
        large = _Trial(capture, more, MORE).note()
        unsettled = [
            handle
            for handle in unsettled
            if not handle.whole_because
            and not _learns(handle, small.get(handle, []), large.get(handle, []))
        ]
    for handle in unsettled:
        handle.whole_because = "it has many operators of parameters and tensors without samples"
    _Trial(capture, few, FEW).compare()
    return found + [handle for handle in on_batch if handle.whole_because]


def _has_sequences(handle: LayerState, batch_first: bool) -> bool:
    """Returns whether each sample has sequences of its own in all calls of an attention layer."""
    dim = 0 if batch_first else 1
    return all(
        dims[:3] == (3, 3, 3)
        and len(set(layouts[:3])) == 1
        and layouts[0].kind != "shared"
        and layouts[0].dim == dim
        for dims, layouts in handle.layouts.items()
    )


def _why(error: Exception) -> str:
    """Returns why a module's code cannot run beside copies of its parameters, and what to do."""
    if isinstance(error, UnknownOperation):
        return f"{error}: compute with its parameters in a module without such layers"
    first = str(error).strip().partition("\n")[0]
    return (
        f"its code does not run beside copies of its parameters ({type(error).__name__}: {first}): "
        "compute with them in a module without such layers"
    )


class _Trial:
    """Plain forwards of one batch in which modules run otherwise than they do.

    Args:
        arguments: of a forward of `size` samples.
    """

    def __init__(self, capture: CapturedNetwork, arguments: Arguments, size: int):
        self._capture, self._arguments, self._size = capture, arguments, size
        self._is_as_in_steps = False  # a module runs, with those in it

    def note(self) -> dict[LayerState, list[list[Noted]]]:
        """Returns the operators that are not known, of each call of each module."""
        found: dict[LayerState, list[list[Noted]]] = {}
        routing = Routing(self._arguments, self._size)

        def noted(module: nn.Module, args: tuple, kwargs: dict) -> Any:
            handle: LayerState = vars(module)["_private"]
            refuse_iterators(handle.name, args, kwargs)
            known = handle.operations
            if known is None or handle.whole_because:
                return self._plain(module, args, kwargs)
            call = Call(handle.title(module), self._size, known, has_moved=routing.has_moved)
            found.setdefault(handle, []).append(call.noted)
            before = Objects(module, args, kwargs, with_values=True)
            try:
                return on_whole_batch(module, call, self._copies(module), args, kwargs)
            except Exception as error:
                self._give_up(handle, error)
            before.put_back()
            return self._plain(module, args, kwargs)

        with routing:
            self._run(noted)
        return found

    def compare(self) -> None:
        """Compares what modules compute as they are with what they compute as in steps.

        Modules on the whole batch that differ are noted in their state.

        Raises:
            NeedsVmap: a module under vmap computes otherwise with one sample than with a batch.
        """
        self._run(self._compared)

    def _run(self, trial: Callable[..., Any]) -> None:

        def watch(module: nn.Module, run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            handle: LayerState = vars(module)["_private"]
            given = handle.tensors((args, kwargs))
            if handle.learns_outputs:
                _refuse_own(handle.name, given)
            if handle.kind != "vectorized":
                inputs = list(map(local, given))
                args, kwargs = expanded_input(handle, inputs, args, kwargs, self._size)
                return run(*args, **kwargs)
            # A checkpoint around the module counts what is saved in it, in forward and again.
            # A node that saves its own output would hold itself by x, and never be freed.
            with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda x: x):
                return trial(module, args, kwargs)

        try:
            with _gathering(self._capture), plain_run(self._capture, *self._arguments, watch):
                pass
        except RuntimeError as error:
            if (escape := escape_of(error)) is None:
                raise
            raise escape from error

    def _plain(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        handle: LayerState = vars(module)["_private"]
        inputs = handle.tensors((args, kwargs))
        return expanded_output(handle, inputs, plain_forward(module, *args, **kwargs), self._size)

    def _copies(self, module: nn.Module) -> dict[str, Tensor]:
        copies = vars(module)["_private"].copies(module, self._size).items()
        return {name: rows.requires_grad_() for name, rows in copies}

    def _give_up(self, handle: LayerState, error: Exception) -> None:
        """Notes that a module cannot run on the whole batch."""
        if is_passed_on(error):
            raise error
        handle.whole_because = _why(error)
        if self._capture.sharding is not None:
            self._capture.make_whole([handle])  # refuses layers in it that would run again
            raise error

    def _compared(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """Runs a module as steps do, and then as it is; the first run leaves nothing behind.

        As it is, with its parameters themselves: code may ask for their class, attributes or
        identity. Not where ranks gather layers in it, which they do in the order of one forward.
        """
        handle: LayerState = vars(module)["_private"]
        layouts = handle.seen_outputs(handle.tensors((args, kwargs)))
        is_whole = handle.operations is not None
        sharding = self._capture.sharding
        if (
            self._is_as_in_steps
            or is_in_backward()  # a checkpointed part is computed again
            or handle.whole_because
            or (sharding is not None and not sharding.gathered.isdisjoint(module.modules()))
            or not (is_whole or any(layout.kind == "dimension" for layout in layouts))
        ):
            return self._plain(module, args, kwargs)
        start, own = Objects(module, args, kwargs), handle.own(module)
        states = RandomStates(every_module(self._capture.network), self._capture.trigger.device)

        def given() -> Arguments:
            start.put_back()
            states.restore()
            return start.apart(args, own.values()), kwargs

        self._is_as_in_steps = True
        try:
            found = (self._on_whole_batch if is_whole else self._under_vmap)(module, layouts, given)
            if found is not None:
                left = _numbers_in(module, args, kwargs)
                with replaced(module, _tied(module, own) if is_whole else {}):
                    made = self._plain(module, *given())
                    outputs = tensors_in(made)
                    samples = range(self._size) if is_whole else [None]
                    wanted = [_gradients(outputs, layouts, own, self._size, n) for n in samples]
                is_random = states.have_moved
                # Of the network itself nobody reads them within a step.
                as_left = not handle.name or left == _numbers_in(module, args, kwargs)
        finally:
            self._is_as_in_steps = False
            start.put_back()
            states.restore()
        if found is None:
            return self._plain(module, args, kwargs)
        results, gradients = found
        is_same = as_left and are_close(results, _values(made))
        if is_whole:
            each = [torch.stack(one) for one in zip(*wanted, strict=True)]
            if not (is_same and are_close(gradients, each)):
                error = UnknownOperation("its results or gradients are not those of each sample")
                self._give_up(handle, error)
        elif not is_random and not (is_same and all(
            one.any() or not g.any() for g, one in zip(wanted[0], gradients, strict=True)
        )):  # fmt: skip
            raise NeedsVmap(
                handle.name,
                f"{handle.title(module)} computes otherwise of one sample, with copies of its "
                "parameters, than of a batch (it limits the rows of each expert, takes a mean over "
                "the batch, keeps tensors in objects, or compares id(parameter), for example), so "
                "the sample has no gradient of its own: let what it computes of a sample depend on "
                "that sample alone, and keep what belongs to a parameter by its name, as "
                'self.gains["scale"]',
            )
        return self._plain(module, args, kwargs)

    def _on_whole_batch(
        self, module: nn.Module, layouts: tuple[Layout, ...], given: Callable[[], Arguments]
    ) -> Found | None:
        """Returns a module's results on the whole batch, and G; None: it cannot run so."""
        handle: LayerState = vars(module)["_private"]
        copies = {n: x.clone().requires_grad_() for n, x in self._copies(module).items()}
        call = Call(handle.title(module), self._size, handle.operations or {})
        try:
            made = on_whole_batch(module, call, copies, *given())
            return _values(made), _gradients(tensors_in(made), layouts, copies, self._size)
        except Exception as error:
            self._give_up(handle, error)
        return None

    def _under_vmap(
        self, module: nn.Module, layouts: tuple[Layout, ...], given: Callable[[], Arguments]
    ) -> Found | None:
        """Returns a module's results under vmap, and G; None: it cannot run, as the step will say.

        Args:
            given: makes its arguments.
        """
        handle: LayerState = vars(module)["_private"]
        while True:
            copies, is_compiled = self._copies(module), self._capture.is_compiled or None
            try:
                made = every_sample(module, copies, self._size, *given(), is_compiled)
            except Exception as error:
                if isinstance(error, ValueError | LayoutUnknown) or is_passed_on(error):
                    raise
                return None
            try:
                return _values(made), _gradients(tensors_in(made), layouts, copies, self._size)
            except Exception as error:  # what a backward computes again has lost its copies
                if is_passed_on(error):
                    raise
                if handle.one_by_one:
                    return _values(made), list(map(torch.ones_like, copies.values()))
                if not may_loop(module):
                    raise recomputed(handle.title(module)) from error
                handle.one_by_one = reason_of(error)


def _tied(module: nn.Module, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns others in the place of a module's own parameters where layers in it have them."""
    mine, places = {id(p) for p in own.values()}, {owner_of(module, name) for name in own}
    return {
        name: taken_for(p.detach().clone().requires_grad_(), p)
        for name, p in module.named_parameters(remove_duplicate=False)
        if id(p) in mine and owner_of(module, name) not in places
    }


@contextmanager
def _gathering(capture: CapturedNetwork) -> Iterator[None]:
    """Enters a context in which no module that ranks gather by itself is given an `Own`.

    FSDP lays its own nodes around what such a module is given, by which the gradient would come to
    the value, and not to the copies.
    """
    gathered = () if capture.sharding is None else capture.sharding.gathered
    names = {m: plain_name(name) for name, m in capture.network.named_modules() if m in gathered}
    with ExitStack() as stack:
        for module, name in names.items():

            def refuse(_: nn.Module, args: tuple, kwargs: dict, name: str = name) -> None:
                _refuse_own(name, tensors_in((args, kwargs)))

            hook = module.register_forward_pre_hook(refuse, prepend=True, with_kwargs=True)
            stack.callback(hook.remove)
        yield


def _refuse_own(name: str, given: list[Tensor]) -> None:
    """Raises UnknownOperation if a module is given a tensor of parameters, without samples."""
    if any(isinstance(x, Own) for x in given):
        raise UnknownOperation(
            f"it gives {name} a tensor made of its parameters alone, without samples: "
            "expand that to the batch, as in self.table.expand(len(x), -1, -1)"
        )


def _gradients(
    outputs: list[Tensor], layouts: tuple[Layout, ...], parameters: dict[str, Tensor], size: int,
    sample: int | None = None,
) -> list[Tensor]:  # fmt: skip
    """Returns gradients of parameters for fixed gradients of outputs, or of one sample in these.

    Args:
        layouts: of the outputs; shared ones have been expanded to the batch.
    """
    ys, given = [], []
    for y, layout in zip(outputs, layouts, strict=False):
        if not y.requires_grad:
            continue
        gradient = fixed_like(y)
        if sample is not None:
            layout = Layout() if layout.kind == "shared" else layout
            rows = layout.batch_first(gradient, size)
            only = torch.zeros_like(rows)
            only[sample] = rows[sample]
            gradient = layout.restore(only)
        ys.append(y)
        given.append(gradient)
    own = list(parameters.values())
    if not ys:
        return list(map(torch.zeros_like, own))
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    return list(torch.autograd.grad(ys, own, given, **options))


def _learns(handle: LayerState, few: list[list[Noted]], more: list[list[Noted]]) -> bool:
    """Learns the operators of a module's calls; returns whether no other run is needed for it."""
    known: Any = handle.operations
    try:
        if len(few) != len(more):
            raise UnknownOperation("it is called more often for some samples than for others")
        return all(learn(known, *pair) for pair in zip(few, more, strict=True))
    except UnknownOperation as error:
        handle.whole_because = _why(error)
    return True


def _values(made: Any) -> list[Tensor]:
    """Returns the tensors of what a module returns, and its numbers, as a count of rows is one."""
    numbers = [float(x) for x in tree_leaves(made) if isinstance(x, int | float)]
    return [*tensors_in(made), *torch.tensor(numbers, device="cpu")]


def _numbers_in(*roots: Any) -> list[tuple[str, Any]]:
    """Returns the numbers, strings and shapes that objects hold, with their names."""
    return [
        (f"{place.name}{key}", value)
        for place in Objects(*roots).places.dicts
        for key, value in place.copy().items()
        if all(isinstance(x, PLAIN) for x in (value if isinstance(value, tuple) else (value,)))
    ]
