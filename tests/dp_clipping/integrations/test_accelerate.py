"""The plain loop of accelerate: what `make_private` returns is ready, and is not prepared again."""

from contextlib import nullcontext

import pytest
import torch

accelerate = pytest.importorskip("accelerate")

from dp_clipping import BatchMemoryManager, PrivacyEngine  # noqa: E402
from tests.support.language_models import collated, language_model, samples_of  # noqa: E402


def parts() -> tuple:
    network = language_model("gpt2")
    loader = torch.utils.data.DataLoader(samples_of("gpt2", 24), batch_size=8, collate_fn=collated)
    return network, torch.optim.SGD(network.parameters(), lr=0.1), loader


def made_private(engine, network, optimizer, loader):
    model, optimizer, _, loader = engine.make_private(
        module=network, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0,
        max_grad_norm=1.0, wrap_model=False, grad_sample_mode="bookkeeping",
    )  # fmt: skip
    return model, optimizer, loader


@pytest.fixture
def accelerator():
    return accelerate.Accelerator(cpu=True)


def loop(accelerator, engine, accumulates: bool) -> list:
    """The documented loop, perhaps within `accumulate`; weights before and after it."""
    network, optimizer, loader = parts()
    before = [p.detach().clone() for p in network.parameters()]
    model, optimizer, loader = made_private(engine, network, optimizer, loader)
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=4, optimizer=optimizer
    ) as batches:
        for batch in batches:
            with accelerator.accumulate(model) if accumulates else nullcontext():
                with accelerator.autocast():
                    loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    assert engine.privacy_statement(1e-5).steps == len(loader)
    return [before, [p.detach().clone() for p in network.parameters()]]


@pytest.mark.parametrize("accumulates", [False, True])
def test_the_documented_loop(accelerator, accumulates):
    """Within `accumulate` of one step the gradient is whole too."""
    engine = PrivacyEngine(accountant="rdp")
    before, after = loop(accelerator, engine, accumulates)
    assert engine.privacy_statement(1e-5).steps == 3
    assert all((p != q).any() for p, q in zip(before, after, strict=True))


def test_an_accumulation_that_divides_is_refused():
    engine = PrivacyEngine(accountant="rdp")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    with pytest.raises(
        RuntimeError, match=r"gradient_accumulation_steps=2\) divides.*BatchMemoryManager\(data_lo"
    ):
        loop(accelerator, engine, True)
    assert engine.privacy_statement(1e-5).steps == 0


@pytest.mark.parametrize("which", [1, 2], ids=["optimizer", "loader"])
def test_preparing_again_is_refused(which, accelerator):
    private = made_private(PrivacyEngine(accountant="rdp"), *parts())
    with pytest.raises(RuntimeError, match=r"needs no accelerator\.prepare\(\)"):
        accelerator.prepare(private[which])


def test_what_was_prepared_before_is_refused(accelerator):
    prepared = accelerator.prepare(*parts())
    with pytest.raises(ValueError, match=r"give the optimizer itself"):
        made_private(PrivacyEngine(accountant="rdp"), *prepared)
