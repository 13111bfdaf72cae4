"""The plain loop of accelerate: what `make_private` returns is ready, and is not prepared again."""

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


def test_the_documented_loop(accelerator):
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = made_private(engine, *parts())
    before = [p.clone() for p in model.parameters()]
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=4, optimizer=optimizer
    ) as batches:
        for batch in batches:
            with accelerator.autocast():
                loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    assert engine.privacy_statement(1e-5).steps == len(loader) == 3
    assert all((p != q).any() for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("which", [1, 2], ids=["optimizer", "loader"])
def test_preparing_again_is_refused(which, accelerator):
    private = made_private(PrivacyEngine(accountant="rdp"), *parts())
    with pytest.raises(RuntimeError, match=r"needs no accelerator\.prepare\(\)"):
        accelerator.prepare(private[which])


def test_what_was_prepared_before_is_refused(accelerator):
    prepared = accelerator.prepare(*parts())
    with pytest.raises(ValueError, match=r"give the optimizer itself"):
        made_private(PrivacyEngine(accountant="rdp"), *prepared)


def loop(accelerator, engine) -> list:
    """The documented loop within `accumulate`; weights before and after it."""
    network, optimizer, loader = parts()
    before = [p.detach().clone() for p in network.parameters()]
    model, optimizer, loader = made_private(engine, network, optimizer, loader)
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=4, optimizer=optimizer
    ) as batches:
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
    return [before, [p.detach().clone() for p in network.parameters()]]


def accelerator_of(steps: int):
    return accelerate.Accelerator(cpu=True, gradient_accumulation_steps=steps)


@pytest.mark.parametrize("steps", [1, 2])
def test_accumulate(steps):
    """Also with one step the whole gradient: `accumulate` adds nothing to it."""
    engine = PrivacyEngine(accountant="rdp")
    accelerator = accelerator_of(steps)
    if steps == 1:
        before, after = loop(accelerator, engine)
        assert engine.privacy_statement(1e-5).steps == 3
        assert all((p != q).any() for p, q in zip(before, after, strict=True))
        return
    with pytest.raises(
        RuntimeError, match=r"gradient_accumulation_steps=2\) divides.*BatchMemoryManager\(data_lo"
    ):
        loop(accelerator, engine)
    assert engine.privacy_statement(1e-5).steps == 0
