"""Norms and clipped sums of every network of the zoo, beside one backward per sample."""

import functools
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dp_clipping import PrivacyEngine
from dp_clipping.clipping.coefficients import LOWEST
from dp_clipping.criterion import PrivateLoss
from dp_clipping.step.private_step import PrivateStep
from dp_clipping.verification import reference as oracle
from tests.dp_clipping.conftest import (
    MODES,
    assert_close,
    assert_exact,
    change_policy,
    clipped_sums,
    criterion_of,
    gradients_of,
    private,
    private_loss,
    skip_all_checks,
)
from tests.support import zoo

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),
]

every_mode = pytest.mark.parametrize("mode", MODES)


@functools.cache
def reference(name: str, batch_size: int, dtype: torch.dtype = torch.float64) -> oracle.Gradients:
    """Float64 gradients of the network and the batch as they are after rounding to `dtype`."""
    case = zoo.BY_NAME[name]
    model = case.build().to(dtype)
    batch = oracle.move(case.batch(batch_size), dtype=dtype)
    return oracle.per_sample_gradients(model, batch, case.per_sample_loss)


def middle(norms: torch.Tensor) -> float:
    """A threshold that clips some samples and not others; of one sample, that clips it."""
    ordered = norms.double().sort().values
    if len(ordered) == 1:
        return 0.7 * float(ordered[0]) or 1.0
    return float(ordered[len(ordered) // 2 - 1 : len(ordered) // 2 + 1].mean()) or 1.0


def limits_of(gradients: oracle.Gradients, clipping: str) -> float | list[float]:
    if clipping == "flat":
        return middle(oracle.norms(gradients))
    groups = oracle.module_groups(list(gradients))
    norms = (oracle.norms({n: gradients[n] for n in group}) for group in groups)
    return [max(middle(n), LOWEST) for n in norms]


@contextmanager
def refusals(case: zoo.Case, model: nn.Module):
    """An error is right where the zoo says so, and names a module or a parameter."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        names = [n for n, _ in (*model.named_modules(), *model.named_parameters()) if n]
        if not case.or_refused or not any(name in str(error) for name in names):
            raise


def step_in_float64(model, case, batch_size):
    batch = oracle.move(case.batch(batch_size), dtype=torch.float64)
    model.clear_gradients()
    with oracle.Widened(torch.float64):
        loss = private_loss(model, batch, case.per_sample_loss)
    loss.backward()
    return model.per_sample_gradient_norms, gradients_of(model)


def in_every_mode() -> list:
    """Every network in every mode, and in one mode, that changes with the network, by layers.

    The style decides which norms and coefficients belong together, whatever computes them.
    """
    found = []
    for number, case in enumerate(zoo.parameters()):
        styles = [("flat", mode) for mode in MODES] + [("per_layer", MODES[number % len(MODES)])]
        for style, mode in styles:
            name = f"{style}-{mode}-{case.id}"
            found.append(pytest.param(*case.values, mode, style, id=name, marks=case.marks))
    return found


@pytest.mark.parametrize(("case", "mode", "clipping"), in_every_mode())
def test_every_network(case, mode, clipping):
    """Both clipping functions meet both batch sizes, as they have norms only to work on: the other
    way round in the other style.

    Whether samples see each other depends neither on the mode nor on the style, and is looked for
    once.
    """
    functions = ("abadi", "automatic")[:: 1 if clipping == "flat" else -1]
    network = case.build().double()
    with refusals(case, network):
        model = private(network, mode, clipping=clipping)
        if (clipping, mode) != ("flat", "bookkeeping") and not case.or_refused:
            skip_all_checks(model)
        for batch_size, function in zip((zoo.SIZE, 1), functions, strict=True):
            expected = reference(case.name, batch_size)
            clip_norms = limits_of(expected, clipping)
            model.thresholds.set(clip_norms)
            change_policy(model, clipping_function=function)
            norms, sums = step_in_float64(model, case, batch_size)
            torch.testing.assert_close(norms, oracle.norms(expected), rtol=1e-9, atol=1e-12)
            assert_close(sums, oracle.clipped_sum(expected, clip_norms, clipping, function), 1e-9)


@zoo.every_case
def test_the_thresholds_clip_some_samples_and_not_others(case):
    """Or the tests above would not tell."""
    expected = reference(case.name, zoo.SIZE)
    c = oracle.coefficients(expected, limits_of(expected, "flat"))
    values = next(iter(c.values()))
    assert (values < 1).any()
    assert (values == 1).any()


def test_only_what_may_be_refused_is():
    """Which networks are handled is part of the contract: it only grows."""
    refused = []
    for case in zoo.CASES:
        if not case.or_refused or case.needs:
            continue
        try:
            step_in_float64(private(case.build().double()), case, zoo.SIZE)
        except (ValueError, RuntimeError):
            refused.append(case.name)
    assert set(refused) <= {"routed", "embedding_as_head"}


@every_mode
def test_per_layer_thresholds_are_equal_shares_of_the_whole(mode):
    """C / √K each."""
    case = zoo.BY_NAME["transformer"]
    expected = reference("transformer", zoo.SIZE)
    limit = middle(oracle.norms(expected))
    model = private(case.build().double(), mode, limit, "per_layer")
    _, sums = step_in_float64(model, case, zoo.SIZE)
    assert_close(sums, oracle.clipped_sum(expected, limit, "per_layer"), 1e-9)
    assert sum(c * c for c in model.thresholds.clip_norms()) == pytest.approx(limit**2)


def step_with_outputs(model, case, batch) -> tuple[torch.Tensor, PrivateLoss]:
    """Returns what a forward returned, and its loss."""
    outputs = oracle.forward(model, batch[0])
    return outputs, criterion_of(model, case.per_sample_loss)(outputs, batch[1])


def leaves_of(loss: PrivateLoss) -> dict[int, torch.Tensor]:
    """Returns the leaves of the graph of a loss, by their ids."""
    nodes, seen, leaves = [loss._losses.grad_fn], set(), {}
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
            if hasattr(node, "variable"):
                leaves[id(node.variable)] = node.variable
    return leaves


@zoo.every_case
def test_a_step_in_float32(case):
    """Outputs are the network's own, and norms and sums are right.

    The graph ends at triggers: any other leaf keeps the stream of its first use, and no CUDA graph
    could be captured.
    """
    expected = reference(case.name, zoo.SIZE, torch.float32)
    limit = middle(oracle.norms(expected))
    network, batch = case.build(), case.batch(zoo.SIZE)
    own = oracle.forward(network, batch[0])
    with refusals(case, network):
        model = private(network, "bookkeeping", limit)
        if not case.or_refused:  # samples that see each other are looked for in float64
            skip_all_checks(model)
        outputs, loss = step_with_outputs(model, case, batch)
        others = leaves_of(loss).keys() - {id(p.trigger) for p in model.capture.trained}
        loss.backward()  # refuses a network whose code computes with a weight itself
        assert not others
        torch.testing.assert_close(outputs, own, rtol=1e-6, atol=1e-6)
        norms = model.per_sample_gradient_norms
        assert norms.dtype == torch.float32
        torch.testing.assert_close(
            norms.double(), oracle.norms(expected), rtol=1e-5, atol=float(1e-6 * limit)
        )
        assert_close(gradients_of(model), oracle.clipped_sum(expected, limit), 4e-5)


HALVES = ["mlp", "tokens", "half_frozen", "transformer", "transformer_tied", "same_weight"]
HALVES += ["reused", "flattened", "time_major", "padding_idx_tied", "positions_batch_of_one"]
HALVES += ["layer_norm", "rms_norm", "conv2d", "group_norm", "llama_lm", "gpt2_lm", "bert_labels"]
HALVES += ["lora_lm", "rms_norms"]


def check_in_16_bit(case: zoo.Case, mode: str, dtype: torch.dtype, autocast: bool) -> None:
    """Compares with the float64 gradients of the network with the same, rounded parameters."""
    expected = reference(case.name, zoo.SIZE, dtype)
    limit = middle(oracle.norms(expected))
    network = case.build().to(dtype)
    batch = oracle.move(case.batch(zoo.SIZE), dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        own = oracle.forward(network, batch[0])
        model = private(network, mode, limit)
        if mode != "bookkeeping":  # samples that see each other are looked for in one mode
            skip_all_checks(model)
        outputs, loss = step_with_outputs(model, case, batch)
    loss.backward()
    assert outputs.dtype == own.dtype
    torch.testing.assert_close(outputs, own, rtol=1e-2, atol=1e-2)
    norms, sums = model.per_sample_gradient_norms, gradients_of(model)
    assert norms.dtype == torch.float32
    assert {g.dtype for g in sums.values()} == {torch.float32}
    torch.testing.assert_close(norms.double(), oracle.norms(expected), rtol=3e-2, atol=0)
    assert_close(sums, oracle.clipped_sum(expected, limit), 3e-2)


@pytest.mark.parametrize("case", zoo.parameters(*HALVES))
@every_mode
def test_16_bit(case, mode):
    """Each network has both types, as has each mode."""
    number = HALVES.index(case.name) + MODES.index(mode)
    check_in_16_bit(case, mode, (torch.bfloat16, torch.float16)[number % 2], autocast=False)


@pytest.mark.parametrize("case", zoo.parameters(*HALVES))
@every_mode
def test_autocast(case, mode):
    check_in_16_bit(case, mode, torch.float32, autocast=True)


def test_rms_norm_without_eps_has_pytorchs_own():
    """Float32's, whatever the dtype of the input, which shows on small ones."""
    norm = nn.RMSNorm(6).bfloat16()
    inputs = (0.01 * zoo.numbers(4, 5, 6, out=())[0]).bfloat16()
    expected = norm(inputs)
    torch.testing.assert_close(private(norm)(inputs), expected, rtol=1e-2, atol=0)


# Weights with several uses


class Repeated(nn.Module):
    """A layer that is called `times` times, and another one with the same weight."""

    def __init__(self, times: int, width: int = 6) -> None:
        super().__init__()
        self.layer, self.times = nn.Linear(width, width), times
        self.other = nn.Linear(width, width, bias=False)
        self.other.weight = self.layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.layer(x))
        return self.other(x)


@pytest.mark.parametrize("tokens", [1, 5])
@every_mode
def test_factors_of_several_uses_are_joined(tokens, mode, monkeypatch):
    torch.manual_seed(0)
    network = Repeated(3).double()
    x = torch.randn(4, tokens, 6, dtype=torch.float64)
    given = []
    joined = PrivateStep.joined
    monkeypatch.setattr(PrivateStep, "joined", lambda *a: given.append(a[1]) or joined(*a))
    assert_exact(network, (x, torch.randn_like(x)), mode)
    assert len(given) == {"per_sample": 0, "ghost": 2, "bookkeeping": 1}[mode]


def test_the_number_of_uses_may_change():
    network = Repeated(2).double()
    model = private(network, max_grad_norm=1e-3)
    x = torch.randn(4, 6, dtype=torch.float64)
    for times in (2, 5, 1):
        network.times = times
        found = clipped_sums(model, (x, x))
        gradients = oracle.per_sample_gradients(network, (x, x), zoo.product)
        assert_close(found, oracle.clipped_sum(gradients, 1e-3), 1e-9)


# Through the front door


@pytest.mark.filterwarnings("ignore:poisson_sampling=False")
@pytest.mark.parametrize("name", ["mlp", "tokens", "layer_norm", "padding_idx_tied"])
@pytest.mark.parametrize("mode", [*MODES, "flash", "flash_bookkeeping"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_through_the_engine(name, mode, reduction):
    case = zoo.BY_NAME[name]
    size = 2 * zoo.SIZE
    expected = reference(name, size)
    limit = middle(oracle.norms(expected))
    network = case.build().double()
    parameters = {n: p for n, p in network.named_parameters() if p.requires_grad}
    before = {n: p.detach().clone() for n, p in parameters.items()}
    batch = oracle.move(case.batch(size), dtype=torch.float64)
    model, optimizer, criterion, loader = PrivacyEngine().make_private(
        module=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=0.5),
        criterion=zoo.Criterion(case.per_sample_loss, reduction),
        data_loader=DataLoader(TensorDataset(*batch), batch_size=size),
        noise_multiplier=0.0,
        max_grad_norm=limit,
        loss_reduction=reduction,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    for inputs, targets in loader:
        criterion(model(inputs), targets).backward()
        optimizer.step()
    divisor = size if reduction == "mean" else 1
    applied = {n: g / divisor for n, g in oracle.clipped_sum(expected, limit).items()}
    assert_close({n: p.grad for n, p in parameters.items()}, applied, 1e-6)
    moved = {n: (before[n] - p.detach()) / 0.5 for n, p in parameters.items()}
    assert_close(moved, applied, 1e-6)
    torch.testing.assert_close(model.per_sample_gradient_norms, oracle.norms(expected))
