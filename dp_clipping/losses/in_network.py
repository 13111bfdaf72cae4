"""Per-sample losses that the network computes itself: `model(**batch).loss`, `model(x, y)[1]`.

Such a loss is a mean over the tokens of a batch, so a sample's part in it depends on how many
tokens the others have. In a private forward it becomes one loss per sample, each the mean over its
own tokens, and `num_items_in_batch`, which counts those of the batch, is not used. What else the
network adds to it must be one value per sample, too. The losses are an output of the network like
any other, so the checks that no sample sees another one cover them.

Two ways to compute a loss are known:

    by `loss_function`      of a Hugging Face model: it is exchanged while a private forward runs
    by functions of torch   in the network's own forward: these are exchanged then

The second one looks at each call of torch, so it is left alone once the first one is seen. It does
not reach into compiled code.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dp_clipping.capture.samples.batch import Batch, Constants, tensors_of
from dp_clipping.capture.samples.packed import opened
from dp_clipping.layers.vmap.samples import rows_of_call
from dp_clipping.losses.private_loss import PrivateLoss

OF_BATCH = "num_items_in_batch"
OF_LABELS = ("label", "target", "_positions", "future_values")  # in names of arguments
OF_CLASSES = (F.cross_entropy, F.nll_loss)
FUNCTIONS = (
    *OF_CLASSES, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
)  # fmt: skip
SIGNATURES = {function: inspect.signature(function) for function in (*FUNCTIONS, F.ctc_loss)}


@dataclass
class Labelled:
    """One forward with labels.

    Attributes:
        is_named: some are given by name.
        count: losses that were computed in it.
        made: their nodes in its graph.
    """

    is_named: bool
    count: int = 0
    made: list[Any] = field(default_factory=list)


class LossInNetwork:
    """Makes a network that is given labels return losses [B].

    Args:
        network: without a data-parallel wrapper.
        batch_first: dimension 0 of its inputs counts the samples; else nothing is exchanged.
        constants: knows which of them have no row for each sample.
        is_compiled: a part of it is, so only `loss_function` is exchanged.

    Attributes:
        places: of labels, in the arguments without a name.
    """

    def __init__(
        self, network: nn.Module, batch_first: bool, is_compiled: bool, constants: Constants
    ):
        self._network, self._constants = network, constants
        self._owners = list(_owners(network))
        self._batch_first, self._looks_inside = batch_first, not is_compiled
        self.places = _places_of_labels(network)
        self._batch_size = 0

    def labelled(self, args: tuple, kwargs: Mapping[str, Any]) -> Labelled | None:
        """Returns a forward with these arguments; None: there are no labels among them."""
        has_labels = any(isinstance(x, Tensor) and _is_of_labels(n) for n, x in kwargs.items())
        is_named = has_labels
        for n in self.places:
            has_labels = has_labels or (n < len(args) and isinstance(args[n], Tensor))
        return Labelled(is_named) if self._batch_first and has_labels else None

    @contextmanager
    def per_sample(self, forward: Labelled | None) -> Iterator[None]:
        """Enters a context in which a forward returns losses [B]."""
        if forward is None:
            yield
            return
        with ExitStack() as stack:
            for owner in self._owners:
                stack.enter_context(_exchanged(owner, forward))
            if self._looks_inside:
                hook = self._network.register_forward_pre_hook(self._note_size, with_kwargs=True)
                stack.callback(hook.remove)
                mode = stack.enter_context(PerSampleReductions(self._rows))
            yield
        if forward.count:
            self._looks_inside = False
        elif self._looks_inside:
            forward.count, forward.made = mode.count, mode.made
        if not forward.count and not forward.is_named:
            self.places = ()  # what is called so may be no label, and looking at each call is slow

    def _rows(self) -> int:
        return rows_of_call.get() or self._batch_size

    def _note_size(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        args, kwargs = opened((args, kwargs), batch_first=True)
        self._batch_size = Batch(args, kwargs, batch_first=True, constants=self._constants).size


@contextmanager
def _exchanged(owner: Any, forward: Labelled) -> Iterator[None]:
    """Enters a context in which the loss function of a Hugging Face model returns [B]."""
    own, loss_function = vars(owner).get("_loss_function"), owner.loss_function

    def per_sample(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop(OF_BATCH, None)
        size = len(tensors_of([kwargs.get("labels"), args, kwargs])[0])
        with PerSampleReductions(lambda: size) as mode:
            loss = loss_function(*args, **kwargs)
        forward.count += mode.count
        forward.made += mode.made
        return loss

    owner.loss_function = per_sample
    try:
        yield
    finally:
        if own is None:
            vars(owner).pop("_loss_function")
        else:
            owner.loss_function = own


def wrapped(
    outputs: Any, step: Any, private: Callable[..., PrivateLoss], forward: Labelled | None
) -> Any:
    """Returns outputs of a forward whose losses are made `private(losses=..)`.

    It is their `loss`, or what is called so in part; of a tuple the first entry that was
    computed from a loss; or all that is returned. Other outputs stay as they are.
    """
    count, made = (0, []) if forward is None else (forward.count, forward.made)
    shape = () if not count else (0 if step.is_empty else step.rows,)
    entries = {}
    for place, found in _entries(outputs).items():
        if isinstance(found, Tensor) and found.requires_grad and found.shape == shape:
            entries[place] = found
    if len(entries) > 1 and isinstance(outputs, tuple):  # predictions [B] are no losses
        own = {place: x for place, x in entries.items() if _is_made_of(x, made)}
        entries = own or entries
    for place, found in entries.items():
        if not count:
            step.has_own_loss = True
            return outputs
        step.look_at(found)
        loss = private(losses=found)
        if isinstance(outputs, Tensor):
            return loss
        if isinstance(outputs, tuple):
            changed = *outputs[:place], loss, *outputs[place + 1 :]
            return outputs._make(changed) if hasattr(outputs, "_make") else changed
        if isinstance(outputs, MutableMapping):
            outputs[place] = loss
        else:
            outputs.loss = loss
    return outputs


def _entries(outputs: Any) -> dict[Any, Any]:
    """Returns what may be a loss in a network's outputs, by its place."""
    if isinstance(outputs, tuple):
        return dict(enumerate(outputs))
    if isinstance(outputs, Tensor):
        return {None: outputs}
    if not isinstance(outputs, MutableMapping):
        return {None: getattr(outputs, "loss", None)}
    if "loss" in outputs:
        return {"loss": outputs["loss"]}
    return {name: found for name, found in outputs.items() if "loss" in str(name)}


def _is_made_of(x: Tensor, made: Sequence[Any]) -> bool:
    """Returns whether one of these nodes is in the graph of x."""
    wanted, seen, ahead = set(made), set(), [x.grad_fn]
    while ahead:
        node = ahead.pop()
        if node in wanted:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            ahead += [before for before, _ in node.next_functions]
    return False


def _is_of_labels(name: str) -> bool:
    return any(part in name for part in OF_LABELS)


def _places_of_labels(network: nn.Module) -> tuple[int, ...]:
    """Returns the places of arguments for labels in a call of the network without names."""
    try:
        names = inspect.signature(network.forward).parameters
    except (TypeError, ValueError):  # a forward that tells none
        return ()
    return tuple([n for n, name in enumerate(names) if _is_of_labels(name)])


def _owners(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the outermost Hugging Face models, whose loss functions can be exchanged."""
    found = getattr(type(module), "loss_function", None)
    if isinstance(found, property) and found.fset is not None:
        yield module
        return
    for child in module.children():
        yield from _owners(child)


class PerSampleReductions(TorchFunctionMode):
    """A context in which losses of `torch.nn.functional` return one value per sample.

    The mean is over a sample's own entries: of `cross_entropy` over its targets that are not
    `ignore_index`, weighted by the weights of their classes if there are some; 0 without any; of
    `ctc_loss` over its targets.
    Inputs may be flattened, sample after sample: [B·T, V] beside targets [B·T]. What has another
    number of entries than a multiple of B is left as it is.

    Args:
        batch_size: called for B, the number of samples of the forward that runs.

    Attributes:
        count: reductions so far.
        made: their nodes in the graph.
    """

    def __init__(self, batch_size: Callable[[], int]):
        super().__init__()
        self._batch_size = batch_size
        self.count = 0
        self.made: list[Any] = []

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        signature = SIGNATURES.get(function)
        if signature is None:
            return function(*args, **(kwargs or {}))
        bound = signature.bind(*args, **(kwargs or {}))
        bound.apply_defaults()
        found = per_sample(function, bound.arguments, self._batch_size())
        if found is None:
            return function(*args, **(kwargs or {}))
        self.count += 1
        if not torch.compiler.is_compiling() and found.grad_fn is not None:
            self.made.append(found.grad_fn)
        return found


def per_sample(function: Any, arguments: dict[str, Any], batch_size: int) -> Tensor | None:
    """Returns a loss [B]; None: it is not reduced, or its entries are not those of B samples.

    Args:
        function: one of `SIGNATURES`.
        arguments: all of its arguments by name.
    """
    reduction = arguments["reduction"]
    if reduction not in ("mean", "sum") or arguments.get("size_average") is not None:
        return None
    losses = function(**{**arguments, "reduction": "none"})
    if not batch_size or losses.numel() % batch_size:
        return None
    total = losses.reshape(batch_size, -1).sum(1)
    if reduction == "sum":
        return total
    counted = _counted(function, arguments, losses).reshape(batch_size, -1).sum(1)
    return total / torch.where(counted > 0, counted, 1)


def _counted(function: Any, arguments: dict[str, Any], losses: Tensor) -> Tensor:
    """Returns how much each entry counts in a mean, in the shape of the losses."""
    if function is F.ctc_loss:
        return torch.as_tensor(arguments["target_lengths"], device=losses.device).to(losses)
    target = arguments["target"]
    if function not in OF_CLASSES or target.is_floating_point():
        return torch.ones_like(losses)
    counts = target != arguments["ignore_index"]
    weight = arguments["weight"]
    if weight is None:
        return counts.to(losses.dtype)
    return weight[target.where(counts, 0)].to(losses.dtype) * counts
