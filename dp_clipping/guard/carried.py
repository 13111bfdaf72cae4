"""Refuses by name state that a network carries from batch to batch, and restores it.

    model     parameters, persistent buffers and the set of both: a forward may change none of them
    working   other buffers, and attributes with what they hold: may change, unless results or
              state of the next batch depend on it

A cache of positions, a counter and a tensor kept for inspection are working state. So is a moving
average in an attribute, but that is refused: one batch is run after each of two others, and results
and state must be the same afterwards.

A list or a cache that a loop hands to each forward carries data too (`LeftInArguments`).
"""

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dp_clipping.capture.checks.summaries import SIGNS, summary
from dp_clipping.capture.samples.batch import Batch
from dp_clipping.distributed.dtensor import local
from dp_clipping.layers.batch_layout import FEW, Layout
from dp_clipping.torch_compat import tensors_in
from dp_clipping.trials.objects import DEPTH, Mark, Objects, State, is_freed
from dp_clipping.trials.perturb import Perturbed
from dp_clipping.trials.places import MISSING, PLAIN, Change, is_opened
from dp_clipping.trials.probe import Probe
from dp_clipping.trials.seen import Seen, Summary
from dp_clipping.trials.tolerances import REPEATED
from dp_clipping.trials.values import Values, copied_bytes, equal

NAMES, OUTPUT = "names", "output"  # keys of what a run shows, beside the names of values


def refuse_changes(changes: list[Change], when: str = "a forward in training") -> None:
    """Raises ValueError naming parameters and persistent buffers among them."""
    names = list(dict.fromkeys(c.name for c in changes if c.is_model))
    if names:
        raise ValueError(
            f"{when} changes {', '.join(names[:5])}: a parameter or a buffer that changes outside "
            "of the optimizer carries what it saw of one batch into the next, and out of training, "
            "without noise; set it before make_private from public data, keep its module in "
            "evaluation, or let it be constant (a counter may be a Python number); a running mean "
            "of parameters is updated in the loop, after optimizer.step()"
        )


class Restored:
    """A context that restores what its body changes of a state, also if the body raises.

    With `is_of_runs` the body computes in `State.rewound` only, again and again from one state.
    Then parameters are not copied: one that was written to is refused, and keeps its values.

    `carries` is called afterwards where working state has changed, and raises if that carries data.
    What is found here is raised in place of the body's own error, which may come of it.

    Attributes:
        changes: what the body has changed; known once it is done.

    Raises:
        ValueError: naming parameters and persistent buffers that the body has changed.
    """

    def __init__(
        self, state: State, carries: Callable[[], Any] | None = None, is_of_runs: bool = False
    ):
        self._state, self._carries, self._is_of_runs = state, carries, is_of_runs
        self._may_keep_logs = not isinstance(state.root, nn.Module)  # a criterion, for its user

    def __enter__(self) -> "Restored":
        self._state.walk()
        self._state.changes = self.changes = []
        self._mark = self._state.mark()
        tensors = [named.tensor for named in self._mark.tensors]
        self._values = Values(tensors, with_parameters=not self._is_of_runs)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.changes += self._mark.replaced()
        self._mark.put_back()
        written = map(self._mark.tensors.__getitem__, self._values.put_back())
        self.changes += [named.place.change(named.key) for named in written]
        if error is None or isinstance(error, Exception):
            refuse_changes(self.changes)
            if self.changes and self._carries is not None:
                self._carries()

    def left(self) -> dict[str, int]:
        """Returns name -> a number that is equal for equal values, of what has changed so far."""
        found: dict[str, int] = {}
        for change in self._mark.replaced():
            held = change.place.copy()
            value = held if change.key is None else held.get(change.key, MISSING)
            if not (self._may_keep_logs and isinstance(value, list | deque)):
                _collect(found, change.name, value, 0)
        for named in map(self._mark.tensors.__getitem__, self._values.changed()):
            _collect(found, named.place.change(named.key).name, named.tensor, 0)
        return found


class Carried:
    """Refuses state that a network or a criterion carries from one batch to the next.

    Args:
        state: that of the network or criterion. Of a sharded network `check` looks at parameters
            and buffers only, since other ranks could not run another forward then.
        run: called with args and kwargs; gives its outputs.
        batch_of: args and kwargs of a call -> a batch.
    """

    def __init__(
        self, state: State, run: Callable[..., Any], batch_of: Callable[[tuple, dict], Batch]
    ):
        self.state, self._run, self.batch_of = state, run, batch_of

    def check(
        self, changes: list[Change], mark: Mark, batch: Batch, when: str, samples: int = FEW,
        around: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:  # fmt: skip
        """Raises ValueError naming the state that a step must not change and has changed.

        Where working state has changed, calls are repeated with `samples` samples of the batch, in
        `around()`: hooks that were registered since the mark are not there.

        Args:
            changes: since the mark; some.
        """
        refuse_changes(changes, when)
        if self.state.is_sharded or batch.size < FEW:
            return
        now = self.state.mark()
        hooks = mark.put_back()
        try:
            with around():
                self.refuse(batch.with_samples(samples))
        finally:
            now.put_back()
            for around, number, hook in hooks:
                around[number] = hook

    def refuse(self, few: tuple[tuple, dict]) -> None:
        """Runs a batch of a call's first sample, and one of its second, after each of the two.

        Either comes last in turn, since an extreme that the last batch reaches itself forgets the
        one before. If the two are distinct, so that this tells, what has changed is harmless from
        then on.

        Raises:
            ValueError: naming what is other after the last one, or that its outputs are.
        """
        batch = self.batch_of(*few)
        batches = [batch.with_rows([n] * batch.size) for n in range(2)]
        if all(map(equal, *map(tensors_in, batches))):
            return
        for last in range(2):
            subject = _AfterAnother(self.state, self._run, batches, last)
            differing = Probe(subject).differing(
                Perturbed(torch.tensor([1], device="cpu"), torch.tensor([True], device="cpu"))
            )
            if differing:
                names = sorted(key[1] for key in differing if key[0] is NAMES and len(key) > 1)
                names = names or sorted({change.name for change in subject.changes})
                raise ValueError(
                    "what was seen of one batch is carried into the next, in "
                    f"{', '.join(names[:5])}: gradients then depend on samples of earlier steps; "
                    "let a batch depend on itself alone, or set the value before make_private from "
                    "public data"
                )
            changed = {(id(c.place.values), c.key): c.place.values for c in subject.changes}
            self.state.harmless |= changed

    def check_call(
        self, changes: list[Change], mark: Mark, args: tuple, kwargs: dict, when: str
    ) -> None:
        """Checks state that has changed since the mark before a call, by a second call.

        It has all samples, since other sizes may not fit.
        """
        if tensors_in((args, kwargs)):
            batch = self.batch_of(args, kwargs)
            self.check(changes, mark, batch, when, samples=batch.size)


class LeftInArguments:
    """Tensors that forwards have left in objects of their arguments.

    Attributes:
        noted: those that were left so far; where there are none, nothing is to be refused.
    """

    def __init__(self) -> None:
        self.noted: list[weakref.ref[Tensor]] = []

    def note(self, args: tuple, kwargs: dict, before: Objects) -> None:
        """Notes what a forward has left, for later ones."""
        left = Objects(args, kwargs).left_since(before)
        kept = [x for x in self.noted if x() is not None]
        self.noted = kept + [weakref.ref(x) for x in left]

    def refuse(self, args: tuple, kwargs: dict) -> None:
        """Raises ValueError if arguments hold what an earlier forward has left, read or not."""
        noted = {id(x()) for x in self.noted} - {id(None)}
        if noted and not noted.isdisjoint(map(id, Objects(args, kwargs).tensors)):
            raise ValueError(
                "an argument holds what an earlier forward has left in it, and a gradient that "
                "depends on that depends on samples of earlier steps: give each forward a new "
                "object, as model(x, memory=[]) or model(x, past_key_values=DynamicCache())"
            )


class _AfterAnother:
    """A network or criterion that is called with a batch after another one: a `probe.Subject`.

    It shows the outputs for the batch, and what both have left in the state. In place of the batch
    before, `perturbed` puts another one.

    Args:
        run: called with args and kwargs, with the same random numbers each time.
        batches: args and kwargs of equal shapes: the batches before.
        last: the number of the one whose outputs are compared.

    Attributes:
        changes: of the state, in all runs.
    """

    repeats = 1  # with random numbers of generators of its own

    def __init__(
        self, state: State, run: Callable[..., Any], batches: list[tuple[tuple, dict]], last: int
    ):
        self._state, self._run, self._batches, self._last = state, run, batches, last
        self.device = next(x.device for x in tensors_in(batches))
        self.changes: list[Change] = []

    def run(self, perturbed: Perturbed | None = None, seed: int | None = None) -> Seen:
        args, kwargs = self._batches[perturbed.rows[0] if perturbed else 0]
        with Restored(self._state) as body:
            self._run(*args, **kwargs)
            args, kwargs = self._batches[self._last]
            outputs = tensors_in(self._run(*args, **kwargs))
            left = body.left()
        self.changes += body.changes
        names = (tuple(sorted(left)), *(y.shape for y in outputs))
        seen = Seen({(NAMES,): self._exact(hash(names))})
        for name, value in left.items():
            seen.summaries[NAMES, name] = self._exact(value)
        for n, y in enumerate(outputs):
            found = summary(y[None], Layout(), 1)
            tolerance = REPEATED.of(y.dtype) if y.is_floating_point() else 0.0
            seen.summaries[OUTPUT, n] = Summary(found.values.to(self.device), tolerance)
        return seen

    def _exact(self, value: int) -> Summary:
        """Returns a summary that differs for other numbers, which float64 holds."""
        values = torch.zeros(1, SIGNS + 1, dtype=torch.float64, device=self.device)
        values[0, 0] = value % (1 << 52)
        return Summary(values, 0.0)


def _collect(found: dict[str, int], name: str, value: Any, depth: int) -> None:
    if isinstance(value, Tensor):
        if not is_freed(value):  # as what FSDP2 has gathered for an earlier forward
            is_known = value.layout is torch.strided and value.device.type != "meta"
            numbers = copied_bytes(local(value)).tobytes() if is_known else str(value)
            found[name] = hash((value.shape, value.dtype, numbers))
    elif isinstance(value, PLAIN):
        found[name] = hash((type(value), repr(value)))
    elif depth > DEPTH or isinstance(value, nn.Module):
        return
    elif isinstance(value, dict):
        for key, part in value.items():
            _collect(found, f"{name}.{key}", part, depth + 1)
    elif isinstance(value, list | tuple | deque):
        found[f"len({name})"] = len(value)
        for n, part in enumerate(value):
            _collect(found, f"{name}[{n}]", part, depth + 1)
    elif isinstance(value, set | frozenset):
        found[name] = hash(frozenset(value))
    elif hasattr(value, "__array__"):
        _collect(found, name, torch.as_tensor(value, device="cpu"), depth + 1)
    elif is_opened(type(value)) and hasattr(value, "__dict__"):
        _collect(found, name, vars(value), depth + 1)
