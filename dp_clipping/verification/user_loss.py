"""The loss of a batch as the user's own code computes it, for checks and audits."""

from collections.abc import Callable, Sequence
from typing import Any

from dp_clipping.kinds import WrongType

Loss = Callable[[Any, Any, Any], Any]
"""`loss(model, criterion, batch)` -> what the criterion returns."""

EXAMPLE = 'loss=lambda model, criterion, batch: criterion(model(**batch).logits, batch["labels"])'


def loss_of(loss: Loss | None, model: Any, criterion: Any, batch: Any) -> Any:
    """Returns the user's loss of a batch; without `loss` the criterion's of a pair.

    Args:
        model: what `loss` is to call.
        criterion: a `PrivateCriterion`, which `loss` is to call too.

    Raises:
        ValueError: if there is no `loss` and the batch is no pair, or if it returns another object.
    """
    if loss is not None:
        found = loss(model, criterion, batch)
    elif isinstance(batch, Sequence) and len(batch) == 2:
        found = criterion(model(batch[0]), batch[1])
    else:
        raise ValueError(
            f"the batch is no pair of inputs and targets but a {type(batch).__name__}: say how its "
            f"loss is computed, as {EXAMPLE}"
        )
    if getattr(found, "model", None) is not criterion.model:
        raise WrongType(
            f"loss returned {type(found).__name__}: it must call the model and the criterion that "
            f"it is given, and return what that returns, as {EXAMPLE}"
        )
    return found
