"""Code written for Opacus's ghost mode, with the import changed: the same norms and `.grad`.

Where Opacus is right.
"""

import importlib
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support import zoo

pytestmark = [
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:Secure RNG turned off"),
    pytest.mark.filterwarnings("ignore:Optimal order is the"),
    pytest.mark.filterwarnings("ignore:poisson_sampling=False"),
]

B, LIMIT = 4, 0.4


@dataclass
class Trained:
    """What two steps showed."""

    losses: list[float]
    norms: list[Tensor]
    gradients: list[dict[str, Tensor]]
    parameters: list[Tensor]
    epsilon: float


def train(
    library: str, net: nn.Module, data: TensorDataset, criterion, mode="ghost", sigma=0.0, **options
):
    """A user's code; `shape=` where the targets are flattened."""
    PrivacyEngine = importlib.import_module(library).PrivacyEngine
    names = {p: name for name, p in net.named_parameters() if p.requires_grad}
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, criterion, loader = engine.make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=B),
        criterion=criterion,
        noise_multiplier=sigma,
        max_grad_norm=LIMIT,
        grad_sample_mode=mode,
        loss_reduction=criterion.reduction,
        poisson_sampling=False,
        **options,
    )
    seen = Trained([], [], [], [], 0.0)
    for inputs, targets in loader:
        optimizer.zero_grad()
        outputs = model(inputs)
        if targets.dim() > 1 and not targets.is_floating_point():
            loss = criterion(outputs.flatten(0, 1), targets.flatten(), shape=outputs.shape)
        else:
            loss = criterion(outputs, targets)
        loss.backward()
        seen.losses.append(loss.item())
        seen.norms.append(model.per_sample_gradient_norms.detach().clone())
        optimizer.step()
        seen.gradients.append({name: p.grad.detach().clone() for p, name in names.items()})
    seen.parameters = [p.detach().clone() for p in net.parameters()]
    seen.epsilon = engine.get_epsilon(delta=1e-5)
    return seen


def language(count: int) -> tuple[Tensor, Tensor]:
    ids, targets = zoo.tokens(count)
    targets = targets.clone()
    targets[:, 4:] = -100
    targets[1] = -100  # one sample with no target at all
    return ids.where(ids != zoo.PAD, 1), targets


def language_model() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(zoo.VOCABULARY, 8),
        nn.LayerNorm(8),
        nn.Linear(8, 12),
        nn.GELU(),
        nn.Linear(12, zoo.VOCABULARY, bias=False),
    )


CASES = {  # of layers each: `test_opacus_suite.py`
    "mlp": (lambda: zoo.mlp(6, 8, 3), lambda n: zoo.classes(n, 6), nn.CrossEntropyLoss),
    "ignore_index": (language_model, language, nn.CrossEntropyLoss),
    "half_frozen": (zoo.half_frozen, lambda n: zoo.classes(n, 6), nn.CrossEntropyLoss),
}


@pytest.mark.parametrize(
    ("name", "reduction"),
    [
        pytest.param(name, reduction, marks=[] if (n + m) % 2 else [pytest.mark.slow])
        for n, name in enumerate(CASES)
        for m, reduction in enumerate(("mean", "sum"))
    ],
)
def test_with_the_import_changed(name, reduction):
    build, batch, criterion = CASES[name]
    data = TensorDataset(*batch(2 * B))
    theirs = train("opacus", zoo.seeded(build), data, criterion(reduction=reduction))
    for mode in ("ghost", "flash", "flash_bookkeeping"):
        ours = train("dp_clipping", zoo.seeded(build), data, criterion(reduction=reduction), mode)
        assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
        for rtol, mine, other in zip((1e-5, 1e-4), ours.norms, theirs.norms, strict=True):
            torch.testing.assert_close(mine, other, rtol=rtol, atol=1e-6)
        for mine, other in zip(ours.gradients, theirs.gradients, strict=True):
            assert list(mine) == list(other)
            for parameter in mine:
                torch.testing.assert_close(
                    mine[parameter], other[parameter], rtol=1e-4, atol=4e-5 * LIMIT
                )
        for mine, other in zip(ours.parameters, theirs.parameters, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    assert any((n > LIMIT).any() for n in theirs.norms)


def test_the_divisor_is_the_loaders_batch_size():
    """Opacus divides by int(N / batches), which a last, smaller batch makes too small."""
    data = TensorDataset(*zoo.classes(2 * B + 2, 6))
    build = lambda: zoo.mlp(6, 8, 3)  # noqa: E731
    theirs = train("opacus", zoo.seeded(build), data, nn.CrossEntropyLoss())
    ours = train("dp_clipping", zoo.seeded(build), data, nn.CrossEntropyLoss())
    same = train(
        "dp_clipping", zoo.seeded(build), data, nn.CrossEntropyLoss(), expected_batch_size=3
    )
    for name, g in theirs.gradients[0].items():
        torch.testing.assert_close(same.gradients[0][name], g, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours.gradients[0][name], g * 3 / B, rtol=1e-4, atol=1e-5)
