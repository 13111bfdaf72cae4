"""Finds losses that depend on other samples.

There are two checks of a batch. The first follows the graph of the step from the losses to the
network's outputs: the derivative of a sample's loss by other samples' outputs must be zero,
whatever the code in between. The second calls the criterion again with other samples in some places
of all its arguments: the losses of the samples that stay, and their gradients, must be the same.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from dp_clipping.capture.checks.summaries import summary
from dp_clipping.capture.samples.batch import hold_objects, map_tensors, tensors_of
from dp_clipping.guard.carried import restored
from dp_clipping.guard.state import State
from dp_clipping.layers.batch_layout import Layout
from dp_clipping.trials.perturb import SIDES, Perturbed, halves, one_more, one_source
from dp_clipping.trials.probe import Probe
from dp_clipping.trials.randomness import same_randomness
from dp_clipping.trials.seen import Seen, Summary, differ

REMEDY = "per-sample gradients need a loss for each sample alone"
OF_OUTPUTS = (
    "the loss of a sample depends on the outputs of other samples (a contrastive loss, a "
    f"normalisation over the batch): {REMEDY}"
)
OF_SIZE = (
    "the loss of a sample depends on how many samples the batch has, or on its place among them (a "
    "division by the size of the batch, for example): per-sample gradients need a loss for each "
    "sample alone; return that, and the mean is taken by loss_reduction='mean'"
)
PART = 8  # samples of a check in between
CALLS = 16  # shapes of arguments that are remembered
LOSSES = ("losses",)


def viewed(outputs: Any) -> Any:
    """Returns outputs of a network in tensors that only the user's code and the losses use."""
    return map_tensors(lambda y: y.view_as(y) if y.requires_grad else y, outputs)


class Watched:
    """Outputs of one forward that are watched on their way to the losses.

    Args:
        outputs: what the network has returned.
        layouts: the layouts of the tensors in it; None: the whole batch has one value.
        number: the number of the check.

    Attributes:
        number: as given.
        outputs: the same for the user, in tensors of their own: FSDP's hooks on the network's would
            take a look at a gradient for a backward.
    """

    def __init__(self, outputs: Any, layouts: Sequence[Layout | None], number: int):
        self.number = number
        self.outputs = viewed(outputs)
        found = zip(tensors_of(self.outputs), layouts, strict=True)
        self._pairs = [(y, layout) for y, layout in found if y.requires_grad]

    def check_graph(self, losses: Tensor) -> None:
        """Follows the autograd graph from the losses [B] back to the outputs.

        Raises:
            ValueError: if a sample's loss depends on another one's outputs, or on one that has no
                sample.
        """
        if not losses.requires_grad or not self._pairs:
            return
        size = len(losses)
        if self.number and self._are_apart(losses):
            return
        base = self._gradients(losses, torch.ones_like(losses))
        for (y, layout), gradient in zip(self._pairs, base, strict=True):
            if _is_of_all(layout) and gradient is not None:
                raise ValueError(
                    f"the loss uses an output of the network of shape {tuple(y.shape)} in which no "
                    f"dimension counts the samples (a term of the whole batch): {REMEDY}; return "
                    "one value per sample"
                )
        patterns = halves(size, self.number)
        for stays in patterns if self.number == 0 else patterns[:1]:
            stays = stays.to(losses.device)
            weights = torch.where(stays, 1.0, -3.0).to(losses.dtype)
            both = zip(base, self._gradients(losses, weights), strict=True)
            if any(differ([pair for pair in both if None not in pair], stays)):
                raise ValueError(OF_OUTPUTS)

    def _are_apart(self, losses: Tensor) -> bool:
        """Returns whether losses of half of the samples have no derivative for the others' outputs.

        One backward tells. A derivative that only cancels is no zero, and is compared.
        """
        if any(_is_of_all(layout) for _, layout in self._pairs):
            return False
        stays = halves(len(losses), self.number)[0].to(losses.device)
        gradients = self._of_outputs(losses, torch.where(stays, 0.0, 1.0).to(losses.dtype))
        sizes = losses.new_zeros(len(losses), dtype=torch.float32)
        for gradient, (_, layout) in zip(gradients, self._pairs, strict=True):
            rows = layout.batch_first(gradient, len(losses)).reshape(len(losses), -1)
            sizes += torch.linalg.vector_norm(rows, 1, 1).to(sizes)  # of no numbers: 0
        return bool((sizes.where(stays, 0.0) == 0).all())

    def _of_outputs(self, losses: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        ys = [y for y, _ in self._pairs]
        return torch.autograd.grad(
            losses, ys, weights, retain_graph=True, allow_unused=True, materialize_grads=True
        )

    def _gradients(self, losses: Tensor, weights: Tensor) -> list[Summary | None]:
        """Returns summaries of the gradients of the outputs; None: zero, of one without samples."""
        summaries = []
        found = self._of_outputs(losses, weights)
        for gradient, (_, layout) in zip(found, self._pairs, strict=True):
            if _is_of_all(layout):
                summaries.append(Summary(gradient, 1.0) if bool((gradient != 0).any()) else None)
            else:
                summaries.append(summary(gradient, layout, len(losses)))
        return summaries


def _is_of_all(layout: Layout | None) -> bool:
    return layout is None or layout.kind == "shared"


class Shapes:
    """Remembers shapes of a criterion's arguments, to find dimensions that do not count samples.

    A dimension that had size n in an earlier call and has size n now does not count samples, if the
    earlier batch had another size and n is no multiple of it (as for tokens in one dimension).
    """

    def __init__(self) -> None:
        self._seen: dict[tuple, set[tuple[int, torch.Size]]] = {}

    def note(self, arguments: tuple[tuple, dict], size: int) -> None:
        """Remembers the shapes of a call with `size` samples."""
        for key, x in _keyed(arguments):
            seen = self._seen.setdefault(key, set())
            if len(seen) < CALLS:
                seen.add((size, x.shape))

    def counts_samples(self, key: tuple, dim: int, size: int) -> bool:
        """Returns whether a dimension of the batch's `size` may count samples."""
        seen = self._seen.get(key, ())
        return not any(shape[dim] == size and size % batch for batch, shape in seen)


def _keyed(arguments: tuple[tuple, dict]) -> list[tuple[tuple, Tensor]]:
    """Returns the tensors of a call, each with a key that identifies the argument."""
    args, kwargs = arguments
    given = tensors_of(arguments) if hold_objects(args, kwargs) else [*args, *kwargs.values()]
    tensors = [x for x in given if isinstance(x, Tensor)]
    kinds = tuple(map(Tensor.dim, tensors)), tuple(kwargs)
    return [((n, *kinds), x) for n, x in enumerate(tensors)]


class Criterion:
    """The user's criterion in one call, which is made again with other samples: a `probe.Subject`.

    Args:
        per_sample: the call: arguments, and `shape`, to losses [B].
        state: the state of the user's criterion, which is put back.
        args, kwargs: of the user's call.
        size: B.
        shape: the shape of outputs before they were flattened, if the user gives it.
        batch_first: whether the first dimension counts samples.
        shapes: the shapes of earlier calls.
    """

    repeats = 0

    def __init__(
        self, per_sample: Callable[..., Tensor], state: State, args: tuple, kwargs: dict,
        size: int, shape: tuple[int, ...] | None, batch_first: bool, shapes: Shapes,
    ):  # fmt: skip
        self._call, self._state = per_sample, state
        # Without the step's graph, which is freed before they are used.
        self._arguments = map_tensors(_leaf, (args, kwargs))
        self._size = size
        keyed = _keyed(self._arguments)
        self._keys, self._tensors = [key for key, _ in keyed], [x for _, x in keyed]
        self.device = self._tensors[0].device if self._tensors else torch.device("cpu")
        kind = self.device.type
        now = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        self._autocast = partial(torch.autocast, kind, *now)  # as in the user's call
        self._shapes = shapes
        self._names = [
            name
            for name, value in [*enumerate(args, 1), *kwargs.items()]
            for _ in tensors_of(value)
        ]
        self._flat = None if shape is None else shape[0] * shape[1]
        self._batch_first, self._shape = batch_first, shape
        if shape is None:
            graded = [x for x in self._tensors if x.requires_grad and size not in x.shape]
            flat = [x.shape[0] for x in graded if x.dim() and x.shape[0] % size == 0]
            self._flat = next(iter(flat), None)
        places = {n: self._candidates(n) for n in range(len(self._tensors))}
        self._ragged = any(
            x.dim() and not places[n] and not x.is_floating_point()
            for n, x in enumerate(self._tensors)
        )
        self._places = {
            n: found
            for n, found in places.items()
            if found and (self._tensors[n].is_floating_point() or not self._ragged)
        }
        self._likeliest = {n: found[0] for n, found in self._places.items()}
        self._given: dict[int, Layout] = {}  # where samples are exchanged
        self._rows = torch.arange(size)

    def check(self, number: int, is_whole: bool = True) -> None:
        """Raises ValueError if a sample's loss depends on others.

        All samples take part in a whole check, at most `PART` in others. Where they do not agree,
        they are looked at together.
        """
        parts = self._parts(number, is_whole)
        if not self._ragged and all(self._agree(rows, number) for rows in parts):
            return
        self._given, self._rows = {}, torch.arange(self._size)
        probe, places = Probe(self), self._likeliest
        for which, stays in enumerate(halves(self._size, number)):
            perturbed = one_source(stays, number + which)
            if self._agrees(probe, self._likeliest, perturbed) is not True:
                places = self._find(probe, perturbed.rows)
        is_found = bool(places) and not self._ragged
        for more in one_more(self._size) if is_found else ():
            if self._agrees(probe, places, more) is False:
                raise ValueError(OF_SIZE)

    def of_sample(
        self, row: int, change: Callable[[Tensor, Tensor], Tensor],
        sizes: Mapping[int, int] = MappingProxyType({}),
    ) -> float | None:  # fmt: skip
        """Returns the loss of one sample, from arguments that are changed; None: not known.

        Args:
            change: takes an argument, and the sample's part of it [1, ..]; returns another part.
            sizes: dimensions of `shape` of the size that is a key get another one.
        """
        if self._ragged or not self._places:
            return None

        def changed(n: int, x: Tensor) -> Tensor:
            layout = self._likeliest.get(n)
            if layout is None:
                return x
            own = layout.batch_first(x, self._size)[row : row + 1]
            return layout.restore(change(self._tensors[n], own))

        shape = self._shape and (1, *(sizes.get(n, n) for n in self._shape[1:]))
        with torch.no_grad():
            try:
                losses, _, is_random = self._losses(changed, shape)
            except Exception:
                return None
        return None if is_random or losses.shape != (1,) else float(losses)

    def _parts(self, number: int, is_whole: bool) -> list[Tensor]:
        """Returns parts of the batch, so small that their losses take no more memory than its own.

        A run has a copy of a part with one sample more, beside the batch's own outputs.
        """
        size = self._size
        most = min(size, max(2, (size + 1) // 2, 3 * size // 4 - 1))
        if is_whole:
            return [torch.arange(most), torch.arange(size - most, size)]
        most = min(most, PART)
        start = (number * PART) % (size - most + 1)
        return [torch.arange(start, start + most)]

    def _agree(self, rows: Tensor, number: int) -> bool:
        """Returns whether losses of these samples are the same beside others, and among more."""
        size, self._given, self._rows = len(rows), self._likeliest, rows
        try:
            probe = Probe(self)
        except Exception:  # it does not take so few
            return False
        for which, stays in enumerate(halves(size, number)):
            perturbed = one_source(stays, number + which).among_more(SIDES[which % 2])
            if self._agrees(probe, self._likeliest, perturbed) is not True:
                return False
        return True

    def _find(self, probe: Probe, rows: Tensor) -> dict[int, Layout]:
        """Returns the layout of each argument, not only likely ones; {} if one is unclear."""
        perturbed = Perturbed(rows, rows == torch.arange(len(rows)))
        if not self._agrees(probe, {}, perturbed):
            return {}  # it draws numbers of its own
        chosen: dict[int, Layout] = {}
        for n, layouts in self._places.items():
            found = {layout: self._agrees(probe, {n: layout}, perturbed) for layout in layouts}
            fits = [layout for layout, agrees in found.items() if agrees]
            if not fits and False in found.values():
                self._refuse(n)
            chosen.update((n, layout) for layout in fits[:1])
        if chosen and self._agrees(probe, chosen, perturbed) is False:
            self._refuse(min(chosen))
        return chosen if len(chosen) == len(self._places) else {}

    def _refuse(self, n: int) -> None:
        if self._tensors[n].requires_grad:
            raise ValueError(OF_OUTPUTS)
        name = self._names[n]
        argument = f"argument {name}" if isinstance(name, int) else f"argument {name!r}"
        keyword = "weight" if isinstance(name, int) else name
        raise ValueError(
            f"the loss of a sample depends on what {argument} of the criterion has of other "
            f"samples (class weights or a count of the whole batch, for example): {REMEDY}; "
            "compute such numbers from public data, once; what is the same for every batch, and "
            f"has {self._size} entries as the batch has samples by chance, give to make_private "
            "in the criterion, not to the criterion in each call: "
            f"criterion=nn.CrossEntropyLoss(weight=weight), or of a function "
            f"criterion=functools.partial(loss_function, {keyword}={keyword})"
        )

    def _agrees(self, probe: Probe, places: dict[int, Layout], perturbed: Perturbed) -> bool | None:
        """Returns whether losses agree, and gradients by a layout that their tensor may have.

        Returns:
            None: the criterion does not take such samples together.
        """
        self._given = places
        changed = probe.differing(perturbed._replace(may_fail=True))
        if changed is None:
            return None
        gradients: dict[int, list[bool]] = {}
        for key in probe.base.summaries.keys() & probe.beside.summaries.keys() - {LOSSES}:
            gradients.setdefault(key[0], []).append(key not in changed)
        return LOSSES not in changed and all(map(any, gradients.values()))

    def _candidates(self, n: int) -> list[Layout]:
        """Returns the possible layouts of its samples, the likeliest first; [] if it has none."""
        x, key = self._tensors[n], self._keys[n]
        if not x.dim():
            return []
        dims = [d for d in range(x.dim()) if x.shape[d] == self._size]
        dims = [d for d in dims if self._shapes.counts_samples(key, d, self._size)]
        if not self._batch_first and 1 in dims:
            dims.sort(key=lambda d: d != 1)
        found = [Layout("dimension", d) for d in dims]
        if self._flat is not None and x.shape[0] == self._flat != self._size:
            found += [Layout("sample_major"), Layout("time_major")]
        return found

    def run(self, perturbed: Perturbed | None = None, seed: int | None = None) -> Seen:
        """Returns summaries of losses, and of gradients by each layout that they may have."""
        rows = self._rows if perturbed is None else self._rows[perturbed.rows]
        size = len(rows)

        def changed(n: int, x: Tensor) -> Tensor:
            layout = self._given.get(n)
            if layout is None:
                return x
            own = layout.batch_first(x, self._size)
            return layout.restore(own.index_select(0, rows.to(x.device)))

        shape = self._shape and (size, *self._shape[1:])
        with torch.enable_grad():
            losses, leaves, is_random = self._losses(changed, shape)
            if losses.shape != (size,):
                raise ValueError(f"{tuple(losses.shape)} losses of {size} samples")
            seen = Seen({LOSSES: summary(losses.detach(), Layout(), size)}, is_random)
            if losses.requires_grad and leaves:
                gradients = torch.autograd.grad(
                    losses.sum(), list(leaves.values()), allow_unused=True, materialize_grads=True
                )
                for n, gradient in zip(leaves, gradients, strict=True):
                    given = self._given.get(n)
                    for layout in self._places.get(n, ()) if given is None else (given,):
                        seen.summaries[n, layout] = summary(gradient, layout, size)
        return seen

    def _losses(
        self, change: Callable[[int, Tensor], Tensor], shape: tuple[int, ...] | None
    ) -> tuple[Tensor, dict[int, Tensor], bool]:
        """Calls the criterion with changed tensors, and puts its state back.

        Returns:
            Its losses, number of a tensor -> leaf of the graph, and whether it drew numbers.
        """
        numbers = iter(range(len(self._tensors)))
        leaves: dict[int, Tensor] = {}

        def changed(x: Tensor) -> Tensor:
            n = next(numbers)
            x = change(n, x.detach())
            if self._tensors[n].requires_grad and torch.is_grad_enabled():
                leaves[n] = x = x.detach().requires_grad_()
            return x.clone()  # which the criterion may change in place

        with (
            restored(self._state), same_randomness(device=self.device) as states, self._autocast(),
        ):  # fmt: skip
            args, kwargs = map_tensors(changed, self._arguments)
            losses = self._call(*args, shape=shape, **kwargs)
            return losses, leaves, states.have_moved


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.requires_grad)
