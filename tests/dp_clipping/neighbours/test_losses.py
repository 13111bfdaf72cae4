"""Each loss: of torch.nn, in a network, of preference pairs, of language models, of one's own."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dp_clipping.arguments.checks import LOSS_REDUCTIONS
from dp_clipping.integrations.preference_losses import LOSSES as OF_PAIRS
from dp_clipping.integrations.preference_losses import Pairs
from dp_clipping.losses.in_network import FUNCTIONS
from tests.dp_clipping.neighbours.replay import HOSTILE, Row, check, loss_of
from tests.support import zoo
from tests.support.language_models import LANGUAGE_MODELS, batch_of, language_model
from tests.support.turns import in_turn

UNITS, WIDTH, TOKENS, CLASSES, C = 5, 6, 4, 3, 0.5
Call = Callable[[SimpleNamespace, Any, Any], Any]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH))


def row(name: str, targets: Any, criterion: Any, loss: Call = loss_of, **more: Any) -> Row:
    """`targets`: of all units, a tensor or a tuple of tensors."""
    build, inputs = more.pop("build", network), more.pop("inputs", numbers(WIDTH))
    targets = targets if isinstance(targets, Tensor) else list(zip(*targets, strict=True))
    shared = {
        "sample_rate": 1.0, "steps": 1, "noise_multiplier": 1.0, "max_grad_norm": C,
        "expected_batch_size": 3, "grad_sample_mode": "bookkeeping", "criterion": criterion,
        "loss_reduction": getattr(criterion, "reduction", "mean"),
    }  # fmt: skip
    return Row(
        name, build, list(zip(inputs, targets, strict=True)), lambda: shared | more, loss=loss,
        removed=((UNITS - 1, 1.0), (UNITS - 1, HOSTILE)),
    )  # fmt: skip


def numbers(*shape: int) -> Tensor:
    return torch.randn(UNITS, *shape, generator=torch.Generator().manual_seed(2))


def whole(count: int, *shape: int) -> Tensor:
    return torch.randint(count, (UNITS, *shape), generator=torch.Generator().manual_seed(3))


def given(change: Callable[[Tensor], Any]) -> Call:
    """Returns a loss whose criterion is given what `change` makes of the outputs, and targets."""

    def loss(run: SimpleNamespace, x: Tensor, y: Any) -> Any:
        changed = change(run.model(x))
        changed = changed if isinstance(changed, tuple) else (changed,)
        return run.criterion(*changed, *(y if isinstance(y, (tuple, list)) else (y,)))

    return loss


def signs(*shape: int) -> Tensor:
    return whole(2, *shape) * 2 - 1


def halves(outputs: Tensor) -> tuple[Tensor, ...]:
    return outputs[:, :3], outputs[:, 3:]


def thirds(run: SimpleNamespace, x: Tensor, y: Tensor) -> Any:
    outputs = run.model(x)
    return run.criterion(outputs[:, :2], outputs[:, 2:4], outputs[:, 4:])


def of_sequences(outputs: Tensor) -> Tensor:
    """[T, B, classes]"""
    return outputs.view(-1, 2, CLASSES).transpose(0, 1).log_softmax(2)


LENGTHS = torch.full((UNITS,), 2), torch.full((UNITS,), 1)
PLAIN, LOGS = given(lambda outputs: outputs), given(lambda outputs: outputs.log_softmax(1))
OF_TORCH = {  # class -> targets, and how the criterion is called
    nn.L1Loss: (numbers(WIDTH), PLAIN),
    nn.MSELoss: (numbers(WIDTH), PLAIN),
    nn.SmoothL1Loss: (numbers(WIDTH), PLAIN),
    nn.HuberLoss: (numbers(WIDTH), PLAIN),
    nn.BCELoss: (whole(2, WIDTH).float(), given(torch.sigmoid)),
    nn.BCEWithLogitsLoss: (whole(2, WIDTH).float(), PLAIN),
    nn.CrossEntropyLoss: (whole(WIDTH), PLAIN),
    nn.NLLLoss: (whole(WIDTH), LOGS),
    nn.KLDivLoss: (numbers(WIDTH).softmax(1), LOGS),
    nn.PoissonNLLLoss: (whole(5, WIDTH).float(), PLAIN),
    nn.GaussianNLLLoss: ((numbers(WIDTH), numbers(WIDTH).square() + 1), PLAIN),
    nn.HingeEmbeddingLoss: (signs(WIDTH), PLAIN),
    nn.SoftMarginLoss: (signs(WIDTH).float(), PLAIN),
    nn.MultiLabelMarginLoss: (torch.tensor([[0, 3, -1, 1, 1, 1]] * UNITS), PLAIN),
    nn.MultiLabelSoftMarginLoss: (whole(2, WIDTH).float(), PLAIN),
    nn.MultiMarginLoss: (whole(WIDTH), PLAIN),
    nn.CosineEmbeddingLoss: (torch.ones(UNITS), given(halves)),
    nn.MarginRankingLoss: (signs(3), given(halves)),
    nn.TripletMarginLoss: (numbers(), thirds),
    nn.TripletMarginWithDistanceLoss: (numbers(), thirds),
    nn.CTCLoss: ((whole(2, 1) + 1, *LENGTHS), given(of_sequences)),
}
SIZES = {}
if LINEAR := getattr(nn, "LinearCrossEntropyLoss", None):  # from torch 2.13 on
    OF_TORCH[LINEAR] = whole(CLASSES), PLAIN
    SIZES[LINEAR] = WIDTH, CLASSES


def of_torch(kind: type[nn.Module], reduction: str) -> Row:
    targets, loss = OF_TORCH[kind]
    torch.manual_seed(1)
    criterion = kind(*SIZES.get(kind, ()), reduction=reduction)
    return row(f"{kind.__name__}, {reduction}", targets, criterion, loss)


BY_NAME = [pytest.param(kind, id=kind.__name__) for kind in OF_TORCH]


@pytest.mark.parametrize(("kind", "reduction"), in_turn(BY_NAME, list(LOSS_REDUCTIONS)))
def test_of_torch(kind, reduction):
    check(of_torch(kind, reduction))


def test_each_of_torch_is_here():
    losses = {
        kind for kind in vars(nn).values()
        if isinstance(kind, type) and issubclass(kind, nn.modules.loss._Loss)
    }  # fmt: skip
    old = {nn.NLLLoss2d}  # another name of NLLLoss
    assert losses - old == set(OF_TORCH)


# Computed in a network that is given labels


class WithLabels(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.network, self.function = network(), function

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.network(x)
        if self.function is F.nll_loss:
            outputs = outputs.log_softmax(1)
        if self.function is F.binary_cross_entropy:
            outputs = outputs.sigmoid()
        return self.function(outputs, labels), outputs


def in_network(run: SimpleNamespace, x: Tensor, y: Tensor) -> Any:
    return run.model(x, labels=y)[0]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_in_a_network(function):
    labels = whole(WIDTH) if function in (F.cross_entropy, F.nll_loss) else whole(2, WIDTH).float()
    check(row(
        function.__name__, labels, nn.CrossEntropyLoss(), in_network,
        build=partial(WithLabels, function),
    ))  # fmt: skip


def of_language(run: SimpleNamespace, x: Any, y: Any) -> Any:
    return run.model(**x).loss


@pytest.mark.slow
@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_of_a_language_model(kind):
    pytest.importorskip("transformers")
    batch = batch_of(kind, UNITS)
    inputs = [{name: value[i] for name, value in batch.items()} for i in range(UNITS)]
    check(row(
        kind, numbers(), nn.CrossEntropyLoss(), of_language, inputs=inputs,
        build=partial(language_model, kind), wrap_model=False,
    ))  # fmt: skip


# Of preference pairs


class OfPairs:
    """A loss of TRL's, of log ratios [pairs, 2]."""

    reduction = "mean"

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, outputs: Tensor, counts: Tensor) -> Tensor:
        chosen, rejected = outputs[:, 0], outputs[:, 1]
        losses = OF_PAIRS[self.name](
            Pairs(chosen, rejected, counts[:, 0], counts[:, 1], chosen - 1, 0.3, 0.1, 0.05)
        )
        return losses if self.reduction == "none" else losses.mean()


@pytest.mark.parametrize("name", OF_PAIRS)
def test_of_pairs(name):
    check(row(name, whole(9, 2) + 1, OfPairs(name)))


# Of one's own, and together


def per_sample(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum(1)


def words() -> nn.Module:
    """[B, T] ids -> [B, T, ids]."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WIDTH, 4), nn.Linear(4, WIDTH))


IDS = whole(WIDTH, TOKENS)
NEXT = IDS.roll(1, 1).index_fill(1, torch.tensor([2]), -100)
WORDS = {"build": words, "inputs": IDS}


def flattened(run: SimpleNamespace, x: Tensor, y: Tensor) -> Any:
    outputs = run.model(x)
    return run.criterion(outputs.flatten(0, 1), y.flatten(), shape=outputs.shape[:2])


def weighted_sum(run: SimpleNamespace, x: Tensor, y: Tensor) -> Any:
    """Two losses of one forward, and weights of samples."""
    outputs = run.model(x)
    weights = 0.5 + x[:, 0].abs()
    return run.criterion(outputs, y) * weights + 0.5 * run.criterion(outputs.tanh(), y)


OWN = {
    "own function": lambda: row("", numbers(WIDTH), per_sample),
    "own object": lambda: row("", numbers(WIDTH), zoo.Criterion(per_sample, "sum")),
    "partial": lambda: row("", whole(WIDTH), partial(F.cross_entropy, reduction="none")),
    "weights of classes": lambda: row(
        "", whole(WIDTH), nn.CrossEntropyLoss(weight=torch.arange(1.0, WIDTH + 1))
    ),
    "probabilities": lambda: row("", numbers(WIDTH).softmax(1), nn.CrossEntropyLoss()),
    "smoothing": lambda: row("", whole(WIDTH), nn.CrossEntropyLoss(label_smoothing=0.2)),
    "tokens": lambda: row(
        "", NEXT, nn.CrossEntropyLoss(),
        lambda run, x, y: run.criterion(run.model(x).transpose(1, 2), y), **WORDS,
    ),
    "tokens, sum": lambda: row(
        "", NEXT, nn.CrossEntropyLoss(reduction="sum"), flattened, **WORDS
    ),
    "tokens, flattened": lambda: row("", NEXT, nn.CrossEntropyLoss(), flattened, **WORDS),
    "several": lambda: row("", numbers(WIDTH), nn.MSELoss(), weighted_sum),
    "several, sum": lambda: row("", numbers(WIDTH), nn.MSELoss(reduction="sum"), weighted_sum),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN)
def test_of_ones_own(name):
    check(OWN[name]())
