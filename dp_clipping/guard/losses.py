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
from dp_clipping.capture.samples.batch import Shapes, are_samples, keyed, map_tensors, tensors_of
from dp_clipping.guard.carried import Restored
from dp_clipping.guard.rounding import rounded
from dp_clipping.layers.batch_layout import Layout
from dp_clipping.trials.objects import State
from dp_clipping.trials.perturb import SIDES, Perturbed, halves, one_more
from dp_clipping.trials.probe import Probe
from dp_clipping.trials.randomness import same_randomness
from dp_clipping.trials.seen import Seen

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
SMALL = 1 << 26  # bytes of a criterion's arguments with which all samples are looked at together


def viewed(outputs: Any) -> Any:
    """Returns outputs of a network in tensors that only the user's code and the losses use."""
    return map_tensors(lambda y: y.view_as(y) if y.requires_grad else y, outputs)


class Watched:
    """Outputs of one forward on their way to the losses: a `probe.Subject`.

    It shows the derivatives of the losses by each sample's outputs. Where samples do not stay, a
    multiple of their losses is derived.

    Args:
        outputs: what the network has returned.
        layouts: the layouts of the tensors in it; None: the whole batch has one value.
        number: the number of the check.

    Attributes:
        number: as given.
        outputs: the same for the user, in tensors of their own: FSDP's hooks on the network's would
            take a look at a gradient for a backward.
    """

    repeats = 0

    def __init__(self, outputs: Any, layouts: Sequence[Layout | None], number: int):
        self.number = number
        self.outputs = viewed(outputs)
        found = zip(tensors_of(self.outputs), layouts, strict=True)
        pairs = [(y, layout) for y, layout in found if y.requires_grad]
        self._of_batch = [y for y, layout in pairs if layout is None or layout.kind == "shared"]
        self._of_samples = [
            (y, layout) for y, layout in pairs if layout is not None and layout.kind != "shared"
        ]

    def check_graph(self, losses: Tensor) -> None:
        """Follows the autograd graph from the losses [B] back to the outputs.

        Raises:
            ValueError: if a sample's loss depends on another one's outputs, or on one that has no
                sample.
        """
        if not losses.requires_grad:
            return
        self._losses, self.device = losses, losses.device
        found = self._derivatives(self._of_batch, torch.ones_like(losses))
        for y, gradient in zip(self._of_batch, found, strict=True):
            if bool((gradient != 0).any()):
                raise ValueError(
                    f"the loss uses an output of the network of shape {tuple(y.shape)} in which no "
                    f"dimension counts the samples (a term of the whole batch): {REMEDY}; return "
                    "one value per sample"
                )
        exchanges = halves(len(losses), self.number)
        probe = Probe(self)
        for one in exchanges if self.number == 0 else exchanges[:1]:
            if probe.differing(one):
                raise ValueError(OF_OUTPUTS)

    def run(self, perturbed: Perturbed | None = None, seed: int | None = None) -> Seen:
        weights = torch.ones_like(self._losses)
        if perturbed is not None:
            weights = weights.where(perturbed.stays.to(self.device), -3.0)
        found = self._derivatives([y for y, _ in self._of_samples], weights)
        pairs = enumerate(zip(found, self._of_samples, strict=True))
        size = len(weights)
        return Seen({(n,): summary(gradient, own[1], size) for n, (gradient, own) in pairs})

    def _derivatives(self, ys: list[Tensor], weights: Tensor) -> tuple[Tensor, ...]:
        """Returns gradients of the weighted losses by some of the outputs."""
        if not ys:
            return ()
        return torch.autograd.grad(
            self._losses, ys, weights, retain_graph=True, allow_unused=True, materialize_grads=True
        )


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
        real: the number of rows that are samples; padding follows.
    """

    repeats = 5

    def __init__(
        self, per_sample: Callable[..., Tensor], state: State, args: tuple, kwargs: dict,
        size: int, shape: tuple[int, ...] | None, batch_first: bool, shapes: Shapes, real: int,
    ):  # fmt: skip
        self._call, self._state = per_sample, state
        # Without the step's graph, which is freed before they are used.
        self._arguments = map_tensors(_leaf, (args, kwargs))
        self._size, self._real = size, real
        found = keyed(self._arguments)
        self._keys, self._tensors = [key for key, _ in found], [x for _, x in found]
        self.device = self._tensors[0].device if self._tensors else torch.device("cpu")
        kind = self.device.type
        now = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        self._autocast = partial(torch.autocast, kind, *now)  # as in the user's call
        self._shapes = shapes
        named = [*enumerate(args, 1), *kwargs.items()]
        self._names = [name for name, value in named for _ in tensors_of(value)]
        self._listed = {  # lists of targets; outputs have gradients
            name
            for name, value in named
            if are_samples(value, size) and not any(x.requires_grad for x in tensors_of(value))
        }
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
        self._rows = torch.arange(size, device="cpu")

    def check(self, number: int) -> None:
        """Raises ValueError if a sample's loss depends on others.

        A run has a copy of the samples with one more. Of arguments that are not small two parts of
        the batch are looked at, so that the losses take no more memory than its own beside its
        outputs. Where they do not agree, all samples are looked at together.
        """
        size, real = self._size, self._real
        most = min(real, max(2, (real + 1) // 2, 3 * real // 4 - 1))
        parts = [torch.arange(most, device="cpu"), torch.arange(real - most, real, device="cpu")]
        if sum(x.numel() * x.element_size() for x in self._tensors) <= SMALL:
            parts = [torch.arange(real, device="cpu")]
        if not self._ragged and all(self._agree(rows, number) for rows in parts):
            return
        self._given, self._rows = {}, torch.arange(size, device="cpu")
        probe, places = Probe(self), self._likeliest
        for one in halves(real, number):
            perturbed = one.padded(size)
            if self._agrees(probe, self._likeliest, perturbed) is not True:
                places = self._find(probe, perturbed)
        is_found = bool(places) and not self._ragged
        for more in one_more(size) if is_found else ():
            if self._agrees(probe, places, more) is False:
                raise ValueError(OF_SIZE)

    def of_sample(
        self, row: int, change: Callable[[Tensor], Tensor],
        sizes: Mapping[int, int] = MappingProxyType({}),
    ) -> float | None:  # fmt: skip
        """Returns the loss of one sample, from arguments that are changed; None: not known.

        Args:
            change: takes the sample's part of an argument [1, ..]; returns another part.
            sizes: dimensions of `shape` of the size that is a key get another one.
        """
        if self._ragged or not self._places:
            return None
        self._given = self._likeliest
        shape = self._shape and (1, *(sizes.get(n, n) for n in self._shape[1:]))
        try:
            losses, _, is_random = self._losses(lambda rows: change(rows[row : row + 1]), shape)
        except Exception:
            return None
        return None if is_random or losses.shape != (1,) else float(losses.detach())

    def _agree(self, rows: Tensor, number: int) -> bool:
        """Returns whether losses of these samples are the same beside others, and among more.

        Where random numbers are drawn, only beside others.
        """
        size, self._given, self._rows = len(rows), self._likeliest, rows
        try:
            probe = Probe(self)
        except Exception:  # it does not take so few
            return False
        for which, one in enumerate(halves(size, number)):
            if not probe.base.is_random:  # among more samples it draws other numbers
                one = one.among_more(SIDES[which % 2])
            if self._agrees(probe, self._likeliest, one) is not True:
                return False
        return True

    def _find(self, probe: Probe, perturbed: Perturbed) -> dict[int, Layout]:
        """Returns the layout of each argument, not only likely ones; {} if one is unclear."""
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
        """Returns whether losses agree, and gradients where samples are exchanged.

        Returns:
            None: the criterion does not take such samples together.
        """
        self._given = places
        changed = probe.differing(perturbed._replace(may_fail=True))
        return None if changed is None else not changed

    def _candidates(self, n: int) -> list[Layout]:
        """Returns the possible layouts of its samples, the likeliest first; [] if it has none."""
        x, key = self._tensors[n], self._keys[n]
        if not x.dim() or self._names[n] in self._listed:
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
        """Returns summaries of losses, and of gradients by the layouts that they may have."""
        rows = self._rows if perturbed is None else self._rows[perturbed.rows]
        size = len(rows)
        losses, leaves, is_random = self._losses(
            lambda own: own.index_select(0, rows.to(own.device)),
            self._shape and (size, *self._shape[1:]),
            None if seed is None else torch.Generator(self.device).manual_seed(seed),
        )
        if losses.shape != (size,):
            raise ValueError(f"{tuple(losses.shape)} losses of {size} samples")
        seen = Seen({("losses",): summary(losses.detach(), Layout(), size)}, is_random)
        if losses.requires_grad and leaves:
            gradients = torch.autograd.grad(
                losses.sum(), list(leaves.values()), allow_unused=True, materialize_grads=True
            )
            for n, gradient in zip(leaves, gradients, strict=True):
                for layout in self._places.get(n, ()):
                    if perturbed is None or layout == self._given.get(n):
                        seen.summaries[n, layout] = summary(gradient, layout, size)
        return seen

    def _losses(
        self, change: Callable[[Tensor], Tensor], shape: tuple[int, ...] | None,
        rounding: torch.Generator | None = None,
    ) -> tuple[Tensor, dict[int, Tensor], bool]:  # fmt: skip
        """Calls the criterion with other samples where they are given, and puts its state back.

        Args:
            change: takes an argument with the samples in front; returns it with others.
            rounding: draws errors of the size of rounding, which outputs get; None: they do not.

        Returns:
            Its losses, number of a tensor -> leaf of the graph, and whether it drew numbers.
        """
        numbers = iter(range(len(self._tensors)))
        leaves: dict[int, Tensor] = {}

        def changed(x: Tensor) -> Tensor:
            n, own = next(numbers), x
            if layout := self._given.get(n):
                own = layout.restore(change(layout.batch_first(own, self._size)))
            if x.requires_grad:
                leaves[n] = own = own.detach().requires_grad_()
            # Targets have no errors: a comparison with a constant may depend on their last bit.
            draw = rounding if x.requires_grad else None
            return rounded(own.clone(), draw)  # which the criterion may change in place

        with (
            torch.enable_grad(), Restored(self._state), self._autocast(),
            same_randomness(device=self.device) as states,
        ):  # fmt: skip
            args, kwargs = map_tensors(changed, self._arguments)
            losses = self._call(*args, shape=shape, **kwargs)
            return losses, leaves, states.have_moved


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.requires_grad)
