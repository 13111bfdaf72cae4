"""Norms and clipped sums of every network of the zoo, beside one backward per sample."""

import functools
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dp_clipping import PrivacyEngine
from dp_clipping.clipping.coefficients import LOWEST
from dp_clipping.step.private_step import PrivateStep
from dp_clipping.verification import reference as oracle
from tests.dp_clipping.conftest import (
    MODES,
    assert_close,
    assert_exact,
    change_policy,
    clipped_sums,
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


@zoo.every_case
def test_the_graph_of_a_step_ends_at_triggers(case):
    """Any other leaf keeps the stream of its first use: no CUDA graph could be captured."""
    network = case.build()
    with refusals(case, network):
        model = private(network)
        loss = private_loss(model, case.batch(zoo.SIZE), case.per_sample_loss)
        triggers = {id(trigger) for trigger in model.capture.triggers.values()}
        nodes, seen, others = [loss._losses.grad_fn], set(), []
        while nodes:
            node = nodes.pop()
            if node is not None and node not in seen:
                seen.add(node)
                nodes += [following for following, _ in node.next_functions]
                if hasattr(node, "variable") and id(node.variable) not in triggers:
                    others.append(node.variable)
        loss.backward()  # refuses a network whose code computes with a weight itself
        assert not others


@zoo.every_case
@every_mode
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_every_network(case, mode, clipping):
    """Both clipping functions meet both batch sizes, as they have norms only to work on: the other
    way round in the other style.

    Whether samples see each other does not depend on the style, and is looked for in one.
    """
    functions = ("abadi", "automatic")[:: 1 if clipping == "flat" else -1]
    network = case.build().double()
    with refusals(case, network):
        model = private(network, mode, clipping=clipping)
        if clipping == "per_layer" and not case.or_refused:
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


@zoo.every_case
def test_float32(case):
    expected = reference(case.name, zoo.SIZE, torch.float32)
    limit = middle(oracle.norms(expected))
    network = case.build()
    with refusals(case, network):
        model = private(network, "bookkeeping", limit)
        sums = clipped_sums(model, case.batch(zoo.SIZE), case.per_sample_loss)
        norms = model.per_sample_gradient_norms
        assert norms.dtype == torch.float32
        torch.testing.assert_close(
            norms.double(), oracle.norms(expected), rtol=1e-5, atol=float(1e-6 * limit)
        )
        assert_close(sums, oracle.clipped_sum(expected, limit), 4e-5)


HALVES = ["mlp", "tokens", "half_frozen", "transformer", "transformer_tied", "same_weight"]
HALVES += ["reused", "flattened", "time_major", "padding_idx_tied", "positions_batch_of_one"]
HALVES += ["layer_norm", "rms_norm", "conv2d", "group_norm", "llama_lm", "gpt2_lm", "bert_labels"]
HALVES += ["lora_lm"]


@pytest.mark.parametrize("case", zoo.parameters(*HALVES))
@every_mode
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit(case, mode, dtype):
    """Against the float64 gradients of the network with the same, rounded parameters."""
    expected = reference(case.name, zoo.SIZE, dtype)
    limit = middle(oracle.norms(expected))
    model = private(case.build().to(dtype), mode, limit)
    if mode != "bookkeeping":  # samples that see each other are looked for in one mode
        skip_all_checks(model)
    batch = oracle.move(case.batch(zoo.SIZE), dtype=dtype)
    sums = clipped_sums(model, batch, case.per_sample_loss)
    norms = model.per_sample_gradient_norms
    assert norms.dtype == torch.float32
    assert {g.dtype for g in sums.values()} == {torch.float32}
    torch.testing.assert_close(norms.double(), oracle.norms(expected), rtol=3e-2, atol=0)
    assert_close(sums, oracle.clipped_sum(expected, limit), 3e-2)


@pytest.mark.parametrize("case", zoo.parameters(*HALVES))
@every_mode
def test_autocast(case, mode):
    expected = reference(case.name, zoo.SIZE, torch.float32)
    limit = middle(oracle.norms(expected))
    model = private(case.build(), mode, limit)
    if mode != "bookkeeping":
        skip_all_checks(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = private_loss(model, case.batch(zoo.SIZE), case.per_sample_loss)
    loss.backward()
    norms = model.per_sample_gradient_norms
    assert norms.dtype == torch.float32
    torch.testing.assert_close(norms.double(), oracle.norms(expected), rtol=3e-2, atol=0)
    sums = gradients_of(model)
    assert {g.dtype for g in sums.values()} == {torch.float32}
    assert_close(sums, oracle.clipped_sum(expected, limit), 3e-2)


@zoo.every_case
def test_outputs_are_the_networks_own(case):
    network = case.build()
    inputs, _ = case.batch(zoo.SIZE)
    expected = oracle.forward(network, inputs)
    with refusals(case, network):
        actual = oracle.forward(private(network), inputs)
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", zoo.parameters(*HALVES))
@pytest.mark.parametrize("how", ["bfloat16", "autocast"])
def test_outputs_are_the_networks_own_in_16_bit(case, how):
    dtype = torch.bfloat16 if how == "bfloat16" else torch.float32
    network = case.build().to(dtype)
    inputs = oracle.move(case.batch(zoo.SIZE)[0], dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        expected = oracle.forward(network, inputs)
        actual = oracle.forward(private(network), inputs)
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)


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
