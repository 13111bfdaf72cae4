"""Refuses by name state that a network carries from batch to batch, and restores it.

    model     parameters, persistent buffers and the set of both: a forward may change none of them
    working   other buffers, and attributes with what they hold: may change, unless results or
              state of the next batch depend on it

A cache of positions, a counter and a tensor kept for inspection are working state. So is a moving
average in an attribute, but that is refused: one batch is run after each of two others, and results
and state must be the same afterwards.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dp_clipping.capture.samples.batch import Batch
from dp_clipping.capture.samples.known_bags import KnownBags
from dp_clipping.guard.places import (
    DEPTH,
    PLAIN,
    Change,
    has_attributes,
    is_freed,
)
from dp_clipping.guard.state import Mark, State
from dp_clipping.trials.values import Values
from dp_clipping.layers.batch_layout import FEW
from dp_clipping.torch_compat import tensors_in
from dp_clipping.trials.tolerances import REPEATED

OUTPUT = "output "

Left = dict[str, Any]


def refuse_changes(changes: list[Change], when: str = "a forward in training") -> None:
    """Raises ValueError naming parameters and persistent buffers among them."""
    names = list(dict.fromkeys(c.name for c in changes if c.is_model))
    if names:
        raise ValueError(
            f"{when} changes {', '.join(names[:5])}: a parameter or a buffer that changes outside "
            "of the optimizer carries what it saw of one batch into the next, and out of training, "
            "without noise; set it before make_private from public data, keep its module in "
            "evaluation, or let it be constant"
        )


class Restored:
    """Records what a body in `restored` does to a state, until it is put back.

    Attributes:
        changes: what it has changed; known once it is done.
        values: of tensors before it.
    """

    def __init__(self, state: State, is_of_runs: bool = False):
        state.walk()
        state.changes = self.changes = []
        self.mark = state.mark()
        tensors = [named.tensor for named in self.mark.tensors]
        self.values = Values(tensors, with_parameters=not is_of_runs)
        self._may_keep_logs = not isinstance(state.root, nn.Module)  # a criterion, for its user

    def left(self) -> Left:
        """Returns name -> what has changed so far, values of tensors copied."""
        found: Left = {}
        for change in self.mark.replaced():
            value = change.place.value(change.key)
            if not (self._may_keep_logs and isinstance(value, list | deque)):
                _collect(found, change.name, value, 0)
        for named in map(self.mark.tensors.__getitem__, self.values.changed()):
            _collect(found, named.place.change(named.key).name, named.tensor, 0)
        return found

    def put_back(self) -> None:
        self.changes += self.mark.replaced()
        self.mark.put_back()
        written = map(self.mark.tensors.__getitem__, self.values.put_back())
        self.changes += [named.place.change(named.key) for named in written]


@contextmanager
def restored(
    state: State, carries: Callable[[], Any] | None = None, is_of_runs: bool = False
) -> Iterator[Restored]:
    """Restores what the body changes, also if the body raises.

    With `is_of_runs` the body computes in `State.rewound` only, again and again from one state.
    Then parameters are not copied: one that was written to is refused, and keeps its values.

    `carries` is called afterwards where working state has changed, and raises if that carries data.
    What is found here is raised in place of the body's own error, which may come of it.

    Raises:
        ValueError: naming parameters and persistent buffers that the body has changed.
    """
    body, error = Restored(state, is_of_runs), None
    try:
        yield body
    except Exception as raised:
        error = raised
    finally:
        body.put_back()
    refuse_changes(body.changes)
    if body.changes and carries is not None:
        carries()
    if error is not None:
        raise error


class Carried:
    """Refuses state that a network or a criterion carries from one batch to the next.

    Args:
        root: the network or criterion.
        run: called with args and kwargs; gives its outputs.
        batch_first: the first dimension of tensors counts the samples, else the second.
        is_sharded: see `State`; `check` then looks at parameters and buffers only, since other
            ranks could not run another forward then.
        known_bags: the known bags of the network's arguments.
        state: that of the root, if there is one.
    """

    def __init__(
        self,
        root: Any,
        run: Callable[..., Any],
        batch_first: bool,
        is_sharded: bool = False,
        known_bags: KnownBags | None = None,
        state: State | None = None,
    ):
        self.state = State(root, is_sharded) if state is None else state
        self._run, self._batch_first, self._known_bags = run, batch_first, known_bags

    def batch_of(self, args: tuple, kwargs: dict) -> Batch:
        """Returns a call's arguments as a batch."""
        bags = () if self._known_bags is None else self._known_bags.of(args, kwargs) or ()
        return Batch(args, kwargs, self._batch_first, bags)

    def check(self, mark: Mark, batch: Batch, when: str, samples: int = FEW) -> None:
        """Raises ValueError naming the state that a step must not change and has changed.

        Where working state has changed, calls are repeated with `samples` samples of the batch.
        """
        changes = mark.changes()
        if not changes:
            return
        refuse_changes(changes, when)
        if self.state.is_sharded or batch.size < FEW:
            return
        now = self.state.mark()
        hooks = mark.put_back()
        try:
            self.refuse(batch.with_samples(samples))
        finally:
            now.put_back()
            for around, number, hook in hooks:
                around[number] = hook

    def refuse(self, few: tuple[tuple, dict]) -> None:
        """Calls `refuse_carried` with a call's first sample alone, and with its second."""
        batch = self.batch_of(*few)
        first, second = (batch.with_rows([n] * batch.size) for n in range(2))
        refuse_carried(self.state, lambda x: self._run(*x[0], **x[1]), first, second)

    @contextmanager
    def checked(self, args: tuple, kwargs: dict, when: str) -> Iterator[None]:
        """Surrounds one call and, if state has changed, checks it by a second call.

        The second call has all samples, since other sizes may not fit.
        """
        mark = self.state.mark()
        yield
        if mark.changes() and tensors_in((args, kwargs)):
            batch = self.batch_of(args, kwargs)
            self.check(mark, batch, when, samples=batch.size)


def refuse_carried(state: State, run: Callable[[Any], Any], first: Any, second: Any) -> bool:
    """Runs a batch after the first and after the second, which are that batch in turn.

    In turn, since an extreme that the last batch reaches itself forgets the one before.

    Args:
        run: called with one of them, of equal shapes; gives outputs, with the same random numbers
            each time.

    Returns:
        Whether the first two are distinct, so that this tells. What has changed is then harmless.

    Raises:
        ValueError: naming what is other after the third, or that its outputs are.
    """
    if all(map(equal, tensors_in(first), tensors_in(second))):
        return False
    found: list[Change] = []

    def after(start: Any, last: Any) -> Left:
        with restored(state) as body:
            run(start)
            outputs = run(last)
            left = body.left()
            left |= {f"{OUTPUT}{n}": y.detach() for n, y in enumerate(tensors_in(outputs))}
        found.extend(body.changes)
        return left

    for last in (first, second):
        left = after(first, last)
        differ = _different(left, after(second, last))
        if differ:
            differ -= _different(left, after(first, last))  # random by generators of its own
        if differ:
            names = sorted(name for name in differ if not name.startswith(OUTPUT))
            names = names or sorted({change.name for change in found})
            raise ValueError(
                f"what was seen of one batch is carried into the next, in {', '.join(names[:5])}: "
                "gradients then depend on samples of earlier steps; let a batch depend on itself "
                "alone, or set the value before make_private from public data"
            )
    state.harmless |= {(id(c.place.values), c.key): c.place.values for c in found}
    return True


def _collect(found: Left, name: str, value: Any, depth: int) -> None:
    if isinstance(value, Tensor):
        if not is_freed(value):  # as what FSDP2 has gathered for an earlier forward
            found[name] = value.detach().clone()
    elif isinstance(value, PLAIN):
        found[name] = value
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
        found[name] = value
    elif hasattr(value, "__array__"):
        found[name] = torch.as_tensor(value).clone()
    elif has_attributes(value):
        _collect(found, name, vars(value), depth + 1)


def _different(one: Left, other: Left) -> set[str]:
    return {name for name in one | other if not _is_close(one.get(name), other.get(name), name)}


def _is_close(a: Any, b: Any, name: str) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return type(a) is type(b) and a == b
    if not name.startswith(OUTPUT) or not a.is_floating_point():
        return equal(a, b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    tolerance = REPEATED.of(a.dtype)
    a, b = a.double().nan_to_num(0, 0, 0), b.double().nan_to_num(0, 0, 0)
    return bool((a - b).norm() <= tolerance * a.norm())


def equal(now: Tensor, value: Tensor) -> bool:
    """Returns whether two tensors are equal, NaN to NaN; the host waits."""
    if now.shape != value.shape or now.dtype != value.dtype:
        return False
    return bool(((now == value) | ((now != now) & (value != value))).all())
