"""`model(**batch).loss.backward()`: each sample's gradient is the one that it has alone."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dp_clipping import PrivacyEngine
from dp_clipping.losses.private_loss import PrivateLoss
from tests.support.language_models import (
    LANGUAGE_MODELS,
    batch_of,
    language_model,
    reference_gradients,
)

PIECES = [2, 3]  # samples of two microbatches


def made_private(network, C=0.5, **options):
    engine = PrivacyEngine(accountant="rdp")
    data = [{"x": torch.zeros(1)}] * 5
    loader = torch.utils.data.DataLoader(data, batch_size=5)
    model, optimizer, *_ = engine.make_private(
        module=network, optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
        data_loader=loader, noise_multiplier=0.0, max_grad_norm=C, poisson_sampling=False,
        **{"wrap_model": False, "grad_sample_mode": "bookkeeping", **options},
    )  # fmt: skip
    return model, optimizer


@pytest.mark.filterwarnings("ignore:poisson_sampling")
@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
@pytest.mark.parametrize("wrap_model", [False, True])
def test_gradients_are_those_of_single_samples(kind, wrap_model):
    network = language_model(kind)
    plain, batch = copy.deepcopy(network), batch_of(kind, 5)
    model, optimizer = made_private(network, wrap_model=wrap_model)
    outputs = model(**batch, num_items_in_batch=torch.tensor(3))
    assert isinstance(outputs.loss, PrivateLoss)
    outputs.loss.backward()
    norms, expected = reference_gradients(plain, batch, C=0.5)
    torch.testing.assert_close(
        optimizer.model.per_sample_gradient_norms.double(), norms, rtol=1e-4, atol=1e-6
    )
    optimizer.step()
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(
            parameter.grad.double(), expected[name] / 5, rtol=1e-4, atol=1e-6, msg=name
        )


@pytest.mark.filterwarnings("ignore:poisson_sampling")
def test_printed_it_is_the_mean_over_samples_and_evaluation_is_the_networks_own():
    network, batch = language_model("gpt2"), batch_of("gpt2", 5)
    plain = copy.deepcopy(network)
    model, _ = made_private(network)
    losses = [plain(**{k: v[i : i + 1] for k, v in batch.items()}).loss for i in range(5)]
    loss = model(**batch).loss
    torch.testing.assert_close(loss.detach(), torch.stack(losses).mean().detach())
    model.eval()
    torch.testing.assert_close(model(**batch).loss, plain(**batch).loss)
    assert "_loss_function" not in vars(network)


@pytest.mark.filterwarnings("ignore:poisson_sampling")
@pytest.mark.parametrize("form", ["tuple", "dict", "object"])
def test_any_network_that_is_given_labels(form):
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x, labels):
            y = self.linear(x)
            loss = F.cross_entropy(y, labels)
            return {"tuple": (loss, y), "dict": {"loss": loss, "y": y},
                    "object": SimpleNamespace(loss=loss)}[form]  # fmt: skip

    model, _ = made_private(Network(), C=1.0)
    out = model(x=torch.randn(4, 3), labels=torch.tensor([0, 1, 1, 0]))
    loss = out[0] if form == "tuple" else out["loss"] if form == "dict" else out.loss
    loss.backward()
    assert model.linear.weight.grad is not None


@pytest.mark.filterwarnings("ignore:poisson_sampling")
def test_a_loss_that_sees_other_samples_is_refused():
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x, labels):
            y = self.linear(x)
            weight = torch.bincount(labels, minlength=2).to(y) + 1
            return {"loss": F.cross_entropy(y, labels) * weight.mean() * y.std(), "y": y}

    model, _ = made_private(Network())
    with pytest.raises(ValueError, match="depends on"):
        model(x=torch.randn(4, 3), labels=torch.tensor([0, 1, 1, 0]))


@pytest.mark.filterwarnings("ignore:poisson_sampling")
def test_a_loss_of_other_arithmetic_says_which_call_works():
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x, labels):
            y = self.linear(x)
            return SimpleNamespace(loss=-y.log_softmax(1).gather(1, labels[:, None]).mean())

    model, _ = made_private(Network())
    loss = model(x=torch.randn(4, 3), labels=torch.tensor([0, 1, 1, 0])).loss
    with pytest.raises(RuntimeError, match=r"loss = criterion\(model\(\*\*batch\)"):
        loss.backward()
