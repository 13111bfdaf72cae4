"""The plain loop of accelerate: what `make_private` returns is ready, and is not prepared again."""

import pytest
import torch

accelerate = pytest.importorskip("accelerate")

from ddp import wrap  # noqa: E402
from dp_clipping import BatchMemoryManager, PrivacyEngine  # noqa: E402
from tests.dp_clipping.integrations.conftest import as_launched  # noqa: E402
from tests.support.language_models import collated, language_model, samples_of  # noqa: E402


def parts() -> tuple:
    network = language_model("gpt2")
    loader = torch.utils.data.DataLoader(samples_of("gpt2", 24), batch_size=8, collate_fn=collated)
    return network, torch.optim.SGD(network.parameters(), lr=0.1), loader


def made_private(engine, network, optimizer, loader, **options):
    model, optimizer, _, loader = engine.make_private(
        module=network, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0,
        max_grad_norm=1.0, wrap_model=False, grad_sample_mode="bookkeeping", **options,
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


# ---- accumulation, and several ranks -------------------------------------------------------------


def loop(accelerator, engine, wrapped=lambda network: network, **options) -> list:
    """The documented loop within `accumulate`; weights before and after it."""
    network, optimizer, loader = parts()
    before = [p.detach().clone() for p in network.parameters()]
    model, optimizer, loader = made_private(engine, wrapped(network), optimizer, loader, **options)
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


def on_ranks(context) -> list:
    as_launched(context)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerator_of(1)
    assert accelerator.num_processes == context.world_size
    network, optimizer, loader = parts()
    with pytest.raises((RuntimeError, ValueError), match=r"ddp\.wrap"):
        made_private(PrivacyEngine(), accelerator.prepare(network), optimizer, loader)
    options = {"noise_generator": torch.Generator().manual_seed(5)}
    _, after = loop(
        accelerator, PrivacyEngine(accountant="rdp"), lambda n: wrap("ddp_bucketed", n), **options
    )
    return [p.numpy() for p in after]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:noise and sampling come from a fixed seed")
def test_ranks_take_the_steps_of_one_process(cpu_ranks, accelerator):
    options = {"noise_generator": torch.Generator().manual_seed(5)}
    _, expected = loop(accelerator, PrivacyEngine(accountant="rdp"), **options)
    for found in cpu_ranks.run(4, on_ranks):
        for p, q in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.from_numpy(p), q)
