"""A private step as one CUDA graph: one launch per step, while the host keeps the account.

`optimizer.graphed(body)` returns a `GraphedStep`, which is called like the body of the user's loop.

    eager     the first steps, those with checks (batches 1, 2, 4, 8, ...), microbatches of a larger
              batch: the body itself, as if it were captured (`as_in_a_capture`)
    capture   once: the body runs, and its launches are recorded, not executed
    replay    inputs, the mask of rows that are no samples, and the addresses of the step's noise
              are copied to where the graph reads them; the host does what the body's Python
              would: it refuses, counts and numbers the step; one launch does the rest

The noise of a replay is that of its step: each parameter's stream is derived from the key and the
step's number, as in an eager step, and the graph reads it from a table on the device. So the bits
are the same, and nothing waits for the device.

What Python does in the body happens in eager steps and in the capture alone. Before each replay,
settings, hyperparameters, addresses and the numbers and flags that modules hold are compared, and a
change is refused. Other values that the body's Python reads (a variable, a criterion's attribute)
stay as they were captured.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from dp_clipping.kernels.launch.tiles import available, holding
from dp_clipping.layers.registered.registry import is_registered
from dp_clipping.layers.vmap.refusals import place_of
from dp_clipping.modes import DEFAULT_MODE
from dp_clipping.noise.gaussian import NoiseStream
from dp_clipping.noise.kernel import StreamTable
from dp_clipping.step.state import BatchNorms
from dp_clipping.torch_compat import (
    any_compiled,
    gradient_hooks,
    tree_flatten,
    tree_map,
    tree_unflatten,
)

PLAIN = {bool, int, float, str}
EAGER = 3  # whole steps before a capture: kernels are tuned and compiled, momentum is there
WITHOUT = "or leave out cuda_graph=True"


def refuse(settings: Any, ranks: Any) -> None:
    """Raises ValueError, with an alternative, where no step can be captured."""
    module, optimizer = settings.module, settings.optimizer
    parameters = [p for p in module.parameters() if p.requires_grad]
    capturable = isinstance(optimizer, torch.optim.SGD) or all(
        group.get("capturable") for group in optimizer.param_groups
    )
    reasons = {
        f"grad_sample_mode {settings.grad_sample_mode!r}, which reads norms on the host or "
        f"runs backward twice: use {DEFAULT_MODE!r}": settings.grad_sample_mode != DEFAULT_MODE,
        "a module on several ranks, or wrapped: use the network itself on one GPU": (
            ranks.sharding is not None or ranks.everyone is not None
            or hasattr(module, "gradient_ready")
        ),
        f"parameters on {ranks.device}: move the network to a GPU": ranks.device.type != "cuda",
        "parameters of a dtype without kernels, or no Triton: use float32, bfloat16 or float16": (
            not all(available(p.device, p.dtype) for p in parameters)
        ),
        "parameters on several devices: use one GPU": len({p.device for p in parameters}) > 1,
        "compiled modules: use them as they are, a graph launches nothing from the host": (
            any_compiled(module)
        ),
        "layers given to register_layer, whose function is checked from the host: leave it out, "
        "and torch.vmap runs them": any(map(is_registered, module.modules())),
        "several examples of a unit: leave out examples_per_unit, or give examples_per_step=1": (
            settings.rows_per_unit > 1
        ),
        "memory_budget, with which backward may run twice: leave it out": (
            settings.memory_budget is not None
        ),
        "hooks of Tensor.register_hook on parameters: change .grad in the body of the step, after "
        "optimizer.pre_step()": any(map(gradient_hooks, parameters)),
        "adaptive_threshold, which changes max_grad_norm in each step: leave it out": (
            settings.adaptive_threshold is not None
        ),
        f"{type(optimizer).__name__}, whose state is the host's: use one with capturable=True, as "
        "torch.optim.AdamW(.., capturable=True), or SGD": not capturable,
    }  # fmt: skip
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(f"cuda_graph=True cannot capture {reason}, {WITHOUT}")


@contextmanager
def as_in_a_capture() -> Iterator[None]:
    """Enters a context in which `torch.cuda.is_current_stream_capturing()` returns True.

    Libraries that ask choose what a capture can record: transformers makes an attention mask that
    it would leave out where looking at the batch shows that it masks nothing. An eager step has to
    take the way that the graph will, since where samples are has been established on it.
    """
    real = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: True
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = real


@contextmanager
def capturing(graph: Any) -> Iterator[None]:
    """Enters a context that records in `graph` the launches of its block.

    Raises RuntimeError where the block waits for the device, before it does: a capture that the
    wait itself ends leaves PyTorch's allocator and generators as they are during a capture. Nothing
    is collected in it: to free another graph, or an event, would end it too.
    """
    before, collects = torch.cuda.get_sync_debug_mode(), gc.isenabled()
    first: Exception | None = None  # ending the capture may raise another
    gc.disable()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            torch.cuda.set_sync_debug_mode("error")
            try:
                yield
            except Exception as error:
                first = error
                raise
            finally:
                torch.cuda.set_sync_debug_mode(before)
    except Exception as error:
        first = first or error
        cause = place_of(first) + str(first).partition("\n")[0]
        raise RuntimeError(
            f"the step cannot be captured as a CUDA graph ({cause}): nothing in its body may "
            "wait for the device (item(), cpu(), if on a tensor, an attention mask that is "
            "looked at, loss_per_sample)"
        ) from error
    finally:
        if collects:
            gc.enable()


class GraphedStep:
    """One private step, called with the tensors of a batch from `BatchMemoryManager`.

    Returns what the body returns; tensors in it are this step's own.

    Args:
        optimizer: the private one.
        body: one whole step: model, criterion, `backward()`, `optimizer.step()`, and
            `optimizer.zero_grad()` before or after. It gets its arguments with all tensors on the
            GPU, and returns tensors or None.
    """

    def __init__(self, optimizer: Any, body: Callable[..., Any]):
        self.optimizer, self.body = optimizer, body
        self.model: Any = optimizer.model
        self.device = self.model.capture.trigger.device
        self._eager_steps = 0
        self._captured: _Captured | None = None
        optimizer.original_optimizer.register_load_state_dict_post_hook(self._capture_again)

    @property
    def is_captured(self) -> bool:
        """Returns whether the next step may be a replay."""
        return self._captured is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Makes one step.

        Raises:
            ValueError: for a batch that is not padded, or of another shape than the captured one.
            RuntimeError: where the body cannot be captured, or something that a step depends on
                has changed since.
        """
        args, kwargs = tree_map(
            lambda x: x.to(self.device, non_blocking=True) if isinstance(x, Tensor) else x,
            (args, kwargs),
        )
        if torch.is_autocast_enabled("cuda") and torch.is_autocast_cache_enabled():
            raise RuntimeError(
                "a graphed step inside of torch.autocast would read weights as they were cast "
                "before: enter torch.autocast in the body of the step"
            )
        if not self._is_alike():
            return self._run(args, kwargs)
        if self._captured is not None:
            return self._captured.replay(args, kwargs)
        captured = _Captured(self, args, kwargs)
        self._captured = captured
        return captured.outputs()

    def _is_alike(self) -> bool:
        """Returns whether the coming step is like all others: then it may be captured."""
        state, ticket = self.model.step_state, self.model.step_state.ticket
        if ticket.rows is None:
            raise ValueError(
                "a graphed step needs batches of one shape: take them from "
                "BatchMemoryManager(.., optimizer=optimizer, pad_batches=True)"
            )
        if state.is_open or state.skips_next or not ticket.samples:
            return False
        return self._eager_steps >= EAGER and not self.model.passes.reader.looks_at(ticket.samples)

    def _run(self, args: tuple, kwargs: dict) -> Any:
        before, is_empty = self.optimizer.steps, not self.model.step_state.ticket.samples
        with as_in_a_capture():
            result = self.body(*args, **kwargs)
        self._eager_steps += 0 if is_empty else self.optimizer.steps - before
        return result

    def _capture_again(self, *_: Any) -> None:
        """Captures again, after an eager step: the optimizer's state is in other tensors."""
        self._captured, self._eager_steps = None, min(self._eager_steps, EAGER - 1)


class _Captured:
    """A graph, the memory that it reads, and what it was captured with."""

    def __init__(self, step: GraphedStep, args: tuple, kwargs: dict):
        self.step, self.model, self.optimizer = step, step.model, step.optimizer
        self.state, self.passes = self.model.step_state, self.model.passes
        self._refuse_unsuitable()
        self._parameters = list(self.model.network.parameters())  # walks take long
        self._modules = list(self.model.capture.network.modules())
        leaves, self._spec = tree_flatten((args, kwargs))
        self._inputs = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
        rows = self.state.ticket.rows
        self._numbers = torch.arange(rows, device=step.device)
        self._padding = self._numbers >= self.state.ticket.samples
        self._streams = StreamTable(len(self.model.capture.parameters), step.device)
        self._held: list[Any] = []
        self._coming: tuple[Any, list[NoiseStream]] = None, []  # of which key and step; its streams
        self._graph = torch.cuda.CUDAGraph()
        self._before = self._dependencies()
        self._capture()

    def outputs(self) -> Any:
        return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, self._outputs)

    def _refuse_unsuitable(self) -> None:
        plan = self.model.step_context.plans.last
        reasons = {
            "profiling is on: unset DP_CLIPPING_PROFILE": self.model.profile is not None,
            "the optimizer has step hooks, which would run in the capture alone: remove them": bool(
                self.optimizer.hooks
            ),
            "engine.on_step shows metrics, which would wait for the device: leave it out": bool(
                self.optimizer.listeners
            ),
            "its memory does not suffice for one backward, and some layers run a second: take a "
            "smaller max_physical_batch_size": plan is None or not plan.is_one_pass,
        }
        for reason, applies in reasons.items():
            if applies:
                raise RuntimeError(f"the step cannot be captured: {reason}, {WITHOUT}")

    def _capture(self) -> None:
        number, noise = self.state.steps, self.optimizer.noise
        args, kwargs = tree_unflatten(self._inputs, self._spec)
        self.passes.padding, noise.table = self._padding, self._streams
        self.state.had_finite = True  # from here on the host looks at no norm
        try:
            with (
                holding(self._held),
                self.model.capture.new_triggers(),
                capturing(self._graph),
            ):
                self._outputs = self.step.body(*args, **kwargs)
                if self.state.steps != number + 1 or not self.state.is_idle:
                    raise RuntimeError("its body is not one whole step, from forward to step()")
        except Exception as error:
            self.model.clear_gradients()
            raise RuntimeError(f"{error}, {WITHOUT}") from error
        finally:
            self.passes.padding = noise.table = None
        self._norms = list(self.state.norms)
        self._gradients = [p.grad for p in self.model.capture.parameters]
        self._launch(number)

    def _launch(self, number: int) -> None:
        noise = self.optimizer.noise
        known, streams = self._coming
        if known != (noise.key, number):
            streams = noise.streams(number)
        self._streams.write(streams)
        self._graph.replay()
        # While the device computes: the next step's begins without this.
        self._coming = (noise.key, number + 1), noise.streams(number + 1)
        real = self.state.ticket.samples // self.model.examples_per_unit
        self.state.norms = [
            BatchNorms(one.norms.clone(), one.squared.clone(), one.nonfinite + 0).first(real)
            for one in self._norms
        ]

    def replay(self, args: tuple, kwargs: dict) -> Any:
        """Makes the coming step by the graph; the host does what an eager step's Python does."""
        self._take(args, kwargs)
        self._refuse_changes()
        self.model.clear_gradients()
        try:
            self.passes.begin_replay(self.model.thresholds.clip_norms)
            self.optimizer.refuse()
            self.state.take_signal()
            number = self.optimizer.count()
        except BaseException:
            self.model.clear_gradients()
            raise
        self._launch(number)
        self.state.add_noise()
        self.state.apply()
        self.state.batch_number = None
        noisy = zip(self.model.capture.parameters, self._gradients, strict=True)
        self.model.gradient_buffer.apply([(p, g) for p, g in noisy if g is not None])
        return self.outputs()

    def _take(self, args: tuple, kwargs: dict) -> None:
        """Copies the inputs to where the graph reads them."""
        leaves, spec = tree_flatten((args, kwargs))
        if spec != self._spec or not all(map(_alike, leaves, self._inputs)):
            raise ValueError(
                "a graphed step gets other arguments than the captured one, or tensors of another "
                "shape or dtype: pad sequences to one length in collate_fn, give numbers as "
                "tensors, and make a graphed step for each kind of batch"
            )
        for static, given in zip(self._inputs, leaves, strict=True):
            if isinstance(static, Tensor):
                static.copy_(given, non_blocking=True)
        torch.ge(self._numbers, self.state.ticket.samples, out=self._padding)

    def _refuse_changes(self) -> None:
        changed = [
            name
            for (name, now), (_, before) in zip(self._dependencies(), self._before, strict=True)
            if now != before
        ]
        if changed:
            raise RuntimeError(
                f"{', '.join(changed)} changed after the step was captured, and the graph has the "
                "old value: make the step anew with optimizer.graphed(..); give a learning rate "
                "that changes as lr=torch.tensor(.., device='cuda')"
            )

    def _dependencies(self) -> list[tuple[str, Any]]:
        """Returns the values that Python would read in an eager step, by name."""
        groups = [
            {k: _value(v) for k, v in group.items() if k != "params"}
            for group in self.optimizer.param_groups
        ]
        held = [[id(p) for p in group["params"]] for group in self.optimizer.param_groups]
        # The numbers, flags and strings that modules hold, as the rate of a dropout.
        of_modules = chain.from_iterable(vars(module).values() for module in self._modules)
        attributes = [value for value in of_modules if type(value) in PLAIN]
        return [
            ("noise_multiplier", float(self.optimizer.noise_multiplier)),
            ("max_grad_norm", self.model.thresholds.clip_norms()),
            ("expected_batch_size", float(self.optimizer.expected_batch_size)),
            ("loss_reduction", self.optimizer.loss_reduction),
            ("optimizer.param_groups", (groups, held)),
            ("optimizer.state", id(self.optimizer.state)),
            ("the address of a parameter", [p.data_ptr() for p in self._parameters]),
            ("training, or another attribute of a module", attributes),
            ("the step hooks", len(self.optimizer.hooks)),
        ]


def _value(x: Any) -> Any:
    """Returns what a graph has of a hyperparameter: an address on the GPU, or the number."""
    if not isinstance(x, Tensor):
        return x
    return ("tensor", x.data_ptr()) if x.is_cuda else x.tolist()


def _alike(given: Any, static: Any) -> bool:
    if isinstance(given, Tensor) and isinstance(static, Tensor):
        return given.shape == static.shape and given.dtype == static.dtype
    return type(given) is type(static) and given == static
